"""`python -m packmule.train.child`: the process that holds the model: trains, evaluates, generates.

Reads one Request from standard input and answers with events on standard output. malloc is
tuned before torch is imported; once the arena is touched, RLIMIT_DATA keeps the budget.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from packmule.errors import Interrupted, PackmuleError
from packmule.shapes.bodies import PRIMITIVES_KEPT
from packmule.tiers.deadline import DeadlineDisk
from packmule.tiers.disk import PosixDisk
from packmule.train.memory import (
    is_out_of_memory,
    keep_budget,
    out_of_memory,
    process_memory,
    trim_malloc,
    tune_caches,
    tune_malloc,
    unlimit_data,
)
from packmule.train.messages import Request, Sender

LOOK_SECONDS = 1.0
"""Between two looks at what the disk is doing."""


class Signals:
    """Remembers the first SIGTERM or SIGINT; bodies ask between tasks."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received = self.received or number

    def __call__(self) -> bool:
        """Whether one has come."""
        return self.received is not None

    def check(self) -> None:
        """Raise Interrupted if one has come."""
        if self.received is not None:
            raise self.error()

    def error(self) -> Interrupted:
        """What a stopped run ends in."""
        name = signal.Signals(self.received or signal.SIGTERM).name
        return Interrupted(
            self.received or signal.SIGTERM,
            f"Stopped by {name}; the last commit is kept.",
            "the same command carries on from it",
        )


def main() -> int:
    """Serve one request; the exit code is 0 whenever an event told how it ended."""
    signals = Signals()
    tune_malloc()
    tune_caches(PRIMITIVES_KEPT)
    sender = Sender(sys.stdout)
    request = Request.parse_json(sys.stdin.readline(), "the request")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a user's modules print is no event
            _serve(request, sender, signals)
    except PackmuleError as error:
        sender.fail(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        unlimit_data()
        sender.fail(out_of_memory(error))
    memory = process_memory()
    sender.send("end", peak_bytes=memory.peak)
    return 0


def _serve(request: Request, sender: Sender, signals: Signals) -> None:
    import torch

    torch.set_grad_enabled(False)
    from packmule.train.folder import RunFolder

    folder = RunFolder(Path(request.folder), Path(request.state))
    disk = DeadlineDisk(PosixDisk())
    threading.Thread(target=_watch, args=(disk, sender), daemon=True, name="packmule-watch").start()
    if request.work == "train":
        from packmule.train.loop import Loop

        loop = Loop(request, folder, disk, sender, signals)
        loop.prepare()
        trim_malloc()  # what the import left
        loop.engine.arena.touch()
        keep_budget(request.ram_bytes, loop.plan.numerics)
        loop.run()
        return
    from packmule.train.reading import evaluate, generate

    work = evaluate if request.work == "evaluate" else generate
    work(request, folder, disk, sender, signals)


def _watch(disk: DeadlineDisk, sender: Sender) -> None:
    """End this process when its disk hangs: no thread that waits for the disk can be woken."""
    while (error := disk.overdue()) is None:
        time.sleep(LOOK_SECONDS)
    sender.fail(error)
    sender.send("end", peak_bytes=process_memory().peak, hung=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
