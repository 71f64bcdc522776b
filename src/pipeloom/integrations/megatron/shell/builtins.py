"""Commands that bash runs itself, and a few programs whose output depends on their arguments alone."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable

from pipeloom.integrations.megatron.shell import arithmetic
from pipeloom.integrations.megatron.shell.expansion import Expansion
from pipeloom.integrations.megatron.shell.parser import unescape
from pipeloom.integrations.megatron.shell.state import is_name
from pipeloom.integrations.megatron.shell.syntax import Text, Word
from pipeloom.integrations.megatron.shell.values import Refusal, Status, Undetermined, Unknown, has_unknown

_FORMAT = re.compile(r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d{1,4})?(?:\.(?P<precision>\*|\d{1,3}))?(?P<kind>[a-zA-Z%(])")
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(.+)\]", re.ASCII | re.DOTALL)


def _echo(shell: Expansion, arguments: list[str]) -> Status:
    flags = ""
    while arguments and re.fullmatch(r"-[neE]+", arguments[0]):
        flags += arguments[0]
        arguments = arguments[1:]
    text = " ".join(arguments)
    escapes = flags.rfind("e") > flags.rfind("E")
    shell.write((unescape(text) if escapes else text) + ("" if "n" in flags else "\n"))
    return 0


def _printf(shell: Expansion, arguments: list[str]) -> Status:
    target = None
    if arguments[:1] == ["-v"]:
        target, arguments = arguments[1], arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        return 2
    try:
        text = _formatted(shell, unescape(shell.unknowns.known(arguments[0])), arguments[1:])
    except Undetermined as error:
        text = shell.unknowns.derive(error.unknown)
    except ValueError:
        raise Refusal(
            shell.unknowns.line, f"printf {shell.unknowns.shown(arguments[0])[:40]!r} is not supported"
        ) from None
    if target is None:
        shell.write(text)
        return 0
    found = _ELEMENT.fullmatch(target)
    shell.set(target if found is None else found[1], text, None if found is None else found[2])
    return 0


def _formatted(shell: Expansion, form: str, values: list[str]) -> str:
    """Return values as a format writes them, which starts again until no value is left."""
    parts: list[str] = []
    rest = list(values)
    while True:
        left = len(rest)
        parts.append(_FORMAT.sub(lambda found: _field(shell, found, rest), form))
        shell.unknowns.charge()
        shell.unknowns.check_length(sum(map(len, parts[-100:])))
        if not rest or len(rest) == left:
            return "".join(parts)


def _field(shell: Expansion, found: re.Match[str], rest: list[str]) -> str:
    """Return one value as a format writes it; raise ValueError where the format is not known."""
    kind, flags = found["kind"], found["flags"]
    if kind == "%":
        return "%"
    known = shell.unknowns.known
    width, precision = (
        str(int(known(rest.pop(0) if rest else "0"))) if found[name] == "*" else found[name] or ""
        for name in ("width", "precision")
    )
    if width.startswith("-"):
        flags, width = f"{flags}-", width[1:]
    if len(width) > 4 or len(precision) > 3:
        raise ValueError
    value = rest.pop(0) if rest else ""
    if kind == "s" and not width and not precision:
        return value
    value = known(value)
    form = f"%{flags}{width}{f'.{precision}' if precision else ''}"
    if kind in "sb":
        value = unescape(value) if kind == "b" else value
        value = value[: int(precision)] if precision else value
        return value.ljust(int(width or 0)) if "-" in flags else value.rjust(int(width or 0))
    if kind == "q" and re.fullmatch(r"[\w./:=@%^+,-]+", value, re.ASCII):
        return value
    if kind in "dixXo":
        return f"{form}{'d' if kind == 'i' else kind}" % (arithmetic.wrapped(int(value, 0)) if value else 0)
    if kind in "feEgG":
        return f"{form}{kind}" % float(value or 0)
    if kind == "c":
        return value[:1]
    raise ValueError


def _cd(shell: Expansion, arguments: list[str]) -> Status:
    places = [word for word in arguments if word not in ("--", "-P", "-L")]
    place = places[0] if places else shell.unknowns.make("~", "text")
    if place == "-" or has_unknown(place):
        shell.cwd = shell.unknowns.make(f"cd {shell.unknowns.shown(place)}", "text")
    elif os.path.isabs(place) or has_unknown(shell.cwd):
        shell.cwd = os.path.abspath(place)
    else:
        shell.cwd = os.path.normpath(os.path.join(shell.cwd, place))
    return 0


def _pwd(shell: Expansion, _arguments: list[str]) -> Status:
    shell.write(f"{shell.cwd}\n")
    return 0


def _unset(shell: Expansion, arguments: list[str]) -> Status:
    for word in arguments:
        found = _ELEMENT.fullmatch(word)
        if found is not None:
            index = found[2] if found[1] in shell.associative else str(_calculated(shell, found[2]))
            elements = shell.variables.get(found[1])
            if isinstance(elements, dict):
                elements.pop(index.strip("'\""), None)
        elif word != "-v":
            shell.variables.pop(word, None)
            shell.associative.discard(word)
            shell.exported.discard(word)
            shell.functions.pop(word, None)
    return 0


def _calculated(shell: Expansion, text: str) -> int:
    return shell.needed_number((Text(text, quoted=True),), f"{text[:40]!r} fails")


def _set(shell: Expansion, arguments: list[str]) -> Status:
    at = 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if word == "--" or not word or word[0] not in "-+":
            shell.positional = arguments[at - (word != "--") :]
            break
        letters = word[1:]
        if "o" in letters and at < len(arguments):
            letters = letters.replace("o", {"allexport": "a", "errexit": "e", "nounset": "u"}.get(arguments[at], ""))
            at += 1
        shell.options = shell.options | set(letters) if word[0] == "-" else shell.options - set(letters)
    return 0


def _shift(shell: Expansion, arguments: list[str]) -> Status:
    number = _calculated(shell, arguments[0]) if arguments else 1
    if not 0 <= number <= len(shell.positional):
        return 1
    shell.positional = shell.positional[number:]
    return 0


def _let(shell: Expansion, arguments: list[str]) -> Status:
    return int([0, *(_calculated(shell, text) for text in arguments)][-1] == 0)


def _getopts(shell: Expansion, arguments: list[str]) -> Status:
    if len(arguments) > 2 or shell.positional:
        raise Refusal(shell.unknowns.line, "getopts with arguments is not supported")
    shell.set(arguments[1], "?")
    return 1


def _dirname(shell: Expansion, arguments: list[str]) -> Status:
    for path in map(shell.unknowns.without_unset, arguments):
        if not path.startswith("-"):
            folder, slash, _ = path.rstrip("/").rpartition("/")
            shell.write(f"{(folder.rstrip('/') or '/') if slash or path.startswith('/') else '.'}\n")
    return 0


def _basename(shell: Expansion, arguments: list[str]) -> Status:
    words = [shell.unknowns.without_unset(word) for word in arguments if word != "--"]
    if words and words[0].startswith("-"):
        raise Refusal(shell.unknowns.line, "basename with options is not supported")
    if not 1 <= len(words) <= 2:
        return 1
    name = words[0].rstrip("/").rsplit("/", 1)[-1]
    if len(words) > 1 and name != words[1]:
        name = name.removesuffix(words[1])
    shell.write(f"{name}\n")
    return 0


def _path(shell: Expansion, arguments: list[str]) -> Status:
    path = arguments[-1]
    shell.write((path if has_unknown(path) else os.path.abspath(path)) + "\n")
    return 0


def _seq(shell: Expansion, arguments: list[str]) -> Status:
    numbers = [shell.unknowns.known(word) for word in arguments]
    if not 1 <= len(numbers) <= 3 or not all(re.fullmatch(r"-?\d{1,15}", number) for number in numbers):
        raise Refusal(shell.unknowns.line, f"seq {' '.join(numbers)[:40]} is not supported")
    first, *middle, last = map(int, numbers if len(numbers) > 1 else ["1", *numbers])
    step = middle[0] if middle else 1
    if step == 0:
        return 1
    found = range(first, last + (1 if step > 0 else -1), step)
    shell.unknowns.charge(len(found))
    shell.write("".join(f"{number}\n" for number in found))
    return 0


def _expr(shell: Expansion, arguments: list[str]) -> Status:
    words = [shell.unknowns.known(word) for word in arguments]
    if not all(re.fullmatch(r"-?\d+|[-+*/%()]", word) for word in words):
        raise Refusal(shell.unknowns.line, f"expr {' '.join(words)[:40]} is not supported")
    value = _calculated(shell, " ".join(words))
    shell.write(f"{value}\n")
    return int(value == 0)


BUILTINS: dict[str, Callable[[Expansion, list[str]], Status]] = {
    **dict.fromkeys((":", "true", "trap", "shopt"), lambda _shell, _arguments: 0),
    "false": lambda _shell, _arguments: 1,
    "echo": _echo,
    "printf": _printf,
    "cd": _cd,
    "pushd": _cd,
    "pwd": _pwd,
    "unset": _unset,
    "set": _set,
    "shift": _shift,
    "let": _let,
    "getopts": _getopts,
    "dirname": _dirname,
    "basename": _basename,
    "realpath": _path,
    "readlink": _path,
    "seq": _seq,
    "expr": _expr,
}


def read_line(shell: Expansion, arguments: list[str], stdin: Word | None) -> Status:
    """Run ``read``, whose input is known where it is a here-string or here-document."""
    array, names, raw, whole = "", [], False, False
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-") or len(word) == 1:
            names.append(word)
            continue
        raw |= "r" in word
        value = next(rest, "") if word[-1] in "adinNptu" else ""
        array = value if word[-1] == "a" else array
        # No text has the delimiter of `read -d ''`, so that it reads all and fails.
        if word[-1] == "d" and not value:
            whole = True
        elif set(word[1:]) & set("dnNu"):
            stdin = None
    if not all(map(is_name, names + [array] * bool(array))):
        raise Refusal(shell.unknowns.line, "read into an element of an array is not supported")
    text = None if stdin is None else shell.unknowns.without_unset(shell.string(stdin))
    if text is None or (not raw and "\\" in text) or has_unknown(text):
        for name in names or ["REPLY"]:
            shell.set(name, shell.unknowns.make(f"${name}", "output"))
        if array:
            shell.forget_elements(array)
        return Unknown(f"read {' '.join(arguments)}", shell.unknowns.line, "text")
    line = text if whole else text.split("\n", 1)[0]
    words = [field for field, _ in shell.split([(line, False)])]
    if array:
        shell.variables[array] = {str(i): word for i, word in enumerate(words)}
        return int(whole)
    if len(words) > len(names) > 0:
        if shell.get("IFS") is not None:
            raise Refusal(shell.unknowns.line, "read with more words than names is read with the usual IFS only")
        words[len(names) - 1 :] = [line.strip(" \t\n").split(None, len(names) - 1)[-1]]
    for i, name in enumerate(names):
        shell.set(name, words[i] if i < len(words) else "")
    if not names:
        shell.set("REPLY", line)
    return int(whole)
