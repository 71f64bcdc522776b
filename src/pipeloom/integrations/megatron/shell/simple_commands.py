"""Run simple commands: assignments, declarations, functions, builtins, and text that is run as commands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.shell import syntax
from pipeloom.integrations.megatron.shell.builtins import BUILTINS, read_line
from pipeloom.integrations.megatron.shell.conditions import test
from pipeloom.integrations.megatron.shell.expansion import Expansion
from pipeloom.integrations.megatron.shell.parser import DECLARATIONS, Parser
from pipeloom.integrations.megatron.shell.state import Array, is_name
from pipeloom.integrations.megatron.shell.syntax import Assignment, Text, Word
from pipeloom.integrations.megatron.shell.values import Refusal, Status, Undetermined, Unknown, Unknowns, WorkLimit
from pipeloom.integrations.megatron.shell.words import SyntaxProblem
from pipeloom.io.files import read_text

MOST_CALLS = 40
_MOST_SOURCED_BYTES = 1_000_000
_ENVIRONMENTS = frozenset(
    ("activate", "conda.sh", ".bashrc", "bashrc", ".bash_profile", ".profile", "profile", "setvars.sh", "set_env.sh")
)
"""Files that are sourced for paths and libraries only."""


class Jump(Exception):
    """``break``, ``continue``, ``return`` or ``exit``."""

    def __init__(self, kind: str, levels: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.levels = kind, levels


class SimpleCommands(Expansion):
    """Runs simple commands. A subclass runs what they contain of other commands.

    ``started`` is called with the line and arguments of every program; it returns whether the program is assumed to
    succeed.
    """

    def __init__(self, script: str, unknowns: Unknowns, started: Callable[[int, list[str]], bool]) -> None:
        super().__init__(script, unknowns)
        self.started = started
        self.calls = self.loops = 0
        self.substituted: Status = 0
        """Status of the last command substitution, which is that of an assignment."""

    @abstractmethod
    def run(self, items: Iterable[syntax.AndOr]) -> Status:
        """Run commands one by one."""

    @abstractmethod
    def command(self, command: syntax.Command) -> Status:
        """Run any command."""

    @abstractmethod
    def in_subshell(self, text: str) -> None:
        """Run text in a new shell, which has the exported variables."""

    def simple(self, command: syntax.Simple) -> Status:
        """Run a simple command."""
        self.unknowns.go_to(command.line)
        first = command.words[0] if command.words else ()
        declares = [name for name in DECLARATIONS if first == (Text(name, quoted=False),)]
        if declares:
            return self._declare(declares[0], command.words[1:])
        arguments = self.fields([word for word in command.words if isinstance(word, tuple)])
        if not arguments:
            self.substituted = self.status if command.words else 0
            self._assign_all(command.assignments)
            self.status = self.substituted
            return self.status
        kept: dict[str, str | Array | None] = {}
        for one in command.assignments:
            kept.setdefault(one.name, self.variables.get(one.name))
        exported, output = set(self.attributes.exported), self.output
        self._assign_all(command.assignments)
        self.attributes.exported |= set(kept)
        self.output = None if command.silent else output
        try:
            self.status = self._call(arguments, command)
            return self.status
        finally:
            self.output = output
            self.attributes.exported = exported | (self.attributes.exported - set(kept))
            self.restore(kept)

    # ------------------------------------------------------------------ assignments

    def _assign_all(self, assignments: Iterable[Assignment]) -> None:
        for one in assignments:
            self._assign(one)

    def _assign(self, one: Assignment) -> None:
        self.unknowns.charge()
        if one.items is not None:
            if one.index is not None:
                raise Refusal(self.unknowns.line, f"{one.name}[ ]=( ) is not supported")
            self._assign_items(one, one.items)
            return
        try:
            index = None if one.index is None else self.index(one.name, one.index)
        except Undetermined as error:
            self.forget_elements(one.name, error.unknown.source)
            return
        text = self.string(one.value)
        self.set(one.name, (self.get(one.name, index) or "") + text if one.append else text, index)

    def _assign_items(self, one: Assignment, items: tuple[tuple[Word | None, Word], ...]) -> None:
        old = self.variables.get(one.name) if one.append else None
        found = dict(old) if isinstance(old, dict) else {} if old is None else {"0": old}
        self.unknowns.charge(len(found) // 10)
        if "" in found:
            return
        named = one.name in self.attributes.associative
        place = -1 if named else max(map(int, found), default=-1)
        for key, word in items:
            if key is not None:
                index = self.index(one.name, key)
                place = place if named else int(index)
                found[index] = self.string(word)
                continue
            if named:
                raise Refusal(self.unknowns.line, f"an element of {one.name} has no index")
            for each in self.fields([word]):
                place += 1
                found[str(place)] = each
        self.variables[one.name] = found

    def _declare(self, kind: str, words: tuple[Word | Assignment, ...]) -> Status:
        options: set[str] = set()
        self.status = 0
        for word in words:
            if isinstance(word, Assignment):
                self._declare_one(kind, word.name, options)
                self._assign(self._as_integer(word) if "i" in options else word)
                continue
            for text in map(self.unknowns.known, self.fields([word])):
                name, equals, value = text.partition("=")
                if text[:1] in ("-", "+"):
                    options |= set(text[1:])
                    if options & set("nlu"):
                        raise Refusal(self.unknowns.line, f"{kind} {text} is not supported")
                elif is_name(name):
                    self._declare_one(kind, name, options)
                    if options & set("aA"):
                        self.variables.setdefault(name, {})
                    if equals:
                        self.set(name, value)
        self.status = 0
        return 0

    def _declare_one(self, kind: str, name: str, options: set[str]) -> None:
        is_local = kind == "local" or (kind in ("declare", "typeset") and "g" not in options)
        if is_local and self.locals and name not in self.locals[-1]:
            self.locals[-1][name] = self.variables.pop(name, None)
        if kind == "export" or "x" in options:
            self.attributes.exported.add(name)
        if "A" in options:
            self.attributes.associative.add(name)

    def _as_integer(self, one: Assignment) -> Assignment:
        try:
            value = str(self.needed_number(one.value, f"the value of {one.name} is not a number"))
        except Undetermined as error:
            return Assignment(one.name, one.append, one.index, (syntax.Opaque(error.unknown.source),))
        return Assignment(one.name, one.append, one.index, (Text(value, quoted=True),))

    # ------------------------------------------------------------------ calls

    def _call(self, arguments: list[str], command: syntax.Simple) -> Status:
        try:
            name = self.unknowns.known(arguments[0])
        except Undetermined:
            return self._program(arguments, command)
        rest = arguments[1:]
        if name in self.functions:
            return self._function(name, rest)
        if name in ("builtin", "command") and rest and not rest[0].startswith("-"):
            functions, self.functions = self.functions, {}
            try:
                return self._call(rest, command)
            finally:
                self.functions = functions | self.functions
        rest = list(map(self.unknowns.without_gone, rest))
        match name:
            case "test":
                return test(rest, self)
            case "[":
                return test(rest[:-1], self) if rest and rest[-1] == "]" else 2
            case "eval":
                return self.run_text(" ".join(rest))
            case "source" | ".":
                return self._source(rest)
            case "read":
                return read_line(self, rest, command.stdin)
            case "break" | "continue" if not self.loops:
                return 0
            case "exec" if not rest:
                return 0  # it only redirects
            case "exit" | "return" | "break" | "continue":
                self._jump(name, rest)
            case "cat" if not rest and command.stdin is not None:
                self.write(self.string(command.stdin))
                return 0
            case "mapfile" | "readarray":
                self.forget_elements(next((word for word in reversed(rest) if not word.startswith("-")), "MAPFILE"))
                return 0
        if name in BUILTINS and not (name in ("readlink", "realpath") and self.output is None):
            return self._builtin(name, rest)
        status = self._program(arguments, command)
        if name == "exec":
            raise Jump("exit")
        return status

    def _builtin(self, name: str, arguments: list[str]) -> Status:
        try:
            return BUILTINS[name](self, arguments)
        except Undetermined as error:
            if name in ("set", "shift", "unset", "let", "getopts"):
                raise Refusal(self.unknowns.line, f"{name} depends on {error.unknown.source}") from None
            self.write(self.unknowns.derive(error.unknown))
            return Unknown(f"{name} {error.unknown.source}", self.unknowns.line, "text")

    def _jump(self, name: str, rest: list[str]) -> NoReturn:
        try:
            number = int(self.unknowns.known(rest[0])) if rest else None
        except Undetermined as error:
            number = None
            self.status = error.unknown
        except ValueError:
            number = 2
        if name in ("break", "continue"):
            raise Jump(name, max(1, number or 1))
        if number is not None:
            self.status = number & 255
        raise Jump(name)

    def _function(self, name: str, arguments: list[str]) -> Status:
        if self.calls >= MOST_CALLS:
            raise WorkLimit(self.unknowns.line, f"functions are nested more than {MOST_CALLS} deep")
        positional, self.positional = self.positional, arguments
        self.calls += 1
        self.locals.append({})
        try:
            function = self.functions[name]
            with self.within_file(function.file):
                self.command(function.command)
        except Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.restore(self.locals.pop())
            self.calls -= 1
            self.positional = positional
        return self.status

    def run_text(self, text: str) -> Status:
        """Run text as commands."""
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise WorkLimit(self.unknowns.line, f"eval is nested more than {MOST_CALLS} deep")
        unknowns = self.unknowns
        pinned, unknowns.pinned = unknowns.pinned, unknowns.line
        self.status = 0
        try:
            return self.run(Parser(text).script())
        except SyntaxProblem as error:
            raise Refusal(unknowns.pinned, f"cannot be read: {error.problem}") from None
        finally:
            self.calls -= 1
            unknowns.line, unknowns.pinned = unknowns.pinned, pinned

    def _source(self, arguments: list[str]) -> Status:
        line = self.unknowns.line
        name = arguments[0] if arguments else ""
        path = self._sourced_path(name)
        if path is None:
            shown = self.unknowns.shown(name)
            if Path(shown).name not in _ENVIRONMENTS:
                self.unread = f"{Path(shown).name[-60:]} (line {line})"
            return Unknown(f"source {shown}", line, "text")
        try:
            text = read_text(path)
        except InputError as error:
            raise Refusal(line, f"{path} cannot be sourced: {error.problem}") from None
        positional = self.positional
        self.positional = arguments[1:] or positional
        try:
            with self.within_file(name):
                return self.run_text(text)
        except Jump as jump:
            if jump.kind != "return":
                raise
            return self.status
        finally:
            if len(arguments) > 1:
                self.positional = positional

    def _sourced_path(self, name: str) -> Path | None:
        """Return the path of a sourced file, if it is found beside the script or where Pipeloom runs."""
        cwd = self.unknowns.make("$PWD", "text")
        name = name.replace(cwd, ".")
        if self.unknowns.within(name) or "\0" in name:
            return None
        for path in (Path(name), Path(self.script).parent / name):
            if path.is_file() and path.stat().st_size <= _MOST_SOURCED_BYTES:
                return path
        return None

    def _program(self, arguments: list[str], command: syntax.Simple) -> Status:
        """Report a program; what it runs through another shell is run."""
        line = self.unknowns.line
        succeeds = False
        shown = self.unknowns.shown(" ".join(arguments))
        nested = _nested_script([self.unknowns.shown(word) for word in arguments], arguments)
        first, last = (self.unknowns.shown(arguments[at]).rsplit("/", 1)[-1] for at in (0, -1))
        if nested is None and command.stdin is not None and (last in ("bash", "sh", "-s") or first == "sbatch"):
            nested = self.string(command.stdin)
        if nested is not None:
            self.in_subshell(nested)
        else:
            succeeds = self.started(line, arguments)
        self.write(self.unknowns.make(shown, "output"))
        self.status = 0 if succeeds else Unknown(shown[:2000], line, "text")
        return self.status


def _nested_script(shown: list[str], arguments: list[str]) -> str | None:
    """Return the text that a command runs: of ``bash -c TEXT``, ``ssh HOST TEXT`` or ``sbatch --wrap TEXT``."""
    names = [word.rsplit("/", 1)[-1] for word in shown]
    for i, name in enumerate(names):
        if name in ("bash", "sh", "zsh"):
            for flag, text in zip(names[i + 1 :], arguments[i + 2 :], strict=False):
                if not flag.startswith("-"):
                    break
                if flag.endswith("c") and not flag.startswith("--"):
                    return text
    if names[0] == "sbatch":
        for i, word in enumerate(shown):
            if word.startswith("--wrap="):
                return arguments[i].removeprefix("--wrap=")
            if word == "--wrap" and i + 1 < len(arguments):
                return arguments[i + 1]
    texts = [word for word in arguments[1:] if " " in word]
    return texts[-1] if texts and names[0] in ("ssh", "pdsh") else None
