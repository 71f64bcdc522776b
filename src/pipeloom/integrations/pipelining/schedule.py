"""PlannedSchedule: a schedule of `torch.distributed.pipelining` that is made anew for every step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.parallel import DistributedDataParallel

from pipeloom.collector import collector_paused
from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.integrations.pipelining.inputs import Splitting, StepInputs, default_size, merged, signature
from pipeloom.integrations.pipelining.planning import (
    MOST_KNOWN,
    Order,
    Planning,
    Row,
    Sizes,
    StepPlanner,
    check_whole,
    checked_sizes,
    planned_shapes,
)
from pipeloom.integrations.pipelining.running import MODULE, StageExecutor, StageMicrobatch, StepLoss, stage_executor
from pipeloom.integrations.pipelining.shapes import Boundary, Flat, Metas, Signature, flat_meta
from pipeloom.integrations.pipelining.telling import StepMessage, StepReport, Telling
from pipeloom.packing import Packing
from pipeloom.plan import backend_of
from pipeloom.runtime.execute.iteration import ExecutorOptions
from pipeloom.runtime.execute.result import StepResult
from pipeloom.runtime.launch.transport import TorchTransport
from pipeloom.runtime.train.evaluate import forwards_of
from pipeloom.spec import Chunk, Layout, ModuleLayout, Parallelism

SizeOf = Callable[..., int]
"""From one microbatch's inputs, given as the model takes them, to its size: tokens, or whatever costs grow with."""

_MEASURED_STEPS = range(1, 4)
"""Steps in which the costs of the stages are measured; in the first, memory is still being got."""


@dataclass(slots=True)
class _Known:
    """An order that all ranks have been told."""

    order: Order
    packing: Packing
    signatures: tuple[Signature, ...]


