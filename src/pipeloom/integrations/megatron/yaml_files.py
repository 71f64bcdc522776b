"""Read YAML of Megatron's configurations, with a limit on what aliases expand to."""

from __future__ import annotations

from typing import Any

from pipeloom.errors import InputError

_MAX_CHARACTERS = 4 * 1024 * 1024
_MAX_ENTRIES = 100_000
"""Most entries of a document with its aliases expanded, and of one table with its merges."""


def read_yaml(source: str, text: str) -> Any:
    """Read a YAML document.

    Raises `InputError` for text that is not YAML, is too long, contains itself, or has aliases for too many entries.
    """
    try:
        import yaml
    except ImportError as error:
        raise InputError(source, "needs PyYAML to be read", 'pip install "pipeloom[megatron]"') from error
    if len(text) > _MAX_CHARACTERS:
        raise InputError(source, f"{len(text)} characters are more than {_MAX_CHARACTERS}", "give one configuration")

    # Recipes name classes and functions as text, so that no object needs to be built.
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            _check_entries(source, len(node.value))

    try:
        document = yaml.load(text, Loader)
    # ValueError: invalid dates, numbers of thousands of digits.
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(source, f"is not YAML: {error}", "save it again, or give an argument list") from error
    _check_entries(source, _num_entries(source, document, {}))
    return document


def _num_entries(source: str, node: Any, known: dict[int, int]) -> int:
    """Return the number of entries of a document with its aliases expanded."""
    if not isinstance(node, dict | list):
        return 1
    if known.setdefault(id(node), -1) >= 0:
        return known[id(node)]
    known[id(node)] = -2
    total = 1
    for child in node.values() if isinstance(node, dict) else node:
        if known.get(id(child)) == -2:
            raise InputError(source, "has an alias inside of what it stands for", "write the value out")
        total += _num_entries(source, child, known)
    known[id(node)] = total
    return total


def _check_entries(source: str, count: int) -> None:
    if count > _MAX_ENTRIES:
        raise InputError(source, f"its aliases stand for more than {_MAX_ENTRIES} entries", "write the values out")
