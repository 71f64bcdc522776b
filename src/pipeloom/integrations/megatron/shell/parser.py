"""Parse a bash script, one line of commands after the other, as bash does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from pipeloom.integrations.megatron.shell import syntax
from pipeloom.integrations.megatron.shell.syntax import AndOr, Assignment, Command, Condition, Sequence, Text, Word
from pipeloom.integrations.megatron.shell.words import ENDS, SyntaxProblem, WordReader

Token: TypeAlias = tuple[str, tuple[Word, ...]]
"""A token of a condition: its text where it may be an operator, and its word where it may be an operand."""
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_ENDERS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|function|select|coproc|time|in|[{}!]|\[\[)(?=[\s;&|()<>]|$)"
)
_REDIRECT = re.compile(r"(?:\d+|\{[A-Za-z_]\w*\})?(<<<|<<-|<<|<&|<>|<(?!\()|>>|>&|>\||>(?!\()|&>>|&>)", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[)?", re.ASCII)
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)", re.ASCII)
_NAMED_FUNCTION = re.compile(r"[ \t]*([^\s();&|<>]+)[ \t]*(?:\([ \t]*\))?")
_FILE_TESTS = tuple(f"-{letter}" for letter in "abcdefghkprstuwxGLNOS")
_UNARY = frozenset((*_FILE_TESTS, "-z", "-n", "-v", "-o"))
_BINARY = frozenset(("=", "==", "!=", "<", ">", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"))
_TOKEN = re.compile(r"[;&|()<>]+|\S+")
_IN_CONDITION = re.compile(r"&&|\|\||[()]|[<>](?!\()|!(?=[\s;&|()<>]|$)")


class Parser(WordReader):
    """Parser over the text of a script."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._documents: list[tuple[str, bool, syntax.Document]] = []

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

    def _command(self) -> Command:
        found = self._compound()
        if found is None:
            return self._simple()
        silent = False
        while (streams := self._redirect()) is not None:
            silent |= streams[1]
        return syntax.Redirection(found) if silent else found

    def _compound(self) -> Command | None:
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

    def _for(self, line: int) -> Command:
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

    def _simple(self) -> Command:
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


class Wrong(Exception):
    """A condition is malformed."""


def parse_condition(tokens: list[Token], *joiners: str) -> Condition:
    """Parse the inside of ``[ ]`` or ``[[ ]]``; ``joiners`` are its operators for "or" and "and".

    Raises `Wrong` for a malformed condition.
    """
    parser = _ConditionParser(tokens, joiners)
    found = parser.chain()
    if parser.at < len(tokens):
        raise Wrong(f"{parser.text()!r} is unexpected")
    return found


class _ConditionParser:
    def __init__(self, tokens: list[Token], joiners: tuple[str, ...]) -> None:
        self.tokens, self.joiners, self.at = tokens, joiners, 0

    def text(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at][0] if at < len(self.tokens) else ""

    def chain(self, level: int = 0) -> Condition:
        if level == len(self.joiners):
            return self.primary()
        nodes = [self.chain(level + 1)]
        while self.text() == self.joiners[level]:
            self.at += 1
            nodes.append(self.chain(level + 1))
        return nodes[0] if len(nodes) == 1 else Condition(self.joiners[level], tuple(nodes))

    def primary(self) -> Condition:
        operator = self.text()
        words = [word for _, word in self.tokens[self.at : self.at + 3]]
        if not words:
            raise Wrong("an operand is missing")
        negates = operator == "!" and len(words) > 1
        negates_binary = negates and self.at + 4 == len(self.tokens) and self.text(2) in _BINARY
        if self.text(1) in _BINARY and len(words) == 3 and words[0] and words[2] and not negates_binary:
            return self.test(self.text(1), 3, words[0] + words[2])
        if negates:
            self.at += 1
            return Condition("!", (self.primary(),))
        if operator == "(" and len(words) > 1:
            self.at += 1
            found = self.chain()
            if self.text() != ")":
                raise Wrong("a bracket is not closed")
            self.at += 1
            return found
        if operator in _UNARY and len(words) > 1:
            if not words[1]:
                raise Wrong(f"{self.text(1)!r} is unexpected")
            return self.test(operator, 2, words[1])
        if not words[0]:
            raise Wrong(f"{operator!r} is unexpected")
        return self.test("-n", 1, words[0])

    def test(self, operator: str, length: int, words: tuple[Word, ...]) -> Condition:
        self.at += length
        return Condition(operator, words=words)
