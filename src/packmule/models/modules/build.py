"""A user's model from a function named `module:function`, block by block.

The function gives an object with

    embed    makes the first hidden state of a batch: embed(batch) -> x
    blocks   a sequence: block(x) -> x, or block(x, batch) -> x
    head     gives one loss per target: head(x, batch) -> losses; or (losses, {name: a value per target})
    targets  optional: targets(sample) -> how many losses the head gives for a sample; else one

Each of embed, blocks and head is a `torch.nn.Module` or, so that a large model is never whole in
memory, a function without arguments that makes one. x is one tensor whose first dimension is the
batch's. Parameters become a run's blocks; what is left of a module is its skeleton.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from packmule.errors import ConfigError, PackmuleError
from packmule.models.views import TORCH_DTYPES
from packmule.shapes.blocks import Parameter
from packmule.spec.records import nearest

_PARTS = ("embed", "blocks", "head")


@dataclass(frozen=True)
class Part:
    """One block of a user's model.

    Attributes:
        name: "embed", "blocks.0", ..., "head".
        module: its parameters lie on the meta device, its buffers where they were.
        parameters: names within the block, shapes and roles.
        aliases: other names that the block has a parameter under (tied within it).
        takes_batch: whether its forward is given the batch besides x.
    """

    name: str
    module: nn.Module
    parameters: tuple[Parameter, ...]
    takes_batch: bool
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class UserModel:
    """All blocks, and how targets are counted."""

    parts: tuple[Part, ...]
    targets: Callable[[Any], int] | None


def build(
    factory: str,
    arguments: Mapping[str, Any],
    seed: int,
    compute: str,
    visit: Callable[[int, Part], None] = lambda index, part: None,
) -> UserModel:
    """Call the user's function; keep skeletons.

    Args: as `Building`.
        visit: called with each block while it still has its parameters.

    Raises:
        ConfigError: the function, or what it gives, cannot be used; names the part and why.
    """
    building = Building(factory, arguments, seed, compute)
    for index, part in enumerate(building):
        visit(index, part)
    return building.model


class Building:
    """Calls the user's function at once, and makes the blocks one by one: iterating gives each while it
    still has its parameters, which are gone when the next one is asked for. Once.

    Args:
        factory: "module:function", or "file.py:function".
        arguments: of the function.
        seed: of torch's generator, set before the call: the same parameters each time.
        compute: dtype that floating buffers are cast to.

    Raises:
        ConfigError: as `build`; from iterating too.
    """

    def __init__(self, factory: str, arguments: Mapping[str, Any], seed: int, compute: str) -> None:
        torch.manual_seed(seed)
        made = call(f"`{factory}`", load(factory, "the model"), **arguments)
        self._given = _parts(factory, made)
        _refuse_shared([(name, part) for name, part in self._given if isinstance(part, nn.Module)])
        self._targets: Callable[[Any], int] | None = getattr(made, "targets", None)
        self._compute = TORCH_DTYPES[compute]
        self._parts: list[Part] = []

    def __len__(self) -> int:
        return len(self._given)

    @property
    def targets(self) -> Callable[[Any], int] | None:
        """How many losses a sample has, where the user says so."""
        return self._targets

    @property
    def model(self) -> UserModel:
        """All blocks, once they are made."""
        if len(self._parts) < len(self._given):
            raise RuntimeError("blocks are left to make")
        return UserModel(tuple(self._parts), self._targets)

    def __iter__(self) -> Iterator[Part]:
        owners: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        names: dict[int, str] = {}

        def own(name: str, module: nn.Module) -> None:
            for local, parameter in module.named_parameters():
                owners[id(parameter)], names[id(parameter)] = parameter, f"{name}.{local}"

        for index, (name, module) in enumerate(self._given):
            if not isinstance(module, nn.Module):
                module = _made(name, module)
                for local, parameter in module.named_parameters():
                    if owners.get(id(parameter)) is parameter:
                        raise _shared(names[id(parameter)], f"{name}.{local}")
            own(name, module)
            part = _part(name, index, len(self._given), module)
            yield part
            _strip(module, self._compute)
            own(name, module)
            self._parts.append(part)
            self._given[index] = (name, module)


def _made(name: str, make: Callable[[], Any]) -> nn.Module:
    module = call(f"`{name}`", make)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"`{name}` made a {type(module).__name__}, not a torch.nn.Module.",
            "give modules, or functions without arguments that make one",
        )
    return module


def load(factory: str, what: str) -> Callable[..., Any]:
    """The function that `module:function`, or `file.py:function`, names.

    Raises:
        ConfigError: there is none, or importing its module fails.
    """
    module_name, _, path = factory.rpartition(":")
    try:
        found: Any = _imported(module_name, what)
    except PackmuleError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise user_error(f"importing `{module_name}`", error) from None
        raise ConfigError(
            f"{what} `{factory}`: there is no module `{module_name}` to import.",
            "run in the folder it lies in, or add that folder to PYTHONPATH",
        ) from None
    except Exception as error:
        raise user_error(f"importing `{module_name}`", error) from None
    for name in path.split("."):
        if not hasattr(found, name):
            guess = nearest(name, [known for known in dir(found) if not known.startswith("_")])
            raise ConfigError(
                f"{what} `{factory}`: `{module_name}` has no `{name}`.",
                f"did you mean `{module_name}:{guess}`?" if guess else "write `module:function`",
            )
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(
            f"{what} `{factory}` is a {type(found).__name__}, not a function.", "write `module:function`"
        )
    function: Callable[..., Any] = found
    return function


def _imported(module_name: str, what: str) -> ModuleType:
    """A module by its name, or a file as a script is run: its folder is where it imports from."""
    if not module_name.endswith(".py"):
        return importlib.import_module(module_name)
    file = Path(module_name).expanduser().absolute()
    if not file.is_file():
        raise ConfigError(f"{what} `{module_name}`: there is no such file.", "check the path")
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    name = file.stem if known is None else f"{file.stem}_of_the_job"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # of a .py file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module


def call(what: str, function: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
    """Call what a user wrote.

    Raises:
        ConfigError: it raised; says what and where. Exhausted memory stays what it is.
    """
    try:
        return function(*arguments, **keys)
    except PackmuleError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise
        raise user_error(what, error) from error


def user_error(what: str, error: BaseException) -> ConfigError:
    """An exception of a user's code, as one of ours: where it came from, and what it said."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parents[2])
    own = [f for f in frames if not f.filename.startswith((here, "<frozen")) and "/torch/" not in f.filename]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    text = str(error).strip().splitlines()
    said = f": {text[0]}" if text else ""
    return ConfigError(
        f"{what} failed with {type(error).__name__}{said}{where}.", "mend it there, and run the same command"
    )


