"""Traces that are written from simulated timelines come back as they were; broken ones are refused in one line."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.explain.traces.explained import explain_run
from pipeloom.explain.traces.idle import CAUSES, idle_by_cause
from pipeloom.explain.traces.names import computation_of
from pipeloom.explain.traces.replay import replayable
from pipeloom.explain.traces.run import traced_run
from pipeloom.explain.traces.traced import Iteration, TracedRun
from pipeloom.io.kineto import read_kineto, trace_files
from pipeloom.search import Budget
from pipeloom.timeline import simulate
from tests.explain.traces.made import TICK_NS, Pipeline, documents, random_pipeline, write

SEEDS = st.integers(0, 2**32 - 1)
SOME = settings(max_examples=25)


def run_of(folder: Path) -> TracedRun:
    return traced_run([read_kineto(file) for file in trace_files([folder])])


def measured_ns(pipeline: Pipeline) -> int:
    """From the first start of a computation."""
    return pipeline.timeline.makespan_ns - int(pipeline.timeline.start_ns.min())


@SOME
@given(SEEDS)
def test_replay_is_the_timeline_that_was_traced(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    pipeline = random_pipeline(seed)
    run = run_of(write(tmp_path_factory.mktemp("t"), documents(pipeline)))
    assert run.num_stages == pipeline.num_stages
    assert [iteration.number for iteration in run.iterations] == [3, 4]
    for iteration in run.iterations:
        assert iteration.measured_ns == measured_ns(pipeline)
        made = replayable(run, iteration)
        again = simulate(made.graph, made.schedule)
        assert again.makespan_ns == iteration.measured_ns
        assert np.array_equal(again.start_ns, made.kept.start_ns)
        idle = idle_by_cause(made, made.kept)
        busy = np.bincount(made.graph.rank, weights=made.graph.duration_ns, minlength=run.num_ranks)
        assert (idle.sum(axis=1) + busy == iteration.measured_ns).all()
        assert idle[:, CAUSES.index("host")].sum() == 0


@SOME
@given(SEEDS, st.integers(1, 5))
def test_host_time_is_distinguished_from_waits(tmp_path_factory: pytest.TempPathFactory, seed: int, ticks: int) -> None:
    pipeline, host_ns = random_pipeline(seed), ticks * TICK_NS // 10
    run = run_of(write(tmp_path_factory.mktemp("t"), documents(pipeline, host_ns=host_ns)))
    iteration = run.iterations[0]
    made = replayable(run, iteration)
    assert simulate(made.graph, made.schedule).makespan_ns == iteration.measured_ns
    host = idle_by_cause(made, made.kept)[:, CAUSES.index("host")]
    counts = np.array([len(order) - 1 for order in made.schedule.order])
    assert host.tolist() == (counts * host_ns).tolist()


def _late(made: list[dict[str, Any]], rng: random.Random, most_us: float) -> None:
    """Let ranges of computations end later by a random time."""
    for document in made:
        for event in document["traceEvents"]:
            if computation_of(event["name"]):
                event["dur"] += rng.choice((0, rng.uniform(0, most_us)))


@SOME
@given(SEEDS, st.booleans(), st.booleans())
def test_ranges_that_end_late_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, device: bool, named: bool
) -> None:
    """A range that reaches a little into the next one is cut there, so that no operator is in two computations."""
    pipeline = random_pipeline(seed, single=not named)
    made = documents(pipeline, host_ns=1000, device=device, named=named or device)
    run = run_of(write(tmp_path_factory.mktemp("t"), made))
    _late(made, random.Random(seed), 99)
    late = run_of(write(tmp_path_factory.mktemp("t"), made))
    assert late.iterations == run.iterations
    for iteration in late.iterations:
        again = replayable(late, iteration)
        assert (idle_by_cause(again, again.kept) >= 0).all()


@SOME
@given(SEEDS, st.booleans())
@example(34, True)
def test_no_time_is_negative_whatever_overlaps(
    tmp_path_factory: pytest.TempPathFactory, seed: int, device: bool
) -> None:
    """Whatever overlaps is refused, or no cause of idle time is negative."""
    pipeline, rng = random_pipeline(seed), random.Random(seed)
    made = documents(pipeline, host_ns=1000, device=device)
    for document in made:
        for event in document["traceEvents"]:
            if computation_of(event["name"]) or event["name"] in ("aten::addmm", "gemm"):
                event["dur"] *= rng.choice((1, 1, 1.01, 1.1, 3))
    iterations: tuple[Iteration, ...] = ()
    with suppress(InputError):
        run = run_of(write(tmp_path_factory.mktemp("t"), made))
        iterations = run.iterations
    for iteration in iterations:
        again = replayable(run, iteration)
        assert (idle_by_cause(again, again.kept) >= 0).all()
        for rank in iteration.ranks:
            for before, one in pairwise(rank):
                assert before.end_ns <= one.start_ns <= one.end_ns
                assert before.end_ns <= one.entered_ns <= one.received_ns <= one.start_ns


def test_ranges_that_overlap_by_much_are_refused(tmp_path: Path) -> None:
    made = documents(random_pipeline(0))
    late = next(event for event in made[0]["traceEvents"] if computation_of(event["name"]))
    late["dur"] += 100_000
    with pytest.raises(InputError, match=r"rank0.json: PP:.* continues for 100 ms after PP:.* begins; record ranges"):
        run_of(write(tmp_path / "t", made))


@SOME
@given(SEEDS)
def test_kernels_are_taken_where_there_are_any(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Made by hand: no trace of a device was there to be recorded."""
    pipeline = random_pipeline(seed)
    run = run_of(write(tmp_path_factory.mktemp("t"), documents(pipeline, device=True)))
    assert run.on_device
    for iteration in run.iterations:
        made = replayable(run, iteration)
        assert iteration.measured_ns == measured_ns(pipeline)
        assert simulate(made.graph, made.schedule).makespan_ns == iteration.measured_ns


