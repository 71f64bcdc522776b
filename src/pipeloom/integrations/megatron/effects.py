"""Classify Megatron's arguments by how they are emulated: modeled, without effect, noted, or rejected.

The files in ``names`` list every argument once.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from pipeloom.integrations.megatron.arguments import Arguments

_ONLY_WITH = {
    "moe-": ("num-experts", 1),
    "cp-comm-": ("context-parallel-size", 2),
    "hierarchical-context-": ("context-parallel-size", 2),
    "tp-comm-": ("tensor-model-parallel-size", 2),
    "distribute-saved-": ("tensor-model-parallel-size", 2),
}
"""Arguments, by the prefix of their names, that have an effect only if another argument has at least a value."""


class Note(NamedTuple):
    """How an argument is emulated, and how this changes the emulated numbers."""

    text: str
    direction: str
    unless: frozenset[str]
    """Values of the argument that are emulated exactly."""


@dataclass(frozen=True)
class Effects:
    """Names of arguments by their effect: emulated, without effect, emulated approximately, and rejected.

    Harmless and rejected ones have the reason.
    """

    modeled: frozenset[str]
    harmless: Mapping[str, str]
    noted: Mapping[str, Note]
    rejected: Mapping[str, str]
    absent: Mapping[tuple[str, str], tuple[str, ...]]
    """Names whose absence is noted, by how it is emulated and how this changes the numbers."""
    implied: Mapping[str, tuple[str, ...]]
    """Names that switch off what is on by default without a name."""

    @property
    def names(self) -> frozenset[str]:
        return self.modeled.union(self.harmless, self.noted, self.rejected)


@functools.cache
def effects_of(file: str) -> Effects:
    """Read the file ``arguments`` or ``fields``."""
    text = resources.files(__package__).joinpath("names", f"{file}.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    unless = {name: frozenset(values.split()) for name, values in tables.get("unless", {}).items()}
    noted = {
        name: Note(what, direction, unless.get(name, frozenset()))
        for direction, table in tables["noted"].items()
        for name, what in _by_name(table)
    }
    absent = {
        (text, direction): tuple(names.split())
        for direction, table in tables.get("absent", {}).items()
        for text, names in table.items()
    }
    return Effects(
        frozenset(tables["modeled"].split()),
        dict(_by_name(tables["harmless"])),
        noted,
        dict(_by_name(tables["refused"])),
        absent,
        {name: tuple(others.split()) for name, others in tables.get("implied", {}).items()},
    )


def _by_name(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for text, names in table.items():
        for name in names.split():
            yield name, text


@functools.cache
def known_names() -> frozenset[str]:
    """Return the names of Megatron-LM's arguments, with dashes (release 0.16.1 to the main branch of August 2026)."""
    return effects_of("arguments").names


@functools.cache
def known_fields() -> frozenset[str]:
    """Return the names of arguments, and of fields that only configuration files have."""
    return known_names() | effects_of("fields").names


def check_rejected(arguments: Arguments) -> None:
    """Raise `InputError` for an argument that cannot be emulated."""
    for file in ("arguments", "fields"):
        for name, why in effects_of(file).rejected.items():
            if name in arguments.given and arguments.on(name):
                raise arguments.refuse(name, "cannot be planned", why)


def notes_of(arguments: Arguments) -> list[str]:
    """Return a note for every argument that is emulated only approximately.

    Defaults of Megatron that are emulated only approximately are noted too.
    """
    found = []
    for file in ("arguments", "fields"):
        for name, note in effects_of(file).noted.items():
            if name in arguments.given and _applies(arguments, name) and arguments.on(name):
                values = set(arguments.given[name].values)
                if not values or not values <= note.unless:
                    found.append(f"{arguments.label(name)}: {note.text}; {note.direction}")
    effects = effects_of("arguments")
    for (text, direction), names in effects.absent.items():
        missing = [
            f"--{name}"
            for name in names
            if name not in arguments.given
            and _applies(arguments, name)
            and not any(map(arguments.on, effects.implied.get(name, ())))
        ]
        if missing:
            found.append(f"without {' '.join(missing)}: {text}; {direction}")
    unknown = [name for name in arguments.given if name not in known_fields() | arguments.asked]
    if unknown:
        found.append(f"{' '.join(map(arguments.label, unknown))}: unknown, and emulated without")
        arguments.asked.update(unknown)
    return found


def _applies(arguments: Arguments, name: str) -> bool:
    for start, (other, least) in _ONLY_WITH.items():
        if name.startswith(start):
            return (arguments.count(other, 0, least=0) or 0) >= least
    return True
