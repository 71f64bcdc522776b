"""Reject files of other programs in place of Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError
from pipeloom.integrations.foreign import MODELS, SUFFIXES, json_document, kind_of_settings

_REMEDY = "give Megatron's arguments: a text file, a shell script, or YAML of Megatron-LM or Megatron Bridge"


def check_form(source: str, text: str) -> None:
    """Raise `InputError` for a file that cannot hold Megatron's arguments, by its name or as JSON."""
    suffix = Path(source).suffix.lower()
    if suffix == ".py":
        recipe = "save a recipe of Megatron Bridge with ConfigContainer.to_yaml, or give the argument list"
        raise InputError(source, f"is {SUFFIXES[suffix]}", recipe)
    if suffix == ".toml":
        remedy = "pipeloom compare MODEL --now FILE reads torchtitan's"
        raise InputError(source, "is TOML, in which Megatron has no arguments", remedy)
    if suffix in SUFFIXES:
        raise InputError(source, f"is {SUFFIXES[suffix]}, not a list of arguments", _REMEDY)
    if suffix != ".json" and not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return
    document = json_document(text)
    if isinstance(document, dict):
        check_program(source, document)
    if document is not None or suffix == ".json":
        raise InputError(source, "is JSON, in which Megatron has no arguments", _REMEDY)


def check_program(source: str, document: Mapping[Any, Any]) -> None:
    """Raise `InputError`, which names the program, for settings of another program."""
    kind = kind_of_settings(document)
    if kind in MODELS:
        raise InputError(source, f"is {kind}", f"pipeloom compare {source} reads it; or {_REMEDY}")
    if kind:
        raise InputError(source, f"is {kind}, not of Megatron", _REMEDY)
