"""A hybrid stack of Megatron Core that runs without a GPU: its mixer is plain torch in place of Mamba's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TorchMixer(nn.Module):
    """A gated running sum that decays from token to token, with a residual."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_number, size = layer_number, config.hidden_size
        self.into, self.out = nn.Linear(size, 2 * size), nn.Linear(size, size)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        value, gate = self.into(hidden_states).chunk(2, dim=-1)
        state, states = torch.zeros_like(value[0]), []
        for each in value:
            state = 0.8 * state + each
            states.append(state)
        mixed: Tensor = hidden_states + self.out(torch.stack(states) * torch.sigmoid(gate))
        return mixed


def hybrid_stack() -> Any:
    """Return the specification of the stack, in this version of Megatron Core."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    try:
        from megatron.core.models.hybrid import hybrid_block as block

        stack, submodules = block.HybridStack, block.HybridStackSubmodules
    except ImportError:
        from megatron.core.ssm import mamba_block as block

        stack, submodules = block.MambaStack, block.MambaStackSubmodules
    # Without Transformer Engine, its norm cannot be built.
    block.TENorm = WrappedTorchNorm
    layers = submodules(mamba_layer=ModuleSpec(module=TorchMixer), attention_layer=get_gpt_layer_local_spec())
    return ModuleSpec(module=stack, submodules=layers)


def hybrid_pattern(layers: int, pp: int) -> dict[str, Any]:
    """Return LLaVA's argument for a stack whose mixers and transformer layers alternate."""
    import inspect

    from megatron.core.models.multimodal.llava_model import LLaVAModel

    every = "M*" * (layers // 2)
    if "hybrid_override_pattern" in inspect.signature(LLaVAModel.__init__).parameters:
        return {"hybrid_override_pattern": every, "hybrid_attention_ratio": 0.5, "hybrid_mlp_ratio": 0.0}
    each = layers // pp
    return {"hybrid_layer_pattern": "|".join(every[i : i + each] for i in range(0, layers, each))}
