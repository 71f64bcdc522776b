"""Parts of DIP's evaluation that take a second: they run, and what was timed once is not timed again."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

# Before CP-SAT, which then runs in a process of its own: the two cannot be loaded together.
import highspy  # noqa: F401
import pytest

from pipeloom.compare.baselines.megatron import megatron_1f1b
from pipeloom.compare.chosen_layout import choose_layout
from pipeloom.compare.registry import BASELINES, Baseline
from pipeloom.layout import chain_of_stages
from pipeloom.layout.choose import LayoutEvaluation
from pipeloom.search import Budget
from pipeloom.timeline import simulate
from pipeloom_instances import family, generate
from pipeloom_lab.reproduce import Options
from pipeloom_lab.reproduce.dip import FULL, PARTS, end_to_end, planner_parts, runs, setups
from pipeloom_lab.reproduce.dip.characterize import section_2_2, table_1
from pipeloom_lab.reproduce.dip.images import AXIS, MOST_IMAGES, _appears, _nearest, spread_around
from pipeloom_lab.reproduce.dip.literal import Workload, _shows
from pipeloom_lab.reproduce.dip.setups import LARGE, SETUPS, PaperSetup, bounded_microbatches, image_bounds
from pipeloom_lab.solvers.exact import Exact

ONCE = Options(seeds=(0,), iterations=1, search_s=0.05, solver_s=0.5)
QUICK, OWN = ("figure-4", "consistency"), ("table-1", "section-2-2")
"""Parts that are run here, and those that have tests of their own below."""


@pytest.mark.parametrize("part", [p for p in PARTS if p.name in QUICK], ids=lambda part: part.name)
def test_quick_parts_run(part: object) -> None:
    outcome = part.run(ONCE)  # type: ignore[attr-defined]
    assert outcome.tables
    assert all(table.rows and table.note for table in outcome.tables[:1])
    assert all(figure.svg.startswith(("<svg", "<?xml")) for figure in outcome.figures)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest pipelines and a few microbatches for all models, layouts tried for a moment."""
    images = PaperSetup("vlm-7b", "dip-h800-64", 4, 2, num_microbatches=4)
    videos = PaperSetup("t2v-s", "dip-h800-64", 4, 4, num_microbatches=4)
    for known in (SETUPS, LARGE):
        for label in known:
            monkeypatch.setitem(known, label, images if label.startswith("VLM") else videos)
    monkeypatch.setattr(end_to_end, "H20", replace(images, cluster="dip-h20-16"))

    @functools.cache
    def layouts(setup: PaperSetup) -> tuple[LayoutEvaluation, ...]:
        return choose_layout(setup.setting, setup.typical[:1], trial=Budget(evaluations=3), rounds=1)

    monkeypatch.setattr(setups, "_layouts", layouts)
    runs.system.cache_clear()
    runs.timed.cache_clear()


@pytest.mark.soak
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("part", [p for p in PARTS if p.name not in QUICK + OWN], ids=lambda part: part.name)
def test_every_other_part_runs(part: object) -> None:
    outcome = part.run(ONCE)  # type: ignore[attr-defined]
    assert outcome.tables
    assert all(table.rows for table in outcome.tables)
    assert all(figure.svg.startswith(("<svg", "<?xml")) for figure in outcome.figures)


def test_ours_has_as_long_as_each_of_dips_threads_and_a_tenth_for_given_microbatches() -> None:
    for name, seconds in ((runs.OURS, 20.0), (runs.OURS_GIVEN, 2.0), (runs.OURS_SAME, 2.0)):
        assert runs.planning_s(name, 2.0) == seconds
    for name in runs.SEARCHED:
        assert runs.planning_s(name, 2.0) == 20.0 * runs.threads()
    for options in (Options(), FULL):
        assert f"{options.search_s:g} s" in runs.rule(options)
        timed = runs.planned_iterations(options, runs.PUBLISHED)
        assert set(timed) <= set(runs.planned_iterations(options, runs.OURS))
        assert len(timed) == len(options.seeds) * (options.iterations if options.full else 1)


def test_the_best_form_of_dip_is_the_fastest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {runs.PUBLISHED: [3.0, 5.0], runs.PRIORITY: None, runs.NO_SEARCH: [2.0, 5.0]}
    monkeypatch.setattr(runs, "seconds_of", lambda _setup, name, _numbers, _s: known.get(name))
    assert runs.best_form(SETUPS["VLM-S"], [(0, 0), (0, 1)], 1.0) == (runs.NO_SEARCH, 3.5)
    assert runs.best_form(SETUPS["VLM-S"], [(0, 0)], 1.0, (runs.PRIORITY,)) is None


def test_a_system_to_compare_with_does_not_join_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASELINES, "mine", Baseline("Mine", megatron_1f1b))
    # The table is read on import, so read it again, into a module that nobody else sees.
    spec = runs.__spec__
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.BASELINE_TITLES == runs.BASELINE_TITLES
    assert len(runs.BASELINE_TITLES) == 9, "a system more changes what is published"


