"""How long the slowest of several replicas takes, by how the samples of a batch are dealt to them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import msgspec

from benchmarks.joint import separate_layout
from pipeloom.compare.baselines.dip import our_layout
from pipeloom.compare.model_on_cluster import ModelOnCluster, draw_iteration, put_on_cluster
from pipeloom.packing import PackingSpec, assign_to_replicas, cost_loads, token_loads
from pipeloom.planner import PlanningProblem
from pipeloom.planner.joint import decide
from pipeloom.planner.replicas import assign_planned
from pipeloom.report import markdown_table
from pipeloom.search import Budget
from pipeloom.spec import Batch, Parallelism
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom_lab.reproduce.pipetune.setups import ON_A, batch_of, emulated

TITLE = "Assignment of samples to replicas"
_SEEDS = 3
_REPLICAS = (2, 4, 8)
_BUDGET = Budget(seconds=0.3, clock="cpu")
_GLANCES = 8
"""Shares that may be looked at, for every replica."""


@dataclass(frozen=True)
class _Workload:
    """A model, and how many samples or drawn microbatches each replica has."""

    name: str
    problem: PlanningProblem
    share: int

    def batch(self, num_replicas: int, seed: int) -> Batch:
        """A global batch."""
        if self.name.startswith("13B"):
            return batch_of(ON_A["13b"], "datamix2", 100 * seed, self.share * num_replicas)
        groups = draw_iteration(_vlm_s(), self.share * num_replicas, seed)
        samples = [
            msgspec.structs.replace(s, id=f"{m}.{i}") for m, each in enumerate(groups) for i, s in enumerate(each)
        ]
        random.Random(seed).shuffle(samples)
        return Batch(tuple(samples), seed)


def run() -> str:
    """Measure, and return the section as Markdown."""
    rows = []
    for workload in _workloads():
        # The kernels are loaded, and the layers' costs emulated, by what is not counted.
        decide(workload.problem, workload.batch(1, 99), Budget(evaluations=40))
        rows += [[workload.name, str(count), *_row(workload, count)] for count in _REPLICAS]
    header = ["workload", "replicas", "by tokens, s", "by loads, s", "by planned time, s", "gain", "dealing, CPU s"]
    text = (
        f"Planned seconds of the slowest replica, means of {_SEEDS} batches. Every share is planned with "
        f"packing and order for {_BUDGET.seconds:g} CPU s, under either assignment. *Gain* compares assignment "
        f"by planned time with assignment by loads. At most {_GLANCES} shares per replica are rated. Costs "
        "are emulated. `python -m benchmarks replicas`."
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def _workloads() -> list[_Workload]:
    setting, vlm = emulated(ON_A["13b"]), _vlm_s()
    packing = PackingSpec(setting.max_contexts * setting.setup.context)
    memory = MemoryLimit(setting.capacity_bytes)
    costs = setting.costs
    paper = PlanningProblem(costs.model_spec, separate_layout(setting), costs, packing, memory=memory)
    layout = our_layout(vlm, [draw_iteration(vlm, 16, seed=1000 + seed) for seed in range(2)])
    tokens = max(sum(s.sequence_tokens for s in group) for group in draw_iteration(vlm, 4, 0))
    memory = MemoryLimit(vlm.capacity_bytes)
    ours = PlanningProblem(vlm.model, layout, vlm.costs, PackingSpec(2 * tokens), memory=memory)
    return [
        _Workload("13B DataMix2, 16 samples a replica", paper, 16),
        _Workload("13B DataMix2, 128 samples a replica", paper, 128),
        _Workload("VLM-S, about 30 samples a replica", ours, 2),
    ]


@cache
def _vlm_s() -> ModelOnCluster:
    return put_on_cluster("vlm-s", "dip-h800-64", Degrees(tensor=4, pipeline=4), update=False)


def _row(workload: _Workload, count: int) -> list[str]:
    single = workload.problem
    several = replace(single, layout=msgspec.structs.replace(single.layout, parallelism=Parallelism(data=count)))
    seconds: dict[str, list[float]] = {"tokens": [], "loads": [], "time": []}
    took = []
    for seed in range(_SEEDS):
        batch = workload.batch(count, seed)
        begin = time.process_time()
        found = assign_planned(several, batch, budget=Budget(evaluations=_GLANCES * count))
        took.append(time.process_time() - begin)
        loads = cost_loads(batch, single.model, single.layout, single.costs)
        assignments = {
            "tokens": assign_to_replicas(token_loads(batch, single.model), count),
            "loads": assign_to_replicas(loads, count),
            "time": found.members,
        }
        # A share that two dealings have is planned once, so that chance does not tell them apart.
        planned = {m: decide(single, batch.part(m), _BUDGET).ns / 1e9 for d in assignments.values() for m in d}
        for name, assignment in assignments.items():
            seconds[name].append(max(planned[members] for members in assignment))
    means = {name: mean(values) for name, values in seconds.items()}
    gain = means["loads"] / means["time"] - 1
    return [*(f"{value:.3f}" for value in means.values()), f"{gain:+.1%}", f"{mean(took):.2f}"]
