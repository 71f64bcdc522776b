"""Pack samples into microbatches by token budget, and split each module's part into sub-microbatches."""

from __future__ import annotations

import msgspec

from pipeloom.cost import CostModel
from pipeloom.errors import InputError
from pipeloom.packing.boundary import reach
from pipeloom.packing.loads import Loads, budget_tokens, cost_loads, module_lengths, token_loads
from pipeloom.packing.policies import PackingSpec, group, reads_loads
from pipeloom.packing.types import Microbatch, Packing, SubMicrobatch
from pipeloom.spec import Batch, Layout, ModelSpec, ModuleSpec, Workload

MICROBATCHES_PER_RANK = 2
"""The number of microbatches per rank that a planned packing tries first."""


def pack(batch: Batch, model: ModelSpec, layout: Layout, spec: PackingSpec, loads: Loads | None = None) -> Packing:
    """Pack a batch into microbatches and sub-microbatches.

    Parameters
    ----------
    layout : Layout
        States how many instances a sub-microbatch of each module holds at most (DIP section 4).
    loads : Loads or None
        Work of the samples (see `cost_loads`). None: computed from tokens and ``spec.attention_tokens``.

    Returns
    -------
    Packing
        Every sample is in exactly one microbatch. Within a microbatch, samples keep the batch's order.

    Raises
    ------
    InputError
        If a single sample exceeds the token budget. The message names it; no sample is dropped.
    """
    check_budget(batch, model, spec.token_budget)
    if loads is None:
        loads = token_loads(batch, model, spec.attention_tokens)
    if spec.policy == "planned" and spec.num_microbatches is None:
        # Without a planner, use the number that a planner tries first.
        spec = msgspec.structs.replace(spec, num_microbatches=MICROBATCHES_PER_RANK * layout.num_ranks)
    return packing_of(batch, model, layout, group(loads, spec, batch.iteration))


def packing_of(batch: Batch, model: ModelSpec, layout: Layout, groups: tuple[tuple[int, ...], ...]) -> Packing:
    """Build the packing with the taken samples in each microbatch; each module's part is split as the layout states."""
    modules = tuple(module.name for module in layout.modules)
    specs = tuple(model.module(name) for name in modules)
    limits = tuple(module.sub_microbatch for module in layout.modules)
    microbatches = []
    for samples in groups:
        cutter = _Cutter(batch, samples, model)
        parts = tuple(
            cutter.cut(module, _even_sizes(len(cutter.lengths[module.name]), limit), module.name)
            for module, limit in zip(specs, limits, strict=True)
        )
        microbatches.append(Microbatch(samples, parts))
    return Packing(batch, modules, tuple(microbatches), tuple(module.reads for module in specs))


def check_budget(batch: Batch, model: ModelSpec, token_budget: int) -> None:
    """Raise `InputError` if a single sample exceeds the budget; the message names it."""
    for i, count in enumerate(budget_tokens(batch, model).tolist()):
        if count > token_budget:
            raise InputError(
                f"batch.samples[{i}] ({batch.samples[i].id!r})",
                f"{count} tokens exceed the token budget of {token_budget}",
                "raise packing.token_budget, or shorten or split the sample",
            )


def packing_from_counts(
    batch: Batch,
    model: ModelSpec,
    layout: Layout,
    samples: tuple[tuple[int, ...], ...],
    counts: tuple[tuple[tuple[int, ...], ...], ...],
) -> Packing:
    """Rebuild a packing from the sample positions and sub-microbatch sizes in a plan.

    Raises
    ------
    InputError
        If a sample is missing, duplicated or unknown, or the sizes do not add up to the number of instances. A plan
        must never run on other data than it was made for.
    """
    flat = sorted(i for members in samples for i in members)
    if flat != list(range(len(batch.samples))):
        raise InputError("packing.samples", "are not exactly the samples of the batch", "plan this batch anew")
    if len(counts) != len(samples):
        raise InputError("packing.counts", f"has {len(counts)} microbatches, samples has {len(samples)}")
    microbatches = []
    for m, (members, parts) in enumerate(zip(samples, counts, strict=True)):
        if len(parts) != len(layout.modules):
            raise InputError(f"packing.counts[{m}]", f"has {len(parts)} modules, the layout {len(layout.modules)}")
        cutter = _Cutter(batch, members, model)
        cuts = tuple(
            cutter.cut(model.module(module.name), sizes, f"packing.counts[{m}].{module.name}")
            for module, sizes in zip(layout.modules, parts, strict=True)
        )
        microbatches.append(Microbatch(members, cuts))
    modules = tuple(module.name for module in layout.modules)
    return Packing(batch, modules, tuple(microbatches), tuple(model.module(name).reads for name in modules))


def _even_sizes(total: int, limit: int | None) -> tuple[int, ...]:
    """Return the sizes of ``ceil(total / limit)`` parts, which differ by at most one (DIP section 4)."""
    if total == 0:
        return ()
    num_parts = 1 if limit is None else -(-total // limit)
    return tuple(total // num_parts + (part < total % num_parts) for part in range(num_parts))


class _Cutter:
    """Splits the instances of one microbatch's modules into sub-microbatches."""

    def __init__(self, batch: Batch, samples: tuple[int, ...], model: ModelSpec) -> None:
        self.model, self.samples = model, [batch.samples[i] for i in samples]
        self.lengths = {m.name: module_lengths(batch, samples, m) for m in model.modules}
        self.sources = {m.name: model.sources(m.name) if m.takes else m.after for m in model.modules}

    def cut(self, module: ModuleSpec, sizes: tuple[int, ...], where: str) -> tuple[SubMicrobatch, ...]:
        lengths = self.lengths[module.name]
        if sum(sizes) != len(lengths) or any(size < 1 for size in sizes):
            raise InputError(where, f"{list(sizes)} does not divide {len(lengths)} instances into non-empty parts")
        parts, first = [], 0
        for size in sizes:
            taken = tuple(self._taken(name, module, first, size) for name in self.sources[module.name])
            parts.append(SubMicrobatch(first, size, Workload(lengths[first : first + size], taken)))
            first += size
        return tuple(parts)

    def _taken(self, name: str, module: ModuleSpec, first: int, size: int) -> tuple[int, int]:
        """Return the sequences and tokens that a sub-microbatch takes from another module."""
        begin, count = reach(self.samples, self.model.module(name).reads, module.reads, first, size)
        return count, sum(self.lengths[name][begin : begin + count])


def packed_batch(batch: Batch, model: ModelSpec, layout: Layout, costs: CostModel, packing: PackingSpec) -> Packing:
    """Pack a batch by its policy, as training under this layout packs it."""
    loads = cost_loads(batch, model, layout, costs) if reads_loads(packing.policy) else None
    return pack(batch, model, layout, packing, loads)
