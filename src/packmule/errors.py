"""Every error a user can cause, and its exit code. Nothing else lives here.

PackmuleError            exit 2   bad input: what happened, where, what to do
├── ConfigError          exit 2   a job, flag, plan or file key that is wrong
├── DataError            exit 2   text, token or weight files that cannot be used
├── DoesNotFit           exit 3   no plan fits the budget
├── DiskError            exit 4   full, read-only, hung
│   └── DamagedFile      exit 4   a checksum, length or header that does not match
├── RunFailed            exit 5   the run stopped, the last commit is good
│   ├── OutOfMemory      exit 5   an allocation failed in spite of the plan
│   └── TimeIsUp         exit 5   the run's time limit has passed
└── Interrupted          exit 130/143   a signal; the last commit is good
"""

from __future__ import annotations


class PackmuleError(Exception):
    """What happened and where, then what to do about it.

    Args:
        cause: one or more sentences that say what happened and where.
        hint: what the user can do; printed on its own `hint:` line.
    """

    exit_code = 2

    def __init__(self, cause: str, hint: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.cause}\nhint: {self.hint}" if self.hint else self.cause


class ConfigError(PackmuleError):
    """A job, flag, plan or file key that is wrong."""


class DataError(PackmuleError):
    """Text, token or weight files that cannot be used."""


class DoesNotFit(PackmuleError):
    """No plan fits the budget."""

    exit_code = 3


class DiskError(PackmuleError):
    """A disk that is full, read-only or does not answer."""

    exit_code = 4


class DamagedFile(DiskError):
    """A checksum, length or header that does not match what was written."""


class RunFailed(PackmuleError):
    """The run stopped, the last commit is good and the same command carries on."""

    exit_code = 5


class OutOfMemory(RunFailed):
    """An allocation failed in spite of the plan."""


class TimeIsUp(RunFailed):
    """The time that the user gave a run has passed before its end."""


class Interrupted(PackmuleError):
    """A signal stopped the run; the last commit is good.

    Args:
        signum: the signal's number; the exit code is 128 + signum.
    """

    def __init__(self, signum: int, cause: str, hint: str = "") -> None:
        super().__init__(cause, hint)
        self.exit_code = 128 + signum
