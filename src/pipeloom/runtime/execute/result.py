"""Results of one iteration: on one rank, over all ranks, and as a correction of planned times."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pipeloom.cost import Correction
from pipeloom.cost.fits import FloatArray
from pipeloom.errors import ExecutionError
from pipeloom.plan import Action, Answer, ExecutionPlan, Measured, RankPlan, Verb, fit_links
from pipeloom.runtime.launch.coordination import SharedClock
from pipeloom.runtime.launch.host_links import find_hosts
from pipeloom.runtime.model.membership import Membership
from pipeloom.spec import Batch, Layout


class NotFiniteError(ExecutionError):
    """A loss or the norm of the gradient is not finite. Raised on all ranks."""


class ActionTime(NamedTuple):
    """When one action ran, on the host's monotonic clock in nanoseconds."""

    verb: Verb
    chunk: str
    microbatch: int
    sub_microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one iteration on one rank.

    Attributes
    ----------
    loss_sum : float
        Sum of the losses that this rank computed, before division by ``normalizer``. 0.0 on ranks without the last
        chunk.
    normalizer : float
        Number of targets of the global batch, by which the gradients are divided.
    actions : tuple of Action
        The actions in the order in which they ran.
    moments_ns : sequence of int
        Start of the first action, then the end of each action, which is the start of the next one. In ns on the
        monotonic clock of the host.
    num_recomputed : int
        Number of layers that ran a second time.
    offloaded_bytes : int
        Bytes moved to the host.
    """

    loss_sum: float
    normalizer: float
    actions: tuple[Action, ...]
    moments_ns: Sequence[int]
    num_recomputed: int
    offloaded_bytes: int
    sent_bytes: int
    received_bytes: int

    @property
    def normaliser(self) -> float:
        """Return ``normalizer``. Deprecated name; removed in the next release."""
        return self.normalizer

    @property
    def times(self) -> tuple[ActionTime, ...]:
        """Times of all actions in order, including waits. Computed on access."""
        return tuple(
            ActionTime(a.verb, a.chunk, a.microbatch, a.sub_microbatch, begin, end)
            for a, begin, end in zip(self.actions, self.moments_ns, self.moments_ns[1:], strict=False)
        )

    @property
    def compute_times(self) -> tuple[ActionTime, ...]:
        """Times of F, B, I and W in the order of the rank. These correspond to the tasks of a schedule."""
        return tuple(t for t in self.times if t.verb.is_compute)

    @property
    def waiting_ns(self) -> int:
        """Nanoseconds spent in waits for messages."""
        return sum(t.end_ns - t.start_ns for t in self.times if t.verb.is_wait)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one iteration. Loss and norm are those of all replicas; other fields are those of this replica.

    Attributes
    ----------
    answer, batch, measured
        Set only on the first rank of a pipeline.
    global_batch : Batch or None
        Batch of all replicas. Set only on rank 0.
    measured : Measured or None
        Times of all actions of all ranks.
    correction : Correction
        The correction with which the plan was made.
    replicas : tuple of Correction
        Corrections of all replicas at the end of the iteration, before its times were used. They have no links. Set on
        all ranks.
    learning_rate : float or None
        Learning rate of this rank's first parameter group. None if it trains no parameters.
    num_tokens : int
        Number of tokens in the sequences of the batch of all replicas.
    step_s : float
        Wall time of the iteration in seconds, including reading ahead, waiting for the plan and the optimizer.
    flops : float
        Operations of forward and backward of the model over all replicas. 0 if they are not counted.
    mfu : float or None
        Model FLOPs utilization: ``flops`` divided by the peak FLOPs of all devices in the wall time. None if unknown.
    num_skipped : int
        Number of damaged samples that were skipped.
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
    correction: Correction
    measured: Measured | None
    replicas: tuple[Correction, ...] = ()
    learning_rate: float | None = None
    num_tokens: int = 0
    step_s: float = 0.0
    flops: float = 0.0
    mfu: float | None = None
    num_skipped: int = 0
    global_batch: Batch | None = None

    @property
    def measured_ns(self) -> tuple[tuple[int, int], ...]:
        """Measured start and end of every compute action, in the order of ``answer.planned_start_ns``."""
        if self.measured is None or self.answer is None:
            return ()
        return self.measured.compute_ns(self.answer.plan)


# Weight of the newest iteration in the moving average of measured over planned time.
_RATE = 0.1
# The speed of a rank is the median of _SPEEDS iterations, so that a single slow iteration has no effect. If it differs
# by at most _ALIKE from the speed of most ranks, it counts as 1. Two slow iterations therefore change the speed. The
# next iteration has already been planned by then, so the fourth iteration is the first one planned with the new speed.
_SPEEDS = 3
_ALIKE = 0.1


def gather_times(
    plan: ExecutionPlan | RankPlan,
    own_ns: Sequence[int],
    cpu_ns: int,
    group: dist.ProcessGroup | None = None,
    ahead_ns: int = 0,
) -> Measured | None:
    """Gather the measured times of a pipeline on its first rank. Return None on other ranks. All ranks must call it.

    ``plan`` is that of all ranks on the rank that needs the times. On other ranks, their own part suffices. ``own_ns``
    are the moments of this rank, see `StepResult`. ``cpu_ns`` is the CPU time of the thread that ran the actions, or -1
    if another device computed. ``ahead_ns`` is the time by which this rank's clock is ahead of that of the first rank,
    see `SharedClock`. 0 on one host, where all ranks share the monotonic clock.
    """
    longest = plan.longest if isinstance(plan, RankPlan) else max(map(len, plan.ranks))
    block = torch.zeros((longest + 1, 2), dtype=torch.int64)
    block[0, 0] = cpu_ns
    moments = torch.tensor(own_ns, dtype=torch.int64) - ahead_ns
    block[1 : len(moments), 0], block[1 : len(moments), 1] = moments[:-1], moments[1:]
    on_root = dist.get_rank(group) == 0
    blocks = [torch.zeros_like(block) for _ in range(plan.num_ranks)] if on_root else None
    dist.gather(block, blocks, group=group, group_dst=0)
    # Tensor-parallel ranks run the same actions, and only one of them has the whole plan.
    if blocks is None or isinstance(plan, RankPlan):
        return None
    counts = [len(actions) for actions in plan.ranks]
    times = [each[1 : count + 1].numpy() for each, count in zip(blocks, counts, strict=True)]
    computing = [np.array([a.verb.is_compute for a in actions], bool) for actions in plan.ranks]
    begin = min(int(t[c, 0].min()) for t, c in zip(times, computing, strict=True) if c.any())
    return Measured(tuple(t - begin for t in times), tuple(int(each[0, 0]) for each in blocks))


class _Times(NamedTuple):
    """Computation time, measured and predicted without corrections, by module, direction (F, backward) and rank."""

    names: tuple[str, ...]
    measured_ns: FloatArray
    predicted_ns: FloatArray

    @staticmethod
    def of(answer: Answer, used: Correction, measured: Measured) -> _Times:
        names, plan = tuple(answer.planned_module_ns), answer.plan
        measured_ns, planned = (np.zeros((len(names), 2, len(plan.ranks))) for _ in range(2))
        spent = iter(zip(measured.compute_ns(plan), answer.planned_start_ns, strict=True))
        number = {name: m for m, name in enumerate(names)}
        for rank, actions in enumerate(plan.ranks):
            for action in actions:
                if action.verb.is_compute:
                    place = number[action.chunk.rpartition(".")[0]], int(action.verb != "F"), rank
                    (start, end), (begin, finish) = next(spent)
                    measured_ns[place] += end - start
                    planned[place] += finish - begin
        factors = np.array([used.modules.get(name, (1.0, 1.0)) for name in names])
        return _Times(names, measured_ns, planned / factors[:, :, None] / np.array(used.of_ranks(len(plan.ranks))))

    def slowness(self, factors: Mapping[str, tuple[float, float]] | None) -> FloatArray:
        """Return the slowdown of each rank relative to most ranks.

        ``factors`` are those of the modules. None: they are not known yet.
        """
        ones = np.ones(self.measured_ns.shape[-1])
        if factors is None:
            # A long time may be due to the module or to the rank. It is attributed to the module first.
            return ones
        known = np.array([factors.get(name, (1.0, 1.0)) for name in self.names])
        expected, measured = (known[:, :, None] * self.predicted_ns).sum(axis=(0, 1)), self.measured_ns.sum(axis=(0, 1))
        ran = (expected > 0) & (measured > 0)
        ratio = np.divide(measured, expected, out=ones, where=ran)
        # Use the lower median, so that the faster one of two ranks counts as normal.
        most = np.sort(ratio[ran])[(int(ran.sum()) - 1) // 2] if ran.any() else 1.0
        return np.where(ran, ratio / most, 1.0)


class ReplicaCorrections:
    """Corrections of all replicas, shared by sums over all ranks. The first rank of each replica fills one row.

    ``corrections`` is empty until the first sum.
    """

    def __init__(self, layout: Layout) -> None:
        self.corrections: tuple[Correction, ...] = ()
        self._names = [module.name for module in layout.modules]
        self._shape = layout.parallelism.data, 2 * len(self._names) + layout.num_ranks

    def row(self, here: Membership, correction: Correction) -> torch.Tensor:
        """Return the one-dimensional summand of this rank."""
        rows = torch.zeros(self._shape, dtype=torch.float64)
        if here.is_planner_rank:
            factors = [factor for name in self._names for factor in correction.modules.get(name, (1.0, 1.0))]
            num_ranks = self._shape[1] - len(factors)
            rows[here.replica] = torch.tensor([*factors, *correction.of_ranks(num_ranks)], dtype=torch.float64)
        return rows.flatten()

    def take(self, sums: torch.Tensor) -> None:
        """Set the corrections from the sum over all ranks."""
        count = 2 * len(self._names)
        self.corrections = tuple(
            Correction(
                {name: (row[2 * m], row[2 * m + 1]) for m, name in enumerate(self._names)},
                slowness=() if set(row[count:]) == {1.0} else tuple(row[count:]),
            )
            for row in sums.reshape(self._shape).tolist()
        )


class Calibration:
    """Corrections of costs that a rank learns in training, of its own replica and of all replicas.

    All ranks of the default group must construct it together. ``calibrator`` learns on the first rank of each replica.
    ``replicas`` has the corrections of all replicas, on all ranks.
    """

    def __init__(self, layout: Layout, membership: Membership) -> None:
        hosts, self._pipeline = find_hosts(), membership.collectives
        members = range(len(hosts)) if self._pipeline is None else dist.get_process_group_ranks(self._pipeline)
        self._hosts = tuple(hosts[rank] for rank in members) if max(hosts) else ()
        """Host of each rank of this replica's pipeline. Empty on a single host."""
        self.calibrator = Calibrator(Correction(hosts=self._hosts))
        self.replicas = ReplicaCorrections(layout)
        self._clock = SharedClock(self._pipeline)

    def resume(
        self, known: Correction, num_measured: int, learned: Calibrator | None = None, *, same_layout: bool
    ) -> None:
        """Continue from the corrections of a checkpoint, or from ``learned`` if it is not None."""
        # Speeds of ranks do not carry over to another layout, nor links to other hosts.
        slowness = known.slowness if same_layout else ()
        links = known.links if known.hosts == self._hosts else ()
        correction = Correction(known.modules, known.link, slowness, self._hosts, links)
        self.calibrator = learned or Calibrator(correction, num_measured)

    def gather(self, plan: ExecutionPlan | RankPlan, moments_ns: Sequence[int], cpu_ns: int) -> Measured | None:
        """Call `gather_times` over this replica's pipeline, with the clocks of its hosts aligned."""
        return gather_times(plan, moments_ns, cpu_ns, self._pipeline, self._clock.offset_ns())


