"""From YAML text, variables, flags and arguments to the sections of a job. Nothing is opened here.

Layers, later ones win: the file, environment variables, the command line or the arguments of a
call. A name is looked up in its section, then among unique field names, then in `job_names`; what
is none of these is an error that names the nearest name and the section it belongs in. Values are
validated elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from packmule.errors import ConfigError
from packmule.spec.job_names import ALIASES, CONVERTED, EXCLUSIVE, FIXED, MAIN_FIELD, REFUSED, SECTION_ALIASES
from packmule.spec.records import nearest
from packmule.spec.yaml_text import load_yaml, read_scalar

Fields = Mapping[str, Mapping[str, bool]]
"""section -> field -> whether it holds text (then a flag's value is taken as it stands)."""


_TOTAL = "train.global_batch_size"
_MICRO = "train.micro_batch_size"
_ACCUMULATION = "train.gradient_accumulation_steps"


@dataclass
class Collected:
    """The sections, and how each field came to its value.

    Attributes:
        data: section -> field -> value, as written.
        notes: one line for the user per name that was taken for another or that changes nothing.
        origin: dotted field -> where it was written.
        names: dotted field -> under which name.
    """

    data: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def get(self, dotted: str) -> Any:
        """The value of a field, None when it is not set (or set to -1, as transformers does)."""
        section, _, name = dotted.partition(".")
        value = self.data[section].get(name)
        return None if value == -1 else value

    def set(self, dotted: str, value: Any) -> None:
        """Give a field a value."""
        section, _, name = dotted.partition(".")
        self.data[section][name] = value

    def drop(self, dotted: str) -> None:
        """Forget a field."""
        section, _, name = dotted.partition(".")
        self.data[section].pop(name, None)
        self.origin.pop(dotted, None)
        self.names.pop(dotted, None)

    def source_of(self, path: Sequence[int | str], default: str) -> str:
        """Where the field at a validation error's path was written."""
        return self.origin.get(".".join(str(part) for part in path[:2]), default)


class _Entry(NamedTuple):
    key: str  # snake case, maybe dotted
    written: str  # as the user wrote it
    value: Any
    source: str  # for messages
    is_flag: bool  # the value is command-line text, not data
    told: bool = False  # a note says how the name was read


def collect(
    job: str | Mapping[str, Any],
    source: str,
    variables: Iterable[tuple[str, str]],
    overrides: Iterable[tuple[str, str]],
    arguments: Mapping[str, Any],
    fields: Fields,
) -> Collected:
    """Merge the layers.

    Args:
        job: YAML text, may be empty; or what such text says, as plain data.
        source: its name, for messages.
        variables: (variable, value), named like PACKMULE_MAX_STEPS or PACKMULE_OPTIM__LR.
        overrides: (key, value) of flags, without the dashes; keys may be dotted.
        arguments: of a call: a key, maybe dotted, or a section -> plain data.
        fields: what sections and fields there are.

    Raises:
        ConfigError: names that mean nothing here, or bad YAML.
    """
    collected = Collected({section: {} for section in fields})
    names = _Names(fields)
    data = load_yaml(job, source) if isinstance(job, str) else job
    _put(_data_entries(data, source, fields, told=True), names, collected)
    _put(
        [
            _Entry(_snake(key.removeprefix("PACKMULE_").replace("__", ".")), key, value, key, True)
            for key, value in variables
        ],
        names,
        collected,
    )
    _put(
        [
            _Entry(_snake(key), f"--{key}", value, f"the command line (--{key})", True)
            for key, value in overrides
        ],
        names,
        collected,
    )
    _put(_data_entries(arguments, "the arguments", fields, told=False), names, collected)
    return collected


def _snake(name: str) -> str:
    return name.strip().replace("-", "_").lower()


def _data_entries(data: Any, source: str, fields: Fields, told: bool) -> list[_Entry]:
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source} holds no `key: value` lines.", f"write sections: {', '.join(fields)}")
    entries = []
    for written, value in data.items():
        name = _snake(str(written))
        section = SECTION_ALIASES.get(name, name)
        if section in fields and isinstance(value, Mapping):
            for inner, setting in value.items():
                key = f"{section}.{_snake(str(inner))}"
                entries.append(_Entry(key, f"{written}.{inner}", setting, source, False, told))
        elif value is not None or section not in fields:
            entries.append(_Entry(name, str(written), value, source, False, told))
    return entries


def _put(entries: Iterable[_Entry], names: _Names, collected: Collected) -> None:
    """Put one layer over the earlier ones."""
    put: dict[str, Any] = {}
    for entry in entries:
        name = entry.key.rpartition(".")[2]
        if name in FIXED:
            collected.notes.append(_check_fixed(name, entry))
            continue
        if name in CONVERTED:
            found = CONVERTED[name](read_scalar(entry.value) if entry.is_flag else entry.value)
            if found is None:
                continue
            dotted, value = found
        else:
            dotted = names.field_of(entry)
            value = names.read(dotted, entry)
        if entry.told and entry.key != dotted:
            collected.notes.append(f"{entry.source}: `{entry.written}` was read as `{dotted}`")
        put[dotted] = value
        collected.set(dotted, value)
        collected.origin[dotted] = entry.source
        collected.names[dotted] = name
    for group in EXCLUSIVE:
        if any(put.get(key) not in (None, -1) for key in group):
            for other in group - put.keys():
                collected.drop(other)
    _merge_batch(collected, put.keys())


