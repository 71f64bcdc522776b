"""Reports show every task once, where it is, and nothing that a name in a file could smuggle in."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeloom.errors import InputError
from pipeloom.report import (
    Track,
    boxes,
    comparison_table,
    key_figures,
    layers_by_rank,
    make_track,
    size_text,
    summary_table,
    time_text,
    timeline_html,
    timeline_svg,
    trace,
)
from pipeloom.report.colors import HUES, fill, text_on
from pipeloom.report.ranking import ranking_rows
from pipeloom.search import gpipe, one_f_one_b
from pipeloom.spec import Chunk, Layout, ModuleLayout
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import bound_of, bubbles, memory_curve, simulate
from tests.chains import uniform_chain
from tests.strategies import graphs, random_order

quick = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def random_track(graph: TaskGraph, seed: int = 0, title: str = "planned") -> Track:
    schedule = random_order(graph, np.random.default_rng(seed))
    timeline = simulate(graph, schedule)
    # A random order may exceed the memory, so that it may also be faster than every order that does not
    return make_track(title, graph, schedule, timeline, bound_of(graph, schedule, timeline))


@quick
@given(graphs(), st.integers(0, 100))
def test_boxes_are_the_tasks(graph: TaskGraph, seed: int) -> None:
    track = random_track(graph, seed)
    drawn = boxes(track)
    assert sorted(box.task for box in drawn) == list(range(graph.num_tasks))
    assert [box.start_ns for box in drawn] == sorted(track.timeline.start_ns.tolist())
    for box in drawn:
        task = track.graph.task(box.task)
        assert (box.kind, box.rank, box.module, box.microbatch) == (task.kind, task.rank, task.module, task.microbatch)
        assert box.end_ns - box.start_ns == task.duration_ns
        assert box.activation_bytes == track.graph.activation_bytes[task.pair]
        if graph.candidates is not None:
            assert box.strategy in {c.strategy for c in graph.candidates[task.pair]}
    for pair, choices in enumerate(graph.candidates or ()):
        chosen = track.strategies[pair]
        assert any(c.strategy == chosen and c.activation_bytes == track.graph.activation_bytes[pair] for c in choices)


@quick
@given(graphs(), st.integers(0, 100))
def test_figures(graph: TaskGraph, seed: int) -> None:
    track = random_track(graph, seed)
    n = key_figures(track)
    assert n.makespan_ns == int(track.timeline.end_ns.max())
    assert n.bubble_share == pytest.approx(bubbles(track.graph, track.timeline).share)
    if n.lower_bound_ns:
        assert n.gap == pytest.approx(n.makespan_ns / n.lower_bound_ns - 1)
    assert key_figures(replace(track, lower_bound=None)).gap is None


def test_units_split_into_parts_are_named_with_their_part() -> None:
    graph = uniform_chain(2, 2)
    names = ("lm.0", "lm.1")
    track = replace(random_track(graph), chunk_names=names)
    assert {box.name for box in boxes(track)} == {f"{k} lm.{c} {m}" for k in "FB" for c in (0, 1) for m in (0, 1)}
    assert graph.labels is not None
    doubled = replace(
        graph,
        labels=tuple(label._replace(microbatch=0) for label in graph.labels),
        microbatch=np.zeros_like(graph.microbatch),
    )
    parts = tuple(
        label._replace(sub_microbatch=graph.labels[i].microbatch) for i, label in enumerate(doubled.labels or ())
    )
    drawn = boxes(random_track(replace(doubled, labels=parts)))
    assert {box.unit for box in drawn} == {"0.0", "0.1"}


@quick
@given(graphs(), st.integers(0, 100), st.booleans())
def test_trace(graph: TaskGraph, seed: int, arrows: bool) -> None:
    tracks = [random_track(graph, seed), random_track(graph, seed + 1, "measured")]
    document = json.loads(trace(tracks, arrows=arrows))
    events = document["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(1, "planned"), (2, "measured")}
    for number, track in enumerate(tracks, 1):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == number]
        found = {e["args"]["task"]: e for e in slices}
        assert len(slices) == len(found) == graph.num_tasks
        for task, event in found.items():
            assert round(event["ts"] * 1000) == track.timeline.start_ns[task]
            assert round(event["dur"] * 1000) == track.graph.duration_ns[task]
            assert event["tid"] == graph.rank[task]
        for rank in range(graph.num_ranks):
            counter = [e for e in events if e["ph"] == "C" and e["pid"] == number and e["tid"] == rank]
            moments, sizes = memory_curve(track.graph, track.timeline, rank)
            assert [(round(e["ts"] * 1000), e["args"]["bytes"]) for e in counter] == list(
                zip(moments.tolist(), sizes.tolist(), strict=True)
            )
        flows = Counter(e["ph"] for e in events if e["ph"] in "sf" and e["pid"] == number)
        crossing = int((graph.rank[graph.edge_source] != graph.rank[graph.edge_target]).sum()) if arrows else 0
        assert flows == ({"s": crossing, "f": crossing} if crossing else {})


@quick
@given(st.lists(graphs(), min_size=1, max_size=3), st.integers(0, 100))
def test_svg_has_every_task_inside_the_picture(problems: list[TaskGraph], seed: int) -> None:
    tracks = [random_track(graph, seed, f'<{i}> & "two" \x01') for i, graph in enumerate(problems)]
    root = ElementTree.fromstring(timeline_svg(tracks, width=900))
    svg = "{http://www.w3.org/2000/svg}"
    shown = [rect for rect in root.iter(f"{svg}rect") if rect.find(f"{svg}title") is not None]
    assert len(shown) == sum(int((t.graph.duration_ns > 0).sum()) for t in tracks)
    longest = max(t.timeline.makespan_ns for t in tracks)
    total = sum(float(rect.attrib["width"]) for rect in shown)
    assert all(62 <= float(r.attrib["x"]) <= float(r.attrib["x"]) + float(r.attrib["width"]) <= 804.1 for r in shown)
    work = sum(int(t.graph.duration_ns.sum()) for t in tracks)
    assert total <= work / max(longest, 1) * (900 - 62 - 96) + 0.01 * len(shown) + 1e-6


def test_html_is_one_offline_page() -> None:
    graph = uniform_chain(3, 4)
    track = random_track(graph)
    slower = replace(
        track,
        title="measured <b>",
        timeline=replace(track.timeline, start_ns=track.timeline.start_ns * 2, end_ns=track.timeline.end_ns * 2),
    )
    page = timeline_html([track, slower], title="A <i> & title", note="<script>alert(1)</script>")
    bare = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.DOTALL)
    assert re.search(r"(src|href)=|url\(http|@import", bare) is None
    assert "<script>alert(1)</script>" not in page
    assert "<title>A &lt;i&gt; &amp; title</title>" in page
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    document = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    columns = list(_sources(document))
    assert [len(c["task"]) for c in columns] == [graph.num_tasks] * 2
    assert columns[0]["reference"] == [""] * graph.num_tasks
    assert all(text.startswith("start ") for text in columns[1]["reference"])
    assert len(page) < 3_000_000


def _sources(node: object) -> list[dict[str, list[object]]]:
    """Column data of all tasks in a serialised page."""
    found = []
    if isinstance(node, dict):
        if node.get("type") == "map" and isinstance(node.get("entries"), list):
            columns = {k: v for k, v in node["entries"] if isinstance(k, str)}
            if "task" in columns and "activation" in columns:
                return [columns]
        for value in node.values():
            found += _sources(value)
    elif isinstance(node, list):
        for value in node:
            found += _sources(value)
    return found


def test_no_track_is_refused() -> None:
    for draw in (timeline_html, timeline_svg):
        with pytest.raises(InputError, match="tracks: is empty"):
            draw([])


def test_tables() -> None:
    fast, slow = (random_track(uniform_chain(2, 4), title="fast"), random_track(uniform_chain(2, 8), title="[red]slow"))
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table([slow, fast], title="both"))
    console.print(summary_table({"iterations": 3, "loss_last": 0.123456, "[x]": "y"}))
    console.file.close()
    text = console.export_text()
    ratio = slow.timeline.makespan_ns / fast.timeline.makespan_ns
    assert "[red]slow" in text
    assert f"{ratio:.2f} x" in text
    assert "0.1235" in text
    assert "[x]" in text


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.000 µs"),
        (12_345_678, "12.35 ms"),
        (6_020_000_000, "6.020 s"),
        (999_960_000, "1000 ms"),
        (12_345_678_901_234, "12346 s"),
    ],
)
def test_time_text(nanoseconds: int, text: str) -> None:
    assert time_text(nanoseconds) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 31, "2 GiB")])
def test_size_text(size: int, text: str) -> None:
    assert size_text(size) == text


def test_kinds_of_a_module_differ_and_labels_can_be_read() -> None:
    for hue in HUES:
        assert len({fill(hue, kind) for kind in "FBW"}) == 3
        assert text_on(fill(hue, "F")) != "#ffffff"
        assert text_on(fill(hue, "B")) == "#ffffff"


def test_a_comparison_opens_with_its_ranking() -> None:
    graph = uniform_chain(2, 3)
    found = {name: simulate(graph, order) for name, order in (("gpipe", gpipe(graph)), ("1f1b", one_f_one_b(graph)))}
    slow = replace(
        make_track("<slow>", graph, None, found["gpipe"]), after_ns=2_000, num_tokens=10, layers=("a 0-1", "a 2-3")
    )
    fast = replace(make_track("fast", graph, None, found["1f1b"]), num_tokens=10)
    rows = ranking_rows([slow, fast])
    assert [row[1] for row in rows] == ["fast", "<slow>"]
    figures = key_figures(slow)
    assert figures.iteration_ns == found["gpipe"].makespan_ns + 2_000
    assert rows[1][2] == time_text(figures.iteration_ns)
    assert rows[1][3] == ""
    gain = figures.iteration_ns / key_figures(fast).iteration_ns - 1
    assert rows[0][3] == f"{gain:+.1%}"
    assert rows[0][6] == f"{10 / (found['1f1b'].makespan_ns / 1e9):,.0f}"
    page = timeline_html([slow, fast], title="systems", ranked=True)
    assert 'name="viewport"' in page
    assert page.index("gain over") < page.index("layers on each rank")
    assert "a 2-3" in page
    assert "<slow>" not in page
    assert "tokens/s" in page
    assert "tokens/s" not in timeline_html([replace(fast, num_tokens=0)], title="one", ranked=True)
    assert "gain over" not in timeline_html([slow, fast], title="systems")


def test_layers_of_each_rank() -> None:
    modules = (ModuleLayout("vision"), ModuleLayout("lm", after=("vision",)))
    chunks = (Chunk("vision", (0, 3), 0), Chunk("vision", (4, 7), 1), Chunk("lm", (0, 0), 0), Chunk("lm", (1, 2), 1))
    layout = Layout(2, modules, chunks)
    assert layers_by_rank(layout) == ("vision 0-3, lm 0-0", "vision 4-7, lm 1-2")


def test_without_bytes_no_memory_is_drawn() -> None:
    graph = uniform_chain(2, 3)
    none = replace(
        graph,
        activation_bytes=np.zeros_like(graph.activation_bytes),
        weight_gradient_bytes=np.zeros_like(graph.weight_gradient_bytes),
        static_bytes=np.zeros_like(graph.static_bytes),
    )
    for shown, drawn in ((graph, True), (none, False)):
        timeline = simulate(shown, one_f_one_b(shown))
        page = timeline_html([make_track("one", shown, None, timeline)], title="page")
        assert ("memory, " in page) == ("peak memory" in page) == drawn
        assert "time, " in page
