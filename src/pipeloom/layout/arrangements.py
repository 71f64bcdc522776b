"""Co-optimized layouts of a training run: partition, placement and priority rule of all modules together.

The layers of all modules form one chain, and every microbatch is the mean microbatch, so thousands of layouts are
scheduled per second. `pipeloom.layout.choose` evaluates the results on sampled iterations with unequal microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, product

import msgspec

from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InfeasibleError
from pipeloom.layout.choose import LayoutDraft
from pipeloom.layout.cooptimize import CooptimizedPipeline, CooptimizeParams, LayerChain, chain_of_layers, layout_of
from pipeloom.layout.cooptimize.joint import every_walk
from pipeloom.layout.cooptimize.params import AgainParams, StartParams
from pipeloom.layout.cooptimize.rules import cut_at, order_rule
from pipeloom.search import Budget, Progress
from pipeloom.spec import Chunk, ModelSpec

_MOST_WALKS, _WALK = 12, 2000
"""Maximum number of walks, and the minimum number of evaluations for each."""
MOST_EVALUATIONS, FEWEST_EVALUATIONS = 176_000, 500
_MOST_TASKS = 70_000_000
"""Maximum number of tasks that are scheduled by the search: some seconds."""
_TASK_S = 1e-7
"""Time to schedule one task, in s."""
_SHARE = 0.05
"""Maximum fraction of the time of a training run for the co-optimization."""


def evaluations_for(chain: LayerChain, iterations: int | None = None) -> int:
    """Return the number of layouts to try. A count, so that a resumed run finds the same layout.

    Parameters
    ----------
    iterations : int or None
        Length of the training run, of which the search may take a small fraction. None: no such limit.
    """
    tasks = 2 * min(chain.num_layers, 3 * chain.num_ranks) * chain.num_microbatches
    most = float(_MOST_TASKS)
    if iterations is not None:
        most = min(most, _SHARE / _TASK_S * iterations * chain.stride_ns / 1e9 * chain.num_microbatches)
    return max(FEWEST_EVALUATIONS, min(MOST_EVALUATIONS, int(most / tasks)))


def walks_for(evaluations: int) -> CooptimizeParams:
    """Return parameters for many short walks from the best two starts. The best third of the walks continue."""
    walks = max(2, min(_MOST_WALKS, evaluations // _WALK))
    return CooptimizeParams(walks=walks, starts=StartParams(walked=2), again=AgainParams(walks=walks // 3))


def arrangements(
    tables: Sequence[LayerTable],
    model: ModelSpec,
    *,
    split: bool = False,
    iterations: int | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    on_share: Callable[[float], None] | None = None,
) -> tuple[LayoutDraft, ...]:
    """Find several co-optimized layouts, each with a priority rule, for the mean microbatch.

    Parameters
    ----------
    tables : sequence of LayerTable
        One or more layer tables of the model, as written by `pipeloom.layout.profiled_layers`. The evaluations are
        divided among them.
    split : bool
        Whether backwards may be split. If so, half of the evaluations go to chains that split all backwards, since
        split backwards hold more memory for longer.
    iterations : int or None
        Length of the training run, which limits the default number of layouts. None: no such limit.
    evaluations : int or None
        Number of layouts to try. None: `evaluations_for`.
    on_share : callable or None
        Called regularly with the fraction of the search that is done.

    Returns
    -------
    tuple of LayoutDraft
        Distinct layouts with distinct names, the fastest on mean microbatches first.

    Raises
    ------
    InfeasibleError
        No layout that was tried fits into memory.
    """
    found: list[CooptimizedPipeline] = []
    failure = None
    forms = list(product(tables, (False, True) if split else (False,)))
    for number, (table, halves) in enumerate(forms):
        chain = chain_of_layers(table, split=halves)
        count = max(1, (evaluations or evaluations_for(chain, iterations)) // len(forms))
        show = None if on_share is None else partial(_show, on_share, number, len(forms), count)
        try:
            found += every_walk(
                chain, budget=Budget(evaluations=count), seed=seed, params=walks_for(count), on_progress=show
            )
        except InfeasibleError as error:
            failure = error
    if not found:
        assert failure is not None
        raise failure
    each: dict[tuple[Chunk, ...], LayoutDraft] = {}
    for one in sorted(found, key=lambda one: one.iteration_ns):
        made = arrangement_of(one, model)
        each.setdefault(made.layout.chunks, made)
    # Evaluations are distinguished by name.
    return tuple(draft._replace(name=f"{draft.name} ({number})") for number, draft in enumerate(each.values(), 1))


def _show(on_share: Callable[[float], None], number: int, count: int, evaluations: int, state: Progress) -> None:
    on_share((number + min(1.0, state.evaluations / evaluations)) / count)


def arrangement_of(found: CooptimizedPipeline, model: ModelSpec) -> LayoutDraft:
    """Convert a result for the chain of all layers into a layout of the modules and a rule for its chunks.

    A chunk with layers of two modules becomes two chunks on the same rank.
    """
    ends = set(accumulate(len(module.flat_layers) for module in model.modules))
    placement, rule = cut_at(found.placement, found.rule, ends)
    layout = layout_of(found.chain.num_ranks, placement, model)
    order = order_rule(found.chain, placement, rule)
    chunks = (
        msgspec.structs.replace(said, layers=chunk.layers)
        for said, chunk in zip(order.chunks, layout.chunks, strict=True)
    )
    name = f"co-optimized, {len(layout.chunks)} chunks, {found.iteration_ns / 1e6:.1f} ms with equal microbatches"
    return LayoutDraft(name, layout, msgspec.structs.replace(order, chunks=tuple(chunks)))
