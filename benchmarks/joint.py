"""The planner that chooses packing and order together, beside what gives either."""

from __future__ import annotations

from statistics import mean

from pipeloom.layout import modality_placements, separate
from pipeloom.packing import PackingSpec
from pipeloom.planner import PlanningProblem
from pipeloom.planner.joint import decide
from pipeloom.report import markdown_table
from pipeloom.search import Budget
from pipeloom.spec import Batch, Layout
from pipeloom.taskgraph.iteration import MemoryLimit
from pipeloom.tuning import TuningSpec
from pipeloom_lab.reproduce.part import Options
from pipeloom_lab.reproduce.pipetune.setups import (
    MIXTURES,
    NAMES,
    ON_A,
    PIPETUNE,
    RANKS,
    EmulatedSetup,
    batch_of,
    best_static,
    emulated,
    mean_load,
    run_batch,
    steps_of,
)

TITLE = "Packing and order together"
BATCHES = 4
SIZES = ("3b", "13b")
_BUDGET = Budget(seconds=1.0, clock="cpu")


def run() -> str:
    """Measure, and return the section as Markdown."""
    rows: list[list[str]] = []
    for size in SIZES:
        setting = emulated(ON_A[size])
        apart = separate_layout(setting)
        # The kernels are loaded, and the layers' costs emulated, by what is not counted.
        planned_s(setting, apart, batch_of(setting.setup, "datamix1", 99), "planned", setting.max_contexts)
        rows += [[size.upper(), NAMES[mixture], *_row(setting, apart, mixture)] for mixture in MIXTURES]
    header = [
        "model",
        "mixture",
        "PipeTune",
        "best static size",
        "recurrence alone",
        "planned, encoder first",
        "separate: largest",
        "separate: one context",
        "separate: planned",
        "planned over PipeTune",
    ]
    text = (
        f"Emulated seconds of an iteration, means of {BATCHES} batches of 128 samples, with one CPU second "
        "of planning per batch: PipeTune's workloads on its cluster A. PipeTune, the best static size "
        "(balanced, no order) and Pipeloom's recurrence run on PipeTune's layout, with encoders before "
        "the first rank's layers. `planned` chooses number, size and contents of the microbatches with "
        "the order, on that layout and on a layout with every module on all ranks. The last column says "
        "how much longer PipeTune's iterations take than the faster of the two."
    )
    return f"{text}\n\n{markdown_table(header, rows)}"


def _row(setting: EmulatedSetup, apart: Layout, mixture: str) -> list[str]:
    options = Options(iterations=BATCHES, seeds=(0,))
    found: dict[str, list[float]] = {}
    for number in range(BATCHES):
        batch = batch_of(setting.setup, mixture, number)
        seconds = {
            "pipetune": run_batch(setting, batch, steps_of(setting.setup)[PIPETUNE], 0).seconds,
            "recurrence": run_batch(setting, batch, TuningSpec(), 0).seconds,
            "first": planned_s(setting, setting.layout, batch, "planned", setting.max_contexts),
            "largest": planned_s(setting, apart, batch, "balanced", setting.max_contexts),
            "one": planned_s(setting, apart, batch, "balanced", 1),
            "apart": planned_s(setting, apart, batch, "planned", setting.max_contexts),
        }
        for name, value in seconds.items():
            found.setdefault(name, []).append(value)
    means = {name: mean(values) for name, values in found.items()}
    _, static = best_static(setting.setup, mixture, options, "+ balance algorithm (Balanced)")
    gain = means["pipetune"] / min(means["first"], means["apart"]) - 1
    values = (means["pipetune"], static, *(means[name] for name in ("recurrence", "first", "largest", "one", "apart")))
    return [*(f"{value:.3f}" for value in values), f"{gain:+.1%}"]


def separate_layout(setting: EmulatedSetup) -> Layout:
    """Every module over all ranks, as DIP's rules have it, for the second mixture's mean composition."""
    model, load = setting.costs.model_spec, mean_load(setting.setup, setting.costs)
    samples = batch_of(setting.setup, "datamix2", 98).samples
    typical = {m.name: [n for sample in samples for n in m.instance_lengths(sample)][:40] for m in model.modules}
    places = modality_placements(model, setting.costs, RANKS, typical)
    return separate(model, RANKS, places, lambda module, layer: load[f"{module}/{layer.kind}"])


def planned_s(setting: EmulatedSetup, layout: Layout, batch: Batch, policy: str, contexts: int) -> float:
    """Seconds of an iteration that is planned in a CPU second."""
    packing = PackingSpec(contexts * setting.setup.context, policy)  # type: ignore[arg-type]
    memory = MemoryLimit(setting.capacity_bytes)
    problem = PlanningProblem(setting.costs.model_spec, layout, setting.costs, packing, memory=memory)
    return decide(problem, batch, _BUDGET).ns / 1e9
