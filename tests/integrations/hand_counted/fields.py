"""Validated access to the fields of a config, with the defaults of its model type."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import transformers

from pipeloom.errors import InputError
from pipeloom.spec.architecture import MOST_SIZE
from pipeloom.spec.model import MOST_LAYERS

Config = Mapping[str, Any]
_REMEDY = "see the config of a published model of this type"


@cache
def _defaults(kind: str) -> dict[str, Any]:
    """Return the library's own defaults of a model type, as its class states them."""
    found = transformers.CONFIG_MAPPING[kind]
    stated = {f.name: f.default for f in dataclasses.fields(found) if f.default is not dataclasses.MISSING}
    parts = getattr(found, "default_config_fields", dict)()
    return {"tie_word_embeddings": False} | stated | {n: v for n, v in parts.items() if isinstance(v, dict)}


class Fields:
    """Fields of a config or of a section of it.

    Parameters
    ----------
    kind : str
        Model type with the defaults of missing fields.
    where : str
        Prefix of field names in error messages, such as ``"text_config."``.
    """

    def __init__(self, config: Config, kind: str, where: str = "") -> None:
        self._config, self.kind, self._where = config, kind, where
        self._defaults = _defaults(kind)

    def __contains__(self, name: str) -> bool:
        """Return whether the config itself has a value that is not null."""
        return self._config.get(name) is not None

    def says(self, name: str) -> bool:
        """Return whether the config or its defaults have a value that is not null."""
        return self._config.get(name, self._defaults.get(name)) is not None

    def refuse(self, name: str, problem: str, remedy: str = _REMEDY) -> InputError:
        """Return an error that names a field."""
        return InputError(f"{self._where}{name}", problem, remedy)

    def get(self, *names: str) -> Any:
        """Return the value of the first of these names in the config, or else the default."""
        for name in names:
            if name in self._config:
                return self._config[name]
        for name in names:
            if name in self._defaults:
                return self._defaults[name]
        raise self.refuse(names[0], "is missing")

    def size(self, *names: str, otherwise: int | None = None, least: int = 1) -> int:
        """Return an integer, or ``otherwise`` if it is null or missing without a default."""
        try:
            value = self.get(*names)
        except InputError:
            if otherwise is None:
                raise
            value = None
        if value is None:
            value = otherwise
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(names[0], f"{value!r} is not a whole number of at least {least}")
        if value > MOST_SIZE:
            raise self.refuse(names[0], f"{value} is above {MOST_SIZE}")
        return value

    def blocks(self, name: str) -> int:
        """Return a number of layers."""
        count = self.size(name)
        if count > MOST_LAYERS:
            raise self.refuse(name, f"{count} is above {MOST_LAYERS}")
        return count

    def heads(self, name: str, hidden: int) -> tuple[int, int]:
        """Return the number of heads, and the width of a head for a hidden width."""
        heads = self.size(name)
        if hidden % heads:
            raise self.refuse(name, f"{heads} does not divide the width {hidden}")
        return heads, hidden // heads

    def flag(self, name: str) -> bool:
        """Return a boolean. Null counts as false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, f"{value!r} is neither true nor false")
        return bool(value)

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(name, f"{value!r} is not a number above 0")
        return float(value)

    def pair(self, name: str) -> tuple[int, int]:
        """Return two positive integers. A single one is used for both."""
        value = self.get(name)
        both = [value, value] if not isinstance(value, list | tuple) else list(value)
        if len(both) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in both):
            raise self.refuse(name, f"{value!r} is not a whole number above 0, nor two")
        return both[0], both[1]

    def numbers(self, name: str) -> list[int]:
        """Return a list of integers. Null counts as empty."""
        value = self.get(name)
        found = [] if value is None else value
        if not isinstance(found, list | tuple) or any(isinstance(n, bool) or not isinstance(n, int) for n in found):
            raise self.refuse(name, f"{value!r} is not a list of whole numbers")
        return list(found)

    def words(self, *names: str, known: tuple[str, ...], count: int | None = None) -> list[str] | None:
        """Return a list of ``count`` known words, or None if it is missing or null."""
        name = next((name for name in names if name in self), None)
        if name is None:
            return None
        value = self._config[name]
        if not isinstance(value, list) or not value:
            raise self.refuse(name, f"{value!r} is not a list of words")
        for number, word in enumerate(value):
            if word not in known:
                raise self.refuse(f"{name}[{number}]", f"{word!r} is not known", f"known are {', '.join(known)}")
        if count is not None and len(value) != count:
            raise self.refuse(name, f"has {len(value)} entries for {count} layers")
        return value

    def part(self, name: str, kind: str, *, known: Collection[str] = ()) -> Fields:
        """Return the fields of a section of the config.

        Parameters
        ----------
        kind : str
            Model type of the section.
        known : collection of str
            If not empty, the section may name one of these model types instead of ``kind``.
        """
        value = self._config.get(name)
        if value is None:
            value = self._defaults.get(name, {})
        if not isinstance(value, Mapping):
            raise self.refuse(name, f"{value!r} is not a JSON object")
        if known and value.get("model_type") is not None:
            kind = str(value["model_type"])
        part = Fields(value, kind, f"{self._where}{name}.")
        if known and kind not in known:
            raise part.refuse("model_type", f"{kind!r} is not known", f"known are {', '.join(known)}")
        return part
