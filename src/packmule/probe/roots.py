"""Where /proc and /sys are, and how their small text files are read. Nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True)
class Roots:
    """The kernel's two file trees; tests pass made-up ones.

    Attributes:
        proc: where /proc is.
        sys: where /sys is.
    """

    proc: str = "/proc"
    sys: str = "/sys"

    def proc_file(self, name: str) -> Path:
        """The path of `name` below /proc."""
        return Path(self.proc) / name

    def sys_file(self, name: str) -> Path:
        """The path of `name` below /sys."""
        return Path(self.sys) / name

    def locate(self, path: str) -> Path | None:
        """Where a mount point that the kernel names `path` is found, or None when it is not.

        A made-up tree holds what lies below /sys and nothing else.
        """
        if path == "/sys" or path.startswith("/sys/"):
            return Path(self.sys) / path.removeprefix("/sys").lstrip("/")
        return Path(path) if self.sys == "/sys" else None


HOST = Roots()
"""Those of the machine this runs on."""


def read_text(path: Path) -> str | None:
    """The file's text, or None when it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The one integer in the file; None when there is none ("max", a missing file)."""
    text = read_text(path)
    return to_int(text) if text is not None else None


def to_int(text: str) -> int | None:
    """The integer that `text` is, or None."""
    try:
        return int(text.strip())
    except ValueError:
        return None


def read_numbers(path: Path) -> dict[str, int]:
    """A file of `name number` or `name: number kB` lines, in the units it is written in.

    Lines of any other form are left out; a missing file is empty.
    """
    numbers: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        words = line.replace(":", " ").split()
        value = to_int(words[1]) if len(words) >= 2 else None
        if value is not None:
            numbers[words[0]] = value
    return numbers


def peak_resident_bytes(roots: Roots = HOST) -> int:
    """VmHWM of this process, in bytes: the most memory it ever had resident."""
    return read_numbers(roots.proc_file("self/status")).get("VmHWM", 0) * KIB
