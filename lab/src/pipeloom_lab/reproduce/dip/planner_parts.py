"""The planner itself: Figs. 11 to 13, and how orders of optimal schedules look (PipeWeaver section 5)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pipeloom.compare.baseline import mfu
from pipeloom.compare.baselines.dip import our_layout
from pipeloom.compare.model_on_cluster import assign_microbatches, draw_iteration, graph_of, model_flops, put_on_cluster
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import Budget, Progress, first_in_first_out, solve
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import FORWARD, TaskGraph
from pipeloom.timeline import Schedule, simulate
from pipeloom_instances import family, generate
from pipeloom_lab.figures import Axis, bar_figure, best_so_far, line_figure
from pipeloom_lab.reproduce.dip import runs
from pipeloom_lab.reproduce.dip.setups import SETUPS, device, mean
from pipeloom_lab.reproduce.part import Figure, Line, Options, Outcome
from pipeloom_lab.reproduce.texts import make_note, make_table
from pipeloom_lab.solvers import EXACT, exact_worker

GRAIN = 1.0001
"""Times of solvers are rounded; what is within so many times the optimum is one."""
METHODS = {
    "ours": "default",
    "DIP: tree search": "mcts",
    "PipeWeaver: tree search": "mcts priority",
    "DIP from the best uniform strategies": "mcts uniform",
    "depth first": "depth first",
    "random": "random",
}


def figure_11(options: Options) -> Outcome:
    """Best schedule so far against search time on VLM-L."""
    setup = SETUPS["VLM-L"]
    seed, number = runs.iterations(options, 1)[0]
    layout = runs.system(setup, runs.PUBLISHED).layout
    graph = graph_of(setup.setting, layout, setup.groups(seed, number), "VLM-L")
    limit = 10 * options.search_s
    series, rows = {}, []
    for name, method in METHODS.items():
        seen: list[tuple[float, float]] = []

        def note(progress: Progress, seen: list[tuple[float, float]] = seen) -> None:
            if progress.best_ns < 1 << 61:
                seen.append((max(progress.elapsed_s, 1e-3), progress.best_ns / 1e9))

        found = solve(graph, budget=Budget(seconds=limit, clock="cpu"), seed=seed, method=method, on_progress=note)
        seen.append((max(limit, found.elapsed_s), found.timeline.makespan_ns / 1e9))
        moments, values = best_so_far([t for t, _ in seen], [v for _, v in seen])
        # What is never bettered is a line to the end all the same.
        series[name] = [*moments, seen[-1][0]], [*values, values[-1]]
        early = min((v for t, v in seen if t <= limit / 10), default=None)
        open_share = found.timeline.makespan_ns / found.lower_bound.ns - 1
        rows.append(
            (
                name,
                "none" if early is None else f"{early:.2f}",
                f"{found.timeline.makespan_ns / 1e9:.2f}",
                f"{open_share * 100:.1f} %",
                str(found.evaluations),
            )
        )
    figure = line_figure(
        series,
        x=Axis("processor seconds of search", log=True),
        y=Axis("iteration time, s"),
        title="VLM-L",
        style="steps",
    )
    return Outcome(
        (make_table("dip/figure-11", rows, early=limit / 10, limit=limit),),
        (Figure("figure-11", "Search progress", figure),),
        devices=device(setup),
    )


def figure_12(options: Options) -> Outcome:
    """Search time against exact solvers as microbatches become more."""
    counts = (1, 2, 3, 4, 6, 8, 12, 16) if options.full else (1, 2, 3, 4, 8, 16)
    solvers = {"ours": "default", "HiGHS": "milp", "Gurobi": "gurobi", "Z3": "z3", "CP-SAT": "cp-sat"}
    graphs: dict[tuple[str, int], TaskGraph] = {}
    for label in ("VLM-S", "T2V-S"):
        setting = SETUPS[label].setting
        layout = runs.system(SETUPS[label], runs.PUBLISHED).layout
        for count in counts:
            graph = graph_of(setting, layout, draw_iteration(setting, count, 500 + options.seeds[0]), label)
            assert graph.candidates is not None
            graphs[label, count] = graph.with_candidates(np.full(graph.num_pairs, len(graph.candidates[0]) - 1))
    answers: dict[tuple[str, str, int], _SolverRun] = {}
    lines: dict[str, dict[str, Line]] = {}
    # HiGHS goes first: it cannot run once CP-SAT's library has been loaded.
    for name, method in solvers.items():
        for label in ("VLM-S", "T2V-S"):
            line = lines.setdefault(label, {}).setdefault(name, Line([], []))
            for count in counts:
                answer = answers[name, label, count] = _solved(graphs[label, count], method, options)
                if not answer.problem:
                    line.add(count, max(answer.spent_s, 1e-3))
                if not answer.proved and name != "ours":
                    break
    rows = tuple(
        (
            label,
            str(count),
            str(graphs[label, count].num_tasks),
            *(_cell(answers, name, label, count) for name in solvers),
        )
        for label in ("VLM-S", "T2V-S")
        for count in counts
    )
    tables = tuple(
        Figure(
            f"figure-12-{label.lower()}",
            f"Search time, {label}",
            line_figure(
                {name: line for name, line in found.items() if line.x},
                x=Axis("microbatches"),
                y=Axis("seconds", log=True),
                title=label,
            ),
        )
        for label, found in lines.items()
    )
    return Outcome(
        (make_table("dip/figure-12", rows, solver_s=options.solver_s, search_s=options.search_s, solvers=solvers),),
        tables,
        devices=device(SETUPS["VLM-S"]),
    )


@dataclass(frozen=True, slots=True)
class _SolverRun:
    """What was found, in how many processor seconds; or why nothing was tried."""

    spent_s: float = 0.0
    makespan_ns: int = 0
    bound_ns: int = 0
    proved: bool = False
    problem: str = ""


def _solved(graph: TaskGraph, method: str, options: Options) -> _SolverRun:
    """Let our search or an exact solver order a graph."""
    begin, begin_there = time.process_time(), exact_worker.spent_s()
    if method == "default":
        found = solve(graph, budget=Budget(seconds=options.search_s, clock="cpu"), seed=0)
        makespan, bound = found.timeline.makespan_ns, found.lower_bound.ns
        proved = makespan <= bound
    else:
        hint = first_in_first_out(graph)
        try:
            exact = EXACT[method](graph, seconds=options.solver_s, hint=hint, bound_ns=0, seed=0)
        except InputError as error:
            return _SolverRun(problem=f"refuses: {error.problem}")
        makespan, bound, proved = simulate(graph, exact.schedule).makespan_ns, exact.bound_ns, exact.proved
    spent = time.process_time() - begin + exact_worker.spent_s() - begin_there
    # Solvers round times; a hundredth of a per cent is their grain.
    return _SolverRun(spent, makespan, bound, proved or makespan <= bound * GRAIN)


def _cell(answers: Mapping[tuple[str, str, int], _SolverRun], name: str, label: str, count: int) -> str:
    """An answer in words; ours against the optimum where a solver has proved it."""
    answer = answers.get((name, label, count))
    if answer is None:
        return "not tried"
    if answer.problem:
        return answer.problem
    optima = [a.makespan_ns for (_, *where), a in answers.items() if where == [label, count] and a.proved]
    if answer.proved or (optima and answer.makespan_ns <= min(optima) * GRAIN):
        words = "optimal"
    elif optima:
        words = f"{(answer.makespan_ns / min(optima) - 1) * 100:.1f} % above the optimum"
    elif answer.bound_ns > 0:
        words = f"{(answer.makespan_ns / answer.bound_ns - 1) * 100:.1f} % open"
    else:
        words = "no bound"
    return f"{answer.spent_s:.2f} s, {words}{'' if answer.proved or name == 'ours' else ', not proved'}"


def figure_13(options: Options) -> Outcome:
    """VLM-M on 64 GPUs under every combination of degrees."""
    total, rows, best = 128, [], ("", 0.0)
    drawn = draw_iteration(SETUPS["VLM-M"].setting, total, 10_000 * (1 + options.seeds[0]))
    bars: dict[str, float] = {}
    for tensor in (1, 2, 4, 8):
        for pipeline in (1, 2, 4, 8, 16, 32):
            data = 64 // (tensor * pipeline)
            if data * tensor * pipeline != 64 or data > total:
                continue
            name = f"DP {data}, TP {tensor}, PP {pipeline}"
            try:
                setting = put_on_cluster("vlm-m", "dip-h800-64", Degrees(tensor=tensor, pipeline=pipeline, data=data))
                replicas = assign_microbatches(setting, drawn, data) if data > 1 else [drawn]
                mine = max(replicas, key=lambda groups: model_flops(setting, groups))
                layout = our_layout(setting, [mine])
                graph = graph_of(setting, layout, mine, name)
                found = solve(graph, budget=Budget(seconds=options.search_s, clock="cpu"), seed=0)
            except (InfeasibleError, InputError) as error:
                rows.append((name, "", "", str(error).partition(";")[0]))
                continue
            result = BaselineResult(name, layout, graph, found.schedule, found.timeline, found.lower_bound)
            seconds = setting.iteration_s(result)
            # All replicas wait for the fullest, so what counts is the work of all of them over its time.
            share = mfu(setting, drawn, seconds) / data
            bars[name] = share
            rows.append((name, f"{seconds:.2f}", f"{share:.3f}", ""))
            best = max(best, (name, share), key=lambda entry: entry[1])
    order = sorted(bars, key=lambda name: -bars[name])
    figure = bar_figure(order, {"MFU": [bars[name] for name in order]}, y=Axis("MFU"), title="VLM-M on 64 H800")
    place = order.index("DP 8, TP 2, PP 4") + 1 if "DP 8, TP 2, PP 4" in order else 0
    summary = (
        ("best degrees", best[0], "DP 8, TP 2, PP 4"),
        ("its MFU", f"{best[1]:.3f}", "0.297"),
        ("place of the paper's best", str(place), "1"),
        ("MFU of the paper's best", f"{bars.get('DP 8, TP 2, PP 4', 0.0):.3f}", "0.297"),
        ("its throughput below the best", f"{(1 - bars.get('DP 8, TP 2, PP 4', 0.0) / best[1]) * 100:.1f} %", "0.0 %"),
    )
    return Outcome(
        (make_table("dip/figure-13-degrees", rows, total=total), make_table("dip/figure-13-best", summary)),
        (Figure("figure-13", "MFU under all degrees", figure),),
        devices=device(SETUPS["VLM-M"]),
    )


def assigning(options: Options) -> Outcome:
    """Assign microbatches to data-parallel replicas in turn, and by work, which the papers leave out."""
    setup, replicas, each = SETUPS["VLM-S"], 4, 16
    setting = setup.setting
    layout = our_layout(setting, setup.typical)
    slowest: dict[str, list[float]] = {"in turn": [], "by work": []}
    average: dict[str, list[float]] = {"in turn": [], "by work": []}
    for seed in options.seeds:
        drawn = draw_iteration(setting, replicas * each, 20_000 + seed)
        ways = {
            "in turn": [drawn[r::replicas] for r in range(replicas)],
            "by work": assign_microbatches(setting, drawn, replicas),
        }
        for name, assigned in ways.items():
            budget = Budget(seconds=options.search_s, clock="cpu")
            times = [
                solve(graph_of(setting, layout, groups, name), budget=budget, seed=seed).timeline.makespan_ns / 1e9
                for groups in assigned
            ]
            slowest[name].append(max(times))
            average[name].append(mean(times))
    rows = tuple(
        (
            name,
            f"{mean(slowest[name]):.2f}",
            f"{mean(average[name]):.2f}",
            f"{(mean(slowest[name]) / mean(average[name]) - 1) * 100:.1f} %",
        )
        for name in slowest
    )
    return Outcome((make_table("dip/dealing", rows, replicas=replicas, each=each),), devices=device(setup))


def consistency(graph: TaskGraph, schedule: Schedule) -> tuple[int, int]:
    """Pairs of same-kind segments on neighbouring ranks, and how many have the same order on both."""
    place = np.empty(graph.num_tasks, np.int64)
    for tasks in schedule.order:
        place[tasks] = np.arange(len(tasks))
    slot = np.full((graph.num_passes, graph.num_ranks), -1, np.int64)
    slot[graph.pass_id, graph.rank] = np.arange(graph.num_tasks)
    forward = np.zeros(graph.num_passes, np.bool_)
    forward[graph.pass_id] = graph.kind == FORWARD
    together = same = 0
    for rank in range(graph.num_ranks - 1):
        both = np.flatnonzero((slot[:, rank] >= 0) & (slot[:, rank + 1] >= 0))
        for a, b in combinations(both.tolist(), 2):
            if forward[a] == forward[b]:
                together += 1
                here = place[slot[a, rank]] < place[slot[b, rank]]
                same += here == (place[slot[a, rank + 1]] < place[slot[b, rank + 1]])
    return together, int(same)


def ordering_consistency(options: Options) -> Outcome:
    """Whether optimal schedules keep the order of segments from rank to rank (PipeWeaver section 5)."""
    rows = []
    for name, of in (("VLM-S", "vlm-s"), ("T2V-S", "t2v-s"), ("uniform", "uniform")):
        together = same = proved = wholly = 0
        over: list[float] = []
        for seed in range(2 * len(options.seeds)):
            graph = generate(family(of, num_ranks=3, num_microbatches=2 if of != "uniform" else 4), seed)
            exact = solve(graph, budget=Budget(seconds=min(5.0, options.solver_s)), seed=seed, method="cp-sat")
            if exact.timeline.makespan_ns > exact.lower_bound.ns:
                continue
            proved += 1
            all_of_them, alike = consistency(graph, exact.schedule)
            together, same, wholly = together + all_of_them, same + alike, wholly + (alike == all_of_them)
            queue = solve(graph, budget=Budget(seconds=0.2), seed=seed, method="local search")
            over.append(queue.timeline.makespan_ns / exact.timeline.makespan_ns - 1)
        if proved:
            rows.append(
                (
                    name,
                    str(proved),
                    f"{same / max(together, 1) * 100:.1f} %",
                    f"{wholly} of {proved}",
                    f"{mean(over) * 100:.2f} %",
                )
            )
    return Outcome((make_table("dip/consistency", rows),), notes=(make_note("dip/consistency"),))
