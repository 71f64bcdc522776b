"""Run the commands of a bash script as far as they decide which programs start with which arguments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.shell import arithmetic
from pipeloom.integrations.megatron.shell.builtins import BUILTINS, read_line
from pipeloom.integrations.megatron.shell.conditions import conditional, test
from pipeloom.integrations.megatron.shell.expansion import Expansion
from pipeloom.integrations.megatron.shell.parser import Parser
from pipeloom.integrations.megatron.shell.state import is_name
from pipeloom.integrations.megatron.shell.syntax import (
    AndOr,
    Arithmetic,
    Assignment,
    Broken,
    Calculation,
    Case,
    Command,
    Conditional,
    Count,
    For,
    Function,
    Group,
    If,
    Opaque,
    Parameter,
    Pipeline,
    Redirected,
    Sequence,
    Simple,
    Substitution,
    Text,
    While,
    Word,
)
from pipeloom.integrations.megatron.shell.values import (
    LoopLimit,
    Refusal,
    Status,
    Undetermined,
    Unknown,
    Unknowns,
    WorkLimit,
    matches,
    negated,
)
from pipeloom.io.files import read_text

MOST_ITERATIONS = 10_000
MOST_CALLS = 40
MOST_DECISIONS = 100
_MOST_SOURCED_BYTES = 1_000_000
_HARMLESS = frozenset(
    (
        *(":", "true", "echo", "mkdir", "rm", "cp", "mv", "ln", "touch", "ls", "cat", "wget", "curl", "tar", "unzip"),
        *("pip", "pip3", "sleep", "chmod", "kill", "pkill", "killall", "tee", "wait", "date", "ulimit", "git"),
    )
)
"""Programs that change nothing in the script that runs them, however they end."""
_ENVIRONMENTS = frozenset(
    ("activate", "conda.sh", ".bashrc", "bashrc", ".bash_profile", ".profile", "profile", "setvars.sh", "set_env.sh")
)
"""Files that are sourced for paths and libraries only."""
_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")


class _Jump(Exception):
    """``break``, ``continue``, ``return`` or ``exit``."""

    def __init__(self, kind: str, levels: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.levels = kind, levels


@dataclass(slots=True)
class Choices:
    """Which way is taken where a decision depends on something unknown."""

    prefix: tuple[int, ...] = ()
    made: list[tuple[Unknown, int, int]] = field(default_factory=list)
    """What decides, among how many, and which was taken."""

    def take(self, unknown: Unknown, alternatives: int) -> int:
        """Take an alternative; the same question has the same answer."""
        for asked, _, taken in self.made:
            if asked == unknown:
                return taken
        if len(self.made) == MOST_DECISIONS:
            raise WorkLimit(unknown.line, f"more than {MOST_DECISIONS} decisions depend on something unknown")
        taken = self.prefix[len(self.made)] if len(self.made) < len(self.prefix) else 0
        self.made.append((unknown, alternatives, taken))
        return taken


class Interpreter(Expansion):
    """A shell that runs functions and builtins, and reports all other commands.

    Parameters
    ----------
    script : str
        Name of the file.
    unknowns : Unknowns
    choices : Choices
    started : callable
        Called with the line and arguments of every other command; says whether it is assumed to succeed.
    """

    def __init__(
        self, script: str, unknowns: Unknowns, choices: Choices, started: Callable[[int, list[str]], bool]
    ) -> None:
        super().__init__(script, unknowns)
        self.choices, self.started = choices, started
        self.checked = 0
        """How many conditions are being evaluated; in them, failing does not end the script."""
        self.calls = self.loops = 0

    def run(self, items: Iterable[AndOr | Broken]) -> int:
        """Run a whole script; return the line of the ``exit`` that ended it, or 0."""
        try:
            for item in items:
                self._and_or(item)
        except _Jump:
            return self.unknowns.line
        return 0

    # ------------------------------------------------------------------ lists

    def _sequence(self, sequence: Sequence) -> Status:
        self.status = 0 if not sequence.items else self.status
        for item in sequence.items:
            self._and_or(item)
        return self.status

    def _and_or(self, item: AndOr | Broken) -> None:
        self.unknowns.go_to(item.line)
        self.unknowns.charge()
        if isinstance(item, Broken):
            raise Refusal(self.unknowns.line, f"cannot be read: {item.problem}")
        last = len(item.pipelines) - 1
        ended = False
        for i, (operator, pipeline) in enumerate(item.pipelines):
            if operator:
                if isinstance(self.status, Unknown) and self._is_harmless(pipeline):
                    continue
                if self._truth(self.status) != (operator == "&&"):
                    continue
            self.checked += i < last or pipeline.negated
            try:
                self.status = self._pipeline(pipeline)
            finally:
                self.checked -= i < last or pipeline.negated
            ended = i == last and not pipeline.negated
        if ended and not self.checked and "e" in self.options and isinstance(self.status, int) and self.status:
            raise _Jump("exit")

    def _truth(self, status: Status) -> bool:
        if isinstance(status, int):
            return status == 0
        if status.source.startswith("! "):
            return not self._truth(negated(status))
        return self.choices.take(status, 2) == 0

    def _condition(self, sequence: Sequence) -> Status:
        self.checked += 1
        try:
            return self._sequence(sequence)
        finally:
            self.checked -= 1

    def _pipeline(self, pipeline: Pipeline) -> Status:
        if len(pipeline.commands) == 1:
            status = self._command(pipeline.commands[0])
        else:
            for command in pipeline.commands:
                status = self._subshell(lambda shell, command=command: shell._command(command), [])[0]  # type: ignore[misc]
            if self.output is not None:
                self.output.append(self.unknowns.make("the output of a pipe", "output"))
            if isinstance(status, int) and isinstance(pipeline.commands[-1], Simple):
                status = status if pipeline.commands[-1].words else 0
        if pipeline.negated:
            return negated(status) if isinstance(status, Unknown) else int(status == 0)
        return status

    def _subshell(self, run: Callable[[Interpreter], object], output: list[str] | None) -> tuple[Status, Interpreter]:
        shell = copy.copy(self)
        self.copy_to(shell)
        shell.output = output
        shell.calls += 1
        self.unknowns.charge()
        if shell.calls > MOST_CALLS:
            raise WorkLimit(self.unknowns.line, f"commands are nested more than {MOST_CALLS} deep")
        with contextlib.suppress(_Jump):
            run(shell)
        return shell.status, shell

    def substitute(self, part: Substitution) -> str:
        """Run commands and return what they print."""
        output: list[str] = []
        line = self.unknowns.line

        def run(shell: Interpreter) -> None:
            shell.options = shell.options - {"e"}
            shell._sequence(part.body)

        try:
            self.status, _ = self._subshell(run, output)
            text = "".join(output).rstrip("\n")
        except Undetermined:
            text = self.unknowns.make(part.source, "output")
        self.unknowns.line = line
        unknown = [one for one in self.unknowns.within(text) if one.kind == "output"]
        if unknown:
            # What was printed beside it is lost, so that a value is either known or not.
            return self.unknowns.make(part.source, "output")
        self.unknowns.check_length(len(text))
        return text

    # ------------------------------------------------------------------ compound commands

    def _command(self, command: Command) -> Status:
        self.unknowns.charge()
        match command:
            case Simple():
                return self._simple(command)
            case If():
                self.status = self._if(command)
            case While():
                self.status = self._while(command)
            case For():
                self.status = self._for(command)
            case Count():
                self.status = self._count(command)
            case Case():
                self.status = self._case(command)
            case Group(body, subshell):
                if subshell:
                    self.status, _ = self._subshell(lambda shell: shell._sequence(body), self.output)
                else:
                    self._sequence(body)
            case Redirected(inner):
                output, self.output = self.output, None
                try:
                    self.status = self._command(inner)
                finally:
                    self.output = output
            case Function(name, body):
                self.functions[name] = body
                self.status = 0
            case Calculation(line, expression):
                self.unknowns.go_to(line)
                self.status = self._calculation(expression)
            case Conditional(line, condition):
                self.unknowns.go_to(line)
                self.status = conditional(condition, self)
        return self.status

    def _calculation(self, expression: Word) -> Status:
        try:
            return int(self.number(expression) == 0)
        except arithmetic.Failure:
            return 1
        except Undetermined:
            shown = self.unknowns.shown(self.string(expression))
            return Unknown(f"(( {shown[:2000]} ))", self.unknowns.line, "text")

    def _if(self, command: If) -> Status:
        for i, (condition, body) in enumerate(command.branches):
            status = self._condition(condition)
            if isinstance(status, Unknown):
                rest = [each for _, each in command.branches[i:]]
                if all(map(self._is_harmless, [*rest, command.otherwise])):
                    return 0
            if self._truth(status):
                return self._sequence(body)
        return self._sequence(command.otherwise)

    def _loop(self, body: Sequence) -> bool:
        """Run the body of a loop once; False where the loop ends."""
        self.loops += 1
        try:
            self._sequence(body)
        except _Jump as jump:
            if jump.kind not in ("break", "continue"):
                raise
            if jump.levels > 1:
                raise _Jump(jump.kind, jump.levels - 1) from None
            return jump.kind == "continue"
        finally:
            self.loops -= 1
        return True

    def _maybe_loop(self, status: Unknown, body: Sequence, until: bool = False) -> None:
        """Run a body that runs an unknown number of times; afterwards, what it has changed is unknown."""
        if self._is_harmless(body) or self._truth(status) == until:
            return
        before = {name: dict(v) if isinstance(v, dict) else v for name, v in self.variables.items()}
        self._loop(body)
        for name, value in self.variables.items():
            if before.get(name) == value:
                continue
            if isinstance(value, dict):
                self.variables[name] = {"": self.unknowns.make(f"${{{name}[@]}}", "list")}
            else:
                self.variables[name] = self.unknowns.make(f"${name}", "output")

    def _while(self, command: While) -> Status:
        for _ in range(MOST_ITERATIONS):
            status = self._condition(command.condition)
            if isinstance(status, Unknown):
                self._maybe_loop(status, command.body, command.until)
                return 0
            if (status == 0) == command.until or not self._loop(command.body):
                return 0
        raise LoopLimit(self.unknowns.line, f"a loop runs more than {MOST_ITERATIONS} times")

    def _for(self, command: For) -> Status:
        words = list(self.positional) if command.words is None else self.fields(command.words)
        for word in words:
            self.unknowns.charge()
            unknown = self.unknowns.within(word)
            self.set(command.name, word)
            if len(word) == 1 and unknown and unknown[0].kind in ("output", "list"):
                self._maybe_loop(
                    Unknown(f"for {command.name} in {unknown[0].source}", self.unknowns.line, "text"), command.body
                )
            elif not self._loop(command.body):
                break
        return self.status if words else 0

    def _count(self, command: Count) -> Status:
        first, condition, step = command.header
        try:
            self.unknowns.go_to(command.line)
            self.number(first)
            for _ in range(MOST_ITERATIONS):
                self.unknowns.go_to(command.line)
                self.unknowns.charge()
                if (condition and self.number(condition) == 0) or not self._loop(command.body):
                    return 0
                self.number(step)
        except arithmetic.Failure:
            return 1
        except Undetermined as error:
            self._maybe_loop(error.unknown, command.body)
            return 0
        raise LoopLimit(self.unknowns.line, f"a loop runs more than {MOST_ITERATIONS} times")

    def _case(self, command: Case) -> Status:
        self.unknowns.go_to(command.line)
        value = self.string(command.subject)
        falls = False
        for i, (patterns, body, end) in enumerate(command.clauses):
            found: bool | Unknown = falls
            if not falls:
                results = [self._matches(value, pattern) for pattern in patterns]
                found = True if True in results else next((r for r in results if isinstance(r, Unknown)), False)
            if isinstance(found, Unknown):
                if all(self._is_harmless(each) for _, each, _ in command.clauses[i:]):
                    return 0
                found = self._truth(found)
            if not found:
                continue
            self.status = 0
            self._sequence(body)
            if end == ";;":
                return self.status
            falls = end == ";&"
        return self.status if falls else 0

    def _matches(self, value: str, word: Word) -> bool | Unknown:
        try:
            pattern = self.pattern(word)
            if pattern == [("*", False)]:
                return True
            return matches(pattern, self.unknowns.known(value), self.unknowns)
        except Undetermined:
            shown = self.unknowns.shown(f"{value} = {self.string(word)}")
            return Unknown(f"[ {shown[:2000]} ]", self.unknowns.line, "text")

    # ------------------------------------------------------------------ simple commands

    def _simple(self, command: Simple) -> Status:
        self.unknowns.go_to(command.line)
        if not command.words:
            self.status = 0
            self._assign_all(command.assignments)
            return self.status
        first = command.words[0]
        if isinstance(first, tuple) and len(first) == 1 and first[0] in [Text(name, False) for name in _DECLARATIONS]:
            return self._declare(first[0].text, command.words[1:])  # type: ignore[union-attr]
        arguments = self.fields([word for word in command.words if isinstance(word, tuple)])
        if not arguments:
            self._assign_all(command.assignments)
            return self.status
        kept = {one.name: self.variables.get(one.name) for one in command.assignments}
        exported = set(self.exported)
        self._assign_all(command.assignments)
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

    def _assign_all(self, assignments: Iterable[Assignment]) -> None:
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
            "eval": lambda: self._eval(" ".join(rest)),
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
            raise _Jump("exit")
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
            raise _Jump(name, max(1, number or 1))
        if number is not None:
            self.status = number & 255
        raise _Jump(name)

    def _function(self, name: str, arguments: list[str]) -> Status:
        if self.calls >= MOST_CALLS:
            raise WorkLimit(self.unknowns.line, f"functions are nested more than {MOST_CALLS} deep")
        positional, self.positional = self.positional, arguments
        self.calls += 1
        self.locals.append({})
        try:
            self._command(self.functions[name])
        except _Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.restore()
            self.calls -= 1
            self.positional = positional
        return self.status

    def _eval(self, text: str) -> Status:
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise WorkLimit(self.unknowns.line, f"eval is nested more than {MOST_CALLS} deep")
        unknowns = self.unknowns
        pinned, unknowns.pinned = unknowns.pinned, unknowns.line
        self.status = 0
        try:
            for item in Parser(text).script():
                self._and_or(item)
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
                self.unread = f"{shown} (line {line})"
            return Unknown(f"source {shown}", line, "text")
        try:
            text = read_text(path)
        except InputError as error:
            raise Refusal(line, f"{path} cannot be sourced: {error.problem}") from None
        positional = self.positional
        if len(arguments) > 1:
            self.positional = arguments[1:]
        try:
            return self._eval(text)
        except _Jump as jump:
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

            def run(shell: Interpreter) -> None:
                kept = shell.exported
                shell.variables = {name: value for name, value in shell.variables.items() if name in kept}
                shell.functions = {}
                shell.options = set()
                shell.positional = []
                shell._eval(nested)

            self._subshell(run, self.output)
        else:
            succeeds = self.started(line, arguments)
        if self.output is not None:
            self.output.append(self.unknowns.make(self.unknowns.shown(" ".join(arguments)), "output"))
        self.status = 0 if succeeds else Unknown(self.unknowns.shown(" ".join(arguments))[:2000], line, "text")
        return self.status

    # ------------------------------------------------------------------ what cannot matter

    def _is_harmless(self, node: object) -> bool:
        """Whether a part of the script can neither start a training nor change what is started later."""
        match node:
            case Sequence(items):
                return all(not isinstance(item, Broken) and self._is_harmless(item) for item in items)
            case AndOr():
                return all(self._is_harmless(pipeline) for _, pipeline in node.pipelines)
            case Pipeline(commands):
                return all(map(self._is_harmless, commands))
            case Group(body):
                return self._is_harmless(body)
            case Redirected(command):
                return self._is_harmless(command)
            case Simple():
                first = node.words[0] if node.words and not node.assignments else None
                return (
                    self.output is None
                    and all(map(_changes_nothing, node.words))
                    and isinstance(first, tuple)
                    and len(first) == 1
                    and isinstance(first[0], Text)
                    and first[0].text in _HARMLESS
                    and first[0].text not in self.functions
                )
        return False


def _changes_nothing(word: Word | Assignment) -> bool:
    """Whether a word can be expanded without an assignment."""
    return isinstance(word, tuple) and not any(
        isinstance(part, Arithmetic) or (isinstance(part, Parameter) and "=" in part.operator) for part in word
    )


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
