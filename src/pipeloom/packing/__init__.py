"""Packing: assign samples to microbatches, and split each module's part into sub-microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names
from pipeloom.packing.boundary import Piece, pieces, reach
from pipeloom.packing.loads import Loads, budget_tokens, cost_loads, split_oversized, token_loads
from pipeloom.packing.pack import (
    PackedReplica,
    check_budget,
    default_model,
    pack,
    pack_replicas,
    packed_batch,
    packing_from_counts,
    packing_of,
)
from pipeloom.packing.policies import (
    POLICIES,
    PackingSpec,
    Policy,
    assign_bins,
    check_always_packs,
    group,
    height_bound,
    least_microbatches,
)
from pipeloom.packing.replicas import ReplicaAssignment, assign_by_time, assign_to_replicas
from pipeloom.packing.types import Microbatch, Packing, SubMicrobatch

if TYPE_CHECKING:
    from pipeloom.packing.kernels import compile_kernels

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "POLICIES",
    "Loads",
    "Microbatch",
    "PackedReplica",
    "Packing",
    "PackingSpec",
    "Piece",
    "Policy",
    "ReplicaAssignment",
    "SubMicrobatch",
    "assign_bins",
    "assign_by_time",
    "assign_to_replicas",
    "budget_tokens",
    "check_always_packs",
    "check_budget",
    "compile_kernels",
    "cost_loads",
    "default_model",
    "group",
    "height_bound",
    "least_microbatches",
    "pack",
    "pack_replicas",
    "packed_batch",
    "packing_from_counts",
    "packing_of",
    "pieces",
    "reach",
    "split_oversized",
    "token_loads",
]
