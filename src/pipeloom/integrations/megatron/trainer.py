"""The trainer of a run: Megatron of the zoo, with what the run's arguments switch on and off."""

from __future__ import annotations

from typing import get_args

import msgspec

from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.spec.catalog import load_trainer
from pipeloom.spec.trainer import Dispatcher, Overlap, TrainerSpec

GRAPHS = ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph")
"""Arguments that record launches in CUDA graphs."""

SCOPES = ("cuda-graph-scope", "cuda-graph-modules")
"""Arguments that say what such graphs contain."""
WHOLE_ITERATION = "full_iteration"
"""Implementation of graphs, or their scope, that records an iteration as one graph."""

_PARTIAL = frozenset(("attn", "moe_router", "moe_preprocess"))
"""Scopes of graphs that leave the experts to the host."""


def read_trainer(arguments: Arguments, *, sequence_parallel: bool) -> TrainerSpec:
    """Return the trainer of a run. What its arguments do not overlap with computation is not hidden."""
    trainer = load_trainer("megatron").overlapping(
        Overlap(
            reduction=arguments.on("overlap-grad-reduce"),
            gather=arguments.on("overlap-param-gather"),
            # Megatron overlaps the messages of sequence parallelism alone.
            tensor=arguments.on("tp-comm-overlap") and sequence_parallel,
            expert=arguments.on("overlap-moe-expert-parallel-comm"),
        )
    )
    # Reading all of them marks all as known.
    graphs = [arguments.on(name) for name in GRAPHS]
    if any(graphs):
        scope = [word for name in SCOPES for word in arguments.words(name)]
        trainer = trainer.with_graphs(experts=not _PARTIAL & set(scope))
    trainer = msgspec.structs.replace(
        trainer, dispatcher=_dispatcher(arguments), fused_experts=arguments.on("use-transformer-engine-op-fuser")
    )
    engine = arguments.text("cross-entropy-fusion-impl") == "te"
    if arguments.on("cross-entropy-loss-fusion"):
        trainer = msgspec.structs.replace(trainer, cross_entropy=1.0, loss_in_place=engine)
    return trainer


def _dispatcher(arguments: Arguments) -> Dispatcher:
    """Return how tokens reach their experts; Megatron's default is to gather all of them."""
    kind = arguments.text("moe-token-dispatcher-type") or "allgather"
    backend, is_deepep = arguments.text("moe-flex-dispatcher-backend"), arguments.on("moe-enable-deepep")
    if kind == "flex":
        kind = "deepep" if is_deepep or backend is None else backend
    if kind not in get_args(Dispatcher):
        raise arguments.refuse("moe-token-dispatcher-type", f"{kind!r} is none of {', '.join(get_args(Dispatcher))}")
    found: Dispatcher = kind  # type: ignore[assignment]
    return found
