"""What was planned, and what runs: Fig. 11 (traces) and Fig. 12 (prediction against execution)."""

from __future__ import annotations

import statistics
import threading
from dataclasses import replace

import numpy as np

from pipeloom.layout.cooptimize.layer_chain import layout_of
from pipeloom.packing import Microbatch, Packing, SubMicrobatch
from pipeloom.plan import lower
from pipeloom.report import make_track, timeline_svg
from pipeloom.runtime import ThreadHub, emulate, step_durations
from pipeloom.runtime.measure.emulation import Emulation, replayed_ns, run_on_ranks, without_delays
from pipeloom.spec import Batch, Layout, Sample, Workload
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, simulate
from pipeloom_lab.adaptis.systems import ChainResult
from pipeloom_lab.reproduce.adaptis import setups
from pipeloom_lab.reproduce.part import Figure, Options, Outcome
from pipeloom_lab.reproduce.texts import make_note, make_table

_MEAN_MS = 40
"""Of a task on sleeping ranks."""
_REPEATS = 3
"""Runs on sleeping ranks, of which the median counts: other work on the machine wakes some of them late."""

_PAPER_12 = {"S-1F1B": "", "I-1F1B": "4.55 %", "ZB": "2.12 %", "Mist": "6.57 %", setups.GENERATOR: "4.42 %", "ours": ""}


def figure_11(options: Options) -> Outcome:
    """Timelines of S-1F1B, Mist, the paper's generator and ours on Nemotron-H large."""
    setup = setups.PaperSetup("nemotron-h-large", 8, 4, 64, 4096)
    found = {name: setups.run_baseline(setups.BASELINES[name], setup) for name in ("S-1F1B", "Mist")}
    found[setups.GENERATOR] = setups.generated(setup, options.search_s)
    found["ours"] = setups.ours(setup, options.seeds[0], options.search_s)
    tracks, rows = [], []
    for name, one in found.items():
        tracks.append(make_track(name, one.graph, one.schedule, one.timeline))
        rows.append(
            (
                name,
                f"{1e3 * setups.seconds_of(one):.1f} ms",
                f"{100 * setups.bubble_share(one):.1f} %",
                str(one.placement.num_chunks),
                f"{int(one.timeline.peak_bytes.max()) / 2**30:.1f} GiB",
            )
        )
    svg = timeline_svg(tracks)
    return Outcome(
        (make_table("adaptis/figure-11", rows),),
        (Figure("figure-11", "S-1F1B, Mist, AdaPtis and ours", svg),),
        devices=setups.device(),
    )


def figure_12(options: Options) -> Outcome:
    """Lower every system's schedule to messages and run it on emulated ranks."""
    found: list[tuple[str, str, ChainResult, int]] = []
    for size in setups.SIZES:
        setup = setups.setup_of("Nemotron-H", size, 4096, 4)
        results = {name: setups.run_baseline(system, setup) for name, system in setups.BASELINES.items()}
        results[setups.GENERATOR] = setups.generated(setup, options.search_s)
        results["ours"] = setups.ours(setup, options.seeds[0], options.search_s)
        found += [(size, name, one, setups.chains(setup)[0].delay_ns) for name, one in results.items()]
    slept = sleep([one for _, _, one, _ in found])
    rows = []
    for (size, name, one, delay_ns), (planned_ns, took_ns, late) in zip(found, slept, strict=True):
        on_virtual = abs(execute(one, delay_ns) / one.timeline.makespan_ns - 1)
        rows.append(
            (
                size,
                name,
                f"{one.timeline.makespan_ns / 1e6:.3f} ms",
                f"{100 * on_virtual:.2f} %",
                f"{planned_ns / 1e9:.3f} s",
                f"{took_ns / 1e9:.3f} s",
                f"{100 * (took_ns / planned_ns - 1):+.2f} %",
                f"{100 * late:+.2f} %",
                _PAPER_12[name],
            )
        )
    sizes = [abs(took / planned - 1) for planned, took, _ in slept]
    slept_note = make_note("adaptis/figure-12", mean_ms=_MEAN_MS, repeats=_REPEATS)
    table = make_table(
        "adaptis/figure-12",
        rows,
        average=100 * statistics.fmean(sizes),
        median=100 * statistics.median(sizes),
        largest=100 * max(sizes),
    )
    return Outcome((table,), notes=(slept_note,), devices=setups.device())


def lowered(result: ChainResult) -> tuple[Layout, Packing, TaskGraph]:
    """Layout, packing and task graph of a baseline, for microbatches of one token each."""
    graph = result.graph.with_candidates(result.schedule.candidate)
    num = int(graph.microbatch.max()) + 1
    parts = tuple(Microbatch((i,), ((SubMicrobatch(0, 1, Workload((1,))),),)) for i in range(num))
    batch = Batch(tuple(Sample(id=str(i), text_tokens=1) for i in range(num)))
    return layout_of(graph.num_ranks, result.placement), Packing(batch, ("lm",), parts), graph


def sleep(results: list[ChainResult]) -> list[tuple[int, int, float]]:
    """Run schedules on sleeping ranks: nanoseconds planned and taken (median), and the share that waking late adds."""
    cases: list[tuple[Emulation, TaskGraph, Schedule, tuple[str, ...]]] = []
    for one in results:
        layout, packing, graph = lowered(one)
        factor = _MEAN_MS * 1e6 / float(graph.duration_ns.mean())
        longer = np.rint(graph.duration_ns * factor).astype(np.int64)
        graph = without_delays(replace(graph, duration_ns=longer))
        schedule = replace(one.schedule, candidate=None)
        plan = lower(graph, schedule, simulate(graph, schedule), layout, packing, lambda *_: ((1,), "float32"))
        names = layout.chunk_names
        cases.append((Emulation(plan, step_durations(graph, names)), graph, schedule, names))
    num_ranks = results[0].graph.num_ranks
    runs = run_on_ranks([setting[0] for setting in cases] * _REPEATS, num_ranks, "sleep")
    found = []
    for i, (_, graph, schedule, names) in enumerate(cases):
        mine = sorted(runs[i :: len(cases)], key=lambda run: run.total_ns)
        middle = mine[len(mine) // 2]
        planned_ns = simulate(graph, schedule).makespan_ns
        late = replayed_ns(graph, schedule, names, middle.steps_ns) / planned_ns - 1
        found.append((planned_ns, middle.total_ns, late))
    return found


def execute(result: ChainResult, delay_ns: int) -> int:
    """Run a schedule as a plan on emulated ranks, one thread each; give the end of the last action in ns."""
    layout, packing, graph = lowered(result)
    plan = lower(result.graph, result.schedule, result.timeline, layout, packing, lambda *_: ((1,), "float32"))
    durations = step_durations(graph, layout.chunk_names)
    hub = ThreadHub("in order", timeout_s=120.0)
    ends = [0] * layout.num_ranks

    def work_rank(rank: int) -> None:
        times = emulate(plan, rank, durations, hub.transport(rank), transfer_ns=lambda _: delay_ns)
        ends[rank] = max((t.end_ns for t in times), default=0)

    threads = [threading.Thread(target=work_rank, args=(rank,)) for rank in range(layout.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ends)
