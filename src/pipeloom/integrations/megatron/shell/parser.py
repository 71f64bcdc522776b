"""Parse a bash script, one line of commands after the other, as bash does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipeloom.integrations.megatron.shell import syntax
from pipeloom.integrations.megatron.shell.condition_syntax import Token, Wrong, parse_condition
from pipeloom.integrations.megatron.shell.syntax import AndOr, Assignment, Condition, Sequence, Text, Word

DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_ENDERS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|function|select|coproc|time|in|[{}!]|\[\[)(?=[\s;&|()<>]|$)"
)
_REDIRECT = re.compile(r"(?:\d+|\{[A-Za-z_]\w*\})?(<<<|<<-|<<|<&|<>|<(?!\()|>>|>&|>\||>(?!\()|&>>|&>)", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[)?", re.ASCII)
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)", re.ASCII)
_NAMED_FUNCTION = re.compile(r"[ \t]*([^\s();&|<>]+)[ \t]*(?:\([ \t]*\))?")
_TOKEN = re.compile(r"[;&|()<>]+|\S+")
_IN_CONDITION = re.compile(r"&&|\|\||[()]|[<>](?!\()|!(?=[\s;&|()<>]|$)")
ENDS = " \t\n;&|<>()"
"""Characters that end a word outside of quotes."""
_SPACE = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)*")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`\]/}]+")
_SINGLE = re.compile(r"'([^']*)'")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
_IN_QUOTES = re.compile(r'(?:[^$`"\\]|\\.?)+', re.DOTALL), re.compile(r'\\([$`"\\])|\\\n')
_IN_DOCUMENT = re.compile(r"(?:[^$`\\]|\\.?)+", re.DOTALL), re.compile(r"\\([$`\\])|\\\n")
_NAME = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!-]|\d)", re.ASCII)
_PREFIX = re.compile(r"[#!](?=[A-Za-z_0-9@*])")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII)
_OPERATOR = re.compile(r":[-=?+]|##|%%|//|/[#%]|\^\^|,,|[-=?+#%/^,@:]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", re.DOTALL)


_MOST_DEPTH = 40
_MOST_READS = 100_000
"""Text within ``$((``, an index or an offset may be parsed twice per level of nesting, so time doubles per level."""


class SyntaxProblem(Exception):
    """The script cannot be parsed at some line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


def unescape(text: str) -> str:
    """Return text with the escapes of ``$'...'`` and ``printf`` resolved."""

    def resolve(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xu" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) & 0xFF)
        return _ESCAPES.get(code, code if code in "\\'\"?" else f"\\{code}")

    return _ESCAPE.sub(resolve, text)


def _add(parts: list[syntax.Part], text: str, quoted: bool) -> None:
    """Append characters, to the last part where that has others of their kind."""
    last = parts[-1] if parts else None
    if isinstance(last, Text) and last.quoted == quoted:
        parts[-1] = Text(last.text + text, quoted)
    else:
        parts.append(Text(text, quoted))


class Parser:
    """Parser over the text of a script; ``ends`` are the characters that end a word."""

    def __init__(self, text: str) -> None:
        self.text, self.ends, self.at, self.depth = text, ENDS, 0, 0
        self._documents: list[tuple[str, bool, syntax.Document]] = []
        self._reads = itertools.count(1)

    def line(self, position: int | None = None) -> int:
        """Return the line of a position, or of the current one."""
        return 1 + self.text.count("\n", 0, self.at if position is None else position)

    def fail(self, problem: str, position: int | None = None) -> SyntaxProblem:
        """Make an error at a position, or at the current one."""
        return SyntaxProblem(self.line(position), problem)

    @contextmanager
    def _deeper(self, what: str) -> Iterator[None]:
        """Count what is nested within this context; raise an error if it is too deep, or parsed again too often."""
        if self.depth == _MOST_DEPTH:
            raise self.fail(f"{what} are nested more than {_MOST_DEPTH} deep")
        if next(self._reads) > _MOST_READS:
            raise self.fail(f"nested {what} take more than {_MOST_READS} steps to parse")
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    @property
    def char(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.at : self.at + 1]

    def starts(self, *texts: str) -> bool:
        """Return whether one of some texts is next."""
        return self.text.startswith(texts, self.at)

    def skip(self, text: str) -> bool:
        """Skip a text if it is next."""
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Read what matches a pattern, if it is next."""
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def skip_space(self) -> None:
        """Skip blanks, continued lines and a comment."""
        self.take(_SPACE)

    def script(self) -> Iterator[AndOr]:
        """Yield commands one by one. A syntax error is raised only where bash gets there."""
        waiting: list[AndOr] = []
        self.skip_lines()
        while self.char:
            if self.char in ")};" or self._peek() in _ENDERS:
                raise self._unexpected()
            waiting.append(self._and_or())
            self._separator()
            if self._documents:
                # The bodies of here-documents follow the line, which may have further commands.
                self.skip_lines()
            if not self._documents:
                yield from waiting
                waiting.clear()
                self.skip_lines()
        yield from waiting

    def commands(self, closing: str) -> Sequence:
        self.ends, ends = ENDS, self.ends
        found = self._list()
        self.ends = ends
        if self.char != closing:
            raise self._unexpected() if self.char else self.fail(f"{closing} is missing")
        self.at += len(closing)
        return found

    # ------------------------------------------------------------------ lists

    def skip_lines(self) -> None:
        """Skip blanks, comments and line ends, with the here-documents behind them."""
        self.skip_space()
        while self.skip("\n"):
            self._read_documents()
            self.skip_space()

    def _peek(self) -> str:
        """Return the reserved word that is next; empty where none is."""
        found = _RESERVED.match(self.text, self.at)
        return found[0] if found is not None else ""

    def _token(self) -> str:
        found = _TOKEN.match(self.text, self.at)
        return repr(found[0][:40] if found is not None else "end of file")

    def _unexpected(self, where: str = "") -> SyntaxProblem:
        return self.fail(f"{self._token()} is unexpected{where}")

    def _accept(self, word: str) -> bool:
        return self._peek() == word and self.skip(word)

    def _expect(self, word: str) -> None:
        self.skip_lines()
        if not self._accept(word):
            raise self.fail(f"{word!r} is missing before {self._token()}")

    def _list(self) -> Sequence:
        items: list[AndOr] = []
        follows = True
        with self._deeper("commands"):
            while follows:
                self.skip_lines()
                if not self.char or self.char in ");" or self._peek() in _ENDERS:
                    break
                items.append(self._and_or())
                follows = self._separator()
        return tuple(items)

    def _block(self, closing: str) -> Sequence:
        found = self._list()
        self._expect(closing)
        return found

    def _separator(self) -> bool:
        """Read what is between two commands; return whether another may follow."""
        self.skip_space()
        if (self.char == ";" and not self.starts(";;", ";&")) or (self.char == "&" and not self.starts("&&")):
            self.at += 1
        elif self.char and self.char not in "\n);":
            raise self._unexpected()
        return self.char not in ("", ")") and not self.starts(";;", ";&")

    def _and_or(self) -> AndOr:
        line = self.line()
        found = [("", self._pipeline())]
        while True:
            self.skip_space()
            operator = self.text[self.at : self.at + 2]
            if operator not in ("&&", "||"):
                return AndOr(line, tuple(found))
            self.at += 2
            self.skip_lines()
            found.append((operator, self._pipeline()))

    def _pipeline(self) -> syntax.Pipeline:
        negated = False
        while (word := self._peek()) in ("!", "time"):
            self.at += len(word)
            self.skip_space()
            if word == "time" and self.skip("-p"):
                self.skip_space()
            negated ^= word == "!"
        commands = [self._command()]
        self.skip_space()
        while self.char == "|" and not self.starts("||"):
            self.at += 2 if self.starts("|&") else 1
            self.skip_lines()
            commands.append(self._command())
            self.skip_space()
        return syntax.Pipeline(tuple(commands), negated)

    # ------------------------------------------------------------------ compound commands

    def _command(self) -> syntax.Command:
        found = self._compound()
        if found is None:
            return self._simple()
        silent = False
        while (streams := self._redirect()) is not None:
            silent |= streams[1]
        return syntax.Redirection(found) if silent else found

    def _compound(self) -> syntax.Command | None:
        line, start, word = self.line(), self.at, self._peek()
        if word in _ENDERS:
            raise self._unexpected()
        if word in ("select", "coproc"):
            raise self.fail(f"{word!r} is not supported")
        self.at += len(word)
        match word:
            case "if":
                return self._if()
            case "while" | "until":
                return syntax.While(self._list(), self._do(), word == "until")
            case "for":
                return self._for(line)
            case "case":
                return self._case(line)
            case "function":
                found = self.take(_NAMED_FUNCTION)
                if found is None:
                    raise self.fail("'function' has no name")
                return self._function(found[1])
            case "[[":
                return syntax.Test(line, self._condition())
            case "{":
                return syntax.Group(self._block("}"), subshell=False)
        self.at = start
        if self.skip("(("):
            expression = self.arithmetic("))")
            if expression is not None:
                return syntax.Test(line, expression)
            self.at = start
        if self.skip("("):
            return syntax.Group(self.commands(")"), subshell=True)
        found = self.take(_FUNCTION)
        return None if found is None else self._function(found[1])

    def _if(self) -> syntax.If:
        branches: list[tuple[Sequence, Sequence]] = []
        while True:
            condition = self._block("then")
            branches.append((condition, self._list()))
            if not self._accept("elif"):
                break
        if self._accept("else"):
            branches.append(((), self._list()))
        self._expect("fi")
        return syntax.If(tuple(branches))

    def _do(self) -> Sequence:
        self.skip_lines()
        if self._accept("{"):
            return self._block("}")
        self._expect("do")
        return self._block("done")

    def _for(self, line: int) -> syntax.Command:
        self.skip_space()
        if self.skip("(("):
            header = [self.arithmetic(closing) for closing in (";", ";", "))")]
            if None in header:
                raise self.fail("the header of 'for ((' is not closed")
            first, condition, step = (part or () for part in header)
            self._end_of_header()
            return syntax.Count(line, (first, condition, step), self._do())
        name = self.take(_ASSIGNMENT)
        if name is None:
            raise self.fail(f"{self._token()} is not a variable name")
        self.at = name.end(1)
        words = None
        self.skip_lines()
        if self._accept("in"):
            words = []
            self.skip_space()
            while self.char and self.char not in ";\n&|()<>":
                words.append(self.word())
                self.skip_space()
        self._end_of_header()
        return syntax.For(name[1], None if words is None else tuple(words), self._do())

    def _end_of_header(self) -> None:
        self.skip_space()
        self.skip(";")

    def _case(self, line: int) -> syntax.Case:
        self.skip_space()
        subject = self.word()
        self._expect("in")
        clauses: list[tuple[tuple[Word, ...], Sequence, str]] = []
        while True:
            self.skip_lines()
            if self._accept("esac"):
                return syntax.Case(line, subject, tuple(clauses))
            self.skip("(")
            patterns: list[Word] = []
            while not patterns or self.skip("|"):
                self.skip_space()
                patterns.append(self.word())
                self.skip_space()
            if not self.skip(")"):
                raise self._unexpected(" in a pattern of 'case'")
            body = self._list()
            end = next((end for end in (";;&", ";;", ";&") if self.skip(end)), "")
            if not end and self._peek() != "esac":
                raise self.fail("'esac' is missing")
            clauses.append((tuple(patterns), body, end or ";;"))

    def _function(self, name: str) -> syntax.Function:
        self.skip_lines()
        body = self._compound()
        if body is None:
            raise self.fail(f"the function {name} has no body")
        return syntax.Function(name, body)

    def _condition(self) -> Condition:
        """Read the rest of ``[[ ]]``, whose words, operators and patterns have rules of their own."""
        tokens: list[Token] = []
        self.skip_lines()
        while not self.skip("]]"):
            if not self.char:
                raise self.fail(f"']]' is missing before {self._token()}")
            is_regex = bool(tokens) and tokens[-1][0] == "=~"
            if not is_regex and (operator := self.take(_IN_CONDITION)) is not None:
                tokens.append((operator[0], ()))
            else:
                self.ends, ends = " \t\n" if is_regex else self.ends, self.ends
                word = self.word()
                self.ends = ends
                if not word:
                    raise self._unexpected(" in [[ ]]")
                if self.char == "(":
                    raise self.fail("extended patterns such as @(a|b) are not supported")
                plain = word[0].text if isinstance(word[0], Text) and not word[0].quoted and len(word) == 1 else ""
                tokens.append((plain, (word,)))
            self.skip_lines()
        try:
            return parse_condition(tokens, "||", "&&")
        except Wrong as error:
            raise self.fail(f"{error} in [[ ]]") from None

    # ------------------------------------------------------------------ simple commands

    def _simple(self) -> syntax.Command:
        line, start = self.line(), self.at
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        stdin: Word | None = None
        silent = False
        while True:
            if (streams := self._redirect()) is not None:
                stdin, silent = streams[0] or stdin, silent or streams[1]
                continue
            if not self.char or (self.char in self.ends and not self.starts("<(", ">(")):
                break
            declares = bool(words) and words[0] in [(Text(name, quoted=False),) for name in DECLARATIONS]
            assigned = self._assignment() if declares or not words else None
            if assigned is None:
                words.append(self.word())
            elif words:
                words.append(assigned)
            else:
                assignments.append(assigned)
        if self.char == "(":
            raise self.fail("'(' is unexpected; quote it where it belongs to a value")
        if self.at == start:
            raise self._unexpected()
        found = syntax.Simple(line, tuple(assignments), tuple(words), stdin)
        return syntax.Redirection(found) if silent else found

    def _index(self) -> Word | None:
        """Read an index behind its ``[``; return None where it is not closed."""
        try:
            found = self.operand("]", quoted=False)
        except SyntaxProblem:
            return None
        self.at += 1
        return found

    def _assignment(self) -> Assignment | None:
        start = self.at
        name = self.take(_ASSIGNMENT)
        if name is None:
            return None
        index = self._index() if name[2] else None
        append = self.starts("+=")
        self.at += append
        if (name[2] and index is None) or not self.skip("="):
            self.at = start
            return None
        if self.skip("("):
            return Assignment(name[1], append, index, items=self._items())
        return Assignment(name[1], append, index, self.word())

    def _items(self) -> tuple[tuple[Word | None, Word], ...]:
        found: list[tuple[Word | None, Word]] = []
        self.skip_lines()
        while not self.skip(")"):
            start = self.at
            if not self.char or (self.char in ";&|<>()" and not self.starts("<(", ">(")):
                raise self._unexpected(" in an array; quote it where it belongs to a value")
            key = self._index() if self.skip("[") else None
            if key is None or not self.skip("="):
                self.at, key = start, None
            found.append((key, self.word()))
            self.skip_lines()
        return tuple(found)

    def _redirect(self) -> tuple[Word | None, bool] | None:
        """Read a redirection, if one is next; return the standard input, and whether standard output goes elsewhere."""
        self.skip_space()
        found = self.take(_REDIRECT)
        if found is None:
            return None
        self.skip_space()
        start = self.at
        target = self.word()
        raw = self.text[start : self.at]
        if not raw:
            raise self._unexpected(f" behind {found[1]!r}")
        if found[1] == "<<<":
            return (*target, Text("\n", quoted=True)), False
        if found[1] in ("<<", "<<-"):
            delimiter = re.sub(r"\\(.)|[\"']", r"\1", raw)
            document = syntax.Document(literal=raw != delimiter)
            self._documents.append((delimiter, found[1] == "<<-", document))
            return (document,), False
        if "<" in found[1]:
            return (syntax.Opaque(f"< {raw}"),), False
        return None, found[0][0] in ">&1"

    def _read_documents(self) -> None:
        """Read the bodies of here-documents whose line has just ended."""
        for delimiter, tabs, document in self._documents:
            indent = r"\t*" if tabs else ""
            last = re.compile(rf"^{indent}{re.escape(delimiter)}\r?$\n?|\Z", re.MULTILINE)
            end = last.search(self.text, self.at)
            assert end is not None
            body = self.text[self.at : end.start()]
            body = body if body.endswith("\n") or not body else f"{body}\n"
            document.text = re.sub(r"^\t+", "", body, flags=re.MULTILINE) if tabs else body
            self.at = end.end()
        self._documents.clear()

    # ------------------------------------------------------------------ words

    def word(self) -> Word:
        """Read one word, which may be empty."""
        parts: list[syntax.Part] = []
        start = self.at
        if self.skip("~"):
            parts.append(syntax.Opaque("~", quoted=False))
        elif self.starts("<(", ">(") and "(" in self.ends:
            self.at += 2
            self.commands(")")
            parts.append(syntax.Opaque(self.text[start : self.at]))
        while self.char and self.char not in self.ends:
            if self.char == "\r" and self.text[self.at + 1 : self.at + 2] in ("\n", ""):
                self.at += 1  # a file of Windows
            else:
                self._part(parts)
        return tuple(parts)

    def document(self) -> Word:
        """Read the whole text as the body of a here-document."""
        parts: list[syntax.Part] = []
        while self.char:
            self._inside(parts, *_IN_DOCUMENT)
        return tuple(parts)

    def _part(self, parts: list[syntax.Part]) -> None:
        """Read quotes, an escape, an expansion, or plain characters."""
        start = self.at
        if self.skip("\\\n"):
            return
        if self.skip("\\"):
            _add(parts, self.char, quoted=True)
            self.at += 1
        elif (found := self.take(_SINGLE)) is not None:
            _add(parts, found[1], quoted=True)
        elif (found := self.take(_ANSI)) is not None:
            _add(parts, unescape(found[1]), quoted=True)
        elif self.starts("'", "$'"):
            raise self.fail(f"a quote {self.char.strip(chr(39))}' is not closed")
        elif self.skip('"') or self.skip('$"'):
            before = len(parts)
            while not self.skip('"'):
                if not self.char:
                    raise self.fail('a quote " is not closed', start)
                self._inside(parts, *_IN_QUOTES)
            if len(parts) == before:
                _add(parts, "", quoted=True)
        elif self.char in "$`":
            parts.append(self._dollar(quoted=False))
        else:
            if self.take(_PLAIN) is None:
                self.at += 1
            _add(parts, self.text[start : self.at], quoted=False)

    def _inside(self, parts: list[syntax.Part], run: re.Pattern[str], escape: re.Pattern[str]) -> None:
        """Read one part within double quotes or a here-document."""
        found = self.take(run)
        if found is None:
            parts.append(self._dollar(quoted=True))
        else:
            _add(parts, escape.sub(lambda each: each[1] or "", found[0]), quoted=True)

    def _dollar(self, quoted: bool) -> syntax.Part:
        """Read an expansion that starts with ``$`` or a backquote."""
        start = self.at
        with self._deeper("expansions"):
            if self.char == "`":
                return self._backquoted(quoted)
            if self.skip("$(("):
                expression = self.arithmetic("))")
                if expression is not None:
                    return syntax.Arithmetic(expression, self.text[start : self.at], quoted)
                self.at = start
            if self.skip("$("):
                body = self.commands(")")
                return syntax.Substitution(body, self.text[start : self.at], quoted)
            if self.starts("$["):
                raise self.fail("$[ ] is not supported; write $(( ))")
            if self.skip("${"):
                return self._braced(start, quoted)
        found = self.take(_NAME)
        if found is None:
            self.at += 1
            return Text("$", quoted)
        return syntax.Parameter(found[1], found[0], quoted)

    def _backquoted(self, quoted: bool) -> syntax.Part:
        found = self.take(_BACKQUOTED)
        if found is None:
            raise self.fail("a quote ` is not closed")
        inner = Parser(re.sub(r'\\([$`\\"])' if quoted else r"\\([$`\\])", r"\1", found[1]))
        inner.depth, inner._reads = self.depth, self._reads
        try:
            return syntax.Substitution(inner.commands(""), found[0], quoted)
        except SyntaxProblem as error:
            raise self.fail(error.problem, found.start()) from None

    def arithmetic(self, closing: str) -> Word | None:
        """Read an expression up to ``))``, ``;``, ``:`` or ``}``; return None where another bracket ends it."""
        parts: list[syntax.Part] = []
        depth = 0
        while depth or not self.skip(closing):
            char = self.char
            if not char:
                raise self.fail(f"{closing} is missing")
            if depth == 0 and char in ")}":
                return None
            depth += (char in "([{") - (char in ")]}")
            # A ternary within a substring has its own colon.
            depth += (closing == ":" and char == "?") - (closing == ":" and char == ":")
            if char in "$`":
                parts.append(self._dollar(quoted=True))
            elif not (self.skip('"') or self.skip("\\\n")):
                parts.append(Text(char, quoted=True))
                self.at += 1
        return tuple(parts)

    def _braced(self, start: int, quoted: bool) -> syntax.Parameter:
        """Read the rest of ``${...}``."""
        prefix = self.take(_PREFIX)
        name = self.take(_PARAMETER)
        if name is None:
            raise self.fail(f"{self.text[start : start + 20]} is not supported", start)
        index: Word | None = None
        if self.skip("["):
            index = self.operand("]", quoted=False)
            self.at += 1
        found = self.take(_OPERATOR)
        operator, operands = "", []
        if found is not None:
            operator = found[0]
            if operator == ":":
                operands = self._offsets()
            else:
                operands = [self.operand("/}" if operator.startswith("/") else "}", quoted)]
                if operator.startswith("/") and self.skip("/"):
                    operands.append(self.operand("}", quoted))
        if not self.skip("}"):
            raise self.fail("${ is not closed", start)
        source = self.text[start : self.at]
        return syntax.Parameter(name[0], source, quoted, index, prefix[0] if prefix else "", operator, tuple(operands))

    def _offsets(self) -> list[Word]:
        """Read ``offset`` or ``offset:length``."""
        start = self.at
        found = [self.arithmetic(":")]
        if found[0] is None:
            self.at, found = start, []
        found.append(self.arithmetic("}"))
        self.at -= 1
        return [each or () for each in found]

    def operand(self, stops: str, quoted: bool) -> Word:
        """Read a word within braces, up to one of some characters."""
        parts: list[syntax.Part] = []
        start = self.at
        while not self.char or self.char not in stops:
            if not self.char:
                raise self.fail(f"{stops[-1]} is missing", start)
            escaped = self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n}/')
            if quoted and (self.char == "'" or (self.char == "\\" and not escaped)):
                # Within double quotes, single quotes are characters, but for patterns, which have them rarely.
                _add(parts, self.char, quoted=True)
                self.at += 1
            elif quoted and self.char == "$":
                parts.append(self._dollar(quoted=True))
            else:
                self._part(parts)
        return tuple(parts)
