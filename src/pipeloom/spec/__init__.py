"""Specs: what is trained, on what, with which data, laid out how."""

from pipeloom.spec.batch import Batch, Sample, Workload, batch_from_dicts
from pipeloom.spec.cluster import ClusterSpec
from pipeloom.spec.layout import Chunk, Layout, ModuleLayout, Parallelism
from pipeloom.spec.model import DTYPE_BYTES, LayerSpec, ModelSpec, ModuleSpec, TensorShape

__all__ = [
    "DTYPE_BYTES",
    "Batch",
    "Chunk",
    "ClusterSpec",
    "LayerSpec",
    "Layout",
    "ModelSpec",
    "ModuleLayout",
    "ModuleSpec",
    "Parallelism",
    "Sample",
    "TensorShape",
    "Workload",
    "batch_from_dicts",
]
