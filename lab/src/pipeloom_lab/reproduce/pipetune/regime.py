"""PipeTune in the regime of its paper: memory of which 3B holds eight contexts, and recomputation for each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from pipeloom.cost import rank_static_bytes
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_mixtures import ParetoSteps
from pipeloom.cost.encoder_dp import costs_under_layout
from pipeloom.errors import InfeasibleError, NothingFoundError
from pipeloom.layout import LayerLoad, chain_of_stages
from pipeloom.layout.layouts import with_encoder_dp
from pipeloom.packing import PackingSpec, Policy, group
from pipeloom.planner import PlanningProblem
from pipeloom.planner.joint import decide, least_bound
from pipeloom.search import Budget
from pipeloom.spec import Batch, Layout, Sample
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import NS_PER_S, IntArray
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.tuning import TuningSpec, batch_sizes
from pipeloom_lab.reproduce.part import Options, Outcome, Table
from pipeloom_lab.reproduce.pipetune import setups
from pipeloom_lab.reproduce.pipetune.setups import batches, max_contexts
from pipeloom_lab.reproduce.texts import make_table

STRATEGIES = ("keep", "selective", "recompute:0.5", "recompute")
"""Of all layers, of which every setting takes the best."""
WORDS = dict(
    zip(STRATEGIES, ("nothing", "norms, activation functions", "every second layer", "all layers"), strict=True)
)
PAPER = {"datamix1": 40.7, "datamix2": 28.9, "datamix3": 16.1}
"""Per cent by which PipeTune is shorter than Original, Table 2: quoted beside ours."""
PAPERS = "the paper's"
CHUNKS = (2, 4, 8)
"""Of a rank, in the other layouts that the planner may be given."""
CONTEXTS = range(1, setups.MOST_CONTEXTS + 1)
"""Of the largest microbatch."""
FILLED = ("as long as they are", "filled up")
SAMPLED = 2
"""Batches that layouts are chosen on."""
HELD = setups.ON_A["3b"]
"""Holds `MOST_CONTEXTS` at most (section 5.2)."""


@cache
def held_factor() -> float:
    """How many times the emulator's bytes activations must take for `HELD` to hold just as much as the paper says."""
    setting = setups.emulated(HELD)
    return min(
        (setting.capacity_bytes - static) / held
        for static, held in setups.held_bytes(setting.setup, setting.costs, setting.layout, setups.MOST_CONTEXTS)
    )


@dataclass(frozen=True, eq=False)
class Regime:
    """A setup under one recomputation, in the calibrated memory.

    ``max_contexts`` is 0 where not even one context fits.
    """

    setting: setups.EmulatedSetup
    max_contexts: int


@cache
def regime(setup: setups.PaperSetup, recomputed: str = setups.RECOMPUTED) -> Regime:
    """Put a setup into the memory that `held_factor` says."""
    setting, factor = setups.emulated(setup, recomputed=recomputed), held_factor()
    contexts = max_contexts(setup, setting.costs, setting.layout, setting.capacity_bytes, setups.MOST_CONTEXTS, factor)
    pipeline = setting.pipeline
    tight = _tight(setting.capacity_bytes, pipeline.static_bytes)
    return Regime(
        replace(setting, pipeline=replace(pipeline, capacity_bytes=pipeline.capacity_bytes - tight)), contexts
    )


def _tight(capacity_bytes: int, static_bytes: IntArray) -> IntArray:
    """What each rank must leave free, as emulated, since activations are larger than emulated."""
    room = (capacity_bytes - static_bytes) / held_factor()
    return np.array(np.ceil(capacity_bytes - static_bytes - room), np.int64)


def padded(setting: setups.EmulatedSetup, batch: Batch, policy: Policy, seed: int) -> Batch:
    """Pack a batch into contexts by a policy, and fill each up with a sequence of nothing.

    Taken in order, any whole number of these contexts is a microbatch of just as many tokens.
    """
    context = setting.setup.context
    loads = batch_sizes(setting.pipeline, batch).loads
    samples: list[Sample] = []
    for row, members in enumerate(group(loads, PackingSpec(context, policy, seed=seed), batch.iteration)):
        samples += [batch.samples[i] for i in members]
        left = context - int(loads.tokens[list(members)].sum())
        if left:
            samples.append(Sample(f"padding of context {row}", left))
    return Batch(tuple(samples), batch.iteration)


