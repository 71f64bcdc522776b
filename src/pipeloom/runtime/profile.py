"""Measure a model's layers on real batches, and fit the profile that planning asks."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from pipeloom.arrange import ModulePlacement, single_rank, typical_seconds
from pipeloom.cost import LayerMeasurement, Profile, ProfileCosts, fit_profile
from pipeloom.errors import InputError
from pipeloom.packing import PackingSpec, budget_tokens, check_budget, pack
from pipeloom.runtime.measure import measure_layers
from pipeloom.runtime.model import Model
from pipeloom.runtime.prefetch import Describe, batch_of
from pipeloom.spec import Batch

_NUM_SIZES = 4


def profile_model(
    model: Model,
    batches: Sequence[Sequence[Any]],
    *,
    describe: Describe | None = None,
    packing: PackingSpec,
    placements: Mapping[str, ModulePlacement],
    machine: str = "",
    repeats: int = 5,
    metadata: Sequence[Batch] | None = None,
    all_sizes: bool = False,
    strategies: bool = False,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
) -> Profile:
    """Time every kind of layer on the microbatches that some batches give, and fit its cost.

    Parameters
    ----------
    model : Model
    batches : sequence of sequence of samples
        A few batches as training will see them; the more they differ, the better the fit.
    describe : callable or None
        From a sample to its metadata; None: the batches are those of `Prefetched`, or ``metadata`` is given.
    packing : PackingSpec
    placements : dict
        Sub-microbatch sizes, so that layers are timed on the parts that they will get.
    machine : str
        Name of the machine, kept in the profile; empty: what the system says.
    repeats : int
        Timed runs of each layer on each part; the median counts.
    metadata : sequence of Batch or None
        What ``describe`` says of the batches, where that is known already.
    all_sizes : bool
        Pack each further batch into microbatches half as large as the one before, down to an eighth, then begin
        again: for tuning, which chooses sizes and so must know what small ones cost (PipeTune A.4 sweeps sizes).
    strategies : bool
        Measure memory strategies, split backwards and workspaces too, so that plans may choose among them.
    device : torch.device or str
        On which layers are timed.
    autocast : torch.dtype or None
        Precision of autocast regions, as in training.

    Raises
    ------
    InputError
        When a layer gives another shape than the model states, or a batch cannot be packed.
    """
    layout = single_rank(model.spec, placements)
    if metadata is None:
        metadata = [batch_of(samples, describe, i) for i, samples in enumerate(batches)]
    measured: list[LayerMeasurement] = []
    for number, (batch, samples) in enumerate(zip(metadata, batches, strict=True)):
        size = packing
        if all_sizes:
            longest = int(budget_tokens(batch, model.spec).max())
            smaller = packing.token_budget >> number % _NUM_SIZES
            size = msgspec.structs.replace(packing, token_budget=max(smaller, longest))
            check_budget(batch, model.spec, packing.token_budget)
        packed = pack(batch, model.spec, layout, size)
        measured += measure_layers(
            model, packed, samples, repeats=repeats, known=measured, strategies=strategies, device=device,
            autocast=autocast,
        )  # fmt: skip
    seen = {row.module for row in measured}
    for module in model.spec.modules:
        if module.name not in seen:
            raise InputError(
                f"module {module.name!r}", f"had nothing to do in the {len(batches)} batches that were measured",
                "measure batches in which it has: shuffle the data, or begin with such a batch",
            )  # fmt: skip
    profile = fit_profile(measured, machine or f"{platform.machine()} {platform.processor()}".strip())
    costs = ProfileCosts(model.spec, profile)
    typical = typical_seconds(model.spec, costs, metadata, packing, placements)
    return msgspec.structs.replace(profile, typical_s=typical)
