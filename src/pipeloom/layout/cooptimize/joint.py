"""The joint search: anneal partition, placement, order and strategies of a chain together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from pipeloom.errors import InfeasibleError, InputError, NothingFoundError, check_seed
from pipeloom.layout.cooptimize.bound import placement_bound
from pipeloom.layout.cooptimize.cuts import filled, folded, packed
from pipeloom.layout.cooptimize.evaluate import Judge, arrays_of, schedule_of
from pipeloom.layout.cooptimize.kernels.draft import ChainArrays
from pipeloom.layout.cooptimize.kernels.move_table import MOVES
from pipeloom.layout.cooptimize.kernels.run import NEVER
from pipeloom.layout.cooptimize.layer_chain import LayerChain, PartitionPlacement, iteration_ns
from pipeloom.layout.cooptimize.params import CooptimizeParams, WalkPhase
from pipeloom.layout.cooptimize.rules import PriorityRule, from_draft, order_rule
from pipeloom.layout.cooptimize.standard import one_f_one_b_peaks
from pipeloom.layout.cooptimize.starts import allowed_starts, loads_to_cut_by, starts_at
from pipeloom.layout.cooptimize.walk import Best, Context, Span, Start, Walk, WalkReport, steps_at_once
from pipeloom.limits import MAX_THREADS
from pipeloom.search import Budget, Meter, OrderRule, Progress
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, gap, require_feasible, simulate
from pipeloom.units import size_text


@dataclass(frozen=True, slots=True, eq=False)
class CooptimizedPipeline:
    """The result of the joint search, with a lower bound.

    Attributes
    ----------
    lower_bound : LowerBound
        Bound of the iteration over all partitions, placements and orders, not only for this placement.
    moves : dict
        Number of times that each move was proposed, was accepted and gave a new best, by name.
    """

    chain: LayerChain
    placement: PartitionPlacement
    rule: PriorityRule
    graph: TaskGraph
    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    method: str = ""
    evaluations: int = 0
    elapsed_s: float = 0.0
    reports: tuple[WalkReport, ...] = ()
    moves: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Time of the iteration divided by the lower bound, minus one."""
        return gap(self.iteration_ns, self.lower_bound.ns)

    @property
    def iteration_ns(self) -> int:
        """Time of the iteration in ns: the makespan, and the updates of the rank that ends last."""
        return iteration_ns(self.chain, self.placement, self.graph, self.timeline.end_ns)

    @property
    def order_rule(self) -> OrderRule:
        """The priority rule in the form that is stored with the layout."""
        return order_rule(self.chain, self.placement, self.rule)

    @property
    def strategies(self) -> list[str]:
        """Strategy name of every layer."""
        chosen = self.placement.strategies or (0,) * self.chain.num_layers
        return [names[index] for names, index in zip(self.chain.strategies, chosen, strict=True)]


