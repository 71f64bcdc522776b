"""Variables, functions and options of a running script."""

from __future__ import annotations

import re
from typing import TypeAlias

from pipeloom.integrations.megatron.shell import syntax
from pipeloom.integrations.megatron.shell.values import Refusal, Status, Unknowns

Array: TypeAlias = dict[str, str]
"""Elements by index. The indices of an indexed array are decimal numbers; the index "" stands for unknown elements."""

_FROM_THE_SHELL = frozenset(
    (
        *("HOME", "PWD", "OLDPWD", "USER", "LOGNAME", "PATH", "HOSTNAME", "HOSTTYPE", "OSTYPE", "MACHTYPE", "SHELL"),
        *("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "UID", "EUID", "PPID", "BASHPID"),
        *("FUNCNAME", "BASH", "BASH_VERSION", "BASH_VERSINFO", "SHLVL", "SHELLOPTS", "BASHOPTS", "LANG", "TERM"),
        "BASH_COMMAND",
    )
)
"""Variables that every shell has, with values of its own."""


def is_name(text: str) -> bool:
    """Return whether a text can name a variable."""
    return re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII) is not None


class State:
    """What commands change and expansions read.

    ``functions`` have the file that defines each. ``output`` has what was printed, where it is captured. ``unread``
    names a sourced file that could not be read, and may set any variable.
    """

    def __init__(self, script: str, unknowns: Unknowns) -> None:
        self.script, self.unknowns = script, unknowns
        self.variables: dict[str, str | Array] = {"BASH_SOURCE": {"0": script}}
        self.associative: set[str] = set()
        """Variables that are declared as associative arrays."""
        self.exported: set[str] = set()
        self.functions: dict[str, tuple[syntax.Command, str]] = {}
        self.positional: list[str] = []
        self.options: set[str] = set()
        self.status: Status = 0
        self.cwd = unknowns.make("$PWD", "text")
        self.output: list[str] | None = None
        self.unread = ""

    def copy_variables(self) -> dict[str, str | Array]:
        self.unknowns.charge(1 + sum(len(v) for v in self.variables.values() if isinstance(v, dict)) // 10)
        return {name: dict(v) if isinstance(v, dict) else v for name, v in self.variables.items()}

    # ------------------------------------------------------------------ variables

    def missing(self, source: str) -> str:
        """Return what stands for a variable that is not set."""
        if self.unread:
            return self.unknowns.make(f"{source}, which {self.unread} may set,", "text")
        return self.unknowns.make(source, "required" if "u" in self.options else "unset")

    def get(self, name: str, index: str | None = None) -> str | None:
        """Return a variable, an element or a parameter; None where it is not set."""
        if name.isdecimal():
            values = [self.script, *self.positional]
            return values[int(name)] if int(name) < len(values) else None
        if name == "#":
            return str(len(self.positional))
        if name == "?":
            return str(self.status) if isinstance(self.status, int) else self.unknowns.derive(self.status, "text")
        found = self.variables.get(name)
        if found is None:
            if name == "LINENO":
                return str(self.unknowns.line)
            return self.unknowns.make(f"${name}", "text") if name in _FROM_THE_SHELL or name in "$!-" else None
        if isinstance(found, str):
            return found if index in (None, "0") else None
        return found[""] if "" in found else found.get(self._index(name, found, index))

    def _index(self, name: str, elements: Array, index: str | None) -> str:
        """Return an index, which may count from the end."""
        if index is None or not index.startswith("-") or name in self.associative:
            return "0" if index is None else index
        found = max(map(int, elements), default=-1) + 1 + int(index)
        if found < 0:
            raise Refusal(self.unknowns.line, f"{name}[{index}] is before the first element of {name}")
        return str(found)

    def elements(self, name: str) -> list[str]:
        """Return all elements of an array, or of the positional parameters."""
        if name in "@*":
            return list(self.positional)
        found = self.variables.get(name)
        if isinstance(found, dict):
            return [found[key] for key in self.keys(name)]
        value = self.get(name)
        return [] if value is None else [value]

    def keys(self, name: str) -> list[str]:
        """Return the indices of an array in bash's order."""
        found = self.variables.get(name)
        if not isinstance(found, dict):
            return [] if found is None else ["0"]
        self.unknowns.charge(len(found) // 10)
        if name in self.associative and len(found) > 1:
            raise Refusal(self.unknowns.line, f"the order of the elements of {name} is up to bash")
        return list(found) if name in self.associative else sorted(found, key=lambda key: int(key or 0))

    def set(self, name: str, value: str, index: str | None = None) -> None:
        """Assign to a variable or an element."""
        self.export_if_all(name)
        self.unknowns.check_length(len(value))
        old = self.variables.get(name)
        if index is None and not isinstance(old, dict):
            self.variables[name] = value
            return
        if not isinstance(old, dict):
            old = self.variables[name] = {} if old is None else {"0": old}
        if "" not in old:  # one of some unknown elements more is as unknown
            old[self._index(name, old, index)] = value

    def export_if_all(self, name: str) -> None:
        """Export what is assigned or defined under ``set -a``."""
        if "a" in self.options:
            self.exported.add(name)

    def forget_elements(self, name: str, source: str = "") -> None:
        """Make a variable an array of unknown elements."""
        self.variables[name] = {"": self.unknowns.make(source or f"${{{name}[@]}}", "list")}

    def restore(self, values: dict[str, str | Array | None]) -> None:
        """Bring back earlier values of variables; None stands for a variable that was not set."""
        for name, value in values.items():
            self.variables.pop(name, None)
            if value is not None:
                self.variables[name] = value

    def write(self, text: str) -> None:
        if self.output is not None:
            self.unknowns.check_length(len(text))
            self.output.append(text)
