"""Published models by name, without a network: their configs lie in `published`.

They are without what neither costs nor parameters follow from.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from pipeloom.errors import InputError


@cache
def known_models() -> tuple[str, ...]:
    """Names of the models whose configs are here."""
    folder = resources.files(__package__).joinpath("published")
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def known_name(text: str) -> str | None:
    """Which of them is meant: an owner before it, ``-Instruct`` after it and capitals do not matter; None: none."""
    name = text.rpartition("/")[2].lower().removesuffix("-hf").removesuffix("-instruct")
    return name if name in known_models() else None


def known_config(name: str) -> dict[str, Any]:
    """Config of one of `known_models`.

    Raises
    ------
    InputError
        It is none of them.
    """
    if name not in known_models():
        raise InputError(f"model {name!r}", "is unknown", f"known are {', '.join(known_models())}")
    text = resources.files(__package__).joinpath("published", f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
