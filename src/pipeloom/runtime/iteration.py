"""One iteration on one rank: what every verb of a plan does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeloom.errors import ExecutionError
from pipeloom.plan import POST_VERBS
from pipeloom.runtime.blocks import Passage
from pipeloom.runtime.model import Part, make_part
from pipeloom.runtime.program import Program
from pipeloom.runtime.reduce import Finish
from pipeloom.runtime.sharding import reshard, settle_gradients, unshard
from pipeloom.runtime.tied import sum_tied
from pipeloom.runtime.transport import Post, joins
from pipeloom.runtime.unit import MessageState, PartState, UnitState

if TYPE_CHECKING:
    from pipeloom.runtime.executor import Executor


class Iteration:
    """The state of one iteration on one rank: one method per verb."""

    def __init__(
        self,
        executor: Executor,
        program: Program,
        samples: Sequence[Any],
        optimizer_step: Callable[[], None] | None,
        normaliser: float,
    ) -> None:
        self.program, self.samples = program, samples
        self.executor, self.lane, self.device = executor, executor.lane, executor.device
        self.optimizer_step = optimizer_step
        self.normaliser = normaliser
        self.losses: list[Tensor] = []
        self.seed: Tensor | None = None
        """Gradient of each loss: one over the normaliser."""
        self.reductions: list[Finish] = []
        self.held: list[tuple[MessageState, Post]] = []
        """Sends and receives to be posted together."""
        self.whole: set[int] = set()
        """Chunks whose parameters are gathered."""
        self.earlier = self._set_aside()
        """Gradients from before that are not to be summed over ranks once more, with their parameters."""
        self.settled = False
        self.num_recomputed = self.offloaded_bytes = self.sent_bytes = self.received_bytes = 0
        self.verbs: dict[str, Callable[[Any], None]] = {
            "F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight,
            "RC": self.recompute, "OF": self.offload, "LD": self.load,
            "SF": self.send, "SB": self.send, "RF": self.receive, "RB": self.receive,
            "WF": self.arrive, "WB": self.arrive, "DF": self.sent, "DB": self.sent,
            "UN": self.unshard, "RG": self.reduce, "OS": self.step,
        }  # fmt: skip
        """What each verb calls, with what the program has for the action."""
        if joins(executor.transport):
            self.verbs |= {verb: partial(self.hold, sends=verb[0] == "S") for verb in POST_VERBS}

    # ---------------------------------------------------------------- computation

    def forward(self, unit: UnitState) -> None:
        draws, (chunk, microbatch, sub) = self.executor.draws, unit.key
        if draws is None or chunk in draws.silent:
            self._forward(unit)
            return
        with draws.seeded(chunk, unit.role.layer_numbers, unit.role.column, microbatch, sub):
            self._forward(unit)

    def _forward(self, unit: UnitState) -> None:
        role = unit.role
        part, context = _NOTHING if unit.part is None else self._part(unit.part)
        inputs = self._inputs(unit, part)
        layers: list[Callable[..., Tensor]] = self.executor.layers[unit.key[0]]  # type: ignore[assignment]
        if role.is_last and part is not None:
            layers = [*layers, _loss_layer(self.executor.model.loss, part)]
        passage = Passage(self.device, context, self.executor.autocast)
        output = passage.forward(layers, unit.bounds, inputs, role.trained)
        if role.trained:
            unit.passage = passage
        if role.is_last:
            self._take_loss(unit, output)
            return
        unit.check_output(output)
        unit.hand_on(output)

    def _take_loss(self, unit: UnitState, loss: Tensor) -> None:
        if loss.dim() != 0:
            raise ExecutionError(f"the loss has shape {tuple(loss.shape)}; return the sum, a scalar")
        self.losses.append(loss)
        if self.seed is None or self.seed.dtype != loss.dtype:
            self.seed = torch.full_like(loss, 1.0 / self.normaliser)
        unit.gradients = [self.seed]

    @property
    def loss_sum(self) -> float:
        """Sum of the losses so far."""
        # The same in whatever order the plan has the microbatches.
        return math.fsum(torch.stack(self.losses).tolist()) if self.losses else 0.0

    def recompute(self, unit: UnitState) -> None:
        unit.passage_now.recompute()

    def offload(self, unit: UnitState) -> None:
        with self.lane.copying():
            unit.passage_now.offload()

    def load(self, unit: UnitState) -> None:
        with self.lane.copying():
            unit.passage_now.load()

    def backward(self, unit: UnitState) -> None:
        passage = unit.passage_now
        passage.backward(unit.take_gradient(self.device))
        unit.hand_back()
        self._finish(unit, passage)

    def backward_input(self, unit: UnitState) -> None:
        unit.passage_now.backward_input(unit.take_gradient(self.device))
        unit.hand_back()

    def backward_weight(self, unit: UnitState) -> None:
        passage = unit.passage_now
        passage.backward_weight()
        self._finish(unit, passage)

    def _finish(self, unit: UnitState, passage: Passage) -> None:
        self.num_recomputed += passage.num_recomputed
        self.offloaded_bytes += passage.offloaded_bytes
        unit.passage = None

    def _part(self, state: PartState) -> tuple[Part, dict[str, Any]]:
        part, context = state.part, state.context
        if part is None:
            module = state.module
            part = make_part(
                module.spec, self.program.packing, self.samples, state.microbatch, state.sub_microbatch
            )
            if module.context is not None:
                context = {name: self._to_device(value) for name, value in module.context(part).items()}
            state.part, state.context = part, context
        state.num_users -= 1
        if state.num_users == 0:
            state.part = state.context = None
        return part, _NO_CONTEXT if context is None else context

    def _inputs(self, unit: UnitState, part: Part | None) -> tuple[Any, ...]:
        """Arguments of the first layer: the user's own on a module's first chunk, then what was handed over."""
        role = unit.role
        upstream = unit.take_upstream(self.device) if unit.arrived or unit.groups else ()
        if role.before >= 0 or role.module.inputs is None or part is None:
            return upstream
        given = role.module.inputs(part)
        if not isinstance(given, tuple):
            given = (given,)
        return (*map(self._to_device, given), *upstream)

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device != self.device:
            return value.to(self.device, non_blocking=True)
        return value

    # ---------------------------------------------------------------- communication

    def send(self, message: MessageState) -> None:
        tensor = message.take()
        # Both ends know the shape, so that nothing need travel where there are no rows.
        if tensor.numel():
            message.tensor = tensor
            message.handle = self.lane.send(tensor, message.peer, message.tag)
            self.sent_bytes += tensor.nbytes

    def receive(self, message: MessageState) -> None:
        if 0 in message.shape:
            message.tensor = self.lane.empty(message.shape, message.dtype, message.peer)
            return
        message.tensor, message.handle = self.lane.receive(
            message.shape, message.dtype, message.peer, message.tag
        )
        self.received_bytes += message.tensor.nbytes

    def hold(self, message: MessageState, sends: bool) -> None:
        """Keep a send or receive, and post it with those that belong to it once the last of them is here."""
        message.tensor = (
            message.take() if sends else self.lane.empty(message.shape, message.dtype, message.peer)
        )
        if message.tensor.numel():
            self.held.append((message, Post(sends, message.tensor, message.peer, message.tag)))
        if self.held and not message.joins_next:
            self.post()

    def post(self) -> None:
        """Post what is held as one operation."""
        handles = self.lane.post([post for _, post in self.held])
        for (message, post), handle in zip(self.held, handles, strict=True):
            message.handle = handle
            if post.sends:
                self.sent_bytes += post.tensor.nbytes
            else:
                self.received_bytes += post.tensor.nbytes
        self.held = []

    def arrive(self, message: MessageState) -> None:
        if message.handle is not None:
            self.lane.arrived(message.handle, message.tensor)
            message.handle = None
        message.deliver()

    def sent(self, message: MessageState) -> None:
        if message.handle is not None:
            self.lane.sent(message.handle, message.tensor, message.peer)
            message.handle = None
        message.tensor = None

    # ---------------------------------------------------------------- after the microbatches

    def reduce(self, chunk: int) -> None:
        reduce = self.executor.reduce_gradients
        if reduce is None:
            raise ExecutionError(
                "the plan reduces gradients over replicas, but the executor was given no way to"
            )
        finish = reduce(chunk, self.executor.layers[chunk])
        self.whole.discard(chunk)
        if finish is not None:
            self.reductions.append(finish)

    def unshard(self, chunk: int) -> None:
        unshard(self.executor.layers[chunk])
        self.whole.add(chunk)

    def _set_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take away what is in ``.grad`` of parameters whose gradients will be summed over ranks."""
        executor = self.executor
        layers = [layer for chunk in executor.reduced_chunks for layer in executor.layers[chunk]]
        summed = [*(p for layer in layers for p in layer.parameters()), *(t.parameter for t in executor.tied)]
        earlier = []
        for parameter in summed:
            if parameter.grad is not None:
                earlier.append((parameter, parameter.grad))
                parameter.grad = None
        return earlier

    def settle(self) -> None:
        """Wait for reductions, and let go of whole parameters: afterwards an optimiser may step."""
        if self.settled:
            return
        self.settled = True
        for finish in self.reductions:
            finish()
        self.reductions = []
        # What is not trained was never reduced.
        for chunk in self.whole:
            reshard(self.executor.layers[chunk])
        self.whole = set()
        if self.executor.has_shards:
            for layers in self.executor.layers.values():
                settle_gradients(layers)
        if self.executor.tied and self.executor.sum_tied is not None:
            sum_tied(self.executor.tied, self.executor.sum_tied)
        for parameter, gradient in self.earlier:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self.earlier = []

    def step(self, _: None) -> None:
        self.settle()
        if self.executor.autocast is not None:
            # Casts of weights that are about to change.
            torch.clear_autocast_cache()
        if self.optimizer_step is not None:
            self.optimizer_step()


_NO_CONTEXT: dict[str, Any] = {}
_NOTHING = (None, _NO_CONTEXT)
"""Part and context of a unit that asks no user function."""


def _loss_layer(loss: Callable[[Tensor, Part], Tensor], part: Part) -> Callable[..., Tensor]:
    return lambda output, **_: loss(output, part)
