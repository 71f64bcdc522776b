"""Parse a bash script, one line of commands after the other, as bash does."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeloom.integrations.megatron.shell.condition_reader import ConditionReader
from pipeloom.integrations.megatron.shell.syntax import (
    AndOr,
    Assignment,
    Broken,
    Calculation,
    Case,
    Command,
    Count,
    Document,
    For,
    Function,
    Group,
    If,
    Opaque,
    Pipeline,
    Redirected,
    Sequence,
    Simple,
    Text,
    While,
    Word,
)
from pipeloom.integrations.megatron.shell.words import ENDS, MOST_DEPTH, SyntaxProblem

_ENDERS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))
_REDIRECT = re.compile(r"(?:\d+|\{[A-Za-z_]\w*\})?(<<<|<<-|<<|<&|<>|<(?!\()|>>|>&|>\||>(?!\()|&>>|&>)", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[)?", re.ASCII)
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)", re.ASCII)
_DECLARATIONS = [Text(name, quoted=False) for name in ("export", "declare", "typeset", "local", "readonly")]


@dataclass(slots=True)
class _Streams:
    """Where redirections lead."""

    stdin: Word | None = None
    silent: bool = False


class Parser(ConditionReader):
    """Parser over the text of a script."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._lines = [found.end() for found in re.finditer("\n", text)]
        self._documents: list[tuple[str, bool, Document]] = []

    def line(self, position: int | None = None) -> int:
        """Line of a position, or of this one."""
        return 1 + bisect.bisect_right(self._lines, self.at if position is None else position)

    def script(self) -> Iterator[AndOr | Broken]:
        """Yield commands one by one; a syntax error ends them."""
        while True:
            try:
                self.skip_lines()
                if not self.char:
                    return
                if self.char in ")};" or self._peek() in _ENDERS:
                    raise self.fail(f"{self._token()!r} is unexpected")
                item = self._and_or()
                self._separator()
            except SyntaxProblem as error:
                yield Broken(self.line(error.position), error.problem)
                return
            yield item

    def commands(self, closing: str) -> Sequence:
        """Read commands up to a closing character."""
        self.ends, ends = ENDS, self.ends
        found = self._list()
        self.ends = ends
        if self.char != closing:
            raise self.fail(f"{self._token()!r} is unexpected" if self.char else f"{closing} is missing")
        self.at += len(closing)
        return found

    # ------------------------------------------------------------------ lists

    def skip_lines(self) -> None:
        """Skip blanks, comments and line ends, with the here-documents behind them."""
        while True:
            self.skip_space()
            if self.char != "\n":
                return
            self.at += 1
            self._read_documents()

    def _take(self, word: str) -> None:
        self.skip_lines()
        if self._peek() != word:
            raise self.fail(f"{word!r} is missing before {self._token()!r}")
        self.at += len(word)

    def _list(self) -> Sequence:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise self.fail(f"commands are nested more than {MOST_DEPTH} deep")
        items: list[AndOr | Broken] = []
        while True:
            self.skip_lines()
            if not self.char or self.char in ");" or self._peek() in _ENDERS:
                break
            items.append(self._and_or())
            if not self._separator():
                break
        self.depth -= 1
        return Sequence(tuple(items))

    def _separator(self) -> bool:
        self.skip_space()
        if (self.char == ";" and not self.starts(";;") and not self.starts(";&")) or (
            self.char == "&" and not self.starts("&&")
        ):
            self.at += 1
        elif self.char and self.char not in "\n);":
            raise self.fail(f"{self._token()!r} is unexpected")
        return bool(self.char) and self.char != ")" and not self.starts(";;") and not self.starts(";&")

    def _and_or(self) -> AndOr:
        start = self.at
        found = [("", self._pipeline())]
        while True:
            self.skip_space()
            operator = self.text[self.at : self.at + 2]
            if operator not in ("&&", "||"):
                return AndOr(self.line(start), tuple(found), self.text[start : self.at].strip())
            self.at += 2
            self.skip_lines()
            found.append((operator, self._pipeline()))

    def _pipeline(self) -> Pipeline:
        negated = False
        while (word := self._peek()) in ("!", "time"):
            self.at += len(word)
            self.skip_space()
            if word == "time" and self.starts("-p"):
                self.at += 2
                self.skip_space()
            negated ^= word == "!"
        commands = [self._command()]
        while True:
            self.skip_space()
            if self.char != "|" or self.starts("||"):
                return Pipeline(tuple(commands), negated)
            self.at += 2 if self.starts("|&") else 1
            self.skip_lines()
            commands.append(self._command())

    # ------------------------------------------------------------------ compound commands

    def _command(self) -> Command:
        found = self._compound()
        if found is None:
            return self._simple()
        streams = _Streams()
        while self._redirect(streams):
            pass
        return Redirected(found) if streams.silent else found

    def _compound(self) -> Command | None:
        line, word = self.line(), self._peek()
        readers = {"if": self._if, "for": self._for, "case": self._case, "function": self._function, "[[": self._test}
        if word in readers:
            self.at += len(word)
            return readers[word](line)
        if word in ("while", "until"):
            self.at += len(word)
            condition = self._list()
            return While(line, condition, self._do(), word == "until")
        if word == "{":
            self.at += 1
            body = self._list()
            self._take("}")
            return Group(body, subshell=False)
        if word in ("select", "coproc") or word in _ENDERS:
            raise self.fail(f"{word!r} is {'unexpected' if word in _ENDERS else 'not read'}")
        if self.starts("(("):
            start = self.at
            self.at += 2
            expression = self.arithmetic("))")
            if expression is not None:
                return Calculation(line, expression)
            self.at = start
        if self.char == "(":
            self.at += 1
            return Group(self.commands(")"), subshell=True)
        found = _FUNCTION.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            return self._body(found[1])
        return None

    def _if(self, _line: int) -> Command:
        branches = []
        while True:
            condition = self._list()
            self._take("then")
            branches.append((condition, self._list()))
            word = self._peek()
            self.at += len(word)
            if word == "elif":
                continue
            otherwise = self._list() if word == "else" else Sequence(())
            if word != "fi":
                if word != "else":
                    raise self.fail(f"'fi' is missing before {self._token()!r}")
                self._take("fi")
            return If(tuple(branches), otherwise)

    def _do(self) -> Sequence:
        self.skip_lines()
        if self._peek() == "{":
            self.at += 1
            body = self._list()
            self._take("}")
            return body
        self._take("do")
        body = self._list()
        self._take("done")
        return body

    def _for(self, line: int) -> Command:
        self.skip_space()
        if self.starts("(("):
            self.at += 2
            header = [self.arithmetic(closing) for closing in (";", ";", "))")]
            if None in header:
                raise self.fail("the header of 'for ((' is not closed")
            first, condition, step = (part or () for part in header)
            self._end_of_header()
            return Count(line, (first, condition, step), self._do())
        name = _ASSIGNMENT.match(self.text, self.at)
        if name is None:
            raise self.fail(f"{self._token()!r} is no name of a variable")
        self.at += len(name[1])
        words = None
        self.skip_lines()
        if self._peek() == "in":
            self.at += 2
            words = []
            while True:
                self.skip_space()
                if not self.char or self.char in ";\n&|()<>":
                    break
                words.append(self.word())
        self._end_of_header()
        return For(line, name[1], None if words is None else tuple(words), self._do())

    def _end_of_header(self) -> None:
        self.skip_space()
        if self.char == ";":
            self.at += 1

    def _case(self, line: int) -> Command:
        self.skip_space()
        subject = self.word()
        self._take("in")
        clauses: list[tuple[tuple[Word, ...], Sequence, str]] = []
        while True:
            self.skip_lines()
            if self._peek() == "esac":
                self.at += 4
                return Case(line, subject, tuple(clauses))
            if self.char == "(":
                self.at += 1
            patterns = []
            while True:
                self.skip_space()
                patterns.append(self.word())
                self.skip_space()
                if self.char not in ("|", ")"):
                    raise self.fail(f"{self._token()!r} is unexpected in a pattern of 'case'")
                self.at += 1
                if self.text[self.at - 1] == ")":
                    break
            body = self._list()
            end = next((end for end in (";;&", ";;", ";&") if self.starts(end)), ";;")
            if self.starts(end):
                self.at += len(end)
            elif self._peek() != "esac":
                raise self.fail("'esac' is missing")
            clauses.append((tuple(patterns), body, end))

    def _function(self, _line: int) -> Command:
        self.skip_space()
        found = re.compile(r"[^\s();&|<>]+").match(self.text, self.at)
        if found is None:
            raise self.fail("'function' has no name")
        self.at = found.end()
        self.skip_space()
        brackets = re.compile(r"\([ \t]*\)").match(self.text, self.at)
        if brackets is not None:
            self.at = brackets.end()
        return self._body(found[0])

    def _body(self, name: str) -> Function:
        self.skip_lines()
        body = self._compound()
        if body is None:
            raise self.fail(f"the function {name} has no body")
        return Function(name, body)

    # ------------------------------------------------------------------ simple commands

    def _simple(self) -> Simple:
        line, start = self.line(), self.at
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        streams = _Streams()
        declares = False
        while True:
            self.skip_space()
            if self._redirect(streams):
                continue
            if not self.char or (self.char in self.ends and not self._is_process()):
                break
            assigned = self._assignment() if declares or not words else None
            if assigned is None:
                word = self.word()
                declares |= not words and len(word) == 1 and word[0] in _DECLARATIONS
                words.append(word)
            elif words:
                words.append(assigned)
            else:
                assignments.append(assigned)
        if self.char == "(":
            raise self.fail("'(' is unexpected; quote it where it belongs to a value")
        if self.at == start:
            raise self.fail(f"{self._token()!r} is unexpected")
        return Simple(line, tuple(assignments), tuple(words), streams.stdin, streams.silent)

    def _is_process(self) -> bool:
        return self.starts("<(") or self.starts(">(")

    def _assignment(self) -> Assignment | None:
        start = self.at
        name = _ASSIGNMENT.match(self.text, start)
        if name is None:
            return None
        self.at = name.end()
        index = None
        if name[2]:
            try:
                index = self.operand("]", quoted=False)
            except SyntaxProblem:
                self.at = start
                return None
            self.at += 1
        append = self.starts("+=")
        self.at += append
        if self.char != "=":
            self.at = start
            return None
        self.at += 1
        if self.char == "(":
            self.at += 1
            return Assignment(name[1], append, index, items=self._items())
        return Assignment(name[1], append, index, self.word())

    def _items(self) -> tuple[tuple[Word | None, Word], ...]:
        found: list[tuple[Word | None, Word]] = []
        while True:
            self.skip_lines()
            if self.char == ")":
                self.at += 1
                return tuple(found)
            if not self.char or (self.char in ";&|<>()" and not self._is_process()):
                raise self.fail(f"{self._token()!r} is unexpected in an array; quote it where it belongs to a value")
            key = None
            start = self.at
            if self.char == "[":
                self.at += 1
                try:
                    key = self.operand("]", quoted=False)
                except SyntaxProblem:
                    key = ()
                if self.starts("]="):
                    self.at += 2
                else:
                    self.at, key = start, None
            found.append((key, self.word()))

    def _redirect(self, streams: _Streams) -> bool:
        """Read a redirection, where one stands here."""
        self.skip_space()
        found = _REDIRECT.match(self.text, self.at)
        if found is None:
            return False
        self.at = found.end()
        self.skip_space()
        start = self.at
        target = self.word()
        if self.at == start:
            raise self.fail(f"{self._token()!r} is unexpected behind {found[1]!r}")
        if found[1] == "<<<":
            streams.stdin = (*target, Text("\n", quoted=True))
        elif found[1] in ("<<", "<<-"):
            raw = self.text[start : self.at]
            delimiter = re.sub(r"\\(.)|[\"']", r"\1", raw)
            document = Document(literal=raw != delimiter)
            self._documents.append((delimiter, found[1] == "<<-", document))
            streams.stdin = (document,)
        elif "<" in found[1]:
            streams.stdin = (Opaque(f"< {self.text[start : self.at]}"),)
        elif found[0][0] in ">&1":
            streams.silent = True
        return True

    def _read_documents(self) -> None:
        """Read the bodies of here-documents whose line has just ended."""
        for delimiter, tabs, document in self._documents:
            body = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                line = line.lstrip("\t") if tabs else line
                self.at = min(end + 1, len(self.text))
                if line.removesuffix("\r") == delimiter:
                    break
                body.append(f"{line}\n")
            document.text = "".join(body)
        self._documents.clear()
