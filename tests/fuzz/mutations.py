"""Inputs made from valid ones as a broken disk, a wrong hand or an attacker would: bytes, words, values."""

from __future__ import annotations

import json
import re
import string
import tomllib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import tomli_w

Mutator = Callable[[Random, bytes], bytes]

_NUMBERS = [
    *(0, -1, 1, 2, 7, 255, 10**6, 2**31, 2**53, 2**61, 2**62, 2**63 - 1, -(2**63)),
    *(2**31 - 1, 2**31 + 1, 2**62 - 1, 2**63, 2**64, -(2**62), 10**12, 4097, 1025),
    *(0.5, -0.0, 1e-12, 1e9, 1e18, 1e300, 1.7e308, 1e-300, 1e6, float("nan"), float("inf"), -float("inf")),
]
_TEXTS = [
    *(
        "",
        "a",
        "lm",
        "0",
        "-1",
        "keep",
        "F",
        "é→",
        "[/x]",
        "[red]",
        "a b",
        "a=b",
        "../x",
        "/etc/passwd",
        "\x1b[31m",
        "a\nb",
    ),
    *("x" * 300, "{}", "pipeloom.plan/3", "nan", "1e999", "9" * 30),
]
_TOKENS = [
    *(
        "",
        "0",
        "-1",
        "1e300",
        "1e999",
        "nan",
        "inf",
        "-inf",
        *map(str, (2**31, 2**31 + 1, 2**62, 2**63, 10**12, 10**18, 1e6, 1e12, -0.3)),
        "9" * 30,
        "9" * 5000,
        "true",
        "null",
        '"x"',
        "[]",
        "{}",
        "[[",
        "}}",
    ),
    *(
        "=",
        "..",
        ",",
        ":",
        "--",
        "\n",
        "\0",
        "\ud800",
        "é",
        "#",
        "'",
        '"',
        "$(id)",
        "!!python/object:os.system",
        "&a [*a]",
    ),
    *("a" * 400, "(" * 2000, "[" * 2000),
]
_WORD = re.compile(r"[A-Za-z_]+|\d+(?:\.\d+)?|[^\sA-Za-z_\d]")


def change_bytes(random: Random, data: bytes) -> bytes:
    """Flip, cut, drop, double, fill or insert, once or several times."""
    found = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        at = random.randrange(len(found) + 1)
        end = min(len(found), at + random.choice([1, 1, 2, 4, 8, 64]))
        action = random.randrange(7)
        if action == 0:
            del found[at:]
        elif action == 1:
            del found[at:end]
        elif action == 2:
            found[at:at] = found[at:end] * random.choice([1, 1, 50])
        elif action == 3:
            found[at:end] = random.choice([b"\0", b"\xff", b"\x7f"]) * (end - at)
        elif action == 4:
            found[at:at] = random.randbytes(random.choice([1, 4, 16]))
        elif at < len(found):
            found[at] ^= 1 << random.randrange(8)
    return bytes(found)


def change_words(random: Random, data: bytes) -> bytes:
    """Put other words and numbers in the places of some, or take lines out, in twice or elsewhere."""
    text = data.decode("utf-8", "surrogateescape")
    for _ in range(random.choice([1, 1, 2, 3])):
        if random.random() < 0.3:
            lines = text.splitlines(keepends=True) or [""]
            at = random.randrange(len(lines))
            line = lines.pop(at) if random.random() < 0.5 else lines[at]
            if random.random() < 0.6:
                lines.insert(random.randrange(len(lines) + 1), line)
            text = "".join(lines)
            continue
        places = list(_WORD.finditer(text))
        if places:
            place = random.choice(places)
            other = random.choice([random.choice(_TOKENS), random.choice(places)[0], str(random.choice(_NUMBERS))])
            text = text[: place.start()] + other + text[place.end() :]
    return text.encode("utf-8", "surrogatepass")


def change_value(random: Random, node: Any) -> Any:
    """Replace, drop, double or add something at a random place of a document."""
    if isinstance(node, dict) and node and random.random() < 0.9:
        key = random.choice(sorted(node, key=str))
        action = random.randrange(12)
        if action == 0:
            return {k: v for k, v in node.items() if k != key}
        if action == 1:
            return node | {random.choice([*map(str, node), *_TEXTS]): _junk(random)}
        return node | {key: change_value(random, node[key])}
    if isinstance(node, list) and node and random.random() < 0.9:
        i, action = random.randrange(len(node)), random.randrange(8)
        if action == 2:
            return node * random.choice([2, 3, 50])
        if action == 3:
            return node[: random.randrange(len(node) + 1)]
        if action == 0:
            return node[:i] + node[i + 1 :]
        if action == 1:
            return [*node, random.choice(node)]
        return [*node[:i], change_value(random, node[i]), *node[i + 1 :]]
    if isinstance(node, int | float) and not isinstance(node, bool) and random.random() < 0.6:
        return random.choice([-node, node + 1, node * 2, node * 10**9, random.choice(_NUMBERS)])
    if isinstance(node, str) and node and random.random() < 0.3:
        at = random.randrange(len(node))
        return node[:at] + random.choice(string.printable) + node[at + random.randrange(2) :]
    return _junk(random)


def change_json(random: Random, data: bytes) -> bytes:
    """Change values of a JSON document; now and then of one that is far too deep or too long."""
    document = json.loads(data)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        document = change_value(random, document)
    if random.random() < 0.01:
        deep = "[" * 100_000 + "]" * 100_000
        return json.dumps(document).replace("{", '{"a": ' + deep + ",", 1).encode()
    return json.dumps(document).encode()


def change_toml(random: Random, data: bytes) -> bytes:
    """Change values of a TOML document."""
    document = tomllib.loads(data.decode())
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        document = change_value(random, document)
    try:
        return tomli_w.dumps(document).encode()
    except (TypeError, AttributeError, ValueError):  # it has no null, and is always a table
        return change_words(random, data)


def change_lines(random: Random, data: bytes) -> bytes:
    """Change values in one of the lines, each of which is a JSON document."""
    lines = data.splitlines()
    at = random.randrange(len(lines))
    lines[at] = change_json(random, lines[at])
    return b"\n".join(lines)


def change_msgpack(random: Random, data: bytes) -> bytes:
    """Change values of a MessagePack document."""
    document = msgspec.msgpack.decode(data)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        document = change_value(random, document)
    try:
        return msgspec.msgpack.encode(document)
    except OverflowError:  # it has no such numbers
        return change_bytes(random, data)


def _junk(random: Random) -> Any:
    return random.choice(
        [None, True, False, [], {}, [[]], [None], {"a": 1}, [0] * 100, random.choice(_NUMBERS), random.choice(_TEXTS)]
    )
