"""The environment variables Packmule honors, read once into a record. Nothing else reads them.

`PACKMULE_X` mirrors the flag `--x` (`PACKMULE_MAX_STEPS=10`; a dot is written as two
underscores, `PACKMULE_OPTIM__LR`); a flag wins over its variable, a variable over the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OWN = frozenset({"PACKMULE_CACHE", "PACKMULE_DEBUG"})


@dataclass(frozen=True)
class Environment:
    """What the environment asks for.

    Attributes:
        variables: (name, value) of the PACKMULE_* variables that mirror flags, sorted.
        cache: folder of measurements kept between runs: PACKMULE_CACHE, or packmule under
            XDG_CACHE_HOME, or ~/.cache/packmule.
        debug: PACKMULE_DEBUG: errors show their traceback.
        hf_hub: where Hugging Face tools keep models: HF_HUB_CACHE, or hub in HF_HOME, or in huggingface
            under XDG_CACHE_HOME, or in ~/.cache/huggingface.
        omp_num_threads: OMP_NUM_THREADS as a number, or None.
        no_color: NO_COLOR is set (https://no-color.org).
        all: every variable, for child processes.
    """

    variables: tuple[tuple[str, str], ...]
    cache: Path
    debug: bool
    hf_hub: Path
    omp_num_threads: int | None
    no_color: bool
    all: Mapping[str, str]

    def of_child(self, **changes: str) -> dict[str, str]:
        """Variables for a child process: this process's, with changes."""
        return {**self.all, **changes}


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process, or of the mapping given."""
    found = dict(os.environ if variables is None else variables)
    home = Path(found.get("HOME", "/"))
    base = Path(found["XDG_CACHE_HOME"]) if found.get("XDG_CACHE_HOME") else home / ".cache"
    threads = found.get("OMP_NUM_THREADS", "").split(",")[0]
    return Environment(
        variables=tuple(
            sorted((k, v) for k, v in found.items() if k.startswith("PACKMULE_") and k not in _OWN and v)
        ),
        cache=Path(found["PACKMULE_CACHE"]) if found.get("PACKMULE_CACHE") else base / "packmule",
        debug=found.get("PACKMULE_DEBUG", "").lower() not in ("", "0", "false"),
        hf_hub=Path(
            found.get("HF_HUB_CACHE") or Path(found.get("HF_HOME") or base / "huggingface") / "hub"
        ).expanduser(),
        omp_num_threads=int(threads) if threads.isdigit() and int(threads) > 0 else None,
        no_color=bool(found.get("NO_COLOR")),
        all=found,
    )
