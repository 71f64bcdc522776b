"""Tune one batch: choose microbatch size, packing, order and encoder pre-computation together by simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

import msgspec
import numpy as np

from pipeloom.errors import NothingFoundError, check_seed
from pipeloom.limits import MAX_SEED
from pipeloom.packing import PackingSpec, check_budget, default_model, group
from pipeloom.packing.choices import Groups, even_microbatches, filled_microbatches, multiples, numbers
from pipeloom.packing.policies import balances
from pipeloom.search import Budget
from pipeloom.spec import Batch, Sample
from pipeloom.tuning.kernels.anneal import anneal
from pipeloom.tuning.kernels.chain import Chain, Scratch, make_scratch
from pipeloom.tuning.kernels.one_f_one_b import (
    BACKWARD,
    EARLY,
    ENCODE,
    EXTRA,
    FORWARD,
    INFEASIBLE,
    LATE,
    NUM_SETTINGS,
    OVERRUN,
    best_of,
    run,
)
from pipeloom.tuning.pipeline import NO_LIMIT, BatchSizes, TunedPipeline, batch_sizes, chain_of, marginal_of
from pipeloom.tuning.spec import TuningSpec
from pipeloom.tuning.table import NUM_ROWS, CostTable, IntArray
from pipeloom.units import size_text

_RUNS_PER_SAMPLE = 240
"""Number of microbatches simulated for each sample, so that the tuning time is linear in the batch size."""
_FINALISTS = 3
_MOST_CLUSTERS = 6
_ROUNDS = 3
"""Rounds of local search that moves samples. All costs are estimated again after each round."""
_HEAT = 0.1
"""Initial annealing temperature, in mean times between consecutive microbatches."""
_SLOWER, _MISSES = 1.015, 2
"""Stop increasing the number of microbatches after ``_MISSES`` consecutive numbers slower than the best by
``_SLOWER``."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningResult:
    """The tuning result of one batch.

    Attributes
    ----------
    groups : tuple of tuple of int
        Samples of every microbatch, in execution order.
    events : array, shape (num_events, 2)
        Order of rank 0: (kind, microbatch or encoder part), numbered as in ``groups``.
    extra : int
        Number of forwards ahead in addition to those of 1F1B.
    num_early : int
        Number of encoder parts that run before the turn of their microbatch.
    planned_ns : int
        Makespan estimated from the cost tables, in ns.
    evaluations : int
        Number of simulated orders.
    """

    groups: tuple[tuple[int, ...], ...]
    events: IntArray
    extra: int
    num_early: int
    planned_ns: int
    evaluations: int


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A packing with its best order so far."""

    bin_of: IntArray
    chain: Chain
    scratch: Scratch
    order: IntArray
    settings: IntArray
    makespan: int


def tune(
    pipeline: TunedPipeline,
    batch: Batch,
    packing: PackingSpec | int,
    spec: TuningSpec | None = None,
    seed: int = 0,
    budget: Budget | None = None,
) -> TuningResult:
    """Tune one batch.

    Parameters
    ----------
    packing : PackingSpec or int
        Limits of microbatches, and the seed of random packings; its policy is ignored. An integer is a token budget.
    spec : TuningSpec or None
        Techniques to use. None: all techniques with the default settings.
    budget : Budget or None
        Continue the search of orders until this rule stops it. None: the default number of simulations, some
        milliseconds for a hundred samples.

    Raises
    ------
    InputError
        When a sample exceeds the token budget, or the seed is not an integer of at least 0.
    NothingFoundError
        When even the smallest microbatches do not fit into memory.
    """
    check_seed("seed", seed)
    if isinstance(packing, int):
        packing = PackingSpec(packing, seed=seed)
    return _Tuning(pipeline, batch, packing, spec or TuningSpec(), seed, budget).run()


class _Tuning:
    def __init__(
        self,
        pipeline: TunedPipeline,
        batch: Batch,
        packing: PackingSpec,
        spec: TuningSpec,
        seed: int,
        budget: Budget | None = None,
    ) -> None:
        self.meter = (budget or Budget(evaluations=0)).start()
        self.pipeline, self.batch, self.spec, self.seed = pipeline, batch, spec, seed
        self.budget = packing.token_budget
        self.packing = msgspec.structs.replace(packing, policy=spec.pack)
        check_budget(batch, pipeline.model, self.budget)
        self.sizes: BatchSizes = batch_sizes(pipeline, batch)
        self.early = spec.precompute == "all" or (spec.precompute == "frozen" and not pipeline.trained)
        self.late = spec.precompute == "all" and pipeline.trained

    def run(self) -> TuningResult:
        if self.spec.micro_batch == "any":
            found = self._any_number()
        elif self.spec.micro_batch == "multiples":
            found = self._candidates(multiples(self.sizes.loads, self.packing, self.spec.unit_tokens))
        else:
            found = self._candidates([group(self.sizes.loads, self.packing, self.batch.iteration)])
        if not found:
            raise NothingFoundError(
                f"iteration {self.batch.iteration}: none of the packings tried, of at most {self.budget} tokens a "
                f"microbatch, fits into the memory of {size_text(int(self.pipeline.capacity_bytes[0]))}; lower "
                "packing.token_budget, or recompute"
            )
        return self._finish(self._search(found))

    # ---------------------------------------------------------------- microbatch sizes

    def _any_number(self) -> list[_Candidate]:
        """Simulate packings with increasing numbers of microbatches until more are clearly slower."""
        loads = self.sizes.loads
        best = NO_LIMIT
        found: list[_Candidate] = []
        misses = 0
        for number in numbers(loads, self.packing):
            if misses == _MISSES:
                break
            for made in self._candidates([even_microbatches(loads, self.packing, number, self.batch.iteration)]):
                found.append(made)
                misses = misses + 1 if made.makespan > _SLOWER * best else 0
                best = min(best, made.makespan)
        return [*found, *self._candidates(filled_microbatches(loads, self.packing))]

    def _candidates(self, packings: Iterable[Groups]) -> list[_Candidate]:
        """Simulate packings and return those that fit into memory."""
        made = (self._candidate(_bins(groups, len(self.batch.samples))) for groups in packings)
        return [candidate for candidate in made if candidate is not None]

    def _candidate(self, bin_of: IntArray) -> _Candidate | None:
        """Simulate a packing in a few orders. Return None if it does not fit into memory."""
        chain = chain_of(self.pipeline, self.sizes, bin_of)
        scratch = make_scratch(chain)
        orders = _simple_orders(chain)[: 1 if self.spec.order == "given" else None]
        return self._best_of(bin_of, chain, scratch, orders, NO_LIMIT)

    def _best_of(
        self, bin_of: IntArray, chain: Chain, scratch: Scratch, orders: IntArray, ceiling: int
    ) -> _Candidate | None:
        settings = self._settings()
        makespan, i, j = best_of(chain, orders, settings, scratch, ceiling)
        self.meter.used += len(orders) * len(settings)
        return None if i < 0 else _Candidate(bin_of, chain, scratch, orders[i], settings[j], makespan)

    def _settings(self) -> IntArray:
        """Return one setting per row: encoders in order and, if enabled, forwards early and backwards late."""
        rows = np.zeros((3 if self.early else 1, NUM_SETTINGS), np.int64)
        rows[1:, EARLY], rows[1:, LATE] = 1, self.late
        rows[2:, OVERRUN] = 50
        return rows

    # ---------------------------------------------------------------- order

    def _search(self, found: list[_Candidate]) -> _Candidate:
        found.sort(key=lambda candidate: candidate.makespan)
        if self.spec.order == "given":
            return found[0]
        if self.spec.order == "clusters":
            return min((self._permute(candidate) for candidate in found), key=lambda c: c.makespan)
        finalists = found[:_FINALISTS]
        runs = _RUNS_PER_SAMPLE * len(self.batch.samples) * self.spec.effort
        short = [self._anneal(candidate, 0.5 * runs / len(finalists)) for candidate in finalists]
        best = self._anneal(min(short, key=lambda candidate: candidate.makespan), 0.5 * runs)
        return self._continue(best, short, 0.5 * runs)

    def _continue(self, best: _Candidate, others: list[_Candidate], runs: float) -> _Candidate:
        """Anneal alternately from the best and from other packings, longer each time, within the budget."""
        before = self.meter.spent
        turn = 0
        while before < 1:
            runs *= 2
            self.seed += 1
            start = best if turn % 2 == 0 else others[turn // 2 % len(others)]
            # If evaluations are counted, a packing with few microbatches has more of them in the same time.
            most = self.meter.left(NO_LIMIT) * len(start.order)
            found = self._anneal(start, min(runs, most))
            if found.makespan < best.makespan:
                best = found
            now = self.meter.spent
            spent = now - before
            # Do not start a turn that would not complete.
            if spent <= 0 or now + spent >= 1:
                return best
            if now + 2 * spent > 1:
                runs *= 0.9 * (1 - now) / (2 * spent)
            before = now
            turn += 1
        return best

    def _permute(self, candidate: _Candidate) -> _Candidate:
        """Search permutations of clusters, each with and without pre-computation, as in PipeTune."""
        orders = _cluster_orders(candidate.chain)
        better = self._best_of(candidate.bin_of, candidate.chain, candidate.scratch, orders, candidate.makespan)
        return better or candidate

    def _anneal(self, candidate: _Candidate, runs: float) -> _Candidate:
        """Anneal order and samples in a few rounds. Costs are estimated again after each round."""
        best = candidate
        goal = bound_ns(best.chain)
        samples = balances(self.spec.pack) and self.spec.micro_batch == "any"
        marginal = marginal_of(self.pipeline, self.sizes, len(best.order))
        rounds = _ROUNDS if samples else 1
        evaluations = max(1, int(runs / len(best.order) / rounds))
        for number in range(rounds):
            order, settings, bin_of = best.order.copy(), best.settings.copy(), best.bin_of.copy()
            chain = chain_of(self.pipeline, self.sizes, bin_of)
            self.meter.used += anneal(
                chain,
                order,
                settings,
                bin_of,
                marginal,
                self.budget,
                best.scratch,
                evaluations,
                self.seed + number & MAX_SEED,
                samples,
                self.early,
                self.late,
                best.makespan,
                0 if samples else goal,
                _HEAT * best.makespan / len(best.order),
            )
            chain = chain_of(self.pipeline, self.sizes, bin_of)
            scratch = make_scratch(chain)
            makespan, _ = run(chain, order, settings, scratch, NO_LIMIT)
            if makespan != INFEASIBLE and makespan <= best.makespan:
                best = _Candidate(bin_of, chain, scratch, order, settings, makespan)
        return best

    def _finish(self, best: _Candidate) -> TuningResult:
        """Number microbatches and parts in execution order."""
        makespan, count = run(best.chain, best.order, best.settings, best.scratch, NO_LIMIT)
        turn = np.empty(len(best.order), np.int64)
        turn[best.order] = np.arange(len(best.order))
        sizes = np.diff(best.chain.part_start)[best.order]
        first = np.concatenate([[0], np.cumsum(sizes)])
        events = best.scratch.events[:count].copy()
        of_microbatch = np.isin(events[:, 0], (FORWARD, BACKWARD))
        events[of_microbatch, 1] = turn[events[of_microbatch, 1]]
        parts = events[~of_microbatch, 1]
        home = np.searchsorted(best.chain.part_start, parts, side="right") - 1
        events[~of_microbatch, 1] = first[turn[home]] + parts - best.chain.part_start[home]
        members = [tuple(np.flatnonzero(best.bin_of == m).tolist()) for m in best.order.tolist()]
        early = _num_early(events, first)
        return TuningResult(tuple(members), events, int(best.settings[EXTRA]), early, int(makespan), self.meter.used)


def _latencies(chain: Chain) -> tuple[IntArray, IntArray]:
    """Return the time of every microbatch in the encoders, and in total on all ranks, in ns."""
    num = len(chain.part_start) - 1
    home = np.repeat(np.arange(num), np.diff(chain.part_start))
    encoder = np.bincount(home, weights=chain.part_forward + chain.part_backward, minlength=num).astype(np.int64)
    return encoder, encoder + chain.forward.sum(axis=1) + chain.backward.sum(axis=1)


def _simple_orders(chain: Chain) -> IntArray:
    """Return one order per row: as packed, by encoder work, and with light microbatches at both ends."""
    encoder, total = _latencies(chain)
    rising = np.argsort(total, kind="stable")
    by_encoder = np.argsort(encoder, kind="stable")
    ends = [np.concatenate([each[::2], each[1::2][::-1]]) for each in (by_encoder, rising)]
    return np.stack([np.arange(len(total)), by_encoder, *ends])


def _clusters(chain: Chain) -> list[IntArray]:
    """Cluster microbatches by cutting the sorted latencies at their widest gaps (PipeTune section 5.2)."""
    _, total = _latencies(chain)
    rising = np.argsort(total, kind="stable")
    gaps = np.diff(total[rising])
    widest = np.sort(np.argsort(-gaps, kind="stable")[: _MOST_CLUSTERS - 1])
    cuts = [k + 1 for k in widest.tolist() if gaps[k] > 0]
    return np.split(rising, cuts)


def _cluster_orders(chain: Chain) -> IntArray:
    """Return every permutation of the clusters, with the microbatches of a cluster adjacent: at most 720 rows."""
    return np.stack([np.concatenate(arrangement) for arrangement in permutations(_clusters(chain))])


def bound_ns(chain: Chain) -> int:
    """Return a lower bound for any order in ns: the work of a rank plus its minimum warm-up and cool-down."""
    work = (chain.forward + chain.backward).sum(axis=0)
    work[0] += chain.part_forward.sum() + chain.part_backward.sum()
    ahead = np.cumsum(chain.forward + chain.delay, axis=1)
    behind = np.cumsum(chain.backward + chain.delay, axis=1)
    least = work.copy()
    least[1:] += ahead[:, :-1].min(axis=0) + behind[:, :-1].min(axis=0)
    return int(least.max())


def _num_early(events: IntArray, first: IntArray) -> int:
    """Count encoder parts that run before the backbone forward of an earlier microbatch."""
    turn = -1
    early = 0
    for kind, number in events.tolist():
        if kind == FORWARD:
            turn = number
        elif kind == ENCODE and number >= first[turn + 2]:
            early += 1
    return early


def _bins(groups: tuple[tuple[int, ...], ...], num_samples: int) -> IntArray:
    bin_of = np.empty(num_samples, np.int64)
    for number, members in enumerate(groups):
        bin_of[list(members)] = number
    return bin_of


def compile_kernels() -> None:
    """Compile all kernels: tune two samples."""
    model, layout = default_model()
    table = CostTable(
        np.array([1.0, 2.0]), np.array([[1.0, 2.0]] * 2), np.ones((1, NUM_ROWS, 2, 2)), np.ones((1, NUM_ROWS))
    )
    none, limit = np.zeros(1), np.full(1, NO_LIMIT, np.int64)
    pipeline = TunedPipeline(model, layout, table, (table,), none, none, np.zeros(1, np.int64), limit, True)
    tune(pipeline, Batch((Sample("a", 1, (1,)), Sample("b", 1, (1,)))), 2)
