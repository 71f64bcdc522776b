"""Operators: what one GPU kernel or collective computes, reads, writes and sends, forward and backward.

Memory bytes count every operand once as input and every result once as output. Gradients to inputs and to weights are
separate operators.

Quantized products (`pipeloom.spec.precision`) read quantized copies of their input, weight and gradient, and write
bfloat16. Casts are operators of their own.

To add an operator, write a function that calls `Tape.record` once. Operators of routed experts are in
`pipeloom.emulator.experts`.
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.emulator.collectives import all_reduce_cost, all_to_all_cost, ring
from pipeloom.emulator.size import ONE, ZERO, Size
from pipeloom.emulator.tape import Backward, Context, Cost, Tensor
from pipeloom.spec.architecture import Norm

STATISTIC_BYTES = 4
INDEX_BYTES = 8


def linear(
    x: Tensor,
    in_width: int,
    out_width: int,
    *,
    bias: bool | int = False,
    split: int = 1,
    plain: bool = False,
    gradient_split: int = 1,
) -> Tensor:
    """Multiply by a weight matrix of ``in_width`` x ``out_width`` (this device's part of ``split``).

    Parameters
    ----------
    bias : bool or int
        Whether every column has a bias, or the number of those that have.
    plain : bool
        Whether the product is in bfloat16 whatever the layer's precision.
    gradient_split : int
        Devices that each quantize their rows of the result's gradient.
    """
    tape = x.tape
    biases = out_width if bias is True else int(bias)
    if not plain:
        x = quantize(x)
    tape.parameter(in_width * out_width * split, split, quantized=x.quantized)
    if biases:
        tape.parameter(biases * split, split)
    return _product("matmul", x, (in_width, out_width), biases=biases, gradient_split=gradient_split)


def row_linear(x: Tensor, in_width: int, out_width: int, *, bias: bool | int = False) -> Tensor:
    """Multiply by this device's rows of a weight matrix, and sum the results over tensor-parallel peers."""
    context = x.context
    peers, gathers = context.tensor, context.sequence_parallel
    y = linear(x, in_width, out_width, bias=bias, split=peers, gradient_split=peers if gathers else 1)
    return leave_tensor_parallel(y, quantized=True)


def grouped_linear(
    x: Tensor, in_width: int, out_width: int, *, groups: int, local_groups: int, split: int = 1, bias: bool = False
) -> Tensor:
    """Multiply rows by the weights of their expert. This device holds ``local_groups`` experts."""
    x = quantize(x)
    total = in_width * out_width * split * groups
    x.tape.parameter(total, split * groups // local_groups, expert=True, quantized=x.quantized)
    if bias:
        x.tape.parameter(out_width * split * groups, split * groups // local_groups, expert=True)
    return _product("grouped_matmul", x, (in_width, out_width), groups=local_groups)


def _product(
    kind: str, x: Tensor, widths: tuple[int, int], *, groups: int = 1, biases: int = 0, gradient_split: int = 1
) -> Tensor:
    """Multiply by weights. The gradient to the weights reads the input as the product did, quantized or not."""
    (in_width, out_width), wide, narrow = widths, x.context.dtype_bytes, x.dtype_bytes
    weight = in_width * out_width * groups
    x.tape.products.add((in_width, out_width))
    flops = x.rows * (2 * in_width * out_width)
    variant = x.quantized.products if x.quantized else 0

    # The gradient of a weight is computed, then added to what earlier microbatches gave.
    adds = x.context.eager and (groups == 1 or x.context.in_blocks)
    # Transformer Engine's GroupedLinear calls cuBLAS for one expert after the other.
    pieces = 1 if x.context.fused_experts else groups

    def cost(memory: Size) -> Cost:
        return Cost(kind, flops, memory, variant=variant, pieces=pieces)

    y = x.tape.record(
        cost(x.rows * (in_width * narrow + out_width * wide) + (weight * narrow + biases * wide)),
        [x],
        (x.rows, out_width),
        backward=Backward(
            saved_for_weight=[x],
            input_gradient=cost(x.rows * (in_width * wide + out_width * narrow) + weight * narrow),
            weight_gradient=cost(x.rows * ((in_width + out_width) * narrow) + 2 * weight * x.context.gradient_bytes),
            temporary=ONE * (weight * wide) if adds else ZERO,
        ),
        dtype_bytes=wide,
    )
    if x.quantized is None:
        return y
    # The result's gradient is quantized before both products of the backward.
    cast = Cost("cast", ZERO, y.num_bytes * (x.quantized.cast_bytes(wide) / wide / gradient_split))
    return x.tape.record(Cost("view"), [y], backward=Backward(input_gradient=cast))


def quantize(x: Tensor) -> Tensor:
    """Quantize the input of a product, once for all products that read it. The gradient passes on."""
    to, tape = x.context.quantization, x.tape
    if to is None or x.quantized is not None:
        return x
    if x not in tape.casts:
        y = tape.record(
            Cost("cast", ZERO, x.rows * (x.width * to.cast_bytes(x.dtype_bytes))),
            [x],
            backward=Backward(passes_gradient=True),
            dtype_bytes=to.num_bytes,
            # As cheap as what it reads: only then nothing larger must be kept in its place.
            again="cheap" if x.producer is not None and x.producer.cheap else "as kept",
        )
        y.quantized = to
        tape.casts[x] = y
    return tape.casts[x]


def norm(x: Tensor, kind: Norm = "rms", *, split: int = 1) -> Tensor:
    """Apply LayerNorm (saves input, mean and deviation) or RMSNorm (saves input and deviation) over the width.

    ``split`` is the number of devices over which the width is divided.
    """
    num_weights = x.width * (2 if kind == "layer" else 1)
    x.tape.parameter(num_weights * split, split)
    return _norm(x, kind, x.width, 1)


def norm_heads(x: Tensor, heads: int, head_width: int, num_weights: int) -> Tensor:
    """Apply RMSNorm to each of the first ``heads`` heads in the columns. All heads share weights."""
    x.tape.parameter(num_weights)
    return _norm(x, "rms", heads * head_width, heads)


def _norm(x: Tensor, kind: Norm, width: float, groups: int) -> Tensor:
    """Apply a norm to ``groups`` groups of ``width`` columns in all.

    Eager PyTorch computes RMSNorm operator by operator. It saves the input in float32 and the result before its weights
    in the place of the input.
    """
    elements, eager = x.rows * width, x.context.eager and kind == "rms"
    num_bytes = elements * x.dtype_bytes
    extra: list[tuple[Size, float, float]] = [(x.rows, groups * (2.0 if kind == "layer" else 1.0), STATISTIC_BYTES)]
    if eager:
        extra += [(x.rows, width, STATISTIC_BYTES), (x.rows, width, x.dtype_bytes)]
    y = x.tape.record(
        Cost("norm", elements * 6, num_bytes * 2),
        [x],
        backward=Backward(
            saved=[] if eager else [x],
            saved_for_weight=[] if eager else [x],
            input_gradient=Cost("norm", elements * 10, num_bytes * 3),
            weight_gradient=Cost("norm", elements * 4, num_bytes * 2),
        ),
        extra=extra,
        again="cheap",
    )
    if eager:
        assert y.producer is not None
        y.producer.saved_for_weight = y.producer.outputs[-1:]
    return y


def activation(x: Tensor) -> Tensor:
    """Apply an elementwise function that saves its input (GELU, SiLU, squared ReLU)."""
    elements = x.rows * x.width
    return x.tape.record(
        Cost("activation", elements * 8, x.num_bytes * 2),
        [x],
        backward=Backward(saved=[x], input_gradient=Cost("activation", elements * 10, x.num_bytes * 3)),
        again="cheap",
    )


def cap(x: Tensor) -> Tensor:
    """Cap numbers by a hyperbolic tangent. Saves its result, or its input if a loss in place overwrites the result."""
    elements, in_place = x.rows * x.width, x.context.loss_in_place
    gradient = Cost("activation", elements * 6, x.num_bytes * 3)
    return x.tape.record(
        Cost("activation", elements * 3, x.num_bytes * 2),
        [x],
        backward=Backward(saved=[x] if in_place else [], saves_output=not in_place, input_gradient=gradient),
    )


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Multiply elementwise. Saves both factors."""
    elements = x.rows * x.width
    return x.tape.record(
        Cost("multiply", elements, x.num_bytes * 3),
        [x, y],
        backward=Backward(saved=[x, y], input_gradient=Cost("multiply", elements * 2, x.num_bytes * 5)),
        again="cheap",
    )


def dropout(x: Tensor) -> Tensor:
    """Drop numbers at random, in the kernel of the addition behind it. Saves a mask of a byte a number."""
    elements = x.rows * x.width
    return x.tape.record(
        Cost("add", elements, elements),
        [x],
        backward=Backward(input_gradient=Cost("add", elements, x.num_bytes * 2 + elements)),
        extra=[(x.rows, x.width, 1)],
    )


def scale(x: Tensor) -> Tensor:
    """Multiply each column by a learned factor. Saves its input."""
    elements = x.rows * x.width
    x.tape.parameter(x.width)
    return x.tape.record(
        Cost("multiply", elements, x.num_bytes * 2),
        [x],
        backward=Backward(
            saved_for_weight=[x],
            input_gradient=Cost("multiply", elements, x.num_bytes * 2),
            weight_gradient=Cost("multiply", elements * 2, x.num_bytes * 2),
        ),
        again="cheap",
    )


def hand_on(x: Tensor, feature: Tensor) -> Tensor:
    """Return ``x``, while a stream leaves the layer. The stream's gradient arrives with that of ``x``."""
    return x.tape.record(Cost("view"), [x, feature], backward=Backward(passes_gradient=True))


def gated_activation(x: Tensor) -> Tensor:
    """Apply SwiGLU to the two halves of ``x``. As one kernel, it saves only ``x``; eager, also the activation."""
    width = x.width / 2
    elements = x.rows * width
    return x.tape.record(
        Cost("activation", elements * 9, x.num_bytes * 1.5),
        [x],
        (x.rows, width),
        backward=Backward(saved=[x], input_gradient=Cost("activation", elements * 14, x.num_bytes * 2.5)),
        extra=[(x.rows, width, x.dtype_bytes)] if x.context.eager else (),
        again="cheap",
    )


def rotary(x: Tensor, width: float) -> Tensor:
    """Apply rotary position embedding to ``width`` columns in one kernel. Saves nothing of its input."""
    moved = x.rows * (width * x.dtype_bytes * 2)
    flops = x.rows * (width * 3)
    cost = Cost("rotary", flops, moved)
    return x.tape.record(cost, [x], backward=Backward(input_gradient=cost))


def scaled_rotary(x: Tensor, width: float) -> Tensor:
    """Apply rotary position embedding with a scale by eager kernels. Saves nothing of its input.

    Of a number, the forward reads and writes two products (4), negates half of the numbers (1), joins the halves (2),
    sums both products (3) and copies the result (2). The backward lacks the copy
    (``_apply_rotary_pos_emb_bshd`` of Megatron Core 0.16, which Transformer Engine's kernel replaces without a scale).
    """
    num_bytes, flops = x.rows * (width * x.dtype_bytes), x.rows * (width * 3)
    return x.tape.record(
        Cost("rotary", flops, num_bytes * 12),
        [x],
        backward=Backward(input_gradient=Cost("rotary", flops, num_bytes * 10)),
    )


def concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate rows of tensors of one width. Saves nothing."""
    first = parts[0]
    rows = first.rows * len(parts)
    cost = Cost("copy", ZERO, rows * (first.width * first.dtype_bytes * 2))
    return first.tape.record(cost, parts, (rows, first.width), backward=Backward(input_gradient=cost))


def modulate(x: Tensor, shift_scale: Tensor) -> Tensor:
    """Compute ``x * (1 + scale) + shift`` with one shift and scale per instance."""
    elements = x.rows * x.width
    return x.tape.record(
        Cost("modulate", elements * 2, x.num_bytes * 2 + shift_scale.num_bytes),
        [x, shift_scale],
        backward=Backward(
            saved=[x, shift_scale],
            input_gradient=Cost("modulate", elements * 4, x.num_bytes * 3 + shift_scale.num_bytes * 2),
        ),
        again="cheap",
    )


def attention(
    inputs: list[Tensor],
    pairs: Size,
    *,
    heads: int,
    query_key_width: int,
    value_width: int,
    rows: Size,
    causal: bool = False,
) -> Tensor:
    """Compute tiled attention (FlashAttention). Saves its inputs, its output and one log-sum per row and head.

    Parameters
    ----------
    inputs : tensors with queries, keys and values, in any grouping
    pairs : query-key pairs that are computed; if causal, half of them
    rows : query rows
    """
    first = inputs[0]
    if first.context.unfused_attention:
        return _unfused_attention(inputs, pairs * (2 if causal else 1), heads, query_key_width, value_width, rows)
    kind = "causal_attention" if causal else "attention"
    width = heads * value_width
    per_key = 2 * heads * (query_key_width + value_width)
    flops, more = pairs * per_key, rows * per_key
    moved = rows * (width * first.dtype_bytes)
    for tensor in inputs:
        moved = moved + tensor.num_bytes
    backward = Cost(f"{kind}_backward", flops * 2.5, moved * 2, variant=query_key_width, flops_per_key=more * 2.5)
    extra: list[tuple[Size, float, float]] = [(rows, heads, STATISTIC_BYTES)]
    if first.context.context > 1 and first.context.output_twice:
        extra.append((rows, width, first.dtype_bytes))
    return first.tape.record(
        Cost(kind, flops, moved, variant=query_key_width, flops_per_key=more),
        inputs,
        (rows, width),
        backward=Backward(saved=inputs, saves_output=True, input_gradient=backward),
        extra=extra,
    )


def _unfused_attention(
    inputs: list[Tensor], pairs: Size, heads: int, query_key_width: int, value_width: int, rows: Size
) -> Tensor:
    """Compute attention by two products with a softmax and a dropout between them.

    Each score takes 13 bytes in the forward and 17 in the backward. 5 of them are kept: the probability, its dropout's
    mask and result (Korthikanti et al. 2022, section 4.1).
    """
    tape, dtype = inputs[0].tape, inputs[0].dtype_bytes
    scores, moved = pairs * heads, rows * (heads * value_width * dtype)
    for tensor in inputs:
        moved = moved + tensor.num_bytes
    first, second = scores * (2 * query_key_width), scores * (2 * value_width)
    raw = tape.record(
        Cost("matmul", first, moved * 0.5 + scores * dtype),
        inputs,
        (scores, 1),
        backward=Backward(saved=inputs, input_gradient=Cost("matmul", first * 2, moved + scores * (2 * dtype))),
    )
    chances = tape.record(
        Cost("softmax", scores * 8, scores * 9),
        [raw],
        (scores, 1),
        backward=Backward(saves_output=True, input_gradient=Cost("softmax", scores * 8, scores * 11)),
        extra=[(scores, 1, 1)],
    )
    return tape.record(
        Cost("matmul", second, moved * 0.5 + scores * dtype),
        [chances],
        (rows, heads * value_width),
        backward=Backward(input_gradient=Cost("matmul", second * 2, moved + scores * (2 * dtype))),
        extra=[(scores, 1, dtype)],
    )


def scan(x: Tensor, *, heads: int, head_width: int, groups: int, state: int, chunk: int) -> Tensor:
    """Compute Mamba-2's chunked state-space scan: products inside chunks, and states passed between them."""
    inner = heads * head_width
    within = chunk * (2 * groups * state + 2 * inner) / 2  # scores and their product with x, causal half
    between = 2 * 2 * state * inner  # states from x, and outputs from states
    flops = x.rows * (within + between)
    states = x.rows * (inner * state / chunk * STATISTIC_BYTES)
    moved = x.num_bytes + x.rows * (inner * x.dtype_bytes) + states * 2
    x.tape.parameter(3 * heads * x.context.tensor, x.context.tensor)  # A, D and the bias of dt
    return x.tape.record(
        Cost("scan", flops, moved),
        [x],
        (x.rows, inner),
        backward=Backward(saved=[x], saves_output=True, input_gradient=Cost("scan", flops * 2.5, moved * 2.5)),
        extra=[(x.rows, inner * state / chunk, STATISTIC_BYTES)],
    )


def depthwise(x: Tensor, width: float, kernel: int, *, bias: bool = True) -> Tensor:
    """Compute a causal depthwise convolution over ``width`` columns. Saves its input.

    A fused kernel has the activation behind it, and returns these columns alone.
    """
    split = x.context.tensor
    x.tape.parameter(width * (kernel + bias) * split, split)
    moved = x.rows * (width * x.dtype_bytes)
    flops = x.rows * (2 * width * kernel)
    return x.tape.record(
        Cost("depthwise", flops, moved * 2),
        [x],
        (x.rows, x.width if x.context.eager else width),
        backward=Backward(
            saved=[x],
            saved_for_weight=[x],
            input_gradient=Cost("depthwise", flops, moved * 3),
            weight_gradient=Cost("depthwise", flops, moved * 2),
        ),
    )


def embedding(indices: Tensor, vocabulary: int, width: int) -> Tensor:
    """Look up rows of a table that is divided over tensor-parallel devices. Saves the indices.

    PyTorch makes the gradient of the whole table before it is added to the accumulated one.
    """
    context = indices.context
    context.share("vocabulary", vocabulary)  # raises if it does not divide
    indices.tape.parameter(vocabulary * width, context.tensor)
    moved = indices.rows * (width * context.dtype_bytes)
    table = ONE * (vocabulary // context.tensor * width * context.dtype_bytes)
    return indices.tape.record(
        Cost("embedding", ZERO, moved * 2),
        [indices],
        (indices.rows, width),
        backward=Backward(
            saved_for_weight=[indices],
            weight_gradient=Cost("embedding", ZERO, moved + indices.rows * (width * 2 * context.gradient_bytes)),
            temporary=table,
        ),
        dtype_bytes=context.dtype_bytes,
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute softmax and loss. Saves the log-probabilities in float32 and the targets.

    A loss in place computes the gradient of the logits in the forward and writes it over them. It saves nothing else.
    """
    elements, narrow = logits.rows * logits.width, logits.num_bytes
    if logits.context.loss_in_place:
        return logits.tape.record(
            Cost("cross_entropy", elements * 9, narrow * 3),
            [logits, targets],
            (logits.rows, 1),
            backward=Backward(
                saved=[logits, targets], input_gradient=Cost("cross_entropy", elements, narrow * 2), in_place=True
            ),
            dtype_bytes=STATISTIC_BYTES,
        )
    if logits.context.eager and logits.dtype_bytes < STATISTIC_BYTES:
        cast = Backward(input_gradient=Cost("view"))
        logits = logits.tape.record(Cost("view"), [logits], backward=cast, dtype_bytes=STATISTIC_BYTES)
    full = elements * STATISTIC_BYTES
    # PyTorch's loss makes the gradient of the log-probabilities, mostly zeros, before that of the logits.
    temporary = full if logits.context.eager else ZERO
    return logits.tape.record(
        Cost("cross_entropy", elements * 6, narrow + full * 2),
        [logits, targets],
        (logits.rows, 1),
        backward=Backward(
            saved=[targets], input_gradient=Cost("cross_entropy", elements * 3, narrow + full), temporary=temporary
        ),
        dtype_bytes=STATISTIC_BYTES,
        extra=[(logits.rows, logits.width, STATISTIC_BYTES)],
    )


def squared_error(x: Tensor) -> Tensor:
    """Compute the mean squared error against a target of the same size. Saves the difference."""
    elements = x.rows * x.width
    cost = Cost("squared_error", elements * 3, x.num_bytes * 3)
    return x.tape.record(
        cost, [x], (x.rows, 1), backward=Backward(input_gradient=cost), extra=[(x.rows, x.width, x.dtype_bytes)]
    )


def regroup(x: Tensor, factor: float) -> Tensor:
    """Join ``factor`` rows into one of ``factor`` times the width, in the same memory."""
    cost = Cost("copy")
    return x.tape.record(cost, [x], (x.rows / factor, x.width * factor), backward=Backward(input_gradient=cost))


def average(x: Tensor, factor: int) -> Tensor:
    """Average groups of ``factor`` rows. Saves nothing."""
    cost = Cost("copy", x.rows * x.width, x.num_bytes * (1 + 1 / factor))
    return x.tape.record(cost, [x], (x.rows / factor, x.width), backward=Backward(input_gradient=cost), again="cheap")


def gather_rows(x: Tensor, rows: Size) -> Tensor:
    """Reorder or repeat rows (to experts and back)."""
    moved = x.num_bytes + rows * (x.width * x.dtype_bytes)
    cost = Cost("permute", ZERO, moved)
    return x.tape.record(cost, [x], (rows, x.width), backward=Backward(input_gradient=cost))


def _shown(num_bytes: Size, context: Context) -> Size:
    """Return the part of a tensor-parallel collective's bytes that computation does not hide."""
    return num_bytes * (1 - context.hidden_tensor)


def _quantized_gather(num_bytes: Size, context: Context) -> Cost:
    """Return the cost to gather what peers quantized, with a common scale if there is one for the whole tensor."""
    cost = ring("all_gather", _shown(num_bytes, context), context.tensor, context.tensor_group)
    to = context.quantization
    # An all-reduce of the largest absolute value is too small for more than its messages to count.
    return replace(cost, steps=cost.steps + 2 * (context.tensor - 1)) if to and to.amax_reads else cost


def enter_tensor_parallel(x: Tensor, *, plain: bool = False) -> Tensor:
    """Gather all rows on every tensor-parallel peer. Without sequence parallelism, they are there already.

    The gathered tensor is not kept: the backward gathers again, as in Megatron. Eager PyTorch keeps it. Peers quantize
    their rows before they send them, unless they are ``plain``, which no quantized product reads.
    """
    context = x.context
    if context.tensor == 1:
        return x
    rows = x.rows * context.row_split
    group = context.tensor_group
    whole = _shown(rows * (x.width * context.dtype_bytes), context)
    if context.sequence_parallel:
        sent = x if plain else quantize(x)
        gathered = ring("all_gather", whole, context.tensor, group)
        if sent.quantized is not None:
            gathered = _quantized_gather(rows * (x.width * sent.dtype_bytes), context)
        y = x.tape.record(
            gathered,
            [sent],
            (rows, x.width),
            backward=Backward(input_gradient=ring("reduce_scatter", whole, context.tensor, group)),
            dtype_bytes=sent.dtype_bytes,
            again="as kept" if context.eager else "always",
        )
        y.quantized = sent.quantized
        return y
    return x.tape.record(
        Cost("view"),
        [x],
        (rows, x.width),
        backward=Backward(input_gradient=all_reduce_cost(whole, context.tensor, group)),
        again="always",
    )


def leave_tensor_parallel(x: Tensor, *, quantized: bool = False) -> Tensor:
    """Sum partial results over tensor-parallel peers. With sequence parallelism, each keeps its rows.

    ``quantized`` is whether a product alone reads the gradient, so that peers quantize it before they send it.
    """
    context = x.context
    if context.tensor == 1:
        return x
    group, shown = context.tensor_group, _shown(x.num_bytes, context)
    if context.sequence_parallel:
        back = ring("all_gather", shown, context.tensor, group)
        if quantized and context.quantization is not None:
            back = _quantized_gather(x.rows * (x.width * context.quantization.num_bytes), context)
        return x.tape.record(
            ring("reduce_scatter", shown, context.tensor, group),
            [x],
            (x.rows / context.tensor, x.width),
            backward=Backward(input_gradient=back),
        )
    return x.tape.record(
        all_reduce_cost(shown, context.tensor, group), [x], backward=Backward(input_gradient=Cost("view"))
    )


def share_keys(x: Tensor, width: float) -> Tensor:
    """Send ``width`` columns (keys and values) around the context-parallel ring."""
    context = x.context
    if context.context == 1:
        return x
    whole = x.rows * (context.context * width * x.dtype_bytes)
    # Each device sends only to the next, so one network interface carries what passes from node to node.
    group = context.context_group._replace(lanes=1.0)
    cost = ring("ring_exchange", whole, context.context, group)
    back = ring("ring_exchange", whole, context.context, group, passes=2)
    return x.tape.record(cost, [x], backward=Backward(input_gradient=back))


def exchange_heads(x: Tensor) -> Tensor:
    """Divide heads in place of tokens over context parallelism, or the reverse (all-to-all)."""
    context = x.context
    if context.context == 1:
        return x
    cost = all_to_all_cost(x.num_bytes, context.context, context.context_group)
    return x.tape.record(cost, [x], backward=Backward(input_gradient=cost))
