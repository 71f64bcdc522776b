"""The evaluation's models as chains of emulated layers, and every system on them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_layers import emulated_layers
from pipeloom.errors import InputError
from pipeloom.layout.cooptimize import CooptimizeParams, chain_of_layers, cooptimize
from pipeloom.layout.cooptimize.joint import compile_kernels
from pipeloom.layout.cooptimize.layer_chain import LayerChain
from pipeloom.search import Budget
from pipeloom.spec import Chunk
from pipeloom.spec.catalog import load_cluster
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import check
from pipeloom_lab.adaptis import tune_phases
from pipeloom_lab.adaptis.phase_by_phase import TUNED
from pipeloom_lab.adaptis.systems import SYSTEMS, ChainResult, run_system
from pipeloom_lab.reproduce.part import Options

CLUSTER = "adaptis-h800-128"
BASELINES = {"S-1F1B": "S-1F1B", "I-1F1B": "I-1F1B", "ZB": "ZB-H1", "Mist": "Mist"}
"""The paper's names, and ours."""
GENERATOR = "AdaPtis"
"""AdaPtis' own generator, written again from the paper."""
_SPLIT = ("ZB-H1", "ZB-H1, balanced", "ZB-V", "ZB-V, balanced", "DualPipeV")


@dataclass(frozen=True, slots=True)
class PaperSetup:
    """A model, its parallelism, and its microbatches of one sequence."""

    model: str
    pipeline: int
    tensor: int
    num_microbatches: int
    tokens: int
    data: int = 1
    expert: int = 1
    ends: bool = False
    """Whether searches count the iteration's end, as `iteration_s` does."""

    @property
    def degrees(self) -> Degrees:
        """All degrees of parallelism."""
        return Degrees(tensor=self.tensor, pipeline=self.pipeline, data=self.data, expert=self.expert)


FAMILIES = {"Gemma": "gemma", "DeepSeek": "deepseek", "Nemotron-H": "nemotron-h"}
SIZES = ("Small", "Medium", "Large")
DEPTHS = (16, 8, 4)
"""The paper's pipeline degrees, largest first."""
ROUNDS = (2, 4)
"""Microbatches per rank. Fig. 1 has four (16 on P = 4); Fig. 8's number is not stated."""


@functools.lru_cache(maxsize=128)
def depth_of(model: str, tokens: int) -> int:
    """Largest of the paper's degrees at which no layer is longer than a rank's share of all work.

    The paper searched a grid; beyond this degree more ranks only wait for the head.
    """
    table = emulated_layers(model, load_cluster(CLUSTER), Degrees(tensor=2), tokens=tokens)
    work = chain_of_layers(table).total_ns[:, 0]
    fitting = [depth for depth in DEPTHS if int(work.max()) * depth <= int(work.sum())]
    return fitting[0] if fitting else DEPTHS[-1]


def setup_of(family: str, size: str, tokens: int, rounds: int) -> PaperSetup:
    """One cell of Fig. 8; T = 2 throughout, since Gemma's six heads allow no more of the usual degrees."""
    model = f"{FAMILIES[family]}-{size.lower()}"
    depth = depth_of(model, tokens)
    return PaperSetup(model, depth, 2, rounds * depth, tokens)


@functools.lru_cache(maxsize=128)
def chains(setup: PaperSetup) -> tuple[LayerChain, LayerChain]:
    """The chain with whole backwards and with split ones, under the device's memory."""
    compile_kernels()
    hardware = load_cluster(CLUSTER)
    table = emulated_layers(
        setup.model, hardware, setup.degrees, tokens=setup.tokens, num_microbatches=setup.num_microbatches
    )
    whole, split = chain_of_layers(table), chain_of_layers(table, split=True)
    if not setup.ends:
        whole, split = (replace(chain, update_ns=None) for chain in (whole, split))
    room = hardware.device.usable_bytes
    return whole.with_capacity(room), split.with_capacity(room)


@functools.lru_cache(maxsize=512)
def run_baseline(name: str, setup: PaperSetup) -> ChainResult:
    """One published system on a setup, judged by the independent checker but for its memory."""
    whole, split = chains(setup)
    found = run_system(name, split if name in _SPLIT else whole)
    faults = [v for v in check(found.graph, found.schedule, found.timeline) if v.kind != "memory"]
    if faults:
        raise AssertionError(f"{name}: {faults[0]}")
    return found