class Calibrator:
    """Learns corrections of predicted times from the measured times of ``num_measured`` iterations so far.

    Factors of modules and links are moving averages over iterations. Speeds of ranks are medians of the last few
    iterations. ``correction`` is the current one. Its ``hosts`` are those of the pipeline.
    """

    def __init__(self, correction: Correction | None = None, num_measured: int = 0) -> None:
        self.correction = correction or Correction()
        self.num_measured = num_measured
        self._speeds: deque[FloatArray] = deque(maxlen=_SPEEDS)

    def learn(self, answer: Answer, used: Correction, measured: Measured) -> None:
        """Update the factors of modules and links, and the speeds of ranks, with the times of an iteration.

        ``answer`` is the plan that ran, and ``used`` the correction with which it was made.
        """
        self.num_measured += 1
        # The first iteration is a warm-up and not representative.
        if self.num_measured == 1:
            return
        # The next iterations have more weight, so that a wrong start is corrected quickly.
        rate = max(_RATE, 1 / (self.num_measured - 1))
        times = _Times.of(answer, used, measured)
        slowness = self._slowness(times.slowness(self.correction.modules or None))
        modules = self._modules(answer, used, times, slowness, rate)
        lines = fit_links(measured.messages(answer.plan), self.correction.hosts)
        learned = msgspec.structs.replace(self.correction, modules=modules, slowness=slowness)
        self.correction = learned.towards(lines, rate)

    def _slowness(self, now: FloatArray) -> tuple[float, ...]:
        """Return the slowdown of each rank relative to most ranks. Empty if all are alike."""
        if not self._speeds:
            before = np.array(self.correction.of_ranks(len(now)))
            self._speeds.extend([before] * (_SPEEDS - 1))
        self._speeds.append(now)
        medians = np.median(self._speeds, axis=0)
        alike = np.abs(medians - 1) <= _ALIKE
        return () if alike.all() else tuple(np.where(alike, 1.0, medians).tolist())

    def _modules(
        self, answer: Answer, used: Correction, times: _Times, slowness: Sequence[float], rate: float
    ) -> dict[str, tuple[float, float]]:
        total = (times.measured_ns / (np.array(slowness) if slowness else 1.0)).sum(axis=-1)
        promised = times.predicted_ns.sum(axis=-1)
        updated = dict(self.correction.modules)
        for m, name in enumerate(answer.planned_module_ns):
            old = self.correction.modules.get(name, used.modules.get(name, (1.0, 1.0)))
            new = [
                factor + rate * (float(total[m, half] / promised[m, half]) - factor)
                if promised[m, half] and total[m, half]
                else factor
                for half, factor in enumerate(old)
            ]
            updated[name] = (new[0], new[1])
        return updated
