"""Builds the platform's wheel and the pure one, installs each in a fresh environment and checks it.

    python tests/native/make_wheels.py [--site FOLDER]

With `--site`, dependencies are taken from that folder of installed packages; else pip installs them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path, cwd: Path, **variables: str) -> None:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([str(word) for word in words], check=True, cwd=cwd, env={**kept, **variables})


def check(folder: Path, site: str | None, pure: bool) -> str:
    """Build, install, run; the wheel's name."""
    name = "pure" if pure else "native"
    wheels, home = folder / f"{name}-wheel", folder / f"{name}-venv"
    variables = {"PACKMULE_PURE": "1"} if pure else {}
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        wheels,
        ROOT,
        cwd=folder,
        **variables,
    )
    (wheel,) = wheels.glob("*.whl")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    if site is not None:
        (packages,) = (home / "lib").glob("python*/site-packages")
        (packages / "shared.pth").write_text(site + "\n")
    run(python, "-m", "pip", "install", "--quiet", *(["--no-deps"] if site else []), wheel, cwd=folder)
    run(python, ROOT / "tests" / "native" / "check_wheel.py", "torch" if pure else "native", cwd=folder)
    return wheel.name


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site")
    site = parser.parse_args().site
    with tempfile.TemporaryDirectory() as folder:
        for pure in (False, True):
            print(check(Path(folder), site, pure), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
