"""What a terminal shows while a layout is chosen."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeloom.cli.progress import COLUMNS, LEGEND, Progress, Terminal
from pipeloom.cost import Correction


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


def report(iteration: int, **others: Any) -> Any:
    """What the console is told of a step: large numbers everywhere."""
    answer = SimpleNamespace(planned_ns=45_678_000_000, gap=0.1234, bubble_share=1.0)
    values = {
        "iteration": iteration,
        "answer": answer,
        "loss": 11.23456,
        "learning_rate": 1.2345e-5,
        "num_tokens": 123_456_789,
        "step_s": 45.7,
        "num_microbatches": 128,
        "measured_s": 45.7,
        "measured_bubble_share": 1.0,
        "mfu": 0.456,
        "fresh": True,
        "lead_s": 12.345,
        "reason": "",
        "correction": Correction(),
    }
    return SimpleNamespace(**(values | others))


@pytest.mark.parametrize("terminal", [False, True])
def test_iterations_fit_into_eighty_columns(terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=80, color_system=None, legacy_windows=False)
    with Progress(console, 99_999) as progress:
        progress.show(report(99_998))
        progress.show(report(99_999, fresh=False, reason="late", mfu=None, learning_rate=None))
    lines = written.getvalue().splitlines()
    assert max(map(len, LEGEND.splitlines())) <= 80
    reported = [line for line in lines if "99998" in line or "99999" in line]
    assert any(
        "45678/45700" in line and "12.3%" in line and line.endswith("fresh, 12345 ms")
        for line in map(str.rstrip, reported)
    )
    assert any("fallback: late" in line for line in reported)
    if not terminal:
        assert max(map(len, lines)) <= 80
        # Headings stand above their numbers.
        heading = next(line for line in lines if "tok/s" in line)
        for name in list(COLUMNS)[:-1]:
            end = heading.index(name) + len(name)
            assert all(line[end : end + 1] == " " for line in reported), name
    assert not any("\u2026" in line for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_reason_of_a_fallback_is_shown_whole(terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=80, color_system=None, legacy_windows=False)
    reason = "the planner has missed 3 deadlines in a row after 3 restarts and is disabled"
    with Progress(console, 99) as progress:
        progress.show(report(7, fresh=False, reason=reason))
    assert reason in " ".join(written.getvalue().split())


def test_ranks_that_stay_slow_are_reported_once() -> None:
    written = io.StringIO()
    slow, more, alike = (1.0, 1.5), (1.0, 1.52), ()
    now_and_then = [slow if i % 10 < 5 else alike for i in range(40)]
    with Progress(Console(file=written, width=80), 999) as progress:
        for i, slowness in enumerate(
            (*now_and_then, *[slow] * 10, *[more] * 20, *[alike] * 5, *[more] * 5, *[alike] * 25)
        ):
            progress.show(report(i, correction=Correction(slowness=slowness)))
    reported = [line for line in written.getvalue().splitlines() if "since" in line]
    assert reported == [
        "iteration 59: since iteration 40 planned so that rank 1 takes 1.52 times as long as most",
        "iteration 99: since iteration 80 planned as if all ranks were alike",
    ]


@pytest.mark.parametrize("width", [40, 50, 60])
def test_a_narrow_terminal_has_fewer_columns_and_whole_ones(width: int) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    with Progress(console, 99_999) as progress:
        progress.show(report(99_998, lead_s=0.123))
    reported = next(line.rstrip() for line in written.getvalue().splitlines() if "99998" in line and "fresh" in line)
    assert reported.startswith("99998 11.234")
    assert reported.endswith("fresh, 123 ms")
    assert max(len(line) for line in written.getvalue().splitlines() if "\x1b" not in line) <= width
