"""The whole probe for real, small; and the processes it asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from packmule.errors import PackmuleError
from packmule.probe.busy import CpuTimes, busy_fraction, cpu_times
from packmule.probe.child import ask
from packmule.probe.machine import Effort, measure
from packmule.probe.table import explain
from packmule.probe.torch_child import DTYPES, copy_bytes_per_second, matmul_points
from packmule.spec.hardware import Hardware


def test_a_quick_probe_fills_every_field(probed):
    hardware = probed.hardware
    assert hardware.threads == 1
    assert set(hardware.matmul) == set(DTYPES)
    for points in hardware.matmul.values():
        assert [point.size for point in points][:1] == [256]
        assert all(1e6 < point.flops_per_second < 1e14 for point in points)
    assert 1e7 < hardware.memory_bytes_per_second < 1e13
    assert 1e-7 < hardware.task_seconds < 1
    assert 0 <= hardware.busy_fraction <= 1
    # A Python with numpy and rich; torch with its libraries.
    assert 20e6 < hardware.parent_baseline_bytes < 200e6
    assert 100e6 < hardware.child_baseline_bytes < 2e9
    assert "torch" in hardware.software


def test_the_record_survives_json(probed):
    hardware = probed.hardware
    assert Hardware.parse_json(hardware.to_json(), "text") == hardware


def test_progress_only_grows_and_ends(probed):
    fractions = [fraction for _, fraction in probed.told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_explain_shows_what_was_measured(probed):
    hardware = probed.hardware
    rows = dict(explain(hardware))
    assert hardware.ram_limit_source in rows["RAM"]
    assert hardware.disks[0].path in rows["disk"]
    assert "FLOP/s at 256" in rows["matmul float32"]
    assert "1:1" in rows["disk speed"]
    assert "note" not in dict(explain(hardware.model_copy(update={"busy_fraction": 0.05})))
    assert "45%" in dict(explain(hardware.model_copy(update={"busy_fraction": 0.45})))["note"]
    disk = hardware.disks[0].model_copy(update={"filesystem": "tmpfs", "direct": False})
    assert "files here are RAM" in dict(explain(hardware.model_copy(update={"disks": (disk,)})))["disk"]


def test_measuring_loads_no_torch_here(probed):
    assert not probed.loaded_torch


def test_the_parent_baseline_is_a_process_without_torch():
    script = (
        "import sys, packmule.probe.parent_child as child\n"
        "print(child.peak_bytes() > 0, 'numpy' in sys.modules, 'torch' in sys.modules)\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "False"]


def test_the_torch_process_gets_the_threads_and_a_quarter_of_the_memory(tmp_path, make_tree, monkeypatch):
    answers = {
        "packmule.probe.parent_child": {"peak_bytes": 5},
        "packmule.probe.torch_child": {
            "baseline_bytes": 6,
            "matmul": {"float32": [[256, 7.0]]},
            "memory_bytes_per_second": 8.0,
            "task_seconds": 9.0,
            "devices": [],
        },
    }
    asked = {}

    def fake(name, *arguments):
        asked[name] = dict(zip(arguments[::2], arguments[1::2], strict=True))
        return answers[name]

    monkeypatch.setattr("packmule.probe.machine.ask", fake)
    tree = make_tree({"meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n"})
    effort = Effort(disk_bytes=16 << 20, disk_seconds=0.1)
    hardware = measure(tmp_path, threads=3, roots=tree, effort=effort)
    options = asked["packmule.probe.torch_child"]
    assert (options["--threads"], options["--ram-bytes"]) == ("3", str(1000 * 1024))
    assert hardware.threads == 3
    assert hardware.ram_available_bytes == 4000 * 1024
    assert (hardware.parent_baseline_bytes, hardware.child_baseline_bytes) == (5, 6)
    assert hardware.matmul["float32"][0].flops_per_second == 7.0


def module(tmp_path, monkeypatch, body):
    """Makes `asked` importable here and so, through sys.path, in the process that is asked."""
    (tmp_path / "asked.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "asked"


def test_the_answer_is_the_last_line(tmp_path, monkeypatch):
    name = module(tmp_path, monkeypatch, "import sys\nprint('noise')\nprint('{\"a\": %s}' % sys.argv[1])\n")
    assert ask(name, "5") == {"a": 5}


def test_a_json_module_in_the_working_folder_is_not_imported(tmp_path, monkeypatch):
    name = module(tmp_path, monkeypatch, "print('{\"a\": 1}')\n")
    elsewhere = tmp_path / "work"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise SystemExit('wrong json')\n")
    monkeypatch.chdir(elsewhere)
    assert ask(name) == {"a": 1}


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise ValueError('broken')", "exit 1.*ValueError: broken"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL.*memory"),
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "PyTorch is not installed"),
        ("print('hello')", "no measurement"),
        ("print('[1]')", "no measurement"),
        ("pass", "no measurement"),
        ("import time; time.sleep(60)", "more than 1 s"),
    ],
)
def test_a_process_that_fails_is_explained(tmp_path, monkeypatch, body, cause):
    name = module(tmp_path, monkeypatch, body + "\n")
    started = time.monotonic()
    with pytest.raises(PackmuleError, match=cause):
        ask(name, seconds=1.0)
    assert time.monotonic() - started < 20


def test_a_size_that_would_take_too_long_is_left_out(one_thread):
    points = matmul_points((64, 4096), seconds=0.01, dtypes=("float64",))
    assert [n for n, _ in points["float64"]] == [64]


def test_speeds_agree_with_a_plain_loop(one_thread):
    """Within a factor of five: another clock and another loop, on a machine that others use too."""
    import torch

    points = dict(matmul_points((384,), seconds=1.0, dtypes=("float32",))["float32"])
    a, b = torch.randn(384, 384), torch.randn(384, 384)
    best = min(_seconds(lambda: a @ b) for _ in range(30))
    assert 0.2 < points[384] * best / (2 * 384**3) < 5
    source = bytearray(os.urandom(32 << 20))
    target = bytearray(len(source))

    def copy():
        target[:] = source

    plain = 2 * len(source) / min(_seconds(copy) for _ in range(10))
    assert 0.2 < copy_bytes_per_second(32 << 20, 0.3) / plain < 5


@pytest.fixture
def one_thread():
    """Teams of one: what else runs then costs its share of the time, not a stop at every barrier."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _seconds(run):
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@pytest.mark.parametrize(
    ("others", "own", "threads", "cpus", "expected"),
    [
        (0.0, 20.0, 2, 2, 0.0),  # alone
        (10.0, 10.0, 2, 2, 0.5),  # one of two CPUs taken all the time
        (20.0, 5.0, 2, 2, 1.0),
        (20.0, 20.0, 2, 8, 0.0),  # six CPUs to spare
        (70.0, 20.0, 2, 8, 0.5),
        (5.0, 10.0, 4, 2, 0.125),  # more threads than CPUs is no one else's doing
    ],
)
def test_others_count_only_when_they_take_cpus_that_are_needed(others, own, threads, cpus, expected):
    before = CpuTimes(at=100.0, used=1000.0, own=3.0)
    after = CpuTimes(at=110.0, used=1000.0 + others + own, own=3.0 + own)
    assert busy_fraction(before, after, threads, cpus) == pytest.approx(expected)


