"""Options and fixtures of all tests: `--long`, `--seed`, and a fresh seed per run."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import secrets
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

THREADS = 2


class _LimitTorch(importlib.abc.MetaPathFinder):
    """Sets torch's threads when a test first imports it, so that tests may share a machine.

    Importing torch here would cost every torch-free test its start-up.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                module.set_num_threads(min(THREADS, module.get_num_threads()))

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the long form of suites (make faults)")
    parser.addoption(
        "--seed", type=int, default=None, help="seed of random inputs; a fresh one when left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SEED] = config.getoption("--seed")
    if config.stash[SEED] is None:
        config.stash[SEED] = secrets.randbelow(2**31)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(THREADS)
    else:
        sys.meta_path.insert(0, _LimitTorch())


SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SEED]} (repeat with --seed {config.stash[SEED]})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    # -q hides the header, and a failure without its seed cannot be repeated.
    terminalreporter.write_line(f"seed: {config.stash[SEED]}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this run's random inputs; printed with failures, fixed by --seed."""
    value = request.config.stash[SEED]
    print(f"seed: {value}")
    return value


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether suites run their long form."""
    return bool(request.config.getoption("--long"))
