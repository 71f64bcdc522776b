"""Execution of a chunk's layers on one (sub-)microbatch, in blocks that keep or recompute their activations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.execute.memory import OffloadedTensors, SelectiveRecompute
from pipeloom.runtime.execute.split import DeferredWeights, backward_inputs, edge_of, run_backward
from pipeloom.runtime.model.model import Emit
from pipeloom.runtime.model.random_state import RandomState
from pipeloom.spec import TRAITS, Strategy, word_strategies

Layer = Callable[..., Tensor | Emit]
Bounds = tuple[tuple[int, int, Strategy], ...]
"""Blocks of a chunk: first layer, one past the last, memory strategy."""


@functools.cache
def block_bounds(strategy: str, num_layers: int, with_loss: bool = False) -> Bounds:
    """Split layers into blocks: runs of one strategy, and single layers that are recomputed.

    The backward thus recomputes one layer at a time. ``strategy`` is one word for all layers, or one per layer
    separated by commas. ``with_loss`` appends the loss as one more layer with the last strategy. Raises
    `ExecutionError` if a strategy is unknown or their number is wrong.
    """
    try:
        chosen = word_strategies(strategy)
    except InputError as error:
        raise ExecutionError(f"memory {error}") from error
    if len(chosen) == 1:
        chosen *= num_layers
    if len(chosen) != num_layers:
        raise ExecutionError(f"memory strategy {strategy!r} is for {len(chosen)} layers, there are {num_layers}")
    bounds, begin = [], 0
    for word, run in itertools.groupby(chosen):
        end = begin + len(list(run))
        step = 1 if TRAITS[word].recomputes != "nothing" else end - begin
        bounds += [(first, first + step, word) for first in range(begin, end, step)]
        begin = end
    if with_loss:
        last = bounds[-1]
        bounds[-1] = (last[0], last[1] + 1, last[2])
    return tuple(bounds)


@contextmanager
def kept_casts(device: torch.device, autocast: torch.dtype | None) -> Iterator[None]:
    """Return a context for an iteration under autocast in which weights are cast once for all passes.

    Torch drops the casts of weights at the end of the outermost autocast region. Without this region, each pass would
    cast them again, and each microbatch in flight would hold a copy of the weights for its backward.
    """
    if autocast is None:
        yield
        return
    kind = device.type
    # The region keeps all other autocast settings.
    region = torch.autocast(
        kind,
        torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
    with region, backward_region(device):
        yield


@contextmanager
def backward_region(device: torch.device) -> Iterator[None]:
    """Count as an autocast region in the thread that runs backwards on an accelerator.

    Torch counts regions in each thread, but the threads share the casts. Otherwise any region within a backward, such
    as that of `torch.amp.custom_bwd`, would be the outermost one of its thread and drop the casts.
    """
    if device.type == "cpu":
        # The calling thread runs these backwards.
        yield
        return
    _in_backward(device, torch.autocast_increment_nesting)
    try:
        yield
    finally:
        _in_backward(device, torch.autocast_decrement_nesting)


def _in_backward(device: torch.device, act: Callable[[], object]) -> None:
    probe = torch.zeros((), device=device, requires_grad=True)

    def hook(_: Tensor) -> None:
        act()

    probe.register_hook(hook)  # type: ignore[no-untyped-call]
    torch.autograd.backward(probe)


@dataclass(frozen=True, slots=True)
class ChunkStreams:
    """Streams of a chunk by layer, counted within the chunk. Layers without streams are absent."""

    takes: Mapping[int, tuple[str, ...]]
    emits: Mapping[int, tuple[str, ...]]
    gives: frozenset[str] = frozenset()
    """Streams emitted by its layers and taken by other chunks."""
    first: int = 0
    """Number of its first layer within the module ``module``, for error messages."""
    module: str = ""

    def check(self, layer: int, result: object) -> None:
        """Raise `ExecutionError` if a layer's result does not have the streams that the module declares."""
        wanted = self.emits.get(layer, ())
        emitted = tuple(result.streams) if isinstance(result, Emit) else ()
        if set(emitted) != set(wanted):
            where = f"module {self.module!r}, layer {self.first + layer}," if self.module else "a layer"
            raise ExecutionError(
                f"{where} emits {_listed(emitted)}, declared are {_listed(wanted)}; correct `emits` of the module, or "
                "return Emit(output, streams)"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "no stream"


NO_STREAMS = ChunkStreams({}, {})


@dataclass(slots=True)
class _Block:
    layers: Sequence[Layer]
    inputs: tuple[Any, ...]
    """Arguments of its first layer. Tensors that need a gradient are leaves."""
    strategy: Strategy
    first: int = 0
    """Number of its first layer within the chunk."""
    edge: GradientEdge | Tensor | None = None
    """End of its graph. Only a loss is held itself; for other outputs, the graph holds the tensors that it needs."""
    emitted: dict[str, Tensor] | None = None
    """Streams of its layers while it runs."""
    loss: Tensor | None = None
    """Sum of the losses that its layers emit, with its graph."""
    edges: dict[str, GradientEdge] | None = None
    """Ends of its graph where streams leave it."""
    missing: bool = False
    """Whether it must be recomputed before its backward."""
    random_state: RandomState | None = None
    selective: SelectiveRecompute | None = None
    offloaded: OffloadedTensors | None = None
    deferred: DeferredWeights | None = None


@dataclass(slots=True)
class ChunkActivation:
    """Activation of one (sub-)microbatch in a chunk, from F to the end of its backward."""

    device: torch.device
    context: dict[str, Any]
    autocast: torch.dtype | None = None
    """Precision of autocast regions, in forward and recomputation. None: no autocast."""
    ports: ChunkStreams = NO_STREAMS
    streams: dict[str, Tensor] | None = None
    """Streams that its layers take from other chunks and earlier blocks, as leaves."""
    loss_scale: float = 1.0
    """Gradient of the losses that layers emit."""
    losses: tuple[Tensor, ...] = ()
    """Emitted losses of the forward, one per block."""
    given: dict[str, Tensor] | None = None
    """Streams for other chunks without their graphs, to be taken after the forward."""
    blocks: list[_Block] = field(default_factory=list)
    num_recomputed: int = 0
    """Number of layers that have run a second time."""
    offloaded_bytes: int = 0
    """Bytes moved to the host."""

    def forward(self, layers: Sequence[Layer], bounds: Bounds, inputs: tuple[Any, ...], trained: bool) -> Tensor:
        """Run all layers, and return the output of the last one without its graph.

        ``bounds`` are those of `block_bounds`, ``inputs`` the arguments of the first layer. If not ``trained``, no
        backward follows, and nothing is saved for it.
        """
        if not trained:
            whole = _Block(layers, inputs, "keep")
            with torch.no_grad():
                last = self._run(whole, keeps_casts=False)
            if whole.emitted is not None or whole.loss is not None:
                self._leave(whole)
            return last
        output: Tensor | None = None
        flows = False
        for begin, end, strategy in bounds:
            if output is not None:
                inputs = (output.detach().requires_grad_(flows),)
            block = _Block(layers if len(bounds) == 1 else layers[begin:end], inputs, strategy, begin)
            output = self._forward(block)
            if block.emitted is not None or block.loss is not None:
                self._leave(block)
            # Without a graph, it is unknown whether a gradient flows. Requiring a gradient has no cost.
            flows = output.is_floating_point() if block.missing else block.edge is not None
            self.blocks.append(block)
        assert output is not None
        return output.detach()

    def _forward(self, block: _Block) -> Tensor:
        traits = TRAITS[block.strategy]
        match traits.recomputes:
            case "nothing":
                pass
            case "cheap":
                block.selective = SelectiveRecompute()
                return self._forward_to_repeat(block, block.selective.forward())
            case "all":
                return self._forward_to_repeat(block, torch.no_grad())
            case unknown:
                assert_never(unknown)
        if traits.offloads:
            weights = [p for m in block.layers if isinstance(m, nn.Module) for p in m.parameters()]
            held = [*weights, *block.inputs, *self.context.values(), *(self.streams or {}).values()]
            block.offloaded = OffloadedTensors(held, self.autocast is not None)
            with torch.enable_grad(), block.offloaded.saving():
                output = self._run(block)
        elif torch.is_grad_enabled():
            output = self._run(block)
        else:
            with torch.enable_grad():
                output = self._run(block)
        _end(block, output)
        return output

    def _forward_to_repeat(self, block: _Block, region: AbstractContextManager[Any]) -> Tensor:
        """Run a forward that the backward repeats with the same random numbers."""
        block.missing = True
        block.random_state = RandomState.now(self.device)
        with region:
            return self._run(block, keeps_casts=False)

    def _leave(self, block: _Block) -> None:
        """Take the streams and losses that a block's forward emitted. Graphs are held only by their edges."""
        if block.emitted is not None:
            end = block.first + len(block.layers)
            later = {name for number, names in self.ports.takes.items() if number >= end for name in names}
            streams, outputs = dict(self.streams or {}), dict(self.given or {})
            for name, tensor in block.emitted.items():
                if name in self.ports.gives:
                    outputs[name] = tensor.detach()
                if name in later:
                    # As for outputs between blocks.
                    flows = tensor.is_floating_point() if block.missing else name in (block.edges or ())
                    streams[name] = tensor.detach().requires_grad_(flows)
            self.streams, self.given, block.emitted = streams, outputs, None
        if block.loss is not None:
            self.losses += (block.loss.detach(),)
            if block.missing or not block.loss.requires_grad:
                block.loss = None

    def _run(self, block: _Block, keeps_casts: bool = True) -> Tensor:
        """Run a block's layers.

        ``keeps_casts`` says whether casts of weights may be kept for later passes. They may not if they are made
        without a graph, because a later pass would lose its gradient. Nor under selective recomputation, which must not
        run more operations than the forward.
        """
        if self.autocast is None:
            return self._call(block, block.inputs)
        # Torch keeps casts of all leaves. Casts of inputs must be freed with their microbatch, so pass views of inputs.
        inputs = tuple(x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in block.inputs)
        with torch.autocast(self.device.type, self.autocast, cache_enabled=keeps_casts):
            return self._call(block, inputs)

    def _call(self, block: _Block, inputs: tuple[Any, ...]) -> Tensor:
        context, ports = self.context, self.ports
        output: Any = None
        for number, layer in enumerate(block.layers, block.first):
            if number in ports.takes:
                output = layer(*inputs, **context, **self._taken(block, number))
            else:
                output = layer(*inputs, **context)
            if isinstance(output, Emit):
                ports.check(number, output)
                output = _take_emitted(block, output)
            elif number in ports.emits:
                ports.check(number, output)
            inputs = (output,)
        found: Tensor = output
        return found

    def _taken(self, block: _Block, number: int) -> dict[str, Tensor]:
        """Return the streams for a layer: tensors emitted within the block, or leaves for other streams."""
        streams_of_layer = {}
        streams = self.streams or {}
        for name in self.ports.takes[number]:
            if block.emitted is not None and name in block.emitted:
                streams_of_layer[name] = block.emitted[name]
                continue
            leaf = streams[name]
            # Under autocast, pass a view, as for inputs.
            streams_of_layer[name] = leaf.view_as(leaf) if self.autocast is not None and leaf.requires_grad else leaf
        return streams_of_layer

    def recompute(self) -> None:
        """Run the last block again, now with its graph, if it was not kept. Its backward comes first."""
        if self.blocks and self.blocks[-1].missing:
            self._recompute(self.blocks[-1])

    def _recompute(self, block: _Block) -> None:
        block.missing = False
        state = RandomState.now(self.device)
        if block.random_state is not None:
            block.random_state.set(self.device)
        with torch.enable_grad(), nullcontext() if block.selective is None else block.selective.again:
            output = self._run(block)
        state.set(self.device)
        block.selective = block.random_state = None
        _end(block, output)
        block.emitted = None
        self.num_recomputed += len(block.layers)

    def offload(self, stream: Any = None) -> list[OffloadedTensors]:
        """Move the saved tensors of offloading blocks to the host, in a stream, or in the current one (None).

        Returns those whose device memory the caller releases later: none without a stream.
        """
        moved = [block.offloaded for block in self.blocks if block.offloaded is not None]
        for tensors in moved:
            tensors.offload(stream)
            self.offloaded_bytes += tensors.num_bytes
        return [] if stream is None else moved

    def load(self, stream: Any = None) -> None:
        """Begin to bring offloaded tensors back, in a stream beside the current one, or in the current one (None)."""
        for block in self.blocks:
            if block.offloaded is not None:
                block.offloaded.load(stream)

    def _restore(self, block: _Block) -> None:
        """Make the saved tensors of a block ready for its backward."""
        if block.missing:
            self._recompute(block)
        if block.offloaded is not None:
            block.offloaded.arrive()

    def _roots(
        self, block: _Block, flowing: Tensor | None, arrived: dict[str, Tensor] | None
    ) -> tuple[list[GradientEdge | Tensor], list[Tensor]]:
        """Return the ends of a block's graph that have a gradient, and their gradients.

        The ends are the output, streams and losses. A loss is passed as a tensor, because autograd checks a scalar
        faster than an edge.
        """
        ends: list[GradientEdge | Tensor] = []
        gradients: list[Tensor] = []
        if flowing is not None and block.edge is not None:
            ends.append(block.edge)
            gradients.append(flowing)
        if block.edges is None and block.loss is None:
            block.edge = None
            return ends, gradients
        for name, edge in (block.edges or {}).items():
            leaf, later = None if self.streams is None else self.streams.get(name), None
            if leaf is not None:
                later, leaf.grad = leaf.grad, None
            for gradient in ((arrived or {}).get(name), later):
                if gradient is not None:
                    ends.append(edge)
                    gradients.append(gradient)
        if block.loss is not None and block.loss.requires_grad:
            ends.append(block.loss)
            gradients.append(torch.full_like(block.loss, self.loss_scale))
        block.edge = block.edges = block.loss = None
        return ends, gradients

    def backward(self, gradient: Tensor, arrived: dict[str, Tensor] | None = None) -> None:
        """Run the whole backward. It accumulates the gradients of weights and leaves those of inputs in ``.grad``.

        ``gradient`` is that of the output. ``arrived`` has those of the streams that other chunks took.
        """
        flowing: Tensor | None = gradient
        while self.blocks:
            block = self.blocks.pop()
            self._restore(block)
            ends, gradients = self._roots(block, flowing, arrived)
            if ends:
                run_backward(ends, gradients)
            flowing = block.inputs[0].grad if self.blocks else None

    def backward_input(self, gradient: Tensor, arrived: dict[str, Tensor] | None = None) -> None:
        """Run the first half of a split backward: gradients of the inputs only. Each layer is recomputed once."""
        flowing: Tensor | None = gradient
        for number in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[number]
            self._restore(block)
            ends, gradients = self._roots(block, flowing, arrived)
            if ends:
                edges = [end if isinstance(end, GradientEdge) else edge_of(end) for end in ends]
                block.deferred = backward_inputs(edges, gradients, self._leaves(block))
            flowing = None
            if number:
                # The block stays until its second half, which does not need this gradient.
                flowing, block.inputs[0].grad = block.inputs[0].grad, None

    def _leaves(self, block: _Block) -> list[Tensor]:
        """Return the inputs of a block that need a gradient."""
        leaves = [x for x in block.inputs if isinstance(x, Tensor) and x.requires_grad]
        if self.ports is not NO_STREAMS:
            streams = self.streams or {}
            numbers = range(block.first, block.first + len(block.layers))
            within = {name for number in numbers for name in self.ports.emits.get(number, ())}
            taken = dict.fromkeys(name for number in numbers for name in self.ports.takes.get(number, ()))
            leaves += [streams[name] for name in taken if name not in within and streams[name].requires_grad]
        return leaves

    def backward_weight(self) -> None:
        """Run the second half of a split backward: gradients of the weights."""
        while self.blocks:
            deferred = self.blocks.pop().deferred
            if deferred is not None:
                deferred.accumulate()


def _end(block: _Block, output: Tensor) -> None:
    """Store the ends of a block's graph."""
    if output.requires_grad:
        block.edge = output if output.dim() == 0 else edge_of(output)
    if block.emitted is not None:
        block.edges = {name: edge_of(x) for name, x in block.emitted.items() if x.requires_grad}


def _take_emitted(block: _Block, result: Emit) -> Tensor:
    """Store what a layer emits, and return its output."""
    if result.streams:
        block.emitted = {**(block.emitted or {}), **result.streams}
    if result.loss is not None:
        if result.loss.dim() != 0:
            shape = tuple(result.loss.shape)
            raise ExecutionError(f"a layer emits a loss of shape {shape}; return the sum over its rows, a scalar")
        block.loss = result.loss if block.loss is None else block.loss + result.loss
    return result.output
