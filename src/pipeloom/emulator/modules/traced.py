"""A traced layer on symbolic tensors: its operators in the order in which the layer's own code ran them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import singledispatch

from pipeloom.emulator import operators as ops
from pipeloom.emulator.modules.feed_forward import MixtureOfExperts
from pipeloom.emulator.size import ZERO, Size, Window
from pipeloom.emulator.tape import Backward, Cost, Tape, Tensor
from pipeloom.spec.traced import (
    AttentionOperator,
    Counts,
    ExpertsOperator,
    KernelOperator,
    Operator,
    ProductOperator,
    ScanOperator,
    TracedInput,
)


@dataclass(frozen=True)
class Traced:
    """Operators that a layer's own code ran. ``parameters`` are all of the layer's."""

    inputs: tuple[TracedInput, ...]
    operators: tuple[Operator, ...]
    parameters: int
    result: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Record the operators. ``x`` is the state."""
        before = sum(p.total for p in x.tape.parameters)
        run = _Run(x.tape)
        for i, each in enumerate(self.inputs):
            rows = Size(*each.rows) / (x.context.context * x.context.row_split)
            if i == 0 and each.gradient and rows == x.rows:
                run.tensors.append(x)
                continue
            gradient = each.gradient and x.needs_gradient
            run.tensors.append(Tensor(x.tape, rows, each.width, each.dtype_bytes, needs_gradient=gradient))
        for operator in self.operators:
            run.tensors.append(play(operator, run))
        rest = self.parameters - (sum(p.total for p in x.tape.parameters) - before)
        if rest > 0.5:  # weights that no operator reads, such as positions
            x.tape.parameter(rest)
        return run.tensors[-1 if self.result is None else self.result]


@dataclass(eq=False)
class _Run:
    """The tensors of one call, and which of them tensor parallelism divides by columns."""

    tape: Tape
    tensors: list[Tensor] = field(default_factory=list)
    divided: set[Tensor] = field(default_factory=set)
    gathered: dict[Tensor, Tensor] = field(default_factory=dict)

    def whole_rows(self, number: int) -> Tensor:
        """Return a tensor with the rows of all tensor-parallel devices. Several operators share one gather."""
        x = self.tensors[number]
        if x in self.divided:
            return x
        if x not in self.gathered:
            self.gathered[x] = ops.enter_tensor_parallel(x)
        return self.gathered[x]

    def reads(self, numbers: Sequence[int]) -> tuple[list[Tensor], bool]:
        """Return tensors, gathered if tensor parallelism divides one of them, and whether it does."""
        divided = any(self.tensors[n] in self.divided for n in numbers)
        return [self.whole_rows(n) if divided else self.tensors[n] for n in numbers], divided

    def size(self, counts: Counts, divided: bool) -> Size:
        """Return the share of one device of a count in proportion to rows and columns."""
        context = self.tape.context
        return Size(*counts) / (context.context * (context.tensor if divided else context.row_split))

    def rows(self, counts: Counts, divided: bool) -> Size:
        """Return the rows on one device."""
        context = self.tape.context
        return Size(*counts) / (context.context * (1 if divided else context.row_split))


def _keep_bytes(y: Tensor, extra: Size) -> None:
    """Let the operator that made a tensor keep bytes for its backward."""
    record = y.producer
    if extra != ZERO and record is not None:
        more = Tensor(y.tape, extra, 1, 1, record, False)
        record.outputs, record.saved = (*record.outputs, more), (*record.saved, more)


@singledispatch
def play(operator: Operator, run: _Run) -> Tensor:
    """Record one operator and return its result."""
    raise NotImplementedError(type(operator).__name__)


