"""Search the fastest setup that Megatron supports and that fits into memory.

Stages, virtual stages, group size and recomputation are co-optimized. Every candidate is timed with Megatron's own
schedule. The search starts from balanced stages, one start for every number of virtual stages, each with its fastest
recomputation. The best of them are tried with every group size. From the best starts, layers move between stages as
long as this helps. While the budget lasts, the search starts again from perturbations of the best setup. Of setups that
are equally fast to four digits, the one that recomputes least is best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import attrgetter
from typing import Any

import numpy as np

from pipeloom.errors import InfeasibleError, check_seed
from pipeloom.integrations.megatron.recomputing import Saving
from pipeloom.integrations.megatron.run import MegatronRun
from pipeloom.integrations.megatron.setup import PipelineSettings, Recompute
from pipeloom.integrations.megatron.timing import TimedSetup, Timing
from pipeloom.report import size_text
from pipeloom.search import Budget, Meter, group_sizes
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.trainer import TrainerSpec

GROUPS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Group sizes to try, as multiples of the number of ranks; the largest group is tried too."""
GROUPED = 3
"""For how many numbers of virtual stages, the fastest ones, group sizes are tried."""
STARTS = 6
"""Number of starts from which layers move."""
PERTURBATION_STEPS = 3
"""Random steps of a perturbation, after which layers move again."""
CLIMBING = 0.5
"""Least share of the budget for moving layers."""


@dataclass(frozen=True, eq=False)
class MegatronAnswer:
    """The current setup of a pipeline, and the fastest that was found. All times are emulated.

    Attributes
    ----------
    now, best : TimedSetup
        ``best`` fits into memory; ``now`` may not.
    evaluations : int
        Number of simulated iterations.
    """

    run: MegatronRun
    cluster: ClusterSpec
    timing: Timing
    now: TimedSetup
    best: TimedSetup
    evaluations: int

    @property
    def gain(self) -> float:
        """Speedup of the best setup: the current time over its time, minus one."""
        return self.now.iteration_s / self.best.iteration_s - 1

    def arguments(self) -> tuple[str, ...]:
        """Return the lines that replace `MegatronRun.replaced`: arguments, or fields if the source is a recipe."""
        setup, section = self.best.setup, self.run.section
        return setup.fields(section) if section else setup.arguments

    def document(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "source": self.run.source,
            "cluster": self.cluster.name,
            "device_basis": self.cluster.device.basis,
            "kind_of_time": "emulated",
            "trainer": self.timing.trainer.name,
            "parameters": self.timing.costs.num_parameters,
            "num_microbatches": self.run.num_microbatches,
            "now": self._row(self.now),
            "best": self._row(self.best),
            "gain": self.gain,
            "arguments": list(self.arguments()),
            "replaced": list(self.run.replaced),
            "read": list(self.run.read),
            "ignored": list(self.run.ignored),
            "notes": list(self.run.notes),
            "evaluations": self.evaluations,
        }

    def _row(self, one: TimedSetup) -> dict[str, Any]:
        setup = one.setup
        return {
            "layout": setup.layout,
            "virtual_stages": setup.virtual,
            "microbatch_group_size": setup.group_size if setup.virtual > 1 else None,
            "recompute": list(setup.recompute.arguments),
            "iteration_s": one.iteration_s,
            "tokens_per_s": self.timing.tokens_per_s(one),
            "mfu": self.timing.mfu(one),
            "bubble_share": one.bubble_share,
            "peak_memory_bytes": one.peak_bytes.tolist(),
            "memory_bytes": one.capacity_bytes,
            "fits": one.fits,
        }


def best_layout(
    run: MegatronRun,
    cluster: ClusterSpec,
    *,
    budget: Budget | None = None,
    seed: int = 0,
    trainer: TrainerSpec | None = None,
) -> MegatronAnswer:
    """Search stages, virtual stages, group size and recomputation of a run.

    Parameters
    ----------
    budget : Budget or None
        Stops the search; None for five seconds. An evaluation is one simulated iteration.
    trainer : TrainerSpec or None
        None: Megatron with the run's own overlap.

    Raises
    ------
    InputError
        The cluster is too small, tensor parallelism does not divide a width, or the seed is not an integer of at least
        0.
    InfeasibleError
        No setup fits into memory, even if all layers are recomputed.
    """
    check_seed("seed", seed)
    timing = Timing(run, cluster, trainer)
    meter = (budget or Budget(seconds=5.0)).start()
    now = timing.of(run.now)
    search = _Search(timing, meter, np.random.default_rng(seed))
    starts = search.starts()
    if now.fits:
        # First, so that an equally fast setup does not replace it.
        starts.insert(0, now)
    if not starts:
        least = search.minimum_memory or now
        needs, has = size_text(int(least.peak_bytes.max())), size_text(least.capacity_bytes)
        layers = "modules" if run.rules.full else "layers"
        raise InfeasibleError(
            f"{run.source}: no layout fits, with all {layers} recomputed a rank needs {needs} of {has}; use more "
            "tensor, context or pipeline parallelism, or --use-distributed-optimizer"
        )
    starts.sort(key=attrgetter("preference"))
    best = starts[0]
    for number, start in enumerate(starts[:STARTS]):
        part = CLIMBING + (1 - CLIMBING) * (number + 1) / min(STARTS, len(starts))
        best = min(best, search.climb(start, part), key=attrgetter("preference"))
    while search.spent < 1 and search.steps(best.setup):
        best = min(best, search.climb(search.perturbed(best), 1.0), key=attrgetter("preference"))
    return MegatronAnswer(run, cluster, timing, now, best, timing.evaluations)


