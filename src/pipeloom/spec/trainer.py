"""Trainers: what the framework that runs a model adds to the time of its operators."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Factor, Latency, NumBytes, Share

_MIB = 1 << 20


class TrainerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training framework, as far as it changes costs.

    The defaults are those of a framework with fused kernels, whose host never delays the device and which hides no
    collective.
    """

    name: str = "fused"
    source: str = ""
    elementwise: Factor = 1.0
    """Time of memory-bound operators, relative to fused kernels."""
    cross_entropy: Factor = 1.0
    """Time of softmax and loss, relative to fused kernels."""
    attention: Literal["flash", "unfused"] = "flash"
    """``unfused`` computes and keeps the scores of all pairs."""
    layer_host_s: Latency = 0.0
    """Host seconds to launch forward and backward of one layer. A pass never takes less than its layers' launches."""
    expert_layer_host_s: Latency = 0.0
    """The same of a layer of experts."""
    hidden_reduction: Share = 0.0
    """Share of the gradient reduction that computation hides."""
    hidden_gather: Share = 0.0
    """Share of the gathering of updated parameters that computation hides."""
    hidden_tensor: Share = 0.0
    """Share of the tensor-parallel collectives that computation hides."""
    dropout: bool = False
    """Whether layers drop out the outputs of their mixers and keep the masks, of one byte a number."""
    loss_in_place: bool = False
    """Whether the loss overwrites the logits with their gradient. Otherwise it keeps the softmax in float32."""
    output_twice: bool = False
    """Whether context parallelism exchanges heads and keeps attention's output before and after."""
    eager: bool = False
    """Whether layers keep what eager PyTorch keeps: RMSNorm in float32, its result before the weights, the gate's
    activation; and whether the gradient of a weight and the loss need memory of their own."""
    gradient_buffers: bool = False
    """Whether every shape of a weight has a buffer in the place of its gradient, which is accumulated elsewhere."""
    library_bytes: NumBytes = 0
    """Bytes that libraries of matrix products keep."""


FUSED = TrainerSpec()
MEGATRON = TrainerSpec(
    name="megatron",
    source="published runs: Megatron-LM's loss moves 43 bytes a logit, 16 if fused; forward and backward of a dense "
    "layer take 4 ms of host time on hosts of H100, those of a layer of experts 10 to 19 ms. Transformer Engine from "
    "version 2.3 on returns a cached buffer as the gradient of every shape of weight (module/base.py: get_dummy_wgrad) "
    "and keeps 32 MiB for cuBLAS on Hopper and Blackwell; PyTorch as much for each of the threads of the forward and "
    "the backward (CUDABlas.cpp; less on A100, unless CUBLAS_WORKSPACE_CONFIG is :4096:8)",
    cross_entropy=2.7,
    layer_host_s=4e-3,
    expert_layer_host_s=12e-3,
    gradient_buffers=True,
    library_bytes=96 * _MIB,
)
"""Megatron-LM with Transformer Engine."""
MEGATRON_KERNELS = TrainerSpec(
    name="megatron, kernels alone",
    source=MEGATRON.source,
    gradient_buffers=MEGATRON.gradient_buffers,
    library_bytes=MEGATRON.library_bytes,
)
"""Megatron-LM's memory, with the times of fused kernels alone: for comparing setups of one run."""
EAGER = TrainerSpec(
    name="torch",
    source="published runs: memory-bound operators of eager PyTorch take 1.6 to 2.7 times as long as fused ones. "
    "Layers of the transformers library, traced: they keep 1.4 to 2 times what fused layers keep",
    elementwise=2.0,
    layer_host_s=4e-3,
    expert_layer_host_s=12e-3,
    eager=True,
    library_bytes=64 * _MIB,
)
"""Eager PyTorch, such as FSDP."""
