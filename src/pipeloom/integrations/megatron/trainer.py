"""The trainer of a run: Megatron of the zoo, with what the run's arguments switch on and off; and its precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import msgspec

from pipeloom.integrations.megatron.arguments import Arguments
from pipeloom.spec.catalog import load_trainer
from pipeloom.spec.precision import Precision
from pipeloom.spec.trainer import Dispatcher, Overlap, TrainerSpec

GRAPHS = ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph")
"""Arguments that record launches in CUDA graphs."""

SCOPES = ("cuda-graph-scope", "cuda-graph-modules")
"""Arguments that say what such graphs contain."""
WHOLE_ITERATION = "full_iteration"
"""Implementation of graphs, or their scope, that records an iteration as one graph."""

_PARTIAL = frozenset(("attn", "moe_router", "moe_preprocess"))
"""Scopes of graphs that leave the experts to the host."""
_FP8: dict[str, Precision] = {
    "delayed": "fp8_delayed",
    "tensorwise": "fp8_current",
    "blockwise": "fp8_block",
    "mxfp8": "mxfp8",
}
_FORMATS = {"fp8-format": ("e4m3", "hybrid"), "fp4-format": ("e2m1",)}
_FP4: dict[str, Precision] = {"nvfp4": "nvfp4"}


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


@dataclass(frozen=True)
class RunPrecision:
    """Precision of the products of a model's linear layers. Attention, router, embedding and loss are in bfloat16.

    So are ``plain_first`` and ``plain_last`` layers at the ends of the model. With ``quantized_weights``, weights are
    kept and gathered in this precision alone.
    """

    products: Precision = "bf16"
    quantized_weights: bool = False
    plain_first: int = 0
    plain_last: int = 0

    def of_layers(self, num_layers: int) -> tuple[Precision, ...]:
        """Return the precision of every layer of the decoder."""
        plain = {*range(self.plain_first), *range(num_layers - self.plain_last, num_layers)}
        return tuple("bf16" if i in plain else self.products for i in range(num_layers))


def read_precision(arguments: Arguments, num_layers: int) -> RunPrecision:
    """Read the precision of a run.

    Raises `InputError` if formats contradict each other, or a recipe or number of layers is impossible.
    """
    eight, four = arguments.on("fp8-format"), arguments.on("fp4-format")
    if eight and four:
        raise arguments.refuse("fp4-format", f"does not go with {arguments.label('fp8-format')}", "leave one")
    if not eight and not four:
        return RunPrecision()
    of_format = "fp8-format" if eight else "fp4-format"
    form = arguments.text(of_format)
    if form not in _FORMATS[of_format]:
        raise arguments.refuse(of_format, f"{form!r} is not one of {', '.join(_FORMATS[of_format])}")
    name, recipes, default = ("fp8-recipe", _FP8, "delayed") if eight else ("fp4-recipe", _FP4, "nvfp4")
    recipe = arguments.text(name) or default
    if recipe not in recipes:
        raise arguments.refuse(name, f"{recipe!r} is not one of {', '.join(recipes)}", "name one that comes closest")
    weights = arguments.flag("fp8-param-gather" if eight else "fp4-param-gather")
    if not arguments.flag("first-last-layers-bf16"):
        return RunPrecision(recipes[recipe], weights)
    if recipe == "delayed":
        raise arguments.refuse("first-last-layers-bf16", "does not go with delayed scaling", "leave it out")
    first, last = (arguments.count(f"num-layers-at-{end}-in-bf16", 1, least=0) or 0 for end in ("start", "end"))
    if first + last > num_layers:
        problem = f"{first} + {last} layers in bfloat16 are more than the model's {num_layers}"
        raise arguments.refuse("first-last-layers-bf16", problem, "lower a number")
    return RunPrecision(recipes[recipe], weights, first, last)
