"""The map of the source holds: who imports whom, and what no module does (docs/design.md).

Every check walks the syntax trees of src/packmule; none imports it. Each check is also run on made-up
modules that break it, so that a rule which can no longer fail is seen.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "packmule"
LINES = re.compile(r"^\d\. (.+)$", re.MULTILINE)

TORCH_FREE = (
    "spec",
    "shapes",
    "kernels",
    "probe",
    "data",
    "graph",
    "plan",
    "tiers",
    "checkpoint",
    "cli",
    "train.bar",
    "train.commands",
    "train.data",
    "train.devices",
    "train.export",
    "train.folder",
    "train.jobs",
    "train.modules",
    "train.planning",
    "train.journal",
    "train.launch",
    "train.memory",
    "train.messages",
    "train.resuming",
    "train.results",
    "train.show",
    "train.sinks",
    "train.situation",
    "train.start",
    "train.stopping",
    "train.tables",
    "train.transfer",
    "train.watch",
    "train.child",
    "models.weights",
    "optim.noise",
    "api",
    "errors",
)
"""What the parent of a run loads: torch may be imported inside their functions only. train.child is
started as a process, and tunes malloc before it imports torch."""

CHILD = "packmule.train.child"

TORCH_FREE_PACKAGES = ("", "models", "optim", "train")
"""Of these the __init__ only: it runs when a torch-free module in them is imported."""

TORCH_MODULES = frozenset({"packmule.kernels.reference", "packmule.probe.torch_child"})
"""Use torch throughout; torch-free modules import them inside functions or start them as processes."""


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, whether it is a package's __init__, its text and tree."""

    name: str
    package: bool
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The top-level part it belongs to ("graph"); the package itself is ""."""
        return (self.name.split(".") + [""])[1]


@dataclass(frozen=True)
class Import:
    """One import statement's target, absolute."""

    target: str
    names: tuple[str, ...]
    line: int
    lazy: bool
    typing_only: bool


def parse(name: str, text: str, package: bool = False) -> Module:
    return Module(name, package, text, ast.parse(text))


def modules() -> list[Module]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        found.append(parse(name, path.read_text(encoding="utf-8"), package))
    return found


MODULES = modules()
NAMES = frozenset(module.name for module in MODULES)


def imports(module: Module) -> Iterator[Import]:
    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, (), child.lineno, lazy, typing_only)
            elif isinstance(child, ast.ImportFrom):
                target = child.module or ""
                if child.level:
                    base = module.name.split(".")
                    base = base[: len(base) - child.level + (1 if module.package else 0)]
                    target = ".".join([*base, *([target] if target else [])])
                yield Import(target, tuple(a.name for a in child.names), child.lineno, lazy, typing_only)
            else:
                inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                hidden = typing_only or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                yield from walk(child, inside, hidden)

    return walk(module.tree, False, False)


def targets(found: Import, names: frozenset[str]) -> Iterator[str]:
    """Modules of ours an import loads: `from packmule.graph import kinds` is packmule.graph.kinds."""
    for name in found.names:
        if f"{found.target}.{name}" in names:
            yield f"{found.target}.{name}"
    if found.target.split(".")[0] == "packmule":
        yield found.target