def _check_fixed(name: str, entry: _Entry) -> str:
    accepted, why = FIXED[name]
    value = read_scalar(entry.value) if entry.is_flag else entry.value
    text = "null" if value is None else str(value).lower()
    if accepted != ("*",) and text not in accepted:
        raise ConfigError(
            f"{entry.source}: `{entry.written}` = {value!r} is not offered: {why}.",
            f"leave `{entry.written}` out",
        )
    return f"{entry.source}: `{entry.written}` changes nothing: {why}"


def _merge_batch(collected: Collected, put: Set[str]) -> None:
    """Keep the three batch sizes consistent when a layer replaces some of them.

    Rows a step are the promise: once written, or implied by the other two, they stay until a layer
    replaces them; micro-batch and accumulation give way.
    """
    if _ACCUMULATION in put and _TOTAL not in put:
        if _TOTAL in collected.origin and _MICRO not in put:
            collected.drop(_MICRO)
        elif _TOTAL not in collected.origin:
            collected.drop(_TOTAL)
    elif _ACCUMULATION in put and _MICRO not in put:
        collected.drop(_MICRO)
    elif {_MICRO, _TOTAL} & put and collected.get(_TOTAL) is not None and _ACCUMULATION not in put:
        collected.drop(_ACCUMULATION)
    if collected.get(_TOTAL) is not None:
        return
    if collected.names.get(_MICRO) == "per_device_train_batch_size" and collected.get(_ACCUMULATION) is None:
        # Means that many rows a step in every tool that has the name.
        collected.set(_ACCUMULATION, 1)
        collected.notes.append(
            "`per_device_train_batch_size` without `gradient_accumulation_steps`: one micro-batch is a step; "
            "`train.global_batch_size` sets the rows of a step by itself"
        )
    micro, accumulation = collected.get(_MICRO), collected.get(_ACCUMULATION)
    if isinstance(micro, int) and isinstance(accumulation, int):
        collected.set(_TOTAL, micro * accumulation)


class _Names:
    """Which field a name means, or why none."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.owners: dict[str, list[str]] = {}
        for section, names in fields.items():
            for name in names:
                self.owners.setdefault(name, []).append(section)

    def read(self, dotted: str, entry: _Entry) -> Any:
        """The entry's value: a flag's text is read as YAML, also `{a: 1}`, unless the field holds text."""
        section, _, name = dotted.partition(".")
        if not entry.is_flag:
            return entry.value
        holds_text = self.fields[section][name]
        if not holds_text and entry.value.startswith("{") and entry.value.endswith("}"):
            return load_yaml(entry.value, entry.source)
        value = read_scalar(entry.value)
        return entry.value if holds_text and not isinstance(value, (list, dict, type(None))) else value

    def field_of(self, entry: _Entry) -> str:
        """The dotted field an entry means.

        Raises:
            ConfigError: there is none.
        """
        section, _, name = entry.key.rpartition(".")
        section = SECTION_ALIASES.get(section, section)
        if name in REFUSED and name not in self.fields.get(section, {}):
            raise ConfigError(f"{entry.source}: there is no `{entry.written}`.", REFUSED[name])
        if section in self.fields and name in self.fields[section]:
            return f"{section}.{name}"
        home = self._home(name)
        if home is not None and section in ("", home.partition(".")[0]):
            return home
        self._refuse(entry, section, name, home)

    def _home(self, name: str) -> str | None:
        if name in MAIN_FIELD:
            return f"{name}.{MAIN_FIELD[name]}"
        if len(self.owners.get(name, ())) == 1:
            return f"{self.owners[name][0]}.{name}"
        return ALIASES.get(name)

    def _refuse(self, entry: _Entry, section: str, name: str, home: str | None) -> NoReturn:
        cause = f"{entry.source}: unknown key `{entry.written}`."
        if home is not None:
            raise ConfigError(cause, f"it belongs in section `{home.partition('.')[0]}`: write `{home}`")
        if name in self.owners:
            dotted = [f"`{owner}.{name}`" for owner in self.owners[name]]
            raise ConfigError(cause, f"several sections have it; write {' or '.join(dotted)}")
        if name in self.fields and not section:
            raise ConfigError(
                f"{entry.source}: `{entry.written}` = {entry.value!r} is a section, not a value.",
                f"put keys under it: {', '.join(self.fields[name])}",
            )
        guess = nearest(name, list(self.fields.get(section, ())))
        if guess is not None:
            raise ConfigError(cause, f"did you mean `{section}.{guess}`?")
        guess = nearest(name, [*self.owners, *ALIASES, *self.fields])
        if guess in self.fields and guess not in self.owners:
            raise ConfigError(cause, f"did you mean the section `{guess}`?")
        if guess is not None:
            found = self._home(guess) or " or ".join(f"{owner}.{guess}" for owner in self.owners[guess])
            raise ConfigError(
                cause, f"did you mean `{guess}` (`{found}`, section `{found.partition('.')[0]}`)?"
            )
        known = ", ".join(self.fields.get(section, self.fields))
        where = f"keys of `{section}`" if section in self.fields else "sections"
        raise ConfigError(cause, f"{where}: {known}")
