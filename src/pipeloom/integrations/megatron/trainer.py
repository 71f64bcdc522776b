"""The trainer of a run: Megatron of the zoo, with what the run's arguments switch on and off."""

from __future__ import annotations

import msgspec

from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.spec.catalog import load_trainer
from pipeloom.spec.trainer import Overlap, TrainerSpec

GRAPHS = ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph")
"""Arguments that record launches in CUDA graphs."""


def read_trainer(arguments: Arguments, *, sequence_parallel: bool) -> TrainerSpec:
    """Return the trainer of a run. What its arguments do not overlap with computation is not hidden."""
    trainer = load_trainer("megatron").overlapping(
        Overlap(
            reduction=arguments.on("overlap-grad-reduce"),
            gather=arguments.on("overlap-param-gather"),
            # Megatron overlaps the messages of sequence parallelism alone.
            tensor=arguments.on("tp-comm-overlap") and sequence_parallel,
        )
    )
    graphs = [arguments.on(name) for name in GRAPHS]
    if any(graphs):
        trainer = trainer.with_graphs()
    engine = arguments.text("cross-entropy-fusion-impl") == "te"
    if arguments.on("cross-entropy-loss-fusion"):
        trainer = msgspec.structs.replace(trainer, cross_entropy=1.0, loss_in_place=engine)
    return trainer
