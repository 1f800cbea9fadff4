"""Usable threads, name and features from made-up machines."""

from __future__ import annotations

import os

import pytest

from packmule.probe.cpu import FEATURES, asked_threads, cpu_features, cpu_name, usable_threads

V2 = {"self/cgroup": "0::/top/job\n", "self/mountinfo": "35 31 0:32 / /sys/fs/cgroup rw - cgroup2 c rw\n"}
V1 = {
    "self/cgroup": "3:cpu,cpuacct:/top/job\n0::/\n",
    "self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
}


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("1000 100000", 1),
        ("300000 50000", 6),
        ("1600000 100000", 8),
        ("400000", 4),
        ("", 8),
        ("nonsense", 8),
    ],
)
def test_v2_quota(make_tree, quota, threads):
    tree = make_tree(V2, {"fs/cgroup/top/job/cpu.max": quota + "\n"})
    assert usable_threads(tree, affinity=8) == threads


@pytest.mark.parametrize(
    ("asked", "variable", "threads"),
    [(None, None, None), (5, 2, 5), (None, 1, 1), (None, 1000, 1), (3, None, 3)],
)
def test_a_setting_goes_before_the_variable_which_goes_no_further_than_the_quota(
    make_tree, asked, variable, threads
):
    tree = make_tree(V2, {"fs/cgroup/top/job/cpu.max": "50000 100000\n"})
    assert asked_threads(asked, variable, tree) == threads


@pytest.mark.parametrize(
    ("quota", "period", "threads"), [("-1", "100000", 8), ("250000", "100000", 3), ("20000", "10000", 2)]
)
def test_v1_quota(make_tree, quota, period, threads):
    folder = "fs/cgroup/cpu,cpuacct/top/job"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}
    assert usable_threads(make_tree(V1, files), affinity=8) == threads
    # The same where the kernel does not list its mounts.
    assert usable_threads(make_tree({**V1, "self/mountinfo": ""}, files), affinity=8) == threads


def test_the_least_of_nested_quotas(make_tree):
    files = {"fs/cgroup/top/cpu.max": "200000 100000\n", "fs/cgroup/top/job/cpu.max": "600000 100000\n"}
    assert usable_threads(make_tree(V2, files), affinity=8) == 2


def test_affinity_below_the_quota(make_tree):
    tree = make_tree(V2, {"fs/cgroup/top/job/cpu.max": "600000 100000\n"})
    assert usable_threads(tree, affinity=3) == 3


def test_affinity_of_this_process(make_tree):
    tree = make_tree()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_threads(tree) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_threads(tree) == len(before)


X86 = """processor\t: 0
model name\t: Example(R)  CPU   @ 2.0GHz
flags\t\t: fpu sse2 fma avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: Example(R)  CPU   @ 2.0GHz
flags\t\t: fpu sse2 fma avx2 avx512f amx_tile
"""
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes asimddp sve i8mm bf16 sve2
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def test_x86_features_are_those_all_cpus_have(make_tree):
    tree = make_tree({"cpuinfo": X86})
    assert cpu_features(tree) == ("avx2", "fma", "avx512f")
    assert cpu_name(tree) == "Example(R) CPU @ 2.0GHz"


def test_arm_features_and_name(make_tree):
    tree = make_tree({"cpuinfo": ARM})
    assert cpu_features(tree) == ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2")
    assert "0x41" in cpu_name(tree) and "0xd40" in cpu_name(tree)


def test_a_machine_without_cpuinfo_still_has_a_name(make_tree):
    tree = make_tree()
    assert cpu_features(tree) == ()
    assert cpu_name(tree)


def test_this_machine():
    assert usable_threads() >= 1
    assert set(cpu_features()) <= set(FEATURES)
