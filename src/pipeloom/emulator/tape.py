"""`Tape`: the record of one call of a module, with forward operators and their gradients.

A module is called on a symbolic `Tensor`. Each function of `operators` appends a `Record` with the counts of the
forward, the tensors that the backward needs, and the counts of the two backward operators: gradient to the inputs and
gradient to the weights. `program` creates forward and backward passes from a tape under a memory strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeloom.emulator.size import TOKEN_PAIRS, TOKENS, ZERO, Size
from pipeloom.errors import InputError, check_count
from pipeloom.spec.precision import Quantization
from pipeloom.spec.trainer import Dispatcher

COMPUTE, NVLINK, NIC, PCIE = 0, 1, 2, 3
DEVICE_NAMES = ("compute", "nvlink", "nic", "pcie")
NUM_DEVICES = len(DEVICE_NAMES)


class Group(NamedTuple):
    """The link of a group of devices that communicate."""

    device: int = NVLINK
    """Link that carries the group's messages: `NVLINK`, or `NIC` if the group spans several nodes."""
    lanes: float = 1.0
    """Over `NIC`, the rings between two nodes, each over another NIC. A device's share of the bytes between nodes is
    divided by it. At most as many as NVLink feeds."""
    local: int = 1
    """Devices of the group in one node."""


INSIDE, BETWEEN = Group(), Group(NIC)
"""A group inside a node, and one with a single device in each node."""


@dataclass(frozen=True, slots=True)
class Context:
    """How one layer is divided over devices, seen from one of them."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Degrees of parallelism. With expert parallelism, ``expert_tensor`` divides each expert."""
    sequence_parallel: bool = True
    """Whether activations between tensor-parallel regions are divided by tokens. Needs ``tensor`` > 1."""
    dtype_bytes: int = 2
    gradient_bytes: int = 4
    """Bytes of an activation or weight, and of an accumulated weight gradient."""
    tensor_group: Group = INSIDE
    context_group: Group = BETWEEN
    expert_group: Group = INSIDE
    expert_tensor_group: Group = INSIDE
    """Links of the groups."""
    shards: tuple[int, int] = (1, 1)
    shard_groups: tuple[Group, Group] = (BETWEEN, BETWEEN)
    """Devices over which dense weights, and those of experts, are sharded between uses (ZeRO-3), and their links."""
    unfused_attention: bool = False
    """Whether attention computes and keeps the scores of all pairs."""
    hidden_tensor: float = 0.0
    """Share of the tensor-parallel collectives that computation hides."""
    hidden_expert: float = 0.0
    """Share of the messages of experts that computation hides."""
    dispatcher: Dispatcher = "alltoall"
    """How tokens reach their experts."""
    fused_experts: bool = True
    """Whether one kernel computes the products of all experts of a device."""
    quantization: Quantization | None = None
    """How linear layers quantize their inputs, weights and gradients. None: products are in bfloat16."""
    quantized_weights: bool = False
    """Whether weights are kept and gathered quantized, without copies in bfloat16."""
    dropout: bool = False
    """Whether layers drop out the outputs of their mixers, and keep a mask of a byte a number for the backward."""
    loss_in_place: bool = False
    """Whether the gradient of the logits takes the logits' memory (Transformer Engine's fused loss)."""
    output_twice: bool = False
    """Whether context parallelism keeps attention's output also before its all-to-all (Transformer Engine)."""
    eager: bool = False
    """Whether layers are those of a library in eager PyTorch, which keep the intermediates of norms and gates."""
    in_blocks: bool = False
    """Whether layers run in the blocks of Pipeloom's runtime; see `TrainerSpec.in_blocks`."""

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "expert", "expert_tensor", "dtype_bytes", "gradient_bytes"):
            check_count(f"context.{name}", getattr(self, name))

    @property
    def row_split(self) -> int:
        """Divisor of the tokens outside tensor-parallel regions."""
        return self.tensor if self.sequence_parallel else 1

    def share(self, what: str, number: int) -> int:
        """Return ``number`` over the tensor-parallel degree. Raise `InputError` if it does not divide."""
        if number % self.tensor:
            raise InputError(
                what, f"{number} is not a multiple of tensor parallelism {self.tensor}", f"use a divisor of {number}"
            )
        return number // self.tensor


@dataclass(frozen=True, slots=True)
class Cost:
    """Counts of one operator on one device. Each of ``steps`` consecutive messages costs the link's latency.

    ``variant`` is the head width of an attention, the number of devices of a collective, or the kind of quantized
    products: the efficiency may depend on it. ``flops_per_key`` are the operations of an attention's queries on one
    more key each; see `EfficiencySpec.extra_keys`. ``pieces`` are the equal kernels in which the operator runs, such as
    one product for each expert.
    """

    kind: str
    flops: Size = ZERO
    memory: Size = ZERO
    network: Size = ZERO
    device: int = COMPUTE
    steps: float = 0.0
    variant: int | str = 0
    flops_per_key: Size = ZERO
    pieces: int = 1

    @property
    def rule(self) -> str:
        """Kind by which the efficiency is looked up."""
        return f"{self.kind}@{self.variant}" if self.variant else self.kind


