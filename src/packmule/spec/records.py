"""The base of every record that is parsed or printed: strict, frozen, good at saying no."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from packmule.errors import ConfigError

SHOWN = 300
"""Characters of a key or value that a message shows at most: a damaged file's may be as long as it is."""


_PROBLEMS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "is not a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "is not a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "is neither true nor false"),
    **dict.fromkeys(("string_too_short", "too_short"), "is empty"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "is not a mapping"),
    **dict.fromkeys(("list_type", "tuple_type"), "is not a list"),
    "finite_number": "is not a finite number",
    "string_type": "is not text",
    "literal_error": "is not one of {expected}",
    "greater_than": "is not greater than {gt:g}",
    "greater_than_equal": "is not greater than or equal to {ge:g}",
    "less_than": "is not less than {lt:g}",
    "less_than_equal": "is not less than or equal to {le:g}",
}
"""Type of a validation error -> what is wrong with the value."""


class Record(BaseModel):
    """An immutable value with validated fields; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    @classmethod
    def parse(cls, data: Any, source: str) -> Self:
        """Validate plain data.

        Args:
            data: mappings, lists and scalars, as YAML or JSON gives them.
            source: where the data came from (a path, "command line"), for the message.

        Raises:
            ConfigError: names source, key, value and the nearest valid key.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(*_explain(cls, error, source)) from None

    @classmethod
    def parse_json(cls, text: str, source: str) -> Self:
        """Like `parse`, from JSON text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source} is not JSON: {error}", "restore the file") from None
        return cls.parse(data, source)

    def to_json(self) -> str:
        """Indented JSON that `parse_json` reads back to an equal record."""
        return self.model_dump_json(indent=2) + "\n"


def nearest(name: str, valid: list[str]) -> str | None:
    """The valid name closest to `name`, treating '-' and '_' alike, or None."""
    found = difflib.get_close_matches(name[:SHOWN].replace("-", "_"), valid, n=1, cutoff=0.6)
    return found[0] if found else None


def _fields_at(cls: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    current: type[BaseModel] | None = cls
    for step in path:
        if current is None:
            return []
        field = current.model_fields.get(str(step))
        if field is not None:  # else a place in a list, or the name of a choice
            current = _model_in(field.annotation)
    return [] if current is None else list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first record an annotation holds, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found is not None), None)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _explain(cls: type[BaseModel], error: ValidationError, source: str) -> tuple[str, str]:
    # A mistyped key also leaves the right one missing: the typing error says more.
    found = error.errors()
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    path = tuple(first["loc"])
    key = _cut(".".join(str(part) for part in path))
    if first["type"] == "extra_forbidden":
        valid = _fields_at(cls, path[:-1])
        guess = nearest(str(path[-1]), valid)
        hint = f"did you mean `{guess}`?" if guess else f"valid keys: {', '.join(sorted(valid))}"
        return f"{source}: unknown key `{key}`.", hint
    if first["type"] == "missing":
        return f"{source}: `{key}` is missing.", f"add `{key}`"
    value, problem = first["input"], _PROBLEMS.get(first["type"])
    context = first.get("ctx", {})
    said = f" {problem.format(**context)}" if problem else f": {first['msg'].removeprefix('Value error, ')}"
    hint = f"change `{key}` in {source}"
    if first["type"] == "literal_error" and isinstance(value, str):
        guess = nearest(value, re.findall("'([^']+)'", context["expected"]))
        hint = f"did you mean `{guess}`?" if guess else hint
    elif value is None:
        hint = f"leave `{key}` out, or give it a value"
    return f"{source}: `{key}` = {_cut(repr(value))}{said}.", hint
