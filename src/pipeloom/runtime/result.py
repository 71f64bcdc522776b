"""What one iteration gave: on one rank, over all ranks, and as a correction of planned times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from pipeloom.cost import Correction, fit_link
from pipeloom.plan import Action, Answer, ExecutionPlan, Measured, Verb
from pipeloom.spec import Batch


class ActionTime(NamedTuple):
    """When one action ran, on the host's monotonic clock."""

    verb: Verb
    chunk: str
    microbatch: int
    sub_microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one iteration gave on one rank.

    Attributes
    ----------
    loss_sum : float
        Sum of the losses of the microbatches whose last chunk is here, before division by ``normaliser``;
        0.0 on ranks without the last chunk.
    normaliser : float
        Targets of the global batch: what the gradients are divided by.
    actions : tuple of Action
        Those that were run, in order.
    moments_ns : sequence of int
        On the host's monotonic clock: when the first action began, and when each was done and the next one began.
    num_recomputed : int
        Layers run a second time.
    offloaded_bytes : int
        Moved to the host.
    sent_bytes, received_bytes : int
    """

    loss_sum: float
    normaliser: float
    actions: tuple[Action, ...]
    moments_ns: Sequence[int]
    num_recomputed: int
    offloaded_bytes: int
    sent_bytes: int
    received_bytes: int

    @property
    def times(self) -> tuple[ActionTime, ...]:
        """When every action ran, in order; waits too. Put together when it is asked for."""
        return tuple(
            ActionTime(a.verb, a.chunk, a.microbatch, a.sub_microbatch, begin, end)
            for a, begin, end in zip(self.actions, self.moments_ns, self.moments_ns[1:], strict=False)
        )

    @property
    def compute_times(self) -> tuple[ActionTime, ...]:
        """The F, B, I and W alone, in the rank's order: what a schedule has tasks for."""
        return tuple(t for t in self.times if t.verb.is_compute)

    @property
    def waiting_ns(self) -> int:
        """Time spent in waits for messages."""
        return sum(t.end_ns - t.start_ns for t in self.times if t.verb.is_wait)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one iteration did; loss and norm over all replicas, everything else of this one.

    Attributes
    ----------
    answer, batch, measured
        Only on the first rank of a pipeline.
    measured : Measured or None
        When every action of every rank ran.
    correction : Correction
        With which the plan was made.
    learning_rate : float or None
        Of this rank's first group of parameters; None where it trains none.
    num_tokens : int
        In the sequences of the batch of all replicas.
    step_s : float
        Wall time of the iteration, all that belongs to it included: reading ahead, the plan, the optimiser.
    flops : float
        Operations of the model's own forward and backward over all replicas; 0 where they are not counted.
    mfu : float or None
        These over what all devices could do in the wall time; None where that is not known.
    num_skipped : int
        Damaged samples that were left out of the batch.
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
    learning_rate: float | None = None
    num_tokens: int = 0
    step_s: float = 0.0
    flops: float = 0.0
    mfu: float | None = None
    num_skipped: int = 0

    @property
    def measured_ns(self) -> tuple[tuple[int, int], ...]:
        """Measured start and end of every compute action, in the order of ``answer.planned_start_ns``."""
        if self.measured is None or self.answer is None:
            return ()
        return self.measured.compute_ns(self.answer.plan)


# Weight of the newest iteration in the moving average of measured over planned time.
_RATE = 0.1


def gather_times(
    plan: ExecutionPlan, own_ns: Sequence[int], cpu_ns: int, group: dist.ProcessGroup | None = None, ahead_ns: int = 0
) -> Measured | None:
    """Bring the measured times of a pipeline's ranks to its first; None on the others. All ranks call it together.

    Parameters
    ----------
    plan : ExecutionPlan
    own_ns : sequence of int
        Of this rank: when its first action began, and when each was done, see `StepResult`.
    cpu_ns : int
        Processor time of the thread that ran the actions; -1 where another device computed.
    group : ProcessGroup or None
        The pipeline; None: the default group.
    ahead_ns : int
        By how much this rank's clock is ahead of the first one's: on one host, where all share the monotonic clock, not
        at all; else see `SharedClock`.
    """
    counts = [len(actions) for actions in plan.ranks]
    block = torch.zeros((max(counts) + 1, 2), dtype=torch.int64)
    block[0, 0] = cpu_ns
    moments = torch.tensor(own_ns, dtype=torch.int64) - ahead_ns
    block[1 : len(moments), 0], block[1 : len(moments), 1] = moments[:-1], moments[1:]
    on_root = dist.get_rank(group) == 0
    blocks = [torch.zeros_like(block) for _ in counts] if on_root else None
    dist.gather(block, blocks, group=group, group_dst=0)
    if blocks is None:
        return None
    times = [each[1 : count + 1].numpy() for each, count in zip(blocks, counts, strict=True)]
    computing = [np.array([a.verb.is_compute for a in actions], bool) for actions in plan.ranks]
    begin = min(int(t[c, 0].min()) for t, c in zip(times, computing, strict=True) if c.any())
    return Measured(tuple(t - begin for t in times), tuple(int(each[0, 0]) for each in blocks))


class Calibrator:
    """Learns how measured times compare with predicted ones, as a moving average over iterations.

    Attributes
    ----------
    correction : Correction
        What is known so far.
    num_measured : int
        Iterations that it has seen.
    """

    def __init__(self, correction: Correction | None = None, num_measured: int = 0) -> None:
        self.correction = correction or Correction()
        self.num_measured = num_measured

    def learn(self, answer: Answer, used: Correction, measured: Measured) -> None:
        """Move every module's factors, and the link, towards what an iteration measured.

        Parameters
        ----------
        answer : Answer
            The plan that was run.
        used : Correction
            With which it was made.
        measured : Measured
        """
        self.num_measured += 1
        # The first iteration runs cold and says nothing about the others.
        if self.num_measured == 1:
            return
        # The next ones weigh more, so that a wrong start is left quickly.
        rate = max(_RATE, 1 / (self.num_measured - 1))
        self.correction = Correction(self._modules(answer, used, measured, rate), self._link(answer, measured, rate))

    def _modules(
        self, answer: Answer, used: Correction, measured: Measured, rate: float
    ) -> dict[str, tuple[float, float]]:
        sums: dict[str, list[int]] = {name: [0, 0] for name in answer.planned_module_ns}
        compute = [a for actions in answer.plan.ranks for a in actions if a.verb.is_compute]
        for action, (start, end) in zip(compute, measured.compute_ns(answer.plan), strict=True):
            sums[action.chunk.rpartition(".")[0]][action.verb != "F"] += end - start
        updated = dict(self.correction.modules)
        for name, planned in answer.planned_module_ns.items():
            before = used.modules.get(name, (1.0, 1.0))
            old = self.correction.modules.get(name, before)
            new = [
                factor + rate * (base * total / promised - factor) if promised and total else factor
                for factor, base, total, promised in zip(old, before, sums[name], planned, strict=True)
            ]
            updated[name] = (new[0], new[1])
        return updated

    def _link(self, answer: Answer, measured: Measured, rate: float) -> tuple[float, float] | None:
        old = self.correction.link
        messages = measured.messages(answer.plan)
        found = fit_link([(m.num_bytes, m.under_way_ns / 1e9) for m in messages if m.was_waited_for])
        if found is None or old is None:
            return found or old
        return old[0] + rate * (found[0] - old[0]), old[1] + rate * (found[1] - old[1])
