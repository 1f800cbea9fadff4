"""/proc/self/mountinfo as records (proc(5)). Finding which mount holds a path; nothing is measured."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from packmule.probe.roots import Roots, read_text

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One mounted file system.

    Attributes:
        device: "major:minor" of files on it.
        root: which folder of the file system is mounted.
        point: where.
        filesystem: its type (ext4, tmpfs, cgroup2).
        source: what is mounted (/dev/vda, host:/export).
        options: of the file system, not of the mount.
    """

    device: str
    root: str
    point: str
    filesystem: str
    source: str
    options: tuple[str, ...]


def mounts(roots: Roots) -> tuple[Mount, ...]:
    """All mounts this process sees, oldest first; empty when the kernel does not say."""
    found = []
    for line in (read_text(roots.proc_file("self/mountinfo")) or "").splitlines():
        before, dash, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not dash or len(left) < 6 or len(right) < 2:
            continue
        options = tuple(right[2].split(",")) if len(right) > 2 else ()
        found.append(Mount(left[2], _plain(left[3]), _plain(left[4]), right[0], _plain(right[1]), options))
    return tuple(found)


def mount_of(folder: Path, roots: Roots) -> Mount | None:
    """The mount that holds an existing folder, or None when mountinfo does not list it."""
    resolved = os.path.realpath(folder)
    holding = [m for m in mounts(roots) if _holds(m.point, resolved)]
    # Of mounts at the same place the last one hides the others.
    return max(enumerate(holding), key=lambda item: (len(item[1].point), item[0]))[1] if holding else None


def _holds(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)
