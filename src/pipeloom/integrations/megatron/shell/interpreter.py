"""Run the commands of a bash script as far as they decide which programs start with which arguments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipeloom.integrations.megatron.shell import arithmetic, syntax
from pipeloom.integrations.megatron.shell.conditions import any_true, conditional, unknown_test
from pipeloom.integrations.megatron.shell.patterns import matches
from pipeloom.integrations.megatron.shell.simple_commands import MOST_CALLS, Jump, SimpleCommands
from pipeloom.integrations.megatron.shell.state import DefinedFunction
from pipeloom.integrations.megatron.shell.syntax import Sequence, Word
from pipeloom.integrations.megatron.shell.values import (
    LoopLimit,
    Status,
    Undetermined,
    Unknown,
    Unknowns,
    WorkLimit,
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
    """Decisions that depend on something unknown, and whether each was taken as true.

    The first ones follow ``prefix``; all others are taken as true.
    """

    prefix: tuple[bool, ...] = ()
    made: dict[Unknown, bool] = field(default_factory=dict)

    def take(self, unknown: Unknown) -> bool:
        """Decide whether an unknown status is a success; the same question has the same answer."""
        if unknown not in self.made:
            number = len(self.made)
            if number == MOST_DECISIONS:
                raise WorkLimit(unknown.line, f"more than {MOST_DECISIONS} decisions depend on something unknown")
            self.made[unknown] = self.prefix[number] if number < len(self.prefix) else True
        return self.made[unknown]

    def following(self) -> tuple[bool, ...] | None:
        """Return the next combination of decisions, depth first; None after the last."""
        taken = tuple(self.made.values())
        while taken and not taken[-1]:
            taken = taken[:-1]
        return (*taken[:-1], False) if taken else None


class Interpreter(SimpleCommands):
    """A shell that runs functions and builtins, and reports all other commands."""

    def __init__(
        self, script: str, unknowns: Unknowns, choices: Choices, started: Callable[[int, list[str]], bool]
    ) -> None:
        super().__init__(script, unknowns, started)
        self.choices = choices
        self.checked = 0
        """How many conditions are being evaluated; in them, failing does not end the script."""

    # ------------------------------------------------------------------ lists

    def run(self, items: Iterable[syntax.AndOr]) -> Status:
        """Run commands one by one."""
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
        shell.attributes, shell.functions = self.attributes.copy(), dict(self.functions)
        shell.locals, shell.output = [], output
        shell.calls += 1
        self.unknowns.charge()
        if shell.calls > MOST_CALLS:
            raise WorkLimit(self.unknowns.line, f"commands are nested more than {MOST_CALLS} deep")
        with contextlib.suppress(Jump):
            run(shell)
        return shell.status

    def in_subshell(self, text: str) -> None:
        """Run text in a new shell, which has the exported variables."""

        def run(shell: Interpreter) -> None:
            exported = shell.attributes.exported
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
        """Run any command."""
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
                self.functions[name] = DefinedFunction(function, self.get("BASH_SOURCE") or "")
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
