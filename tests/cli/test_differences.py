"""What a reader sees of why an iteration took as long as it did."""

from __future__ import annotations

import pytest
from rich.console import Console

from pipeloom.cli.progress import difference_table
from pipeloom.explain.difference import Difference
from pipeloom.explain.difference_page import difference_page


def made(core_share: float, shared_s: float, rest_s: float) -> Difference:
    measured = 1.0 + shared_s + 0.1 + 0.05 + rest_s
    zero = dict.fromkeys(
        ("wait_planned_s", "wait_measured_s", "posting_s", "message_planned_s", "message_measured_s"), 0.0
    )
    return Difference(
        iterations=1,
        planned_s=1.0,
        measured_s=measured,
        shared_cores_s=shared_s,
        computation_s=0.1,
        messages_s=0.05,
        rest_s=rest_s,
        num_messages=0,
        kinds=(),
        core_share=core_share,
        **zero,
    )


def lines_of(found: Difference) -> list[str]:
    with (console := Console(width=120)).capture() as capture:
        console.print(difference_table(found))
    return [line.strip(" │") for line in capture.get().splitlines() if " ms" in line]


def test_shared_cores_are_said_first_and_a_plan_that_knows_them_is_compared() -> None:
    found = made(0.5, 1.0, -0.2)
    page = difference_page("run", found)
    assert page.index("had 50% of a core") < page.index("<table>")
    lines = lines_of(found)
    assert "planned, corrected by previous iterations" in lines[0]
    assert "planned, at 50% of a core per rank" in lines[1]
    assert "2000.00 ms" in lines[1]
    assert lines[-1].startswith("measured")


@pytest.mark.parametrize("rest_s", [0.2, -0.2])
def test_no_row_has_a_negative_number(rest_s: float) -> None:
    lines = lines_of(made(1.0, 0.0, rest_s))
    assert not any(" -0" in line or " -1" in line or " -2" in line for line in lines)
    words = "dispatch of actions" if rest_s > 0 else "overlapped more than in the replay"
    assert any(words in line for line in lines)
    assert not any("of a core" in line for line in lines)
