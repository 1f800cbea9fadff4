"""What parent and child say to each other: one request down, JSON lines up."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

from pydantic import Field

from packmule.errors import PackmuleError
from packmule.spec.plan import Precision
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
        import_path: where a user's own modules are looked for besides the usual places.
        val_size: share or number of samples of a user's own data set that are held out.
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
    import_path: tuple[str, ...] = ()
    val_size: float = 0.0


class GaugeRequest(Record):
    """What packmule.train.gauge is to build and measure.

    Attributes:
        model, dataset: `module:function` of each.
        rows: sizes of micro-batches.
        ram_bytes: what that process may hold; larger micro-batches are left out.
        import_path: where the caller imports from.
        validation: `module:function` of the samples to evaluate on; None where some are held out.
    """

    model: str
    arguments: dict[str, Any]
    dataset: str
    dataset_arguments: dict[str, Any]
    precision: Precision
    rows: tuple[int, ...]
    seed: int
    threads: int
    ram_bytes: int
    import_path: tuple[str, ...]
    validation: str | None = None
    validation_arguments: dict[str, Any] = Field(default_factory=dict)


class Sender:
    """The child's end: each event is one JSON object on one line, with its name under "event"."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def send(self, event: str, **fields: Any) -> None:
        """Send now. Nothing happens where the parent is gone: the child still has state to commit."""
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(json.dumps({"event": event, **fields}) + "\n")
            self._stream.flush()

    def fail(self, error: PackmuleError) -> None:
        """Say how it failed."""
        fields = {"kind": type(error).__name__, "cause": error.cause, "hint": error.hint}
        self.send("error", **fields, exit_code=error.exit_code)


def serve(work: Callable[[str, Sender], None]) -> int:
    """Do `work(request line, sender)`, which may raise a PackmuleError; then send "end".

    Whatever else is printed meanwhile, as by a user's modules, goes to standard error.
    """
    sender = Sender(sys.stdout)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            work(sys.stdin.readline(), sender)
        except PackmuleError as error:
            sender.fail(error)
    sender.send("end")
    return 0


def parse_event(line: str) -> dict[str, Any] | None:
    """The event on a line, or None for anything else a library may have printed."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
