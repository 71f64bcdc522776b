"""The training loop: every iteration runs the plan that was made for its own batch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from pipeloom.cost import Correction
from pipeloom.errors import ExecutionError, InputError, PipeloomError, PlanError, check_positive
from pipeloom.plan import BACKENDS, Answer, Backend, Delivery, backend_of, verify
from pipeloom.runtime.checkpoint.resume import Checkpoints, TrainerState
from pipeloom.runtime.checkpoint.safetensors_files import SHARD_BYTES
from pipeloom.runtime.checkpoint.save_pretrained import save_pretrained
from pipeloom.runtime.checkpoint.saver import Saver
from pipeloom.runtime.data.batches import bound
from pipeloom.runtime.data.dataset import count_targets
from pipeloom.runtime.data.prefetch import Describe, close_reading
from pipeloom.runtime.data.read_ahead import ReadAhead, UpcomingBatch, broadcast_assignment
from pipeloom.runtime.execute.executor import Executor
from pipeloom.runtime.execute.iteration import ExecutorOptions
from pipeloom.runtime.execute.result import Calibration, Calibrator, StepReport
from pipeloom.runtime.launch.coordination import FirstPlan, HandedOut, Patience, SameBatch, hand_out, together
from pipeloom.runtime.launch.transport import BatchedTransport, HostTransport, TorchTransport, Transport, TransportName
from pipeloom.runtime.model.flops import FlopCounts
from pipeloom.runtime.model.membership import BatchLoads, join_groups
from pipeloom.runtime.model.model import Model, user_code
from pipeloom.runtime.model.tied import sums_over_ranks
from pipeloom.runtime.model.weights import give_memory, give_weights
from pipeloom.runtime.train.divide import Sharding, divide_model, gather_layers
from pipeloom.runtime.train.evaluate import Evaluated, Evaluator, PlanForwards
from pipeloom.runtime.train.rates import MakeOptimizer, MakeScheduler
from pipeloom.runtime.train.update import WeightUpdate
from pipeloom.spec import Batch, Layout

_LOG = logging.getLogger(__name__)


class PlanSource(Protocol):
    """Where plans come from; `pipeloom.Planner` is one."""

    def start(self) -> None:
        """Called once, on the rank that talks to the planner, before the first batch."""
        ...

    def submit(self, batch: Batch, correction: Correction) -> None:
        """Hand over the metadata of a coming batch; returns at once."""
        ...

    def collect(self, iteration: int) -> Delivery:
        """Return a plan for a submitted batch; never waits beyond its deadline."""
        ...

    def close(self) -> None:
        """Called once, after the last batch."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A `PlanSource` that also deals batches to replicas, by what their shares will take; `pipeloom.Planner` does."""

    def look_ahead(self, batch: Batch, corrections: Sequence[Correction] = ()) -> None:
        """Called on rank 0 before `submit`, with the global batch after the submitted one, and how replicas are.

        The answer to the submitted one may say how this one is dealt (`Answer.dealt`).
        """
        ...


