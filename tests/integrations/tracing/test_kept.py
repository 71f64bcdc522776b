"""What traced layers keep for their backward with the kernels of a fused trainer.

Sources: `MLASelfAttention` of Megatron (queries, keys and values are made contiguous), its router (the cast is inside),
`MambaSplitConv1dScanCombinedFn` of mamba_ssm (what the convolution reads, and what the scan returns), and
`ChunkGatedDeltaRuleFunction` of flash-linear-attention (the solution of the triangular system, no states).
"""

from __future__ import annotations

from typing import Any

import pytest

from pipeloom.emulator.build import layer_module, single_layer
from pipeloom.emulator.program import kept_tensors
from pipeloom.emulator.tape import Context, Tape
from pipeloom.integrations.tracing.architecture import trace_config
from pipeloom.spec import Workload
from tests.integrations.published import PUBLISHED
from tests.integrations.tracing import models
from tests.integrations.tracing.test_encoders import tiny_config

ROWS = 1024


def kept(config: dict[str, Any], place: int) -> list[tuple[str, int]]:
    """What the block at a place keeps: the kind of operator that made each tensor, and its bytes for each token."""
    layer, _ = single_layer(trace_config(config, "").modules[-1].flat_layers[place])
    module, width = layer_module(layer)
    tape = Tape(Context())
    module(tape.input(width))
    found = []
    for tensor in kept_tensors(tape, "keep"):
        size = tensor.num_bytes.of(Workload((ROWS,))) / ROWS
        found.append((tensor.producer.forward.kind if tensor.producer else "input", round(size)))
    return found


@pytest.fixture(scope="module")
def deepseek() -> list[tuple[str, int]]:
    config = PUBLISHED["DeepSeek-V3"][0] | {"num_hidden_layers": 4}
    return kept(config, 4)


def test_latent_attention_keeps_queries_keys_and_a_copy_of_its_values(deepseek: list[tuple[str, int]]) -> None:
    heads = 128
    assert deepseek.count(("rotary", 2 * heads * 192)) == 1
    assert deepseek.count(("add", 2 * heads * 192)) == 1  # keys: projected, and rotated ones of all heads
    assert deepseek.count(("copy", 2 * heads * 128)) == 1
    assert ("matmul", 2 * heads * 256) not in deepseek  # keys and values as they are projected


def test_a_router_keeps_its_input_and_not_a_copy_in_float32(deepseek: list[tuple[str, int]]) -> None:
    assert ("copy", 4 * 7168) not in deepseek
    assert deepseek.count(("norm", 2 * 7168)) == 2


def test_mamba_keeps_what_its_convolution_reads() -> None:
    config, _ = tiny_config("bamba")
    kinds = [kind for kind, _ in kept(config, 1)]
    assert "depthwise" not in kinds
    assert kinds.count("scan") == 1  # what it returns, and no states
    assert "matmul" in kinds


def test_a_gated_delta_rule_keeps_its_triangular_solution() -> None:
    found = kept(models.HYBRID, 1)
    heads = models.HYBRID["linear_num_value_heads"]
    assert ("scan", 2 * 64 * heads) in found  # one row of a chunk of 64 for each head, in bfloat16
    assert "depthwise" in [kind for kind, _ in found]
