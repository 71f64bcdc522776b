"""The executor: one rank's actions of any plan, one after the other, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.packing import Packing
from pipeloom.plan import ExecutionPlan, action_text, collective_order
from pipeloom.runtime.blocks import kept_casts
from pipeloom.runtime.draws import Draws
from pipeloom.runtime.iteration import Iteration
from pipeloom.runtime.lanes import StalledError, lane_for
from pipeloom.runtime.model import Model
from pipeloom.runtime.program import Linker, Program
from pipeloom.runtime.reduce import ReduceGradients
from pipeloom.runtime.result import StepResult
from pipeloom.runtime.sharding import sharded_modules
from pipeloom.runtime.tied import SumOver, tied_over_ranks
from pipeloom.runtime.transport import Transport, joins
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
        the dtypes that come out of it. Weights are cast once an iteration for all passes that save them.
    timeout_s : float or None
        On a GPU: an iteration that comes to no further action for so long has failed; None: wait on. On the CPU the
        waits of the transport are bounded by its own timeout.
    sum_tied : callable or None
        Sums gradients of parameters that layers on several ranks share, see `sums_over_ranks`. Without it a model
        that has such parameters is refused.
    random_seed : int or None
        What layers draw at random depends on this, the iteration, the samples and the layers, and not on the plan; the
        same on all ranks. None: they draw from the process's generator in the order of the plan.

    Attributes
    ----------
    tied : tuple of Tied
        Parameters of this rank that other ranks hold too.
    held_before : frozenset of str
        Their names where a rank before this one holds them: what counts once counts there.
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
        timeout_s: float | None = None,
        sum_tied: SumOver | None = None,
        random_seed: int | None = 0,
    ) -> None:
        if not 0 <= rank < layout.num_ranks:
            raise InputError("rank", f"{rank} is not in 0..{layout.num_ranks - 1}")
        _check_layout(model, layout)
        tied = tied_over_ranks(model, layout)
        if tied and sum_tied is None:
            raise InputError(
                f"parameter {tied[0].names[0]!r}",
                f"is one with {tied[0].names[1]!r} (tied), and they lie on ranks {', '.join(map(str, tied[0].ranks))}",
                "give Executor sum_tied=sums_over_ranks(model, layout), lay both layers on one rank, or do not share",
            )
        self.tied, self.sum_tied = tuple(each for each in tied if rank in each.ranks), sum_tied
        self.held_before = frozenset(
            name for each in self.tied if rank > each.ranks[0] for name in each.names
        )
        self.model, self.layout, self.rank, self.transport = model, layout, rank, transport
        self.device = _with_index(torch.device(device))
        self.lane = lane_for(transport, self.device)
        self.reduce_gradients, self.autocast, self.timeout_s = reduce_gradients, autocast, timeout_s
        self.draws = None if random_seed is None else Draws(random_seed, self.device)
        self._linker = Linker(layout, model, rank)
        self.reduced_chunks = collective_order(layout, rank).reduce
        """Chunks of this rank whose gradients are summed over others that hold them."""
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
        return self._linker.link(plan, packing, joins=joins(self.transport))

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
                f"rank {self.rank}: the batch has {normaliser} {self.model.targets}; give it at least one"
            )
        iteration = Iteration(self, program, samples, optimizer_step, normaliser)
        if self.draws is not None:
            self.draws.begin(program.plan.iteration, program.packing)
        verbs, clock = iteration.verbs, self.lane.stamp
        stamps = [clock()]
        try:
            with kept_casts(self.device, self.autocast):
                for action, argument in zip(program.actions, program.arguments, strict=True):
                    verbs[action.verb](argument)
                    stamps.append(clock())
                # A plan need not have an optimiser step.
                iteration.settle()
            if self.draws is not None:
                self.draws.end()
            moments = self.lane.times(stamps, self.timeout_s)
        except StalledError as error:
            raise ExecutionError(f"{self._where(program, max(0, error.num_reached - 1))}: {error}") from error
        except PipeloomError as error:
            raise ExecutionError(f"{self._where(program, len(stamps) - 1)}: {error}") from error
        except Exception as error:
            raise ExecutionError(
                f"{self._where(program, len(stamps) - 1)}: {type(error).__name__}: {error}"
            ) from error
        finally:
            program.unlink()
        return StepResult(
            iteration.loss_sum, normaliser, program.actions, moments, iteration.num_recomputed,
            iteration.offloaded_bytes, iteration.sent_bytes, iteration.received_bytes,
        )  # fmt: skip

    def _where(self, program: Program, step: int) -> str:
        action = action_text(program.actions[step]) if step < len(program.actions) else "the end"
        return f"rank {self.rank}, step {step}, '{action}'"


def _with_index(device: torch.device) -> torch.device:
    """The device as tensors on it name it."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


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
