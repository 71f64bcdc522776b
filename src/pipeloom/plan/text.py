"""Text and binary forms of plans (`pipeloom.plan/2`, with streams `pipeloom.plan/3`). Both are lossless."""

from __future__ import annotations

import re
from typing import Literal, NoReturn

import msgspec

from pipeloom.errors import InputError
from pipeloom.limits import MAX_COUNT
from pipeloom.plan.action import Action, ExecutionPlan, Verb
from pipeloom.spec.model import MOST_LAYERS, MOST_LETTERS

FORMAT = "pipeloom.plan/2"
FORMAT_WITH_STREAMS = "pipeloom.plan/3"
_COLUMN = 11
"""Width of the column of verbs. The only longer verb is the only word of its line."""
_SPLITS = re.compile(r"[\s=]")
"""Characters that would split a name in the text."""


def to_text(plan: ExecutionPlan) -> str:
    """Write a plan as text: a header, then the number of every rank and its actions, one per line."""
    lines = [f"{plan.format} ranks={plan.num_ranks} iteration={plan.iteration} layout={plan.layout}"]
    for rank, actions in enumerate(plan.ranks):
        lines.append(f"rank {rank}")
        lines += (_line(action, _COLUMN) for action in actions)
    return "\n".join(lines) + "\n"


def action_text(action: Action) -> str:
    """Write one action, such as ``SEND_F vision.0 3.0 to=1 shape=12,169,64 dtype=float32``."""
    return _line(action, 0)


def _line(action: Action, width: int) -> str:
    """Write an action with its verb padded to a width."""
    verb = action.verb
    if verb is Verb.OPTIMIZER_STEP:
        return verb.value
    if verb.is_chunk:
        return f"{verb.ljust(width)} {action.chunk}"
    words = [verb.ljust(width), action.chunk, f"{action.microbatch}.{action.sub_microbatch}"]
    if action.strategy:
        words.append(action.strategy)
    if action.peer is not None:
        # An invalid plan may have a peer with a verb that takes none. Error messages show it.
        words.append(f"{_peer_word(verb) or 'peer'}={action.peer}")
    if action.shape is not None:
        words.append("shape=" + ",".join(map(str, action.shape)))
    if action.dtype:
        words.append(f"dtype={action.dtype}")
    if action.target:
        words.append(f"target={action.target}")
    if action.stream:
        words.append(f"stream={action.stream}")
    return " ".join(words)


def from_text(text: str) -> ExecutionPlan:
    """Read a plan from its text; the exact inverse of `to_text`.

    Raises
    ------
    InputError
        The text is invalid. The message has the line, the problem and the expected form.
    """
    lines = text.splitlines()
    version, num_ranks, iteration, layout = _header(lines[0] if lines else "")
    ranks: list[list[Action]] = []
    for number, line in enumerate(lines[1:], start=2):
        words = line.split()
        if not words:
            continue
        if words[0] == "rank":
            if words[1:] != [str(len(ranks))]:
                _refuse(number, f"{line!r}", f"rank {len(ranks)} comes next")
            ranks.append([])
        elif not ranks:
            _refuse(number, f"{line!r} is before any rank", "begin with 'rank 0'")
        else:
            ranks[-1].append(_action(words, number, version))
    if len(ranks) != num_ranks:
        raise InputError("plan", f"has {len(ranks)} ranks, its header says {num_ranks}")
    return ExecutionPlan(num_ranks, iteration, layout, tuple(map(tuple, ranks)), version)


def to_msgpack(plan: ExecutionPlan) -> bytes:
    """Encode a plan as MessagePack."""
    return msgspec.msgpack.encode(plan)


def from_msgpack(data: bytes) -> ExecutionPlan:
    """Decode and validate a plan from MessagePack.

    Raises
    ------
    InputError
        The bytes are not a plan of this format, or an action does not match its verb.
    """
    try:
        plan = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise InputError("plan", *_problem_of_bytes(data, error)) from error
    if len(plan.ranks) != plan.num_ranks:
        raise InputError("plan", f"has {len(plan.ranks)} ranks, its header says {plan.num_ranks}")
    for rank, actions in enumerate(plan.ranks):
        for step, action in enumerate(actions):
            problem = _problem(action, plan.format)
            if problem:
                raise InputError(f"rank {rank}, step {step}", problem)
    return plan


_DECODER = msgspec.msgpack.Decoder(ExecutionPlan)


class _Envelope(msgspec.Struct):
    """The part of a plan that all versions share."""

    format: str


_ENVELOPE_DECODER = msgspec.msgpack.Decoder(_Envelope)


def _problem_of_bytes(data: bytes, error: msgspec.MsgspecError) -> tuple[str, str]:
    """Return the problem of bytes that are not a plan, and the remedy."""
    try:
        version = _ENVELOPE_DECODER.decode(data).format
    except msgspec.MsgspecError:
        version = FORMAT
    return (str(error), f"send a {FORMAT}") if version == FORMAT else (_wrong_format(version), _remedy(version))


def _wrong_format(version: str) -> str:
    return f"is a {version!r}, expected {FORMAT!r}"


def _remedy(version: str) -> str:
    if version == "pipeloom.plan/1":
        return "its verbs have other names, plan again"
    return f"write a {FORMAT}"


_MOST_LETTERS = MOST_LETTERS + 10
"""Largest number of letters in a name: that of a module, a dot and the number of a chunk."""
_Version = Literal["pipeloom.plan/2", "pipeloom.plan/3"]


