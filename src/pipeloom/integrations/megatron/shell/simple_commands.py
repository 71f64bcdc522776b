"""Run simple commands: assignments, declarations, functions, builtins, and text that is run as commands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.shell import arithmetic
from pipeloom.integrations.megatron.shell.builtins import BUILTINS, read_line
from pipeloom.integrations.megatron.shell.conditions import test
from pipeloom.integrations.megatron.shell.expansion import Expansion
from pipeloom.integrations.megatron.shell.parser import Parser
from pipeloom.integrations.megatron.shell.state import is_name
from pipeloom.integrations.megatron.shell.syntax import AndOr, Assignment, Broken, Command, Opaque, Simple, Text, Word
from pipeloom.integrations.megatron.shell.values import Refusal, Status, Undetermined, Unknown, Unknowns, WorkLimit
from pipeloom.io.files import read_text

MOST_CALLS = 40
_MOST_SOURCED_BYTES = 1_000_000
_ENVIRONMENTS = frozenset(
    ("activate", "conda.sh", ".bashrc", "bashrc", ".bash_profile", ".profile", "profile", "setvars.sh", "set_env.sh")
)
"""Files that are sourced for paths and libraries only."""
_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")


class Jump(Exception):
    """``break``, ``continue``, ``return`` or ``exit``."""

    def __init__(self, kind: str, levels: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.levels = kind, levels


class SimpleCommands(Expansion):
    """Runs simple commands; what they contain of other commands is run by a subclass."""

    started: Callable[[int, list[str]], bool]
    calls: int
    loops: int

    @abstractmethod
    def and_or(self, item: AndOr | Broken) -> None:
        """Run pipelines joined by ``&&`` and ``||``."""

    @abstractmethod
    def command(self, command: Command) -> Status:
        """Run any command."""

    @abstractmethod
    def in_subshell(self, text: str) -> None:
        """Run text in a new shell, which has the exported variables."""

    def simple(self, command: Simple) -> Status:
        self.unknowns.go_to(command.line)
        if not command.words:
            self.status = 0
            self.assign_all(command.assignments)
            return self.status
        first = command.words[0]
        declared = [name for name in _DECLARATIONS if first == (Text(name, quoted=False),)]
        if declared:
            return self._declare(declared[0], command.words[1:])
        arguments = self.fields([word for word in command.words if isinstance(word, tuple)])
        if not arguments:
            self.assign_all(command.assignments)
            return self.status
        kept = {one.name: self.variables.get(one.name) for one in command.assignments}
        exported = set(self.exported)
        self.assign_all(command.assignments)
        self.exported |= set(kept)
        output = self.output
        if command.silent:
            self.output = None
        try:
            return self._call(arguments, command)
        finally:
            self.output = output
            self.exported = exported | (self.exported - set(kept))
            for name, value in kept.items():
                self.variables.pop(name, None)
                if value is not None:
                    self.variables[name] = value

    def assign_all(self, assignments: Iterable[Assignment]) -> None:
        for one in assignments:
            self._assign(one)

    def _assign(self, one: Assignment) -> None:
        self.unknowns.charge()
        old = self.variables.get(one.name)
        if one.items is not None:
            if one.index is not None:
                raise Refusal(self.unknowns.line, f"{one.name}[ ]=( ) is not read")
            self._assign_items(one, old)
            return
        index = None
        try:
            if one.index is not None:
                index = self.index(one.name, one.index)
        except Undetermined as error:
            self.variables[one.name] = {"": self.unknowns.make(error.unknown.source, "list")}
            return
        text = self.string(one.value)
        if one.append:
            text = (self.get(one.name, index) or "") + text
        self.set(one.name, text, index)

    def _assign_items(self, one: Assignment, old: object) -> None:
        found: dict[str, str] = {}
        if one.append and old is not None:
            found = dict(old) if isinstance(old, dict) else {"0": str(old)}
            self.unknowns.charge(len(found) // 10)
            if "" in found:
                return
        named = one.name in self.associative
        place = -1 if named else max(map(int, found), default=-1)
        assert one.items is not None
        for key, word in one.items:
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
        self.status = 0
        options: set[str] = set()
        for word in words:
            if isinstance(word, Assignment):
                self._declare_one(kind, word.name, options)
                if "A" in options:
                    self.associative.add(word.name)
                if "i" in options:
                    word = self._as_integer(word)
                self._assign(word)
                continue
            for text in map(self.unknowns.known, self.fields([word])):
                if text[:1] in ("-", "+"):
                    options |= set(text[1:])
                    if options & set("nlu"):
                        raise Refusal(self.unknowns.line, f"{kind} {text} is not read")
                    continue
                name, equals, value = text.partition("=")
                if not is_name(name):
                    continue
                self._declare_one(kind, name, options)
                if "A" in options:
                    self.associative.add(name)
                    self.variables.setdefault(name, {})
                elif "a" in options:
                    self.variables.setdefault(name, {})
                if equals:
                    self.set(name, value)
        self.status = 0
        return 0

    def _declare_one(self, kind: str, name: str, options: set[str]) -> None:
        if self.locals and (kind == "local" or (kind in ("declare", "typeset") and "g" not in options)):
            self.make_local(name)
        if kind == "export" or "x" in options:
            self.exported.add(name)

    def _as_integer(self, one: Assignment) -> Assignment:
        try:
            value = str(self.number(one.value))
        except Undetermined as error:
            return Assignment(one.name, one.append, one.index, (Opaque(error.unknown.source),))
        except arithmetic.Failure as error:
            raise Refusal(self.unknowns.line, f"the value of {one.name} is no number: {error}") from None
        return Assignment(one.name, one.append, one.index, (Text(value, quoted=True),))

    def _call(self, arguments: list[str], command: Simple) -> Status:
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
        known = {
            "test": lambda: test(rest, self),
            "[": lambda: test(rest[:-1], self) if rest and rest[-1] == "]" else 2,
            "eval": lambda: self.run_text(" ".join(rest)),
            "source": lambda: self._source(rest),
            ".": lambda: self._source(rest),
            "read": lambda: read_line(self, rest, command.stdin),
        }
        if name in known:
            self.status = known[name]()
            return self.status
        if name in ("break", "continue") and not self.loops:
            return 0
        if name in ("exit", "return", "break", "continue"):
            self._jump(name, rest)
        if name in BUILTINS and not (name in ("readlink", "realpath") and self.output is None):
            self.status = self._builtin(name, rest)
            return self.status
        if name == "cat" and not rest and command.stdin is not None:
            self.write(self.string(command.stdin))
            self.status = 0
            return 0
        if name in ("mapfile", "readarray"):
            array = next((word for word in reversed(rest) if not word.startswith("-")), "MAPFILE")
            self.variables[array] = {"": self.unknowns.make(f"${{{array}[@]}}", "list")}
            return 0
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
            self.write(self.unknowns.again(error.unknown))
            return Unknown(f"{name} {error.unknown.source}", self.unknowns.line, "text")

    def _jump(self, name: str, rest: list[str]) -> None:
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
            with self.within_file(self.function_files[name]):
                self.command(self.functions[name])
        except Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.restore()
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
            for item in Parser(text).script():
                self.and_or(item)
        finally:
            self.calls -= 1
            unknowns.line, unknowns.pinned = unknowns.pinned, pinned
        return self.status

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
        if len(arguments) > 1:
            self.positional = arguments[1:]
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
        """Where a sourced file is, if it can be found beside the script or where Pipeloom runs."""
        cwd = self.unknowns.make("$PWD", "text")
        name = name.replace(cwd, ".") if name else name
        if not name.isascii() and self.unknowns.within(name):
            return None
        for path in (Path(name), Path(self.script).parent / name):
            if "\0" not in name and path.is_file() and path.stat().st_size <= _MOST_SOURCED_BYTES:
                return path
        return None

    def _program(self, arguments: list[str], command: Simple) -> Status:
        """Report a command; what it runs through another shell is run."""
        line = self.unknowns.line
        succeeds = False
        nested = nested_script(arguments, self.unknowns)
        if (
            nested is None
            and command.stdin is not None
            and self.unknowns.shown(arguments[-1]).rsplit("/", 1)[-1] in ("bash", "sh", "-s")
        ):
            nested = self.string(command.stdin)
        if nested is not None:
            self.in_subshell(nested)
        else:
            succeeds = self.started(line, arguments)
        if self.output is not None:
            self.output.append(self.unknowns.make(self.unknowns.shown(" ".join(arguments)), "output"))
        self.status = 0 if succeeds else Unknown(self.unknowns.shown(" ".join(arguments))[:2000], line, "text")
        return self.status


def nested_script(arguments: list[str], unknowns: Unknowns) -> str | None:
    """Return the text that a command gives to another shell: ``bash -c TEXT``, ``ssh HOST TEXT``."""
    names = [unknowns.shown(word).rsplit("/", 1)[-1] for word in arguments]
    for i, name in enumerate(names):
        if name in ("bash", "sh", "zsh") and i + 2 < len(names) + 1:
            flags = 1
            while i + flags < len(names) and names[i + flags].startswith("-"):
                if (
                    names[i + flags].endswith("c")
                    and i + flags + 1 < len(names)
                    and not names[i + flags].startswith("--")
                ):
                    return arguments[i + flags + 1]
                flags += 1
    if names[0] in ("ssh", "pdsh"):
        texts = [word for word in arguments[1:] if " " in word]
        if texts:
            return texts[-1]
    return None
