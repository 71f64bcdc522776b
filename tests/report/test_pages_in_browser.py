"""Pages with hostile names in headless Chromium: no script runs, and names are shown as they stand."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import pipeloom
from pipeloom.emulator import Calibration, CalibrationRow
from pipeloom.errors import visible_line
from pipeloom.report import Track, timeline_html, timeline_svg
from pipeloom.report.calibration_page import calibration_page
from pipeloom.report.table_page import TableSection, TextSection, table_page
from pipeloom.search import one_f_one_b
from pipeloom.spec.catalog import load_device
from pipeloom.timeline import LowerBound, simulate
from tests.chains import uniform_chain
from tests.chromium import Browser, browser, needs_chromium

NAMES = (
    '<img src=x onerror="window.ran=1">',
    "<img src=x onerror=window.ran=2> @module{safe} @{name}{safe} @name{safe}",
    "</script></title><script>window.ran=3</script>",
    "'\"><svg onload=window.ran=4>",
    "$$\\href{javascript:window.ran=5}{x}$$ \\(\\unicode{60}\\)",
    "{{ ran }} {% raw %} ${window.ran=6} `${window.ran=7}`",
    "\u202egnp.exe\u2066 \x1b]0;PWNED\x07 \u2028 \x9b31m",
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Browser]:
    needs_chromium(pytestconfig)
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def hostile_tracks() -> list[Track]:
    """Tracks in which every text is a hostile one, and the first one's title all of them."""
    graph = uniform_chain(len(NAMES), 1, forward_ns=10_000, backward_ns=20_000)
    graph = replace(graph, module=graph.rank, module_names=NAMES)
    timeline = simulate(graph, one_f_one_b(graph))
    titles = ("".join(NAMES), NAMES[0])
    return [
        Track(title, graph, timeline, LowerBound(number + 1, NAMES[0]), NAMES, NAMES, after_ns=number, layers=NAMES)
        for number, title in enumerate(titles)
    ]


def test_no_text_reaches_a_template_as_a_placeholder() -> None:
    page = html.unescape(timeline_html(hostile_tracks(), title="", note=""))
    templates = re.findall(r'"tooltips":"((?:[^"\\]|\\.)*)"', page)
    assert any("onerror" in each for each in templates)
    # Ours are words; those of names would have a format, or stand in braces.
    assert not any(re.search(r"[@$](\{|\w+\{(?!0)|\$)", each) for each in templates)


@pytest.mark.full
def test_no_name_runs_as_a_script_on_a_timeline_page(chromium: Browser, tmp_path: Path) -> None:
    tracks = hostile_tracks()
    text = "\n".join(NAMES)
    page = tmp_path / "page.html"
    page.write_text(
        timeline_html(
            tracks,
            title=text,
            note=text,
            ranked=True,
            sections=[TableSection(text, text, NAMES, [NAMES]), TextSection(text, text, NAMES)],
        )
    )
    shown = " ".join(chromium.tooltips(page))
    # The title of the first track, and the name of every module, as they stand.
    for name in NAMES:
        assert visible_line(name) in shown


def test_no_name_runs_as_a_script_on_other_pages(chromium: Browser, tmp_path: Path) -> None:
    text = "\n".join(NAMES)
    table = table_page([TableSection(text, text, NAMES, [NAMES])], title=text, note=text)
    device = msgspec.structs.replace(load_device("h800"), name=text)
    rows = tuple(CalibrationRow(name, 0.1 + number, 0.2 + number) for number, name in enumerate(NAMES))
    for name, page in (
        ("table.html", table),
        ("timeline.svg", timeline_svg(hostile_tracks())),
        ("calibration.html", calibration_page(Calibration(device, rows, rows, rows))),
    ):
        (tmp_path / name).write_text(page)
        shown = chromium.tooltips(tmp_path / name, drawn=name.startswith("calibration"))
        if name.startswith("calibration"):
            assert all(visible_line(each) in " ".join(shown) for each in NAMES)


def test_text_goes_into_pages_one_way() -> None:
    sources = Path(pipeloom.__file__).parent
    users: dict[str, set[str]] = {"import html\n": set(), "file_html(": set(), "<html": set(), "tooltips=": set()}
    for path in sources.rglob("*.py"):
        for word, found in users.items():
            if word in path.read_text():
                found.add(path.relative_to(sources).as_posix())
    assert users == {
        "import html\n": {"report/page_text.py"},
        "file_html(": {"report/bokeh_page.py"},
        "<html": {"report/table_page.py"},
        "tooltips=": {"report/html_page.py", "report/calibration_page.py"},
    }, "a page that is written in another place is to be opened in a test of this file too"


def test_a_page_of_the_same_numbers_is_the_same_to_the_byte() -> None:
    # Names like those that Bokeh gives its models stay as they are.
    pages = [timeline_html(hostile_tracks()[:1], title="p0 p1", note="p1004") for _ in range(2)]
    assert pages[0] == pages[1]
    assert "p1004" in pages[0]
