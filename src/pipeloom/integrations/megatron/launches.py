"""Find the command of a script that starts Megatron, and its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.arguments import Argument, UnknownText
from pipeloom.integrations.megatron.effects import known_names
from pipeloom.integrations.megatron.shell.paths import REMEDY, Path, Program, ProgramWord, follow

_LAUNCHERS = re.compile(r"torchrun|python[\d.]*|accelerate|deepspeed|debugpy-run|pretrain\w*\.py")
_WRAPPERS = frozenset(
    ("srun", "mpirun", "mpiexec", "ray", "uv", "nohup", "env", "exec", "sudo", "numactl", "nsys", "time")
)
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
Launch: TypeAlias = tuple[Path, list[str]]
"""One way through a script, and the arguments of Megatron on it."""
_SIZES = ("num-layers", "hidden-size", "encoder-num-layers", "hybrid-layer-pattern", "micro-batch-size", "seq-length")
"""Every training has one of these arguments; tools that convert data or checkpoints have others."""


def argument_words(source: str, line: int, words: Sequence[ProgramWord]) -> list[str]:
    """Return arguments as text; unknown ones are `UnknownText`.

    Raises `InputError` if it is unknown which arguments there are.
    """
    found: list[str] = []
    for i, word in enumerate(words):
        unknown = word.unknown
        is_whole = unknown is not None and word.text == unknown.source
        if unknown is not None:
            follows = bool(found) and found[-1].startswith("--") and "=" not in found[-1]
            unquoted = unknown.kind in ("output", "required")
            if (unknown.kind == "list" or (is_whole and unquoted and not follows)) or (
                word.text.startswith("--") and unknown.source in word.text.partition("=")[0]
            ):
                raise InputError(
                    f"{source}: line {line}", f"it is unknown which arguments Megatron gets: {unknown.reason}", REMEDY
                )
            any_words = unquoted or (is_whole and not follows)
            found.append(UnknownText(word.text, unknown.reason, "any" if any_words else "one"))
        else:
            found.append(word.text)
        last = i + 1 == len(words) or words[i + 1].text.startswith("--")
        if word.gone is not None and last and word.text.startswith("--") and "=" not in word.text:
            found.append(UnknownText(word.gone.source, word.gone.reason, "none"))
    return found


def launches(source: str, text: str) -> list[Launch]:
    """Return the arguments of Megatron for every way through a script that starts it.

    Raises `InputError` if it never starts Megatron, starts it with different arguments, or cannot be read.
    """
    paths = follow(source, text, lambda command: _launched(command) is not None)
    found: list[Launch] = []
    for path in paths:
        commands = [(command, words) for command in path.started if (words := _launched(command)) is not None]
        trainings = [each for each in commands if _names(each[1]) & set(_SIZES)]
        if not trainings:
            trainings = [each for each in commands if _names(each[1]) & known_names()]
        different = {tuple(word.text for word in words): (command, words) for command, words in trainings}
        if len(different) > 1:
            lines = " and ".join(sorted({str(command.line) for command, _ in different.values()}, key=int))
            raise InputError(
                source,
                f"starts several trainings with different arguments (lines {lines})",
                f"{REMEDY}, of one of them",
            )
        for command, words in different.values():
            found.append((path, argument_words(source, command.line, words)))
    if not found:
        raise _none(source, paths)
    return found


def _none(source: str, paths: list[Path]) -> InputError:
    remedy = f"name the script that has it, such as torchrun pretrain_gpt.py --num-layers 32 ..., or {REMEDY}"
    for path in paths:
        for command in path.started:
            name = command.words[0].text
            if name.startswith("-"):
                return InputError(
                    f"{source}: line {command.line}",
                    f"{name[:40]} starts a line of its own, which bash runs as a command",
                    "end the line before it with a backslash",
                )
        for command in path.started:
            words = _launched(command)
            if words is not None:
                argument_words(source, command.line, words)  # The error on an unknown word names what decides it.
                shown = " ".join(word.text for word in command.words)
                problem = f"`{shown if len(shown) < 80 else shown[:77] + '...'}` has no argument of Megatron"
                return InputError(f"{source}: line {command.line}", problem, remedy)
    ended = next((path.ended for path in paths if path.ended), 0)
    if ended:
        return InputError(
            f"{source}: line {ended}",
            "ends the script before it starts Megatron, where nothing is set outside of it",
            f"set in it the variables that it asks for, or {REMEDY}",
        )
    unset = sorted(set().union(*(path.unset for path in paths)))
    why = f"; not set in it: {', '.join(unset[:8])}" if unset else ""
    return InputError(source, f"has no command that starts Megatron{why}", remedy)


def _names(words: Sequence[ProgramWord]) -> set[str]:
    """Return the names of arguments among words."""
    return {word.text[2:].partition("=")[0].replace("_", "-") for word in words if word.text.startswith("--")}


def _launched(command: Program) -> tuple[ProgramWord, ...] | None:
    """Return the arguments of a Python program, with those of its launcher that count; None for other commands."""
    words = command.words
    names = [word.text.rsplit("/", 1)[-1] for word in words]
    start = next((i for i, name in enumerate(names) if _LAUNCHERS.fullmatch(name)), None)
    program = next((i for i, name in enumerate(names) if name.endswith(".py") and i >= (start or 0)), None)
    if start is None:
        starts = program is not None and (program == 0 or names[0] in _WRAPPERS or words[0].unknown is not None)
        return words[(program or 0) + 1 :] if starts else None
    module = next(
        (
            i + 1
            for i in range(start, len(words) - 1)
            if names[i] in ("-m", "--module") and words[i + 1].text not in _MODULES
        ),
        None,
    )
    if module is not None and (program is None or module < program):
        program = module
    if program is None:
        return words[start + 1 :] if start == 0 or names[0] in _WRAPPERS or words[0].unknown is not None else None
    counted = _counted(words[start:program])
    return (*counted, *words[program + 1 :])


def _counted(words: Sequence[ProgramWord]) -> tuple[ProgramWord, ...]:
    """Return the numbers of processes and nodes among the options of a launcher."""
    found: list[ProgramWord] = []
    for i, word in enumerate(words):
        name, equals, _ = word.text[2:].partition("=")
        if word.text.startswith("--") and name.replace("_", "-") in ("nproc-per-node", "nnodes"):
            found += words[i : i + (1 if equals else 2)]
    return tuple(found)


def merged(found: list[Launch], read: Callable[[list[str]], dict[str, Argument]]) -> dict[str, Argument]:
    """Merge the arguments of all ways; an argument on which they disagree names what decides it."""
    (first, given), *others = [(path, read(words)) for path, words in found]
    result = dict(given)
    for path, other in others:
        for name in given.keys() | other.keys():
            mine, yours = given.get(name), other.get(name)
            if mine is not None and yours is not None and mine.values == yours.values and mine.clash == yours.clash:
                continue
            one = mine or yours
            if one is not None and not (name in result and result[name].undecided):
                result[name] = Argument(one.label, one.values, one.clash, _difference(first, path))
    return result


def _difference(one: Path, other: Path) -> str:
    """Describe the first decision on which two ways differ."""
    for unknown, taken in one.decisions.items():
        if other.decisions.get(unknown) != taken:
            return f"`{unknown.source[:80]}`, which is known only when the script runs (line {unknown.line})"
    return "what is known only when the script runs"


def assumed(found: list[Launch]) -> tuple[str, ...]:
    """Return a note on the variables that were read as empty."""
    unset = sorted(set().union(*(path.unset for path, _ in found)))
    if not unset:
        return ()
    return (f"the script is read as it runs with nothing set outside of it; not set in it: {', '.join(unset)}",)
