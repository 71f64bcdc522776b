"""One iteration on one rank: the implementation of every verb of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ExecutionError
from pipeloom.plan import Verb, collective_order
from pipeloom.runtime.execute.blocks import ChunkActivation
from pipeloom.runtime.execute.linker import LinkedPlan
from pipeloom.runtime.execute.loads import Loader
from pipeloom.runtime.execute.memory import OffloadedTensors
from pipeloom.runtime.execute.options import ExecutionOptions
from pipeloom.runtime.execute.unit import MessageState, PartState, UnitState, part_of
from pipeloom.runtime.launch.device import DeviceQueues
from pipeloom.runtime.launch.transport import Post, Transport, batches_p2p
from pipeloom.runtime.model.flops import FlopCounts
from pipeloom.runtime.model.model import Model, Part
from pipeloom.runtime.model.random_state import ForwardSeeds
from pipeloom.runtime.model.reduce import Finish, ReduceGradients, zero_missing
from pipeloom.runtime.model.sharding import complete_gradients, is_dtensor, reshard, unshard
from pipeloom.runtime.model.tied import SumOver, TiedParameter, sum_tied
from pipeloom.spec import Layout


class RankParts:
    """The parts of a rank that its iterations use, see `Executor`."""

    model: Model
    layout: Layout
    rank: int
    loader: Loader
    queues: DeviceQueues
    options: ExecutionOptions
    reduce_gradients: ReduceGradients | None
    sum_tied: SumOver | None
    forward_seeds: ForwardSeeds | None
    layers: dict[int, list[nn.Module]]
    """Layers of each chunk of this rank."""
    tied: tuple[TiedParameter, ...]
    """Parameters that other ranks hold too."""

    @property
    def transport(self) -> Transport:
        """Transport of this rank's messages."""
        return self.queues.transport

    @cached_property
    def flops(self) -> FlopCounts | None:
        """Counts the operations of forwards. None: they are not counted."""
        counts = self.options.count_flops and self.layout.parallelism.tensor == 1
        return FlopCounts(self.layout) if counts else None

    @cached_property
    def has_shards(self) -> bool:
        """Whether any parameter of this rank is sharded over other processes."""
        every = (layer for layers in self.layers.values() for layer in layers)
        return any(is_dtensor(parameter) for layer in every for parameter in layer.parameters())

    @cached_property
    def reduced_chunks(self) -> tuple[int, ...]:
        """Chunks of this rank whose gradients are summed with other processes that hold them."""
        return collective_order(self.layout, self.rank).reduce


