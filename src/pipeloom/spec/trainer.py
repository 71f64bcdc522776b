"""Trainers: what the framework that runs a model adds to the time of its operators."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pipeloom.bounds import Factor, Latency, Number, NumBytes, Share
from pipeloom.spec.architecture import Layer, PredictionLayer, RoutedExperts, mixes_alone, num_mixers, routed_experts
from pipeloom.spec.precision import Precision

Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
"""How tokens reach their experts. ``alltoall`` sends a copy for each chosen expert and sorts them by expert on arrival.
``allgather`` sends all tokens to all devices. ``deepep`` and ``hybridep`` send a token once to each device, or over the
network to each node, that has one of its experts; ``hybridep`` orders the rows in the same kernel."""
EXPERT_LAYER_LAUNCHES = 525
"""Kernels that the host launches for forward and backward of a layer of experts: three times the 150 to 200 of a dense
layer (``expert_layer_host_s`` in ``validation/data/constants.toml``)."""
LAYER_LAUNCHES = 175
"""The same of a dense layer: 150 to 200 (``layer_host_s`` there)."""
LOOP_LAUNCHES = 1167
CHUNK_LAUNCHES = 56
"""Kernels for forward and backward of a gated delta rule that PyTorch computes by loops, and for each chunk of its
sequence: 425 and 9 forward, 742 and 47 backward, counted in ``torch_chunk_gated_delta_rule`` of Megatron Core 0.18."""
LOOP_CHUNK = 64
BIASED_EXPERT_LAUNCHES = 7
"""Kernels for the biases of one expert: product with the router's probability and sum, forward; two products and two
sums over rows or columns, and the gradient's copy, backward (``TEGroupedMLP._apply_bias`` of Megatron Core 0.16)."""
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
    expert: bool = False
    """Messages of experts, beside the computation of another microbatch."""


class TrainerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training framework, as far as it changes costs. The zoo has some (`pipeloom.spec.catalog.load_trainer`).

    The defaults are those of a framework with fused kernels, whose host never delays the device and which hides no
    collective.
    """

    name: str = "fused"
    source: str = ""
    precision: Precision = "bf16"
    """Precision of the products of linear layers in blocks. Encoders, embeddings and heads stay in bfloat16."""
    quantized_weights: bool = False
    """Whether weights are kept and gathered in this precision alone."""
    elementwise: Factor = 1.0
    """Time of memory-bound operators, relative to fused kernels."""
    cross_entropy: Factor = 1.0
    """Time of softmax and loss, relative to fused kernels."""
    scan: Factor = 1.0
    """Time of chunked scans of state spaces and linear attention, relative to the device's table, which is assumed."""
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
    hidden_expert: Share = 0.0
    """Share of the messages of experts that computation of another microbatch hides, if the two overlap."""
    dispatcher: Dispatcher = "alltoall"
    fused_experts: bool = True
    """Whether one kernel multiplies by the weights of all experts of a device, with their biases; in a quantized
    precision also the activation. Otherwise each expert has a product of its own, and biases and clamps are eager."""
    graphed: bool = False
    """Whether CUDA graphs have launched attention and router, but not the experts."""
    graphed_share: Share = 0.0
    """Share of the launches of a layer of experts that such graphs remove."""
    scan_loops: bool = False
    """Whether PyTorch computes gated delta rules by loops over chunks, as Megatron does in its deterministic mode."""
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
    in_blocks: bool = False
    """Whether layers run in the blocks of Pipeloom's runtime. A block holds its input, and what it recomputes is
    recomputed before its backward begins. Selective recomputation keeps the results of all products."""
    gradient_buffers: bool = False
    """Whether every shape of a weight has a buffer in the place of its gradient, which is accumulated elsewhere."""
    library_bytes: NumBytes = 0
    """Bytes that libraries of matrix products keep."""
    held_messages: Number = 0
    """Messages of a pipeline that a rank holds beside its activations: received ahead, or not sent yet."""

    @property
    def launch_s(self) -> float:
        """Seconds in which the host launches one kernel."""
        return self.layer_host_s / LAYER_LAUNCHES

    def host_s(self, layer: Layer, devices: int = 1) -> float:
        """Return the seconds in which the host launches forward and backward of one layer.

        A dense block of two mixers takes `layer_host_s`, and so does a layer that is no block, such as an embedding. A
        layer with attention to an encoder has half as many operators again, one with a state space alone half. Experts
        are divided over ``devices`` devices.
        """
        mixers, experts = num_mixers(layer), routed_experts(layer)
        plain = self.layer_host_s * (0.5 if self.graphed else 1.0)
        if not mixers:
            return plain
        dense = mixers / 2 - (experts is not None)
        if self.graphed:
            # Attention is half of a layer's launches. What remains of a layer of experts has none of it.
            dense = 0.0 if mixes_alone(layer) else max(0.0, dense) / 2
        block = self.layer_host_s * dense + (0.0 if experts is None else self.experts_host_s(experts, devices))
        # Each prediction has an embedding and a product that joins two hidden states too.
        return layer.depth * (2 * plain + block) if isinstance(layer, PredictionLayer) else block

    def experts_host_s(self, experts: RoutedExperts, devices: int = 1) -> float:
        """Return the seconds in which the host launches a layer of experts that ``devices`` devices share."""
        eager = experts.have_biases and not self.fused_experts
        more = eager * BIASED_EXPERT_LAUNCHES * max(1, experts.number // devices) / EXPERT_LAYER_LAUNCHES
        return self.expert_layer_host_s * ((1 - self.graphed_share if self.graphed else 1.0) + more)

    def loops_host_s(self, length: int) -> float:
        """Return the seconds in which the host launches the loops of a gated delta rule over ``length`` tokens."""
        return self.launch_s * (LOOP_LAUNCHES + CHUNK_LAUNCHES * -(-length // LOOP_CHUNK))

    def overlapping(self, overlap: Overlap) -> TrainerSpec:
        """Return the trainer of a run, in which nothing is hidden that the run's flags do not overlap."""
        return msgspec.structs.replace(
            self,
            hidden_reduction=self.hidden_reduction if overlap.reduction else 0.0,
            hidden_gather=self.hidden_gather if overlap.gather else 0.0,
            hidden_tensor=self.hidden_tensor if overlap.tensor else 0.0,
            hidden_expert=self.hidden_expert if overlap.expert else 0.0,
        )

    def with_graphs(self, *, experts: bool = True) -> TrainerSpec:
        """Return the trainer with layers in CUDA graphs, whose launches take the host no time.

        Without ``experts``, the graphs have attention and router alone.
        """
        if not experts:
            return msgspec.structs.replace(self, graphed=True)
        return msgspec.structs.replace(self, layer_host_s=0.0, expert_layer_host_s=0.0)

    @property
    def text(self) -> str:
        """The name, the precision if it is not bfloat16, and what is overlapped with computation."""
        parts = {
            "gradient reduction": self.hidden_reduction,
            "parameter gathering": self.hidden_gather,
            "tensor messages": self.hidden_tensor,
            "expert messages": self.hidden_expert,
        }
        hidden = ", ".join(name for name, share in parts.items() if share)
        precision = "" if self.precision == "bf16" else f"{self.precision}, "
        return f"{self.name} ({precision}{f'overlaps {hidden}' if hidden else 'no overlap'})"


FUSED = TrainerSpec()
