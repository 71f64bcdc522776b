"""Zero-bubble H1 (Qi et al. 2024): 1F1B with split backwards, where later ranks delay more weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from pipeloom.compare.baseline import Balance, System, distinct, fixed_systems, in_turn, loads_by
from pipeloom.compare.baselines.nnscaler import stages_that_fit
from pipeloom.compare.model_on_cluster import LEVELS, Microbatches, ModelOnCluster, graph_of
from pipeloom.compare.recomputation import per_rank_recomputation
from pipeloom.compare.result import BaselineResult, fastest
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError
from pipeloom.layout import chain_of_stages
from pipeloom.search import Budget, one_f_one_b, uniform_settings
from pipeloom.search.zero_bubble import zero_bubble_h1
from pipeloom.spec import Layout


def zero_bubble(setting: ModelOnCluster, batches: Sequence[Microbatches], balance: Balance = "time") -> System:
    """Make zero-bubble H1: 1F1B's chain of stages with split backwards, whose weight gradients fill idle time.

    Recomputed activations are held until the weight gradients, so their delay is limited by memory. Every iteration
    uses its best number of delayed microbatches. Every rank recomputes as little as fits. An iteration that does not
    fit runs by 1F1B with whole backwards.
    """
    costs = EmulatedCosts(setting.architecture, setting.cluster, setting.degrees, LEVELS, trainer=setting.trainer)

    def system(layout: Layout) -> System:
        def run(microbatches: Microbatches, _budget: Budget, _seed: int) -> BaselineResult:
            graph = graph_of(setting, layout, microbatches, "zero-bubble H1", costs)
            settings = np.full(setting.num_ranks, uniform_settings(graph)[0])
            found = []
            for behind in range(setting.num_ranks):
                with suppress(InfeasibleError):
                    order = zero_bubble_h1(graph, behind)
                    found.append(per_rank_recomputation("zero-bubble H1", layout, graph, order, settings))
            return fastest("zero-bubble H1", found)

        return System("zero-bubble H1", layout, run)

    loads = loads_by(setting, batches, balance)
    layouts = [chain_of_stages(setting.model, setting.num_ranks, 1, load) for load in loads]
    whole = fixed_systems("zero-bubble H1", setting, [*layouts, *stages_that_fit(setting, batches)], one_f_one_b)
    options = [system(layout) for layout in distinct(layouts)]
    return in_turn("zero-bubble H1", options, batches, whole, seconds=setting.iteration_s)
