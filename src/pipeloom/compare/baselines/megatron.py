"""Megatron-LM's 1F1B and interleaved 1F1B, with stages of equal parameters or equal time."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.compare.baseline import Balance, System, fixed_systems, in_turn, loads_by
from pipeloom.compare.baselines.nnscaler import stages_that_fit
from pipeloom.compare.model_on_cluster import Microbatches, ModelOnCluster
from pipeloom.layout import chain_of_stages
from pipeloom.layout.layouts import chunk_counts
from pipeloom.search import interleaved_as_megatron, one_f_one_b


def megatron_1f1b(setting: ModelOnCluster, batches: Sequence[Microbatches], balance: Balance = "parameters") -> System:
    """Make Megatron-LM's 1F1B with one chain of stages.

    If stages of equal time do not fit, stages are also balanced partly by parameters, or by nnScaler's algorithm with
    one recomputation setting. If stages of equal parameters do not fit, nnScaler's are used.
    """
    name = f"1F1B by {balance}"
    loads, fitting = loads_by(setting, batches, balance), stages_that_fit(setting, batches)
    layouts = [chain_of_stages(setting.model, setting.num_ranks, 1, load) for load in loads]
    if balance == "time":
        layouts += fitting
    options, last = (fixed_systems(name, setting, each, one_f_one_b) for each in (layouts, fitting))
    return in_turn(name, options, batches, last, seconds=setting.iteration_s)


def megatron_interleaved(
    setting: ModelOnCluster, batches: Sequence[Microbatches], balance: Balance = "parameters"
) -> System:
    """Make Megatron-LM's interleaved 1F1B, with the best number of chunks on the sampled iterations.

    Every possible number of chunks from two on is tried, with every balance. The time of an iteration depends on
    whether stages divide evenly and on recomputation, so no few numbers represent the others. Groups of microbatches
    have the smallest size that Megatron accepts. An iteration that fits under none of these runs by 1F1B, which holds
    less.
    """
    name = f"interleaved by {balance}"
    counts = chunk_counts(setting.num_ranks, setting.model.modules)[1:] or [1]
    loads = loads_by(setting, batches, balance)
    layouts = [chain_of_stages(setting.model, setting.num_ranks, v, load) for load in loads for v in counts]
    whole = [chain_of_stages(setting.model, setting.num_ranks, 1, load) for load in loads]
    whole += stages_that_fit(setting, batches)
    options = fixed_systems(name, setting, layouts, interleaved_as_megatron)
    last = fixed_systems(name, setting, whole, one_f_one_b)
    return in_turn(name, options, batches, last, seconds=setting.iteration_s)
