"""Run the commands of a bash script as far as they decide which programs start with which arguments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipeloom.integrations.megatron.shell import arithmetic
from pipeloom.integrations.megatron.shell.conditions import conditional
from pipeloom.integrations.megatron.shell.simple_commands import MOST_CALLS, Jump, SimpleCommands
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

MOST_ITERATIONS = 10_000
MOST_DECISIONS = 100
_HARMLESS = frozenset(
    (
        *(":", "true", "echo", "mkdir", "rm", "cp", "mv", "ln", "touch", "ls", "cat", "wget", "curl", "tar", "unzip"),
        *("pip", "pip3", "sleep", "chmod", "kill", "pkill", "killall", "tee", "wait", "date", "ulimit", "git"),
    )
)
"""Programs that change nothing in the script that runs them, however they end."""


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


class Interpreter(SimpleCommands):
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
                self.and_or(item)
        except Jump:
            return self.unknowns.line
        return 0

    # ------------------------------------------------------------------ lists

    def _sequence(self, sequence: Sequence) -> Status:
        self.status = 0 if not sequence.items else self.status
        for item in sequence.items:
            self.and_or(item)
        return self.status

    def and_or(self, item: AndOr | Broken) -> None:
        """Run pipelines joined by ``&&`` and ``||``."""
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
            raise Jump("exit")

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
            status = self.command(pipeline.commands[0])
        else:
            for command in pipeline.commands:
                status = self.subshell(lambda shell, command=command: shell.command(command), [])[0]  # type: ignore[misc]
            if self.output is not None:
                self.output.append(self.unknowns.make("the output of a pipe", "output"))
            if isinstance(status, int) and isinstance(pipeline.commands[-1], Simple):
                status = status if pipeline.commands[-1].words else 0
        if pipeline.negated:
            return negated(status) if isinstance(status, Unknown) else int(status == 0)
        return status

    def subshell(self, run: Callable[[Interpreter], object], output: list[str] | None) -> tuple[Status, Interpreter]:
        """Run something on a copy of this shell."""
        shell = copy.copy(self)
        self.copy_to(shell)
        shell.output = output
        shell.calls += 1
        self.unknowns.charge()
        if shell.calls > MOST_CALLS:
            raise WorkLimit(self.unknowns.line, f"commands are nested more than {MOST_CALLS} deep")
        with contextlib.suppress(Jump):
            run(shell)
        return shell.status, shell

    def in_subshell(self, text: str) -> None:
        """Run text in a new shell, which has the exported variables."""

        def run(shell: Interpreter) -> None:
            shell.variables = {name: value for name, value in shell.variables.items() if name in shell.exported}
            shell.functions, shell.options, shell.positional = {}, set(), []
            shell.run_text(text)

        self.subshell(run, self.output)

    def substitute(self, part: Substitution) -> str:
        """Run commands and return what they print."""
        output: list[str] = []
        line = self.unknowns.line

        def run(shell: Interpreter) -> None:
            shell.options = shell.options - {"e"}
            shell._sequence(part.body)

        try:
            self.status, _ = self.subshell(run, output)
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

    def command(self, command: Command) -> Status:
        """Run any command."""
        self.unknowns.charge()
        match command:
            case Simple():
                return self.simple(command)
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
                    self.status, _ = self.subshell(lambda shell: shell._sequence(body), self.output)
                else:
                    self._sequence(body)
            case Redirected(inner):
                output, self.output = self.output, None
                try:
                    self.status = self.command(inner)
                finally:
                    self.output = output
            case Function(name, function):
                self.functions[name] = function
                self.function_files[name] = self.get("BASH_SOURCE") or ""
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
