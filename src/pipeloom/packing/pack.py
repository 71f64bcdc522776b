"""Pack samples into microbatches by token budget, and split each module's part into sub-microbatches."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.errors import InputError
from pipeloom.packing.types import Microbatch, Packing, SubMicrobatch
from pipeloom.spec import Batch, Layout, ModelSpec, ModuleSpec, Workload

Policy = Literal["first_fit", "first_fit_decreasing"]


class PackingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How samples become microbatches."""

    token_budget: int
    """Backbone tokens of one microbatch at most: text and images, or, where the last module reads videos, theirs."""
    policy: Policy = "first_fit_decreasing"
    """``first_fit`` keeps the loader's order; ``first_fit_decreasing`` packs long samples first."""

    def __post_init__(self) -> None:
        """Refuse empty budgets."""
        if self.token_budget < 1:
            raise InputError("packing.token_budget", f"{self.token_budget} is below 1")


def pack(batch: Batch, model: ModelSpec, layout: Layout, spec: PackingSpec) -> Packing:
    """Pack a batch into microbatches and sub-microbatches.

    Parameters
    ----------
    batch : Batch
    model : ModelSpec
        Says which part of a sample each module reads.
    layout : Layout
        Says how many instances a sub-microbatch of each module holds at most (DIP section 4).
    spec : PackingSpec

    Returns
    -------
    Packing
        Every sample is in exactly one microbatch; within one, samples keep the batch's order.

    Raises
    ------
    InputError
        When a sample alone exceeds the token budget; it is named, and nothing is dropped.
    """
    bins = _first_fit(batch, model, spec)
    modules = tuple(module.name for module in layout.modules)
    specs = tuple(model.module(name) for name in modules)
    limits = tuple(module.sub_microbatch for module in layout.modules)
    microbatches = tuple(
        Microbatch(
            samples=samples,
            parts=tuple(_split(batch, samples, m, b) for m, b in zip(specs, limits, strict=True)),
        )
        for samples in bins
    )
    return Packing(batch=batch, modules=modules, microbatches=microbatches)


def packing_from_counts(
    batch: Batch, model: ModelSpec, layout: Layout, samples: tuple[tuple[int, ...], ...],
    counts: tuple[tuple[tuple[int, ...], ...], ...],
) -> Packing:  # fmt: skip
    """Rebuild a packing from sample positions and sub-microbatch sizes, as a plan delivers them.

    Raises
    ------
    InputError
        When a sample is lost, doubled or unknown, or the sizes do not add up to the instances at hand: a
        plan for other data than these must never be run.
    """
    flat = sorted(i for group in samples for i in group)
    if flat != list(range(len(batch.samples))):
        raise InputError(
            "packing.samples", "are not exactly the samples of the batch", "plan this batch anew"
        )
    if len(counts) != len(samples):
        raise InputError("packing.counts", f"has {len(counts)} microbatches, samples has {len(samples)}")
    microbatches = []
    for m, (group, parts) in enumerate(zip(samples, counts, strict=True)):
        if len(parts) != len(layout.modules):
            raise InputError(
                f"packing.counts[{m}]", f"has {len(parts)} modules, the layout {len(layout.modules)}"
            )
        microbatches.append(
            Microbatch(
                samples=group,
                parts=tuple(
                    _cut(
                        _lengths(batch, group, model.module(module.name)),
                        sizes,
                        f"packing.counts[{m}].{module.name}",
                    )
                    for module, sizes in zip(layout.modules, parts, strict=True)
                ),
            )
        )
    return Packing(batch, tuple(module.name for module in layout.modules), tuple(microbatches))


def _first_fit(batch: Batch, model: ModelSpec, spec: PackingSpec) -> list[tuple[int, ...]]:
    backbone = model.modules[-1]
    if backbone.reads == "videos":
        tokens = [sum(backbone.instance_lengths(sample)) for sample in batch.samples]
    else:
        tokens = [sample.sequence_tokens for sample in batch.samples]
    for i, count in enumerate(tokens):
        if count > spec.token_budget:
            raise InputError(
                f"batch.samples[{i}] ({batch.samples[i].id!r})",
                f"{count} tokens exceed the token budget of {spec.token_budget}",
                "raise packing.token_budget, or shorten the sample",
            )
    order = list(range(len(tokens)))
    if spec.policy == "first_fit_decreasing":
        order.sort(key=lambda i: -tokens[i])
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, free in enumerate(room):
            if tokens[i] <= free:
                bins[b].append(i)
                room[b] -= tokens[i]
                break
        else:
            bins.append([i])
            room.append(spec.token_budget - tokens[i])
    return [tuple(sorted(members)) for members in bins]


def _lengths(batch: Batch, samples: tuple[int, ...], module: ModuleSpec) -> tuple[int, ...]:
    return tuple(n for i in samples for n in module.instance_lengths(batch.samples[i]))


def _split(
    batch: Batch, samples: tuple[int, ...], module: ModuleSpec, limit: int | None
) -> tuple[SubMicrobatch, ...]:
    """Cut into ``ceil(N / B)`` parts whose sizes differ by at most one (DIP section 4)."""
    lengths = _lengths(batch, samples, module)
    total = len(lengths)
    if total == 0:
        return ()
    num_parts = 1 if limit is None else -(-total // limit)
    sizes = tuple(total // num_parts + (part < total % num_parts) for part in range(num_parts))
    return _cut(lengths, sizes, module.name)


def _cut(lengths: tuple[int, ...], sizes: tuple[int, ...], where: str) -> tuple[SubMicrobatch, ...]:
    if sum(sizes) != len(lengths) or any(size < 1 for size in sizes):
        raise InputError(
            where, f"{list(sizes)} does not divide {len(lengths)} instances into non-empty parts"
        )
    parts, first = [], 0
    for size in sizes:
        parts.append(SubMicrobatch(first, size, Workload(lengths[first : first + size])))
        first += size
    return tuple(parts)
