"""How near to the bound partition, placement and order of a chain come together: measured, random and large chains."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeloom.cost.layers import LayerCost, LayerTable
from pipeloom.io import read_layers
from pipeloom.layout.arrangements import evaluations_for, walks_for
from pipeloom.layout.cooptimize import (
    CooptimizedPipeline,
    LayerChain,
    chain_of_layers,
    cooptimize,
    graph_of,
    in_memory_of_1f1b,
)
from pipeloom.layout.cooptimize.joint import compile_kernels, every_walk
from pipeloom.layout.cooptimize.standard import stages
from pipeloom.report import markdown_table
from pipeloom.search import Budget, SearchParams, one_f_one_b, solve
from pipeloom.timeline import simulate

TITLE = "Co-optimization of layer chains"
_THREADS = 2
_SEEDS = 5
_OWN_MEMORY = {"gpt-13b": (2.1, "0.5", "9"), "nemotron-nano-9b": (2.4, "2.7", "18")}
"""Of a public simulator's tuned answer, as a multiple of 1F1B's; the goals there (per cent above the bound) and in
1F1B's own memory (per cent below 1F1B)."""
_OTHERS = (2.0, "1.2", "")
_NUM_RANDOM = 5
_LARGE = (64, 512, 1024)
_GIB = 2**30


def run(layers: Path | None = None, seconds: float = 5.0, large_s: float = 120.0) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    layers : Path or None
        Folder of measured layers, `pipeloom.layers/1`; they are not part of the repository.
    seconds, large_s : float
        Of search on each of two threads.
    """
    compile_kernels()
    return "\n\n".join((_measured(layers, seconds), *_in_training(layers), _random(seconds), _large(large_s)))


def _measured(folder: Path | None, seconds: float) -> str:
    files = sorted(folder.glob("*.layers.json")) if folder is not None else []
    if not files:
        return (
            "Measured layers are not available, so this part is left out. `python -m benchmarks arrange --layers "
            "FOLDER` takes all `*.layers.json` of a folder."
        )
    rows = []
    for file in files:
        table = read_layers(file)
        more, unsplit_goal, lean_goal = _OWN_MEMORY.get(table.name, _OTHERS)
        cases = (
            ("whole backwards", table, more, f"{unsplit_goal} above the bound"),
            ("whole backwards", table, 1.0, f"{lean_goal} below 1F1B" if lean_goal else ""),
            ("split 50:50", halved(table), 1.5, "1 above the bound"),
        )
        for how, each, factor, goal in cases:
            chain = in_memory_of_1f1b(chain_of_layers(each, split=each is not table), factor)
            rows.append([table.name, how, f"{factor:g} ×", *_cells(chain, seconds), goal])
    header = ["chain", "backwards", "memory", *_COLUMNS, "goal, per cent"]
    return (
        f"Measured layers, 4 ranks, 16 microbatches. The search has {2 * seconds:g} s of processor time "
        f"on two threads ({seconds:g} s on two idle cores). Values are medians of {_SEEDS} seeds, with "
        "the smallest and the largest. *Memory* is a multiple of the need of 1F1B's fullest rank on equal "
        "stages. If backwards are split, those of 1F1B are split too, and a weight gradient holds as "
        "much memory as the activations.\n\n"
        f"{markdown_table(header, rows)}"
    )


def _in_training(folder: Path | None) -> Iterator[str]:
    """What training's arranging comes to, and what a batch's search makes of it."""
    files = sorted(folder.glob("*.layers.json")) if folder is not None else []
    rows = []
    for file in files:
        began_s = time.process_time()
        name, found = trained_ms(file)
        cpu_s = (time.process_time() - began_s) / _SEEDS
        rows.append([name, *(f"{ms:.0f}" for ms in found), f"{statistics.median(found):.0f}", f"{cpu_s:.1f} s"])
    if rows:
        header = ["chain", *(f"seed {seed}" for seed in range(_SEEDS)), "median", "processor time each"]
        yield (
            'Search as for `kind = "arranged"` in 1F1B\'s memory, then 0.05 s of search on such a batch with the rule. '
            f"Milliseconds of an iteration:\n\n{markdown_table(header, rows)}"
        )


def trained_ms(file: Path) -> tuple[str, list[float]]:
    """Name of a chain, and by seed what training's arranging and 0.05 s of a batch's search come to."""
    chain = in_memory_of_1f1b(chain_of_layers(read_layers(file)), 1.0)
    evaluations, found = evaluations_for(chain), []
    for seed in range(_SEEDS):
        one = every_walk(chain, budget=Budget(evaluations=evaluations), seed=seed, params=walks_for(evaluations))[0]
        params = SearchParams(rules=(one.order_rule,))
        made = solve(graph_of(chain, one.placement), budget=Budget(seconds=0.05, clock="cpu"), seed=seed, params=params)
        found.append(made.timeline.makespan_ns / 1e6)
    return chain.name, found


_COLUMNS = ["1F1B, ms", "found, ms", "bound, ms", "above the bound", "below 1F1B"]


def searched(chain: LayerChain, seconds: float) -> list[CooptimizedPipeline]:
    """What every seed comes to in so many seconds on each of two threads."""
    budget = Budget(seconds=_THREADS * seconds, clock="cpu")
    return [cooptimize(chain, budget=budget, seed=seed, threads=_THREADS) for seed in range(_SEEDS)]


def _cells(chain: LayerChain, seconds: float) -> list[str]:
    found = searched(chain, seconds)
    times = sorted(one.timeline.makespan_ns / 1e6 for one in found)
    graph = graph_of(chain.with_capacity(None), stages(chain))
    standard = simulate(graph, one_f_one_b(graph)).makespan_ns / 1e6
    bound, median = found[0].lower_bound.ns / 1e6, statistics.median(times)
    return [
        f"{standard:.0f}",
        f"{median:.0f} ({times[0]:.0f}–{times[-1]:.0f})",
        f"{bound:.0f}",
        f"{100 * (median / bound - 1):.1f} ({100 * (times[0] / bound - 1):.1f}–{100 * (times[-1] / bound - 1):.1f}) %",
        f"{100 * (1 - median / standard):.1f} %",
    ]


def halved(table: LayerTable) -> LayerTable:
    """The same layers, each backward in two equal parts."""
    layers = tuple(
        LayerCost(
            layer.name,
            layer.forward_s,
            layer.activation_bytes,
            layer.parameter_bytes,
            backward_input_s=layer.total_backward_s / 2,
            backward_weight_s=layer.total_backward_s / 2,
            static_bytes=layer.static_bytes,
        )
        for layer in table.layers
    )
    fields = {name: getattr(table, name) for name in table.__struct_fields__ if name != "format"}
    return LayerTable(**fields | {"layers": layers})


def _random(seconds: float) -> str:
    rows = []
    for kinds, chain in random_chains():
        rows.append([str(chain.num_layers), kinds, *_cells(chain, seconds)])
    header = ["layers", "kinds of layers", *_COLUMNS]
    return (
        "Random chains with whole backwards and twice 1F1B's memory, with the same search. The goal is "
        "1.2 % above the bound.\n\n"
        f"{markdown_table(header, rows)}"
    )


def random_chains() -> Iterator[tuple[str, LayerChain]]:
    """Which layers there are, and the chain of them: ten, in twice 1F1B's memory."""
    for seed in range(_NUM_RANDOM):
        for words, kinds in (("no two alike", None), ("of four kinds", 4)):
            yield words, in_memory_of_1f1b(chain_of_layers(random_layers(seed, 24 + seed % 5, 4, 16, kinds)), 2.0)