@play.register
def _(operator: ProductOperator, run: _Run) -> Tensor:
    tape, context = run.tape, run.tape.context
    in_width, out_width = operator.in_width, operator.out_width
    x = run.tensors[operator.reads]
    columns = operator.split == "columns" or (operator.split == "nothing" and x in run.divided)
    if operator.split == "columns":
        x = run.whole_rows(operator.reads)
    width = in_width / (context.tensor if operator.split == "rows" else 1)
    x = _reshaped(x, min(width, _step(run.tensors[operator.reads], operator, run)), run.divided)
    x = _some_rows(x, run.rows(operator.rows, columns or operator.split == "rows"), run.divided)
    count = len(tape.parameters)
    if operator.split == "rows":
        y = ops.row_linear(x, context.share("weight rows", in_width), out_width, bias=operator.biases)
    elif columns:
        local = operator.columns(context.tensor)
        y = ops.linear(x, in_width, local, bias=operator.biases // context.tensor, split=context.tensor)
        run.divided.add(y)
    else:
        y = ops.linear(x, in_width, out_width, bias=operator.biases, plain=operator.plain)
    if context.eager:
        _keep_bytes(y, run.size(operator.eager_bytes, columns))
    if not operator.owned:
        del tape.parameters[count:]
    return y


def _step(x: Tensor, operator: ProductOperator, run: _Run) -> float:
    """Return the numbers of its input for each row of a product: fewer than a row has if a convolution overlaps."""
    rows = run.rows(operator.rows, x in run.divided).tokens
    return x.rows.tokens * x.width / rows if rows else float(operator.in_width)


def _reshaped(x: Tensor, width: float, divided: set[Tensor]) -> Tensor:
    """Return the same numbers in rows of ``width``; a wider tensor of as many rows is read in part."""
    ratio = width / x.width
    if ratio == 1 or (ratio < 1 and x.producer is not None):
        return x
    y = ops.regroup(x, ratio)
    if x in divided:
        divided.add(y)
    return y


def _some_rows(x: Tensor, rows: Size, divided: set[Tensor]) -> Tensor:
    """Return a view of some rows, such as the first of each sequence, or the tensor if these are all."""
    if rows.tokens > x.rows.tokens * 0.999 or not x.rows.tokens:
        return x
    whole = Cost("copy", ZERO, x.num_bytes)  # the gradient, with zeros in the other rows
    y = x.tape.record(Cost("view"), [x], (rows, x.width), backward=Backward(input_gradient=whole), again="always")
    if x in divided:
        divided.add(y)
    return y


def _part(x: Tensor, columns: float) -> Tensor:
    """Return a copy of some columns, or the tensor if these are all."""
    if columns >= x.width:
        return x
    copied = Cost("copy", ZERO, x.rows * (2 * columns * x.dtype_bytes))
    return x.tape.record(copied, [x], (x.rows, columns), backward=Backward(input_gradient=copied))


@play.register
def _(operator: KernelOperator, run: _Run) -> Tensor:
    tape, eager = run.tape, run.tape.context.eager
    inputs, divided = run.reads(operator.reads)
    saved = [inputs[operator.reads.index(n)] for n in (operator.eager_saves if eager else operator.saves)]
    extra = run.size(operator.eager_bytes if eager else operator.statistics, divided)
    forward = run.size(operator.forward_bytes, divided)
    backward = run.size(operator.backward_bytes, divided)
    weights = None
    if operator.parameters:
        split = tape.context.tensor if divided else 1
        tape.parameter(operator.parameters, split)
        if not operator.forward_only:
            weights = Cost(operator.kind, run.size(operator.flops, divided), forward)
    width = operator.width / (tape.context.tensor if divided else 1)
    y = tape.record(
        Cost(operator.kind, run.size(operator.flops, divided), forward),
        inputs,
        (run.rows(operator.rows, divided), width),
        backward=Backward(passes_gradient=True)
        if operator.passes
        else Backward(
            saved=saved,
            saved_for_weight=saved if weights is not None else (),
            saves_output=operator.eager_saves_result if eager else operator.saves_result,
            input_gradient=Cost(operator.kind, run.size(operator.backward_flops, divided), backward),
            weight_gradient=weights,
        ),
        dtype_bytes=operator.dtype_bytes,
        extra=[(extra, 1, 1)] if extra != ZERO else (),
        again="always" if operator.transient and not eager else "cheap" if operator.cheap else "as kept",
    )
    if divided:
        run.divided.add(y)
    return y


@play.register
def _(operator: AttentionOperator, run: _Run) -> Tensor:
    context = run.tape.context
    inputs, divided = run.reads(dict.fromkeys(operator.reads))  # type: ignore[arg-type]
    split = context.tensor if divided else 1
    heads = context.share("attention heads", operator.heads) if divided else operator.heads
    inputs = [*inputs[:-1], ops.share_keys(inputs[-1], operator.key_value_width / split)]
    pairs = Size(*operator.pairs)
    for each in operator.windows:
        pairs = pairs + Size(windowed=((Window(each.length, each.slides), each.factor),))
    if operator.columns and not context.eager:
        inputs = [_part(x, each / split) for x, each in zip(inputs, operator.columns, strict=True)]
    y = ops.attention(
        inputs,
        pairs / context.context,
        heads=heads,
        query_key_width=operator.query_key_width,
        value_width=operator.value_width,
        rows=run.rows(operator.rows, divided),
        causal=operator.causal,
    )
    if context.eager:
        _keep_bytes(y, run.size(operator.eager_bytes, divided))
    if divided:
        run.divided.add(y)
    return y


@play.register
def _(operator: ScanOperator, run: _Run) -> Tensor:
    tape = run.tape
    inputs, divided = run.reads(list(dict.fromkeys(operator.reads)))
    inputs = [ops.exchange_heads(each) for each in inputs]
    flops, moved = run.size(operator.flops, divided), run.size(operator.bytes, divided)
    states, split = run.size(operator.states, divided), tape.context.tensor if divided else 1
    if operator.parameters:
        tape.parameter(operator.parameters, split)
    y = tape.record(
        Cost("scan", flops, moved),
        inputs,
        (run.rows(operator.rows, divided), operator.width / split),
        backward=Backward(saved=inputs, saves_output=True, input_gradient=Cost("scan", flops * 2.5, moved * 2.5)),
        extra=[(states, 1, 1)] if states != ZERO else (),
    )
    y = ops.exchange_heads(y)
    if divided:
        run.divided.add(y)
    return y


@play.register
def _(operator: ExpertsOperator, run: _Run) -> Tensor:
    context, tape = run.tape.context, run.tape
    spread = context.expert > 1
    rest = operator.biases * operator.experts + operator.unused
    if rest:
        tape.parameter(rest, context.expert, expert=True)
    experts = MixtureOfExperts(
        operator.inner, operator.experts, operator.chosen, gated=operator.gated, hidden=operator.hidden
    )
    tokens = run.tensors[operator.reads[0]] if spread else run.whole_rows(operator.reads[0])
    y = experts.run(tokens, run.tensors[operator.reads[-1]], biased=operator.biases > 0)
    if context.eager:
        _keep_bytes(y, run.size(operator.eager_bytes, not spread))
    return y if spread else ops.leave_tensor_parallel(y)
