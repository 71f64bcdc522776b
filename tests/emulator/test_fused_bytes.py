"""Bytes that fused layers of published models keep, counted by PyTorch's hooks on meta tensors, beside the plan's.

Layers of the library run with fused operators in place of eager ones. Each saves what its kernel saves: a norm its
input and the reciprocal deviations in float32 (Transformer Engine's `_LayerNormLinear`), a rotary embedding nothing of
its input (`FusedRoPEFunc`), SwiGLU both of its inputs (Megatron Core's `SwiGLUFunction`), attention what FlashAttention
saves. Selective recomputation drops the results of norms and gates (`CheckpointWithoutOutput`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.integrations.tracing.described import trace_described
from pipeloom.integrations.transformers.packed import ATTENTION, Mask, register
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.parallelism import Degrees
from tests.emulator.full_size import PUBLISHED, TOKENS, model_of, on_meta

STRATEGIES = ("keep", "selective", "recompute")
DENSE = [name for name in PUBLISHED if name != "Qwen3 30B-A3B"]
"""Experts are held against SimuMax's measured memory of every rank (`tests/validation`)."""


class _Fused(torch.autograd.Function):
    """One kernel, whose backward reads the first ``saves`` of its inputs."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, saves: int, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs[:saves])
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *(gradients[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs))


class Saved:
    """Counts storages of numbers that autograd saves, each once, without weights and results that are made again."""

    def __init__(self, layer: nn.Module) -> None:
        self.weights = {p.untyped_storage()._cdata for p in layer.parameters()}
        self.made: dict[int, Tensor] = {}
        self.dropped: dict[int, Tensor] = {}

    def cheap(self, result: Tensor) -> Tensor:
        self.dropped[result.untyped_storage()._cdata] = result
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in self.weights and tensor.is_floating_point():
            self.made[place] = tensor
        return tensor

    def num_bytes(self, dropped: bool) -> int:
        held = [t for place, t in self.made.items() if not (dropped and place in self.dropped)]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)


@contextmanager
def fused(layer: nn.Module, saved: Saved) -> Iterator[None]:
    """A context in which a layer of the library runs fused operators."""

    def norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            deviations = saved.cheap(x.new_empty(x.shape[:-1], dtype=torch.float32))
            return saved.cheap(_Fused.apply(torch.empty_like(x), 2, x, deviations, module.weight))

        return forward

    def gate(module: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if hasattr(module, "gate_up_proj"):
                both = module.gate_up_proj(x)
                result, inputs = both.new_empty(*both.shape[:-1], both.shape[-1] // 2), [both]
            else:
                inputs = [module.gate_proj(x), module.up_proj(x)]
                result = torch.empty_like(inputs[0])
            found: Tensor = module.down_proj(saved.cheap(_Fused.apply(result, len(inputs), *inputs)))
            return found

        return forward

    def rotary(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        first, second = (_Fused.apply(torch.empty_like(each), 0, each) for each in (query, key))
        return first, second

    library = sys.modules[type(layer).__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "apply_rotary_pos_emb", rotary)
        for module in layer.modules():
            if type(module).__name__.endswith("RMSNorm"):
                patch.setattr(module, "forward", norm(module))
            elif hasattr(module, "down_proj"):
                patch.setattr(module, "forward", gate(module))
        yield


def counted(model: Any) -> dict[str, int]:
    """Bytes that a layer keeps under each strategy."""
    layer, config = model.pretrained.model.model.layers[1], model.pretrained.model.config
    saved = Saved(layer)
    x = torch.empty(1, TOKENS, config.hidden_size, device="meta", requires_grad=True)
    register()
    for module in layer.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
    places = tuple(torch.empty(1, TOKENS, 1, device="meta") for _ in range(2))
    with fused(layer, saved), saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        layer(x, attention_mask=Mask((TOKENS,), True), position_embeddings=places, position_ids=None)
    given = x.untyped_storage().nbytes()
    return {"keep": saved.num_bytes(False), "selective": saved.num_bytes(True), "recompute": given}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "Llama 3.1 8B" else pytest.mark.full) for each in DENSE]
)
def test_fused_layers_keep_what_is_planned(name: str) -> None:
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    with on_meta():
        model = model_of(PUBLISHED[name])
        architecture = trace_described(model, [{"input_ids": ids, "labels": ids}]).architecture
        found = counted(model)
    costs = EmulatedCosts(
        architecture, load_cluster("8xH200"), Degrees(), STRATEGIES, split=False, trainer=load_trainer("megatron")
    )
    planned = costs.chunk_costs(Chunk("lm", (2, 2), 0), Workload((TOKENS,)))
    for cost in planned:
        number = found[cost.strategy]
        assert number <= cost.activation_bytes <= 1.03 * number, f"{cost.strategy}: {cost.activation_bytes} {number}"
