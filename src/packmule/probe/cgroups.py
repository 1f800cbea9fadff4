"""Which control groups hold this process, from its own up to the highest one in sight.

Sources: Linux Documentation/admin-guide/cgroup-v1/cgroups.rst, cgroup-v2.rst, cgroup_namespaces(7).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from packmule.probe.mounts import Mount, mounts
from packmule.probe.roots import Roots, read_text

Version = Literal[1, 2]


@dataclass(frozen=True)
class Group:
    """One control group.

    Attributes:
        version: 1 or 2, which says what its files are called.
        folder: where its files are.
        own: whether the process is in this group itself, not in one below it.
    """

    version: Version
    folder: Path
    own: bool


def groups(roots: Roots, controller: str) -> tuple[Group, ...]:
    """The groups that may limit this process, the process's own first, then its ancestors.

    Args:
        roots: where /proc and /sys are.
        controller: "memory" or "cpu".

    Returns:
        Groups of the v1 hierarchy that has the controller, then those of the v2 hierarchy.
        Both exist on hybrid systems; the files of the one that does not control are missing.
        A group above the mount or outside this process's namespace is not in sight.
    """
    found: list[Group] = []
    listed = mounts(roots)
    for version, path in _memberships(roots, controller):
        places = _places(roots, listed, version, controller)
        if places:
            found += _walk(version, path, places)
    return tuple(found)


def _memberships(roots: Roots, controller: str) -> list[tuple[Version, str]]:
    memberships: list[tuple[Version, str]] = []
    for line in (read_text(roots.proc_file("self/cgroup")) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            memberships.append((1, path))
        elif number == "0" and not controllers:
            memberships.append((2, path))
    return sorted(memberships)


def _places(
    roots: Roots, listed: tuple[Mount, ...], version: Version, controller: str
) -> list[tuple[str, Path]]:
    """Pairs of (the group that is mounted, where), for the hierarchy of that version and controller."""
    places = []
    for mount in listed:
        if version == 2 and mount.filesystem != "cgroup2":
            continue
        if version == 1 and (mount.filesystem != "cgroup" or controller not in mount.options):
            continue
        point = roots.locate(mount.point)
        if point is not None and point.is_dir():
            places.append((mount.root, point))
    return places or _usual_places(roots, version, controller)


def _usual_places(roots: Roots, version: Version, controller: str) -> list[tuple[str, Path]]:
    top = roots.sys_file("fs/cgroup")
    if version == 2:
        names = [top, top / "unified"]
        return [("/", name) for name in names if (name / "cgroup.controllers").exists()]
    names = [top / controller, top / "cpu,cpuacct", top / "cpuacct,cpu"]
    return [("/", name) for name in names[: 3 if controller == "cpu" else 1] if name.is_dir()]


def _walk(version: Version, path: str, places: list[tuple[str, Path]]) -> list[Group]:
    # The mount that shows most ancestors: its root is the shortest that still holds the path.
    holding = sorted((p for p in places if _below(path, p[0]) is not None), key=lambda p: len(p[0]))
    root, point = holding[0] if holding else places[0]
    # A path out of the namespace ("/../..") or out of the mount cannot be followed; what is
    # mounted is then the nearest group in sight.
    below = _below(path, root) or ()
    folder = point.joinpath(*below)
    exact = folder.is_dir()
    while not folder.is_dir() and folder != point:
        folder = folder.parent
    found = [Group(version, folder, own=exact or folder == point)]
    while folder != point:
        folder = folder.parent
        found.append(Group(version, folder, own=False))
    return found


def _below(path: str, root: str) -> tuple[str, ...] | None:
    """The parts of `path` below `root`, or None when it is not below or leaves the namespace."""
    here, top = PurePosixPath(path), PurePosixPath(root)
    if ".." in here.parts or not here.is_relative_to(top):
        return None
    return here.relative_to(top).parts