def test_cpu_times_come_from_the_watched_cpus_without_idle(make_tree):
    stat = (
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 5000 600 7 8 35 90 90\ncpu1 1 1 1 1 1 1 1 1 1 1\nintr 5\n"
    )
    tree = make_tree({"stat": stat})
    ticks = os.sysconf("SC_CLK_TCK")
    assert cpu_times(tree, {0}).used == pytest.approx(200 / ticks)
    assert cpu_times(tree, {0, 1}).used == pytest.approx(206 / ticks)


def test_a_busy_neighbor_is_noticed():
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint('on', flush=True)\nwhile True: pass"
    neighbor = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        neighbor.stdout.readline()
        before = cpu_times(cpus={cpu})
        time.sleep(0.5)
        assert busy_fraction(before, cpu_times(cpus={cpu}), threads=1, cpus=1) > 0.4
    finally:
        neighbor.send_signal(signal.SIGKILL)
        neighbor.wait()
        neighbor.stdout.close()


def test_the_torch_child_prints_one_json_line():
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "packmule.probe.torch_child", "--threads", "1", "--seconds", "0.1"]
    done = subprocess.run(
        [*command, "--largest", "256", "--ram-bytes", "4000000"],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert set(json.loads(line)) == {
        "baseline_bytes",
        "devices",
        "matmul",
        "memory_bytes_per_second",
        "task_seconds",
    }