@SOME
@given(SEEDS)
def test_ranges_without_a_stage_are_of_the_ranks_own(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    pipeline = random_pipeline(seed, single=True)
    # The first operator comes a moment after the receive was posted, as it does.
    run = run_of(write(tmp_path_factory.mktemp("t"), documents(pipeline, named=False, host_ns=1000)))
    assert run.stage_rank == tuple(range(pipeline.graph.num_ranks))
    made = replayable(run, run.iterations[1])
    assert simulate(made.graph, made.schedule).makespan_ns == run.iterations[1].measured_ns


@SOME
@given(SEEDS, st.integers(1, 9))
def test_clocks_of_other_hosts_are_brought_into_line(
    tmp_path_factory: pytest.TempPathFactory, seed: int, millis: int
) -> None:
    pipeline = random_pipeline(seed, single=True)
    shifts = tuple(rank % 2 * millis * 50_000_000 for rank in range(pipeline.graph.num_ranks))
    run = run_of(write(tmp_path_factory.mktemp("t"), documents(pipeline, shifts=shifts)))
    slack = 8 * TICK_NS * pipeline.graph.num_ranks + int(pipeline.timeline.makespan_ns)
    for found, ahead in zip(run.clock_shift_ns, shifts, strict=True):
        assert abs(found + ahead) <= slack
    for iteration in run.iterations:
        for made in (replayable(run, iteration),):
            assert simulate(made.graph, made.schedule).makespan_ns <= iteration.measured_ns


@settings(max_examples=5)
@given(SEEDS)
def test_better_orders_hold_no_more_and_costs_are_means(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    pipeline = random_pipeline(seed)
    run = run_of(write(tmp_path_factory.mktemp("t"), documents(pipeline)))
    found = explain_run(run, "made", budget=Budget(evaluations=40), seed=0, shares={})
    what = found.what_if
    assert what.unlimited.timeline.makespan_ns <= what.best.timeline.makespan_ns
    assert what.best.timeline.makespan_ns <= what.as_traced_timeline.makespan_ns
    assert what.unlimited.lower_bound.ns <= what.unlimited.timeline.makespan_ns
    duration, kind = pipeline.graph.duration_ns, pipeline.graph.kind
    for stage, layer in enumerate(found.layers.layers):
        mine = np.array(pipeline.stage_of) == stage
        assert layer.forward_s == pytest.approx(duration[mine & (kind == 0)].mean() / 1e9)
        assert layer.total_backward_s == pytest.approx(
            sum(duration[mine & (kind == k)].mean() for k in set(kind[mine].tolist()) - {0}) / 1e9
        )


Change = Callable[[list[dict[str, Any]]], None]


def drop_ranges(made: list[dict[str, Any]]) -> None:
    made[0]["traceEvents"] = [e for e in made[0]["traceEvents"] if not e["name"].startswith("PP:")]


def other_world(made: list[dict[str, Any]]) -> None:
    made[1]["distributedInfo"]["world_size"] = 64


def same_rank(made: list[dict[str, Any]]) -> None:
    made[1]["distributedInfo"]["rank"] = 0


def other_stage(made: list[dict[str, Any]]) -> None:
    for event in made[1]["traceEvents"]:
        event["name"] = event["name"].replace("PP:1", "PP:7")


def same_stage(made: list[dict[str, Any]]) -> None:
    for event in made[1]["traceEvents"]:
        event["name"] = event["name"].replace("PP:1", "PP:0")


def fewer_microbatches(made: list[dict[str, Any]]) -> None:
    made[1]["traceEvents"] = [e for e in made[1]["traceEvents"] if not e["name"].endswith(("F0", "B0"))]


def other_steps(made: list[dict[str, Any]]) -> None:
    for event in made[1]["traceEvents"]:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#10")


def other_run(made: list[dict[str, Any]]) -> None:
    made[1]["baseTimeNanoseconds"] += 3_600_000_000_000


def other_speed(made: list[dict[str, Any]]) -> None:
    """Its second iteration begins before the other rank's first one is over: no clock mends that."""
    for event in made[1]["traceEvents"]:
        event["ts"] *= 0.1
        event["dur"] *= 0.1


def no_backward(made: list[dict[str, Any]]) -> None:
    for rank in made:
        rank["traceEvents"] = [
            e for e in rank["traceEvents"] if not (e["name"].startswith("PP:") and e["name"].endswith("B1"))
        ]


def no_events(made: list[dict[str, Any]]) -> None:
    made[0].pop("traceEvents")


def overlapped(made: list[dict[str, Any]]) -> None:
    made[0]["traceEvents"][1]["name"] = "PP:(0F1;1B0)OVERLAP_F_B"


def only_ranges(made: list[dict[str, Any]]) -> None:
    made[1]["traceEvents"] = [event for event in made[1]["traceEvents"] if event["cat"] != "cpu_op"]


def only_messages(made: list[dict[str, Any]]) -> None:
    made[1]["traceEvents"] = [event for event in made[1]["traceEvents"] if event["name"] != "aten::addmm"]


def odd_time(made: list[dict[str, Any]]) -> None:
    made[0]["traceEvents"][1]["ts"] = "soon"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_ranges, "no forward or backward of a pipeline"),
        (other_world, "of a job of 64 ranks"),
        (same_rank, "is rank 0, and so is"),
        (other_stage, "stage 1 is in none of them"),
        (same_stage, "has stage 0, and so has"),
        (fewer_microbatches, "microbatches in iteration"),
        (other_steps, "no iteration is in all of them"),
        (other_run, "give traces of one run"),
        (other_speed, "would end before they began"),
        (no_backward, "has no complete iteration"),
        (no_events, "is not a trace of torch.profiler"),
        (overlapped, "a forward and a backward in one"),
        (only_ranges, r"rank1.json: has no operator in the \d+ ranges of its computations; .*ProfilerActivity.CPU"),
        (only_messages, "has no operator in the"),
        (odd_time, "is not a trace of torch.profiler"),
    ],
)
def test_traces_that_do_not_fit_are_refused(tmp_path: Path, change: Change, words: str) -> None:
    pipeline = next(
        one
        for one in (random_pipeline(seed, single=True) for seed in range(100))
        if one.graph.num_ranks == 2 and one.graph.microbatch.max() >= 2
    )
    made = documents(pipeline)
    change(made)
    with pytest.raises(InputError, match=words) as caught:
        run_of(write(tmp_path, made))
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def _tar(data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        entry = tarfile.TarInfo("rank0.json")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize("end", ["]", "", ",\n"])
def test_traces_may_be_arrays_of_events(tmp_path: Path, end: str) -> None:
    """The format of Chrome traces allows an array, whose end may be missing."""
    made = documents(random_pipeline(3))
    whole = run_of(write(tmp_path / "whole", made))
    (tmp_path / "arrays").mkdir()
    for rank, document in enumerate(made):
        array = json.dumps(document["traceEvents"])
        (tmp_path / "arrays" / f"rank{rank}.json").write_text(array.removesuffix("]") + end)
    run = run_of(tmp_path / "arrays")
    assert [one.measured_ns for one in run.iterations] == [one.measured_ns for one in whole.iterations]
    assert run.stage_rank == whole.stage_rank


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    made = documents(random_pipeline(3, single=True))
    whole = json.dumps(made[0]).encode()
    cases = {
        "cut.json": (whole[: len(whole) // 2], "not complete JSON"),
        "empty.json": (b"", "is empty"),
        "packed.json": (gzip.compress(whole), "gzip data"),
        "cut.json.gz": (gzip.compress(whole)[:-20], "not a whole gzip file"),
        "list.json": (b"[1, 2]", "not a trace of torch.profiler"),
        "archive.json": (_tar(whole), "is a tar archive; unpack it"),
        "table.json": (b"PAR1" + whole, "is a Parquet file"),
        "zip.json": (b"PK\x03\x04" + whole, "is a zip archive"),
        "bytes.json": (b"\xff\xfe\x00", "not complete JSON"),
    }
    for name, (data, words) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=words):
            read_kineto(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        read_kineto(tmp_path / "missing.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"without \.json"):
        trace_files([tmp_path / "folder"])
    with pytest.raises(InputError, match="given twice"):
        trace_files([tmp_path / "cut.json", tmp_path / "cut.json"])
