"""RAM really available: every limit of a made-up machine counts, and nothing else does."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packmule.errors import PackmuleError
from packmule.probe.ram import ram
from packmule.probe.roots import Roots

MIB = 1 << 20
GIB = 1 << 30
V2_MOUNT = "35 31 0:32 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
AVAILABLE = 60 * GIB


def v2(limit: object, used: int = 0, **stat: int) -> dict[str, str]:
    lines = "".join(f"{name} {value}\n" for name, value in stat.items())
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": lines}


def v1(limit: int, used: int = 0, **stat: int) -> dict[str, str]:
    lines = "".join(f"{name} {value}\n" for name, value in stat.items())
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": lines,
        "memory.use_hierarchy": "1\n",
    }


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_without_control_groups_the_kernel_estimate_counts(make_tree):
    found = ram(make_tree())
    assert found.available_bytes == AVAILABLE
    assert found.total_bytes == 64 * GIB
    assert found.source.endswith("proc/meminfo")


def test_v2_limit_less_usage(make_tree):
    sys = below("fs/cgroup/job", v2(4 * GIB, 1 * GIB))
    found = ram(make_tree({"self/cgroup": "0::/job\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == 3 * GIB
    assert found.source.endswith("sys/fs/cgroup/job/memory.max")


@pytest.mark.parametrize("tight", ["top", "top/mid", "top/mid/leaf"])
def test_the_tightest_of_nested_v2_groups_counts(make_tree, tight):
    sys = {"fs/cgroup/cgroup.controllers": "cpu memory\n"}
    for group in ("top", "top/mid", "top/mid/leaf"):
        sys |= below(f"fs/cgroup/{group}", v2(2 * GIB if group == tight else 8 * GIB, GIB))
    found = ram(make_tree({"self/cgroup": "0::/top/mid/leaf\n"}, sys))
    assert found.available_bytes == GIB
    assert found.source.endswith(f"sys/fs/cgroup/{tight}/memory.max")


def test_a_roomier_parent_that_others_fill_counts(make_tree):
    sys = below("fs/cgroup/top", v2(8 * GIB, 7 * GIB)) | below("fs/cgroup/top/leaf", v2(4 * GIB, GIB))
    found = ram(make_tree({"self/cgroup": "0::/top/leaf\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == GIB
    assert found.source.endswith("sys/fs/cgroup/top/memory.max")


def test_v2_max_is_no_limit(make_tree):
    sys = below("fs/cgroup/job", v2("max", 5 * GIB))
    found = ram(make_tree({"self/cgroup": "0::/job\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == AVAILABLE


def test_v2_memory_high_counts(make_tree):
    sys = below("fs/cgroup/job", v2(4 * GIB, GIB) | {"memory.high": f"{3 * GIB}\n"})
    found = ram(make_tree({"self/cgroup": "0::/job\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == 2 * GIB
    assert found.source.endswith("memory.high")


def test_clean_file_cache_is_not_usage_in_v2(make_tree):
    stat = {
        "anon": GIB,
        "file": 2 * GIB,
        "shmem": 512 * MIB,  # counted in `file`, but on the anonymous lists: not reclaimable
        "inactive_file": 1024 * MIB,
        "active_file": 512 * MIB,
        "file_dirty": 100 * MIB,
        "file_writeback": 28 * MIB,
    }
    sys = below("fs/cgroup/job", v2(4 * GIB, 3 * GIB, **stat))
    found = ram(make_tree({"self/cgroup": "0::/job\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == GIB + (1024 + 512 - 128) * MIB


def test_clean_file_cache_is_not_usage_in_v1_and_totals_win(make_tree):
    stat = {
        "inactive_file": 1 * MIB,
        "active_file": 2 * MIB,
        "total_inactive_file": 600 * MIB,
        "total_active_file": 400 * MIB,
        "total_dirty": 30 * MIB,
        "total_writeback": 20 * MIB,
    }
    sys = below("fs/cgroup/memory/job", v1(4 * GIB, 3 * GIB, **stat))
    found = ram(make_tree({"self/cgroup": "4:memory:/job\n", "self/mountinfo": V1_MOUNT}, sys))
    assert found.available_bytes == GIB + 950 * MIB
    assert found.source.endswith("sys/fs/cgroup/memory/job/memory.limit_in_bytes")


@pytest.mark.parametrize("sentinel", [0x7FFFFFFFFFFFF000, 0x7FFFFFFFFFFF0000, 2**63 - 1])
def test_v1_huge_limits_are_none(make_tree, sentinel):
    sys = below("fs/cgroup/memory/job", v1(sentinel, GIB, hierarchical_memory_limit=sentinel))
    found = ram(make_tree({"self/cgroup": "4:memory:/job\n", "self/mountinfo": V1_MOUNT}, sys))
    assert found.available_bytes == AVAILABLE


def test_v1_parent_smaller_than_child(make_tree):
    sys = below("fs/cgroup/memory/top", v1(2 * GIB, GIB)) | below("fs/cgroup/memory/top/leaf", v1(8 * GIB))
    found = ram(make_tree({"self/cgroup": "4:memory:/top/leaf\n", "self/mountinfo": V1_MOUNT}, sys))
    assert found.available_bytes == GIB


def test_v1_parent_without_hierarchy_does_not_limit(make_tree):
    parent = v1(2 * GIB, GIB) | {"memory.use_hierarchy": "0\n"}
    sys = below("fs/cgroup/memory/top", parent) | below("fs/cgroup/memory/top/leaf", v1(8 * GIB))
    found = ram(make_tree({"self/cgroup": "4:memory:/top/leaf\n", "self/mountinfo": V1_MOUNT}, sys))
    assert found.available_bytes == 8 * GIB


def test_v1_limit_of_an_ancestor_out_of_sight(make_tree):
    sys = below("fs/cgroup/memory", v1(0x7FFFFFFFFFFFF000, 256 * MIB, hierarchical_memory_limit=GIB))
    mount = "35 31 0:32 /kubepods/pod1/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    proc = {"self/cgroup": "4:memory:/kubepods/pod1/abc\n", "self/mountinfo": mount}
    found = ram(make_tree(proc, sys))
    assert found.available_bytes == 768 * MIB
    assert "hierarchical_memory_limit" in found.source


def test_container_that_sees_its_path_on_the_host(make_tree):
    mount = "35 31 0:32 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    sys = below("fs/cgroup", v2(2 * GIB, GIB)) | below("fs/cgroup/inner", v2("max", GIB))
    proc = {"self/cgroup": "0::/docker/abc/inner\n", "self/mountinfo": mount}
    assert ram(make_tree(proc, sys)).available_bytes == GIB


def test_container_path_on_the_host_without_mountinfo(make_tree):
    sys = below("fs/cgroup", v2(2 * GIB, GIB)) | {"fs/cgroup/cgroup.controllers": "memory\n"}
    assert ram(make_tree({"self/cgroup": "0::/docker/abc\n"}, sys)).available_bytes == GIB


def test_v1_container_path_on_the_host_without_mountinfo(make_tree):
    files = v1(8 * GIB, GIB, hierarchical_memory_limit=2 * GIB) | {"memory.use_hierarchy": "0\n"}
    tree = make_tree({"self/cgroup": "4:memory:/docker/abc\n"}, below("fs/cgroup/memory", files))
    assert ram(tree).available_bytes == GIB


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_mounts_the_one_that_shows_more_ancestors_counts(make_tree, first):
    part = "44 31 0:32 /top /sys/fs/part rw - cgroup2 cgroup2 rw\n"
    lines = [V2_MOUNT, part]
    sys = (
        below("fs/cgroup/top", v2("max")) | below("fs/cgroup", v2(2 * GIB, GIB)) | below("fs/part", v2("max"))
    )
    proc = {"self/cgroup": "0::/top\n", "self/mountinfo": lines[first] + lines[1 - first]}
    assert ram(make_tree(proc, sys)).available_bytes == GIB


@pytest.mark.parametrize("first", [0, 1])
def test_v1_hierarchies_are_told_apart_by_controller(make_tree, first):
    lines = [V1_MOUNT, "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"]
    sys = below("fs/cgroup/memory/job", v1(2 * GIB, GIB)) | {"fs/cgroup/cpu/job/cpu.shares": "1024\n"}
    proc = {
        "self/cgroup": "2:cpu:/job\n4:memory:/job\n",
        "self/mountinfo": lines[first] + lines[1 - first],
    }
    assert ram(make_tree(proc, sys)).available_bytes == GIB


@pytest.mark.parametrize("path", ["/../..", "/..", "/../other/x", "/"])
def test_a_path_out_of_the_namespace_stops_at_what_is_mounted(make_tree, path):
    sys = below("fs/cgroup", v2(2 * GIB, GIB)) | below("fs/cgroup/other/x", v2(MIB))
    # A folder beside the mount must never be read.
    sys |= below("fs/other/x", v2(1)) | below("fs", v2(1))
    found = ram(make_tree({"self/cgroup": f"0::{path}\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == GIB


def test_hybrid_uses_the_hierarchy_that_has_the_controller(make_tree):
    mounts = V1_MOUNT + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    sys = below("fs/cgroup/memory/job", v1(2 * GIB, GIB)) | {"fs/cgroup/unified/job/cgroup.procs": "1\n"}
    proc = {"self/cgroup": "4:cpu,memory:/job\n1:name=systemd:/job\n0::/job\n", "self/mountinfo": mounts}
    assert ram(make_tree(proc, sys)).available_bytes == GIB
    without = {name: text for name, text in proc.items() if name != "self/mountinfo"}
    sys["fs/cgroup/unified/cgroup.controllers"] = "\n"
    assert ram(make_tree({**without, "self/mountinfo": ""}, sys)).available_bytes == GIB


def test_hybrid_with_memory_in_v2(make_tree):
    mounts = "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    mounts += "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    sys = below("fs/cgroup/unified/job", v2(2 * GIB, GIB)) | {"fs/cgroup/cpu/cpu.shares": "1024\n"}
    found = ram(make_tree({"self/cgroup": "2:cpu:/\n0::/job\n", "self/mountinfo": mounts}, sys))
    assert found.available_bytes == GIB


def test_mount_points_with_spaces(make_tree):
    mount = r"35 31 0:32 / /sys/fs/c\040g rw - cgroup2 none rw" + "\n"
    sys = below("fs/c g/job", v2(2 * GIB, GIB))
    found = ram(make_tree({"self/cgroup": "0::/job\n", "self/mountinfo": mount}, sys))
    assert found.available_bytes == GIB


def test_a_limit_without_a_usage_file_is_the_headroom(make_tree):
    sys = {"fs/cgroup/job/memory.max": f"{GIB}\n"}
    found = ram(make_tree({"self/cgroup": "0::/job\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == GIB


def test_garbage_in_the_files_is_no_limit(make_tree):
    sys = {"fs/cgroup/job/memory.max": "many\n", "fs/cgroup/job/memory.stat": "x\ny z\n"}
    proc = {"self/cgroup": "0::/job\nnonsense\n", "self/mountinfo": V2_MOUNT + "short line\n"}
    assert ram(make_tree(proc, sys)).available_bytes == AVAILABLE


def test_usage_above_the_limit_is_zero_not_negative(make_tree):
    sys = below("fs/cgroup/job", v2(GIB, 2 * GIB))
    found = ram(make_tree({"self/cgroup": "0::/job\n", "self/mountinfo": V2_MOUNT}, sys))
    assert found.available_bytes == 0


def test_swap_never_counts(make_tree):
    text = "MemTotal: 1000 kB\nMemAvailable: 500 kB\nSwapFree: 10000 kB\n"
    sys = below("fs/cgroup/job", v2(GIB) | {"memory.swap.max": "max\n"})
    found = ram(make_tree({"meminfo": text, "self/cgroup": "0::/job\n"}, sys))
    assert found.available_bytes == 500 * 1024


def test_old_kernels_without_memavailable(make_tree):
    text = "MemTotal: 9000 kB\nMemFree: 1000 kB\nBuffers: 200 kB\nCached: 3000 kB\nShmem: 700 kB\n"
    assert ram(make_tree({"meminfo": text})).available_bytes == 3500 * 1024


@pytest.mark.parametrize("name", ["Max data size", "Max address space"])
def test_ulimit_counts(make_tree, name):
    limits = "Limit                     Soft Limit           Hard Limit           Units     \n"
    limits += f"{name:<25} {GIB:<20} unlimited            bytes     \n"
    found = ram(make_tree({"self/limits": limits}))
    assert found.available_bytes == GIB
    assert name in found.source
    limits = limits.replace(str(GIB), "unlimited")
    assert ram(make_tree({"self/limits": limits})).available_bytes == AVAILABLE


@pytest.mark.parametrize(("mode", "expected"), [("2", 300 * 1024), ("0", 8000 * 1024), ("1", 8000 * 1024)])
def test_the_commit_limit_counts_only_where_overcommit_is_refused(make_tree, mode, expected):
    text = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nCommitLimit: 1000 kB\nCommitted_AS: 700 kB\n"
    tree = make_tree({"meminfo": text, "sys/vm/overcommit_memory": f"{mode}\n"})
    assert ram(tree).available_bytes == expected


def test_a_machine_without_meminfo_is_an_error(make_tree):
    with pytest.raises(PackmuleError, match="how much RAM") as caught:
        ram(make_tree({"meminfo": ""}))
    assert "Linux" in caught.value.hint


LEVEL = st.tuples(
    st.one_of(st.none(), st.integers(0, 70 * GIB)),  # limit, None is "max"
    st.integers(0, 64 * GIB),  # usage
    st.integers(0, 8 * GIB),  # file cache on the lists
    st.integers(0, 2 * GIB),  # of it dirty
)


@settings(max_examples=60, deadline=None)
@given(
    levels=st.lists(LEVEL, max_size=5), version=st.sampled_from([1, 2]), available=st.integers(0, 64 * GIB)
)
def test_any_nesting_agrees_with_counting_by_hand(levels, version, available):
    available = available // 1024 * 1024
    expected = available
    for limit, used, cache, dirty in levels:
        if limit is not None:
            held = max(0, used - max(0, cache - dirty))
            expected = min(expected, max(0, limit - held))
    with tempfile.TemporaryDirectory() as top:
        proc, sys = Path(top, "proc"), Path(top, "sys")
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {available // 1024} kB\n")
        folder = sys / ("fs/cgroup" if version == 2 else "fs/cgroup/memory")
        folder.mkdir(parents=True)
        path = ""
        for number, (limit, used, cache, dirty) in enumerate(levels):
            path += f"/g{number}"
            here = folder / path[1:]
            here.mkdir()
            if version == 2:
                files = v2("max" if limit is None else limit, used, inactive_file=cache, file_dirty=dirty)
            else:
                bytes_ = 0x7FFFFFFFFFFFF000 if limit is None else limit
                files = v1(bytes_, used, total_active_file=cache, total_dirty=dirty)
            for name, text in files.items():
                (here / name).write_text(text)
        line = f"0::{path or '/'}\n" if version == 2 else f"7:memory:{path or '/'}\n"
        (proc / "self/cgroup").write_text(line)
        (proc / "self/mountinfo").write_text(V2_MOUNT if version == 2 else V1_MOUNT)
        assert ram(Roots(str(proc), str(sys))).available_bytes == expected


def test_this_machine_has_memory():
    found = ram()
    assert 0 < found.available_bytes <= found.total_bytes
    assert Path(found.source.split(" (")[0]).exists()
