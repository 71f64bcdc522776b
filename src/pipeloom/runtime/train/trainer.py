"""The training loop, in which every iteration runs the plan that was made for its batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from pipeloom.cost import Correction
from pipeloom.errors import ExecutionError, InfeasibleError, InputError
from pipeloom.plan import BACKENDS, Backend, Delivery, backend_of
from pipeloom.runtime.checkpoint.resume import TrainerState
from pipeloom.runtime.checkpoint.safetensors_files import SHARD_BYTES
from pipeloom.runtime.checkpoint.save_pretrained import save_pretrained
from pipeloom.runtime.checkpoint.saver import Saver, Saving
from pipeloom.runtime.data.batches import bound
from pipeloom.runtime.data.dataset import count_targets
from pipeloom.runtime.data.prefetch import Describe, close_reading
from pipeloom.runtime.data.read_ahead import ReadAhead, UpcomingBatch, broadcast_assignment
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.execute.linker import check_serial
from pipeloom.runtime.execute.options import ExecutionOptions
from pipeloom.runtime.execute.result import Calibration, Calibrator, NotFiniteError, StepReport
from pipeloom.runtime.launch.coordination import (
    BatchComparison,
    DeliveredPlan,
    FirstPlan,
    LongBarrier,
    scatter_plan,
    together,
)
from pipeloom.runtime.launch.mesh import Mesh
from pipeloom.runtime.launch.transport import BatchedTransport, HostTransport, TorchTransport, Transport
from pipeloom.runtime.model.membership import BatchLoads, join_groups
from pipeloom.runtime.model.model import Model, user_code
from pipeloom.runtime.model.tied import sums_over_ranks
from pipeloom.runtime.model.weights import give_memory, give_weights
from pipeloom.runtime.train.divide import divide_model, gather_layers
from pipeloom.runtime.train.evaluate import EvaluationResult, Evaluator, PlanForwards
from pipeloom.runtime.train.rates import MakeOptimizer, MakeScheduler
from pipeloom.runtime.train.update import WeightUpdate
from pipeloom.spec import Batch, Layout

_SHOWN_IDS = 3
"""Number of samples that an error names."""


class PlanSource(Protocol):
    """Source of plans, such as `pipeloom.Planner`."""

    def start(self) -> None:
        """Start. Called once on the rank that talks to the planner, before the first batch."""
        ...

    def submit(self, batch: Batch, correction: Correction) -> None:
        """Submit the metadata of an upcoming batch. Returns at once."""
        ...

    def collect(self, iteration: int) -> Delivery:
        """Return a plan for a submitted batch. Never waits beyond its deadline."""
        ...

    def close(self) -> None:
        """Close. Called once after the last batch."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A `PlanSource` that also assigns samples of batches to replicas, such as `pipeloom.Planner`."""

    def look_ahead(self, batch: Batch, corrections: Sequence[Correction] = ()) -> None:
        """Pass the global batch after the next submitted one, with the corrections of the replicas.

        Called on rank 0 before `submit`. The answer to the submitted batch may assign the samples of this one
        (`Answer.replica_of_sample`).
        """
        ...


class _PlanRequest(NamedTuple):
    """A batch for which a plan was requested, with the correction for its plan.

    ``whole`` is the batch of all replicas. ``samples`` and ``batch`` are this replica's share.
    """

    whole: UpcomingBatch
    samples: Sequence[Any]
    batch: Batch
    correction: Correction


