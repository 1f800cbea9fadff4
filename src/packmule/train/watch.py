"""Children: start one, pass on signals, hand its events on, explain how it ended. No torch."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import packmule.errors
from packmule.errors import PackmuleError, RunFailed
from packmule.train.messages import parse_event

OnEvent = Callable[[dict[str, Any]], None]

_STOPPING = (signal.SIGTERM, signal.SIGINT)


def run_child(
    module: str, request: str, on_event: OnEvent, variables: Mapping[str, str], pass_fds: tuple[int, ...] = ()
) -> None:
    """Run `python -m module` with a request line on its standard input until it ends.

    SIGTERM and SIGINT go on to the child; a third one kills it.

    Args:
        on_event: called for each event, in this thread.
        variables: the child's environment.
        pass_fds: files it inherits (the run's lock).

    Raises:
        PackmuleError: the error the child sent, or an explanation of how it was killed.
    """
    with tempfile.TemporaryFile("w+") as stderr:
        # A session of its own: Ctrl-C reaches the child once, through us.
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=dict(variables),
            pass_fds=pass_fds,
            start_new_session=True,
        )
        failure: dict[str, Any] | None = None
        ended = False
        with _forwarding(process):
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.close()
            for line in process.stdout:
                event = parse_event(line)
                if event is None:
                    continue
                if event["event"] == "error":
                    failure = event
                ended = ended or event["event"] == "end"
                on_event(event)
            code = process.wait()
        if failure is not None:
            raise _sent_error(failure)
        if code or not ended:
            stderr.seek(0)
            raise explain_death(code, stderr.read())


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[str]) -> Iterator[None]:
    """Pass SIGTERM and SIGINT on to the child while it runs."""
    count = 0

    def forward(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if count > 2 else number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sent_error(event: Mapping[str, Any]) -> PackmuleError:
    """The child's PackmuleError, with its exit code."""
    kind = getattr(packmule.errors, str(event["kind"]), PackmuleError)
    error = PackmuleError.__new__(kind)
    PackmuleError.__init__(error, str(event["cause"]), str(event["hint"]))
    error.exit_code = int(event["exit_code"])
    return error


def explain_death(code: int, stderr: str, events: Path = Path("/sys/fs/cgroup/memory.events")) -> PackmuleError:
    """Why a child ended without saying so.

    Args:
        code: its exit status; -N for signal N.
        stderr: what it printed.
        events: the cgroup's counters, which tell of OOM kills.
    """
    again = "the last commit is kept; run the same command again to carry on"
    if code == -signal.SIGKILL:
        kills = 0
        with contextlib.suppress(OSError, ValueError, StopIteration):
            kills = int(
                next(line for line in events.read_text().splitlines() if line.startswith("oom_kill ")).split()[1]
            )
        who = "The kernel's out-of-memory killer" if kills else "SIGKILL (kill -9, or the kernel out of memory)"
        return RunFailed(
            f"{who} ended the training process.",
            f"{again}; if memory ran out, other programs use it or --ram is more than this machine has",
        )
    if code < 0:
        name = signal.Signals(-code).name
        return RunFailed(f"The training process was ended by {name}.{_tail(stderr)}", again)
    return _Bug(f"The training process ended with code {code}.{_tail(stderr)}", again)


class _Bug(PackmuleError):
    """A child's unhandled exception."""

    exit_code = 1


def _tail(stderr: str) -> str:
    lines = [line for line in stderr.strip().splitlines() if line.strip()]
    return ("\n  " + "\n  ".join(lines[-12:])) if lines else ""
