"""The executor, which runs the actions of one rank in order, for any plan and any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.packing import Packing
from pipeloom.plan import ExecutionPlan, RankPlan, action_text
from pipeloom.runtime.data.dataset import count_targets
from pipeloom.runtime.execute.blocks import kept_casts
from pipeloom.runtime.execute.iteration import Iteration, RankParts
from pipeloom.runtime.execute.linker import LinkedPlan, Linker
from pipeloom.runtime.execute.loads import Loader
from pipeloom.runtime.execute.options import ExecutionOptions
from pipeloom.runtime.execute.result import StepResult
from pipeloom.runtime.launch.accelerator import with_index
from pipeloom.runtime.launch.device import StalledError, queues_of
from pipeloom.runtime.launch.transport import Transport
from pipeloom.runtime.model.encoder_dp import EncoderDataParallel
from pipeloom.runtime.model.model import Model, saved_tensors
from pipeloom.runtime.model.random_state import ForwardSeeds
from pipeloom.runtime.model.reduce import ReduceGradients
from pipeloom.runtime.model.sharding import sharded_modules
from pipeloom.runtime.model.tied import SumOver, check_sums, tied_over_ranks
from pipeloom.runtime.model.weights import give_weights
from pipeloom.spec import Layout, ModuleLayout


class Executor(RankParts):
    """Runs plans on one pipeline rank.

    Parameters
    ----------
    model : Model
        The model. Only the layers of the chunks of this rank are used. They are moved to ``options.device``. Layers
        on ``meta`` get weights.
    options : ExecutionOptions
        Device, precision, timeout, random numbers.
    reduce_gradients : callable or None
        Called by REDUCE_GRAD with the number and layers of a chunk. It begins to sum their gradients over all processes
        that hold the chunk; see `all_reduce_gradients`. OPTIMIZER_STEP waits for the result.
    sum_tied : callable or None
        Sums gradients of parameters that layers on several ranks share; see `sums_over_ranks`. Required if such
        parameters are trained.
    tensor_group : ProcessGroup or None
        The tensor-parallel ranks of this pipeline rank. Required if the layout uses encoder data parallelism over them.

    Attributes
    ----------
    layers : dict
        The layers of this rank.
    transport : Transport
        Sends and receives the tensors of this rank.
    tied : tuple of TiedParameter
        Parameters of this rank that other ranks hold too.
    """

    iteration_type: type[Iteration] = Iteration
    """Class that implements the verbs of plans."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        rank: int,
        transport: Transport,
        *,
        options: ExecutionOptions = ExecutionOptions(),  # noqa: B008 - frozen
        reduce_gradients: ReduceGradients | None = None,
        sum_tied: SumOver | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 <= rank < layout.num_ranks:
            raise InputError("rank", f"{rank} is not in 0..{layout.num_ranks - 1}")
        model.check_declared()
        _check_layout(model, layout)
        encoder_dp = EncoderDataParallel(model, layout, tensor_group)
        if encoder_dp.names and options.random_seed is None:
            raise InputError(
                "random_seed",
                f"is None, but {min(encoder_dp.names)!r} uses encoder data parallelism, which needs one",
                "set a seed",
            )
        on_meta = torch.device(options.device).type == "meta"
        if not on_meta:
            give_weights(model, layout, rank, options.device)
        tied = tied_over_ranks(model, layout)
        check_sums(tied, sum_tied)
        self.tied = tuple(parameter for parameter in tied if rank in parameter.ranks)
        self.model, self.layout, self.rank, self.options = model, layout, rank, options
        self.reduce_gradients, self.sum_tied = reduce_gradients, sum_tied
        self.queues = queues_of(transport, with_index(torch.device(options.device)))
        self.loader = Loader(options.workers, self.device)
        seed = options.random_seed
        self.forward_seeds = None if seed is None else ForwardSeeds(seed, self.device)
        self._linker = Linker(layout, model, rank, encoder_dp, transport)
        self.layers = {}
        for number, chunk in enumerate(layout.chunks):
            if chunk.rank == rank:
                module = model.module(chunk.module)
                layers = list(module.layers[chunk.layers[0] : chunk.layers[1] + 1])
                for place, layer in enumerate(layers, chunk.layers[0]):
                    if not on_meta and any(parameter.is_meta for parameter in layer.parameters()):
                        raise InputError(
                            f"module {chunk.module!r}.layers[{place}]",
                            f"has no weights (on meta), but rank {rank} runs it",
                            "load the weights of each rank's own layers before training",
                        )
                    layer.to(self.device)
                    if module.frozen:
                        layer.requires_grad_(False)
                self.layers[number] = layers
        if layout.parallelism.data == 1 and any(
            True for layers in self.layers.values() for _ in sharded_modules(layers)
        ):
            raise InputError(
                "layout.parallelism.data",
                "is 1, but layers are under fully_shard",
                "set the number of replicas, so that plans gather parameters and reduce gradients",
            )

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self.queues.device

    @property
    def held_before(self) -> frozenset[str]:
        """Names of tied parameters that an earlier rank holds too. They are counted there."""
        return frozenset(name for each in self.tied if self.rank > each.ranks[0] for name in each.names)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's chunks, named ``module.layer.parameter`` independently of the layout."""
        for prefix, layer in self._named_layers():
            for name, parameter in layer.named_parameters():
                yield f"{prefix}.{name}", parameter

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers of this rank's chunks, named as by `named_parameters`."""
        return {name: x for prefix, layer in self._named_layers() for name, x in saved_tensors(layer, prefix).items()}

    def _named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        for number, layers in self.layers.items():
            chunk = self.layout.chunks[number]
            for i, layer in enumerate(layers, start=chunk.layers[0]):
                yield f"{chunk.module}.{i}", layer

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters of this rank's chunks, each once.

        The name of a tied parameter is its first name in the model, also on ranks that do not run that layer. Its
        copies on all ranks are therefore in the same group of an optimizer that groups parameters by name.
        """
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                unique.setdefault(id(parameter), (self.model.first_name(name), parameter))
        return list(unique.values())

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of this rank's chunks, each once."""
        return [parameter for _, parameter in self.trained_parameters()]

    def prepare(self, plan: ExecutionPlan | RankPlan, packing: Packing) -> LinkedPlan:
        """Link the actions of this rank to their units and messages. This can be done ahead of `run_linked`.

        Raises
        ------
        ExecutionError
            The plan is for another layout, or its shapes differ from the model's.
        InputError
            The first plan of all ranks may deadlock in the single communicator of a `BatchedTransport`.
        """
        return self._linker.link(plan, packing)

    def run(
        self,
        plan: ExecutionPlan | RankPlan,
        packing: Packing,
        samples: Sequence[Any],
        *,
        optimizer_step: Callable[[], None] | None = None,
        normalizer: float | None = None,
        counts: bool = True,
        normaliser: float | None = None,
    ) -> StepResult:
        """Run one iteration. Gradients are added to ``.grad`` of the parameters.

        Parameters
        ----------
        plan : ExecutionPlan or RankPlan
            The plan of all ranks, or of this one.
        packing : Packing
            The packing with which the plan was lowered.
        samples : sequence
            The user's samples in the order of ``packing.batch``.
        optimizer_step : callable or None
            Called by OPTIMIZER_STEP. None: no step.
        normalizer : float or None
            Number of targets of the global batch. None: the sum over ``samples``. Required with replicas.
        counts : bool
            Whether these samples contribute to the gradients. False if another replica runs the same samples.

        Raises
        ------
        InputError
            ``normalizer`` is None, but the layout has replicas.
        ExecutionError
            The iteration failed. The error names rank, step and action.
        """
        divisor = normaliser if normalizer is None else normalizer
        return self.run_linked(
            self.prepare(plan, packing), samples, optimizer_step=optimizer_step, normalizer=divisor, counts=counts
        )

    def run_linked(
        self,
        linked: LinkedPlan,
        samples: Sequence[Any],
        *,
        optimizer_step: Callable[[], None] | None = None,
        normalizer: float | None = None,
        counts: bool = True,
    ) -> StepResult:
        """Run a plan linked by `prepare`, as `run` does."""
        if len(samples) != len(linked.packing.batch.samples):
            raise ExecutionError(
                f"rank {self.rank}: got {len(samples)} samples, but the plan is for {len(linked.packing.batch.samples)}"
            )
        if linked.was_run:
            raise ExecutionError(f"rank {self.rank}: the linked plan has already run; call `prepare` again")
        linked.was_run = True
        if normalizer is None:
            if self.layout.parallelism.data > 1:
                raise InputError(
                    "normalizer",
                    f"is missing, but the layout has {self.layout.parallelism.data} replicas",
                    "give the number of targets of the global batch, see global_targets",
                )
            normalizer = count_targets(self.model, samples)
        if not 0 < normalizer < float("inf"):
            raise ExecutionError(
                f"rank {self.rank}: the batch has {normalizer} {self.model.targets}; give it at least one"
            )
        each = 1.0 / normalizer if counts else 0.0
        iteration = self.iteration_type(self, linked, samples, optimizer_step, each)
        if self.forward_seeds is not None:
            self.forward_seeds.begin(linked.plan.iteration, linked.packing)
        verbs, clock = iteration.verbs, self.queues.stamp
        stamps = [clock()]
        try:
            with kept_casts(self.device, self.options.autocast):
                for action, argument in zip(linked.actions, linked.arguments, strict=True):
                    verbs[action.verb](argument)
                    stamps.append(clock())
                # A plan need not have an optimizer step.
                iteration.finish()
            moments = self.queues.times(stamps, self.options.timeout_s)
        except Exception as error:
            step = max(0, error.num_reached - 1) if isinstance(error, StalledError) else len(stamps) - 1
            problem = str(error) if isinstance(error, PipeloomError) else f"{type(error).__name__}: {error}"
            raise ExecutionError(f"{self._where(linked, step)}: {problem}") from error
        finally:
            # After an error, copies may still run whose memory is freed now.
            self.queues.end_copies()
            if self.forward_seeds is not None:
                self.forward_seeds.end()
            linked.unlink()
            iteration.close()
        return StepResult(iteration.loss_sum, normalizer, linked.actions, moments, **vars(iteration.counts))

    def _where(self, linked: LinkedPlan, step: int) -> str:
        action = action_text(linked.actions[step]) if step < len(linked.actions) else "the end"
        return f"rank {self.rank}, step {step}, '{action}'"


def _check_layout(model: Model, layout: Layout) -> None:
    """Raise `InputError` if the layout belongs to another model."""
    names = [module.name for module in model.modules]
    if [module.name for module in layout.modules] != names:
        raise InputError("layout.modules", f"are {[m.name for m in layout.modules]}, the model has {names}")
    for module in model.modules:
        here = layout.module(module.name)
        if (here.after, here.frozen) != (module.after, module.frozen):
            raise InputError(f"layout.module {module.name!r}", "has another `after` or `frozen` than the model")
        if (set(here.emits), set(here.takes)) != (set(ModuleLayout.of(module.spec).emits), set(module.spec.takes)):
            raise InputError(
                f"layout.module {module.name!r}", "has other streams than the model", "make a layout of this model"
            )
        num_layers = layout.chunks[layout.chunks_of(module.name)[-1]].layers[1] + 1
        if num_layers != len(module.layers):
            raise InputError(
                f"layout.module {module.name!r}", f"has {num_layers} layers, the model {len(module.layers)}"
            )
