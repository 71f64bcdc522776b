"""Tables at every width: nothing is cut, numbers stay whole."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

import pipeloom
from pipeloom.cli.output import console_to
from pipeloom.report.any_width import Table

HEADS = ("system", "iteration", "per-batch plan is faster by", "bubbles", "peak memory", "why")
ROWS = (
    ("Megatron-LM, 1F1B", "6.020 s", "12.3 %", "31.0 %", "70.2 GiB", "waits for the encoder"),
    ("per-batch plan", "5.361 s", "", "22.1 %", "68.9 GiB", ""),
)


def table(**options: Any) -> Table:
    made = Table(title="Iterations", title_justify="left", caption="Planned: simulated.", **options)
    for name in HEADS:
        made.add_column(name, justify="left" if name in ("system", "why") else "right")
    for row in ROWS:
        made.add_row(*row)
    return made


def lines(shown: Any, width: int, **options: Any) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=width, color_system=None, markup=False, **options).print(shown)
    return [line.rstrip() for line in written.getvalue().splitlines()]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 100, 160])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    found = lines(table(), width)
    assert max(map(len, found)) <= width
    text = " ".join(found)
    assert "\u2026" not in text
    words = set(re.sub(r"[┃│]", " ", text).replace(":", " ").split())
    text = " ".join(text.split())
    assert {word for part in (*HEADS, *sum(ROWS, ())) for word in part.split()} <= words
    # Numbers are never parted from their units.
    for row in ROWS:
        assert all(cell in text for cell in row[1:5])


def test_a_row_becomes_a_block_where_columns_do_not_fit() -> None:
    assert lines(table(), 40) == [
        "Iterations",
        "system: Megatron-LM, 1F1B",
        "  iteration: 6.020 s",
        "  per-batch plan is faster by: 12.3 %",
        "  bubbles: 31.0 %",
        "  peak memory: 70.2 GiB",
        "  why: waits for the encoder",
        "system: per-batch plan",
        "  iteration: 5.361 s",
        "  bubbles: 22.1 %",
        "  peak memory: 68.9 GiB",
        "Planned: simulated.",
    ]


def test_names_and_values_become_lines() -> None:
    made = Table(show_header=False)
    made.add_row(Text("mean bubble share, planned and measured"), Text("12.0%, 14.1%"))
    made.add_row("[/x] [red]", "y")
    assert lines(made, 20) == ["mean bubble share,", "planned and", "measured: 12.0%,", "14.1%", "[/x] [red]: y"]
    assert len(lines(made, 80)) == 4


def test_heads_are_broken_between_words_before_rows_are_taken_apart() -> None:
    found = lines(table(), 90)
    assert found[1].startswith("┏")
    assert "per-batch plan is faster by" not in " ".join(found)


def test_a_table_is_made_anew_for_every_width() -> None:
    made = table()
    wide = lines(made, 200)
    assert lines(made, 70) == lines(table(), 70)
    assert lines(made, 200) == wide


@given(
    st.lists(st.lists(st.text(max_size=12), min_size=3, max_size=3), max_size=4),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
)
def test_any_table_is_drawn(rows: list[list[str]], width: int, show_header: bool, framed: bool) -> None:
    made = table(show_header=show_header) if framed else Table(box=None, pad_edge=False, show_header=show_header)
    if not framed:
        for number in range(3):
            made.add_column(f"head {number}", justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    lines(made, width)


def test_a_pipe_has_no_width_unless_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    console_to(to_stderr=False).print(table())
    text = capsys.readouterr().out
    assert all(head in text for head in HEADS)
    assert "waits for the encoder" in text
    assert max(map(len, text.splitlines())) < 140
    monkeypatch.setenv("COLUMNS", "40")
    console_to(to_stderr=False).print(table())
    assert "  peak memory: 70.2 GiB\n" in capsys.readouterr().out


def test_all_tables_are_of_this_kind() -> None:
    """But the live one of training, which has a height to keep to and leaves columns out instead."""
    sources = Path(pipeloom.__file__).parent
    users = {path.relative_to(sources).as_posix() for path in sources.rglob("*.py") if "rich.table" in path.read_text()}
    assert users == {"cli/progress.py"}
    consoles = {path.name for path in sources.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())}
    assert consoles == {"output.py"}
