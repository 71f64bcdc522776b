"""Layouts of a training run found by co-optimisation: partition, placement and a rule of order for all modules at once.

The layers of all modules are one chain, and all microbatches the mean one; so thousands of arrangements are run in a
second. What is found is judged on real iterations (`pipeloom.layout.choose`), where microbatches are unlike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, product

import msgspec

from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InfeasibleError
from pipeloom.layout.choose import LayoutDraft
from pipeloom.layout.cooptimise import CooptimisedPipeline, CooptimiseParams, LayerChain, chain_of_layers, layout_of
from pipeloom.layout.cooptimise.joint import every_walk
from pipeloom.layout.cooptimise.params import AgainParams, StartParams
from pipeloom.layout.cooptimise.rules import cut_at, order_rule
from pipeloom.search import Evaluations, Progress
from pipeloom.spec import Chunk, ModelSpec

_MOST_WALKS, _WALK = 12, 2000
"""Walks at most, and the evaluations below which there are fewer."""
MOST_EVALUATIONS, FEWEST_EVALUATIONS = 176_000, 500
_MOST_TASKS = 70_000_000
"""So many tasks are run at most while arrangements are searched: some seconds."""
_TASK_S = 1e-7
"""What running one takes."""
_SHARE = 0.05
"""Of a training run, what its arrangement may take."""


def arrangement_budget(chain: LayerChain, iterations: int | None = None) -> Evaluations:
    """How many arrangements to try: a count, so that a resumed run comes to the layout that it had.

    Parameters
    ----------
    iterations : int or None
        Of the training run, of which this is to take a small part; None: many.
    """
    tasks = 2 * min(chain.num_layers, 3 * chain.num_ranks) * chain.num_microbatches
    most = float(_MOST_TASKS)
    if iterations is not None:
        most = min(most, _SHARE / _TASK_S * iterations * chain.stride_ns / 1e9 * chain.num_microbatches)
    return Evaluations(max(FEWEST_EVALUATIONS, min(MOST_EVALUATIONS, int(most / tasks))))


def walks_for(evaluations: int) -> CooptimiseParams:
    """Many short walks from the best two starts, of which a third go on: what a walk comes to is luck."""
    walks = max(2, min(_MOST_WALKS, evaluations // _WALK))
    return CooptimiseParams(walks=walks, starts=StartParams(walked=2), again=AgainParams(walks=walks // 3))


def arrangements(
    tables: Sequence[LayerTable],
    model: ModelSpec,
    *,
    split: bool = False,
    iterations: int | None = None,
    budget: Evaluations | None = None,
    seed: int = 0,
    on_share: Callable[[float], None] | None = None,
) -> tuple[LayoutDraft, ...]:
    """Find layouts and rules for the layers of a model: several of them, for they are all made for mean microbatches.

    Parameters
    ----------
    tables : sequence of LayerTable
        The model's layers, as `pipeloom.layout.profiled_layers` writes them, in one way or several; the budget is
        divided among them.
    split : bool
        Whether backwards may be split. Half of the budget then goes to chains that split all of them: halves hold more,
        for longer.
    iterations : int or None
        Of the training run; a short one is not worth a long search. None: many.
    budget : Evaluations or None
        None: `arrangement_budget`.
    on_share : callable or None
        Told now and then which part of the search is done.

    Returns
    -------
    tuple of LayoutDraft
        The fastest on mean microbatches first, each layout once.

    Raises
    ------
    InfeasibleError
        Nothing that was tried fits into memory.
    """
    found: list[CooptimisedPipeline] = []
    failure = None
    forms = list(product(tables, (False, True) if split else (False,)))
    for number, (table, halves) in enumerate(forms):
        chain = chain_of_layers(table, split=halves)
        whole = budget or arrangement_budget(chain, iterations)
        count = max(1, whole.count // len(forms))
        show = None if on_share is None else partial(_show, on_share, number, len(forms), count)
        try:
            found += every_walk(chain, budget=Evaluations(count), seed=seed, params=walks_for(count), on_progress=show)
        except InfeasibleError as error:
            failure = error
    if not found:
        assert failure is not None
        raise failure
    each: dict[tuple[Chunk, ...], LayoutDraft] = {}
    for one in sorted(found, key=lambda one: one.timeline.makespan_ns):
        made = arrangement_of(one, model)
        each.setdefault(made.layout.chunks, made)
    return tuple(each.values())


def _show(on_share: Callable[[float], None], number: int, count: int, evaluations: int, state: Progress) -> None:
    on_share((number + min(1.0, state.evaluations / evaluations)) / count)


def arrangement_of(found: CooptimisedPipeline, model: ModelSpec) -> LayoutDraft:
    """Write what was found on the chain of all layers as a layout of the modules, and the rule for its chunks.

    A chunk with layers of two modules is two chunks on its rank.
    """
    ends = set(accumulate(len(module.flat_layers) for module in model.modules))
    placement, rule = cut_at(found.placement, found.rule, ends)
    layout = layout_of(found.chain.num_ranks, placement, model)
    order = order_rule(found.chain, placement, rule)
    chunks = (
        msgspec.structs.replace(said, layers=chunk.layers)
        for said, chunk in zip(order.chunks, layout.chunks, strict=True)
    )
    name = (
        f"arranged, {len(layout.chunks)} chunks, {found.timeline.makespan_ns / 1e6:.1f} ms if microbatches were alike"
    )
    return LayoutDraft(name, layout, msgspec.structs.replace(order, chunks=tuple(chunks)))
