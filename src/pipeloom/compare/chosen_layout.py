"""Layouts of a case, chosen by planning sampled iterations."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import by_time, replica_seconds
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, assignable_of
from pipeloom.cost.dealt import DealtCosts
from pipeloom.errors import InputError
from pipeloom.layout.choose import TRIAL, Dealing, LayoutEvaluation, Sampled, search_layouts
from pipeloom.layout.modality import typical_lengths
from pipeloom.search import StoppingRule


def choose_layout(
    case: ModelOnCluster,
    batches: Sequence[Microbatches],
    *,
    trial: StoppingRule = TRIAL,
    final: StoppingRule | None = None,
    seed: int = 0,
    rounds: int = 2,
) -> tuple[LayoutEvaluation, ...]:
    """Plan iterations of a case under many layouts; see `search_layouts`.

    Parameters
    ----------
    batches : sequence of Microbatches
        A few iterations like those of the training to come.
    """
    if not batches:
        raise InputError("batches", "is empty", "give at least one sampled iteration")
    return search_layouts(sampled_case(case, batches), trial=trial, final=final, seed=seed, rounds=rounds)


def sampled_case(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Sampled:
    """Iterations of a case, to try layouts on."""
    groups = [group for batch in batches for group in batch]
    return Sampled(
        case.model,
        case.num_ranks,
        case.costs,
        by_time(case, batches),
        typical_lengths(case.model, groups),
        lambda layout: [assignable_of(case, layout, groups, case.model.name) for groups in batches],
        lambda layout: replica_seconds(case, layout),
        _dealing(case, batches),
    )


def _dealing(case: ModelOnCluster, batches: Sequence[Microbatches]) -> Dealing | None:
    """Encoders without streams, where a rank is several devices that lie on one node.

    What is handed inside a rank is priced by the link inside a node, and so would be what goes around among devices
    that share sequences or shards: with these, nothing is dealt.
    """
    degrees = case.degrees
    names = tuple(m.name for m in case.model.modules[:-1] if not m.emits and not m.takes)
    is_near = degrees.tensor <= case.cluster.devices_per_node and degrees.context == 1 and degrees.zero != 3
    if degrees.tensor == 1 or not names or not is_near:
        return None
    costs = DealtCosts(case.costs, frozenset(names), case.degrees.tensor)
    return Dealing(names, costs, by_time(case, batches, names))