def random_layers(
    seed: int, num_layers: int, num_ranks: int, num_microbatches: int, kinds: int | None = None, head: float = 3.0
) -> LayerTable:
    """Draw layers of 5 to 40 ms forward, 1.6 to 2.2 times that backward, the last of them a head.

    Parameters
    ----------
    kinds : int or None
        Number of kinds of layers; None: no two alike.
    head : float
        Times what such a layer takes that the last one takes.
    """
    rng = np.random.default_rng((seed, num_layers))
    forward = rng.uniform(0.005, 0.04, kinds or num_layers)
    ratio = rng.uniform(1.6, 2.2, kinds or num_layers)
    which = rng.integers(0, kinds, num_layers) if kinds else np.arange(num_layers)
    times = [(float(forward[k]), float(forward[k] * ratio[k])) for k in which]
    times[-1] = (head * times[-1][0], head * times[-1][1])
    layers = tuple(LayerCost(f"layer.{i}", f, 10**6, 0, backward_s=b) for i, (f, b) in enumerate(times))
    return LayerTable(f"random {seed}", num_ranks, num_microbatches, 0.0, 0, layers)


def _large(seconds: float) -> str:
    rows = []
    for kinds in (None, 4):
        for factor in (None, 2.0):
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # memory is counted by process
                cells = pool.apply(_large_cells, (kinds, factor, seconds))
            rows.append(
                [
                    "no two alike" if kinds is None else "of four kinds",
                    "no limit" if factor is None else f"{factor:g} ×",
                    *cells,
                ]
            )
    ranks, layers, microbatches = _LARGE
    header = [
        "layers",
        "memory",
        "above work per rank",
        "above the bound",
        "placements tried",
        "took",
        "peak memory of the process",
    ]
    return (
        f"{ranks} ranks × {layers} layers × {microbatches} microbatches. {2 * seconds:g} s of processor "
        "time on two threads, one seed, in a separate process. The goal is 8 % above the work per rank, "
        "within 8 GiB.\n\n"
        f"{markdown_table(header, rows)}"
    )


def _large_cells(kinds: int | None, factor: float | None, seconds: float) -> list[str]:
    compile_kernels()
    ranks, layers, microbatches = _LARGE
    chain = chain_of_layers(random_layers(0, layers, ranks, microbatches, kinds, head=1.0))
    if factor is not None:
        chain = in_memory_of_1f1b(chain, factor)
    found = cooptimize(chain, budget=Budget(seconds=_THREADS * seconds, clock="cpu"), threads=_THREADS)
    share = int(chain.total_ns[:, 0].sum()) * microbatches / ranks
    # Kibibytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return [
        f"{100 * (found.timeline.makespan_ns / share - 1):.1f} %",
        f"{100 * found.gap:.1f} %",
        str(found.evaluations),
        f"{found.elapsed_s:.0f} s",
        f"{peak / _GIB:.1f} GiB",
    ]
