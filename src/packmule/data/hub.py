"""Hub: the folder of a model that Hugging Face tools have downloaded. Nothing is downloaded here."""

from __future__ import annotations

import re
from pathlib import Path


def is_hub_id(model: str) -> bool:
    """Whether a name can be ORG/NAME."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) is not None


def downloaded(model: str, cache: Path) -> Path | None:
    """The folder of ORG/NAME, as of its newest download; None where there is none.

    huggingface_hub keeps it in `models--ORG--NAME`: `refs/main` names a commit, `snapshots/COMMIT`
    holds its files (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
    """
    if not is_hub_id(model):
        return None
    place = cache / f"models--{model.replace('/', '--')}"
    try:
        commit = (place / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    found = place / "snapshots" / commit
    return found if re.fullmatch(r"\w+", commit) and found.is_dir() else None
