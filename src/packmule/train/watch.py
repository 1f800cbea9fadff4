"""Children: start one, pass on signals, hand its events on, explain how it ended. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import packmule.errors
from packmule.errors import Interrupted, OutOfMemory, PackmuleError, RunFailed
from packmule.train.memory import says_out_of_memory
from packmule.train.messages import parse_event

OnEvent = Callable[[dict[str, Any]], None]

_STOPPING = (signal.SIGTERM, signal.SIGINT)

STOP_SECONDS = 60.0
"""How long a child may take to stop when its parent cannot go on."""

LEAVE_SECONDS = 10.0
"""How long a child may take to end once it has sent an error: one that hangs in its disk cannot."""

_AGAIN = "the last commit is kept; run the same command again to carry on"


def run_child(
    module: str, request: str, on_event: OnEvent, variables: Mapping[str, str], pass_fds: tuple[int, ...] = ()
) -> None:
    """Run `python -m module` with a request line on its standard input until it ends.

    SIGTERM and SIGINT go on to the child; a third one kills it. The child gets SIGTERM when this
    process ends, however it ends.

    Args:
        on_event: called for each event, in this thread.
        variables: the child's environment.
        pass_fds: files it inherits (the run's lock).

    Raises:
        PackmuleError: the error the child sent, or an explanation of how it was killed.
    """
    forwarder, kills = _Forwarder(), oom_kills()
    with tempfile.TemporaryFile("w+") as stderr, forwarder.installed():
        # A session of its own: Ctrl-C reaches the child once, through us.
        process = subprocess.Popen(
            [sys.executable, "-m", "packmule.train.start", str(os.getpid()), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=dict(variables),
            pass_fds=pass_fds,
            start_new_session=True,
        )
        with _stopping_on_error(process):
            forwarder.begin(process)
            failure, ended = _follow(process, request, on_event)
            code = process.wait() if failure is None else _leave(process)
        if failure is not None:
            raise _sent_error(failure)
        if code or not ended:
            if forwarder.killed:
                raise _stopped(forwarder.received[-1], "Killed at the third signal")
            if forwarder.received:  # it came before the child could say anything
                raise _stopped(forwarder.received[0], "Stopped")
            stderr.seek(0)
            raise explain_death(code, stderr.read(), oom_kills() - kills)


def _follow(
    process: subprocess.Popen[str], request: str, on_event: OnEvent
) -> tuple[dict[str, Any] | None, bool]:
    """Send the request, hand on events until there are no more: (the error event, whether "end" came)."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request + "\n")
        process.stdin.close()
    failure: dict[str, Any] | None = None
    ended = False
    with process.stdout:
        for line in process.stdout:
            event = parse_event(line)
            if event is None:
                continue
            if event["event"] == "error":
                failure = event
            ended = ended or event["event"] == "end"
            on_event(event)
            if event.get("hung"):
                break  # a process that waits for its disk closes nothing
    return failure, ended


def _leave(process: subprocess.Popen[str]) -> int:
    """Wait for a child that has said its last; one that hangs ends when its disk answers."""
    try:
        return process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        return 0


@contextlib.contextmanager
def _stopping_on_error(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no child behind: it would hold the run's lock when this process is gone."""
    try:
        yield
    except BaseException:
        process.terminate()
        assert process.stdout is not None
        process.stdout.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


class _Forwarder:
    """Passes SIGTERM and SIGINT on to a child, also those that come before it is there."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    @property
    def killed(self) -> bool:
        """Whether the child was killed for want of patience."""
        return len(self.received) > 2

    def begin(self, process: subprocess.Popen[str]) -> None:
        """From now on to this one."""
        self._process = process
        for number in self.received[:1]:
            process.send_signal(number)

    def _forward(self, number: int, frame: Any) -> None:
        self.received.append(number)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL if self.killed else number)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the two signals meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._forward) for number in _STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises Interrupted meanwhile, as SIGINT raises KeyboardInterrupt: for all that this
    process does between its children.

    Raises:
        Interrupted: SIGTERM came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _stopped(number, "Stopped")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(number: int, how: str) -> Interrupted:
    name = signal.Signals(number).name
    return Interrupted(
        number, f"{how} by {name}; the last commit is kept.", "the same command carries on from it"
    )


def _sent_error(event: Mapping[str, Any]) -> PackmuleError:
    """The child's PackmuleError, with its exit code."""
    kind = getattr(packmule.errors, str(event["kind"]), PackmuleError)
    error = PackmuleError.__new__(kind)
    PackmuleError.__init__(error, str(event["cause"]), str(event["hint"]))
    error.exit_code = int(event["exit_code"])
    return error


def oom_kills(events: Path = Path("/sys/fs/cgroup/memory.events")) -> int:
    """Processes of this cgroup that the kernel has killed for want of memory so far; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = events.read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def explain_death(code: int, stderr: str, out_of_memory: int = 0) -> PackmuleError:
    """Why a child ended without saying so.

    Args:
        code: its exit status; -N for signal N.
        stderr: what it printed.
        out_of_memory: processes the kernel killed for want of memory while it ran.
    """
    if -code in _STOPPING:  # before it could handle them
        return _stopped(-code, "Stopped")
    if code == -signal.SIGKILL:
        who = "SIGKILL (kill -9, or the kernel out of memory)"
        if out_of_memory > 0:
            who = "The kernel's out-of-memory killer (SIGKILL)"
        return RunFailed(
            f"{who} ended the training process.",
            f"{_AGAIN}; if memory ran out, other programs use it or --ram is more than this machine has",
        )
    if code < 0:
        name = signal.Signals(-code).name
        kind = OutOfMemory if says_out_of_memory(stderr) else RunFailed
        return kind(f"The training process was ended by {name}.{_tail(stderr)}", _AGAIN)
    return _Bug(f"The training process ended with code {code}.{_tail(stderr)}", _AGAIN)


class _Bug(PackmuleError):
    """A child's unhandled exception."""

    exit_code = 1


def _tail(stderr: str) -> str:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return ("\n  " + "\n  ".join(lines[-12:])) if lines else ""
