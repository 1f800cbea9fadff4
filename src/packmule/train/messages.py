"""What parent and child say to each other: one request down, JSON lines up."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Literal, TextIO

from packmule.spec.records import Record


class Request(Record):
    """What a child is asked to do; the first line of its standard input.

    Attributes:
        work: train, evaluate or generate.
        folder: the run; its config.yaml, plan.json and probe.json say the rest.
        state: the folder whose HEAD.json is read (a snapshot, for evaluate and generate).
        data: the prepared data folder.
        ram_bytes: what this process may hold resident.
        total_steps: of the run.
        sample_ids: the prompt, as token ids; empty: no samples.
        positions: of a generated text, prompt included.
        evaluation_rows: rows of each evaluation set to judge on, in the order of the data folder.
        mean_length: tokens per document, weighted by tokens.
        plan: how to evaluate or generate (training's is in the folder).
        weights: the state that a fresh run takes its weights from; empty: what model/ says.
        begin_with: the state of another run that this one begins with; empty: none.
        data_key, data_cursor, data_tokens: as in a commit.
        seconds: after which no further step is begun; null: no limit.
        changed: what differs from the run so far, as sentences for the log.
    """

    work: Literal["train", "evaluate", "generate"]
    folder: str
    state: str
    data: str
    ram_bytes: int
    total_steps: int = 0
    sample_ids: tuple[int, ...] = ()
    positions: int = 0
    evaluation_rows: tuple[int, ...] = ()
    mean_length: float = 1.0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    plan: dict[str, Any] | None = None
    weights: str = ""
    begin_with: str = ""
    data_key: str = ""
    data_cursor: int = 0
    data_tokens: int = 0
    seconds: float | None = None
    changed: tuple[str, ...] = ()


class Sender:
    """The child's end: each event is one JSON object on one line, with its name under "event"."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def send(self, event: str, **fields: Any) -> None:
        """Send now. Nothing happens where the parent is gone: the child still has state to commit."""
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(json.dumps({"event": event, **fields}) + "\n")
            self._stream.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """The event on a line, or None for anything else a library may have printed."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