def tuned_seconds(
    setup: setups.PaperSetup,
    batches: Sequence[tuple[int, Batch]],
    spec: TuningSpec,
    *,
    contexts: int | None = None,
    pad: bool = False,
    strategies: Sequence[str] = STRATEGIES,
) -> tuple[float, str, int] | None:
    """Mean seconds under the best recomputation, which that is, and contexts of the largest microbatch.

    Parameters
    ----------
    spec : TuningSpec
        One of `steps_of`.
    contexts : int or None
        Of the largest microbatch; None: as many as fit.
    pad : bool
        Every context is filled up.
    strategies : sequence of str
        Of all layers; the fastest is taken.

    Returns
    -------
    tuple or None
        None: so many contexts fit under none of the strategies.
    """
    found = []
    for recomputed in strategies:
        here = regime(setup, recomputed)
        most = here.max_contexts if contexts is None else contexts
        if not 1 <= most <= here.max_contexts:
            continue
        try:
            each = [_tuned(setup, recomputed, seed, batch, spec, most, pad) for seed, batch in batches]
        except NothingFoundError:
            continue
        found.append((float(np.mean(each)), recomputed, most))
    return min(found, default=None)


@cache
def _tuned(
    setup: setups.PaperSetup, recomputed: str, seed: int, batch: Batch, spec: TuningSpec, contexts: int, pad: bool
) -> float:
    setting = regime(setup, recomputed).setting
    if pad:
        batch = padded(setting, batch, spec.pack, seed)
        spec = TuningSpec("first_fit", spec.micro_batch, spec.order, spec.precompute, setup.context)
    return setups.run_batch(setting, batch, spec, seed, contexts * setup.context).seconds


@cache
def joined(setup: setups.PaperSetup, name: str) -> PlanningProblem:
    """What the planner chooses in: packings, orders, and a strategy of its own for every layer of every pair.

    Nothing is offloaded, as the paper's system offloads nothing.

    Parameters
    ----------
    name : str
        One of `layouts`.
    """
    setting = setups.emulated(setup)
    degrees = Degrees(tensor=setup.tensor, pipeline=setups.RANKS)
    costs = EmulatedCosts(
        setting.costs.architecture, setting.costs.cluster, degrees, split=False, pareto_steps=ParetoSteps(offloading=0)
    )
    layout = layouts(setup)[name]
    static = rank_static_bytes(costs_under_layout(costs, layout), layout)
    return PlanningProblem(
        costs.model_spec,
        layout,
        costs,
        PackingSpec(setups.MOST_CONTEXTS * setup.context, "planned"),
        memory=MemoryLimit(
            setting.capacity_bytes, num_messages=0, reserve_bytes=tuple(_tight(setting.capacity_bytes, static).tolist())
        ),
    )


@cache
def layouts(setup: setups.PaperSetup) -> dict[str, Layout]:
    """The paper's layout, and others that the planner may be given, also with encoder data parallelism where ranks are
    several devices.
    """
    setting = setups.emulated(setup)
    model = setting.costs.model_spec
    names = frozenset(module.name for module in model.modules[:-1])
    found = {PAPERS: setting.layout, "layers balanced": setups.emulated(setup, even=False).layout}
    ways = {"": frozenset[str]()}
    if setup.tensor > 1:
        ways[", encoder data parallelism"] = names
    for words, of in ways.items():
        load = setups.mean_load(setup, setting.costs, of)
        for chunks in CHUNKS:
            layout = chain_of_stages(model, setups.RANKS, chunks, _loads(load))
            found[f"{chunks} chunks a rank{words}"] = with_encoder_dp(layout, of)
    return found


def _loads(seconds: Mapping[str, float]) -> LayerLoad:
    return lambda module, layer: seconds[f"{module}/{layer.kind}"]


class JoinedPlans(NamedTuple):
    """Mean seconds of the planner's own packings, orders and strategies; of the least bounds of packings it judged."""

    seconds: float
    bound_s: float


def joined_plans(
    setup: setups.PaperSetup, batches: Sequence[tuple[int, Batch]], search_s: float, name: str
) -> JoinedPlans:
    """Plan batches on a layout; infinite: one does not fit."""
    problem = joined(setup, name)
    try:
        each = [
            decide(problem.with_search(seed=seed), batch, Budget(seconds=search_s, clock="cpu"))
            for seed, batch in batches
        ]
    except InfeasibleError:
        return JoinedPlans(float("inf"), float("inf"))
    planned, least = np.mean([(one.ns, least_bound(problem, one).ns) for one in each], axis=0) / NS_PER_S
    return JoinedPlans(float(planned), float(least))


@cache
def chosen_layout(setup: setups.PaperSetup, mixture: str, search_s: float) -> str:
    """The layout that the planner does best with on batches that nothing is timed on."""
    sampled = [(0, setups.batch_of(setup, mixture, 777_000 + number)) for number in range(SAMPLED)]
    return min(layouts(setup), key=lambda name: joined_plans(setup, sampled, search_s / 2, name).seconds)


