"""Made-up /proc and /sys trees, and one real, small run of the whole probe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from packmule.probe.roots import Roots
from packmule.spec.hardware import Hardware

MIB = 1 << 20

MakeTree = Callable[..., Roots]


def meminfo(total: int = 64 << 30, available: int = 60 << 30) -> str:
    """/proc/meminfo for those bytes."""
    return (
        f"MemTotal:       {total // 1024} kB\nMemFree:          1000 kB\n"
        f"MemAvailable:   {available // 1024} kB\nSwapTotal:      99999999 kB\nSwapFree: 99999999 kB\n"
    )


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Writes {path: text} below a proc and a sys folder; /proc/meminfo is there unless given as ""."""

    def make(proc: Mapping[str, str] | None = None, sys: Mapping[str, str] | None = None) -> Roots:
        roots = Roots(str(tmp_path / "proc"), str(tmp_path / "sys"))
        for root, files in ((roots.proc, {"meminfo": meminfo(), **(proc or {})}), (roots.sys, sys or {})):
            Path(root).mkdir(exist_ok=True)
            for name, text in files.items():
                path = Path(root) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return roots

    return make


@dataclass(frozen=True)
class Probed:
    """What a fresh process that called `measure` with one thread had to say.

    Attributes:
        hardware: the record.
        told: (doing, fraction) of each call of `progress`.
        loaded_torch: whether it had loaded torch in the end.
    """

    hardware: Hardware
    told: list[tuple[str, float]]
    loaded_torch: bool


_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import packmule.probe as probe
told = []
effort = probe.Effort(
    disk_bytes=16 << 20, disk_seconds=0.1, torch_seconds=0.3, largest_matmul=512, ram_bytes=16 << 20
)
hardware = probe.measure(sys.argv[2], threads=1, progress=lambda *step: told.append(step), effort=effort)
loaded = "torch" in sys.modules
print(json.dumps({"hardware": hardware.model_dump(mode="json"), "told": told, "loaded_torch": loaded}))
"""


@pytest.fixture(scope="session")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Probed:
    folder = tmp_path_factory.mktemp("disk")
    command = [sys.executable, "-c", _SCRIPT, json.dumps(sys.path), str(folder)]
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    hardware = Hardware.parse(answer["hardware"], "the probe")
    return Probed(hardware, [tuple(step) for step in answer["told"]], answer["loaded_torch"])
