"""Packing: samples -> microbatches -> sub-microbatches."""

from pipeloom.packing.pack import PackingSpec, Policy, pack, packing_from_counts
from pipeloom.packing.types import Microbatch, Packing, SubMicrobatch

__all__ = ["Microbatch", "Packing", "PackingSpec", "Policy", "SubMicrobatch", "pack", "packing_from_counts"]
