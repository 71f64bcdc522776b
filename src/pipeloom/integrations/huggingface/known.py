"""Published models by name, without network access. The folder `published` has the fields that affect costs."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from pipeloom.errors import InputError


@cache
def known_models() -> tuple[str, ...]:
    """Return the names of the included models."""
    folder = resources.files(__package__).joinpath("published")
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def known_name(text: str) -> str | None:
    """Return the included model of a name, or None. Owner, case and a suffix ``-Instruct`` or ``-hf`` are ignored."""
    name = text.rpartition("/")[2].lower().removesuffix("-hf").removesuffix("-instruct")
    return name if name in known_models() else None


def known_config(name: str) -> dict[str, Any]:
    """Return the config of one of `known_models`. Raise `InputError` for other names."""
    if name not in known_models():
        raise InputError(f"model {name!r}", "is unknown", f"known are {', '.join(known_models())}")
    text = resources.files(__package__).joinpath("published", f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
