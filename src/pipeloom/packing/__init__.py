"""Packing: samples -> microbatches -> sub-microbatches."""

from pipeloom.packing.types import Microbatch, Packing, SubMicrobatch

__all__ = ["Microbatch", "Packing", "SubMicrobatch"]
