"""The layout of a training run, chosen by planning the batches that were profiled (`dip.txt` section 4, and beyond)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from pipeloom.cost import ProfileCosts
from pipeloom.cost.dealt import DealtCosts, dealt_sum_s
from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import profiled_layers, single_rank, sub_microbatch_size
from pipeloom.layout.arrangements import arrangements
from pipeloom.layout.choose import (
    Dealing,
    LayoutDraft,
    LayoutEvaluation,
    Sampled,
    closer_drafts,
    evaluate_layout,
    in_order,
    nearest,
    rank_drafts,
    resized,
    ring_seconds,
    search_layouts,
)
from pipeloom.layout.links import neighbours, on_ranks, rank_distances
from pipeloom.layout.modality import typical_lengths
from pipeloom.packing import Packing, PackingSpec, packed_batch
from pipeloom.packing.pack import MICROBATCHES_PER_RANK
from pipeloom.search import Evaluations, StoppingRule
from pipeloom.spec import DTYPE_BYTES, TRAITS, Batch, LayerSpec, Layout, ModelSpec, Parallelism
from pipeloom.taskgraph import Assignable
from pipeloom.taskgraph.iteration import MemoryLimit, iteration_graph

TRIAL = Evaluations(300)
"""Schedules tried for each layout and batch: a count, so that a resumed run comes to the layout that it had."""
SHORT = Evaluations(24)
"""Schedules tried for each of many arrangements, of which the best are tried for longer: the rule in several orders of
the microbatches, and static orders."""
FEW = 2
"""Batches under which many layouts are compared, and arrangements that are compared with other layouts."""
_SHARE_OF_SEARCH = 0.8
"""Of arranging, as it is shown; the rest is judging."""

Tell = Callable[[str, float | None], None]
"""Told what is being done, and which part of it is; None: that is not known."""


def _nobody(_text: str, _share: float | None) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Preview:
    """A training run to come, as its first batches show it.

    Attributes
    ----------
    costs : ProfileCosts
        Of the layers measured on the machine that trains, with all strategies that training offers.
    batches : sequence of Batch
        A few as training will see them.
    num_replicas : int
        Among which the batches are divided.
    capacity_bytes : int or None
        Memory of every rank.
    iterations : int or None
        How many there will be; None: many.
    num_tensor : int
        Tensor-parallel ranks of every pipeline rank.
    dealable : tuple of str
        Modules whose instances are tried dealt to these.
    """

    costs: ProfileCosts
    packing: PackingSpec
    batches: Sequence[Batch]
    num_ranks: int
    num_replicas: int = 1
    capacity_bytes: int | None = None
    iterations: int | None = None
    num_tensor: int = 1
    dealable: tuple[str, ...] = ()

    @property
    def model(self) -> ModelSpec:
        """What is trained."""
        return self.costs.model

    def packed(self) -> list[Packing]:
        """Pack the batches, in as many microbatches as for all ranks, modules undivided.

        Raises
        ------
        InputError
            There are none.
        """
        if not self.batches:
            raise InputError("batches", "is empty", "give at least one batch as training will see them")
        spec, whole = self.packing, single_rank(self.model, {})
        if spec.policy == "planned" and spec.num_microbatches is None:
            number = MICROBATCHES_PER_RANK * self.num_ranks * self.num_replicas
            spec = msgspec.structs.replace(spec, num_microbatches=number)
        return [packed_batch(batch, self.model, whole, self.costs, spec) for batch in self.batches]

    def graphs(self, layout: Layout) -> list[Assignable]:
        """Task graphs of one replica's iterations."""
        layout = self.over_tensor_ranks(layout)
        memory = MemoryLimit(self.capacity_bytes, host_bytes=self.costs.rank.host_capacity_bytes)
        packed = (packed_batch(self._share(b), self.model, layout, self.costs, self.packing) for b in self.batches)
        return [iteration_graph(layout, each, self.costs, self.model.name, memory) for each in packed]

    def sampled(self) -> Sampled:
        """The same for those who try layouts."""
        groups = [
            [packed.batch.samples[i] for i in microbatch.samples]
            for packed in self.packed()
            for microbatch in packed.microbatches
        ]
        gradient_bytes = _gradient_bytes(self.model)
        return Sampled(
            self.model,
            self.num_ranks,
            self.costs,
            self.costs.profile.load,
            typical_lengths(self.model, groups),
            self.graphs,
            lambda layout: (
                ring_seconds(layout, gradient_bytes, self.costs)
                + dealt_sum_s(self.over_tensor_ranks(layout), self.model, self.costs, _layer_bytes)
            ),
            self._dealing(),
        )

    def over_tensor_ranks(self, layout: Layout) -> Layout:
        """The layout with the tensor-parallel ranks of the run."""
        return msgspec.structs.replace(layout, parallelism=Parallelism(self.num_tensor, layout.parallelism.data))

    def _dealing(self) -> Dealing | None:
        """Dealt modules: each rank has its share of the instances, where it would else have all of them."""
        if self.num_tensor == 1 or not self.dealable:
            return None
        load, names = self.costs.profile.load, self.dealable
        costs = DealtCosts(self.costs, frozenset(names), self.num_tensor)
        return Dealing(names, costs, lambda name, layer: load(name, layer) / (self.num_tensor if name in names else 1))

    def layers(self, *, offloading: bool = True) -> LayerTable:
        """The measured profile as a layer table, all modules one chain, on the mean microbatch."""
        return profiled_layers(
            self.model,
            self.costs,
            self.packed(),
            self.num_ranks,
            num_replicas=self.num_replicas,
            capacity_bytes=self.capacity_bytes,
            offloading=offloading,
        )

    def tables(self) -> list[LayerTable]:
        """Layer tables to arrange for: without offloading, and, where there is room for what it stages, with it.

        Raises
        ------
        InfeasibleError
            One layer's computation does not fit.
        """
        away = [TRAITS[each].offloads for each in self.costs.strategies]
        if self.capacity_bytes is None or all(away) or not any(away):
            return [self.layers()]
        found = [self.layers(offloading=False)]
        with suppress(InfeasibleError):
            found.append(self.layers())
        return found

    def _share(self, batch: Batch) -> Batch:
        """What one replica gets of a batch, nearly."""
        if self.num_replicas == 1:
            return batch
        return msgspec.structs.replace(batch, samples=batch.samples[:: self.num_replicas])


