"""`load`: the measured record from an editable JSON file, or measured again when it does not apply.

The file is a Hardware record. Speeds and baselines come from it, edited or not; RAM and free disk
space are always read anew. A file that cannot be parsed is an error, never overwritten: it may
hold someone's edits. One that does not apply any more is kept beside the new one as `NAME.old`.
"""

from __future__ import annotations

import datetime
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path

from packmule.errors import ConfigError
from packmule.probe.cpu import cpu_name
from packmule.probe.disk import Place, locate, measure_disk
from packmule.probe.machine import FULL, Effort, Progress, measure, now, resolve_threads, software
from packmule.probe.ram import ram
from packmule.probe.roots import HOST, Roots
from packmule.spec.hardware import DiskSpeed, Hardware

FORMAT = 1
DAYS = 30
"""How long a measurement is trusted."""

BUSY_FRACTION = 0.25
BUSY_DAYS = 1 / 24
"""A measurement made while other programs took that much is trusted for that long only."""

_AGAIN = "measure again with `packmule probe --refresh`"


def load(
    cache_path: Path | str,
    disk_path: Path | str,
    refresh: bool = False,
    threads: int | None = None,
    roots: Roots = HOST,
    progress: Progress | None = None,
    effort: Effort = FULL,
) -> Hardware:
    """This machine's record, with the asked-for disk as its only disk and today's free memory and space.

    The file applies when host, CPU, threads, versions of python and torch agree and its date is
    less than DAYS old (a date in the future, as a hand may write, never expires). When only the
    disk is not in it, only the disk is measured and added.

    Args:
        cache_path: the JSON file; its folder is made when missing.
        disk_path: a folder on the disk a run will use; it need not exist yet.
        refresh: measure all again.
        threads, roots, progress, effort: as for `measure`.

    Raises:
        ConfigError: the file is not a Hardware record, or `threads` is not positive.
        DiskError, PackmuleError: as `measure`.
    """
    report = progress or (lambda doing, fraction: None)
    path = Path(cache_path).expanduser()
    place = locate(disk_path, roots)
    count = resolve_threads(threads, roots)
    kept = None if refresh else read(path)
    reason = _mismatch(kept, count, roots) if kept else ""
    if kept is None or reason:
        if reason:
            report(f"measuring again: {reason}", 0.0)
        kept = measure(disk_path, count, roots, progress, effort)
        _store(path, kept, report)
        return kept
    disk = _disk_on(kept, place)
    if disk is None:
        report("measuring the disk", 0.0)
        disk = measure_disk(disk_path, roots, effort.disk_bytes, effort.disk_seconds)
        kept = kept.model_copy(update={"disks": (*kept.disks, disk)})
        _store(path, kept, report)
        report("done", 1.0)
    return _today(kept, disk, place, roots)


def read(path: Path) -> Hardware | None:
    """The record in a file, or None when there is no file.

    Raises:
        ConfigError: the file cannot be read, or is not a Hardware record of this format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", _AGAIN) from None
    try:
        record = Hardware.parse_json(text, str(path))
    except ConfigError as error:
        hint = f"{error.hint}; or {_AGAIN}" if error.hint else _AGAIN
        raise ConfigError(error.cause, hint) from None
    if _date(record) is None:
        example = "2025-12-31 or 2025-12-31T23:59:59+00:00"
        raise ConfigError(
            f"{path}: `date` = {record.date!r} is not a date.", f"write it like {example}; or {_AGAIN}"
        )
    if record.format != FORMAT:
        raise ConfigError(f"{path} has format {record.format}; this version reads {FORMAT}.", _AGAIN)
    return record


def write(path: Path, record: Hardware) -> None:
    """Replace the file by the record, never half written; what was there becomes NAME.old.

    Raises:
        OSError: it cannot be written; the file is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(record.to_json())
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            os.replace(path, path.with_name(path.name + ".old"))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _store(path: Path, record: Hardware, report: Progress) -> None:
    """Write the record; a failure is told, not raised: the measurement is good without it."""
    try:
        write(path, record)
    except OSError as error:
        report(f"the measurement is not kept: {path}: {error.strerror or error}", 1.0)


def _mismatch(record: Hardware, threads: int, roots: Roots) -> str:
    """Why the record does not apply here, or nothing."""
    here = {
        "host": platform.node(),
        "CPU": cpu_name(roots),
        "number of threads": str(threads),
        "software": software(),
    }
    there = {
        "host": record.host,
        "CPU": record.cpu,
        "number of threads": str(record.threads),
        "software": record.software or software(),
    }
    for what, value in here.items():
        if there[what] != value:
            return f"the {what} was {there[what]}, is {value}"
    days = _age_days(record)
    if days > BUSY_DAYS and record.busy_fraction > BUSY_FRACTION:
        return "other programs kept the machine busy during the last measurement"
    return f"the last measurement is {days:.0f} days old" if days > DAYS else ""


def _date(record: Hardware) -> datetime.datetime | None:
    try:
        date = datetime.datetime.fromisoformat(record.date)
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=datetime.UTC)


def _age_days(record: Hardware) -> float:
    return (now() - (_date(record) or now())).total_seconds() / 86400


def _disk_on(record: Hardware, place: Place) -> DiskSpeed | None:
    """The record's disk for this place; one without a device, as a hand may write, goes by its path."""
    for disk in record.disks:
        if disk.device == place.device if disk.device else disk.path == str(place.folder):
            return disk
    return None


def _today(record: Hardware, disk: DiskSpeed, place: Place, roots: Roots) -> Hardware:
    memory = ram(roots)
    sizes = {"free_bytes": place.free_bytes, "total_bytes": place.total_bytes}
    fresh = disk.model_copy(update={"path": str(place.folder), **sizes})
    return record.model_copy(
        update={
            "ram_total_bytes": memory.total_bytes,
            "ram_available_bytes": memory.available_bytes,
            "ram_limit_source": memory.source,
            "disks": (fresh,),
        }
    )
