"""Pack samples into microbatches by token budget, and split each module's part into sub-microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pipeloom.cost import CostModel
from pipeloom.errors import InputError
from pipeloom.packing.boundary import reach
from pipeloom.packing.loads import Loads, budget_tokens, cost_loads, module_lengths, token_loads
from pipeloom.packing.policies import PackingSpec, group, height_bound, reads_loads
from pipeloom.packing.replicas import assign_to_replicas
from pipeloom.packing.types import Microbatch, Packing, SubMicrobatch
from pipeloom.spec import Batch, Chunk, LayerSpec, Layout, ModelSpec, ModuleLayout, ModuleSpec, TensorShape, Workload

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


def packing_of(batch: Batch, model: ModelSpec, layout: Layout, members: tuple[tuple[int, ...], ...]) -> Packing:
    """Build the packing with the given samples in each microbatch; each module's part is split as the layout states."""
    modules = tuple(module.name for module in layout.modules)
    specs = tuple(model.module(name) for name in modules)
    limits = tuple(module.sub_microbatch for module in layout.modules)
    microbatches = []
    for samples in members:
        splitter = _Splitter(batch, samples, model)
        parts = tuple(
            splitter.split(module, _even_sizes(len(splitter.lengths[module.name]), limit), module.name)
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
        splitter = _Splitter(batch, members, model)
        split_parts = tuple(
            splitter.split(model.module(module.name), sizes, f"packing.counts[{m}].{module.name}")
            for module, sizes in zip(layout.modules, parts, strict=True)
        )
        microbatches.append(Microbatch(members, split_parts))
    modules = tuple(module.name for module in layout.modules)
    return Packing(batch, modules, tuple(microbatches), tuple(model.module(name).reads for name in modules))


def _even_sizes(total: int, limit: int | None) -> tuple[int, ...]:
    """Return the sizes of ``ceil(total / limit)`` parts, which differ by at most one (DIP section 4)."""
    if total == 0:
        return ()
    num_parts = 1 if limit is None else -(-total // limit)
    return tuple(total // num_parts + (part < total % num_parts) for part in range(num_parts))


class _Splitter:
    """Splits the instances of one microbatch's modules into sub-microbatches."""

    def __init__(self, batch: Batch, samples: tuple[int, ...], model: ModelSpec) -> None:
        self.model, self.samples = model, [batch.samples[i] for i in samples]
        self.lengths = {m.name: module_lengths(batch, samples, m) for m in model.modules}
        self.sources = {m.name: model.sources(m.name) if m.takes else m.after for m in model.modules}

    def split(self, module: ModuleSpec, sizes: tuple[int, ...], where: str) -> tuple[SubMicrobatch, ...]:
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


def default_model() -> tuple[ModelSpec, Layout]:
    """Return an encoder of images before a language model, on one rank: enough to pack by the sizes of samples."""
    layer = (LayerSpec("layer", TensorShape(("tokens", 1))),)
    modules = ModuleSpec("encoder", "images", layer), ModuleSpec("lm", "sequence", layer, ("encoder",))
    chunks = Chunk("encoder", (0, 0), 0), Chunk("lm", (0, 0), 0)
    layouts = ModuleLayout("encoder"), ModuleLayout("lm", ("encoder",))
    return ModelSpec("plain", modules), Layout(1, layouts, chunks)


@dataclass(frozen=True)
class PackedReplica:
    """The packing of one replica's share of a batch."""

    replica: int
    loads: Loads
    packing: Packing
    planned_s: float | None = None
    """Planned seconds of the iteration, if the packing was tuned."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the totals and loads of each microbatch."""
        mean = self.loads.backbone.sum() / len(self.packing.microbatches)
        rows = []
        for number, microbatch in enumerate(self.packing.microbatches):
            members = list(microbatch.samples)
            load = float(self.loads.backbone[members].sum())
            rows.append(
                {
                    "iteration": self.packing.batch.iteration,
                    "replica": self.replica,
                    "microbatch": number,
                    "num_samples": len(members),
                    "num_tokens": int(self.loads.tokens[members].sum()),
                    "num_images": sum(len(self.packing.batch.samples[i].image_tokens) for i in members),
                    "load": load,
                    "load_over_mean": load / mean if mean else 1.0,
                    "encoder_load": float(self.loads.encoder[members].sum()),
                }
            )
        return rows

    def summary(self) -> dict[str, Any]:
        """Return the heaviest microbatch's load, and its gap to the lower bound."""
        rows = self.rows()
        heaviest = max(row["load"] for row in rows)
        bound = height_bound(self.loads.backbone, len(rows))
        planned = {} if self.planned_s is None else {"planned_s": self.planned_s}
        return {
            "iteration": self.packing.batch.iteration,
            "replica": self.replica,
            "num_microbatches": len(rows),
            "load": float(self.loads.backbone.sum()),
            "heaviest": heaviest,
            "lower_bound": bound,
            "gap": heaviest / bound - 1 if bound else 0.0,
        } | planned


def pack_replicas(
    batch: Batch, model: ModelSpec, layout: Layout, spec: PackingSpec, num_replicas: int, costs: CostModel | None = None
) -> list[PackedReplica]:
    """Assign a batch to replicas by loads, and pack each replica's samples by the policy.

    Loads are seconds if there are ``costs``, else tokens and ``spec.attention_tokens``.
    """

    def loads_of(part: Batch) -> Loads:
        if costs is None:
            return token_loads(part, model, spec.attention_tokens)
        return cost_loads(part, model, layout, costs)

    packed = []
    for replica, members in enumerate(assign_to_replicas(loads_of(batch), num_replicas, spec.seed)):
        part = batch.part(members)
        loads = loads_of(part)
        packed.append(PackedReplica(replica, loads, pack(part, model, layout, spec, loads)))
    return packed
