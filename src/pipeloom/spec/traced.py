"""Traced layers: the operators that a layer's own code ran, with counts linear in a workload's features."""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.bounds import Count, Number, NumBytes, Value
from pipeloom.errors import InputError

Counts = tuple[Value, Value, Value, Value]
"""A number as ``one + instances * I + tokens * T + token_pairs * P`` of a workload: these four coefficients."""

NOTHING: Counts = (0.0, 0.0, 0.0, 0.0)


class TracedInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor that a layer reads and does not compute. The first one is the state."""

    rows: Counts
    width: Count
    dtype_bytes: Count = 2
    gradient: bool = True


class PairWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``factor`` times the query-key pairs within windows of ``length`` keys: sliding ones, or blocks."""

    length: Count
    slides: bool
    factor: Value = 1.0


class _OperatorBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="operator"):
    pass


class ProductOperator(_OperatorBase, frozen=True, tag="product"):
    """Product with a weight matrix."""

    reads: Number
    """Tensor that is multiplied: an input, or after all inputs the result of an operator."""
    in_width: Count
    out_width: Count
    rows: Counts
    """Rows of the result."""
    biases: Number = 0
    """Columns that have a bias."""
    split: Literal["nothing", "columns", "rows"] = "nothing"
    """What tensor parallelism divides: the columns of the weight, its rows, or nothing."""
    owned: bool = True
    """Whether the weight counts as a parameter of the layer. A tied weight does not."""
    eager: bool = True
    """Whether autograd keeps what it reads."""
    eager_bytes: Counts = NOTHING
    """Bytes that it keeps beside it."""
    plain: bool = False
    """Whether it is in bfloat16 whatever the layer's precision, as a router."""
    groups: Number = 0
    group_columns: Number = 0
    """Groups of heads that share keys and values, and the columns of all of these. Tensor parallelism divides them no
    further than into single groups."""

    def columns(self, split: int) -> int:
        """Return the columns on each of ``split`` devices."""
        if not self.groups:
            return -(-self.out_width // split)
        rest = self.out_width - self.group_columns
        return -(-rest // split) + self.group_columns // self.groups * max(1, self.groups // split)


class KernelOperator(_OperatorBase, frozen=True, tag="kernel"):
    """Kernel that memory limits: a norm, an activation, a residual addition, a rotation, a copy."""

    kind: str
    """Name by which a device's efficiency is looked up."""
    reads: tuple[Number, ...]
    rows: Counts
    width: Count
    """Shape of the result."""
    flops: Counts
    forward_bytes: Counts
    """Counts of the forward."""
    backward_bytes: Counts
    backward_flops: Counts = NOTHING
    """Counts of the gradient to what it reads."""
    dtype_bytes: Count = 2
    """Bytes of a number of the result."""
    saves: tuple[Number, ...] = ()
    """Tensors that the backward of one fused kernel reads; the same index as in ``reads``."""
    saves_result: bool = False
    """Whether that backward reads the result."""
    statistics: Counts = NOTHING
    """Bytes of the by-products that it reads beside these."""
    eager_saves: tuple[Number, ...] = ()
    eager_saves_result: bool = False
    eager_bytes: Counts = NOTHING
    """The same for the operators of eager PyTorch."""
    parameters: NumBytes = 0
    """Numbers of the kernel's own weights."""
    passes: bool = False
    """Whether the gradient of the result is the gradient of each input, without a kernel."""
    cheap: bool = False
    """Whether selective recomputation drops the result."""
    forward_only: bool = False
    """Whether it has no backward, as what chooses the keys of a sparse attention."""
    transient: bool = False
    """Whether a fused trainer's backward runs it again rather than keep the result: a copy in another precision."""


class AttentionOperator(_OperatorBase, frozen=True, tag="attention"):
    """Fused attention."""

    reads: tuple[Number, ...]
    """Tensors with queries, keys and values."""
    rows: Counts
    """Query rows."""
    heads: Count
    query_key_width: Count
    value_width: Count
    key_value_width: Count
    """Columns of keys and values together."""
    pairs: Counts = NOTHING
    """Query-key pairs that are computed, outside ``windows``."""
    windows: tuple[PairWindow, ...] = ()
    """Pairs within windows."""
    causal: bool = True
    eager_bytes: Counts = NOTHING
    """Bytes that autograd keeps beside what it reads, because a tensor that it reads is a view of a larger one."""
    columns: tuple[Number, ...] = ()
    """Columns that it reads of each tensor; empty: all. A fused kernel reads copies if these are not all."""


class ScanOperator(_OperatorBase, frozen=True, tag="scan"):
    """Chunked scan of a linear attention or a state space. Its backward takes 2.5 times the forward."""

    reads: tuple[Number, ...]
    rows: Counts
    width: Count
    flops: Counts
    bytes: Counts
    """Operations, and bytes that the forward reads and writes."""
    states: Counts = NOTHING
    """Bytes of the states between chunks, which the backward reads."""
    parameters: NumBytes = 0


class ExpertsOperator(_OperatorBase, frozen=True, tag="experts"):
    """Routed experts: ``chosen`` of ``experts`` for each row."""

    reads: tuple[Number, ...]
    """The state, and the weights of the chosen experts."""
    rows: Counts
    hidden: Count
    inner: Count
    experts: Count
    chosen: Count
    gated: bool = True
    biases: Number = 0
    """Numbers of the biases of one expert."""
    eager_bytes: Counts = NOTHING
    """Bytes that autograd keeps beside what fused kernels do."""
    unused: NumBytes = 0
    """Numbers of the weights that the model has for experts that return their tokens, and that nothing reads."""


Operator = ProductOperator | KernelOperator | AttentionOperator | ScanOperator | ExpertsOperator


def reads_of(operator: Operator) -> tuple[int, ...]:
    """Return the tensors that an operator reads."""
    return (operator.reads,) if isinstance(operator, ProductOperator) else operator.reads


def check_operators(
    where: str, inputs: tuple[TracedInput, ...], operators: tuple[Operator, ...], result: int | None = None
) -> None:
    """Raise `InputError` with the operator that reads what does not exist before it."""
    if not inputs:
        raise InputError(f"{where}.inputs", "is empty", "give at least the state")
    for i, operator in enumerate(operators):
        for read in reads_of(operator):
            if not 0 <= read < len(inputs) + i:
                raise InputError(f"{where}.operators[{i}].reads", f"{read} is no tensor before it")
    if result is not None and not 0 <= result < len(inputs) + len(operators):
        raise InputError(f"{where}.result", f"{result} is no tensor of the layer")