class Trainer:
    """Trains a model over the processes of the default group: one pipeline or several replicas of it.

    Every rank iterates the same batches. Replicas (``layout.parallelism.data``) divide the samples of each batch, plan
    for themselves, and sum their gradients. The tensor-parallel ranks (``layout.parallelism.tensor``) of a replica all
    run its plan, on layers divided by `Module.parallelize`. Each batch is read one iteration ahead, so that the planner
    plans iteration ``i + 1`` while ``i`` runs.

    Parameters
    ----------
    model : Model
        The model, built alike on every rank. Each rank trains the layers of its chunks.
    planner : PlanSource
        Source of plans. Only the first rank of each replica calls it.
    describe : callable or None
        Returns the metadata of a sample, see `Describe`. None uses the model's own, or the metadata of `Prefetched`
        batches.
    optimizer : callable
        Returns the optimizer of a rank's parameters. Receives pairs of name and parameter if its first parameter is
        called ``named_parameters``. The scheduler scales the learning rates of its groups.
    scheduler : callable or None
        Returns torch's scheduler of a rank's optimizer, which steps after each step of the optimizer. None keeps the
        optimizer's rates. When training resumes, it is made anew and repeats its steps.
    loads : callable or None
        Returns the load of each sample, by which batches are divided among replicas. Must return the same on every
        rank, as `pipeloom.packing.cost_loads` does. None counts tokens.
    options : ExecutionOptions
        Device, precision, clipping, sharding.
    saving : Saving
        Checkpoints.
    mesh : Mesh or None
        Mesh of an earlier trainer with the same degrees, whose process groups are used again. None makes new groups.

    Attributes
    ----------
    membership : Membership
        Pipeline rank, replica and groups of this process.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        planner: PlanSource,
        *,
        describe: Describe | None = None,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None = None,
        loads: BatchLoads | None = None,
        options: ExecutionOptions = ExecutionOptions(),  # noqa: B008 - frozen
        saving: Saving = Saving(),  # noqa: B008 - frozen
        mesh: Mesh | None = None,
    ) -> None:
        self.options, self.model, self.layout = options, model, layout
        self.membership = join_groups(layout, options.timeout_s, self.device.type, mesh)
        self._running = self._make_running(fill=not saving.resumes)
        self._planner, self._describe, self._loads = planner, describe or model.describe, loads
        limit = None if options.timeout_s is None else timedelta(seconds=options.timeout_s)
        self._executor = Executor(
            self._running,
            layout,
            self.membership.stage,
            self._make_transport(),
            options=options,
            reduce_gradients=self.membership.reduce_gradients,
            sum_tied=sums_over_ranks(self._running, layout, limit, self.device.type),
            tensor_group=self.membership.tensor_group,
        )
        self._update = WeightUpdate(self._executor, self.membership, optimizer, scheduler)
        self._calibration = Calibration(layout, self.membership)
        self._saver = Saver(saving, self._executor, self._update.optimizer, self._update.averages)

    @property
    def device(self) -> torch.device:
        """Device on which this process computes."""
        return torch.device(self.options.device)

    @property
    def rank(self) -> int:
        """Rank of this process in the default group."""
        return dist.get_rank()

    @property
    def _backend(self) -> Backend:
        return BACKENDS[backend_of(self.device.type if self.options.transport == "direct" else "cpu")]

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self._executor, self.model, self.membership, self._describe, self._loads)

    def _make_running(self, *, fill: bool) -> Model:
        """Divide the layers of this rank, and give those on ``meta`` memory and weights, as in `give_weights`."""
        here = self.membership
        on_meta = any(p.is_meta for module in self.model.modules for layer in module.layers for p in layer.parameters())
        barrier = LongBarrier() if on_meta else None
        running = divide_model(self.model, self.layout, here.mesh, self.options.shard, self.device, fill=fill)
        give_weights(running, self.layout, here.stage, self.device, fill=fill)
        if barrier is not None:
            barrier.wait("reading the weights")
        return running

    def _make_transport(self) -> Transport:
        """Return the transport of plan messages between the ranks of this replica."""
        kind: type[TorchTransport] = BatchedTransport if self._backend.batches_p2p else TorchTransport
        if self.options.transport == "host":
            kind = HostTransport
        transport = kind(self.membership.messages)
        if self.device.type != "cpu":
            transport.connect(self.device)
        return transport

    @property
    def learned(self) -> Calibrator:
        """Corrections of costs learned during training, on the first rank of each replica."""
        return self._calibration.calibrator

    @property
    def run_id(self) -> str:
        """Random id of the run in its checkpoints. Valid on rank 0, after `resume`."""
        return self._saver.run_id

    def resume(self, learned: Calibrator | None = None) -> int:
        """Load the newest checkpoint. All ranks call it together before `run`.

        Parameters
        ----------
        learned : Calibrator or None
            Corrections learned by another trainer of the same processes with any layout. None uses those of the
            checkpoint.

        Returns
        -------
        int
            The iteration to resume at. 0 if there is no checkpoint.

        Raises
        ------
        InputError
            The checkpoint is of another model.
        """
        state = self._saver.load()
        if state is None:
            return 0
        self._update.rates.evaluations = state.evaluations
        same_layout = state.layout == self.layout.digest
        self._calibration.resume(state.correction, state.num_measured, learned, same_layout=same_layout)
        return state.iteration

    def skip_trained(self, batches: Iterable[Sequence[Any]], count: int) -> Iterator[Sequence[Any]]:
        """Skip batches that were trained before the checkpoint. The last of them is the most recently trained one.

        Raises
        ------
        InputError
            The batches end earlier, or the last skipped batch differs from the one trained then. The data has changed,
            and training would repeat some samples and miss others.
        """
        with user_code("batches"):
            source = iter(bound(batches, self.model))
        return self._saver.skip_trained(source, count, lambda b, i: UpcomingBatch(b, i, self._describe).digest)

    def run(
        self,
        batches: Iterable[Sequence[Any]],
        first_iteration: int = 0,
        *,
        end: int | None = None,
        between: Callable[[int], None] | None = None,
    ) -> Generator[StepReport, None, None]:
        """Train on every batch, and yield a report after each.

        The checkpoint of an iteration is written when the caller requests the next report. Closing the generator
        completes it.

        Parameters
        ----------
        batches : iterable of sequence of samples
            The batches from ``first_iteration`` on, the same on every rank. An iterator of your own stays open if
            training reaches ``end``, so that another call can go on with it.
        first_iteration : int
            The result of `resume`.
        end : int or None
            Iteration before which training ends. None: training ends after the last batch.
        between : callable or None
            Called on all ranks with the number of iterations trained, after the checkpoint of an iteration was begun.
            If it raises `InputError` or `InfeasibleError`, or a loss is not finite, the checkpoint is completed.

        Raises
        ------
        InputError
            The metadata of a batch are invalid, or ranks have different batches. Raised on all ranks.
        ExecutionError
            A rank cannot run its plan, or another rank is lost.
        """
        # With replicas, a batch is assigned to them while the previous one is planned.
        more = int(self.membership.num_replicas > 1)
        ahead = ReadAhead(bound(batches, self.model), first_iteration, self._describe, more, end)
        iteration = trained = first_iteration
        first = FirstPlan()
        comparison: BatchComparison | None = None
        is_planner_rank = self.membership.is_planner_rank
        try:
            self._begin(first_iteration)
            requested = self._submit(ahead.take(), (), ahead.following)
            while True:
                begin = time.monotonic()
                following = None if requested is None else ahead.take()
                delivery = self._planner.collect(iteration) if is_planner_rank and requested is not None else None
                first.wait()
                if comparison is None:
                    # Made after the first plan, which may take longer than the timeout of other waits.
                    comparison = self._compare_batch(requested, first_iteration)
                comparison.check(iteration)
                if requested is None:
                    return
                delivered = self._broadcast_plan(requested.batch, delivery, iteration == first_iteration)
                assignment = broadcast_assignment(delivery, iteration) if self.membership.num_replicas > 1 else ()
                iteration += 1
                current, requested = requested, self._submit(following, assignment, ahead.following)
                comparison = self._compare_batch(requested, first_iteration)
                report = self._step(current, delivery, delivered)
                trained = iteration
                yield replace(report, step_s=time.monotonic() - begin)
                saved = self._saver.after(iteration, partial(self._state, current), is_last=requested is None)
                if between is not None:
                    between(iteration)
                if saved and requested is not None and self._saver.ends_after(iteration):
                    comparison.check(iteration)
                    self._saver.end()
                    return
        except (GeneratorExit, InputError, InfeasibleError, ExecutionError) as error:
            # Also if the caller stops early.
            self._saver.end_after_error(error)
            raise
        finally:
            if ahead.source is not batches or trained != end:
                close_reading(ahead.source)
            self._executor.loader.close()
            first.cancel()
            if is_planner_rank:
                self._planner.close()

    def evaluate(
        self,
        batches: Iterable[Sequence[Any]],
        plan: PlanForwards,
        iteration: int,
        *,
        most: int | None = None,
        averaged: bool = False,
    ) -> EvaluationResult:
        """Compute the loss on other batches, forward only. All ranks call it together between iterations.

        Training is not affected: random states and the modes of layers are restored. Only a `ReduceLROnPlateau` uses
        the loss, of the first evaluation after each iteration. Further ones, such as of a test set, do not change it.

        Parameters
        ----------
        batches : iterable of sequence of samples
            The evaluation batches, the same on every rank.
        plan : callable
            Returns a plan of a batch's forwards. Called on the first rank of each replica.
        iteration : int
            Number of iterations trained so far.
        most : int or None
            Largest number of batches to take. None takes all.
        averaged : bool
            Whether to evaluate the averaged weights.

        Raises
        ------
        InputError
            There is no batch, ranks have different batches, or no average is kept.
        ExecutionError
            A rank cannot run its plan, or another rank is lost.
        """
        averages = self._update.averages
        if averaged and averages is None:
            raise InputError("averaged", "is set, but no average is kept", "give options.ema_decay")
        with nullcontext() if not averaged or averages is None else averages.in_place():
            result = self._evaluator.run(batches, plan, iteration, most)
        self._update.rates.evaluated(iteration, result.loss)
        return replace(result, weights="ema" if averaged else "trained")

    def note_evaluation(self, iteration: int, loss: float) -> None:
        """Use the loss of an evaluation that was made before training resumed, which its checkpoint may lack.

        All ranks call it together after `resume`.
        """
        self._update.rates.evaluated(iteration, loss)

    def gather_model(self) -> None:
        """Give every rank the trained weights of all layers on the CPU, e.g. to evaluate the whole model.

        Call it after training. It moves layers from the GPU to the CPU, and gives layers on ``meta`` memory.
        """
        with together("gathering the model"):
            gather_layers(self.model, self._running, self.layout, self.membership.stage)
            give_memory(self.model)
            for chunk in self.layout.chunks:
                for layer in self.model.module(chunk.module).layers[chunk.layers[0] : chunk.layers[1] + 1]:
                    if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
                        layer.to_empty(device="cpu")
                    for tensor in (*layer.parameters(), *layer.buffers()):
                        dist.broadcast(tensor.data, group=self.membership.collectives, group_src=chunk.rank)

    def save_pretrained(self, folder: Path | str, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write the trained weights to a folder in the format of the model's own library. All processes call it
        together.

        For models of `pipeloom.from_transformers` or `from_diffusers`. Writes safetensors with the library's keys, its
        configuration, and processor or pipeline files from the model's original folder. Every rank writes its own
        layers.

        Parameters
        ----------
        folder : path
            A new or empty folder that all processes share.
        shard_bytes : int
            Largest size of one file in bytes.

        Raises
        ------
        InputError
            The folder is not empty, or the model is of no library. Training can continue.
        """
        writes = self.membership.replica == 0 and self.membership.tensor_rank == 0
        save_pretrained(self.model, self._executor, writes, Path(folder), shard_bytes)

    def _begin(self, iteration: int) -> None:
        """Start the planner, and set the rates of the first iteration."""
        if self.membership.is_planner_rank:
            self._planner.start()
        self._update.begin(iteration)

    def _compare_batch(self, requested: _PlanRequest | None, first_iteration: int) -> BatchComparison:
        if requested is None:
            return BatchComparison(None)
        number = requested.batch.iteration - first_iteration
        return BatchComparison(requested.whole.compared(number < self.options.compare_contents))

    def _state(self, requested: _PlanRequest) -> TrainerState:
        """Return this trainer's part of a checkpoint after an iteration."""
        return TrainerState(
            requested.batch.iteration + 1,
            # The digest covers all replicas, because their number may change when training resumes.
            requested.whole.digest,
            self.layout.digest,
            self.learned.num_measured,
            self.learned.correction,
            self._update.rates.evaluations,
            origin="" if self.model.pretrained is None else self.model.pretrained.origin,
            run=self.run_id,
        )

    def _submit(
        self, whole: UpcomingBatch | None, assignment: tuple[int, ...], following: UpcomingBatch | None
    ) -> _PlanRequest | None:
        """Request a plan for this replica's share, and on rank 0 an assignment of the next batch to replicas."""
        if whole is None:
            return None
        mine = self.membership.share(whole.batch, self.model.spec, self._loads, assignment)
        own = whole.samples if len(mine) == len(whole.samples) else [whole.samples[i] for i in mine]
        request = _PlanRequest(whole, own, whole.batch.part(mine), self.learned.correction)
        if self.membership.is_planner_rank:
            assigns = following is not None and len(following.samples) >= self.membership.num_replicas
            if assigns and following is not None and self.rank == 0 and isinstance(self._planner, LooksAhead):
                # All ranks report an invalid batch when its iteration comes.
                with suppress(InputError):
                    self._planner.look_ahead(following.batch, self._calibration.replicas.corrections)
            self._planner.submit(request.batch, request.correction)
        return request

    def _broadcast_plan(self, batch: Batch, delivery: Delivery | None, is_first: bool) -> DeliveredPlan:
        """Send each rank of this replica its own actions of the plan."""
        if delivery is not None and is_first and self._backend.single_communicator:
            # Checked before the broadcast, so that no rank starts a plan that rank 0 rejects.
            check_serial(delivery.answer.plan)
        team = self.membership
        with together(f"iteration {batch.iteration}: the plan's delivery"):
            return scatter_plan(delivery, batch, self.model.spec, self.layout, group=team.team, stages=team.stages)

    def _step(self, request: _PlanRequest, delivery: Delivery | None, delivered: DeliveredPlan) -> StepReport:
        batch, correction, packing = request.batch, request.correction, delivered.packing
        with user_code("num_targets"):
            normalizer = count_targets(self.model, request.whole.samples)
        if not 0 < normalizer < math.inf:
            # All ranks count the same, so all of them stop here together.
            ids = [repr(sample.id) for sample in request.whole.batch.samples]
            shown = ", ".join(ids[:_SHOWN_IDS]) + ", ..." * (len(ids) > _SHOWN_IDS)
            problem = f"has {normalizer:g} {self.model.targets} in samples {shown}"
            raise InputError(f"iteration {batch.iteration}", problem, "leave them out, or use larger batches")
        counts = self.membership.counts(request.whole.batch)
        cpu_ns = time.thread_time_ns()
        try:
            result = self._executor.run(delivered.plan, packing, request.samples, normalizer=normalizer, counts=counts)
        except ExecutionError as error:
            raise ExecutionError(f"iteration {batch.iteration}, {error}") from error
        cpu_ns = time.thread_time_ns() - cpu_ns if self.device.type == "cpu" else -1
        # Tensor-parallel ranks have the same loss, which counts once.
        loss_sum = 0.0 if self.membership.tensor_rank or not counts else result.loss_sum
        loss = torch.tensor(loss_sum / result.normalizer, dtype=torch.float64)
        flops = self._executor.flops
        done = torch.tensor(
            0.0 if flops is None or not counts else flops.of(result.actions, packing), dtype=torch.float64
        )
        sums = torch.stack((loss, self._update.gradient_squares(), done))
        replicas = self._calibration.replicas
        totals = torch.cat((sums, replicas.row(self.membership, self.learned.correction)))
        with together(f"iteration {batch.iteration}: the sum of losses"):
            dist.all_reduce(totals)
        norm = totals[1].sqrt()
        replicas.take(totals[len(sums) :])
        # Every rank has the same sums, so all of them stop here together.
        for what, value in (("loss", float(totals[0])), ("norm of the gradient", float(norm))):
            if not math.isfinite(value):
                raise NotFiniteError(
                    f"iteration {batch.iteration}: the {what} is {value}; lower the learning rate, clip the gradient, "
                    "or find the sample that causes it"
                )
        learning_rate = self._update.rates.now
        self._update.step(norm)
        with together(f"iteration {batch.iteration}: measured times"):
            plan = delivered.plan if delivery is None else delivery.answer.plan
            measured = self._calibration.gather(plan, result.moments_ns, cpu_ns)
        makespan, share, answer = 0, 0.0, None if delivery is None else delivery.answer
        if measured is not None and answer is not None:
            makespan, share = measured.makespan_ns(answer.plan), measured.bubble_share(answer.plan)
            self.learned.learn(answer, correction, measured)
        return StepReport(
            iteration=batch.iteration,
            loss=float(totals[0]),
            gradient_norm=float(norm),
            num_microbatches=len(packing.microbatches),
            measured_s=makespan / 1e9,
            measured_bubble_share=share,
            fresh=delivery is not None and delivery.fresh,
            lead_s=0.0 if delivery is None else delivery.lead_s,
            reason="" if delivery is None else delivery.reason,
            answer=answer,
            batch=batch if self.membership.is_planner_rank else None,
            correction=correction,
            replicas=replicas.corrections,
            measured=measured,
            learning_rate=learning_rate,
            flops=float(totals[2]),
            num_tokens=sum(sample.sequence_tokens for sample in request.whole.batch.samples),
            num_skipped=getattr(request.whole.samples, "num_skipped", 0),
            global_batch=request.whole.batch if self.rank == 0 else None,
        )
