"""What a terminal shows while a layout is chosen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeloom.cli.progress import Terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_work_is_shown_with_the_time_it_took_on_a_terminal_only(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    monkeypatch.setattr(Terminal, "_console", lambda _self: console)
    with Terminal().working("Choosing a layout") as tell:
        tell("3 layouts tried", None)
        tell("arrangements are judged", 0.5)
    shown = written.getvalue()
    if terminal:
        assert all(text in shown for text in ("Choosing a layout", "0:00:0", "arrangements are judged"))
    else:
        assert shown == ""
