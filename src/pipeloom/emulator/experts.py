"""Operators of routed experts: choice, dispatch to their devices, activations and biases, and the way back."""

from __future__ import annotations

from pipeloom.emulator.collectives import all_to_all_cost, ring
from pipeloom.emulator.operators import INDEX_BYTES, STATISTIC_BYTES, gather_rows
from pipeloom.emulator.size import ZERO, Size
from pipeloom.emulator.tape import NVLINK, Backward, Context, Cost, Tensor


def route(x: Tensor, experts: int, chosen: int) -> Tensor:
    """Compute softmax over experts and choose the best. Saves probabilities and indices."""
    elements = x.rows * experts
    return x.tape.record(
        Cost("route", elements * 8, elements * (2 * STATISTIC_BYTES)),
        [x],
        (x.rows, chosen),
        backward=Backward(input_gradient=Cost("route", elements * 8, elements * (3 * STATISTIC_BYTES))),
        extra=[(x.rows, experts, STATISTIC_BYTES), (x.rows, chosen, INDEX_BYTES)],
    )


def weighted_sum(x: Tensor, weights: Tensor, rows: Size) -> Tensor:
    """Sum each token's expert results with its router weights. Saves both."""
    moved = x.num_bytes + rows * (x.width * x.dtype_bytes)
    flops = x.rows * (2 * x.width)
    return x.tape.record(
        Cost("permute", flops, moved),
        [x, weights],
        (rows, x.width),
        backward=Backward(saved=[x, weights], input_gradient=Cost("permute", flops * 2, moved * 2)),
    )


def fused_gate(x: Tensor) -> Tensor:
    """Gate in the kernels of the products before and behind it. Saves ``x``."""
    cost = Cost("view")
    return x.tape.record(
        cost, [x], (x.rows, x.width / 2), backward=Backward(saved=[x], input_gradient=cost), again="cheap"
    )


def clamp(x: Tensor) -> Tensor:
    """Clamp both halves of a gate's input, each by a kernel of its own, and join them again. Saves ``x``.

    The backward masks each half's gradient with its input and joins them (``weighted_bias_quick_geglu_impl`` of
    Megatron Core 0.16, before the fused gate).
    """
    return x.tape.record(
        Cost("clamp", x.rows * x.width, x.num_bytes * 4),
        [x],
        backward=Backward(saved=[x], input_gradient=Cost("clamp", x.rows * x.width, x.num_bytes * 5)),
        again="cheap",
    )


def add_expert_bias(x: Tensor, local_groups: int) -> Tensor:
    """Add each expert's bias times the router's probability to its rows, by eager kernels for each expert.

    Of a number, the forward writes the product, reads both summands, writes the sum, and copies it to join the experts'
    rows. The backward reads the gradient and writes a product twice, reads both to sum them, and joins the experts'
    rows (``TEGroupedMLP._apply_bias`` of Megatron Core 0.16). With fused experts, the kernel of the product adds it.
    """
    if x.context.fused_experts:
        return x
    elements = x.rows * x.width
    back = Cost("add", elements * 4, x.num_bytes * 8, pieces=local_groups)
    return x.tape.record(
        Cost("add", elements * 2, x.num_bytes * 6, pieces=local_groups), [x], backward=Backward(input_gradient=back)
    )


def dispatch(x: Tensor, rows: Size, chosen: int, local_groups: int, reach: float = 1.0) -> Tensor:
    """Send tokens to the devices of their experts and order the ``rows`` there by expert.

    ``reach`` is the share of the experts that one token can choose from.
    """
    context = x.context
    if context.expert == 1 or context.dispatcher == "alltoall":
        return _sort(_exchange(gather_rows(x, rows)), local_groups)
    x = _send(x, chosen, reach)
    if context.dispatcher != "hybridep":
        return gather_rows(x, rows)
    cost = Cost("permute", ZERO, rows * (x.width * x.dtype_bytes))
    return x.tape.record(cost, [x], (rows, x.width), backward=Backward(input_gradient=cost))