@dataclass(eq=False)
class PlannedSchedule:
    """Runs every step by a plan made for its own microbatches, on PyTorch's stages.

    Used as PyTorch's schedules are: every rank of the group makes one, with its own stages, and calls `step` or `eval`
    with what belongs to it: the inputs on the rank of the first stage, the targets on that of the last. How many
    microbatches a step has, and of which shapes, may differ from step to step. Stages may lie anywhere.

    Parameters
    ----------
    stages : sequence of PipelineStage
        This rank's, at least one.
    planner : Planning or None
    loss_fn : callable or None
        From the last stage's output and the target of a microbatch to a scalar; None: forwards alone.
    sizes : callable, iterable or None
        What a microbatch's costs grow with. A function of one microbatch's inputs, called on the rank of the first
        stage; or, known ahead, for every training step to come the sizes of its microbatches, so that the planner plans
        a step while the one before runs. None: the numbers in the first tensor, of floats without its last dimension.
    n_microbatches : int or None
        Into how many whole-batch inputs are split; None where microbatches are given.
    args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        As of PyTorch's schedules.
    together : torch.distributed.ProcessGroup or None
        More ranks than those of the pipeline that must run the same plan, since stages compute together over them
        (FSDP, tensor or expert parallelism): all of them. Microbatches are then alike on all pipelines of it.

    Raises
    ------
    InputError
        When the stages of all ranks form no chain.
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
        """Gather what stages the other ranks have."""
        self.stages = _checked(self.stages)
        if self.n_microbatches is not None:
            check_whole("n_microbatches", self.n_microbatches)
        first = self.stages[0]
        self._by_number = {stage.stage_index: stage for stage in self.stages}
        self._group, self._rank = first.group, first.group_rank
        self.layout = _gathered(self.stages)
        self._leader = self.layout.chunks[0].rank
        self._telling = Telling(self._group, self._leader, self.together, first.device)
        self._loss = StepLoss(self.loss_fn)
        self._boundaries = [Boundary() for _ in self.layout.chunks]
        """By the number of the stage behind."""
        self._known: dict[int, _Known] = {}
        self._numbers: dict[int, int] = {}
        """On the rank that tells: numbers of the orders that are known, by their identity."""
        self._num_steps = self._num_told = 0
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._has_last = any(stage.is_last for stage in self.stages)
        mine = set(self._by_number)
        self._crossed = [b for b in range(1, len(self.layout.chunks)) if len(mine & {b - 1, b}) == 1]
        """Boundaries between this rank and another."""
        self._coming: Iterator[Sequence[int]] | None = None
        self._following: Sizes | None = None
        if self.sizes is not None and not callable(self.sizes):
            self._coming = iter(self.sizes)
        self._planner: StepPlanner | None = None
        if self._telling.tells:
            backend = backend_of(torch.device(first.device).type)
            self._planner = StepPlanner(self.layout, self.planner or Planning(), backend)
            weakref.finalize(self, self._planner.close)
        # Made with the first step: by then weights are where they will be.
        self._executor: StageExecutor | None = None
        self._evaluator: StageExecutor | None = None

    # ---------------------------------------------------------------- what users call

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

        Either whole-batch inputs are given, which are split as PyTorch splits them, or microbatches, of any number and
        shapes.

        Parameters
        ----------
        args, kwargs
            Whole-batch inputs of the model; positional ones on the rank of the first stage, keywords on any.
        target : torch.Tensor or None
            Whole-batch target, on the rank of the last stage.
        losses : list or None
            Replaced by the microbatches' losses, on the rank of the last stage.
        return_outputs : bool
        loss_kwargs : dict or None
            Given to the loss.
        arg_mbs, kwarg_mbs, target_mbs : sequence or None
            The same, by microbatch.

        Returns
        -------
        On the rank of the last stage the outputs, merged; where they cannot be, since microbatches differ in more than
        dimension 0, a list of them.

        Raises
        ------
        InputError
            When this rank's inputs do not belong together.
        ExecutionError
            When a rank cannot run its plan, or another rank's inputs do not belong together: before anything runs, on
            all ranks.
        """
        trains = self.loss_fn is not None
        inputs = StepInputs(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        self._loss.arguments, self._loss.keeps_outputs = loss_kwargs or {}, return_outputs
        return self._run(inputs, losses, trains)

    def eval(self, *args: Any, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """Run the forwards of one step, without gradients; called as `step` is.

        Returns
        -------
        As `step`.
        """
        own = {name: kwargs.pop(name, None) for name in ("target", "arg_mbs", "kwarg_mbs", "target_mbs")}
        self._loss.arguments = kwargs.pop("loss_kwargs", None) or {}
        self._loss.keeps_outputs = kwargs.pop("return_outputs", True)
        return self._run(StepInputs(args, kwargs, **own), losses, False)

    def close(self) -> None:
        """Stop the planner's process; at the latest this happens when the schedule is gone."""
        if self._planner is not None:
            self._planner.close()

    # ---------------------------------------------------------------- one step

    @property
    def _splitting(self) -> Splitting:
        # Asked anew: the number may be set from step to step.
        return Splitting(self.n_microbatches, self.args_chunk_spec, self.kwargs_chunk_spec, self.output_merge_spec)

    def _run(self, inputs: StepInputs, losses: list[Any] | None, trains: bool) -> Any:
        message = self._agreed(inputs, trains)
        if message.widths is not None or self._executor is None:
            widths = message.widths or [1.0] * len(self.layout.chunks)
            self._executor, self._evaluator = self._made_executor(widths), None
        executor = self._executor if trains else self._evaluating()
        # Linked plans are many small objects that go when the step is over. Looking for cycles among them in the middle
        # of it takes longer than linking does.
        with collector_paused():
            known = self._heard(message)
            microbatches = self._microbatches(inputs, known)
            linked = executor.with_shapes(executor.prepare(known.order.plan, known.packing), microbatches)
            self._loss.scale = len(microbatches) if self.scale_grads else 1
            result = executor.run_linked(linked, microbatches, normaliser=1.0)
            del linked
        self._learn(known, microbatches)
        if trains:
            if self.layout.parallelism.data == 1 and self._loss.scale != 1:
                for stage in self.stages:
                    stage.scale_grads(self._loss.scale)
            self._num_steps += 1
            if message.measures:
                self._give_times(known, result, microbatches)
        if self._has_last:
            if losses is not None:
                losses[:] = [each.loss for each in microbatches if each.loss is not None]
            if self._loss.keeps_outputs:
                return merged(microbatches, self._splitting)
        return None

    def _agreed(self, inputs: StepInputs, trains: bool) -> StepMessage:
        """What all ranks will run, once all have looked at what they are given."""
        failure: InputError | None = None
        try:
            if trains and not torch.is_grad_enabled():
                raise InputError("step()", "needs gradients, and they are switched off", "call eval()")
            report = StepReport(*inputs.check(trains and self._has_last), trains)
        except InputError as error:
            failure, report = error, StepReport(failure=str(error))
        reports = self._telling.gather(report)
        if failure is None:
            return self._telling.tell(self._decided(inputs, trains, reports) if self._planner is not None else None)
        if self._planner is not None:
            self._telling.tell(self._failed(failure))
        else:
            # Whatever is heard, this is what is wrong here.
            with suppress(ExecutionError):
                self._telling.tell(None)
        raise failure

    def _decided(self, inputs: StepInputs, trains: bool, reports: Sequence[StepReport]) -> StepMessage:
        """On the rank that tells: what all will run. A failure is told, too, and raised here."""
        try:
            for place, report in enumerate(reports):
                if report.failure:
                    raise ExecutionError(f"rank {self._telling.global_rank(place)}: {report.failure}")
            return self._decide(inputs, trains, reports)
        except Exception as error:
            self._telling.tell(self._failed(error))
            raise

    def _failed(self, error: Exception) -> StepMessage:
        """A failure as the others hear it: with the rank that has it."""
        text = str(error) if isinstance(error, PipeloomError) else f"{type(error).__name__}: {error}"
        if not text.startswith("rank "):
            text = f"rank {self._telling.source}, of the first stage: {text}"
        return StepMessage(failure=text.partition("\n")[0])

    def _decide(self, inputs: StepInputs, trains: bool, reports: Sequence[StepReport]) -> StepMessage:
        planner = self._planner
        assert planner is not None
        given = inputs.split(self._splitting)
        for place, report in enumerate(reports):
            if report.trains != trains:
                here, there = ("a training step", "forwards alone")[:: 1 if trains else -1]
                problem = f"runs {there}, the rank of the first stage {here}"
                raise InputError(f"rank {self._telling.global_rank(place)}", problem, "call step or eval on all ranks")
            if report.count not in (0, len(given)):
                raise InputError(
                    f"rank {self._telling.global_rank(place)}: {report.name}",
                    f"has {report.count} microbatches, the step {len(given)}",
                    "give one for each",
                )
        self._given = given
        sizes = self._sizes(given, trains)
        widths = None
        if trains and self._num_steps == _MEASURED_STEPS.stop and not planner.is_measured:
            planner.take_measured()
            widths = tuple(planner.widths)
        order = planner.order(sizes, trains)
        if trains and self._following is not None:
            planner.ask(self._following)
        number = self._numbers.get(id(order))
        signatures: tuple[Signature, ...] | None = tuple(signature(*each) for each in given)
        measures = trains and self._num_steps in _MEASURED_STEPS and not planner.is_measured
        if number is None:
            self._num_told += 1
            number = self._numbers[id(order)] = self._num_told
            return StepMessage(number, measures, order, signatures, widths)
        if signatures == self._known[number].signatures:
            signatures = None
        return StepMessage(number, measures, None, signatures, widths)

    def _sizes(self, given: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], trains: bool) -> Sizes:
        """Sizes of the step's microbatches, and those of the next where they are known."""
        if self._coming is None or not trains:
            size_of = self.sizes if callable(self.sizes) else default_size
            found = checked_sizes(size_of(*args, **kwargs) for args, kwargs in given)
        else:
            following = self._following if self._following is not None else _next(self._coming)
            if following is None:
                raise InputError("sizes", f"ends after {self._num_steps} steps", "give sizes for every step")
            found, self._following = following, _next(self._coming)
            if len(found) != len(given):
                raise InputError(
                    "sizes",
                    f"step {self._num_steps} has {len(found)}, and {len(given)} microbatches",
                    "give one for each",
                )
        return found

    def _heard(self, message: StepMessage) -> _Known:
        if message.order is not None:
            assert message.signatures is not None
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
                self._numbers.clear()
            order = message.order
            self._known[message.number] = _Known(order, order.packing(), message.signatures)
        known = self._known[message.number]
        if message.signatures is not None:
            known.signatures = message.signatures
        return known

    def _microbatches(self, inputs: StepInputs, known: _Known) -> list[StageMicrobatch]:
        """What this rank works on."""
        count = len(known.order.sizes)
        # Where the step was decided, its inputs are split already.
        given, self._given = self._given or inputs.split(self._splitting, count), None
        targets = inputs.targets(count) if self._has_last else None
        self._loss.has_target = targets is not None
        metas: list[Metas | None] = [None] * (len(self.layout.chunks) + 1)
        found = []
        for i, (args, kwargs) in enumerate(given):
            for number in self._crossed:
                metas[number] = self._boundaries[number].foretell(known.signatures[i])
            found.append(StageMicrobatch(args, kwargs, None if targets is None else targets[i], metas.copy()))
        return found

    def _learn(self, known: _Known, microbatches: Sequence[StageMicrobatch]) -> None:
        """Note what went over the boundaries between ranks, in an order that is the same at both ends."""
        for inputs, microbatch in zip(known.signatures, microbatches, strict=True):
            for number in self._crossed:
                metas = microbatch.metas[number]
                assert metas is not None
                self._boundaries[number].learn(inputs, metas)

    def _reduce(self, chunk: int, _: Sequence[nn.Module]) -> None:
        """Reduce a stage's gradients over all that hold it, as PyTorch does, and scale them."""
        self._by_number[chunk].perform_reduce_grad(self._loss.scale)

    def _give_times(self, known: _Known, result: StepResult, microbatches: Sequence[StageMicrobatch]) -> None:
        """Give what was measured to the rank of the first stage."""
        sizes, samples = known.order.sizes, known.order.samples
        number_of = {name: i for i, name in enumerate(self.layout.chunk_names)}
        rows: list[Row] = [
            (
                number_of[time.chunk],
                str(time.verb),
                sizes[samples[time.microbatch]],
                (time.end_ns - time.start_ns) * 1e-9,
            )
            for time in result.compute_times
        ]
        widths = {}
        for number in self._by_number:
            every = [(each.metas[number + 1], size) for each, size in zip(microbatches, sizes, strict=True)]
            handed = [(flat_meta(metas), size) for metas, size in every if metas is not None]
            if handed:
                widths[number] = sum(_words(meta) / size for meta, size in handed) / len(handed)
        every_rank: list[Any] | None = [None] * self.layout.num_ranks if self._rank == self._leader else None
        dist.gather_object((rows, widths), every_rank, group=self._group, group_dst=self._leader)
        if self._planner is not None and every_rank is not None:
            for their_rows, their_widths in every_rank:
                self._planner.note(their_rows, their_widths)

    def _made_executor(self, widths: Sequence[float]) -> StageExecutor:
        return stage_executor(
            self.stages,
            self.layout,
            self._rank,
            TorchTransport(self._group),
            self._loss,
            ExecutorOptions(reduce_gradients=self._reduce, random_seed=None, workers=0),
            planned_shapes(widths),
        )

    def _evaluating(self) -> StageExecutor:
        assert self._executor is not None
        if self._evaluator is None:
            made = forwards_of(self._executor)
            assert isinstance(made, StageExecutor)
            self._evaluator = made
        return self._evaluator


def _words(meta: Flat) -> float:
    """Size of a tensor in numbers of four bytes."""
    return math.prod(meta.shape) * meta.dtype.itemsize / 4


def _next(coming: Iterator[Sequence[int]]) -> Sizes | None:
    sizes = next(coming, None)
    return None if sizes is None else checked_sizes(sizes)


def _checked(stages: Sequence[PipelineStage]) -> tuple[PipelineStage, ...]:
    """Stages of this rank in their order; refuse what is none, or is run in another way."""
    if isinstance(stages, PipelineStage):
        stages = [stages]
    if not stages:
        raise InputError("stages", "is empty", "give every rank of the group at least one stage")
    for i, stage in enumerate(stages):
        where = f"stages[{i}]"
        if not isinstance(stage, PipelineStage):
            raise InputError(where, f"is a {type(stage).__name__}", "give torch.distributed.pipelining.PipelineStage")
        if isinstance(stage.submod, DistributedDataParallel):
            raise InputError(
                where, "is under DistributedDataParallel", "use fully_shard, or sum gradients after step()"
            )
        if stage.dw_builder is not None:
            raise InputError(where, "has a dw_builder", "leave it out: backwards are split by autograd's graph")
        if stage.group is not stages[0].group:
            raise InputError(where, "is of another process group than stages[0]", "give all stages one group")
    return tuple(sorted(stages, key=lambda stage: stage.stage_index))


def _gathered(stages: Sequence[PipelineStage]) -> Layout:
    """Where the stages of all ranks lie, the same on every rank.

    Raises
    ------
    InputError
        When they form no chain; on every rank.
    """
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
    for rank, (numbers, _, _) in enumerate(every):
        for number in numbers:
            if number in rank_of:
                where = f"ranks {rank_of[number]} and {rank}" if rank_of[number] != rank else f"rank {rank} twice"
                raise InputError(f"stage {number}", f"is on {where}", "give every stage of the chain to one rank")
            rank_of[number] = rank
    (num_stages,) = counts
    for number in range(num_stages):
        if number not in rank_of:
            raise InputError(
                f"stage {number}", f"of 0..{num_stages - 1} is on no rank", "give every stage of the chain to one rank"
            )
    return Layout(
        len(every),
        (ModuleLayout(MODULE),),
        tuple(Chunk(MODULE, (i, i), rank_of[i]) for i in range(num_stages)),
        # More than one where parameters are gathered before, and gradients reduced behind.
        Parallelism(data=2 if any(sharded for *_, sharded in every) else 1),
    )
