"""Systems whose data loaders pack the samples of an iteration into new microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeloom.compare.baseline import SIZES, System
from pipeloom.compare.gain import MOST_TOGETHER, packs_anew
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster, resized
from pipeloom.compare.result import BaselineResult
from pipeloom.errors import InfeasibleError
from pipeloom.iteration import batch_of
from pipeloom.layout import single_rank
from pipeloom.packing import Loads, PackingSpec, cost_loads
from pipeloom.packing.choices import SLOWER, even_microbatches, numbers, walk
from pipeloom.search import Budget
from pipeloom.search.params import DEFAULTS
from pipeloom.spec import Sample


@dataclass(frozen=True, eq=False)
class Reordering:
    """The samples of an iteration, for packing into microbatches of even time."""

    setting: ModelOnCluster
    microbatches: Microbatches

    @property
    def samples(self) -> list[Sample]:
        """All samples, in order."""
        return [sample for microbatch in self.microbatches for sample in microbatch]

    @cached_property
    def loads(self) -> Loads:
        """Time of every sample, and its number of images and recordings, which all devices of a rank share.

        The paper assigns these to all devices at once. Here a part is assigned to the devices of one rank, so
        microbatches are filled with multiples of that number, as ours are.
        """
        setting = self.setting
        loads = cost_loads(batch_of(self.microbatches), setting.model, single_rank(setting.model, {}), setting.levels)
        if setting.degrees.tensor == 1:
            return loads
        encoders = setting.model.modules[:-1]
        counts = [sum(len(module.instance_lengths(sample)) for module in encoders) for sample in self.samples]
        return replace(loads, instances=np.array(counts, np.int64), num_devices=setting.degrees.tensor)

    @cached_property
    def spec(self) -> PackingSpec:
        """Token budget: `MOST_TOGETHER` times the tokens of the largest given microbatch."""
        tokens = self.loads.tokens.tolist()
        sizes, first = [], 0
        for microbatch in self.microbatches:
            sizes.append(sum(tokens[first : first + len(microbatch)]))
            first += len(microbatch)
        return PackingSpec(MOST_TOGETHER * max(sizes))

    def even(self, number: int) -> Microbatches:
        """Return ``number`` microbatches, even in the backbone's time and in total time."""
        samples = self.samples
        return [[samples[i] for i in members] for members in even_microbatches(self.loads, self.spec, number)]


def reordered(system: System, setting: ModelOnCluster) -> System:
    """Return the same system with the best of many packings for every iteration.

    The best has the shortest iteration, updates included. Tried are the given microbatches, halves, and two and four
    merged. If samples may be packed in another way, even microbatches in the best number are tried as well. A system of
    several options is chosen by their times with the best packing, so that layout and packing suit each other.
    """
    if system.choice is not None:
        system = system.choice.sorted_by(lambda option: reordered(option, setting))

    def run(microbatches: Microbatches, budget: Budget, seed: int) -> BaselineResult:
        found: list[BaselineResult] = []
        problems: list[InfeasibleError] = []

        def evaluate(tried: Microbatches) -> float:
            try:
                found.append(system.run(tried, budget, seed))
            except InfeasibleError as error:
                problems.append(error)
                return float("inf")
            return setting.iteration_s(found[-1])

        for size in SIZES:
            evaluate(resized(microbatches, size))
        if packs_anew(setting):
            packings, params = Reordering(setting, microbatches), DEFAULTS.packings
            counts = numbers(packings.loads, packings.spec)
            walk(counts, len(microbatches), SLOWER, params.misses, lambda n: evaluate(packings.even(n)))
        if not found:
            raise problems[0]
        return min(found, key=setting.iteration_s)

    return replace(system, run=run, packs=True, choice=None)