def test_solvers_get_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound, and no schedule but first in, first out; also where that is at our bound already."""
    seen = []

    def solver(graph, *, seconds, hint, bound_ns, seed):  # type: ignore[no-untyped-def]
        seen.append((hint.method, bound_ns, seconds, seed))
        return Exact(hint, simulate(graph, hint).makespan_ns // 2, False)

    monkeypatch.setitem(planner_parts.EXACT, "z3", solver)
    graph = generate(family("uniform", num_ranks=2, num_microbatches=2), 0)
    theirs, ours = (planner_parts._solved(graph, name, ONCE) for name in ("z3", "default"))
    assert seen == [("first in, first out", 0, ONCE.solver_s, 0)]
    assert not theirs.proved
    assert ours.proved
    answers = {("Z3", "small", 2): theirs, ("ours", "small", 2): ours, ("Z3", "small", 3): theirs}
    assert planner_parts._cell(answers, "Z3", "small", 2).endswith("optimal, not proved")
    assert planner_parts._cell(answers, "ours", "small", 2).endswith("optimal")
    assert "% open, not proved" in planner_parts._cell(answers, "Z3", "small", 3)
    assert planner_parts._cell(answers, "ours", "small", 3) == "not tried"


@pytest.mark.full
def test_dynamic_data_cost_more_than_static_ones_and_these_more_than_none() -> None:
    (table,) = table_1(ONCE).tables
    column = table.columns.index("overhead, cut by time")
    lost = [float(row[column].removesuffix(" %")) for row in table.rows]
    assert lost[0] == 0.0 < lost[1] < lost[2]


def test_the_best_cut_is_uneven() -> None:
    (table,) = section_2_2(ONCE).tables
    found = {row[0]: row[1] for row in table.rows}
    assert float(found["fastest stage, ms"]) < float(found["slowest stage, ms"])


def test_iterations_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = PaperSetup("vlm-7b", "dip-h800-64", 2, 2, num_microbatches=4)
    name = BASELINES["1f1b"].title
    first = runs.seconds_of(setup, name, [(0, 0), (0, 1)], 0.05)
    assert first is not None
    assert first[0] != first[1]

    def never(*_: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(runs, "run", never)
    assert runs.seconds_of(setup, name, [(0, 1), (0, 0)], 0.05) == first[::-1]


def test_chunks_of_neighboring_modules_on_one_rank_are_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SETUPS["VLM-S"].setting.model
    for chunks in (1, 3, 7):
        layout = chain_of_stages(model, 4, chunks, lambda _module, _layer: 1.0)
        monkeypatch.setattr(runs, "system", lambda _setup, _name, layout=layout: SimpleNamespace(layout=layout))
        assert runs.chunks_a_rank(SETUPS["VLM-S"], runs.MEGATRON) == chunks


def test_images_rise_then_fall_to_none() -> None:
    means = []
    for i in range(20):
        low, high = image_bounds(i)
        groups = bounded_microbatches(40, low, high, i)
        counts = [sum(len(sample.image_tokens) for sample in group) for group in groups]
        assert low <= min(counts) <= max(counts) <= high
        assert all(sum(sample.sequence_tokens for sample in group) == 8192 for group in groups)
        means.append(sum(counts) / len(counts))
    assert means[0] < max(means[:6])
    assert means[19] == 0


def test_images_spread_around_every_number_of_the_axis_and_fit_the_context() -> None:
    for count in AXIS:
        low, high = spread_around(count)
        assert 0 <= low <= count <= high <= MOST_IMAGES
        assert low + high == 2 * count
        assert low == 0 or high == MOST_IMAGES
        groups = bounded_microbatches(4, low, high, 0)
        assert all(sum(sample.sequence_tokens for sample in group) == 8192 for group in groups)


def test_where_the_papers_figures_appear_is_reported() -> None:
    rows = [("1", "2.0", "0.39", "5.0 %"), ("4", "3.0", "0.35", "12.0 %"), ("8", "4.0", "0.20", "40.0 %")]
    assert _nearest(rows, (1, 2, 3), 12.5) == ("3.0", "0.35", "12.0 % (4 images)")
    assert "with 8 images" in _appears([("4", "", "", "+12.0 %"), ("8", "", "", "+70.0 %"), ("9", "", "", "out")], 3)
    assert "On no number" in _appears([("4", "", "", "+12.0 %")], 3)


def test_an_effect_shows_from_a_hundredth() -> None:
    assert _shows("1.0 %")
    assert not _shows("0.9 %")
    assert not _shows("does not fit")
    assert Workload("VLM-S", 8, (0, 44), 0.5).words == ("VLM-S", "8", "0 to 44 images", "50 %")
