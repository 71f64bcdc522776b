"""What the paper leaves to others, on its own models and mixtures: trained encoders, and data-parallel replicas."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.packing import assign_to_replicas
from pipeloom.spec import Batch
from pipeloom.timeline import simulate
from pipeloom.tuning import (
    Replica,
    TunedPipeline,
    TuningSpec,
    batch_sizes,
    tune,
    tune_replicas,
    tuned_pipeline,
    tuned_plan,
)
from pipeloom_lab.reproduce.part import Options, Outcome
from pipeloom_lab.reproduce.pipetune import setups
from pipeloom_lab.reproduce.texts import make_table

_REPLICAS = (2, 4, 8)


def trained(options: Options) -> Outcome:
    """Beyond the paper: a trained encoder, whose backwards move as well."""
    setup = setups.ON_A["13b"]
    frozen = setups.emulated(setup)
    modules = tuple(msgspec.structs.replace(m, frozen=False) for m in frozen.costs.architecture.modules)
    costs = EmulatedCosts(
        msgspec.structs.replace(frozen.costs.architecture, modules=modules),
        frozen.costs.cluster,
        frozen.costs.placement.degrees,
        (setups.RECOMPUTED,),
    )
    layout = msgspec.structs.replace(
        frozen.layout, modules=tuple(msgspec.structs.replace(m, frozen=False) for m in frozen.layout.modules)
    )
    pipeline: TunedPipeline = tuned_pipeline(
        costs.model_spec,
        layout,
        costs,
        max_tokens=frozen.token_budget,
        max_length=setup.context,
        capacity_bytes=frozen.capacity_bytes,
    )
    settings = {
        "PipeTune's sizes and orders, encoder as it comes": TuningSpec(
            "algorithm1_opened", "multiples", "clusters", "frozen", setup.context
        ),
        "the same, encoder moved forward and back": TuningSpec(
            "algorithm1_opened", "multiples", "clusters", "all", setup.context
        ),
        "ours, encoder as it comes": TuningSpec(precompute="frozen"),
        "ours": TuningSpec(),
    }
    setting = replace(frozen, costs=costs, layout=layout, pipeline=pipeline)
    ways = {name: setups.tuned_by(setting, spec) for name, spec in settings.items()}
    rows = []
    for mixture in setups.MIXTURES:
        mean = setups.means(setups.seconds_by(setup, mixture, options, ways))
        first = next(iter(mean.values()))
        rows += [
            (setups.NAMES[mixture], name, f"{value:.3f}", setups.change(first, value)) for name, value in mean.items()
        ]
    return Outcome((make_table("pipetune/trained", rows),), devices=(frozen.device,))


def replicas(options: Options) -> Outcome:
    """Assign a global batch to data-parallel replicas and tune each; the slowest one counts."""
    setup = setups.ON_A["13b"]
    setting = setups.emulated(setup)
    rows = []
    for mixture in setups.MIXTURES:
        for count in _REPLICAS:
            slowest: dict[str, list[float]] = {}
            waits: dict[str, list[float]] = {}
            for seed in options.seeds:
                batch = setups.batch_of(setup, mixture, seed * 10_000, count * setups.GLOBAL_BATCH)
                for name, assigned in _dealings(setting, batch, count, seed).items():
                    seconds = [_seconds(setting, replica) for replica in assigned]
                    slowest.setdefault(name, []).append(max(seconds))
                    waits.setdefault(name, []).append(max(seconds) / float(np.mean(seconds)) - 1)
            mean = setups.means(slowest)
            first = next(iter(mean.values()))
            rows += [
                (
                    setups.NAMES[mixture],
                    str(count),
                    name,
                    f"{value:.3f}",
                    setups.change(first, value),
                    f"{100 * float(np.mean(waits[name])):.1f} %",
                )
                for name, value in mean.items()
            ]
    return Outcome(
        (make_table("pipetune/replicas", rows, global_batch=setups.GLOBAL_BATCH),), devices=(setting.device,)
    )


def _dealings(setting: setups.EmulatedSetup, batch: Batch, count: int, seed: int) -> dict[str, tuple[Replica, ...]]:
    order = random.Random(seed).sample(range(len(batch.samples)), len(batch.samples))
    chance = tuple(tuple(sorted(order[k::count])) for k in range(count))
    loads = batch_sizes(setting.pipeline, batch).loads
    return {
        "by chance": _tuned(setting, batch, chance, seed),
        "by loads": _tuned(setting, batch, assign_to_replicas(loads, count, seed), seed),
        "by simulated time": tune_replicas(setting.pipeline, batch, count, setting.token_budget, seed=seed),
    }


def _tuned(
    setting: setups.EmulatedSetup, batch: Batch, assigned: tuple[tuple[int, ...], ...], seed: int
) -> tuple[Replica, ...]:
    parts = [batch.part(members) for members in assigned]
    return tuple(
        Replica(members, own, tune(setting.pipeline, own, setting.token_budget, seed=seed))
        for members, own in zip(assigned, parts, strict=True)
    )


def _seconds(setting: setups.EmulatedSetup, replica: Replica) -> float:
    """By the emulator's own costs, whatever the tables said."""
    plan = tuned_plan(setting.pipeline, replica.batch, replica.tuned, setting.costs, setting.capacity_bytes)
    return simulate(plan.graph, plan.schedule).makespan_ns / 1e9
