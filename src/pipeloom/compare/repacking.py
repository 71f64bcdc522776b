"""Systems whose loaders put other samples together: the microbatches of an iteration are made anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeloom.compare.baseline import SIZES, System
from pipeloom.compare.gain import MOST_TOGETHER, packs_anew
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, batch_of, resized
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError
from pipeloom.layout import single_rank
from pipeloom.packing import Loads, PackingSpec, cost_loads
from pipeloom.packing.choices import even_groups, numbers, walk
from pipeloom.search import StoppingRule
from pipeloom.search.params import DEFAULTS
from pipeloom.spec import Sample


@dataclass(frozen=True, eq=False)
class Reordering:
    """The samples of an iteration, to be put into microbatches of even time.

    Attributes
    ----------
    case : ModelOnCluster
    groups : Microbatches
        As they were given.
    """

    case: ModelOnCluster
    groups: Microbatches

    @property
    def samples(self) -> list[Sample]:
        """All samples, in order."""
        return [sample for group in self.groups for sample in group]

    @cached_property
    def loads(self) -> Loads:
        """What every sample weighs, in seconds, and its images and recordings, which all devices of a rank share.

        The paper deals these over all devices at once; where a part is dealt to those of one rank, places would stay
        empty in each, were microbatches not filled for it as ours are.
        """
        case = self.case
        loads = cost_loads(batch_of(self.groups), case.model, single_rank(case.model, {}), case.levels)
        if case.degrees.tensor == 1:
            return loads
        encoders = case.model.modules[:-1]
        counts = [sum(len(module.instance_lengths(sample)) for module in encoders) for sample in self.samples]
        return replace(loads, instances=np.array(counts, np.int64), num_devices=case.degrees.tensor)

    @cached_property
    def spec(self) -> PackingSpec:
        """No microbatch has more tokens than as many of the largest given ones together as ours may have."""
        tokens = self.loads.tokens.tolist()
        sizes, first = [], 0
        for group in self.groups:
            sizes.append(sum(tokens[first : first + len(group)]))
            first += len(group)
        return PackingSpec(MOST_TOGETHER * max(sizes))

    def even(self, number: int) -> Microbatches:
        """So many microbatches, even in the backbone's time and in the time of all."""
        samples = self.samples
        return [[samples[i] for i in members] for members in even_groups(self.loads, self.spec, number)]


def reordered(system: System, case: ModelOnCluster) -> System:
    """The same system on the best of many packings of every iteration.

    Tried are the microbatches as given, halved, and two and four together; and, where samples may go together
    otherwise, as even as can be, in the number that is best.
    """

    def run(groups: Microbatches, budget: StoppingRule, seed: int) -> BaselineResult:
        found: list[BaselineResult] = []
        problems: list[InfeasibleError] = []

        def judge(tried: Microbatches) -> float:
            try:
                found.append(system.run(tried, budget, seed))
            except InfeasibleError as error:
                problems.append(error)
                return float("inf")
            return found[-1].iteration_s

        for size in SIZES:
            judge(resized(groups, size))
        if packs_anew(case):
            made, params = Reordering(case, groups), DEFAULTS.packings
            ladder = numbers(made.loads, made.spec)
            walk(ladder, len(groups), params.slower, params.misses, lambda number: judge(made.even(number)))
        if not found:
            raise problems[0]
        return min(found, key=lambda one: one.iteration_s)

    return replace(system, run=run, packs=True)