@dataclass(eq=False, repr=False)
class Tensor:
    """A symbolic tensor: rows (tokens, instances, ...) times a width."""

    tape: Tape
    rows: Size
    width: float
    dtype_bytes: float
    producer: Record | None = None
    needs_gradient: bool = True
    quantized: Quantization | None = None
    """How it is quantized; None: it is not."""

    @property
    def num_bytes(self) -> Size:
        """Size in bytes."""
        return self.rows * (self.width * self.dtype_bytes)

    @property
    def gradient_bytes(self) -> Size:
        """Size of its gradient in bytes. Gradients of quantized tensors are not quantized."""
        return self.num_bytes if self.quantized is None else self.rows * (self.width * self.context.dtype_bytes)

    @property
    def context(self) -> Context:
        """Parallelism of the tape."""
        return self.tape.context

    def __add__(self, other: Tensor) -> Tensor:
        """Add elementwise, as in a residual connection. The gradient passes on without an operator."""
        return self.tape.record(
            Cost("add", flops=self.rows * self.width, memory=self.num_bytes * 3),
            [self, other],
            backward=Backward(passes_gradient=True),
        )


@dataclass(eq=False, repr=False, kw_only=True)
class Backward:
    """Backward operators of a forward operator."""

    input_gradient: Cost | None = None
    weight_gradient: Cost | None = None
    saved: Sequence[Tensor] = ()
    saved_for_weight: Sequence[Tensor] = ()
    """Tensors of the forward that the gradient to the inputs and the gradient to the weights read."""
    saves_output: bool = False
    """Whether the gradient to the inputs also reads the result."""
    passes_gradient: bool = False
    """Whether the gradient of the output is the gradient of each input, without an operator."""
    in_place: bool = False
    """Whether the gradient of the first input takes the memory of that input, which must be saved."""
    temporary: Size = ZERO
    """Bytes that the gradient to the weights, or without weights that to the input, needs while it runs."""


@dataclass(eq=False, repr=False)
class Record(Backward):
    """One forward operator and its backward operators. ``saved`` has by-products and a saved result too."""

    forward: Cost
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    """The result, then by-products for the backward (statistics)."""
    cheap: bool = False
    """Whether it is a memory-bound operator whose inputs are kept anyway. Selective recomputation drops its result."""
    transient: bool = False
    """Whether the result is never kept, but always recomputed in the backward (gathered shards)."""


Again = Literal["as kept", "cheap", "always"]
"""How the backward gets a result: "as kept" by the strategy; the same, but "cheap" to recompute; "always"
recomputed."""


class Parameters(NamedTuple):
    """Parameters of one weight: in all, and on one device."""

    total: float
    local: float
    expert: bool = False
    quantized: Quantization | None = None


@dataclass(eq=False, repr=False)
class Tape:
    """Records of one call of a module."""

    context: Context
    records: list[Record] = field(default_factory=list)
    parameters: list[Parameters] = field(default_factory=list)
    casts: dict[Tensor, Tensor] = field(default_factory=dict)
    """Quantized tensors, by what they are made of."""
    products: set[tuple[int, int]] = field(default_factory=set)
    """Rows and columns, on one device, of the weights of matrix products."""

    def input(self, width: float, rows: Size | None = None, *, needs_gradient: bool = True) -> Tensor:
        """Return an input activation. Its rows default to this device's share of the tokens."""
        rows = self.tokens if rows is None else rows
        return Tensor(self, rows, width, self.context.dtype_bytes, needs_gradient=needs_gradient)

    @property
    def tokens(self) -> Size:
        """Tokens on this device outside tensor-parallel regions."""
        return TOKENS / (self.context.context * self.context.row_split)

    @property
    def token_pairs(self) -> Size:
        """Query-key pairs on this device. Context parallelism balances them."""
        return TOKEN_PAIRS / self.context.context

    def parameter(
        self, total: float, split: int = 1, *, expert: bool = False, quantized: Quantization | None = None
    ) -> None:
        """Add a weight of ``total`` parameters, divided over ``split`` devices."""
        self.parameters.append(Parameters(total, total / split, expert, quantized))

    def record(
        self,
        forward: Cost,
        inputs: Sequence[Tensor],
        shape: tuple[Size, float] | None = None,
        *,
        backward: Backward = Backward(),  # noqa: B008  never changed
        dtype_bytes: float | None = None,
        extra: Sequence[tuple[Size, float, float]] = (),
        again: Again = "as kept",
    ) -> Tensor:
        """Append one operator and return its result.

        Parameters
        ----------
        shape : rows and width of the result; None: those of the first input
        backward : its backward operators
        extra : rows, width and bytes per number of by-products, all saved for the gradient to the inputs
        again : whether its result is kept, cheap to recompute, or always recomputed
        """
        record = Record(forward, tuple(inputs), cheap=again == "cheap", transient=again == "always", **vars(backward))
        flows = backward.weight_gradient is not None or any(t.needs_gradient for t in inputs)
        size = self.context.dtype_bytes if dtype_bytes is None else dtype_bytes
        rows, width = shape or (inputs[0].rows, inputs[0].width)
        result = Tensor(self, rows, width, size, record, flows)
        more = tuple(Tensor(self, *each, record, needs_gradient=False) for each in extra)
        record.outputs = (result, *more)
        record.saved = (*backward.saved, *((result,) if backward.saves_output else ()), *more)
        self.records.append(record)
        return result
