"""Predict what plans for every step gain over the best layout in Megatron's own order.

Both use the same stages, recomputation and memory. Microbatches are those of the run, or packs of given samples, whose
attention differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from pipeloom.errors import InputError, NothingFoundError
from pipeloom.integrations.megatron.run import MegatronRun
from pipeloom.integrations.megatron.setup import PipelineSettings
from pipeloom.integrations.megatron.timing import TimedSetup, Timing
from pipeloom.search import Budget, solve
from pipeloom.spec import Sample, Workload

IMPORT = "import pipeloom.integrations.megatron.auto"
"""The line that a training script needs."""
PLAN_S = 0.5
"""Seconds of search for each step, as training has by default."""
MOST_STEPS = 8
"""Most steps of the given samples that are simulated."""


@dataclass(frozen=True, eq=False)
class PlanGain:
    """Simulated iterations of the same microbatches, in Megatron's order and by a plan made for each of them.

    Attributes
    ----------
    static, planned : tuple of TimedSetup
        One each for every step.
    basis : str
        Which microbatches these are, in words.
    """

    static: tuple[TimedSetup, ...]
    planned: tuple[TimedSetup, ...]
    basis: str

    @property
    def static_s(self) -> float:
        """Mean seconds of an iteration in Megatron's order."""
        return sum(one.iteration_s for one in self.static) / len(self.static)

    @property
    def planned_s(self) -> float:
        """Mean seconds of a planned iteration."""
        return sum(one.iteration_s for one in self.planned) / len(self.planned)

    @property
    def gain(self) -> float:
        """Speedup of plans: the time of all steps without them over that with them, minus one."""
        return self.static_s / self.planned_s - 1


def excluded_by(run: MegatronRun) -> str:
    """Return what excludes plans for every step in this run; empty if nothing does."""
    return run.rules.plans and f"--{run.rules.plans}"


def plan_gain(
    timing: Timing,
    setup: PipelineSettings,
    samples: Sequence[Sample] | None = None,
    *,
    budget: Budget | None = None,
    seed: int = 0,
) -> PlanGain:
    """Simulate steps of a setup in Megatron's order and by plans.

    Parameters
    ----------
    samples : sequence of Sample or None
        Samples in the order of training, which are packed into microbatches. None: all microbatches are full.
    budget : Budget or None
        Budget of each plan; None: `PLAN_S` seconds.

    Raises
    ------
    InputError
        The samples do not fill one step.
    """
    run = timing.run
    steps: list[Sequence[Workload]] = [(run.workload,) * run.num_microbatches]
    basis = "equal microbatches"
    if samples is not None:
        steps = list(islice(packed_steps(run, samples), MOST_STEPS))
        basis = f"{len(steps)} {'steps' if len(steps) > 1 else 'step'} of packed samples"
    static = tuple(timing.of_step(setup, step) for step in steps)
    planned = tuple(_planned(one, budget or Budget(seconds=PLAN_S), seed) for one in static)
    return PlanGain(static, planned, basis)


def packed_steps(run: MegatronRun, samples: Sequence[Sample]) -> Iterator[list[Workload]]:
    """Yield the microbatches of each step: samples in order, as many as fit into the tokens of a microbatch.

    Raises `InputError` if the samples do not fill one step.
    """
    most, packs = run.seq_length * run.micro_batch_size, list[list[int]]()
    free = 0
    for sample in samples:
        # Longer ones are cut, as loaders do.
        length = min(max(1, sample.text_tokens), run.seq_length)
        if length > free:
            packs.append([])
            free = most
        packs[-1].append(length)
        free -= length
    count = run.num_microbatches
    if len(packs) < count:
        raise InputError(
            "samples", f"fill {len(packs)} microbatches of {most} tokens, a step has {count}", "give more samples"
        )
    for begin in range(0, len(packs) - count + 1, count):
        yield [Workload(tuple(pack)) for pack in packs[begin : begin + count]]


def _planned(static: TimedSetup, budget: Budget, seed: int) -> TimedSetup:
    """Return the step by the faster of Megatron's order and one that a search finds within the same memory."""
    # A setup that does not fit is not searched for less memory.
    capacity = np.maximum(static.capacity_bytes - static.other_bytes, static.timeline.peak_bytes)
    try:
        found = solve(replace(static.graph, capacity_bytes=capacity), budget=budget, seed=seed)
    except NothingFoundError:
        return static
    planned = replace(static, schedule=found.schedule, timeline=found.timeline)
    return min(static, planned, key=lambda one: one.iteration_s)
