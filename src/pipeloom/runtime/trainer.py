"""The training loop: every iteration runs the plan that was made for its own batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError, InputError
from pipeloom.packing import Packing, packing_from_counts
from pipeloom.plan import COMPUTE_VERBS, Answer, Delivery
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.model import Model, user_code
from pipeloom.runtime.transport import TorchTransport
from pipeloom.spec import Batch, Layout, batch_from_dicts

Factors = dict[str, tuple[float, float]]
# Weight of the newest iteration in the moving average of measured over planned time.
_CALIBRATION_RATE = 0.1


class PlanSource(Protocol):
    """Where plans come from; `pipeloom.Planner` is one."""

    def start(self) -> None:
        """Called once, on the rank that talks to the planner, before the first batch."""
        ...

    def submit(self, batch: Batch, factors: Factors) -> None:
        """Hand over the metadata of a coming batch; returns at once."""
        ...

    def collect(self, iteration: int) -> Delivery:
        """Return a plan for a submitted batch; never waits beyond its deadline."""
        ...

    def close(self) -> None:
        """Called once, after the last batch."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one iteration did. ``answer``, ``batch``, ``factors`` and ``measured_ns`` are there on rank 0 only.

    Attributes
    ----------
    measured_ns : tuple of (int, int)
        Measured start and end of every compute action, in the order of ``answer.planned_start_ns``.
    factors : dict
        Per module, the calibration of (forward, backward) seconds with which the plan was made.
    """

    iteration: int
    loss: float
    gradient_norm: float
    num_microbatches: int
    measured_s: float
    measured_bubble_share: float
    fresh: bool
    lead_s: float
    reason: str
    answer: Answer | None
    batch: Batch | None
    factors: Factors
    measured_ns: tuple[tuple[int, int], ...]


class Trainer:
    """Trains a model over the pipeline ranks of the default process group.

    Every rank iterates the same batches. One batch ahead is read, so that the planner plans iteration ``i + 1``
    while ``i`` runs.

    Parameters
    ----------
    model : Model
        Built alike on every rank; each trains the layers of its chunks.
    layout : Layout
    planner : PlanSource
        Used on rank 0; the others receive its plans.
    describe : callable
        From one sample to its metadata, as a dictionary with the fields of the sample-metadata format.
    optimizer : callable
        From a rank's parameters to its optimiser.
    learning_rate : callable or None
        From the iteration to the learning rate; None leaves the optimiser's own.
    clip_norm : float or None
        Largest norm of the gradient over all ranks.
    tag_zero : bool
        Send every message with tag 0, which is how NCCL matches them.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        planner: PlanSource,
        *,
        describe: Callable[[Any], dict[str, Any]],
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        learning_rate: Callable[[int], float] | None = None,
        clip_norm: float | None = None,
        tag_zero: bool = False,
    ) -> None:
        self.rank, size = dist.get_rank(), dist.get_world_size()
        if size != layout.num_ranks:
            raise InputError(
                "layout.num_ranks", f"{layout.num_ranks}, but {size} processes run", "start as many"
            )
        self.model, self.layout = model, layout
        self._planner, self._describe = planner, describe
        self._learning_rate, self._clip_norm = learning_rate, clip_norm
        self._executor = Executor(model, layout, self.rank, TorchTransport(use_tags=not tag_zero))
        self._parameters = self._executor.parameters()
        self._optimizer = optimizer(self._parameters) if self._parameters else None
        self._factors: Factors = {}
        self._num_steps = 0

    def run(self, batches: Iterable[Sequence[Any]], first_iteration: int = 0) -> Iterator[StepReport]:
        """Train on every batch, yielding a report after each.

        Raises
        ------
        InputError
            When a batch's metadata is impossible.
        ExecutionError
            When a rank cannot run its plan or another rank has died.
        """
        source = iter(batches)
        samples = next(source, None)
        iteration = first_iteration
        if self.rank == 0:
            self._planner.start()
        try:
            if samples is not None:
                batch = self._submit(samples, iteration)
            while samples is not None:
                factors = self._factors
                following = next(source, None)
                delivery, answer, packing = self._deliver(batch)
                current = batch
                if following is not None:
                    batch = self._submit(following, iteration + 1)
                yield self._step(samples, current, delivery, answer, packing, factors)
                samples, iteration = following, iteration + 1
        finally:
            if self.rank == 0:
                self._planner.close()

    def gather_model(self) -> None:
        """Give every rank the trained weights of all layers, e.g. to evaluate or save the whole model."""
        for chunk in self.layout.chunks:
            for layer in self.model.module(chunk.module).layers[chunk.layers[0] : chunk.layers[1] + 1]:
                for tensor in (*layer.parameters(), *layer.buffers()):
                    dist.broadcast(tensor.data, src=chunk.rank)

    def _submit(self, samples: Sequence[Any], iteration: int) -> Batch:
        try:
            with user_code("describe"):
                rows = [self._describe(sample) for sample in samples]
            batch = batch_from_dicts(rows, iteration)
        except InputError as error:
            raise InputError(f"iteration {iteration}: {error.entity}", error.problem, error.remedy) from error
        if self.rank == 0:
            self._planner.submit(batch, self._factors)
        return batch

    def _deliver(self, batch: Batch) -> tuple[Delivery | None, Answer, Packing]:
        """Rank 0 collects a plan and hands it to all ranks, so that all run the same one."""
        if self.rank == 0:
            delivery = self._planner.collect(batch.iteration)
            _broadcast_bytes(msgspec.msgpack.encode(delivery.answer))
            return delivery, delivery.answer, delivery.packing
        answer = msgspec.msgpack.decode(_broadcast_bytes(None), type=Answer)
        counts = answer.packing
        packing = packing_from_counts(batch, self.model.spec, self.layout, counts.samples, counts.counts)
        return None, answer, packing

    def _step(
        self,
        samples: Sequence[Any],
        batch: Batch,
        delivery: Delivery | None,
        answer: Answer,
        packing: Packing,
        factors: Factors,
    ) -> StepReport:
        result = self._executor.run(answer.plan, packing, samples)
        squares = sum(float(p.grad.square().sum()) for p in self._parameters if p.grad is not None)
        totals = torch.tensor([result.loss_sum / result.normaliser, squares], dtype=torch.float64)
        dist.all_reduce(totals)
        norm = float(totals[1]) ** 0.5
        # Every rank has the same sums, so all of them stop here together.
        for what, value in (("loss", float(totals[0])), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise ExecutionError(
                    f"iteration {batch.iteration}: the {what} is {value}; lower the learning rate, clip the gradient, "
                    "or look for the sample that does it"
                )
        self._update(batch.iteration, norm)
        measured = self._gather_times(answer, [(t.start_ns, t.end_ns) for t in result.compute_times])
        makespan = max((end for _, end in measured), default=0)
        busy = sum(end - start for start, end in measured)
        # The first iteration runs cold and says nothing about the others.
        if self.rank == 0 and self._num_steps > 0:
            self._calibrate(answer, measured, factors)
        self._num_steps += 1
        return StepReport(
            iteration=batch.iteration,
            loss=float(totals[0]),
            gradient_norm=norm,
            num_microbatches=len(packing.microbatches),
            measured_s=makespan / 1e9,
            measured_bubble_share=1.0 - busy / max(makespan * self.layout.num_ranks, 1),
            fresh=delivery is not None and delivery.fresh,
            lead_s=0.0 if delivery is None else delivery.lead_s,
            reason="" if delivery is None else delivery.reason,
            answer=answer if self.rank == 0 else None,
            batch=batch if self.rank == 0 else None,
            factors=factors,
            measured_ns=measured,
        )

    def _update(self, iteration: int, norm: float) -> None:
        if self._optimizer is None:
            return
        if self._learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate(iteration)
        if self._clip_norm is not None and norm > self._clip_norm:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._clip_norm / norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _gather_times(self, answer: Answer, own: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Bring the measured times of all ranks to rank 0, counted from the first start.

        Clock readings are comparable because all ranks of one machine share the monotonic clock.
        """
        counts = [sum(action.verb in COMPUTE_VERBS for action in actions) for actions in answer.plan.ranks]
        block = torch.zeros((max(counts), 2), dtype=torch.int64)
        if own:
            block[: len(own)] = torch.tensor(own, dtype=torch.int64)
        blocks = [torch.zeros_like(block) for _ in counts] if self.rank == 0 else None
        dist.gather(block, blocks, dst=0)
        if blocks is None:
            return ()
        times = torch.cat([each[:count] for each, count in zip(blocks, counts, strict=True)])
        times -= times[:, 0].min()
        return tuple((start, end) for start, end in times.tolist())

    def _calibrate(self, answer: Answer, measured: tuple[tuple[int, int], ...], used: Factors) -> None:
        """Move each module's factors towards what this iteration measured."""
        # The first iterations weigh more, so that a wrong start is left quickly.
        rate = max(_CALIBRATION_RATE, 1 / self._num_steps)
        sums: dict[str, list[int]] = {name: [0, 0] for name in answer.planned_module_ns}
        compute = [a for actions in answer.plan.ranks for a in actions if a.verb in COMPUTE_VERBS]
        for action, (start, end) in zip(compute, measured, strict=True):
            sums[action.chunk.rpartition(".")[0]][action.verb != "F"] += end - start
        updated = dict(self._factors)
        for name, planned in answer.planned_module_ns.items():
            before = used.get(name, (1.0, 1.0))
            old = self._factors.get(name, before)
            new = [
                factor + rate * (base * total / promised - factor) if promised and total else factor
                for factor, base, total, promised in zip(old, before, sums[name], planned, strict=True)
            ]
            updated[name] = (new[0], new[1])
        self._factors = updated


def _broadcast_bytes(data: bytes | None) -> bytes:
    """Send bytes from rank 0 to all ranks."""
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(size, src=0)
    if data is None:
        payload = torch.empty(int(size), dtype=torch.uint8)
    else:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(payload, src=0)
    return payload.numpy().tobytes()
