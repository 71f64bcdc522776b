"""Variables, functions and options of a running script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from pipeloom.integrations.megatron.shell.syntax import Command
from pipeloom.integrations.megatron.shell.values import Refusal, Status, Unknowns

Array: TypeAlias = dict[str, str]
"""Elements by index; the indices of an indexed array are decimal numbers."""

_FROM_THE_SHELL = frozenset(
    (
        *("HOME", "PWD", "OLDPWD", "USER", "LOGNAME", "PATH", "HOSTNAME", "HOSTTYPE", "OSTYPE", "MACHTYPE", "SHELL"),
        *(
            "RANDOM",
            "SRANDOM",
            "SECONDS",
            "EPOCHSECONDS",
            "EPOCHREALTIME",
            "UID",
            "EUID",
            "PPID",
            "BASHPID",
            "FUNCNAME",
        ),
        *("BASH", "BASH_VERSION", "BASH_VERSINFO", "SHLVL", "SHELLOPTS", "BASHOPTS", "LANG", "TERM", "BASH_COMMAND"),
    )
)
"""Variables that every shell has, with values of its own."""


class State:
    """What commands change and expansions read."""

    def __init__(self, script: str, unknowns: Unknowns) -> None:
        self.script, self.unknowns = script, unknowns
        self.variables: dict[str, str | Array] = {"BASH_SOURCE": {"0": script}}
        self.associative: set[str] = set()
        self.exported: set[str] = set()
        self.functions: dict[str, Command] = {}
        self.function_files: dict[str, str] = {}
        """The file that defines each function."""
        self.locals: list[dict[str, str | Array | None]] = []
        """For each running function, the values that its local variables hide."""
        self.positional: list[str] = []
        self.options: set[str] = set()
        self.status: Status = 0
        self.cwd = unknowns.make("$PWD", "text")
        self.output: list[str] | None = None
        """What was printed, where it is captured."""
        self.unread: str = ""
        """A sourced file that could not be read, and may set any variable."""

    def copy_to(self, other: State) -> None:
        """Give a subshell its own variables."""
        other.variables = {k: dict(v) if isinstance(v, dict) else v for k, v in self.variables.items()}
        self.unknowns.charge(1 + sum(len(v) for v in self.variables.values() if isinstance(v, dict)) // 10)
        other.associative, other.exported = set(self.associative), set(self.exported)
        other.functions, other.function_files = dict(self.functions), dict(self.function_files)
        other.options = set(self.options)
        other.locals = []
        other.positional = list(self.positional)

    @contextmanager
    def within_file(self, file: str) -> Iterator[None]:
        """Put a file at the start of ``BASH_SOURCE`` while its commands run."""
        files = self.variables.get("BASH_SOURCE", {})
        callers = files.values() if isinstance(files, dict) else [files]
        self.variables["BASH_SOURCE"] = {str(i): each for i, each in enumerate([file, *callers])}
        try:
            yield
        finally:
            self.variables["BASH_SOURCE"] = files

    # ------------------------------------------------------------------ variables

    def missing(self, source: str) -> str:
        """Return what stands for a variable that is not set."""
        if self.unread:
            return self.unknowns.make(f"{source}, which {self.unread} may set,", "text")
        return self.unknowns.make(source, "required" if "u" in self.options else "unset")

    def get(self, name: str, index: str | None = None) -> str | None:
        """Return a variable, an element or a parameter; None where it is not set."""
        if name.isdecimal():
            place = int(name)
            if place == 0:
                return self.script
            return self.positional[place - 1] if place <= len(self.positional) else None
        if name in "#?$!-":
            return self._special(name)
        found = self.variables.get(name)
        if found is None:
            if name == "LINENO":
                return str(self.unknowns.line)
            return self.unknowns.make(f"${name}", "text") if name in _FROM_THE_SHELL else None
        if isinstance(found, str):
            return found if index in (None, "0") else None
        if "" in found:  # an array of unknown elements
            return found[""]
        if index is not None and index.startswith("-") and name not in self.associative:
            index = self._from_the_end(name, found, index)
        return found.get("0" if index is None else index)

    def _from_the_end(self, name: str, elements: Array, index: str) -> str:
        found = max(map(int, elements), default=-1) + 1 + int(index)
        if found < 0:
            raise Refusal(self.unknowns.line, f"{name}[{index}] is before the first element of {name}")
        return str(found)

    def _special(self, name: str) -> str:
        if name == "#":
            return str(len(self.positional))
        if name == "?":
            return str(self.status) if isinstance(self.status, int) else self.unknowns.again(self.status, "text")
        return self.unknowns.make(f"${name}", "text")

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
            raise Refusal(self.unknowns.line, f"the order of the elements of {name} is bash's own")
        return list(found) if name in self.associative else sorted(found, key=lambda key: int(key or 0))

    def set(self, name: str, value: str | Array, index: str | None = None) -> None:
        """Assign to a variable or an element."""
        if isinstance(value, str):
            self.unknowns.check_length(len(value))
        old = self.variables.get(name)
        if index is None and not (isinstance(old, dict) and isinstance(value, str)):
            self.variables[name] = value
            return
        assert isinstance(value, str)
        if not isinstance(old, dict):
            old = self.variables[name] = {} if old is None else {"0": old}
        if "" in old:
            return  # one element more or less is as unknown
        index = "0" if index is None else index
        if index.startswith("-") and name not in self.associative:
            index = self._from_the_end(name, old, index)
        old[index] = value

    def unset(self, name: str, index: str | None = None) -> None:
        """Remove a variable or an element."""
        found = self.variables.get(name)
        if index is None:
            self.variables.pop(name, None)
            self.associative.discard(name)
            self.exported.discard(name)
        elif isinstance(found, dict):
            found.pop(index, None)

    def make_local(self, name: str) -> None:
        """Hide a variable until the function returns."""
        if self.locals and name not in self.locals[-1]:
            self.locals[-1][name] = self.variables.pop(name, None)

    def restore(self) -> None:
        """Bring back what the function's local variables hid."""
        for name, value in self.locals.pop().items():
            self.variables.pop(name, None)
            if value is not None:
                self.variables[name] = value

    # ------------------------------------------------------------------ arithmetic

    def get_number(self, name: str, index: str | None) -> str:
        """As `arithmetic.Variables` has it."""
        self.unknowns.charge()
        value = self.get(name, index)
        return self.unknowns.known(self.missing(f"${name}") if value is None else value).strip()

    def set_number(self, name: str, index: str | None, value: int) -> None:
        """As `arithmetic.Variables` has it."""
        self.set(name, str(value), index)

    def write(self, text: str) -> None:
        """Print a text."""
        if self.output is not None:
            self.unknowns.check_length(len(text))
            self.output.append(text)


def is_name(text: str) -> bool:
    """Whether a text can name a variable."""
    return re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII) is not None
