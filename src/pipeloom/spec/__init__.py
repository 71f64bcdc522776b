"""Specs of models, hardware, data and layouts."""

from pipeloom.spec.batch import Batch, Sample, Workload, batch_from_dicts
from pipeloom.spec.hardware import HostLink, RankSpec, host_pair
from pipeloom.spec.layout import Chunk, Layout, ModuleLayout
from pipeloom.spec.model import DTYPE_BYTES, EmittedStream, LayerSpec, ModelSpec, ModuleSpec, StreamEnd, TensorShape
from pipeloom.spec.parallelism import Parallelism
from pipeloom.spec.strategies import (
    STRATEGIES,
    TRAITS,
    ChunkStrategy,
    Strategy,
    StrategyTraits,
    chunk_strategy,
    strategy_word,
    word_strategies,
)

__all__ = [
    "DTYPE_BYTES",
    "STRATEGIES",
    "TRAITS",
    "Batch",
    "Chunk",
    "ChunkStrategy",
    "EmittedStream",
    "HostLink",
    "LayerSpec",
    "Layout",
    "ModelSpec",
    "ModuleLayout",
    "ModuleSpec",
    "Parallelism",
    "RankSpec",
    "Sample",
    "Strategy",
    "StrategyTraits",
    "StreamEnd",
    "TensorShape",
    "Workload",
    "batch_from_dicts",
    "chunk_strategy",
    "host_pair",
    "strategy_word",
    "word_strategies",
]