def _header(line: str) -> tuple[_Version, int, int, str]:
    words = line.split()
    name = words[0] if words else ""
    if name not in (FORMAT, FORMAT_WITH_STREAMS):
        _refuse(1, _wrong_format(name), _remedy(name))
    fields = _fields(words[1:], ("ranks", "iteration", "layout"), 1)
    for field in ("ranks", "iteration", "layout"):
        if field not in fields:
            _refuse(1, f"has no {field}=", f"write '{FORMAT} ranks=N iteration=N layout=DIGEST'")
    version: _Version = "pipeloom.plan/2" if name == FORMAT else "pipeloom.plan/3"
    return version, _number(fields["ranks"], 1), _number(fields["iteration"], 1), fields["layout"]


def _action(words: list[str], line: int, version: _Version) -> Action:
    try:
        verb = Verb(words[0])
    except ValueError:
        _refuse(line, f"unknown verb {words[0]!r}", f"one of {' '.join(Verb)}")
    if verb is Verb.OPTIMIZER_STEP:
        if len(words) > 1:
            _refuse(line, f"{verb} takes no words, got {' '.join(words[1:])!r}", "")
        return Action(verb)
    if len(words) < 2:
        _refuse(line, f"{verb} has no chunk", f"write '{verb} module.index ...'")
    if verb.is_chunk:
        if len(words) > 2:
            _refuse(line, f"{verb} takes a chunk only, got {' '.join(words[2:])!r}", "")
        action = Action(verb, words[1])
    else:
        action = _unit_action(verb, words, line)
    problem = _problem(action, version)
    if problem:
        _refuse(line, problem, "")
    return action


def _unit_action(verb: Verb, words: list[str], line: int) -> Action:
    chunk = words[1]
    if len(words) < 3:
        _refuse(line, f"{verb} has no microbatch", f"write '{verb} {chunk} microbatch.sub-microbatch ...'")
    microbatch, dot, sub = words[2].partition(".")
    if not dot:
        _refuse(line, f"{words[2]!r} is no microbatch.sub-microbatch", "for example 3.0")
    rest = words[3:]
    strategy = rest.pop(0) if rest and "=" not in rest[0] else ""
    fields = _fields(rest, ("to", "from", "shape", "dtype", "target", "stream"), line)
    peer_word = _peer_word(verb)
    for name in {"to", "from"} - {peer_word}:
        if name in fields:
            _refuse(line, f"{verb} takes no {name}=", "")
    shape: tuple[int, ...] | None = None
    if "shape" in fields:
        shape = tuple(_number(word, line) for word in fields["shape"].split(",")) if fields["shape"] else ()
    return Action(
        verb=verb,
        chunk=chunk,
        microbatch=_number(microbatch, line),
        sub_microbatch=_number(sub, line),
        peer=_number(fields[peer_word], line) if peer_word in fields else None,
        target=fields.get("target", ""),
        shape=shape,
        dtype=fields.get("dtype", ""),
        strategy=strategy,
        stream=fields.get("stream", ""),
    )


def _problem(action: Action, version: _Version) -> str:
    """Return the problem of an action whose fields do not match its verb; empty if they do."""
    verb = action.verb
    message = verb.is_post
    bare = not (verb.is_unit or verb.is_message or verb.is_chunk)
    if bare != (not action.chunk):
        return f"{verb} {'takes no' if action.chunk else 'has no'} chunk"
    strategies = action.strategy.split(",")
    if len(strategies) > MOST_LAYERS:
        return f"names {len(strategies)} strategies, a module has at most {MOST_LAYERS} layers"
    for name in (action.chunk, action.target, action.stream, action.dtype, *strategies):
        if len(name) > _MOST_LETTERS:
            return f"the name {name[:40]!r}... has {len(name)} letters, more than {_MOST_LETTERS}"
    for name in (action.chunk, action.target, action.stream):
        if _SPLITS.search(name):
            return f"the name {name!r} contains white space or '='"
    if _SPLITS.search(action.strategy) or _SPLITS.search(action.dtype):
        return "strategy or dtype contains white space or '='"
    if action.strategy and verb != "F":
        return f"{verb} takes no strategy"
    if message != (action.peer is not None) or message != (action.shape is not None) or message != bool(action.dtype):
        return f"{verb} {'needs' if message else 'takes no'} peer, shape and dtype"
    if (action.target or action.stream) and not verb.is_message:
        return f"{verb} takes no {'target' if action.target else 'stream'}"
    if action.stream and version != FORMAT_WITH_STREAMS:
        return f"stream={action.stream} in a {version}; plans with streams are {FORMAT_WITH_STREAMS}"
    numbers = (action.microbatch, action.sub_microbatch, action.peer or 0, *(action.shape or ()))
    if min(numbers) < 0:
        return f"{min(numbers)} is negative"
    if (bare or verb.is_chunk) and (action.microbatch or action.sub_microbatch):
        return f"{verb} takes no microbatch"
    return ""


def _peer_word(verb: Verb) -> str:
    return "to" if verb.is_send else "from" if verb.is_receive else ""


def _fields(words: list[str], allowed: tuple[str, ...], line: int) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in allowed:
            _refuse(line, f"unexpected {word!r}", f"known fields: {', '.join(allowed)}")
        if name in fields:
            _refuse(line, f"{name}= occurs twice", "")
        fields[name] = value
    return fields


def _number(word: str, line: int) -> int:
    if not (word.isascii() and word.isdigit()):
        _refuse(line, f"{word!r} is not a whole number of at least 0", "")
    # Python raises on numbers with thousands of digits.
    if len(word) > 20 or int(word) > MAX_COUNT:
        _refuse(line, f"{word[:20]!r} is above {MAX_COUNT}", "")
    return int(word)


def _refuse(line: int, problem: str, remedy: str) -> NoReturn:
    raise InputError(f"plan, line {line}", problem, remedy)