def cooptimize(
    chain: LayerChain,
    *,
    budget: Budget,
    seed: int = 0,
    threads: int = 1,
    params: CooptimizeParams | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> CooptimizedPipeline:
    """Return the best result of `every_walk`."""
    return every_walk(chain, budget=budget, seed=seed, threads=threads, params=params, on_progress=on_progress)[0]


def every_walk(
    chain: LayerChain,
    *,
    budget: Budget,
    seed: int = 0,
    threads: int = 1,
    params: CooptimizeParams | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[CooptimizedPipeline, ...]:
    """Choose partition, placement, order and strategies of a chain of layers together, in several walks.

    Parameters
    ----------
    chain : LayerChain
        The layers and the memory limit. Layers with nonzero weight times have split backwards.
    budget : Budget
        With a number of evaluations and one thread, the result depends only on the seed.
    on_progress : callable, optional
        Called regularly, from any thread.

    Returns
    -------
    tuple of CooptimizedPipeline
        Results with distinct placements, the fastest first.

    Raises
    ------
    InfeasibleError
        When no start fits into memory.
    """
    check_seed("seed", seed)
    if not 1 <= threads <= MAX_THREADS:
        raise InputError("threads", f"{threads} is not between 1 and {MAX_THREADS}")
    params = params or CooptimizeParams()
    whole = budget.start()
    meter = whole.rest(1 - params.again.share).start() if params.again.walks else whole
    arrays = arrays_of(chain, max(1, min(chain.num_layers, params.chunks_per_rank * chain.num_ranks)))
    starts = _try_starts(chain, arrays, meter, params)
    if not starts:
        raise nothing_fits(chain)
    tried = meter.used
    params = _fewer_walks(params, arrays, tried, meter.spent)
    bound = target = placement_bound(chain, params.bound)
    if budget.seconds is None:
        # The time limit of the integer program must not decide where walks stop, so they stop at the other bounds.
        target = placement_bound(chain, msgspec.structs.replace(params.bound, most_ranks=1))
    context = Context(
        chain=chain,
        arrays=arrays,
        params=params,
        seed=seed,
        meter=meter,
        target_ns=target.ns,
        exchanges=_loads_decide(chain, params),
        best=Best(starts[0].ns, tried),
        on_progress=on_progress,
    )
    walks = _walk(context, starts, threads)
    if params.again.walks:
        whole.used = tried + sum(walk.evaluations for walk in walks)
        later = _again(context, whole.rest().start())
        walks += _walk(later, _ends(walks)[: params.again.walks], threads)
    ends = _ends(walks)
    if starts[0].ns < ends[0].ns:  # no walk began from this coarser start
        ends.insert(0, starts[0])
    counts = np.sum([walk.counts for walk in walks], axis=0)
    moves = {move.name: (int(a), int(b), int(c)) for move, a, b, c in zip(MOVES, *counts, strict=True)}
    return tuple(
        replace(
            answer(chain, end.placement, end.rule, bound, "joint annealing"),
            evaluations=tried + sum(walk.evaluations for walk in walks),
            elapsed_s=whole.elapsed_s(),
            reports=tuple(walk.report for walk in walks),
            moves=moves,
        )
        for end in ends
    )


def _fewer_walks(params: CooptimizeParams, arrays: ChainArrays, tried: int, share: float) -> CooptimizeParams:
    """Reduce the number of walks if evaluations are slow, since one long walk gives better results than many short
    ones.

    The number of evaluations in the budget is estimated from the ``share`` that the starts took.
    """
    annealing = params.annealing
    if not share or steps_at_once(annealing, arrays) >= annealing.fewest_steps:
        return params
    walks = min(params.walks, max(1, int(tried / share / annealing.slow_evaluations)))
    again = msgspec.structs.replace(params.again, walks=min(params.again.walks, walks))
    return msgspec.structs.replace(params, walks=walks, again=again)


def _ends(walks: list[Walk]) -> list[Start]:
    """Return the results of walks with distinct placements, the fastest first."""
    each: dict[PartitionPlacement, Start] = {}
    for walk in sorted(walks, key=lambda walk: (walk.best_ns, walk.seed)):
        placement, rule = from_draft(walk.best)
        each.setdefault(placement, Start(walk.best_ns, placement, rule))
    return list(each.values())


def _again(context: Context, meter: Meter) -> Context:
    """Return the context of the second round: the rest of the budget, for walks that continue from previous results."""
    params = context.params
    again = msgspec.structs.replace(
        params,
        walks=params.again.walks,
        starts=msgspec.structs.replace(params.starts, walked=params.again.walks),
        annealing=msgspec.structs.replace(
            params.annealing, hot=params.again.hot, cold=min(params.annealing.cold, params.again.hot)
        ),
    )
    # Different random numbers from the first round.
    return replace(context, params=again, meter=meter, seed=~context.seed)


def _walk(context: Context, starts: list[Start], threads: int) -> list[Walk]:
    """Walk from the best starts. Thread t runs walks t, t + threads, ..., with equal parts of its time."""
    params, num_ranks = context.params, context.chain.num_ranks
    if context.exchanges:
        fine = params.starts.fine_chunks * num_ranks
        starts = [start for start in starts if start.placement.num_chunks >= fine] or starts
    starts = starts[: params.starts.walked]
    count, tried = max(params.walks, threads), context.meter.spent
    rows = [list(range(t, count, threads)) for t in range(threads)]

    def work(row: list[int]) -> list[Walk]:
        done = []
        for place, number in enumerate(row):
            begin, end = (tried + (1 - tried) * at / len(row) for at in (place, place + 1))
            walk = Walk(context, starts[number % len(starts)], number)
            walk.run(Span(begin, end, number, count))
            done.append(walk)
        return done

    if threads == 1:
        return work(rows[0])
    with ThreadPoolExecutor(threads) as pool:
        return [walk for part in pool.map(work, rows) for walk in part]


def answer(
    chain: LayerChain, placement: PartitionPlacement, rule: PriorityRule, bound: LowerBound, method: str
) -> CooptimizedPipeline:
    """Convert a placement into a schedule and check that it is feasible."""
    graph, schedule = schedule_of(chain, placement, rule, method=method)
    timeline = simulate(graph, schedule)
    require_feasible(graph, schedule, timeline)
    return CooptimizedPipeline(chain, placement, rule, graph, schedule, timeline, bound, method)


def _try_starts(chain: LayerChain, arrays: ChainArrays, meter: Meter, params: CooptimizeParams) -> list[Start]:
    """Evaluate starts within their share of the budget. Return the best rule of each placement, best placement
    first.
    """
    found: dict[PartitionPlacement, Start] = {}
    judge, uniform = Judge(chain, arrays.most_chunks), uniform_strategies(chain)
    most, stride = arrays.most_chunks, arrays.stride_ns
    by_loads = (allowed_starts(chain, loads, most, stride, params) for loads in loads_to_cut_by(chain))
    by_memory = (
        (filled(chain, each) for each in uniform),
        (placement for each in uniform for placement in packed(chain, each, most)),
    )
    # A round of starts is for memory limits under which no start of the earlier rounds fits.
    for starts in (*by_loads, *(starts_at(chain, placements, stride, params) for placements in by_memory)):
        for placement, rule in starts:
            for strategy in uniform:
                one = replace(placement, strategies=strategy)
                ns = judge.ns(one, rule)
                meter.used += 1
                if ns < NEVER and (one not in found or ns < found[one].ns):
                    found[one] = Start(ns, one, rule)
            if found and meter.spent > params.starts.budget_share:
                break
        if found:
            break
    return sorted(found.values(), key=lambda start: start.ns)


def _loads_decide(chain: LayerChain, params: CooptimizeParams) -> bool:
    """Return whether loads rather than memory limit the makespan: few ranks with ample memory."""
    if not chain.num_ranks <= min(params.starts.many_ranks, chain.num_layers):
        return False
    if chain.capacity_bytes is None:
        return True
    return int(chain.capacity_bytes.min()) >= params.starts.ample_memory * int(one_f_one_b_peaks(chain).max())


def uniform_strategies(chain: LayerChain) -> list[tuple[int, ...]]:
    """Return the first candidate for all layers, and the minimum-memory candidate for all layers."""
    counts = [len(row) for row in chain.strategies]
    if max(counts) == 1:
        return [()]
    smallest = tuple(int(chain.activation_bytes[i, : counts[i]].argmin()) for i in range(chain.num_layers))
    return [(), smallest] if any(smallest) else [()]


def nothing_fits(chain: LayerChain) -> InfeasibleError:
    """Return the error with the bytes that the layers need and that the ranks have."""
    assert chain.capacity_bytes is not None
    static = int(chain.static_bytes.sum())
    activation = int(chain.activation_bytes.min(axis=1).sum())
    # Static bytes do not depend on the placement.
    kind = InfeasibleError if static > int(chain.capacity_bytes.sum()) else NothingFoundError
    before, each, together = map(size_text, (static, activation, int(chain.capacity_bytes.sum())))
    return kind(
        f"no placement found that fits: the layers hold {before} before training and {each} for one microbatch, the "
        f"{chain.num_ranks} ranks have {together} together; use more ranks or smaller microbatches"
    )


def compile_kernels() -> None:
    """Compile the kernels before any budget starts."""
    one = np.ones((2, 1), np.int64)
    chain = LayerChain(
        "warm", ("a", "b"), 1, 1, 0, one, one, one * 0, one, one, np.zeros(2, np.int64), (("keep",), ("keep",))
    )
    rule = PriorityRule(np.zeros((3, 2), np.int64), np.zeros((3, 2), np.int64))
    context = Context(
        chain=chain,
        arrays=arrays_of(chain),
        params=CooptimizeParams(phases=(WalkPhase(kind="refine", until=1.0),)),
        seed=0,
        meter=Budget(evaluations=60).start(),
        target_ns=-1,
        exchanges=True,
        best=Best(NEVER, 0),
        on_progress=None,
    )
    Walk(context, Start(4, PartitionPlacement((0, 1, 2), (0, 0)), rule), 0).run(Span(0.0, 1.0, 0, 1))
    folded(chain)