class GradientSync:
    """Sums the gradients of one iteration over ranks and releases gathered parameters."""

    def __init__(self, here: RankParts) -> None:
        self.here = here
        self.reductions: list[Finish] = []
        self.gathered: set[int] = set()
        """Chunks whose parameters are gathered."""
        self.earlier = self._take_earlier()
        """Existing gradients from before the iteration, with their parameters. They are not summed over ranks again."""
        self.finished = False

    def _take_earlier(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take existing gradients out of ``.grad`` of parameters whose gradients will be summed over ranks."""
        here = self.here
        layers = [layer for chunk in here.reduced_chunks for layer in here.layers[chunk]]
        summed = [*(p for layer in layers for p in layer.parameters()), *(t.parameter for t in here.tied)]
        earlier = []
        for parameter in summed:
            if parameter.grad is not None:
                earlier.append((parameter, parameter.grad))
                parameter.grad = None
        return earlier

    def reduce(self, chunk: int) -> None:
        """Begin to sum the gradients of a chunk over all processes that hold it."""
        reduce = self.here.reduce_gradients
        if reduce is None:
            raise ExecutionError(
                "the plan reduces gradients over replicas, but the executor has no reduce_gradients; "
                "give Executor(reduce_gradients=mesh_gradients(layout, mesh))"
            )
        finish = reduce(chunk, self.here.layers[chunk])
        self.gathered.discard(chunk)
        if finish is not None:
            self.reductions.append(finish)

    def unshard(self, chunk: int) -> None:
        """Begin to gather the parameters of a chunk."""
        unshard(self.here.layers[chunk])
        self.gathered.add(chunk)

    def finish(self) -> None:
        """Wait for reductions and release gathered parameters. Afterwards the optimizer may step."""
        if self.finished:
            return
        self.finished = True
        for finish in self.reductions:
            finish()
        self.reductions = []
        # Chunks that are not trained are never reduced.
        for chunk in self.gathered:
            reshard(self.here.layers[chunk])
        self.gathered = set()
        if self.here.has_shards:
            for layers in self.here.layers.values():
                complete_gradients(layers)
        sum_tied(self.here.tied, self.here.sum_tied)
        for parameter, gradient in self.earlier:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self.earlier = []


class LossSum:
    """Losses of one iteration. Each has a weight: 1 / normalizer, or 0 if another replica runs the same samples."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.losses: list[Tensor] = []
        self.seed: Tensor | None = None
        """Gradient of each loss: the weight as a tensor."""

    def add(self, loss: Tensor) -> Tensor:
        """Add the loss of a microbatch, and return its gradient."""
        if loss.dim() != 0:
            raise ExecutionError(f"the loss has shape {tuple(loss.shape)}; return the sum, a scalar")
        self.losses.append(loss)
        if self.seed is None or self.seed.dtype != loss.dtype:
            self.seed = torch.full_like(loss, self.weight)
        return self.seed

    def total(self) -> float:
        """Return the sum of the losses. It does not depend on the order of microbatches in the plan."""
        return math.fsum(torch.stack(self.losses).tolist()) if self.losses else 0.0


@dataclass
class IterationCounts:
    """Counters of one iteration on one rank; see `StepResult`."""

    num_recomputed: int = 0
    offloaded_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Iteration:
    """State of one iteration on one rank, with one method per verb."""

    def __init__(
        self,
        here: RankParts,
        linked: LinkedPlan,
        samples: Sequence[Any],
        optimizer_step: Callable[[], None] | None,
        weight: float,
    ) -> None:
        self.linked, self.samples = linked, samples
        self.loads = here.loader.begin(linked, samples)
        self.here, self.queues = here, here.queues
        self.optimizer_step = optimizer_step
        self.losses, self.gradients, self.counts = LossSum(weight), GradientSync(here), IterationCounts()
        self.pending: list[tuple[MessageState, Post]] = []
        """Sends and receives that are posted together."""
        self.offloaded: list[OffloadedTensors] = []
        """Tensors whose copies to the host may still run."""
        self.verbs: dict[Verb, Callable[[Any], None]] = {
            Verb.F: self.forward if here.flops is None else self.counted_forward,
            Verb.B: self.backward,
            Verb.I: self.backward_input,
            Verb.W: self.backward_weight,
            Verb.RECOMPUTE: self.recompute,
            Verb.OFFLOAD: self.offload,
            Verb.LOAD: self.load,
            Verb.SEND_F: self.send,
            Verb.SEND_B: self.send,
            Verb.RECV_F: self.receive,
            Verb.RECV_B: self.receive,
            Verb.WAIT_F: self.arrive,
            Verb.WAIT_B: self.arrive,
            Verb.WAIT_SEND_F: self.sent,
            Verb.WAIT_SEND_B: self.sent,
            Verb.UNSHARD: self.gradients.unshard,
            Verb.REDUCE_GRAD: self.gradients.reduce,
            Verb.OPTIMIZER_STEP: self.step,
        }
        """Method of each verb. Its argument is the linked plan's argument of the action."""
        if batches_p2p(here.transport):
            self.verbs |= {verb: partial(self.postpone, sends=verb.is_send) for verb in Verb if verb.is_post}

    # ---------------------------------------------------------------- computation

    def counted_forward(self, unit: UnitState) -> None:
        flops, (chunk, microbatch, sub) = self.here.flops, unit.key
        if flops is None or not flops.wants(chunk):
            self.forward(unit)
            return
        with flops.counted(chunk, self.linked.packing.microbatches[microbatch].parts[unit.role.column][sub].workload):
            self.forward(unit)

    def forward(self, unit: UnitState) -> None:
        seeds, (chunk, microbatch, sub) = self.here.forward_seeds, unit.key
        if seeds is None or chunk in seeds.silent:
            self._forward(unit)
            return
        own = None if unit.share is None else unit.share.instances
        with seeds.seeded(chunk, unit.role.layer_numbers, unit.role.column, (microbatch, sub), own):
            self._forward(unit)

    def _forward(self, unit: UnitState) -> None:
        role = unit.role
        part, context = (None, _NO_CONTEXT) if unit.part is None else self._part(unit.part)
        inputs = self._inputs(unit, part)
        layers: list[Callable[..., Tensor]] = self.here.layers[unit.key[0]]  # type: ignore[assignment]
        if role.is_last and part is not None:
            layers = [*layers, _loss_layer(self.here.model.loss, part)]
        streams = None
        if role.takes:
            at = len(inputs) - len(role.takes)
            streams = {name: leaf for (name, _, _), leaf in zip(role.takes, inputs[at:], strict=True)}
            inputs = inputs[:at]
        autocast, weight = self.here.options.autocast, self.losses.weight
        activation = ChunkActivation(self.queues.device, context, autocast, role.ports, streams, weight)
        if unit.share is not None:
            output = self._own_output(unit, activation, inputs)
        else:
            output = activation.forward(layers, unit.bounds, inputs, role.trained)
        self.losses.losses += activation.losses
        if role.trained:
            unit.activation = activation
        if unit.outlets is not None:
            unit.pass_streams(activation.given or {})
        if role.is_last:
            unit.gradients = [self.losses.add(output)]
            return
        unit.check_output(output)
        unit.pass_output(output if unit.share is None else unit.share.whole_output(output))

    def _own_output(self, unit: UnitState, activation: ChunkActivation, inputs: tuple[Any, ...]) -> Tensor:
        """Return the rows of this rank in the output of a chunk with encoder data parallelism.

        If the rank has no instances, the layers do not run.
        """
        assert unit.share is not None
        assert unit.declared is not None
        if not unit.share.instances[1]:
            shape, dtype = unit.declared
            return torch.zeros((0, *shape[1:]), dtype=dtype, device=self.queues.device)
        output = activation.forward(self.here.layers[unit.key[0]], unit.bounds, inputs, unit.role.trained)
        if activation.losses:
            raise ExecutionError(
                f"a layer of module {unit.role.module.name!r} emits a loss of only the instances of its "
                f"rank; set on_tensor_ranks = 'divided' in [layout.modules.{unit.role.module.name}]"
            )
        return output

    @property
    def loss_sum(self) -> float:
        """Sum of the losses so far."""
        return self.losses.total()

    def recompute(self, unit: UnitState) -> None:
        unit.activation_now.recompute()

    def offload(self, unit: UnitState) -> None:
        # The computation before this action overlaps with the copies of the offload before it.
        self.release_offloaded()
        self.offloaded = unit.activation_now.offload(self.queues.to_host)

    def release_offloaded(self) -> None:
        """Release the device memory of the last offload. Later computation waits for its copies."""
        for tensors in self.offloaded:
            tensors.release()
        self.offloaded = []

    def load(self, unit: UnitState) -> None:
        unit.activation_now.load(self.queues.from_host)

    def backward(self, unit: UnitState) -> None:
        activation = unit.activation_now
        activation.backward(unit.take_own_gradient(self.queues.device), unit.take_stream_gradients(self.queues.device))
        unit.pass_gradients()
        self._finish(unit, activation)

    def backward_input(self, unit: UnitState) -> None:
        arrived = unit.take_stream_gradients(self.queues.device)
        unit.activation_now.backward_input(unit.take_own_gradient(self.queues.device), arrived)
        unit.pass_gradients()

    def backward_weight(self, unit: UnitState) -> None:
        activation = unit.activation_now
        activation.backward_weight()
        self._finish(unit, activation)

    def _finish(self, unit: UnitState, activation: ChunkActivation) -> None:
        self.counts.num_recomputed += activation.num_recomputed
        self.counts.offloaded_bytes += activation.offloaded_bytes
        unit.activation = None

    def _part(self, state: PartState) -> tuple[Part, dict[str, Any]]:
        part, context = state.part, state.context
        if part is None:
            module = state.module
            if self.loads is not None:
                part = self.loads.take(state)
            else:
                part = part_of(state, self.linked.packing, self.samples)
            if module.context is not None:
                context = self.queues.take_in(module.context(part))
            state.part, state.context = part, context
        state.num_users -= 1
        if state.num_users == 0:
            state.part = state.context = None
        return part, _NO_CONTEXT if context is None else context

    def _inputs(self, unit: UnitState, part: Part | None) -> tuple[Any, ...]:
        """Return the arguments of the first layer: inputs by the user's function in the first chunk of a module, then
        transferred tensors, then streams.
        """
        role = unit.role
        upstream = unit.take_upstream(self.queues.device) if unit.arrived or unit.groups else ()
        if role.before >= 0 or role.module.inputs is None or part is None:
            return upstream
        inputs = role.module.inputs(part)
        if not isinstance(inputs, tuple):
            inputs = (inputs,)
        return (*self.queues.take_in(inputs), *upstream)

    # ---------------------------------------------------------------- communication

    def send(self, message: MessageState) -> None:
        tensor = message.take()
        # Both ends know the shape, so a message without rows need not be sent.
        if tensor.numel():
            message.tensor = tensor
            message.handle = self.queues.send(tensor, message.peer, message.tag)
            self.counts.sent_bytes += tensor.nbytes

    def receive(self, message: MessageState) -> None:
        if 0 in message.shape:
            message.tensor = self.queues.empty(message.shape, message.dtype, message.peer)
            return
        message.tensor, message.handle = self.queues.receive(message.shape, message.dtype, message.peer, message.tag)
        self.counts.received_bytes += message.tensor.nbytes

    def postpone(self, message: MessageState, sends: bool) -> None:
        """Hold a send or receive, and post it together with the following ones of its batched operation."""
        message.tensor = message.take() if sends else self.queues.empty(message.shape, message.dtype, message.peer)
        if message.tensor.numel():
            self.pending.append((message, Post(sends, message.tensor, message.peer, message.tag)))
        if self.pending and not message.joins_next:
            self.post()

    def post(self) -> None:
        """Post the pending messages as one operation."""
        handles = self.queues.post([post for _, post in self.pending])
        for (message, post), handle in zip(self.pending, handles, strict=True):
            message.handle = handle
            if post.sends:
                self.counts.sent_bytes += post.tensor.nbytes
            else:
                self.counts.received_bytes += post.tensor.nbytes
        self.pending = []

    def arrive(self, message: MessageState) -> None:
        if message.handle is not None:
            self.queues.arrived(message.handle, message.tensor)
            message.handle = None
        message.deliver()

    def sent(self, message: MessageState) -> None:
        if message.handle is not None:
            self.queues.sent(message.handle, message.tensor, message.peer)
            message.handle = None
        message.tensor = None

    # ---------------------------------------------------------------- after the microbatches

    def close(self) -> None:
        """Cancel loads that are no longer needed."""
        if self.loads is not None:
            self.loads.close()

    def finish(self) -> None:
        """Finish the gradients, so that the optimizer may step."""
        self.release_offloaded()
        self.gradients.finish()
        self.zero_missing()

    def zero_missing(self) -> None:
        """Set gradients of zero for trained parameters that no sample used, as sums over replicas do.

        A chunk without gradients either had no work, or only forwards.
        """
        layout, busy = self.here.layout, {unit.key[0] for unit in self.linked.units}
        for chunk, layers in self.here.layers.items():
            graded = any(p.grad is not None for layer in layers for p in layer.parameters())
            if layout.has_backward(layout.chunks[chunk].module) and (graded or chunk not in busy):
                zero_missing(layers)

    def step(self, _: None) -> None:
        self.finish()
        if self.here.options.autocast is not None:
            # The weights are about to change, so drop their casts.
            torch.clear_autocast_cache()
        if self.optimizer_step is not None:
            self.optimizer_step()


_NO_CONTEXT: dict[str, Any] = {}


def _loss_layer(loss: Callable[[Tensor, Part], Tensor], part: Part) -> Callable[..., Tensor]:
    return lambda output, **_: loss(output, part)
