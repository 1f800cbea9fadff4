"""YAML text to plain data, read the way people mean it. No files.

Differences from PyYAML's safe loader: 1e-4 is a float; `none` and `None` are null like `null`;
only true and false are booleans (`on`, `no` stay words); no dates, octal or base-60 numbers; a
key written twice is an error.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from packmule.errors import ConfigError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's protocol

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is no name", key.start_mark)
            # A merge key may come several times.
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key.value}` is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` or a YAML 1.1 reader would take for something else."""


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"|~|null|Null|NULL|none|None|NONE", ["", "~", "n", "N"]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", "<<", "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), list(_first)
        )


def load_yaml(text: str, source: str) -> Any:
    """Plain data from one YAML document.

    Raises:
        ConfigError: names source, line and column.
    """
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        cause = f"{source}{where}: {error.problem or 'not YAML'}."
        raise ConfigError(cause, "write `key: value` lines, indented with spaces") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source} is not YAML: {error}.", "write `key: value` lines") from None
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(data: Any) -> str:
    """YAML in the order of the data; `load_yaml` reads it back equal."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read_scalar(text: str) -> Any:
    """One value as the command line gives it: the scalar YAML would read, or a [list]."""
    if text.startswith("[") and text.endswith("]"):
        return load_yaml(text, "the command line")
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return loader.construct_object(yaml.ScalarNode(tag, text))
    finally:
        loader.dispose()
