"""Packmule fits large-model work into the hardware you have.

    packmule.probe()                               measure this machine
    packmule.plan("job.yaml", ram="4GB")           how does it fit, how fast, why
    run = packmule.train("job.yaml", ram="4GB")    run the plan; resume with the same line

`docs/api.md` has examples. Importing this loads next to nothing: everything is loaded when it is used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from packmule.errors import (
    ConfigError,
    DamagedFile,
    DataError,
    DiskError,
    DoesNotFit,
    Interrupted,
    PackmuleError,
    RunFailed,
)

if TYPE_CHECKING:
    from inspect import Signature

    from packmule.api import Evaluation, Machine, Planned, Run, open, plan, probe, train

__version__ = "0.1.0"

__all__ = [
    "probe",
    "plan",
    "train",
    "open",
    "Run",
    "Machine",
    "Planned",
    "Evaluation",
    "PackmuleError",
    "ConfigError",
    "DataError",
    "DoesNotFit",
    "DiskError",
    "DamagedFile",
    "RunFailed",
    "Interrupted",
    "__version__",
]

_VERBS = ("probe", "plan", "train")
"""Functions of packmule.api that have a subpackage of their name."""

_LAZY = ("open", "Run", "Machine", "Planned", "Evaluation")


class _Verb(ModuleType):
    """A subpackage that can be called: `packmule.plan(...)` is `packmule.api.plan(...)`, whether or
    not something has imported `packmule.plan.search` before."""

    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        """The function of this name in packmule.api."""
        return self._function(*arguments, **keys)

    @property
    def _function(self) -> Any:
        return getattr(importlib.import_module("packmule.api"), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Signature:
        from inspect import signature

        return signature(self._function)


class _Package(ModuleType):
    """This package: loads what it offers on first use."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _VERBS and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _VERBS:
            return importlib.import_module(f"packmule.{name}")
        if name in _LAZY:
            return getattr(importlib.import_module("packmule.api"), name)
        raise AttributeError(f"module 'packmule' has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
