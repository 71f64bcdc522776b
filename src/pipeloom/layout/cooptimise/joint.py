"""The joint search: partition, placement, order and strategies of a chain, annealed together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from pipeloom.errors import InfeasibleError, InputError, NothingFoundError
from pipeloom.layout.cooptimise.bound import placement_bound
from pipeloom.layout.cooptimise.context import Best, Context, Start
from pipeloom.layout.cooptimise.evaluate import NEVER, Judge, arrays_of, schedule_of
from pipeloom.layout.cooptimise.kernels import MOVES, ChainArrays
from pipeloom.layout.cooptimise.layer_chain import LayerChain, PartitionPlacement
from pipeloom.layout.cooptimise.params import CooptimiseParams, WalkPhase
from pipeloom.layout.cooptimise.rules import PriorityRule, from_draft, order_rule
from pipeloom.layout.cooptimise.standard import one_f_one_b_peaks
from pipeloom.layout.cooptimise.starts import allowed_starts, loads_to_cut_by
from pipeloom.layout.cooptimise.walk import Span, Walk, WalkReport, steps_at_once
from pipeloom.limits import MAX_THREADS
from pipeloom.search import Evaluations, OrderRule, Progress
from pipeloom.search.stopping import StoppingRule, Until, Watch
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Schedule, Timeline, gap, require_feasible, simulate
from pipeloom.units import size_text


@dataclass(frozen=True, slots=True, eq=False)
class CooptimisedPipeline:
    """An answer: where the layers lie and in which order their tasks run, and how far that can be from the best.

    Attributes
    ----------
    lower_bound : LowerBound
        Over all partitions, placements and orders, not only this placement's.
    moves : dict
        By name: how often proposed, accepted, and a new best.
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
        """Makespan above the lower bound, relative to it."""
        return gap(self.timeline.makespan_ns, self.lower_bound.ns)

    @property
    def order_rule(self) -> OrderRule:
        """The rule as it goes with the layout, for batches to come."""
        return order_rule(self.chain, self.placement, self.rule)

    @property
    def strategies(self) -> list[str]:
        """Name of every layer's strategy."""
        chosen = self.placement.strategies or (0,) * self.chain.num_layers
        return [names[index] for names, index in zip(self.chain.strategies, chosen, strict=True)]


