"""The layout of a training run, chosen by planning the batches that were profiled (extends DIP section 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from pipeloom.cost import ProfileCosts
from pipeloom.cost.encoder_dp import EncoderDpCosts, encoder_dp_reduce_s
from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout import profiled_layers, single_rank, sub_microbatch_size
from pipeloom.layout.arrangements import arrangements
from pipeloom.layout.choose import (
    EncoderDp,
    LayoutDraft,
    LayoutEvaluation,
    LayoutProblem,
    closer_drafts,
    evaluate_layout,
    fitting,
    in_order,
    nearest,
    nearest_again,
    ring_seconds,
    search_layouts,
)
from pipeloom.layout.layouts import with_modules
from pipeloom.layout.links import neighbors, on_ranks, rank_distances
from pipeloom.layout.modality import typical_lengths
from pipeloom.packing import Packing, PackingSpec, packed_batch
from pipeloom.packing.pack import MICROBATCHES_PER_RANK
from pipeloom.search import Budget
from pipeloom.spec import DTYPE_BYTES, TRAITS, Batch, LayerSpec, Layout, ModelSpec, Parallelism
from pipeloom.taskgraph import Assignable
from pipeloom.taskgraph.iteration import MemoryLimit, iteration_graph

TRIAL = Budget(evaluations=300)
"""Schedules tried for each layout and batch. A count, so that a resumed run chooses the same layout."""
SHORT = Budget(evaluations=24)
"""Schedules tried for each co-optimized layout before the best get more: the rule in several orders of the
microbatches, and static orders."""
FEW = 2
"""Number of batches to compare many layouts on, and number of co-optimized layouts among them."""
_SHARE_OF_SEARCH = 0.8
"""Fraction of the displayed progress for the co-optimization. The rest is for the evaluation."""

Tell = Callable[[str, float | None], None]
"""Progress callback: a description, and the fraction that is done or None if it is unknown."""


def _silent(_text: str, _share: float | None) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Preview:
    """A planned training run, represented by its first batches.

    Attributes
    ----------
    costs : ProfileCosts
        Costs measured on the training machine, with all strategies that training offers.
    batches : sequence of Batch
        A few batches of the training data.
    num_replicas : int
        Number of replicas that share each batch.
    capacity_bytes : int or None
        Memory of every rank. None: no limit.
    iterations : int or None
        Length of the run. None: no limit on the search.
    num_tensor : int
        Number of tensor-parallel ranks in each pipeline rank.
    dealable : tuple of str
        Modules that are tried with encoder data parallelism over the tensor ranks.
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
        """The model that is trained."""
        return self.costs.model

    def packed(self) -> list[Packing]:
        """Pack the batches of all replicas, without sub-microbatches.

        Raises
        ------
        InputError
            There are no batches.
        """
        if not self.batches:
            raise InputError("batches", "is empty", "give at least one batch as training will see them")
        spec, whole = self.packing, single_rank(self.model, {})
        if spec.policy == "planned" or spec.num_microbatches is not None:
            number = spec.num_microbatches or MICROBATCHES_PER_RANK * self.num_ranks
            spec = msgspec.structs.replace(spec, num_microbatches=number * self.num_replicas)
        return [packed_batch(batch, self.model, whole, self.costs, spec) for batch in self.batches]

    def graphs(self, layout: Layout) -> list[Assignable]:
        """Return the task graphs of the iterations of one replica."""
        layout = self.over_tensor_ranks(layout)
        memory = MemoryLimit(self.capacity_bytes, host_bytes=self.costs.rank.host_capacity_bytes)
        packed = (packed_batch(self._share(b), self.model, layout, self.costs, self.packing) for b in self.batches)
        return [iteration_graph(layout, each, self.costs, self.model.name, memory) for each in packed]

    def sampled(self) -> LayoutProblem:
        """Return the problem for which layouts are tried."""
        groups = [
            [packed.batch.samples[i] for i in microbatch.samples]
            for packed in self.packed()
            for microbatch in packed.microbatches
        ]
        gradient_bytes = _gradient_bytes(self.model)
        return LayoutProblem(
            self.model,
            self.num_ranks,
            self.costs,
            self.costs.profile.load,
            typical_lengths(self.model, groups),
            self.graphs,
            lambda layout: (
                ring_seconds(layout, gradient_bytes, self.costs)
                + encoder_dp_reduce_s(self.over_tensor_ranks(layout), self.model, self.costs, _layer_bytes)
            ),
            self._encoder_dp(),
        )

    def over_tensor_ranks(self, layout: Layout) -> Layout:
        """Return the layout with the tensor-parallel ranks of the run."""
        return msgspec.structs.replace(layout, parallelism=Parallelism(self.num_tensor, layout.parallelism.data))

    def _encoder_dp(self) -> EncoderDp | None:
        """Return encoder data parallelism, where each tensor rank has a share of the instances instead of all."""
        if self.num_tensor == 1 or not self.dealable:
            return None
        load, names = self.costs.profile.load, self.dealable
        costs = EncoderDpCosts(self.costs, frozenset(names), self.num_tensor)
        return EncoderDp(
            names, costs, lambda name, layer: load(name, layer) / (self.num_tensor if name in names else 1)
        )

    def layers(self, *, offloading: bool = True) -> LayerTable:
        """Return the measured profile as a layer table for the mean microbatch. All modules form one chain."""
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
        """Return the layer tables to co-optimize: without offloading and, if its staging memory fits, with it.

        Raises
        ------
        InfeasibleError
            The computation of one layer does not fit.
        """
        away = [TRAITS[each].offloads for each in self.costs.strategies]
        if self.capacity_bytes is None or all(away) or not any(away):
            return [self.layers()]
        found = [self.layers(offloading=False)]
        with suppress(InfeasibleError):
            found.append(self.layers())
        return found

    def _share(self, batch: Batch) -> Batch:
        """Return approximately the share of a batch that one replica gets."""
        if self.num_replicas == 1:
            return batch
        return msgspec.structs.replace(batch, samples=batch.samples[:: self.num_replicas])


