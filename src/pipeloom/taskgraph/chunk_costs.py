"""Costs of chunks as a task graph holds them: candidates, nanoseconds and bytes, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipeloom.cost import CostModel, StrategyCost, link_table, slowness_of
from pipeloom.spec import Chunk, Layout, Workload, strategy_word
from pipeloom.taskgraph.candidates import Candidate
from pipeloom.totals import to_ns

BackwardForm = Literal["whole", "split", "either"]
"""Whether backwards are one task, two tasks, or either, as the schedule chooses."""


class PairCosts(NamedTuple):
    """Candidates of a pair and the form of its backward."""

    candidates: tuple[Candidate, ...]
    word: str
    """Strategy of the first candidate, as plans write it."""
    split: bool
    """Whether the backward is I and W."""


class ChunkCosts:
    """A cost model for the chunks of one layout.

    Caches hold one answer for all chunks that cost the same. They are keyed by workload first, so that a workload's
    lengths are hashed once for all chunks. ``link`` has the number of the link between any two ranks.
    """

    def __init__(self, layout: Layout, costs: CostModel, form: BackwardForm) -> None:
        self.layout, self.costs, self.form = layout, costs, form
        self.link = link_table(costs, layout.num_ranks)
        self.num_links = int(self.link.max()) + 1
        # Chunks with the same layers on equally fast ranks cost the same: map each to the first of them.
        first: dict[tuple[str, tuple[int, int], float], int] = {}
        self._same_as = [
            first.setdefault((chunk.module, chunk.layers, slowness_of(costs, chunk.rank)), number)
            for number, chunk in enumerate(layout.chunks)
        ]
        self._costs: dict[Workload, dict[int, tuple[StrategyCost, ...]]] = {}
        self._pair_costs: dict[Workload, dict[int, PairCosts]] = {}
        self._output_bytes: dict[Workload, dict[int, int]] = {}
        self._candidates: dict[tuple[int, bool], tuple[tuple[Candidate, ...], str]] = {}
        self._transfer_ns: dict[int, tuple[int, ...]] = {}

    def chunk_costs(self, chunk: int, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return the costs of a chunk on a workload, one entry per strategy."""
        known = self._costs.setdefault(workload, {})
        same = self._same_as[chunk]
        if same not in known:
            known[same] = self.costs.chunk_costs(self.layout.chunks[chunk], workload)
        return known[same]

    def seconds(self, chunk: int, workload: Workload) -> float:
        """Return the time of forward and backward under the first strategy."""
        base = self.chunk_costs(chunk, workload)[0]
        return base.forward_s + base.backward_s

    def pair_costs(self, chunks: Sequence[int], microbatch: int, workload: Workload, trained: bool) -> list[PairCosts]:
        """Return the costs of every pair of one pass; ``trained`` is whether the module has a backward."""
        known, found = self._pair_costs.setdefault(workload, {}), []
        for chunk in chunks:
            same = self._same_as[chunk]
            if same not in known:
                base = self.chunk_costs(chunk, workload)[0]
                split = trained and self.form != "whole" and base.backward_weight_s is not None
                name = f"{self.layout.chunks[chunk].module}, chunk {chunk}, microbatch {microbatch}"
                known[same] = PairCosts(*self._convert(chunk, workload, split, name), split)
            found.append(known[same])
        return found

    def options_by_rank(self, chunk: int, workload: Workload, split: bool) -> tuple[tuple[Candidate, ...], ...]:
        """Return the candidates of a pair on each rank; empty for pipelined modules and for equally fast ranks."""
        here = self.layout.chunks[chunk]
        if not self.costs.slowness or not self.is_replicated(here):
            return ()
        chunks = sorted(self.layout.chunks_of(here.module), key=lambda c: self.layout.chunks[c].rank)
        return tuple(self._convert(c, workload, split, f"{here.module}, chunk {c}")[0] for c in chunks)

    def _convert(self, chunk: int, workload: Workload, split: bool, name: str) -> tuple[tuple[Candidate, ...], str]:
        """Return the candidates and the word for the first one; errors give ``name``."""
        options = self.chunk_costs(chunk, workload)
        # `_costs` keeps these options alive, so that their identity stays unique.
        known = self._candidates.get((id(options), split))
        if known is None:
            forms = (True, False) if split and self.form == "either" else (split,)
            made = tuple(_candidate(option, split, form, name) for option in options for form in forms)
            known = self._candidates[id(options), split] = made, strategy_word(made[0].strategy, made[0].layers)
        return known

    def delay_ns(self, upper: int, lower: int, workload: Workload, stream: str = "") -> tuple[int, tuple[int, ...]]:
        """Return the delay between two chunks where they are, and the delay over each link.

        The latter is zero where both chunks are on one rank and stay there.
        """
        above, below = self.layout.chunks[upper], self.layout.chunks[lower]
        same_rank = above.rank == below.rank
        if same_rank and not self.is_replicated(above) and not self.is_replicated(below):
            return 0, (0,) * self.num_links
        size = self.num_bytes(upper, workload, stream)
        if size not in self._transfer_ns:
            name, links = f"a message of {size} bytes", range(self.num_links)
            self._transfer_ns[size] = tuple(to_ns(self.costs.transfer_s(size, link), name) for link in links)
        by_link = self._transfer_ns[size]
        return (0 if same_rank else by_link[self.link[above.rank, below.rank]]), by_link

    def num_bytes(self, chunk: int, workload: Workload, stream: str) -> int:
        """Return the size of a stream, or of a chunk's output if ``stream`` is empty."""
        if stream:
            return self.costs.stream_bytes(stream, workload)
        known = self._output_bytes.setdefault(workload, {})
        same = self._same_as[chunk]
        if same not in known:
            known[same] = self.costs.boundary_bytes(self.layout.chunks[chunk], workload)
        return known[same]

    def is_replicated(self, chunk: Chunk) -> bool:
        """Return whether another rank could compute the same sub-microbatch."""
        return self.layout.module(chunk.module).on_ranks == "replicated"


def _candidate(cost: StrategyCost, split: bool, in_halves: bool, name: str) -> Candidate:
    """Make one candidate; errors give ``name``.

    A pair with I and W (``split``) has its backward either in both of them (``in_halves``) or all in I.
    """
    weight_gradient = cost.activation_bytes if cost.weight_gradient_bytes is None else cost.weight_gradient_bytes
    inputs, weights = cost.backward_s, 0.0
    # A strategy without separate times keeps its backward whole.
    if in_halves and cost.backward_input_s is not None:
        inputs, weights = cost.backward_input_s, cost.backward_weight_s or 0.0
    elif split and not in_halves:
        weight_gradient = 0
    return Candidate(
        cost.strategy,
        to_ns(cost.forward_s, f"{name}: forward_s"),
        to_ns(inputs, f"{name}: backward_s"),
        to_ns(weights, f"{name}: backward_weight_s"),
        cost.activation_bytes,
        weight_gradient,
        cost.layers,
        cost.host_bytes,
    )
