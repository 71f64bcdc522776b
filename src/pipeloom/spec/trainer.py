"""Trainers: what the framework that runs a model adds to the time of its operators."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Factor, Latency, NumBytes, Share

_MIB = 1 << 20


class TrainerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training framework, as far as it changes costs. The zoo has some (`pipeloom.spec.catalog.load_trainer`).

    The defaults are those of a framework with fused kernels, whose host never delays the device and which hides no
    collective.
    """

    name: str = "fused"
    source: str = ""
    elementwise: Factor = 1.0
    """Time of memory-bound operators, relative to fused kernels."""
    cross_entropy: Factor = 1.0
    """Time of softmax and loss, relative to fused kernels."""
    attention: Literal["fused", "flash2", "unfused"] = "fused"
    """``fused`` is the kernel of the device's table, ``flash2`` FlashAttention 2. ``unfused`` computes and keeps the
    scores of all pairs."""
    layer_host_s: Latency = 0.0
    """Host seconds to launch forward and backward of one layer. A pass never takes less than its layers' launches."""
    expert_layer_host_s: Latency = 0.0
    """The same of a layer of experts."""
    hidden_reduction: Share = 0.0
    """Share of the gradient reduction that computation hides, if the two overlap."""
    hidden_gather: Share = 0.0
    """Share of the gathering of updated parameters that computation hides, if the two overlap."""
    hidden_tensor: Share = 0.0
    """Share of the tensor-parallel collectives that computation hides, if the two overlap."""
    host_optimizer: bool = False
    """Whether the optimizer runs on the host, whose memory holds its state (DeepSpeed's optimizer offloading)."""
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
MEGATRON_KERNELS = TrainerSpec(name="megatron, kernels alone", gradient_buffers=True, library_bytes=96 * 2**20)
"""Megatron-LM's memory, with the times of fused kernels alone: for comparing setups of one run."""
