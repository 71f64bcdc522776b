"""The executor: one rank's actions of any plan, one after the other, over any transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.packing import Packing
from pipeloom.plan import ExecutionPlan, action_text
from pipeloom.runtime.blocks import Passage
from pipeloom.runtime.model import Model, Part, make_part
from pipeloom.runtime.program import Linker, Program
from pipeloom.runtime.reduce import Finish, ReduceGradients
from pipeloom.runtime.result import ActionTime, StepResult
from pipeloom.runtime.sharding import reshard, settle_gradients, sharded_modules, unshard
from pipeloom.runtime.transport import Transport
from pipeloom.runtime.unit import MessageState, PartState, UnitState
from pipeloom.spec import Layout


class Executor:
    """Runs plans on one pipeline rank.

    Parameters
    ----------
    model : Model
        Only the layers of this rank's chunks are used, and moved to ``device``.
    layout : Layout
    rank : int
    transport : Transport
    device : torch.device or str
    reduce_gradients : callable or None
        Called by RG with a chunk's number and its layers: begins to sum their gradients over all that hold the
        chunk, see `all_reduce_gradients`. What it returns is waited for before OS.
    autocast : torch.dtype or None
        Run layers and loss under `torch.autocast` with this dtype. The shapes that modules state must then have
        the dtypes that come out of it.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        rank: int,
        transport: Transport,
        device: torch.device | str = "cpu",
        *,
        reduce_gradients: ReduceGradients | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if not 0 <= rank < layout.num_ranks:
            raise InputError("rank", f"{rank} is not in 0..{layout.num_ranks - 1}")
        _check_layout(model, layout)
        self.model, self.layout, self.rank, self.transport = model, layout, rank, transport
        self.device = torch.device(device)
        self.reduce_gradients, self.autocast = reduce_gradients, autocast
        self._linker = Linker(layout, model, rank)
        self.layers: dict[int, list[nn.Module]] = {}
        """Per chunk of this rank, its layers."""
        for number, chunk in enumerate(layout.chunks):
            if chunk.rank == rank:
                module = model.module(chunk.module)
                layers = list(module.layers[chunk.layers[0] : chunk.layers[1] + 1])
                for layer in layers:
                    layer.to(self.device)
                    if module.frozen:
                        layer.requires_grad_(False)
                self.layers[number] = layers
        every = [layer for layers in self.layers.values() for layer in layers]
        self.has_shards = any(isinstance(p, DTensor) for layer in every for p in layer.parameters())
        """Whether any parameter of this rank is divided over other processes."""
        if layout.parallelism.data == 1 and any(True for _ in sharded_modules(every)):
            raise InputError(
                "layout.parallelism.data",
                "is 1, but layers are under fully_shard",
                "state the number of replicas, so that plans gather parameters and reduce gradients",
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's chunks, named ``module.layer.parameter`` independently of the layout."""
        for number, layers in self.layers.items():
            chunk = self.layout.chunks[number]
            for i, layer in enumerate(layers, start=chunk.layers[0]):
                for name, parameter in layer.named_parameters():
                    yield f"{chunk.module}.{i}.{name}", parameter

    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters of this rank's chunks, each once."""
        unique = {id(p): p for _, p in self.named_parameters() if p.requires_grad}
        return list(unique.values())

    def prepare(self, plan: ExecutionPlan, packing: Packing) -> Program:
        """Link a plan's actions of this rank to what they work on; may be done ahead of `run_program`.

        Raises
        ------
        ExecutionError
            When the plan is for another layout, or its shapes are not those that the model states.
        """
        return self._linker.link(plan, packing)

    def run(
        self,
        plan: ExecutionPlan,
        packing: Packing,
        samples: Sequence[Any],
        *,
        optimizer_step: Callable[[], None] | None = None,
        normaliser: float | None = None,
    ) -> StepResult:
        """Run one iteration; gradients are added to ``.grad`` of the parameters.

        Parameters
        ----------
        plan : ExecutionPlan
        packing : Packing
            The one that the plan was lowered with.
        samples : sequence
            The user's samples, as ordered in ``packing.batch``.
        optimizer_step : callable or None
            What OS does; None: nothing.
        normaliser : float or None
            Targets of the global batch; None: the sum over ``samples``. Give it where there are replicas.

        Raises
        ------
        ExecutionError
            Naming rank, step and action.
        """
        return self.run_program(
            self.prepare(plan, packing), samples, optimizer_step=optimizer_step, normaliser=normaliser
        )

    def run_program(
        self,
        program: Program,
        samples: Sequence[Any],
        *,
        optimizer_step: Callable[[], None] | None = None,
        normaliser: float | None = None,
    ) -> StepResult:
        """Run what `prepare` made; as `run`."""
        if len(samples) != len(program.packing.batch.samples):
            raise ExecutionError(
                f"rank {self.rank}: {len(samples)} samples were given, the plan is for "
                f"{len(program.packing.batch.samples)}"
            )
        if program.was_run:
            raise ExecutionError(f"rank {self.rank}: a prepared program runs once; prepare it anew")
        program.was_run = True
        if normaliser is None:
            normaliser = float(sum(self.model.num_targets(sample) for sample in samples))
        if not 0 < normaliser < float("inf"):
            raise ExecutionError(
                f"rank {self.rank}: the batch has {normaliser} targets; give it at least one"
            )
        iteration = _Iteration(self, program, samples, optimizer_step, normaliser)
        clock = time.monotonic_ns
        stamps = [clock()]
        step = 0
        try:
            for call, argument in iteration.steps():
                call(argument)
                stamps.append(clock())
                step += 1
            # A plan need not have an optimiser step.
            iteration.settle()
        except PipeloomError as error:
            raise ExecutionError(f"{self._where(program, step)}: {error}") from error
        except Exception as error:
            raise ExecutionError(f"{self._where(program, step)}: {type(error).__name__}: {error}") from error
        finally:
            program.unlink()
        times = tuple(
            ActionTime(a.verb, a.chunk, a.microbatch, a.sub_microbatch, start, end)
            for a, start, end in zip(program.actions, stamps, stamps[1:], strict=False)
        )
        return StepResult(
            iteration.loss_sum, normaliser, times, iteration.num_recomputed,
            iteration.offloaded_bytes, iteration.sent_bytes, iteration.received_bytes,
        )  # fmt: skip

    def _where(self, program: Program, step: int) -> str:
        action = action_text(program.actions[step]) if step < len(program.actions) else "the end"
        return f"rank {self.rank}, step {step}, '{action}'"


class _Iteration:
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
        self.executor, self.transport, self.device = executor, executor.transport, executor.device
        self.optimizer_step = optimizer_step
        self.normaliser = normaliser
        self.losses: list[Tensor] = []
        self.seed: Tensor | None = None
        """Gradient of each loss: one over the normaliser."""
        self.reductions: list[Finish] = []
        self.whole: set[int] = set()
        """Chunks whose parameters are gathered."""
        self.num_recomputed = self.offloaded_bytes = self.sent_bytes = self.received_bytes = 0

    def steps(self) -> Iterator[tuple[Callable[[Any], None], Any]]:
        """The rank's actions as calls."""
        methods: dict[str, Callable[[Any], None]] = {
            "F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight,
            "RC": self.recompute, "OF": self.offload, "LD": self.load,
            "SF": self.send, "SB": self.send, "RF": self.receive, "RB": self.receive,
            "WF": self.arrive, "WB": self.arrive, "DF": self.sent, "DB": self.sent,
            "UN": self.unshard, "RG": self.reduce, "OS": self.step,
        }  # fmt: skip
        for verb, argument in self.program.steps:
            if verb not in methods:
                raise ExecutionError(f"this runtime has no action {verb!r}")
            yield methods[verb], argument

    # ---------------------------------------------------------------- computation

    def forward(self, unit: UnitState) -> None:
        role = unit.role
        part, context = _NOTHING if unit.part is None else self._part(unit.part)
        inputs = self._inputs(unit, part)
        layers: list[Callable[..., Tensor]] = self.executor.layers[unit.chunk]  # type: ignore[assignment]
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
        for number, consumer, place in unit.local_consumers:
            consumer.arrived[number] = unit.given(output, place)
        if unit.num_sends:
            unit.output = output.contiguous()

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
        return float(torch.stack(self.losses).sum()) if self.losses else 0.0

    def recompute(self, unit: UnitState) -> None:
        unit.passage_now.recompute()

    def offload(self, unit: UnitState) -> None:
        unit.passage_now.offload()

    def load(self, unit: UnitState) -> None:
        unit.passage_now.load()

    def backward(self, unit: UnitState) -> None:
        passage = unit.passage_now
        passage.backward(unit.take_gradient(self.device))
        self._hand_back(unit)
        self._finish(unit)

    def backward_input(self, unit: UnitState) -> None:
        unit.passage_now.backward_input(unit.take_gradient(self.device))
        self._hand_back(unit)

    def backward_weight(self, unit: UnitState) -> None:
        unit.passage_now.backward_weight()
        self._finish(unit)

    def _finish(self, unit: UnitState) -> None:
        passage = unit.passage_now
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
            state.part, state.context = None, {}
        return part, context

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
            return value.to(self.device)
        return value

    def _hand_back(self, unit: UnitState) -> None:
        """Cut the gradients of what was handed over and give each piece to its producer."""
        unit.split_input_gradients()
        for number, producer, place in unit.local_producers:
            producer.gradients[place] = unit.input_gradients[number]
            unit.input_gradients[number] = None

    # ---------------------------------------------------------------- communication

    def send(self, message: MessageState) -> None:
        tensor = message.take()
        # Both ends know the shape, so that nothing need travel where there are no rows.
        if tensor.numel():
            message.handle = self.transport.send(tensor, message.peer, message.tag)
            message.tensor = tensor
            self.sent_bytes += tensor.nbytes

    def receive(self, message: MessageState) -> None:
        tensor = torch.empty(message.shape, dtype=message.dtype, device=self.device)
        message.tensor = tensor
        if tensor.numel():
            message.handle = self.transport.receive(tensor, message.peer, message.tag)
            self.received_bytes += tensor.nbytes

    def arrive(self, message: MessageState) -> None:
        message.wait()
        message.deliver()

    def sent(self, message: MessageState) -> None:
        message.wait()
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

    def settle(self) -> None:
        """Wait for reductions, and let go of whole parameters: afterwards an optimiser may step."""
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

    def step(self, _: None) -> None:
        self.settle()
        if self.optimizer_step is not None:
            self.optimizer_step()


_NOTHING: tuple[None, dict[str, Any]] = (None, {})
"""Part and context of a unit that asks no user function."""


def _loss_layer(loss: Callable[[Tensor, Part], Tensor], part: Part) -> Callable[..., Tensor]:
    return lambda output, **_: loss(output, part)


def _check_layout(model: Model, layout: Layout) -> None:
    """Refuse a layout that is not of this model."""
    names = [module.name for module in model.modules]
    if [module.name for module in layout.modules] != names:
        raise InputError("layout.modules", f"are {[m.name for m in layout.modules]}, the model has {names}")
    for module in model.modules:
        here = layout.module(module.name)
        if (here.after, here.frozen) != (module.after, module.frozen):
            raise InputError(
                f"layout.module {module.name!r}", "has another `after` or `frozen` than the model"
            )
        num_layers = layout.chunks[layout.chunks_of(module.name)[-1]].layers[1] + 1
        if num_layers != len(module.layers):
            raise InputError(
                f"layout.module {module.name!r}", f"has {num_layers} layers, the model {len(module.layers)}"
            )