class _Asked(NamedTuple):
    """A batch for which a plan was asked, and what the plan will have been made with.

    ``whole`` is the batch of all replicas, ``samples`` and ``batch`` are this one's share.
    """

    whole: UpcomingBatch
    samples: Sequence[Any]
    batch: Batch
    correction: Correction


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How a `Trainer` trains, where the defaults do not fit."""

    scheduler: MakeScheduler | None = None
    """From a rank's optimiser to torch's scheduler of it, which takes a step after each of the optimiser; None leaves
    the optimiser's rates. It is made anew when training goes on, and takes the steps that it took."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, of which an iteration leaves this share; None: none."""
    clip_norm: float | None = None
    """Largest norm of the gradient over all ranks; None: any."""
    checkpoints: Checkpoints | None = None
    """Where training is saved, and goes on from after `Trainer.resume`; None: nowhere."""
    on_checkpoint: Callable[[int, Path], None] | None = None
    """Called after a checkpoint with the iteration to go on with, and the folder."""
    ends_after: Callable[[int], bool] | None = None
    """Asked on all ranks together after a checkpoint was begun, with the iteration to go on with: whether `Trainer.run`
    ends there, the checkpoint being whole. So another trainer can go on with it under another layout."""
    record: Sequence[Path] = ()
    """Files in which rank 0 keeps the run's history; hosts that do not share them get them with each checkpoint."""
    count_flops: bool = False
    """Report the operations of every iteration (`StepReport.flops`); not with tensor parallelism, where torch's counter
    says nothing of parts."""
    timeout_s: float | None = None
    """With replicas or divided layers: after which a rank that waits for another gives up; None: torch's own. On GPUs
    also after which an iteration that comes to no further action has failed."""
    loads: BatchLoads | None = None
    """With replicas: what the samples of a batch weigh when they are divided, the same on every rank
    (`pipeloom.packing.cost_loads`); None: their tokens."""
    compare_contents: int = 0
    """Of so many batches ranks compare what is in the samples too, not their ids and sizes alone; of a `Dataset`, whose
    samples every rank loads in part, nothing more."""
    transport: TransportName = "direct"
    """``"host"``: messages by way of the host's memory, so that ranks may share a GPU; the default group serves that
    by gloo."""
    device: torch.device | str = "cpu"
    """On which this process computes. On ``"cuda"`` messages go by NCCL, and the planner's setup says so with
    ``backend="nccl"``; the default group must serve both, see `pipeloom.runtime.launch`."""
    autocast: torch.dtype | None = None
    """Run layers and loss under `torch.autocast` with this dtype; the shapes that modules state must then have the
    dtypes that come out of it."""
    workers: int = 2
    """Threads of every rank that load samples of a `Dataset` ahead; 0: none."""
    random_seed: int | None = 0
    """Of what layers draw at random, see `ExecutorOptions`."""
    shard: Sharding | None = None
    """With replicas: ``"fsdp"`` holds parameters, gradients and optimiser state in shards over them (`fully_shard`);
    None: every replica holds all of its layers."""
    resumes: bool = False
    """`Trainer.resume` will find a checkpoint: weights of layers on ``meta`` are not read from the model's folder."""

    def __post_init__(self) -> None:
        for name in ("clip_norm", "timeout_s"):
            value = getattr(self, name)
            if value is not None:
                check_positive(f"options.{name}", value)


