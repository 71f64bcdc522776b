"""Choice of a layout by planning sampled iterations."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import by_time, replica_seconds
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, assignable_of
from pipeloom.cost.encoder_dp import EncoderDpCosts
from pipeloom.errors import InputError
from pipeloom.layout.choose import TRIAL, EncoderDp, LayoutEvaluation, LayoutProblem, search_layouts
from pipeloom.layout.modality import typical_lengths
from pipeloom.search import Budget


def choose_layout(
    setting: ModelOnCluster,
    batches: Sequence[Microbatches],
    *,
    trial: Budget = TRIAL,
    final: Budget | None = None,
    seed: int = 0,
    rounds: int = 2,
) -> tuple[LayoutEvaluation, ...]:
    """Plan a few representative iterations under many layouts; see `search_layouts`."""
    if not batches:
        raise InputError("batches", "is empty", "give at least one sampled iteration")
    return search_layouts(sampled_setting(setting, batches), trial=trial, final=final, seed=seed, rounds=rounds)


def sampled_setting(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> LayoutProblem:
    """Return sampled iterations for `search_layouts`."""
    pooled = [microbatch for batch in batches for microbatch in batch]
    return LayoutProblem(
        setting.model,
        setting.num_ranks,
        setting.costs,
        by_time(setting, batches),
        typical_lengths(setting.model, pooled),
        lambda layout: [assignable_of(setting, layout, batch, setting.model.name) for batch in batches],
        lambda layout: replica_seconds(setting, layout),
        _encoder_dp(setting, batches),
        setting.update_ns,
    )


def _encoder_dp(setting: ModelOnCluster, batches: Sequence[Microbatches]) -> EncoderDp | None:
    """Return the encoders that may use encoder data parallelism, if a rank's devices are on one node.

    These are encoders without streams. Transfers inside a rank are priced by the link inside a node. This would also
    apply to devices that share sequences or shards, so context parallelism and ZeRO-3 exclude it.
    """
    degrees = setting.degrees
    names = tuple(m.name for m in setting.model.modules[:-1] if not m.emits and not m.takes)
    on_one_node = degrees.tensor <= setting.cluster.devices_per_node and degrees.context == 1 and degrees.zero != 3
    if degrees.tensor == 1 or not names or not on_one_node:
        return None
    costs = EncoderDpCosts(setting.costs, frozenset(names), setting.degrees.tensor)
    return EncoderDp(names, costs, by_time(setting, batches, names))