@dataclass(slots=True)
class _Search:
    """State of a search."""

    timing: Timing
    meter: Meter
    random: np.random.Generator
    minimum_memory: TimedSetup | None = None
    """The setup with the least memory, of those that do not fit."""
    sizes: tuple[int, ...] = field(init=False)
    """Group sizes to try, in increasing order; none: there are no virtual stages."""

    def __post_init__(self) -> None:
        p = self.run.degrees.pipeline
        allowed = group_sizes(p, self.run.num_microbatches, *self.run.other_counts)
        near = {min(allowed, key=lambda n: abs(n - p * share)) for share in GROUPS} if allowed else set()
        self.sizes = tuple(sorted(near | set(allowed[-1:])))

    @property
    def run(self) -> MegatronRun:
        return self.timing.run

    @property
    def spent(self) -> float:
        self.meter.used = self.timing.evaluations
        return self.meter.spent

    def starts(self) -> list[TimedSetup]:
        """Return balanced starts for every number of virtual stages, and for the best of them, every group size."""
        p, sizes, rules = self.run.degrees.pipeline, self.sizes, self.run.rules
        most = (self.run.num_layers + 2) // p if sizes and not rules.several_stages else 1
        least = 2 if rules.one_stage else 1
        pattern = self.run.model.pattern
        setups = [
            PipelineSettings(stages, p, p, pattern=pattern)
            for v in range(least, most + 1)
            for stages in self._balanced(v)
        ]
        first = self._in_turn([replace(one, group_size=min(sizes, default=p)) for one in setups])
        best = sorted((one for one in first if one.setup.virtual > 1), key=lambda one: one.iteration_s)[:GROUPED]
        larger = [replace(one.setup, group_size=n) for one in best for n in sizes if n != one.setup.group_size]
        return first + self._in_turn(larger)

    def _in_turn(self, setups: Sequence[PipelineSettings]) -> list[TimedSetup]:
        found: list[TimedSetup] = []
        for setup in setups:
            if found and self.spent >= 1 - CLIMBING:
                break
            one = self.with_recompute(setup)
            if one is not None:
                found.append(one)
        return found

    def _balanced(self, virtual: int) -> list[tuple[str, ...]]:
        """Return stages of similar time. Each layer goes to the rank with the least time, and there to such a stage."""
        p, predictors = self.run.degrees.pipeline, len(self.run.model.predictors)
        count = p * virtual
        ends = [(count - 1, "m" * predictors + "L")]
        if predictors and self.run.model.pattern is None:
            ends.append((count - 2, "L"))
        found = []
        for last, suffix in ends:
            letters = [""] * count
            letters[0], letters[-1] = "E", suffix
            if last < count - 1:
                letters[last] += "m" * predictors
            stages = self._assigned(letters, last)
            if stages is not None:
                found.append(stages)
        return found

    def _assigned(self, letters: list[str], last: int) -> tuple[str, ...] | None:
        """Assign the layers to stages 0 to ``last``; return None if a stage would be empty."""
        p, layers = self.run.degrees.pipeline, self.run.num_layers
        numbers = self.timing.costs.of(PipelineSettings(("E" + "t" * layers, *letters[1:-1], letters[-1]), 1, 1))
        load = np.array([n.forward_ns + n.backward_ns for n in numbers], np.float64)
        whole, load[0] = load[0], 0.0
        each = whole / max(1, layers)
        fewest = self.run.now.fewest_layers
        sizes = np.array([fewest if letter else 1 for letter in letters[: last + 1]], np.int64)
        left = layers - int(sizes.sum())
        if left < 0:
            return None
        load[: last + 1] += sizes * each
        for _ in range(left):
            of_rank = np.array([load[r::p].sum() for r in range(p)])
            stage = min(range(last + 1), key=lambda i: (of_rank[i % p], load[i], i))
            sizes[stage] += 1
            load[stage] += each
        return written(letters, sizes.tolist())

    def with_recompute(self, setup: PipelineSettings) -> TimedSetup | None:
        """Return the setup with its fastest recomputation that fits; None if none fits."""
        found: list[TimedSetup] = []
        for recompute in (Recompute(), *self._selective()):
            one = self.timing.of(replace(setup, recompute=recompute))
            self._note(one)
            if one.fits:
                found.append(one)
                if recompute.granularity is None:
                    return one
        if self.run.rules.full:
            return min(found, key=attrgetter("preference"), default=None)
        most = max(stage.count("t") + stage.count("m") for stage in setup.stages)
        # Memory falls with the number of recomputed layers: bisect the fewest that fit.
        few, many = 1, most
        kept: TimedSetup | None = None
        while few <= many:
            middle = (few + many) // 2
            one = self.timing.of(replace(setup, recompute=whole_layers(middle, most)))
            self._note(one)
            if one.fits:
                kept, many = one, middle - 1
            else:
                few = middle + 1
        found += [] if kept is None else [kept]
        return min(found, key=attrgetter("preference"), default=None)

    def _selective(self) -> list[Recompute]:
        """Return sets of modules to recompute; each adds the module that frees most memory for its time."""
        kinds = set(self.run.model.blocks)
        savings = {
            name: reduce(Saving.and_, (self.timing.costs.saving(block, (name,)) for block in kinds))
            for name in self.run.recomputable
        }
        useful = [name for name, saving in savings.items() if saving.bytes > 0]
        useful.sort(key=lambda name: savings[name].more_ps / savings[name].bytes)
        return [Recompute("selective", modules=tuple(useful[: i + 1])) for i in range(len(useful))]

    def _note(self, one: TimedSetup) -> None:
        if not one.fits and (
            self.minimum_memory is None or one.peak_bytes.max() < self.minimum_memory.peak_bytes.max()
        ):
            self.minimum_memory = one

    def climb(self, best: TimedSetup, part: float) -> TimedSetup:
        """Move layers between stages, and change recomputation and group size, as long as this helps.

        Stop when no step helps, or when ``part`` of the budget is spent.
        """
        while True:
            steps = self.steps(best.setup)
            for number in self.random.permutation(len(steps)):
                if self.spent >= part:
                    return best
                one = self.timing.of(steps[number]())
                if one.fits and one.preference < best.preference:
                    best = one
                    break
            else:
                return best

    def perturbed(self, best: TimedSetup) -> TimedSetup:
        """Return a setup a few random steps away that fits."""
        for _ in range(PERTURBATION_STEPS):
            steps = self.steps(best.setup)
            one = self.timing.of(steps[self.random.integers(len(steps))]()) if steps else best
            best = one if one.fits else best
        return best

    def steps(self, setup: PipelineSettings) -> list[Callable[[], PipelineSettings]]:
        """Return all setups that are one step away."""
        letters = [stage.replace("t", "") for stage in setup.stages]
        sizes = [stage.count("t") for stage in setup.stages]
        last = next((i for i, stage in enumerate(setup.stages) if "m" in stage), len(sizes) - 1)

        def moved(source: int, target: int) -> PipelineSettings:
            changed = [size - (i == source) + (i == target) for i, size in enumerate(sizes)]
            return replace(setup, stages=written(letters, changed))

        # A stage keeps its last layer, unless it has embedding or loss.
        sources = [i for i, size in enumerate(sizes) if size > (setup.fewest_layers if letters[i] else 1)]
        found: list[Callable[[], PipelineSettings]] = [
            partial(moved, i, j) for i in sources for j in range(last + 1) if i != j
        ]
        found += [partial(replace, setup, recompute=one) for one in self._recomputes(setup)]
        if setup.virtual > 1:
            found += [partial(replace, setup, group_size=n) for n in self.sizes if n != setup.group_size]
        return found

    def _recomputes(self, setup: PipelineSettings) -> list[Recompute]:
        now, most = setup.recompute, max(stage.count("t") for stage in setup.stages)
        if now.granularity != "full":
            full = () if self.run.rules.full else (whole_layers(1, most),)
            return [one for one in (Recompute(), *self._selective(), *full) if one != now]
        number = now.recomputed(most)
        return [whole_layers(n, most) if n else Recompute() for n in (number - 1, number + 1) if 0 <= n <= most]


def whole_layers(number: int, most: int) -> Recompute:
    """Return full recomputation of some layers of every virtual stage, which has at most ``most``."""
    return Recompute("full", "uniform", 1) if number >= most else Recompute("full", "block", number)


def written(letters: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...]:
    """Return stages with their layers, behind the embedding and before other letters."""
    return tuple(
        ("E" if "E" in stage else "") + "t" * size + stage.replace("E", "")
        for stage, size in zip(letters, [*sizes, *[0] * (len(letters) - len(sizes))], strict=True)
    )
