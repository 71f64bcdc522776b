"""Run the commands of a bash script as far as they decide which programs start with which arguments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.shell import arithmetic, syntax
from pipeloom.integrations.megatron.shell.builtins import BUILTINS, read_line
from pipeloom.integrations.megatron.shell.conditions import any_true, conditional, test, unknown_test
from pipeloom.integrations.megatron.shell.expansion import Expansion
from pipeloom.integrations.megatron.shell.parser import DECLARATIONS, Parser, SyntaxProblem
from pipeloom.integrations.megatron.shell.patterns import matches
from pipeloom.integrations.megatron.shell.state import Array, is_name
from pipeloom.integrations.megatron.shell.syntax import Assignment, Sequence, Text, Word
from pipeloom.integrations.megatron.shell.values import (
    LoopLimit,
    Refusal,
    Status,
    Undetermined,
    Unknown,
    Unknowns,
    negated,
)
from pipeloom.io.files import read_text

MOST_ITERATIONS = 10_000
_HARMLESS = frozenset(
    (
        *(":", "true", "echo", "mkdir", "rm", "cp", "mv", "ln", "touch", "ls", "cat", "wget", "curl", "tar", "unzip"),
        *("pip", "pip3", "sleep", "chmod", "kill", "pkill", "killall", "tee", "wait", "date", "ulimit", "git"),
    )
)
"""Programs that change nothing in the script that runs them, however they end."""
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


@dataclass(slots=True)
class Choices:
    """Decisions that depend on something unknown, and whether each was taken as true.

    The first ones follow ``prefix``; all others are taken as true.
    """

    prefix: tuple[bool, ...] = ()
    made: dict[Unknown, bool] = field(default_factory=dict)

    def take(self, unknown: Unknown) -> bool:
        """Decide whether an unknown status is a success; the same question has the same answer."""
        if unknown not in self.made:
            number = len(self.made)
            self.made[unknown] = self.prefix[number] if number < len(self.prefix) else True
        return self.made[unknown]

    def following(self) -> tuple[bool, ...] | None:
        """Return the next combination of decisions, depth first; None after the last."""
        taken = tuple(self.made.values())
        while taken and not taken[-1]:
            taken = taken[:-1]
        return (*taken[:-1], False) if taken else None


class Interpreter(Expansion):
    """A shell that runs functions and builtins, and reports all other commands.

    ``started`` is called with the line and arguments of every program; it returns whether the program is assumed to
    succeed.
    """

    def __init__(
        self, script: str, unknowns: Unknowns, choices: Choices, started: Callable[[int, list[str]], bool]
    ) -> None:
        super().__init__(script, unknowns)
        self.choices, self.started = choices, started
        self.loops = 0
        self.locals: list[dict[str, str | Array | None]] = []
        """For each running function, the values that its local variables hide."""
        self.checked = 0
        """How many conditions are being evaluated; in them, failing does not end the script."""
        self.substituted: Status = 0
        """Status of the last command substitution, which is that of an assignment."""

    # ------------------------------------------------------------------ lists

    def run(self, items: Iterable[syntax.AndOr]) -> Status:
        for item in items:
            self._and_or(item)
        return self.status

    def _sequence(self, sequence: Sequence) -> Status:
        self.status = self.status if sequence else 0
        return self.run(sequence)

    def _and_or(self, item: syntax.AndOr) -> None:
        self.unknowns.go_to(item.line)
        self.unknowns.charge()
        decides = False
        for i, (operator, pipeline) in enumerate(item.pipelines):
            if operator:
                if isinstance(self.status, Unknown) and self._is_harmless(pipeline):
                    continue
                if self._truth(self.status) != (operator == "&&"):
                    continue
            decides = i == len(item.pipelines) - 1 and not pipeline.negated
            self.checked += not decides
            try:
                self.status = self._pipeline(pipeline)
            finally:
                self.checked -= not decides
        if decides and not self.checked and "e" in self.options and isinstance(self.status, int) and self.status:
            raise Jump("exit")

    def _truth(self, status: Status) -> bool:
        if isinstance(status, int):
            return status == 0
        if status.source.startswith("! "):
            return not self._truth(negated(status))
        return self.choices.take(status)

    def _condition(self, sequence: Sequence) -> Status:
        self.checked += 1
        try:
            return self._sequence(sequence)
        finally:
            self.checked -= 1

    def _pipeline(self, pipeline: syntax.Pipeline) -> Status:
        if len(pipeline.commands) == 1:
            status = self.command(pipeline.commands[0])
        else:
            for command in pipeline.commands:
                status = self.subshell(lambda shell, command=command: shell.command(command), None)  # type: ignore[misc]
            self.write(self.unknowns.make("the output of a pipe", "output"))
            if isinstance(status, int) and isinstance(command, syntax.Simple) and not command.words:
                status = 0
        if pipeline.negated:
            return negated(status) if isinstance(status, Unknown) else int(status == 0)
        return status

    def subshell(self, run: Callable[[Interpreter], object], output: list[str] | None) -> Status:
        """Run something on a copy of this shell, and return its status."""
        shell = copy.copy(self)
        shell.variables = self.copy_variables()
        shell.associative, shell.exported = set(self.associative), set(self.exported)
        shell.functions = dict(self.functions)
        shell.locals, shell.output = [], output
        self.unknowns.charge()
        with contextlib.suppress(Jump):
            run(shell)
        return shell.status

    def in_subshell(self, text: str) -> None:
        """Run text in a new shell, which has the exported variables."""

        def run(shell: Interpreter) -> None:
            exported = shell.exported
            # bash exports no arrays
            shell.variables = {n: v for n, v in shell.variables.items() if n in exported and isinstance(v, str)}
            shell.functions = {name: made for name, made in shell.functions.items() if name in exported}
            shell.options, shell.positional = set(), []
            shell.run_text(text)

        self.subshell(run, self.output)

    def substitute(self, part: syntax.Substitution) -> str:
        """Run commands and return what they print."""
        output: list[str] = []
        line = self.unknowns.line

        def run(shell: Interpreter) -> None:
            shell.options = shell.options - {"e"}
            shell._sequence(part.body)

        try:
            self.status = self.substituted = self.subshell(run, output)
            text = "".join(output).rstrip("\n")
        except Undetermined:
            text = self.unknowns.make(part.source, "output")
        self.unknowns.line = line
        if any(one.kind == "output" for one in self.unknowns.within(text)):
            # What was printed beside it is lost, so that a value is either known or not.
            return self.unknowns.make(part.source, "output")
        self.unknowns.check_length(len(text))
        return text

    # ------------------------------------------------------------------ compound commands

    def command(self, command: syntax.Command) -> Status:
        self.unknowns.charge()
        match command:
            case syntax.Simple():
                return self.simple(command)
            case syntax.If(branches):
                self.status = self._if(branches)
            case syntax.While():
                self.status = self._while(command)
            case syntax.For():
                self.status = self._for(command)
            case syntax.Count():
                self.status = self._count(command)
            case syntax.Case():
                self.status = self._case(command)
            case syntax.Group(body, subshell):
                if subshell:
                    self.status = self.subshell(lambda shell: shell._sequence(body), self.output)
                else:
                    self._sequence(body)
            case syntax.Redirection(inner):
                output, self.output = self.output, None
                try:
                    self.status = self.command(inner)
                finally:
                    self.output = output
            case syntax.Function(name, function):
                self.functions[name] = function, self.get("BASH_SOURCE") or ""
                self.export_if_all(name)
                self.status = 0
            case syntax.Test(line, tested):
                self.unknowns.go_to(line)
                self.status = self._calculation(tested) if isinstance(tested, tuple) else conditional(tested, self)
        return self.status

    def _calculation(self, expression: Word) -> Status:
        try:
            return int(self.number(expression) == 0)
        except arithmetic.Failure:
            return 1
        except Undetermined:
            shown = self.unknowns.shown(self.string(expression))
            return Unknown(f"(( {shown[:2000]} ))", self.unknowns.line, "text")

    def _if(self, branches: tuple[tuple[Sequence, Sequence], ...]) -> Status:
        for i, (condition, body) in enumerate(branches):
            status = self._condition(condition) if condition else 0
            if isinstance(status, Unknown) and all(self._is_harmless(each) for _, each in branches[i:]):
                return 0
            if self._truth(status):
                return self._sequence(body)
        return 0

    def _loop(self, body: Sequence) -> bool:
        """Run the body of a loop once; return False where the loop ends."""
        self.loops += 1
        try:
            self._sequence(body)
        except Jump as jump:
            if jump.kind not in ("break", "continue"):
                raise
            if jump.levels > 1:
                raise Jump(jump.kind, jump.levels - 1) from None
            return jump.kind == "continue"
        finally:
            self.loops -= 1
        return True

    def _maybe_loop(self, status: Unknown, body: Sequence, until: bool = False) -> None:
        """Run a body that runs an unknown number of times; afterwards, what it has changed is unknown."""
        if self._is_harmless(body) or self._truth(status) == until:
            return
        before = self.copy_variables()
        self._loop(body)
        for name, value in self.variables.items():
            if before.get(name) == value:
                continue
            if isinstance(value, dict):
                self.forget_elements(name)
            else:
                self.variables[name] = self.unknowns.make(f"${name}", "output")

    def _while(self, command: syntax.While) -> Status:
        result: Status = 0
        for _ in range(MOST_ITERATIONS):
            status = self._condition(command.condition)
            if isinstance(status, Unknown):
                self._maybe_loop(status, command.body, command.until)
                return 0
            if (status == 0) == command.until:
                return result
            if not self._loop(command.body):
                return 0
            result = self.status
        raise LoopLimit(self.unknowns.line, f"a loop runs more than {MOST_ITERATIONS} times")

    def _for(self, command: syntax.For) -> Status:
        words = list(self.positional) if command.words is None else self.fields(command.words)
        for word in words:
            self.unknowns.charge()
            unknown = self.unknowns.within(word)
            self.set(command.name, word)
            if len(word) == 1 and unknown and unknown[0].kind in ("output", "list"):
                source = f"for {command.name} in {unknown[0].source}"
                self._maybe_loop(Unknown(source, self.unknowns.line, "text"), command.body)
            elif not self._loop(command.body):
                break
        return self.status if words else 0

    def _count(self, command: syntax.Count) -> Status:
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

    def _case(self, command: syntax.Case) -> Status:
        self.unknowns.go_to(command.line)
        value = self.string(command.subject)
        falls = False
        for i, (patterns, body, end) in enumerate(command.clauses):
            found = falls or any_true([self._matches(value, pattern) for pattern in patterns])
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
            return pattern == "*" or matches(pattern, self.unknowns.known(value), self.unknowns)
        except Undetermined:
            return unknown_test(self, f"{value} = {self.string(word)}")

    # ------------------------------------------------------------------ simple commands

    def simple(self, command: syntax.Simple) -> Status:
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
        exported = set(self.exported)
        self._assign_all(command.assignments)
        self.exported |= set(kept)
        try:
            self.status = self._call(arguments, command)
            return self.status
        finally:
            self.exported = exported | (self.exported - set(kept))
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
        named = one.name in self.associative
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
            self.exported.add(name)
        if "A" in options:
            self.associative.add(name)

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
        command, file = self.functions[name]
        self.locals.append({})
        try:
            with self._called(file, arguments):
                self.command(command)
        finally:
            self.restore(self.locals.pop())
        return self.status

    @contextlib.contextmanager
    def _called(self, file: str, arguments: list[str] | None) -> Iterator[None]:
        """Return a context of commands that ``return`` ends: their file starts ``BASH_SOURCE``.

        They have parameters of their own, unless ``arguments`` is None.
        """
        files, positional = self.variables.get("BASH_SOURCE", {}), self.positional
        callers = files.values() if isinstance(files, dict) else [files]
        self.variables["BASH_SOURCE"] = {str(i): each for i, each in enumerate([file, *callers])}
        self.positional = positional if arguments is None else arguments
        try:
            yield
        except Jump as jump:
            if jump.kind != "return":
                raise
        finally:
            self.variables["BASH_SOURCE"] = files
            if arguments is not None:
                self.positional = positional

    def run_text(self, text: str) -> Status:
        unknowns = self.unknowns
        pinned, unknowns.pinned = unknowns.pinned, unknowns.line
        self.status = 0
        try:
            return self.run(Parser(text).script())
        except SyntaxProblem as error:
            raise Refusal(unknowns.pinned, f"cannot be read: {error.problem}") from None
        finally:
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
        with self._called(name, arguments[1:] or None):
            self.run_text(text)
        return self.status

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

    # ------------------------------------------------------------------ what cannot matter

    def _is_harmless(self, node: object) -> bool:
        """Return whether a part of the script can neither start a training nor change what is started later."""
        match node:
            case syntax.AndOr():
                return all(self._is_harmless(pipeline) for _, pipeline in node.pipelines)
            case syntax.Group(nodes) | syntax.Pipeline(nodes) | tuple(nodes):
                return all(map(self._is_harmless, nodes))
            case syntax.Redirection(command):
                return self._is_harmless(command)
            case syntax.Simple(_, (), ((syntax.Text(name, _),), *_)):
                safe = self.output is None and name in _HARMLESS and name not in self.functions
                return safe and all(map(_changes_nothing, node.words))
        return False


def _changes_nothing(word: Word | syntax.Assignment) -> bool:
    """Return whether a word can be expanded without an assignment."""
    return isinstance(word, tuple) and not any(
        isinstance(part, syntax.Arithmetic) or (isinstance(part, syntax.Parameter) and "=" in part.operator)
        for part in word
    )


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
