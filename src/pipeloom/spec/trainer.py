"""Trainers: what the framework that runs a model adds to the time of its operators."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pipeloom.bounds import Factor, Latency, NumBytes, Share
from pipeloom.spec.architecture import Layer, PredictionLayer, num_experts, num_mixers

HOST_SHARE = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
"""Share of a layer's launches in each pass: the backward has two products for each of the forward."""


class Overlap(NamedTuple):
    """What a run overlaps with computation, by its flags."""

    reduction: bool = False
    """Reduction of gradients."""
    gather: bool = False
    """Gathering of updated parameters."""
    tensor: bool = False
    """Messages of tensor parallelism."""


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

    def host_s(self, layer: Layer) -> float:
        """Return the seconds in which the host launches forward and backward of one layer.

        A dense block of two mixers takes `layer_host_s`, and so does a layer that is no block, such as an embedding.
        """
        mixers = num_mixers(layer)
        block = self.expert_layer_host_s if num_experts(layer) else self.layer_host_s * mixers / 2
        if isinstance(layer, PredictionLayer):
            # Each has an embedding and a product that joins two hidden states too.
            return layer.depth * (2 * self.layer_host_s + block)
        return block if mixers else self.layer_host_s

    def overlapping(self, overlap: Overlap) -> TrainerSpec:
        """Return the trainer of a run, in which nothing is hidden that the run's flags do not overlap."""
        return msgspec.structs.replace(
            self,
            hidden_reduction=self.hidden_reduction if overlap.reduction else 0.0,
            hidden_gather=self.hidden_gather if overlap.gather else 0.0,
            hidden_tensor=self.hidden_tensor if overlap.tensor else 0.0,
        )

    def with_graphs(self) -> TrainerSpec:
        """Return the trainer with layers in CUDA graphs, whose launches take the host no time."""
        return msgspec.structs.replace(self, layer_host_s=0.0, expert_layer_host_s=0.0)

    @property
    def text(self) -> str:
        """The name, and what is overlapped with computation."""
        parts = {
            "gradient reduction": self.hidden_reduction,
            "parameter gathering": self.hidden_gather,
            "tensor messages": self.hidden_tensor,
        }
        hidden = ", ".join(name for name, share in parts.items() if share)
        return f"{self.name} ({f'overlaps {hidden}' if hidden else 'no overlap'})"


FUSED = TrainerSpec()
