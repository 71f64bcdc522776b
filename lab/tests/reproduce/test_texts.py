"""Texts of tables: what experiments pass is what texts quote, so that no run fails on its last line."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeloom_lab import reproduce
from pipeloom_lab.reproduce import PAPERS
from pipeloom_lab.reproduce.texts import make_note, make_table, read_texts

SOURCE = Path(reproduce.__file__).parent


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call of ``make_table`` and ``make_note``: which, the name that it gives, and the call."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="make_table" | "make_note" as which), args=[name, *_]):
                    # A name may end in a value: "adaptis/figure-10-{title}".
                    parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                    assert isinstance(parts[0], ast.Constant)
                    yield which, str(parts[0].value) + "*" * (len(parts) > 1), node


def _placeholders(text: str | dict[str, Any]) -> set[str]:
    if isinstance(text, str):
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}
    several = {column[1:] for column in text["columns"] if column.startswith("*")}
    single = [column for column in text["columns"] if not column.startswith("*")]
    return several.union(*map(_placeholders, [text["title"], text.get("note", ""), *single]))


def _matching(which: str, name: str) -> list[str]:
    paper, _, key = name.partition("/")
    texts = read_texts(paper)
    known = texts["notes"] if which == "make_note" else texts
    return [each for each in known if each == key or (key.endswith("*") and each.startswith(key[:-1]))]


def test_every_call_passes_what_its_text_quotes() -> None:
    for which, name, call in _calls():
        paper = name.partition("/")[0]
        texts = read_texts(paper)["notes"] if which == "make_note" else read_texts(paper)
        found = _matching(which, name)
        assert found, f"{name} is no text of {paper}"
        passed = {keyword.arg for keyword in call.keywords}
        quoted = set[str]().union(*(_placeholders(texts[each]) for each in found))
        assert passed == quoted, f"{name} at line {call.lineno}"


@pytest.mark.parametrize("paper", PAPERS)
def test_every_text_is_used(paper: str) -> None:
    used = {
        (which, each) for which, name, _ in _calls() if name.startswith(f"{paper}/") for each in _matching(which, name)
    }
    texts = read_texts(paper)
    known = {("make_table", name) for name in texts if name != "notes"} | {
        ("make_note", name) for name in texts["notes"]
    }
    assert used == known


def test_values_stand_in_titles_columns_and_notes() -> None:
    table = make_table("pipetune/figure-7", [], sizes=(f"static {k}" for k in (1, 2)))
    assert table.columns[:4] == ("mixture", "static 1", "static 2", "batches for which a size is best")
    table = make_table("pipetune/table-2-small", [], contexts="2 contexts")
    assert table.title == "Where 2 contexts fit"
    assert "at most 2 contexts:" in table.note
    assert make_note("dip/rule", most_s=10.0, search_s=1.0, threads=2).startswith("Ours is allowed 10 s of one core's")
