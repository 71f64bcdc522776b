"""Megatron-LM: 1F1B and interleaved 1F1B, stages of equal parameters or of equal time."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import System, fixed_systems, in_turn, loads_by
from pipeloom.compare.baselines.nnscaler import stages_that_fit
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.layout import chain_of_stages
from pipeloom.layout.layouts import chunk_counts
from pipeloom.search import interleaved_as_megatron, one_f_one_b


def megatron_1f1b(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str = "parameters") -> System:
    """Megatron-LM's 1F1B: one chain of stages.

    Where stages of equal time do not fit, it cuts partly by parameters, or as nnScaler does with one setting of
    recomputation for all; where those of equal parameters do not, as nnScaler does.
    """
    name = f"1F1B by {balance}"
    layouts = [chain_of_stages(case.model, case.num_ranks, 1, load) for load in loads_by(case, batches, balance)]
    fitting = stages_that_fit(case, batches)
    if balance == "time":
        layouts += fitting
    return in_turn(
        name, fixed_systems(name, case, layouts, one_f_one_b), batches, fixed_systems(name, case, fitting, one_f_one_b)
    )


def megatron_interleaved(case: ModelOnCluster, batches: Sequence[Microbatches], balance: str = "parameters") -> System:
    """Megatron-LM's interleaved 1F1B, with the number of chunks that is best on the sampled iterations.

    Every number from two up to as many as there are layers for is tried, with every cut: the time of an iteration jumps
    from one number to the next, where stages divide evenly or less has to be recomputed, so no few of them stand for
    the rest. Groups of microbatches are the smallest that Megatron takes. An iteration that fits none of these runs by
    1F1B, which holds less.
    """
    name = f"interleaved by {balance}"
    counts = chunk_counts(case.num_ranks, case.model.modules)[1:] or [1]
    loads = loads_by(case, batches, balance)
    layouts = [chain_of_stages(case.model, case.num_ranks, v, load) for load in loads for v in counts]
    whole = [chain_of_stages(case.model, case.num_ranks, 1, load) for load in loads] + stages_that_fit(case, batches)
    options = fixed_systems(name, case, layouts, interleaved_as_megatron)
    return in_turn(name, options, batches, fixed_systems(name, case, whole, one_f_one_b))