def choose_training_layout(
    preview: Preview, *, evaluations: int | None = None, trial: Budget = TRIAL, seed: int = 0, tell: Tell = _silent
) -> tuple[LayoutEvaluation, ...]:
    """Plan some batches of a training run under many layouts, including the best co-optimized ones.

    All layouts are compared on the first few batches, and the best on all batches. The parameters, results and errors
    are those of `arrange_training_layout`. Also raises `InputError` if a module has fewer layers than ranks.
    """
    few = dataclasses.replace(preview, batches=preview.batches[:FEW])
    sampled = preview.sampled()
    drafts: list[LayoutDraft] = []
    with suppress(InfeasibleError):
        found = arrange_training_layout(preview, evaluations=evaluations, trial=trial, seed=seed, tell=tell)
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
    near = sum(not t.ruled_out for t in nearest(order))
    again: dict[str, LayoutEvaluation] = {}
    for number, each in enumerate(order):
        # A larger batch may fit under none of the nearest layouts; the next ones then follow.
        if number >= near and any(not t.problem for t in again.values()):
            break
        if not each.problem:
            # Other seeds than those of the comparison.
            again[each.name] = evaluate_layout(sampled, each.draft, trial, seed + len(preview.batches))
    return (*fitting(again.values()), *(t for t in order if t.name not in again))


def arrange_training_layout(
    preview: Preview, *, evaluations: int | None = None, trial: Budget = TRIAL, seed: int = 0, tell: Tell = _silent
) -> tuple[LayoutEvaluation, ...]:
    """Choose partition, placement and a priority rule for all modules together.

    The layouts are searched for mean microbatches and evaluated on the given batches, with the strategies and split
    backwards that training offers. Sub-microbatches of the modules before the last are tried afterwards. During
    training, the search for each batch starts with the rule.

    Parameters
    ----------
    evaluations : int or None
        Number of layouts to try. None: by the length of the run, up to some seconds.
    trial : Budget
        Search budget for each of the best layouts and each batch.
    tell : callable
        Progress callback.

    Returns
    -------
    tuple of LayoutEvaluation
        Fastest first, each with its rule.

    Raises
    ------
    InputError
        No batches.
    InfeasibleError
        No layout that was tried fits.
    """
    sampled = preview.sampled()
    distances = rank_distances(sampled.costs, sampled.num_ranks)
    found = arrangements(
        preview.tables(),
        preview.model,
        split=preview.costs.split_backward,
        iterations=preview.iterations,
        evaluations=evaluations,
        seed=seed,
        on_share=lambda share: tell("searching layouts", _SHARE_OF_SEARCH * share),
    )

    # The search assumes equal links; neighboring stages are then placed on ranks with fast links.
    ranks = neighbors(distances)
    drafts = []
    for draft in found:
        placed = on_ranks(draft.layout, ranks)
        drafts.append(LayoutDraft(draft.name, placed, None if draft.rule is None else draft.rule.moved_to(placed)))

    def judged(rows: Sequence[LayoutDraft], since: float, until: float) -> tuple[LayoutEvaluation, ...]:
        made = []
        for draft in rows:
            made.append(evaluate_layout(sampled, draft, SHORT, seed))
            tell("evaluating layouts", since + (until - since) * len(made) / len(rows))
        return nearest_again(sampled, fitting(made), trial, seed)

    order = judged(drafts, _SHARE_OF_SEARCH, 0.9)
    cut = [*_in_parts(sampled, order[0]), *closer_drafts(nearest(order), distances)]
    if cut:
        try:
            order = (*order, *judged(cut, 0.9, 1.0))
        except InfeasibleError:
            return order
    return tuple(in_order(order))


def _in_parts(sampled: LayoutProblem, best: LayoutEvaluation) -> Iterator[LayoutDraft]:
    """Yield the best layout with sub-microbatches of the modules before the last."""
    for module in sampled.model.modules[:-1]:
        lengths = sampled.typical[module.name]
        if module.reads in ("sequence", "text") or not lengths:
            continue
        size = sub_microbatch_size(sampled.costs, module.name, len(module.flat_layers), lengths).chosen
        for each in (size, 2 * size):
            if each < len(lengths):
                name = f"{best.name}; {module.name} {each} each"
                layout = with_modules(best.layout, [module.name], sub_microbatch=each)
                yield LayoutDraft(name, layout, best.rule)


def training_layers(preview: Preview) -> LayerTable:
    """Return a measured profile as a layer table for the microbatches of training.

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
