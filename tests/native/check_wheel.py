"""An installed packmule works: its command line, its kernels, a run of two steps. Run it with the
Python that packmule is installed in, from anywhere:

    python tests/native/check_wheel.py native|torch
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(family: str) -> int:
    import packmule
    from packmule.kernels import load

    installed = Path(packmule.__file__).resolve()
    assert not installed.is_relative_to(ROOT / "src"), f"{installed} is the source, not an installation"
    assert load(1).family == family, load(1).family
    sys.path.insert(0, str(ROOT))
    from tests.cli.bench import Bench

    program = Path(sysconfig.get_path("scripts")) / "packmule"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.make(Path(folder), 1)
        for words in (["--version"], ["train", str(bench.job("run", train__max_steps=2)), "--quiet"]):
            subprocess.run([str(program), *words], check=True, cwd=folder, env=bench.variables())
        plan = json.loads((Path(folder) / "run" / "plan.json").read_text())
        assert plan["numerics"]["kernels"] == family, plan["numerics"]
        assert (Path(folder) / "run" / "final" / "model.safetensors").exists()
    print(f"{packmule.__version__} works with {family} kernels ({installed.parent})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