def choose_training_layout(
    preview: Preview,
    *,
    budget: Evaluations | None = None,
    trial: StoppingRule = TRIAL,
    seed: int = 0,
    tell: Tell = _nobody,
) -> tuple[LayoutEvaluation, ...]:
    """Plan some batches of a training run under many layouts, the best arrangements among them.

    They are compared on the first few batches, and those that come nearest on all, so that the choice is not luck.

    Parameters
    ----------
    budget : Evaluations or None
        Arrangements tried, as in `arrange_training_layout`.
    trial : StoppingRule
        Search for each layout and batch.
    tell : callable
        Told how far it is.

    Returns
    -------
    tuple of LayoutEvaluation
        Fastest first; the first is the one to take.

    Raises
    ------
    InputError
        No batches, or a module has fewer layers than ranks.
    InfeasibleError
        Nothing that was tried fits.
    """
    few = dataclasses.replace(preview, batches=preview.batches[:FEW])
    sampled = preview.sampled()
    drafts: list[LayoutDraft] = []
    with suppress(InfeasibleError):
        found = arrange_training_layout(preview, budget=budget, trial=trial, seed=seed, tell=tell)
        drafts = [one.draft for one in nearest(found)[:FEW]]
    order = search_layouts(
        dataclasses.replace(sampled, graphs=few.graphs),
        trial=trial,
        seed=seed,
        drafts=drafts,
        on_tried=lambda count: tell(f"{count} layouts tried", None),
    )
    if len(preview.batches) <= FEW:
        return order
    near = nearest(order)
    # Other seeds than those by which they came near.
    again = [evaluate_layout(sampled, t.draft, trial, seed + len(preview.batches)) for t in near if not t.ruled_out]
    return (*in_order(again), *(t for t in order if t.ruled_out or t not in near))