def best_baseline(setup: PaperSetup) -> ChainResult | None:
    """The fastest of all published systems that fit into memory; None: none does."""
    found = []
    for name in SYSTEMS:
        with suppress(InputError):  # too few layers or microbatches for it
            found.append(run_baseline(name, setup))
    return min((one for one in found if one.fits), key=lambda one: one.timeline.makespan_ns, default=None)


def over_best(setup: PaperSetup, seconds: float) -> str:
    """Our speedup over the fastest published system that fits, and which that is."""
    best = best_baseline(setup)
    return "" if best is None else f"{seconds_of(best) / seconds:.2f} ({best.name})"


def ours(setup: PaperSetup, seed: int, seconds: float, phases: tuple[str, ...] = (), split: bool = True) -> ChainResult:
    """Our joint search on a setup, once for all parts; ``phases`` limits what it may tune."""
    return _ours(setup, seed, seconds, phases, split)


@functools.lru_cache(maxsize=512)
def _ours(setup: PaperSetup, seed: int, seconds: float, phases: tuple[str, ...], split: bool) -> ChainResult:
    params = CooptimizeParams(tuned=phases) if phases else CooptimizeParams()
    chain = chains(setup)[1 if split else 0]
    found = cooptimize(chain, budget=Budget(seconds=seconds, clock="cpu"), seed=seed, params=params)
    return ChainResult("ours", found.placement, found.graph, found.schedule, found.timeline, True)


def generated(setup: PaperSetup, seconds: float, phases: tuple[str, ...] = TUNED, split: bool = True) -> ChainResult:
    """The paper's generator on a setup, which draws no random numbers; it mostly ends before its time is over."""
    return _generated(setup, seconds, phases, split)


@functools.lru_cache(maxsize=512)
def _generated(setup: PaperSetup, seconds: float, phases: tuple[str, ...], split: bool) -> ChainResult:
    found = tune_phases(chains(setup)[1 if split else 0], budget=Budget(seconds=seconds, clock="cpu"), phases=phases)
    return ChainResult(GENERATOR, found.placement, found.graph, found.schedule, found.timeline, True)


def generated_s(setup: PaperSetup, options: Options, phases: tuple[str, ...] = TUNED, split: bool = True) -> float:
    """Iteration of the paper's generator in seconds."""
    return seconds_of(generated(setup, options.search_s, phases, split))


def ours_s(setup: PaperSetup, options: Options, phases: tuple[str, ...] = (), split: bool = True) -> float:
    """Median over the seeds of our iteration, in seconds."""
    found = [ours(setup, seed, options.search_s, phases, split) for seed in options.seeds]
    return statistics.median(result.timeline.makespan_ns for result in found) / 1e9


def seconds_of(result: ChainResult) -> float:
    """Iteration time."""
    return result.timeline.makespan_ns / 1e9


@functools.lru_cache(maxsize=256)
def _emulated(model: str, degrees: Degrees) -> EmulatedCosts:
    return EmulatedCosts(model, load_cluster(CLUSTER), degrees, ("keep",))


def iteration_s(setup: PaperSetup, result: ChainResult) -> float:
    """Iteration with its end: the ranks reduce their gradients over replicas, and update and gather their weights.

    A rank begins that when its own last task has ended.
    """
    costs = _emulated(setup.model, setup.degrees)
    name = costs.architecture.modules[0].name
    held: list[list[Chunk]] = [[] for _ in range(result.graph.num_ranks)]
    placement = result.placement
    for (first, last), rank in zip(pairwise(placement.cuts), placement.ranks, strict=True):
        held[rank].append(Chunk(name, (first, last - 1), rank))
    ends = np.zeros(result.graph.num_ranks, np.int64)
    np.maximum.at(ends, result.graph.rank, result.timeline.end_ns)
    return max(end / 1e9 + costs.update_s(chunks) for end, chunks in zip(ends.tolist(), held, strict=True))


def bubble_share(result: ChainResult) -> float:
    """Idle share of all ranks' time."""
    graph = result.graph.with_candidates(result.schedule.candidate)
    return 1 - float(graph.duration_ns.sum()) / (graph.num_ranks * result.timeline.makespan_ns)


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    return statistics.fmean(values)


def device() -> tuple[str, ...]:
    """Device table that the times rest on."""
    hardware = load_cluster(CLUSTER)
    return (hardware.device.label,)
