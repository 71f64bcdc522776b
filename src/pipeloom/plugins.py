"""Entry points through which other installed distributions extend Pipeloom.

A distribution declares them in its ``pyproject.toml``. Each entry point names a mapping from names to objects:

============================  ====================================================
group                         values
============================  ====================================================
``pipeloom.commands``         `pipeloom.cli.app.Command`
``pipeloom.search_methods``   `pipeloom.search.Method`
``pipeloom.arrange_methods``  function of a `LayerChain`, like `cooptimize`
============================  ====================================================
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pipeloom.printing import print_error

COMMANDS = "pipeloom.commands"
SEARCH_METHODS = "pipeloom.search_methods"
ARRANGE_METHODS = "pipeloom.arrange_methods"


@cache
def installed(group: str) -> dict[str, Any]:
    """Return the objects that installed distributions add to a group, by name.

    An entry point that fails to load is skipped with a note, so that a broken distribution does not break Pipeloom.
    """
    found: dict[str, Any] = {}
    for entry in entry_points(group=group):
        try:
            found.update(entry.load())
        except Exception as error:
            owner = entry.dist.name if entry.dist is not None else entry.value
            print_error(f"{owner}: skipping its {group}: {type(error).__name__}: {error}; update or uninstall it")
    return found
