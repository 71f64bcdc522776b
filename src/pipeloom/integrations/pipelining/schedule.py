"""PlannedSchedule: a schedule of `torch.distributed.pipelining` that is planned for every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.parallel import DistributedDataParallel

from pipeloom.collector import collector_paused
from pipeloom.errors import InputError
from pipeloom.integrations.pipelining.inputs import Splitting, StepInputs, merged
from pipeloom.integrations.pipelining.running import StageLayer, StageMicrobatch, StepLoss
from pipeloom.integrations.steps.agreement import agree, check_reports, error_text
from pipeloom.integrations.steps.control import ControlChannel, StepMessage, StepReport, source_of
from pipeloom.integrations.steps.executors import StepExecutors
from pipeloom.integrations.steps.measuring import gather_times, step_times
from pipeloom.integrations.steps.orders import KnownOrder, KnownOrders, Signatures
from pipeloom.integrations.steps.planning import Planning, Sizes, StepPlanner, UpcomingSizes, check_whole, checked_sizes
from pipeloom.integrations.steps.running import StepExecutor, StepTransport, stage_layout, step_executor
from pipeloom.integrations.steps.shapes import Boundaries
from pipeloom.integrations.steps.sizes import default_size, signature
from pipeloom.plan import backend_of
from pipeloom.runtime.execute.result import StepResult
from pipeloom.runtime.launch import accelerator
from pipeloom.spec import Layout, Parallelism, TensorShape

SizeOf = Callable[..., int]
"""Returns the size of a microbatch from its inputs: tokens, or another number that costs grow with."""


@dataclass(eq=False)
class PlannedSchedule:
    """Runs PyTorch's stages; every step follows a plan made for its own microbatches.

    Use it as you use PyTorch's schedules. Every rank of the group makes one, with its own stages, and calls `step` or
    `eval`. The rank of the first stage passes the inputs, the rank of the last stage the targets. The number and shapes
    of the microbatches may differ from step to step. A stage may be on any rank.

    Parameters
    ----------
    stages : sequence of PipelineStage
        Stages of this rank, at least one.
    planner : Planning or None
        Options of the planner; None for the defaults.
    loss_fn : callable or None
        Returns a scalar from the last stage's output and the target of a microbatch. None: forwards only.
    sizes : callable, iterable or None
        Sizes of the microbatches, with which costs grow. Either a function of one microbatch's inputs, which is called
        on the rank of the first stage. Or the sizes of the microbatches of every training step, if they are known
        ahead; then the planner plans a step while the one before runs. None: the number of elements of the first
        tensor, without the last dimension if it has floats.
    n_microbatches : int or None
        Number of microbatches into which whole-batch inputs are split; None if you pass microbatches.
    args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        As in PyTorch's schedules.
    together : torch.distributed.ProcessGroup or None
        All ranks that must run the same plan, where they are more than those of the pipeline: stages compute together
        over them (FSDP, tensor or expert parallelism). All pipelines of the group then have as many microbatches, whose
        shapes may differ.

    Raises
    ------
    InputError
        When the stages of all ranks do not form a chain, or ``planner`` is not a `Planning`.
    """

    stages: Sequence[PipelineStage]
    planner: Planning | None = None
    loss_fn: Callable[..., Tensor] | None = None
    _: KW_ONLY
    sizes: SizeOf | Iterable[Sequence[int]] | None = None
    n_microbatches: int | None = None
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None
    output_merge_spec: Any = None
    scale_grads: bool = True
    together: dist.ProcessGroup | None = None
    layout: Layout = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Gather the stages of the other ranks."""
        planner: object = self.planner
        if not isinstance(planner, Planning | None):
            # The second argument of PyTorch's schedules is `n_microbatches`.
            remedy = "give n_microbatches by name, such as n_microbatches=8"
            raise InputError("planner", f"is of type {type(planner).__name__}, not Planning", remedy)
        self.stages = _checked(self.stages)
        if self.n_microbatches is not None:
            check_whole("n_microbatches", self.n_microbatches)
        first = self.stages[0]
        # Collectives of objects use the current device.
        accelerator.select(torch.device(first.device))
        self.layout = _gathered(self.stages)
        source = source_of(first.group, self._leader, self.together)
        everyone = first.group if self.together is None else self.together
        self._control = ControlChannel(everyone, source, first.device)
        self._transport = StepTransport(first.group, first.device)
        self._loss = StepLoss(self.loss_fn)
        self._executors = StepExecutors(self.layout, self._make)
        self._boundaries: dict[tuple[bool, str], Boundaries] = {}
        """By the kind of step and the modes of the ranks, on which shapes and types may depend."""
        self._orders = KnownOrders(self.layout)
        self._num_steps = 0
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._upcoming = None if self.sizes is None or callable(self.sizes) else UpcomingSizes(self.sizes)
        self._planner: StepPlanner | None = None
        if self._control.broadcasts:
            backend = backend_of(torch.device(first.device).type)
            self._planner = StepPlanner(self.layout, self.planner or Planning(), backend)
            weakref.finalize(self, self._planner.close)

    @property
    def _leader(self) -> int:
        """Rank of the first stage."""
        return self.layout.chunks[0].rank

    @cached_property
    def _pipeline(self) -> ControlChannel | None:
        """The channel of this rank's pipeline, if several pipelines run one plan. Their inputs may differ."""
        first = self.stages[0]
        if dist.get_world_size(self._control.group) == first.group_size:
            return None
        return ControlChannel(first.group, source_of(first.group, self._leader, None), first.device)

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    # ---------------------------------------------------------------- public methods

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step; gradients are added to ``.grad`` of the stages' parameters.

        Pass either whole-batch inputs, which are split as PyTorch splits them, or microbatches, of any number and
        shapes.

        Parameters
        ----------
        args, kwargs
            Whole-batch inputs of the model: positional ones on the rank of the first stage, keywords on any rank.
        target : torch.Tensor or None
            Whole-batch target, on the rank of the last stage.
        losses : list or None
            Its items are replaced by the microbatches' losses, on the rank of the last stage.
        return_outputs : bool
            Whether the rank of the last stage returns the outputs.
        loss_kwargs : dict or None
            Keyword arguments of the loss.
        arg_mbs, kwarg_mbs, target_mbs : sequence or None
            Inputs and targets by microbatch, in place of whole-batch ones.

        Returns
        -------
        The merged outputs, on the rank of the last stage. If microbatches differ in more than dimension 0, a list of
        their outputs.

        Raises
        ------
        InputError
            When this rank's inputs are inconsistent.
        ExecutionError
            When a rank cannot run its plan, or another rank's inputs are inconsistent. All ranks raise it before
            anything runs.
        """
        trains = self.loss_fn is not None
        inputs = StepInputs(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        self._loss.arguments, self._loss.keeps_outputs = loss_kwargs or {}, return_outputs
        return self._run(inputs, losses, trains)

    def eval(self, *args: Any, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """Run the forwards of one step, without gradients. Takes and returns what `step` does."""
        own = {name: kwargs.pop(name, None) for name in ("target", "arg_mbs", "kwarg_mbs", "target_mbs")}
        self._loss.arguments = kwargs.pop("loss_kwargs", None) or {}
        self._loss.keeps_outputs = kwargs.pop("return_outputs", True)
        return self._run(StepInputs(args, kwargs, **own), losses, False)

    def close(self) -> None:
        """Stop the planner's process. It also stops when the schedule is garbage-collected."""
        if self._planner is not None:
            self._planner.close()

    # ---------------------------------------------------------------- one step

    @property
    def _splitting(self) -> Splitting:
        # Not cached, since ``n_microbatches`` may change from step to step.
        return Splitting(self.n_microbatches, self.args_chunk_spec, self.kwargs_chunk_spec, self.output_merge_spec)

    def _run(self, inputs: StepInputs, losses: list[Any] | None, trains: bool) -> Any:
        message = self._agreed(inputs, trains)
        executor = self._executors.get(trains, message.widths)
        # Linked plans are many small objects, which are freed after the step. Looking for cycles among them during the
        # step takes longer than linking.
        with collector_paused():
            known = self._orders.receive(message)
            boundaries = self._boundaries_of(trains, message.modes)
            microbatches = self._microbatches(inputs, known, boundaries)
            linked = executor.with_shapes(executor.prepare(known.order.plan, known.packing), microbatches)
            self._loss.scale = len(microbatches) if trains and self.scale_grads else 1
            with self._divided():
                result = executor.run_linked(linked, microbatches, normalizer=1.0)
            del linked
        # The same order at both ends of a boundary.
        for microbatch in microbatches:
            boundaries.learn(microbatch.inputs, microbatch.metas)
        if trains:
            self._num_steps += 1
            if message.measures:
                self._gather_times(known, result, microbatches)
        if self._has_last:
            if losses is not None:
                losses[:] = [each.loss for each in microbatches if each.loss is not None]
            if self._loss.keeps_outputs:
                return merged(microbatches, self._splitting)
        return None

    def _agreed(self, inputs: StepInputs, trains: bool) -> StepMessage:
        """Return what all ranks will run, after each has checked its inputs."""
        failure: Exception | None = None
        try:
            if trains and not torch.is_grad_enabled():
                raise InputError("step()", "needs gradients, and they are switched off", "call eval()")
            name, count = inputs.check(trains and self._has_last)
            if self.stages[0].is_first:
                # Several pipelines have different inputs.
                self._given = inputs.split(self._splitting)
                if name and count != len(self._given):
                    raise InputError(name, f"has {count} microbatches, and the batch {len(self._given)}")
                name, count = name or "the batch", len(self._given)
            report = StepReport(name, count, trains, self._mode())
        except Exception as error:
            failure, report = error, StepReport(failure=error_text(error))
        return agree(self._control, report, failure, lambda reports: self._decide(trains, reports))

    def _decide(self, trains: bool, reports: Sequence[StepReport]) -> StepMessage:
        planner, given = self._planner, self._given
        assert planner is not None
        assert given is not None
        check_reports(self._control, reports, trains, len(given), "call step or eval on all ranks")
        sizes = self._sizes(given, trains)
        widths = planner.begin(self._num_steps) if trains else None
        order = planner.order(sizes, trains)
        if trains and self._upcoming is not None and self._upcoming.following is not None:
            planner.ask(self._upcoming.following)
        measures = trains and planner.measures
        return self._orders.message(order, tuple(signature(*each) for each in given), measures, widths)

    def _sizes(self, given: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], trains: bool) -> Sizes:
        """Return the sizes of the step's microbatches."""
        if self._upcoming is not None and trains:
            return self._upcoming.take(self._num_steps, len(given))
        size_of = self.sizes if callable(self.sizes) else default_size
        return checked_sizes(size_of(*args, **kwargs) for args, kwargs in given)

    def _mode(self) -> str:
        """Return what shapes and types of this rank's outputs depend on besides the inputs."""
        kind = torch.device(self.stages[0].device).type
        precision = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
        return precision + "".join("t" if stage.submod.training else "e" for stage in self.stages)

    def _boundaries_of(self, trains: bool, modes: str) -> Boundaries:
        """Return the boundaries for a kind of step, with the shapes that were seen in its steps."""
        if (trains, modes) not in self._boundaries:
            mine = {stage.stage_index for stage in self.stages}
            self._boundaries[trains, modes] = Boundaries(len(self.layout.chunks), mine)
        return self._boundaries[trains, modes]

    def _microbatches(self, inputs: StepInputs, known: KnownOrder, boundaries: Boundaries) -> list[StageMicrobatch]:
        """What this rank works on."""
        count = len(known.order.sizes)
        # On the rank of the first stage, the inputs are split already.
        given, self._given = self._given or inputs.split(self._splitting, count), None
        targets = inputs.targets(count) if self._has_last else None
        self._loss.has_target = targets is not None
        signatures = self._signatures(known, given)
        return [
            StageMicrobatch(args, kwargs, None if targets is None else targets[i], seen, boundaries.predict(seen))
            for i, ((args, kwargs), seen) in enumerate(zip(given, signatures, strict=True))
        ]

    def _signatures(self, known: KnownOrder, given: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Signatures:
        """Return the signatures of the inputs of this rank's pipeline, from which shapes follow."""
        if self._pipeline is None:
            return known.signatures
        message = None
        if self._pipeline.broadcasts:
            message = StepMessage(signatures=tuple(signature(*each) for each in given))
        signatures = self._pipeline.broadcast(message).signatures
        assert signatures is not None
        return signatures

    def _gather_times(self, known: KnownOrder, result: StepResult, microbatches: Sequence[StageMicrobatch]) -> None:
        """Gather the measured times and widths on the rank of the first stage."""
        numbers = [stage.stage_index for stage in self.stages]
        times = step_times(self.layout, numbers, known, result, microbatches)
        into = None if self._planner is None else self._planner.measurements
        gather_times(times, into, self.stages[0].group, self._leader)

    def _make(self, shapes: Sequence[TensorShape]) -> StepExecutor:
        """Make the executor of this rank's stages."""
        first = self.stages[0]
        return step_executor(
            {stage.stage_index: StageLayer(stage) for stage in self.stages},
            self.layout,
            first.group_rank,
            self._transport,
            self._loss,
            shapes,
            device=first.device,
            inputs=lambda part: part.samples[0].args,
            reduce_gradients=self._reduce,
        )

    @contextmanager
    def _divided(self) -> Iterator[None]:
        """Divide the gradients of a step when it ends: each once, and not those of earlier steps.

        A divided gradient at the start of the loss's backward is not enough: a layer may add its own gradient, such as
        that of a balance loss, which PyTorch's schedules divide too. With replicas, `_reduce` divides.
        """
        if self._loss.scale == 1 or self.layout.parallelism.data > 1:
            yield
            return
        parameters = {id(each): each for stage in self.stages for each in stage.submod.parameters()}
        earlier = {key: each.grad for key, each in parameters.items() if each.grad is not None}
        for key in earlier:
            parameters[key].grad = None
        try:
            yield
        finally:
            for key, each in parameters.items():
                if each.grad is not None:
                    each.grad.div_(self._loss.scale)
                if key in earlier:
                    each.grad = earlier[key] if each.grad is None else earlier[key].add_(each.grad)

    def _reduce(self, chunk: int, _: Sequence[nn.Module]) -> None:
        """Reduce a stage's gradients over all ranks that have it, as PyTorch does, and divide them."""
        (stage,) = (stage for stage in self.stages if stage.stage_index == chunk)
        stage.perform_reduce_grad(self._loss.scale)


def _checked(stages: Sequence[PipelineStage]) -> tuple[PipelineStage, ...]:
    """Return the stages of this rank in their order. Raise `InputError` for one that cannot be run."""
    if isinstance(stages, PipelineStage):
        stages = [stages]
    if not stages:
        raise InputError("stages", "is empty", "give every rank of the group at least one stage")
    for i, stage in enumerate(stages):
        where = f"stages[{i}]"
        if not isinstance(stage, PipelineStage):
            raise InputError(where, f"is a {type(stage).__name__}", "give torch.distributed.pipelining.PipelineStage")
        if isinstance(stage.submod, DistributedDataParallel):
            remedy = "use fully_shard, or sum gradients after step()"
            raise InputError(where, "is under DistributedDataParallel", remedy)
        if not isinstance(stage.submod, FSDPModule) and any(isinstance(m, FSDPModule) for m in stage.submod.modules()):
            problem = "has modules under fully_shard, and is not under it itself"
            raise InputError(where, problem, "call fully_shard on the stage's module too")
        if stage.dw_builder is not None:
            raise InputError(where, "has a dw_builder", "leave it out: backwards are split by autograd's graph")
        if stage.group is not stages[0].group:
            raise InputError(where, "is of another process group than stages[0]", "give all stages one group")
    return tuple(sorted(stages, key=lambda stage: stage.stage_index))


def _gathered(stages: Sequence[PipelineStage]) -> Layout:
    """Return the layout of all ranks' stages. Every rank raises `InputError` if these do not form a chain."""
    first = stages[0]
    modules = [module for stage in stages for module in stage.submod.modules()]
    mine = (
        [stage.stage_index for stage in stages],
        [stage.num_stages for stage in stages],
        any(isinstance(module, FSDPModule) for module in modules),
    )
    every: list[Any] = [None] * first.group_size
    dist.all_gather_object(every, mine, group=first.group)
    counts = {count for _, counts, _ in every for count in counts}
    if len(counts) > 1:
        raise InputError("stages", f"disagree on num_stages: {sorted(counts)}", "give all of them the same")
    rank_of: dict[int, int] = {}
    remedy = "give every stage of the chain to one rank"
    for rank, (numbers, _, _) in enumerate(every):
        for number in numbers:
            if number in rank_of:
                where = f"ranks {rank_of[number]} and {rank}" if rank_of[number] != rank else f"rank {rank} twice"
                raise InputError(f"stage {number}", f"is on {where}", remedy)
            rank_of[number] = rank
    (num_stages,) = counts
    for number in range(num_stages):
        if number not in rank_of:
            raise InputError(f"stage {number}", f"of 0..{num_stages - 1} is on no rank", remedy)
    return stage_layout(
        [rank_of[i] for i in range(num_stages)],
        len(every),
        # With FSDP, parameters are gathered before a stage and gradients reduced after it.
        parallelism=Parallelism(data=2 if any(sharded for *_, sharded in every) else 1),
    )
