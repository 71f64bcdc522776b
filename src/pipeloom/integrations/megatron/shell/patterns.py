"""Match patterns of bash, such as ``*.sh``, with regular expressions that take time of at most a product of lengths.

A pattern is a string in which characters that stand for themselves may have a backslash in front of them.
"""

from __future__ import annotations

import re

from pipeloom.integrations.megatron.shell.values import Unknowns

_TOKEN = re.compile(
    r"(?P<any>\*)|(?P<one>\?)"
    r"|\[(?P<negated>[!^])?+(?P<set>(?:\[:\w+:\]|\\.|.)(?:\[:\w+:\]|\\.|[^]\\])*)\]|\\?(?P<char>.)",
    re.DOTALL,
)
_IN_SET = re.compile(r"\[:(?P<name>\w+):\]|(?P<low>.)-(?P<high>.)|(?P<char>.)", re.DOTALL)
_CLASSES = {
    "digit": "[0-9]",
    "alpha": r"[^\W\d_]",
    "alnum": r"[^\W_]",
    "upper": "[A-Z]",
    "lower": "[a-z]",
    "space": r"\s",
    "blank": r"[ \t]",
    "punct": r"[^\w\s]|_",
    "xdigit": "[0-9a-fA-F]",
}


def _set(text: str) -> str:
    """Return an expression for one of the characters between ``[`` and ``]``."""
    found: list[str] = []
    for token in _IN_SET.finditer(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)):
        if token["name"] is not None:
            found.append(_CLASSES.get(token["name"]) or "|".join(map(re.escape, token[0])))
        elif token["low"] is None:
            found.append(re.escape(token["char"]))
        elif token["low"] <= token["high"]:
            found.append(f"[{re.escape(token['low'])}-{re.escape(token['high'])}]")
    return "|".join(found) or "(?!)"


def _regex(pattern: str, longest: bool) -> str:
    """Return a regular expression that finds the longest or shortest match from a position on."""
    pieces = [""]
    for token in _TOKEN.finditer(pattern):
        if token["any"]:
            pieces.append("")
        elif token["one"]:
            pieces[-1] += "."
        elif token["set"]:
            pieces[-1] += f"(?!{_set(token['set'])})." if token["negated"] else f"(?:{_set(token['set'])})"
        else:
            pieces[-1] += re.escape(token["char"])
    first, *rest = pieces
    if not rest:
        return first
    # The first place is the best for all parts but the last, so that nothing is tried twice.
    return first + "".join(f"(?>.*?{piece})" for piece in rest[:-1]) + (".*" if longest else ".*?") + rest[-1]


def _charge(pattern: str, text: str, unknowns: Unknowns, anywhere: bool) -> None:
    """Count the work of a match at the start of a text, or anywhere in it."""
    unknowns.charge(len(text) * len(pattern) // 50)
    if anywhere and "*" in pattern:
        unknowns.charge(len(text) ** 2 * len(pattern) // 50_000)


def matches(pattern: str, text: str, unknowns: Unknowns) -> bool:
    """Return whether a whole text matches."""
    _charge(pattern, text, unknowns, anywhere=False)
    return re.fullmatch(_regex(pattern, longest=True), text, re.DOTALL) is not None


def trimmed(pattern: str, text: str, operator: str, unknowns: Unknowns) -> str:
    """Return text without the part at its start (``#``) or end (``%``) that matches; doubled: the longest."""
    longest = len(operator) == 2
    _charge(pattern, text, unknowns, anywhere=operator[0] == "%")
    if operator[0] == "#":
        found = re.match(_regex(pattern, longest), text, re.DOTALL)
        return text if found is None else text[found.end() :]
    found = re.fullmatch(f"(.*{'?' if longest else ''}){_regex(pattern, longest)}", text, re.DOTALL)
    return text if found is None else found[1]


def replaced(pattern: str, text: str, new: str, operator: str, unknowns: Unknowns) -> str:
    """Return text with the first match replaced; ``//``: all, ``/#`` and ``/%``: at the start or end only."""
    _charge(pattern, text, unknowns, anywhere=operator != "/#")
    regex = _regex(pattern, longest=True)
    if operator == "/%":
        found = re.fullmatch(f"(.*?){regex}", text, re.DOTALL)
        return text if found is None else found[1] + new
    if operator == "/#":
        found = re.match(regex, text, re.DOTALL)
        return text if found is None else new + text[found.end() :]
    count = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal count
        if not found[0] and text:
            return ""
        count += 1
        unknowns.check_length(count * len(new))
        return new

    return re.sub(regex, replace, text, count=int(operator == "/"), flags=re.DOTALL) if pattern else text
