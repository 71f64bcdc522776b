"""Fields of a config: what it says, what its model type says where it is silent, and where a fault is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pipeloom.errors import InputError
from pipeloom.integrations.huggingface.defaults import DEFAULTS
from pipeloom.spec.architecture import MOST_SIZE
from pipeloom.spec.model import MOST_LAYERS

Config = Mapping[str, Any]
_REMEDY = "see the config of a published model of this type"


class Fields:
    """Fields of a config or of a part of one.

    Parameters
    ----------
    config : mapping
        As the library writes it.
    kind : str
        Model type whose defaults stand in for what is left out.
    where : str
        Put before names in messages, such as ``"text_config."``.
    """

    def __init__(self, config: Config, kind: str, where: str = "") -> None:
        self._config, self.kind, self._where = config, kind, where
        self._defaults = DEFAULTS.get(kind, {})

    def __contains__(self, name: str) -> bool:
        """Whether the config itself says something."""
        return self._config.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether there is a value, the config's or its model type's."""
        return self._config.get(name, self._defaults.get(name)) is not None

    def refuse(self, name: str, problem: str, remedy: str = _REMEDY) -> InputError:
        """An error that names a field."""
        return InputError(f"{self._where}{name}", problem, remedy)

    def get(self, *names: str) -> Any:
        """What the config says under the first of some names that it has, else the default."""
        for name in names:
            if name in self._config:
                return self._config[name]
        for name in names:
            if name in self._defaults:
                return self._defaults[name]
        raise self.refuse(names[0], "is missing")

    def size(self, *names: str, otherwise: int | None = None, least: int = 1) -> int:
        """A whole number; ``otherwise`` where it is null or has no default."""
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
        """How many layers a part has."""
        count = self.size(name)
        if count > MOST_LAYERS:
            raise self.refuse(name, f"{count} is above {MOST_LAYERS}")
        return count

    def heads(self, name: str, hidden: int) -> tuple[int, int]:
        """Heads, and the width that each has of a hidden width."""
        heads = self.size(name)
        if hidden % heads:
            raise self.refuse(name, f"{heads} does not divide the width {hidden}")
        return heads, hidden // heads

    def flag(self, name: str) -> bool:
        """A truth value; null is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, f"{value!r} is neither true nor false")
        return bool(value)

    def number(self, name: str) -> float:
        """A number above zero."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(name, f"{value!r} is not a number above 0")
        return float(value)

    def pair(self, name: str) -> tuple[int, int]:
        """Two whole numbers, or one for both."""
        value = self.get(name)
        both = [value, value] if not isinstance(value, list | tuple) else list(value)
        if len(both) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in both):
            raise self.refuse(name, f"{value!r} is not a whole number above 0, nor two")
        return both[0], both[1]

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; null is empty."""
        value = self.get(name)
        found = [] if value is None else value
        if not isinstance(found, list | tuple) or any(isinstance(n, bool) or not isinstance(n, int) for n in found):
            raise self.refuse(name, f"{value!r} is not a list of whole numbers")
        return list(found)

    def words(self, *names: str, known: tuple[str, ...], count: int | None = None) -> list[str] | None:
        """A list of some known words, ``count`` of them; None where it is left out or null."""
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
        """Fields of a part that the config has under a name.

        Parameters
        ----------
        kind : str
            Its model type; where it may be any of those ``known``, only if it does not say.
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