def _parts(factory: str, made: Any) -> list[tuple[str, Any]]:
    missing = [name for name in _PARTS if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"`{factory}` gave a {type(made).__name__} without `{'`, `'.join(missing)}`.",
            "give an object with `embed`, `blocks` and `head` (docs/modules.md)",
        )
    try:
        blocks = list(made.blocks)
    except TypeError:
        raise ConfigError(f"`blocks` of `{factory}` is no sequence.", "give a list of modules") from None
    if not blocks:
        raise ConfigError(f"`blocks` of `{factory}` is empty.", "give at least one block")
    found = [("embed", made.embed), *((f"blocks.{i}", b) for i, b in enumerate(blocks)), ("head", made.head)]
    for name, part in found:
        if not callable(part):
            raise ConfigError(
                f"`{name}` of `{factory}` is a {type(part).__name__}.",
                "give a torch.nn.Module, or a function without arguments that makes one",
            )
    return found


def _refuse_shared(modules: list[tuple[str, nn.Module]]) -> None:
    """A parameter belongs to one block."""
    owners: dict[int, str] = {}
    for name, module in modules:
        for local, parameter in module.named_parameters():
            if id(parameter) in owners:
                raise _shared(owners[id(parameter)], f"{name}.{local}")
        owners |= {id(parameter): f"{name}.{local}" for local, parameter in module.named_parameters()}


def _shared(first: str, second: str) -> ConfigError:
    return ConfigError(
        f"`{first}` and `{second}` are one parameter (tied), and a parameter belongs to one block.",
        "untie them: give each block a parameter of its own",
    )


def _part(name: str, index: int, count: int, module: nn.Module) -> Part:
    """What a module owns, checked."""
    for local, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats:
            where = f"{name}.{local}" if local else name
            raise ConfigError(
                f"`{where}` is a {type(child).__name__}, which changes its running statistics in every "
                "forward: forward runs twice in a step, and once more after a crash.",
                "use LayerNorm or GroupNorm, or track_running_stats=False",
            )
    parameters = []
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    for local, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"`{name}.{local}` is {parameter.dtype}; only floating-point parameters are trained.",
                "make it a buffer",
            )
        if parameter.is_meta:
            raise ConfigError(
                f"`{name}.{local}` lies on the meta device and has no values.", "make modules on the CPU"
            )
        if not parameter.requires_grad:
            raise ConfigError(
                f"`{name}.{local}` does not require a gradient; all parameters are trained.",
                "make what is constant a buffer",
            )
        role = "embedding" if id(parameter) in embeddings else "matrix" if parameter.ndim > 1 else "norm"
        parameters.append(Parameter(local, tuple(parameter.shape), role))  # type: ignore[arg-type]
    if not parameters:
        raise ConfigError(
            f"`{name}` has no parameters.", "join it to the block beside it, which its work can be a part of"
        )
    takes_batch = 0 < index < count - 1 and _positional(module) > 1
    return Part(name, module, tuple(parameters), takes_batch, _aliases(module))


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for local, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(local)
    return {names[0]: tuple(names[1:]) for names in found.values() if len(names) > 1}


def _positional(module: nn.Module) -> int:
    """How many arguments a module's forward must be given."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(module.forward)
    return sum(p.kind in kinds and p.default is p.empty for p in signature.parameters.values())


def _strip(module: nn.Module, compute: torch.dtype) -> None:
    """Let go of the parameters' memory; what is shared within the module stays shared."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                empty = made.get(id(parameter))
                if empty is None:
                    empty = made[id(parameter)] = nn.Parameter(parameter.detach().to("meta"))
                child._parameters[name] = empty
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(compute)


def buffers(model: UserModel) -> Iterator[tuple[str, Tensor]]:
    """Every buffer by its name in the model."""
    for part in model.parts:
        for local, buffer in part.module.named_buffers():
            yield f"{part.name}.{local}", buffer