def combine(x: Tensor, weights: Tensor, rows: Size, chosen: int, local_groups: int, reach: float = 1.0) -> Tensor:
    """Send the experts' rows back and sum those of each token."""
    context = x.context
    if context.expert == 1 or context.dispatcher == "alltoall":
        return weighted_sum(_exchange(_sort(x, local_groups)), weights, rows)
    arrived = rows * _copies(context, chosen, reach)[0]
    if context.dispatcher != "hybridep":
        x = weighted_sum(x, weights, arrived)
    else:
        moved = x.num_bytes
        x = x.tape.record(
            Cost("permute", ZERO, moved),
            [x, weights],
            (arrived, x.width),
            backward=Backward(saved=[weights], input_gradient=Cost("permute", ZERO, moved)),
        )
    return _send(x, chosen, reach, back=rows)


def _sort(x: Tensor, local_groups: int) -> Tensor:
    """Order arrived rows by expert, or back by their device, if a device has several experts."""
    if x.context.fused_experts or local_groups == 1:
        return x
    cost = Cost("permute", ZERO, x.num_bytes * 2)
    return x.tape.record(cost, [x], backward=Backward(input_gradient=cost))


def _exchange(x: Tensor) -> Tensor:
    """Exchange rows by all-to-all over the expert-parallel group."""
    context = x.context
    if context.expert == 1:
        return x
    cost = all_to_all_cost(x.num_bytes * (1 - context.hidden_expert), context.expert, context.expert_group)
    return x.tape.record(cost, [x], backward=Backward(input_gradient=cost))


def _copies(context: Context, chosen: int, reach: float) -> tuple[float, float]:
    """Return how many devices have an expert of a token, and to how many other devices or nodes it is sent.

    Experts are chosen as if at random among those of ``reach`` of the devices.
    """
    peers, group = context.expert, context.expert_group
    if context.dispatcher == "allgather":
        return float(peers), peers - 1.0
    places = peers if group.device == NVLINK else -(-peers // group.local)
    sent = _distinct(places * reach, chosen) * (places - 1) / places
    return _distinct(peers * reach, chosen), sent


def _distinct(places: float, chosen: int) -> float:
    """Return the expected number of different places of ``chosen`` experts."""
    return places * (1 - (1 - 1 / places) ** chosen) if places > 1 else 1.0


def _send(x: Tensor, chosen: int, reach: float, back: Size | None = None) -> Tensor:
    """Send tokens once to each place that has an expert of theirs, or the sums of its rows ``back``."""
    context = x.context
    here, sent = _copies(context, chosen, reach)
    tokens = x.rows if back is None else back
    group = context.expert_group
    moved = tokens * (x.width * x.dtype_bytes * sent * (1 - context.hidden_expert))
    if context.dispatcher == "allgather":
        kinds = ("all_gather", "reduce_scatter") if back is None else ("reduce_scatter", "all_gather")
        moved = moved / group.lanes
    else:
        kinds = (context.dispatcher, context.dispatcher)
    cost, gradient = (
        Cost(kind, network=moved, device=group.device, steps=context.expert - 1, variant=context.expert)
        for kind in kinds
    )
    rows = tokens * here if back is None else back
    return x.tape.record(cost, [x], (rows, x.width), backward=Backward(input_gradient=gradient))


def enter_expert_tensor(x: Tensor) -> Tensor:
    """Gather the rows of the devices that share an expert. The gathered rows are kept for its weights' gradient."""
    context = x.context
    rows = x.rows * context.expert_tensor
    whole, peers, group = rows * (x.width * x.dtype_bytes), context.expert_tensor, context.expert_tensor_group
    if peers == 1:
        return x
    back = Backward(input_gradient=ring("reduce_scatter", whole, peers, group))
    return x.tape.record(ring("all_gather", whole, peers, group), [x], (rows, x.width), backward=back)


def leave_expert_tensor(x: Tensor) -> Tensor:
    """Sum partial results over the devices that share an expert. Each keeps its rows."""
    peers, group = x.context.expert_tensor, x.context.expert_tensor_group
    if peers == 1:
        return x
    back = Backward(input_gradient=ring("all_gather", x.num_bytes, peers, group))
    cost = ring("reduce_scatter", x.num_bytes, peers, group)
    return x.tape.record(cost, [x], (x.rows / peers, x.width), backward=back)
