"""The kept record: used while it applies, edited by hand, never overwritten when it is damaged."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

import packmule.probe.cache as cache_module
from packmule.errors import ConfigError
from packmule.probe.cache import load
from packmule.probe.machine import Effort
from packmule.probe.ram import Ram
from packmule.spec.hardware import Hardware


@pytest.fixture
def calls(monkeypatch, probed):
    """Counts full measurements; each gives the real record, marked by its number."""
    made = []

    def fake(disk_path, threads, roots, progress, effort):
        made.append(str(disk_path))
        own = {"threads": threads, "task_seconds": float(len(made)), "busy_fraction": 0.0}
        return probed.hardware.model_copy(update=own)

    monkeypatch.setattr(cache_module, "measure", fake)
    return made


@pytest.fixture
def file(tmp_path):
    return tmp_path / "cache" / "probe.json"


def edit(file, **changes):
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, **changes}))


def test_the_second_load_measures_nothing(file, tmp_path, calls):
    first = load(file, tmp_path)
    second = load(file, tmp_path)
    assert len(calls) == 1
    assert second.task_seconds == first.task_seconds == 1.0
    assert Hardware.parse_json(file.read_text(), "file") == first


def test_refresh_measures_again_and_keeps_the_old_file(file, tmp_path, calls):
    load(file, tmp_path)
    before = file.read_text()
    assert load(file, tmp_path, refresh=True).task_seconds == 2.0
    assert file.with_name("probe.json.old").read_text() == before


def test_edits_are_used(file, tmp_path, calls):
    load(file, tmp_path)
    edit(file, memory_bytes_per_second=123.0, child_baseline_bytes=5)
    record = load(file, tmp_path)
    assert (record.memory_bytes_per_second, record.child_baseline_bytes) == (123.0, 5)
    assert len(calls) == 1


def test_memory_and_free_space_are_always_read_now(file, tmp_path, calls, monkeypatch):
    load(file, tmp_path)
    data = json.loads(file.read_text())
    for disk in data["disks"]:
        disk["free_bytes"] = 1
    edit(file, ram_available_bytes=1, ram_total_bytes=2, ram_limit_source="x", disks=data["disks"])
    monkeypatch.setattr(cache_module, "ram", lambda roots: Ram(64, 32, "made up"))
    record = load(file, tmp_path)
    now = (record.ram_total_bytes, record.ram_available_bytes, record.ram_limit_source)
    assert now == (64, 32, "made up")
    assert record.disks[0].free_bytes > 1 << 20
    assert record.disks[0].path == str(tmp_path)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("host", "elsewhere"), ("cpu", "another"), ("threads", 4096), ("software", "python 2.7, torch 0.4")],
)
def test_another_machine_or_software_is_measured_again(file, tmp_path, calls, key, value):
    load(file, tmp_path)
    edit(file, **{key: value})
    told = []
    assert load(file, tmp_path, progress=lambda doing, done: told.append(doing)).task_seconds == 2.0
    assert str(value) in told[0]


def test_asking_for_other_threads_measures_again(file, tmp_path, calls):
    load(file, tmp_path)
    load(file, tmp_path, threads=4097)
    assert len(calls) == 2


@pytest.mark.parametrize(("days", "measurements"), [(29, 1), (31, 2), (-4000, 1)])
def test_age(file, tmp_path, calls, days, measurements):
    load(file, tmp_path)
    edit(file, date=(datetime.now(UTC) - timedelta(days=days)).strftime("%Y-%m-%d"))
    load(file, tmp_path)
    assert len(calls) == measurements


@pytest.mark.parametrize(("busy", "hours", "measurements"), [(0.9, 0.5, 1), (0.9, 2, 2), (0.1, 2, 1)])
def test_a_disturbed_measurement_is_trusted_for_an_hour(file, tmp_path, calls, busy, hours, measurements):
    load(file, tmp_path)
    edit(file, busy_fraction=busy, date=(datetime.now(UTC) - timedelta(hours=hours)).isoformat())
    load(file, tmp_path)
    assert len(calls) == measurements


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda text: "", "not JSON"),
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: "[]", "probe.json"),
        (
            lambda text: text.replace('"memory_bytes_per_second"', '"memory_byte_per_second"'),
            "memory_byte",
        ),
        (lambda text: text.replace('"format": 1', '"format": 99'), "format 99"),
        (lambda text: text.replace('"date": "', '"date": "about '), "not a date"),
        (lambda text: text.replace('"task_seconds": 1.0', '"task_seconds": "soon"'), "task_seconds"),
        (lambda text: text.replace('"task_seconds": 1.0', '"task_seconds": -1.0'), "task_seconds"),
    ],
)
def test_a_damaged_file_is_an_error_and_stays(file, tmp_path, calls, damage, cause):
    load(file, tmp_path)
    broken = damage(file.read_text())
    file.write_text(broken)
    with pytest.raises(ConfigError, match=cause) as caught:
        load(file, tmp_path)
    assert "probe.json" in caught.value.cause
    assert "--refresh" in caught.value.hint
    assert file.read_text() == broken
    assert load(file, tmp_path, refresh=True).task_seconds == 2.0
    assert file.with_name("probe.json.old").read_text() == broken


def test_another_disk_is_measured_alone_and_added(file, tmp_path, calls, monkeypatch):
    load(file, tmp_path)
    data = json.loads(file.read_text())
    data["disks"][0]["device"] = "/dev/other ext4"
    edit(file, disks=data["disks"])
    record = load(file, tmp_path, effort=Effort(disk_bytes=16 << 20, disk_seconds=0.1))
    assert len(calls) == 1
    assert [disk.path for disk in record.disks] == [str(tmp_path)]
    assert record.disks[0].device != "/dev/other ext4"
    kept = Hardware.parse_json(file.read_text(), "file")
    assert [disk.device for disk in kept.disks] == ["/dev/other ext4", record.disks[0].device]
    monkeypatch.setattr(cache_module, "measure_disk", lambda *a: pytest.fail("measured again"))
    load(file, tmp_path)


def test_a_disk_written_by_hand_goes_by_its_path(file, tmp_path, calls):
    load(file, tmp_path)
    data = json.loads(file.read_text())
    data["disks"][0].update(path=str(tmp_path), device="", read_bytes_per_second=77.0)
    edit(file, disks=data["disks"])
    assert load(file, tmp_path).disks[0].read_bytes_per_second == 77.0


def test_a_folder_that_cannot_hold_the_file_is_told_and_survived(tmp_path, calls):
    (tmp_path / "file").write_text("")
    told = []
    record = load(tmp_path / "file" / "probe.json", tmp_path, progress=lambda doing, done: told.append(doing))
    assert record.task_seconds == 1.0
    assert any("not kept" in line for line in told)


def test_no_temporary_file_stays_beside_it(file, tmp_path, calls):
    load(file, tmp_path)
    load(file, tmp_path, refresh=True)
    assert sorted(path.name for path in file.parent.iterdir()) == ["probe.json", "probe.json.old"]


def test_a_file_that_cannot_be_replaced_stays_as_it_was(file, tmp_path, calls, monkeypatch):
    load(file, tmp_path)
    before = file.read_text()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    told = []
    load(file, tmp_path, refresh=True, progress=lambda doing, done: told.append(doing))
    assert "No space left" in told[-1]
    assert file.read_text() == before
    assert [path.name for path in file.parent.iterdir()] == ["probe.json"]


def test_zero_threads_are_refused(file, tmp_path, calls):
    with pytest.raises(ConfigError, match="threads = 0"):
        load(file, tmp_path, threads=0)
    assert calls == []
