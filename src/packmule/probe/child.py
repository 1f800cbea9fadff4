"""Starting one measuring process and reading the JSON line it prints.

What is measured in a process of its own: everything that loads torch, which the caller must
not, and the memory a fresh process needs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from packmule.errors import PackmuleError

# The child imports what this process would: it gets the same sys.path, as multiprocessing does.
# -P keeps a json.py in the working folder from being imported before that.
_START = (
    "import sys, json, runpy; sys.path[:] = json.loads(sys.argv.pop(1)); name = sys.argv.pop(1); "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)


def ask(module: str, *arguments: str, seconds: float = 120.0) -> dict[str, Any]:
    """Run `python -m module arguments...` and parse the last line of its output.

    Args:
        module: a module of packmule that prints one JSON object.
        arguments: its command line.
        seconds: how long it may take before it is killed.

    Raises:
        PackmuleError: it failed, was killed, took too long or printed something else.
    """
    command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), module, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise PackmuleError(
            f"Measuring took more than {seconds:.0f} s ({module}).", "try again when the machine is less busy"
        ) from None
    except OSError as error:
        raise PackmuleError(f"{sys.executable} cannot be started: {error.strerror}.") from None
    if done.returncode != 0:
        raise _failed(module, done.returncode, done.stderr)
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise PackmuleError(f"{module} printed no measurement: {lines[-1] if lines else 'nothing'!r}.")
    return answer


def _failed(module: str, code: int, stderr: str) -> PackmuleError:
    last = (stderr.strip().splitlines() or ["it printed no error"])[-1]
    if code == -signal.SIGKILL:
        return PackmuleError(
            f"The measuring process ({module}) was killed by SIGKILL, most likely for memory.",
            "free some RAM or raise the container's limit: torch alone needs about 0.4 GB",
        )
    if "No module named 'torch'" in last:
        return PackmuleError("PyTorch is not installed.", "pip install torch")
    return PackmuleError(
        f"The measuring process failed ({module}, exit {code}): {last}",
        f"run `{sys.executable} -m {module}` to see all of it",
    )
