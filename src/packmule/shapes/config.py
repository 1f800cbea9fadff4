"""Typed reading of a Hugging Face config.json: every refusal names the file and the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packmule.errors import ConfigError

_RESTORE = "restore the model's own config.json"
_MOST = 1 << 31
_LARGEST = 1e300


class Config:
    """A config.json's values, with what transformers takes for those that are left out.

    Args:
        values: the parsed file.
        source: names the file in errors.
        defaults: of keys that may be missing.
        aliases: key -> the name it has in this file.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._values, self.source = values, source
        self._defaults, self._aliases = defaults or {}, aliases or {}

    def get(self, key: str) -> Any:
        """A value as it stands; its default where it is missing, None where it has none."""
        return self._values.get(self._aliases.get(key, key), self._defaults.get(key))

    def integer(self, key: str, most: int = _MOST) -> int:
        """A whole number from 1 to `most`.

        Raises:
            ConfigError: missing, or something else.
        """
        found = self.optional_integer(key, most)
        if found is None:
            name = self._aliases.get(key, key)
            raise ConfigError(f"{self.source}: {name!r} is missing.", "use the model's full config.json")
        return found

    def optional_integer(self, key: str, most: int = _MOST) -> int | None:
        """Like `integer`; None where it is null or missing."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "a whole number of at least 1")
        if value > most:
            raise self.wrong(key, f"a whole number of at most {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0; `default` where it is null or missing."""
        found = self.optional_number(key)
        return default if found is None else found

    def optional_number(self, key: str) -> float | None:
        """Like `number`; None where it is null or missing."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def factor(self, key: str) -> float:
        """A number of at least 0; 0 where it is null or missing."""
        value = self.get(key)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            raise self.wrong(key, "a number of at least 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; false where it is null or missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def section(self, key: str) -> Config:
        """A nested object, empty where it is null or missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Config(value or {}, f"{self.source}: {key}")

    def refuse(self, *flags: str) -> None:
        """Raise ConfigError where one of these options is on."""
        for key in flags:
            if self.get(key):
                raise ConfigError(
                    f"{self.source}: {key} is not supported.", "use a model that does without it"
                )

    def unsupported(self, key: str, supported: Iterable[str]) -> ConfigError:
        """The error of a value that is not offered."""
        name = self._aliases.get(key, key)
        return ConfigError(
            f"{self.source}: {name} {self.get(key)!r} is not supported.", f"supported: {', '.join(supported)}"
        )

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error of a value that is not what it should be."""
        name = self._aliases.get(key, key)
        return ConfigError(f"{self.source}: {name!r} is {self.get(key)!r:.80}, not {expected}.", _RESTORE)