class Trainer:
    """Trains a model over the processes of the default group: a pipeline, or several replicas of it.

    Every rank iterates the same batches; replicas (``layout.parallelism.data``) divide the samples of each, plan for
    themselves, and sum their gradients; tensor-parallel ranks (``layout.parallelism.tensor``) of a replica all run its
    plan, on layers divided by `Module.parallelize`. One batch ahead is read, so that the planner plans iteration
    ``i + 1`` while ``i`` runs.

    Parameters
    ----------
    model : Model
        Built alike on every rank; each trains the layers of its chunks.
    planner : PlanSource
        Used on the first rank of each replica; the others receive its plans.
    describe : callable or None
        From one sample to its metadata, see `Describe`; None: the model's own, or batches are `Prefetched`.
    optimizer : callable
        From a rank's parameters to its optimiser; from pairs of name and parameter where its own first parameter is
        called ``named_parameters``. Its groups keep their rates, which the scheduler scales.
    options : TrainerOptions
        Learning rate, clipping, checkpoints, device, precision, sharding.

    Attributes
    ----------
    membership : Membership
        Its pipeline rank, replica and groups.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        planner: PlanSource,
        *,
        describe: Describe | None = None,
        optimizer: MakeOptimizer,
        options: TrainerOptions = TrainerOptions(),
    ) -> None:
        self.options, self.model, self.layout = options, model, layout
        self.membership = join_groups(layout, options.timeout_s, self.device.type)
        self._running = self._make_running()
        self._planner, self._describe = planner, describe or model.describe
        limit = None if options.timeout_s is None else timedelta(seconds=options.timeout_s)
        self._executor = Executor(
            self._running,
            layout,
            self.membership.stage,
            self._make_transport(),
            self.device,
            options=ExecutorOptions(
                reduce_gradients=self.membership.reduce_gradients,
                autocast=options.autocast,
                timeout_s=options.timeout_s,
                sum_tied=sums_over_ranks(self._running, layout, limit, self.device.type),
                random_seed=options.random_seed,
                workers=options.workers,
                tensor_group=self.membership.tensor_group,
            ),
        )
        if options.count_flops and layout.parallelism.tensor == 1:
            self._executor.flops = FlopCounts(layout)
        self._update = WeightUpdate(
            self._executor,
            self.membership,
            optimizer,
            options.scheduler,
            ema_decay=options.ema_decay,
            clip_norm=options.clip_norm,
        )
        self._evaluator: Evaluator | None = None
        self._calibration = Calibration(layout, self.membership)
        self._saver = Saver(
            options.checkpoints,
            self._executor,
            self._update.optimizer,
            self._update.averages,
            options.record,
            options.on_checkpoint,
        )

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

    def _make_running(self) -> Model:
        """Divide the layers of this rank, and give those that are on ``meta`` memory and weights."""
        here, shard, fill = self.membership, self.options.shard, not self.options.resumes
        on_meta = any(p.is_meta for module in self.model.modules for layer in module.layers for p in layer.parameters())
        patience = Patience() if on_meta else None
        running = divide_model(self.model, self.layout, here.mesh, shard, self.device, fill=fill)
        give_weights(running, self.layout, here.stage, self.device, fill=fill)
        if patience is not None:
            patience.wait("reading the weights")
        return running

    def _make_transport(self) -> Transport:
        """What carries the messages of plans between the ranks of this replica."""
        kind: type[TorchTransport] = BatchedTransport if self._backend.joins else TorchTransport
        if self.options.transport == "host":
            kind = HostTransport
        transport = kind(self.membership.messages)
        if self.device.type != "cpu":
            transport.connect(self.device)
        return transport

    @property
    def learned(self) -> Calibrator:
        """What was learned of costs while training ran, on the first rank of each replica."""
        return self._calibration.calibrator

    def resume(self, learned: Calibrator | None = None) -> int:
        """Read the newest checkpoint; all ranks call it together, before `run`.

        Parameters
        ----------
        learned : Calibrator or None
            Of another trainer of the same processes, whatever its layout; None: what the checkpoint has of it.

        Returns
        -------
        int
            The iteration to go on with; 0 where there is no checkpoint.

        Raises
        ------
        InputError
            When the checkpoint is of another model.
        """
        state = self._saver.load(must=self.options.resumes)
        if state is None:
            return 0
        self._update.rates.evaluations = state.evaluations
        same_layout = state.layout == self.layout.digest
        self._calibration.resume(state.correction, state.num_measured, learned, same_layout=same_layout)
        return state.iteration

    def skip_trained(self, batches: Iterable[Sequence[Any]], count: int) -> Iterator[Sequence[Any]]:
        """Leave out batches that were trained before the checkpoint, the last of them being the newest trained.

        Raises
        ------
        InputError
            When that one is not the batch that was trained then: the data has changed, and going on would train some
            samples twice and others never.
        """
        source = iter(bound(batches, self.model))
        return self._saver.skip_trained(source, count, lambda b, i: UpcomingBatch(b, i, self._describe).digest)

    def run(self, batches: Iterable[Sequence[Any]], first_iteration: int = 0) -> Iterator[StepReport]:
        """Train on every batch, yielding a report after each.

        A checkpoint is written after the report of its last iteration was taken.

        Parameters
        ----------
        batches : iterable of sequence of samples
            Those of ``first_iteration`` and all later ones, the same on every rank.
        first_iteration : int
            After `resume`: what it returned.

        Raises
        ------
        InputError
            When a batch's metadata is impossible, or ranks have different batches; then on all of them.
        ExecutionError
            When a rank cannot run its plan or another rank has died.
        """
        # Where there are replicas, a batch is dealt while the one before it is planned.
        ahead = ReadAhead(
            bound(batches, self.model), first_iteration, self._describe, int(self.membership.num_replicas > 1)
        )
        iteration = first_iteration
        first: FirstPlan | None = FirstPlan()
        same: SameBatch | None = None
        self._update.rates.begin(first_iteration)
        is_planner_rank = self.membership.is_planner_rank
        try:
            if is_planner_rank:
                self._planner.start()
            asked = self._submit(ahead.take(), (), ahead.following)
            while True:
                begin = time.monotonic()
                following = None if asked is None else ahead.take()
                delivery = self._planner.collect(iteration) if is_planner_rank and asked is not None else None
                if first is not None:
                    first.wait()
                    first = None
                if same is None:
                    # The first plan may be waited for longer than a rank, so this comes after it.
                    same = self._same_batch(asked, first_iteration)
                same.check(iteration)
                if asked is None:
                    return
                given = self._hand_out(asked.batch, delivery, iteration == first_iteration)
                assignment = broadcast_assignment(delivery, iteration) if self.membership.num_replicas > 1 else ()
                iteration += 1
                current, asked = asked, self._submit(following, assignment, ahead.following)
                same = self._same_batch(asked, first_iteration)
                report = self._step(current, delivery, given)
                yield replace(report, step_s=time.monotonic() - begin)
                saved = self._saver.after(iteration, partial(self._state, current), is_last=asked is None)
                if saved and asked is not None and self._ends_after(iteration):
                    same.check(iteration)
                    self._saver.end()
                    return
        except GeneratorExit:
            # Whoever stops here wants what was trained.
            try:
                self._saver.end()
            except PipeloomError as error:
                # Where the loop was left, Python would ignore the exception and print its traceback.
                _LOG.error("%s", error)
            raise
        finally:
            close_reading(ahead.source)
            self._executor.loader.close()
            if first is not None:
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
    ) -> Evaluated:
        """Measure the loss on other batches, forward only; all ranks call it together, between iterations.

        Training goes on as if it had not been: random states and the modes of layers are put back.

        Parameters
        ----------
        batches : iterable of sequence of samples
            The same on every rank.
        plan : callable
            From a batch to a plan of its forwards, called on the first rank of each replica.
        iteration : int
            How many iterations have been trained.
        most : int or None
            How many batches are taken at most; None: all.
        averaged : bool
            With the average of the weights in their place.

        Raises
        ------
        InputError
            When there is no batch, ranks have different ones, or no average is kept.
        ExecutionError
            When a rank cannot run its plan or another rank has died.
        """
        if self._evaluator is None:
            loads, described = self.options.loads, self._describe
            self._evaluator = Evaluator(self._executor, self.model, self.membership, described, loads)
        averages = self._update.averages
        if averaged and averages is None:
            raise InputError("averaged", "is set, but no average is kept", "give options.ema_decay")
        with nullcontext() if not averaged or averages is None else averages.in_place():
            result = self._evaluator.run(batches, plan, iteration, most)
        self._update.rates.evaluated(iteration, result.loss)
        return replace(result, weights="ema" if averaged else "trained")

    def gather_model(self) -> None:
        """Give every rank the trained weights of all layers on the CPU, e.g. to evaluate the whole model.

        After training: a layer that was on a GPU is there no more, and one that was shapes alone has memory.
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
        """Write the trained weights into a folder that the model's own library reads; all processes call it together.

        For a model of `pipeloom.from_transformers` or `from_diffusers`: safetensors with the library's keys, its
        configuration, and files of processor or pipeline of the folder that the model came from. Every rank
        writes its own layers.

        Parameters
        ----------
        folder : path
            New or empty; all processes share it.
        shard_bytes : int
            Most bytes of one file.

        Raises
        ------
        InputError
            When the folder is not empty, or the model is of no library. Training can go on.
        """
        writes = self.membership.replica == 0 and self.membership.tensor_rank == 0
        save_pretrained(self.model, self._executor, writes, Path(folder), shard_bytes)

    def _same_batch(self, asked: _Asked | None, first_iteration: int) -> SameBatch:
        if asked is None:
            return SameBatch(None)
        number = asked.batch.iteration - first_iteration
        return SameBatch(asked.whole.compared(number < self.options.compare_contents))

    def _ends_after(self, iteration: int) -> bool:
        return self.options.ends_after is not None and self.options.ends_after(iteration)

    def _state(self, asked: _Asked) -> TrainerState:
        """What a checkpoint after an iteration has of this trainer."""
        return TrainerState(
            asked.batch.iteration + 1,
            # Of all replicas together: their number may be another when training goes on.
            asked.whole.digest,
            self.layout.digest,
            self.learned.num_measured,
            self.learned.correction,
            self._update.rates.evaluations,
            origin="" if self.model.pretrained is None else self.model.pretrained.origin,
        )

    def _submit(
        self, whole: UpcomingBatch | None, assignment: tuple[int, ...], following: UpcomingBatch | None
    ) -> _Asked | None:
        """Ask for a plan of this replica's share, and on rank 0 how to deal the batch after it."""
        if whole is None:
            return None
        mine = self.membership.share(whole.batch, self.model.spec, self.options.loads, assignment)
        own = whole.samples if len(mine) == len(whole.samples) else [whole.samples[i] for i in mine]
        asked = _Asked(whole, own, whole.batch.part(mine), self.learned.correction)
        if self.membership.is_planner_rank:
            assigns = following is not None and len(following.samples) >= self.membership.num_replicas
            if assigns and following is not None and self.rank == 0 and isinstance(self._planner, LooksAhead):
                # All ranks report an invalid batch when its iteration comes.
                with suppress(InputError):
                    self._planner.look_ahead(following.batch, self._calibration.replicas.corrections)
            self._planner.submit(asked.batch, asked.correction)
        return asked

    def _hand_out(self, batch: Batch, delivery: Delivery | None, is_first: bool) -> HandedOut:
        """The first rank hands its plan to all of its replica, to each its own actions."""
        if delivery is not None and is_first and self._backend.serial:
            # Before the others have it, so that none begins what rank 0 refuses.
            _check_serial(delivery.answer)
        team = self.membership
        with together(f"iteration {batch.iteration}: the plan's delivery"):
            return hand_out(delivery, batch, self.model.spec, self.layout, group=team.team, stages=team.stages)

    def _step(self, asked: _Asked, delivery: Delivery | None, given: HandedOut) -> StepReport:
        batch, correction, packing = asked.batch, asked.correction, given.packing
        with user_code("num_targets"):
            normaliser = count_targets(self.model, asked.whole.samples)
        counts = self.membership.counts(asked.whole.batch)
        cpu_ns = time.thread_time_ns()
        try:
            result = self._executor.run(given.plan, packing, asked.samples, normaliser=normaliser, counts=counts)
        except ExecutionError as error:
            raise ExecutionError(f"iteration {batch.iteration}, {error}") from error
        cpu_ns = time.thread_time_ns() - cpu_ns if self.device.type == "cpu" else -1
        # Tensor-parallel ranks have the same loss, which counts once.
        loss_sum = 0.0 if self.membership.tensor_rank or not counts else result.loss_sum
        loss = torch.tensor(loss_sum / result.normaliser, dtype=torch.float64)
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
                raise ExecutionError(
                    f"iteration {batch.iteration}: the {what} is {value}; lower the learning rate, clip the gradient, "
                    "or look for the sample that does it"
                )
        learning_rate = self._update.rates.now
        self._update.step(norm)
        with together(f"iteration {batch.iteration}: measured times"):
            plan = given.plan if delivery is None else delivery.answer.plan
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
            num_tokens=sum(sample.sequence_tokens for sample in asked.whole.batch.samples),
            num_skipped=getattr(asked.whole.samples, "num_skipped", 0),
        )


def _check_serial(answer: Answer) -> None:
    """Refuse a planner that makes plans for another backend; one plan shows it."""
    try:
        verify(answer.plan, serial=True)
    except PlanError as error:
        raise InputError(
            "planner",
            f"makes plans that NCCL may not finish ({str(error).splitlines()[0]})",
            'give its Setup backend="nccl"',
        ) from error