def arrange_training_layout(
    preview: Preview,
    *,
    budget: Evaluations | None = None,
    trial: StoppingRule = TRIAL,
    seed: int = 0,
    tell: Tell = _nobody,
) -> tuple[LayoutEvaluation, ...]:
    """Choose partition and placement of all modules together, with a rule of order.

    Arrangements are searched for mean microbatches, and those that were found are judged on the batches as they are,
    with the strategies and the split backwards that training offers. Modules before the last are then tried in
    sub-microbatches. Orders of single batches are searched while training runs, and begin with the rule.

    Parameters
    ----------
    budget : Evaluations or None
        Arrangements tried; None: by the length of the run, up to some seconds.
    trial : StoppingRule
        Search for each of the best arrangements and each batch.
    tell : callable
        Told how far it is.

    Returns
    -------
    tuple of LayoutEvaluation
        Fastest first, each with its rule; the first is the one to take.

    Raises
    ------
    InputError
        No batches.
    InfeasibleError
        Nothing that was tried fits.
    """
    sampled = preview.sampled()
    distances = rank_distances(sampled.costs, sampled.num_ranks)
    found = arrangements(
        preview.tables(),
        preview.model,
        split=preview.costs.split_backward,
        iterations=preview.iterations,
        budget=budget,
        seed=seed,
        on_share=lambda share: tell("layers are arranged", _SHARE_OF_SEARCH * share),
    )

    # Arranged for ranks that are all as far from the next; then in the order in which they are close.
    ranks = neighbours(distances)
    drafts = []
    for draft in found:
        placed = on_ranks(draft.layout, ranks)
        drafts.append(LayoutDraft(draft.name, placed, None if draft.rule is None else draft.rule.moved_to(placed)))

    def judged(rows: Sequence[LayoutDraft], since: float, until: float) -> tuple[LayoutEvaluation, ...]:
        return rank_drafts(
            sampled,
            rows,
            short=SHORT,
            trial=trial,
            seed=seed,
            on_tried=lambda count: tell("arrangements are judged", since + (until - since) * count / len(rows)),
        )

    order = judged(drafts, _SHARE_OF_SEARCH, 0.9)
    cut = [*_in_parts(sampled, order[0]), *closer_drafts(nearest(order), distances)]
    if cut:
        try:
            order = (*order, *judged(cut, 0.9, 1.0))
        except InfeasibleError:
            return order
    return tuple(in_order(order))


def _in_parts(sampled: Sampled, best: LayoutEvaluation) -> Iterator[LayoutDraft]:
    """The best arrangement with sub-microbatches of the modules before the last."""
    for module in sampled.model.modules[:-1]:
        lengths = sampled.typical[module.name]
        if module.reads in ("sequence", "text") or not lengths:
            continue
        size = sub_microbatch_size(sampled.costs, module.name, len(module.flat_layers), lengths).chosen
        for each in (size, 2 * size):
            if each < len(lengths):
                name = f"{best.name}; {module.name} {each} each"
                yield LayoutDraft(name, resized(best.layout, module.name, each), best.rule)


def training_layers(preview: Preview) -> LayerTable:
    """Write a measured profile as a layer table, on microbatches as training will have them.

    Raises
    ------
    InputError
        No batches, or a model of several modules, which `pipeloom arrange` does not take.
    """
    if len(preview.model.modules) != 1:
        names = ", ".join(module.name for module in preview.model.modules)
        raise InputError(
            "model", f"has modules {names}", 'arrange takes one chain; in train.toml, use kind = "arranged"'
        )
    return preview.tables()[-1]


def _gradient_bytes(model: ModelSpec) -> dict[str, int]:
    return {module.name: sum(map(_layer_bytes, module.flat_layers)) for module in model.modules}


def _layer_bytes(layer: LayerSpec) -> int:
    return layer.num_parameters * DTYPE_BYTES[layer.output.dtype]
