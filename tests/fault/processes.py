"""A started command whose events are read as they come, and how it ended. Every wait has a deadline."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DEADLINE = 120.0
"""Seconds any one start may take, on a machine that is busy with other things."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """How a start ended.

    Attributes:
        code: as a shell gives it: 128 + N for signal N.
        events: what it printed.
        err: its standard error.
        seconds: from the last thing done to it to its end.
    """

    code: int
    events: tuple[Event, ...]
    err: str
    seconds: float

    def named(self, event: str) -> list[Event]:
        """The events of one name."""
        return [found for found in self.events if found["event"] == event]

    @property
    def last_step(self) -> int:
        """The last step it told of; -1: none."""
        return max((event["step"] for event in self.named("step")), default=-1)

    def refused(self, code: int, *words: str) -> str:
        """Assert that it ended in a message with these words, not in a traceback; the message."""
        assert self.code == code, (self.code, self.err)
        assert self.err.startswith(("error: ", "note: ")) and "\nhint: " in self.err, self.err
        assert "Traceback" not in self.err and "bug in packmule" not in self.err, self.err
        for word in words:
            assert word in self.err, (word, self.err)
        return self.err


class Running:
    """A started command, its events read as they come. Use as a context manager.

    Args:
        folder: its working directory, if not this process's.
    """

    def __init__(self, command: list[str], variables: Mapping[str, str], folder: Path | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(variables),
            cwd=folder,
        )
        self.events: list[Event] = []
        self._queue: queue.Queue[Event | None] = queue.Queue()
        self._err: list[str] = []
        self._since = time.monotonic()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_err)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        self._err.append(self.process.stderr.read())

    def until(self, wanted: Callable[[Event], bool], deadline: float = DEADLINE) -> bool:
        """Wait for an event; False if the command ended first."""
        limit = time.monotonic() + deadline
        while True:
            event = self._queue.get(timeout=max(0.01, limit - time.monotonic()))
            if event is None:
                self._queue.put(None)
                return False
            self.events.append(event)
            if wanted(event):
                return True

    def until_phase(self, name: str, count: int = 1) -> bool:
        """Wait for the count-th phase of a name."""
        seen = 0

        def wanted(event: Event) -> bool:
            nonlocal seen
            seen += event["event"] == "phase" and event["name"] == name
            return seen == count

        return self.until(wanted)

    def send(self, number: int) -> None:
        """A signal to the parent."""
        self._since = time.monotonic()
        self.process.send_signal(number)

    def children(self) -> list[int]:
        """Process ids of its children now."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                found += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
        return found

    def end(self, deadline: float = DEADLINE) -> Result:
        """Wait for its end.

        Raises:
            AssertionError: it does not come.
        """
        try:
            code = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline} s: {self.events[-3:]}") from None
        seconds = time.monotonic() - self._since
        self.until(lambda event: False)
        for thread in self._threads:
            thread.join(DEADLINE)
        return Result(128 - code if code < 0 else code, tuple(self.events), "".join(self._err), seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pids = self.children()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE)
            for pid in pids:
                _kill(pid)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def alive(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rsplit(")", 1)[1].split()[0] not in ("Z", "X")


def gone(pid: int, deadline: float) -> bool:
    """Wait until a process has ended."""
    limit = time.monotonic() + deadline
    while alive(pid):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True