def allowed() -> dict[str, set[str]]:
    """part -> the parts it may import, from the numbered lines of docs/design.md."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table: dict[str, set[str]] = {"": {"errors", "api"}}  # the package itself offers these
    earlier: set[str] = set()
    for line in LINES.findall(design.split("Imports go only upwards")[1].split("\n\n`import packmule`")[0]):
        entries = re.findall(r"(\w+)(?: \(([\w, ]+)\))?", line)
        for part, beside in entries:
            table[part] = earlier | {part} | set(beside.replace(",", " ").split())
        earlier |= {part for part, _ in entries}
    return table


ALLOWED = allowed()


def layering(module: Module, names: frozenset[str] = NAMES) -> list[str]:
    permitted = ALLOWED.get(module.part, set())
    return [
        f"{module.name}:{found.line} imports {target}"
        for found in imports(module)
        for target in targets(found, names)
        if target != "packmule" and target.split(".")[1] not in permitted
    ]


def private_imports(module: Module, names: frozenset[str] = NAMES) -> list[str]:
    broken = []
    for found in imports(module):
        if found.target.split(".")[0] != "packmule":
            continue
        private = [
            n for n in (*found.target.split("."), *found.names) if n.startswith("_") and n != "__version__"
        ]
        broken += [f"{module.name}:{found.line} imports {found.target}: {name}" for name in private]
    # Attributes count too: `from packmule.graph import kinds` and then `kinds._secret`.
    ours = {
        name
        for found in imports(module)
        for name in (found.names or (found.target,))
        if f"{found.target}.{name}" in names
    }
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        if node.value.id in ours and node.attr.startswith("_") and not node.attr.startswith("__"):
            broken.append(f"{module.name}:{node.lineno} uses {node.value.id}.{node.attr}")
    return broken


def global_statements(module: Module) -> list[str]:
    return [
        f"{module.name}:{n.lineno} uses global" for n in ast.walk(module.tree) if isinstance(n, ast.Global)
    ]


def environment_reads(module: Module) -> list[str]:
    if module.name == "packmule.spec.environment":
        return []
    reads = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    broken = [
        f"{module.name}:{node.lineno} reads os.{node.attr}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in reads and ast.unparse(node.value) == "os"
    ]
    broken += [
        f"{module.name}:{found.line} imports os.{name}"
        for found in imports(module)
        if found.target == "os"
        for name in found.names
        if name in reads
    ]
    return broken


def torch_free(name: str) -> bool:
    path = name.removeprefix("packmule").lstrip(".")
    inside = any(path == part or path.startswith(f"{part}.") for part in TORCH_FREE)
    return (inside or path in TORCH_FREE_PACKAGES) and name not in TORCH_MODULES


def eager_torch(module: Module, names: frozenset[str] = NAMES) -> list[str]:
    """A torch-free module imports neither torch nor a module that is not torch-free, except in functions."""
    if not torch_free(module.name):
        return []
    broken = []
    for found in imports(module):
        loaded = [t for t in targets(found, names) if t in names and not torch_free(t)]
        if found.target.split(".")[0] in ("torch", "transformers"):
            loaded.append(found.target)
        if loaded and not (found.lazy or found.typing_only):
            broken.append(f"{module.name}:{found.line} imports {', '.join(loaded)}")
    return broken


def child_only(module: Module, names: frozenset[str] = NAMES) -> list[str]:
    """What of train is not torch-free is imported by the child and its like only, not even in functions
    elsewhere; and nobody imports the child."""
    inside = module.name == CHILD or (module.part == "train" and not torch_free(module.name))
    return [
        f"{module.name}:{found.line} imports {target}"
        for found in imports(module)
        for target in targets(found, names)
        if target == CHILD or (target.startswith("packmule.train.") and not torch_free(target) and not inside)
    ]


def unfinished(module: Module) -> list[str]:
    marks = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
    lines = enumerate(module.text.splitlines(), 1)
    broken = [f"{module.name}:{number} {line.strip()}" for number, line in lines if marks.search(line)]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc):
            broken.append(f"{module.name}:{node.lineno} raises NotImplementedError")
    return broken


def undocumented(module: Module) -> list[str]:
    return [] if (ast.get_docstring(module.tree) or "").strip() else [f"{module.name} has no docstring"]


def unsafe(module: Module) -> list[str]:
    broken = [
        f"{module.name}:{found.line} imports {found.target}"
        for found in imports(module)
        if found.target.split(".")[0] in ("pickle", "dill", "cloudpickle", "shelve", "marshal")
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "eval",
            "exec",
            "torch.load",
            "yaml.load",
        ):
            broken.append(f"{module.name}:{node.lineno} calls {ast.unparse(node.func)}")
    return broken


RULES = (
    layering,
    private_imports,
    global_statements,
    environment_reads,
    eager_torch,
    child_only,
    unfinished,
    undocumented,
    unsafe,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule: object) -> None:
    broken = [line for module in MODULES for line in rule(module)]  # type: ignore[operator]
    assert not broken, "\n".join(broken)


MADE_UP = frozenset(
    f"packmule.{name}"
    for name in ("graph.builder", "plan.search", "kernels.reference", "engine.executor", "spec.units")
)
"""Modules the breakers import, whether the source has them or not."""

BREAKERS = (
    (layering, "packmule.spec.x", "from packmule.graph.builder import Builder"),
    (layering, "packmule.graph.x", "from ..plan import search"),
    (layering, "packmule.graph.x", "def f():\n    import packmule.engine.executor"),
    (layering, "packmule.errors", "from packmule.spec import units"),
    (layering, "packmule.probe.x", "from packmule.shapes import model"),
    (layering, "packmule.unheard.x", "from packmule.errors import PackmuleError"),
    (private_imports, "packmule.graph.x", "from packmule.graph.builder import _Builder"),
    (private_imports, "packmule.graph.x", "from packmule.graph import builder\nbuilder._secret()"),
    (global_statements, "packmule.graph.x", "def f():\n    global a\n    a = 1"),
    (environment_reads, "packmule.graph.x", "import os\nos.environ['A']"),
    (environment_reads, "packmule.graph.x", "from os import environ"),
    (environment_reads, "packmule.graph.x", "import os\nos.getenv('A')"),
    (eager_torch, "packmule.data.x", "import torch.nn"),
    (eager_torch, "packmule.train.launch", "try:\n    from torch import nn\nexcept ImportError:\n    pass"),
    (eager_torch, "packmule.models.weights.x", "import torch"),
    (eager_torch, "packmule", "import torch"),
    (eager_torch, "packmule.models", "import torch"),
    (eager_torch, "packmule.checkpoint.x", "from packmule.kernels.reference import TorchKernels"),
    (eager_torch, "packmule.cli.x", "from packmule.kernels import reference"),
    (eager_torch, "packmule.train.launch", "from packmule.engine import executor"),
    (eager_torch, "packmule.train.child", "from packmule.train.loop import Loop"),
    (child_only, "packmule.train.launch", "def f():\n    from packmule.train.loop import Loop"),
    (child_only, "packmule.cli.x", "from packmule.train import reading"),
    (child_only, "packmule.train.launch", "from packmule.train import child"),
    (unfinished, "packmule.graph.x", "def f():\n    raise NotImplementedError"),
    (unfinished, "packmule.graph.x", "a = 1  # TO" + "DO: more"),
    (undocumented, "packmule.graph.x", "a = 1"),
    (unsafe, "packmule.graph.x", "import pickle"),
    (unsafe, "packmule.graph.x", "eval('1')"),
)


@pytest.mark.parametrize(
    ("rule", "name", "text"), BREAKERS, ids=lambda value: getattr(value, "__name__", None)
)
def test_rule_catches_a_module_that_breaks_it(rule: object, name: str, text: str) -> None:
    names = NAMES | {
        "packmule.graph.builder",
        "packmule.plan.search",
        "packmule.spec.units",
        "packmule.shapes.model",
    }
    module = parse(name, text)
    arguments = (module, names) if rule in (layering, private_imports) else (module,)
    assert rule(*arguments)  # type: ignore[operator]


GOOD = (
    (layering, "packmule.cli.x", "from packmule.train import launch"),
    (layering, "packmule.data.x", "from packmule.kernels import contract"),
    (eager_torch, "packmule.data.x", "def f():\n    import torch"),
    (eager_torch, "packmule.data.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    (eager_torch, "packmule.engine.x", "import torch"),
    (environment_reads, "packmule.spec.environment", "import os\nos.environ"),
    (child_only, "packmule.train.child", "def f():\n    from packmule.train.loop import Loop"),
    (child_only, "packmule.train.loop", "from packmule.train.measured import Measured"),
)


@pytest.mark.parametrize(("rule", "name", "text"), GOOD, ids=lambda value: getattr(value, "__name__", None))
def test_rule_lets_a_good_module_pass(rule: object, name: str, text: str) -> None:
    assert not rule(parse(name, text))  # type: ignore[operator]


def test_table_of_layers_names_every_part() -> None:
    parts = {
        path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__"} <= ALLOWED.keys()
    assert {"errors", "spec", "graph", "train", "cli"} <= ALLOWED.keys()


def test_imports_have_no_cycles() -> None:
    edges: dict[str, set[str]] = {module.name: set() for module in MODULES}
    for module in MODULES:
        for found in imports(module):
            # A package that gathers its modules' names is not a cycle of theirs.
            loaded = [t for t in targets(found, NAMES) if t in NAMES and not found.typing_only]
            edges[module.name] |= {
                t for t in loaded if t != module.name and not module.name.startswith(f"{t}.")
            }
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_childs_modules_are_not_torch_free() -> None:
    for name in ("loop", "reading", "setup"):
        assert f"packmule.train.{name}" in NAMES
        assert not torch_free(f"packmule.train.{name}")