def cooptimise(
    chain: LayerChain,
    *,
    budget: StoppingRule,
    seed: int = 0,
    threads: int = 1,
    params: CooptimiseParams | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> CooptimisedPipeline:
    """Choose partition, placement, order and strategies of a chain of layers together: the best of `every_walk`."""
    return every_walk(chain, budget=budget, seed=seed, threads=threads, params=params, on_progress=on_progress)[0]


def every_walk(
    chain: LayerChain,
    *,
    budget: StoppingRule,
    seed: int = 0,
    threads: int = 1,
    params: CooptimiseParams | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[CooptimisedPipeline, ...]:
    """Choose partition, placement, order and strategies of a chain of layers together, several times over.

    Parameters
    ----------
    chain : LayerChain
        With its memory limit; split where its weight times are not 0.
    budget : StoppingRule
        Under `pipeloom.search.Evaluations` and one thread the answer depends on the seed alone.
    on_progress : callable, optional
        Called now and then, from whichever thread.

    Returns
    -------
    tuple of CooptimisedPipeline
        What each walk came to, the fastest first, each placement once.

    Raises
    ------
    InfeasibleError
        When no start fits into memory.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise InputError("threads", f"{threads} is not between 1 and {MAX_THREADS}")
    params = params or CooptimiseParams()
    whole = budget.start()
    watch = Until(whole, 0, 1 - params.again.share).start() if params.again.walks else whole
    arrays = arrays_of(chain, max(1, min(chain.num_layers, params.chunks_per_rank * chain.num_ranks)))
    starts, tried = _try_starts(chain, arrays, watch, params)
    if not starts:
        raise nothing_fits(chain)
    params = _fewer_walks(params, arrays, tried, watch.share(tried))
    bound = placement_bound(chain, params.bound)
    context = Context(
        chain=chain,
        arrays=arrays,
        params=params,
        seed=seed,
        watch=watch,
        tried=tried,
        target_ns=bound.ns,
        exchanges=_loads_decide(chain, params),
        best=Best(starts[0].ns, tried),
        on_progress=on_progress,
    )
    walks = _walk(context, starts, threads)
    if params.again.walks:
        used = tried + sum(walk.evaluations for walk in walks)
        later = _again(context, Until(whole, used, 1.0).start())
        walks += _walk(later, _ends(walks)[: params.again.walks], threads)
    ends = _ends(walks)
    if starts[0].ns < ends[0].ns:  # the coarser start was not walked from
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


def _fewer_walks(params: CooptimiseParams, arrays: ChainArrays, tried: int, share: float) -> CooptimiseParams:
    """Where evaluations are slow, so few walks that each gets enough: one long walk ends better than many short ones.

    The starts took ``share`` of the budget to try, which says how many evaluations it has.
    """
    annealing = params.annealing
    if not share or steps_at_once(annealing, arrays) >= annealing.fewest_steps:
        return params
    walks = min(params.walks, max(1, int(tried / share / annealing.slow_evaluations)))
    again = msgspec.structs.replace(params.again, walks=min(params.again.walks, walks))
    return msgspec.structs.replace(params, walks=walks, again=again)


def _ends(walks: list[Walk]) -> list[Start]:
    """What walks came to, the fastest first, each placement once."""
    each: dict[PartitionPlacement, Start] = {}
    for walk in sorted(walks, key=lambda walk: (walk.best_ns, walk.seed)):
        placement, rule = from_draft(walk.best)
        each.setdefault(placement, Start(walk.best_ns, placement, rule))
    return list(each.values())


def _again(context: Context, watch: Watch) -> Context:
    """The same search with what is left of the budget, for walks that go on from where others ended."""
    params = context.params
    again = msgspec.structs.replace(
        params,
        walks=params.again.walks,
        starts=msgspec.structs.replace(params.starts, walked=params.again.walks),
        annealing=msgspec.structs.replace(
            params.annealing, hot=params.again.hot, cold=min(params.annealing.cold, params.again.hot)
        ),
    )
    # Other random numbers than those of the first round.
    return replace(context, params=again, watch=watch, tried=0, seed=~context.seed)


def _walk(context: Context, starts: list[Start], threads: int) -> list[Walk]:
    """Walk from the best starts: thread t runs walks t, t + threads, ..., each for an equal part of its time."""
    params, num_ranks = context.params, context.chain.num_ranks
    if context.exchanges:
        fine = params.starts.fine_chunks * num_ranks
        starts = [start for start in starts if start.placement.num_chunks >= fine] or starts
    starts = starts[: params.starts.walked]
    count, tried = max(params.walks, threads), context.watch.share(context.tried)
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
) -> CooptimisedPipeline:
    """Write a placement out as a schedule, and have the checker confirm that it can run."""
    graph, schedule = schedule_of(chain, placement, rule, method=method)
    timeline = simulate(graph, schedule)
    require_feasible(graph, schedule, timeline)
    return CooptimisedPipeline(chain, placement, rule, graph, schedule, timeline, bound, method)


def _try_starts(
    chain: LayerChain, arrays: ChainArrays, watch: Watch, params: CooptimiseParams
) -> tuple[list[Start], int]:
    """Judge the starts until their time is over; give the best rule of each placement, best placement first."""
    found: dict[PartitionPlacement, Start] = {}
    judge, tried, uniform = Judge(chain, arrays.most_chunks), 0, uniform_strategies(chain)
    for loads in loads_to_cut_by(chain):
        for placement, rule in allowed_starts(chain, loads, arrays.most_chunks, arrays.stride_ns, params):
            for strategy in uniform:
                one = replace(placement, strategies=strategy)
                ns = judge.ns(one, rule)
                tried += 1
                if ns < NEVER and (one not in found or ns < found[one].ns):
                    found[one] = Start(ns, one, rule)
            if found and watch.share(tried) > params.starts.budget_share:
                break
        if found:
            break
    return sorted(found.values(), key=lambda start: start.ns), tried


def _loads_decide(chain: LayerChain, params: CooptimiseParams) -> bool:
    """Whether few ranks have memory enough that what is on the fullest rank counts, not what fits."""
    if not chain.num_ranks <= min(params.starts.many_ranks, chain.num_layers):
        return False
    if chain.capacity_bytes is None:
        return True
    return int(chain.capacity_bytes.min()) >= params.starts.ample_memory * int(one_f_one_b_peaks(chain).max())


def uniform_strategies(chain: LayerChain) -> list[tuple[int, ...]]:
    """All layers by their first candidate, and all by their leanest."""
    counts = [len(row) for row in chain.strategies]
    if max(counts) == 1:
        return [()]
    leanest = tuple(int(chain.activation_bytes[i, : counts[i]].argmin()) for i in range(chain.num_layers))
    return [(), leanest] if any(leanest) else [()]


def nothing_fits(chain: LayerChain) -> InfeasibleError:
    """Say what the layers need and what there is."""
    assert chain.capacity_bytes is not None
    static = int(chain.static_bytes.sum())
    lean = int(chain.activation_bytes.min(axis=1).sum())
    # What is held before training is held wherever it lies.
    kind = InfeasibleError if static > int(chain.capacity_bytes.sum()) else NothingFoundError
    before, each, together = map(size_text, (static, lean, int(chain.capacity_bytes.sum())))
    return kind(
        f"no placement found that fits: the layers hold {before} before training and {each} for one microbatch, the "
        f"{chain.num_ranks} ranks have {together} together; use more ranks or smaller microbatches"
    )


def warm_up() -> None:
    """Compile the kernels, so that no budget pays for it."""
    one = np.ones((2, 1), np.int64)
    chain = LayerChain(
        "warm", ("a", "b"), 1, 1, 0, one, one, one * 0, one, one, np.zeros(2, np.int64), (("keep",), ("keep",))
    )
    rule = PriorityRule(np.zeros((3, 2), np.int64), np.zeros((3, 2), np.int64))
    context = Context(
        chain=chain,
        arrays=arrays_of(chain),
        params=CooptimiseParams(phases=(WalkPhase(kind="refine", until=1.0),)),
        seed=0,
        watch=Evaluations(60).start(),
        tried=0,
        target_ns=-1,
        exchanges=True,
        best=Best(NEVER, 0),
        on_progress=None,
    )
    Walk(context, Start(4, PartitionPlacement((0, 1, 2), (0, 0)), rule), 0).run(Span(0.0, 1.0, 0, 1))