def own_regime(options: Options) -> Outcome:
    """Memory of which 3B holds eight contexts: what fits, sizes and padding, every model, cluster and mixture."""
    fits = [
        (setup.name, cluster, *(str(regime(setup, each).max_contexts or "none") for each in STRATEGIES))
        for cluster, known in (("A", setups.ON_A), ("B", setups.ON_B))
        for setup in known.values()
    ]
    factor = held_factor()
    return Outcome(
        (
            make_table(
                "pipetune/regime-contexts",
                fits,
                factor=factor,
                name=HELD.name,
                most_contexts=setups.MOST_CONTEXTS,
                recomputed=WORDS[setups.RECOMPUTED],
                strategies=WORDS.values(),
            ),
            _by_setup(options),
            _by_size(options),
        ),
        devices=(setups.emulated(setups.ON_A["13b"]).device, setups.emulated(setups.ON_B["13b"]).device),
    )


def _by_setup(options: Options) -> Table:
    rows = []
    for cluster, known in (("A", setups.ON_A), ("B", setups.ON_B)):
        for setup in known.values():
            for mixture in setups.MIXTURES:
                drawn = list(batches(setup, mixture, options))
                name = chosen_layout(setup, mixture, options.search_s)
                ours = joined_plans(setup, drawn, options.search_s, name)
                for (rule, pad), strategies in _rules(setup).items():
                    cells = _settings(setup, drawn, pad=pad, strategies=strategies)
                    rows.append(
                        (setup.name, cluster, setups.NAMES[mixture], rule, FILLED[pad], *_cells(cells, ours), name)
                    )
    return make_table(
        "pipetune/regime-setups", rows, recomputed=WORDS[setups.RECOMPUTED], sampled=SAMPLED, columns=_COLUMNS
    )


def _by_size(options: Options) -> Table:
    setup, rows, distance = setups.ON_A["13b"], [], dict[tuple[bool, int], list[float]]()
    for mixture in setups.MIXTURES:
        drawn = list(batches(setup, mixture, options))
        name = chosen_layout(setup, mixture, options.search_s)
        ours = [joined_plans(setup, drawn, options.search_s, each).seconds for each in (PAPERS, name)]
        for pad in (False, True):
            for contexts in CONTEXTS:
                cells = _settings(setup, drawn, contexts=contexts, pad=pad)
                if cells[0] is None or cells[2] is None:
                    continue
                off = abs(100 * (1 - cells[2][0] / cells[0][0]) - PAPER[mixture])
                distance.setdefault((pad, contexts), []).append(off)
                near = "within 5 points" if off <= 5 else ""
                rows.append(
                    (
                        setups.NAMES[mixture],
                        FILLED[pad],
                        str(contexts),
                        *_cells(cells, ours),
                        f"-{PAPER[mixture]} %",
                        near,
                    )
                )
    least, most, (filled, size) = min((float(np.mean(each)), max(each), key) for key, each in distance.items())
    return make_table(
        "pipetune/regime-sizes",
        rows,
        name=setup.name,
        max_contexts=regime(setup).max_contexts,
        recomputed=WORDS[setups.RECOMPUTED],
        least=least,
        most=most,
        size=size,
        filled=FILLED[filled],
        columns=_COLUMNS,
    )


_COLUMNS = ("Original, s", "recomputes", "Balanced", "PipeTune")
_Cell = tuple[float, str, int] | None


def _rules(setup: setups.PaperSetup) -> dict[tuple[str, bool], tuple[str, ...]]:
    """Recomputations of which settings choose the fastest, by the choice's name and whether contexts are filled up."""
    largest = max(STRATEGIES, key=lambda each: (regime(setup, each).max_contexts, -STRATEGIES.index(each)))
    rules = {"the fastest": STRATEGIES, "as calibrated": (setups.RECOMPUTED,), "for the largest microbatch": (largest,)}
    return {(rule, pad): strategies for rule, strategies in rules.items() for pad in (False, True)}


def _settings(
    setup: setups.PaperSetup,
    drawn: Sequence[tuple[int, Batch]],
    *,
    contexts: int | None = None,
    pad: bool = False,
    strategies: Sequence[str] = STRATEGIES,
) -> list[_Cell]:
    steps = setups.steps_of(setup)
    specs = [steps[name] for name in (setups.ORIGINAL, setups.BALANCED, setups.PIPETUNE)]
    return [tuned_seconds(setup, drawn, spec, contexts=contexts, pad=pad, strategies=strategies) for spec in specs]


def _cells(found: Sequence[_Cell], ours: Sequence[float]) -> tuple[str, ...]:
    first = found[0]
    if first is None:
        return ("does not fit", *[""] * (len(_COLUMNS) + len(ours) - 1))
    others = [setups.change(first[0], each[0]) if each else "" for each in found[1:]]
    contexts = f"{first[2]} context{'s' if first[2] > 1 else ''}"
    return (
        f"{first[0]:.3f}",
        f"{WORDS[first[1]]}, {contexts}",
        *others,
        *("does not fit" if seconds == float("inf") else setups.change(first[0], seconds) for seconds in ours),
    )
