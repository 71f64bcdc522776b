"""Figures as SVG: well-formed, the same every time, with every series and mark in them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from pipeloom.errors import InputError
from pipeloom_lab.figures import Axis, Mark, bar_figure, best_so_far, line_figure, panel_figure, scatter_figure

pytest.importorskip("matplotlib")

X, Y = Axis("CPU seconds", log=True), Axis("gap, %", low=0)
LINES = {"ours & theirs": ([0.1, 1, 10], [3.0, 2.0, 1.0]), "random": ([0.1, 1], [5.0, 4.5])}

FIGURES: dict[str, Callable[[], str]] = {
    "line": lambda: line_figure(
        LINES, x=X, y=Y, title="VLM-S", marks=[Mark(1.5, "published")], crosses={"random": ([10.0], [4.5])}
    ),
    "panels": lambda: panel_figure({"one": LINES, "two": LINES, "three": LINES}, x=X, y=Y, columns=2, style="steps"),
    "bars": lambda: bar_figure(
        ["S", "M"], {"a": [1.0, 2.0], "b": [2.0, None]}, y=Y, points={"a": [1.1, None]}, values=".1f"
    ),
    "scatter": lambda: scatter_figure(LINES, x=X, y=Axis("planned"), diagonal=True),
}


def _texts(svg: str) -> str:
    return " ".join(
        "".join(e.itertext()).strip() for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")
    )


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_svg_and_deterministic(name: str) -> None:
    svg = FIGURES[name]()
    assert ElementTree.fromstring(svg).tag.endswith("}svg")
    assert svg == FIGURES[name]()


def test_numbers_within_a_power_of_ten_are_written_plainly() -> None:
    near = {"a": ([1, 2, 4, 8], [2.1, 2.5, 3.0, 6.2])}
    texts = _texts(line_figure(near, x=Axis("contexts", log=True), y=Axis("us", log=True)))
    assert " 2 " in texts
    assert "×" not in texts


def test_words_are_in_the_figure() -> None:
    texts = _texts(FIGURES["line"]())
    for word in ("ours & theirs", "random", "CPU seconds", "gap, %", "VLM-S", "published"):
        assert word in texts
    assert "2.0" in _texts(FIGURES["bars"]())


def test_one_changed_number_changes_the_figure() -> None:
    moved = {**LINES, "random": ([0.1, 1], [5.0, 4.4])}
    assert line_figure(moved, x=X, y=Y) != line_figure(LINES, x=X, y=Y)


def test_a_process_of_its_own_draws_the_same() -> None:
    code = (
        "from pipeloom_lab.figures import Axis, line_figure\n"
        "print(line_figure({'a': ([1, 2], [3, 4])}, x=Axis('x'), y=Axis('y')), end='')"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == line_figure({"a": ([1, 2], [3, 4])}, x=Axis("x"), y=Axis("y"))


def test_wrong_data_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="random: 2 and 1 entries"):
        line_figure({"random": ([1, 2], [1])}, x=X, y=Y)
    with pytest.raises(InputError, match="no series"):
        panel_figure({}, x=X, y=Y)
    with pytest.raises(InputError, match="a: 2 and 3"):
        bar_figure(["S", "M"], {"a": [1, 2, 3]}, y=Y)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pipeloom-lab\[plot\]"):
        line_figure(LINES, x=X, y=Y)


def test_best_so_far_keeps_improvements() -> None:
    assert best_so_far([1, 2, 3, 4], [5, 5, 3, 4]) == ([1, 3], [5, 3])
