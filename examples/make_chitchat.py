"""Writes data/chitchat.jsonl: conversations of two people, as messages of user and assistant.

They come inside the PyPI package chitchat-dataset (MIT). Only its dataset.json is read; the package is
never imported. That file is one object of conversations by id, whose messages are lists of utterances,
each with the id of its sender: no other data set has this shape, so Packmule does not read it by itself.
Usage: python examples/make_chitchat.py [TARGET [DATASET_JSON]]
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

PACKAGE = "chitchat_dataset"
COMMAND = "pip install --no-deps chitchat-dataset==0.9.0"
TARGET = Path("data/chitchat.jsonl")


def find_json() -> Path | None:
    """The data of the installed package, or None."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for folder in folders for path in Path(folder).glob("dataset.json")), None)


def messages(turns: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """One conversation: who speaks first is the user; what one says at a stretch is one message."""
    said = [utterance for turn in turns for utterance in turn]
    found = [
        {
            "role": "user" if sender == said[0]["sender"] else "assistant",
            "content": " ".join(one["text"] for one in utterances),
        }
        for sender, utterances in groupby(said, key=lambda one: one["sender"])
    ]
    return found if len(found) > 1 else []  # nobody answered


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    target = Path(arguments[0]) if arguments else TARGET
    source = Path(arguments[1]) if len(arguments) > 1 else find_json()
    if source is None:
        print(f"The package that holds the conversations is not installed.\nhint: {COMMAND}", file=sys.stderr)
        return 2
    read = json.loads(source.read_text(encoding="utf-8")).values()
    kept = [found for found in (messages(one["messages"]) for one in read) if found]
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"messages": found}, ensure_ascii=False) + "\n" for found in kept)
    target.write_text("".join(lines), encoding="utf-8")
    print(f"{target}: {len(kept):,} conversations, {target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
