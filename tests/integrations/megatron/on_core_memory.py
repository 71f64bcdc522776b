"""What the tests of memory strategies run inside launched processes, with Megatron Core on gloo CPU ranks."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.spec import strategy_word
from tests.integrations.megatron.on_core import (
    Case,
    batches,
    chunks_of,
    difference,
    losses_differ,
    ours,
    planned,
    random_orders,
    set_up,
    taken,
    theirs,
)

MUCH = 1 << 40


class Saved:
    """Bytes that each forward saves, by virtual stage of this rank and microbatch.

    All saved tensors are kept until the forward ends, so that no two of them have the same storage by chance.
    """

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, int], int] = {}
        self.most = 0
        """Most bytes that are saved at the end of any forward, of all microbatches in flight."""
        self.weights: set[int] = set()
        self._all: list[weakref.ref[Tensor]] = []

    def _sum(self, tensors: Iterable[Tensor]) -> int:
        sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return sum(size for place, size in sizes.items() if place not in self.weights)

    @contextmanager
    def counted(self) -> Iterator[None]:
        from megatron.core.pipeline_parallel import schedules

        original = schedules.forward_step

        def forward_step(step: Any, iterator: Any, model: Any, count: int, given: Any, *more: Any, **named: Any) -> Any:
            kept: list[Tensor] = [] if given is None else [given]

            def keep(tensor: Tensor) -> Tensor:
                kept.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                found = original(step, iterator, model, count, given, *more, **named)
            others = (*model.parameters(), *torch.nn.Module.buffers(model))
            self.weights |= {each.untyped_storage().data_ptr() for each in others}
            self.bytes[named["vp_stage"] or 0, named["current_microbatch"]] = self._sum(kept)
            self._all = [ref for ref in (*self._all, *map(weakref.ref, kept)) if ref() is not None]
            self.most = max(self.most, self._sum(each for ref in self._all if (each := ref()) is not None))
            return found

        schedules.forward_step = forward_step
        try:
            yield
        finally:
            schedules.forward_step = original


def steps_of(chunks: Sequence[Any]) -> Any:
    from pipeloom.integrations.megatron.core import forward_backward

    return chunks[0].__dict__[forward_backward._ATTRIBUTE].steps


def from_planner(steps: Any, value: Any) -> Any:
    """What the rank that plans knows, on all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value if steps.planner is not None else None)
    return every[steps.place.source]


def measured(case: Case, chunks: list[Any], lengths: Sequence[int]) -> None:
    """Run steps until the costs of all strategies are measured."""
    for seed in range(20):
        ours(case, batches(case, seed, [lengths[(seed + i) % len(lengths)] for i in range(6)]), chunks)
        steps = steps_of(chunks)
        if from_planner(steps, steps.planner is not None and steps.planner.is_measured):
            return
    raise AssertionError("the costs are not measured after 20 steps")


def settings_of(chunks: Sequence[Any]) -> list[Any]:
    """All that says what is recomputed."""
    from pipeloom.integrations.megatron.core.recomputing import _FLAGS, _SETTINGS

    names = [*_SETTINGS, *(name for names in _FLAGS.values() for name in names)]
    modules = [module for chunk in chunks for module in chunk.modules()]
    holders = [*modules, *(module.config for module in modules if hasattr(module, "config"))]
    return [(name, getattr(holder, name)) for holder in holders for name in names if hasattr(holder, name)]


def random_strategies(
    case: Case, plans: int, lengths: Sequence[int], unseen: Sequence[int], mixes: bool = False
) -> dict[str, Any]:
    """Random plans with random strategies: gradients beside Megatron's, and bytes beside the planned ones.

    Parameters
    ----------
    mixes : bool
        Whether recomputation takes longer whatever was measured, so that plans mix it with what is kept.
    """
    from pipeloom.integrations.megatron.core.forward_backward import close
    from pipeloom.integrations.steps import costs
    from pipeloom.integrations.steps.planning import Planning
    from pipeloom.integrations.steps.strategies import layer_word
    from pipeloom.spec import Workload

    set_up(case)
    if mixes:
        costs._beyond = lambda *_: (0.01, 0.0, 0.0, 0.0)
    chunks, rng = chunks_of(case), random.Random(3)
    before = settings_of(chunks)
    worst = worst_loss = worst_bytes = 0.0
    used: set[str] = set()
    pairs = 0
    with planned(planner=Planning(order=random_orders(0)), activation_bytes=MUCH):
        measured(case, chunks, lengths)
        taken(chunks)
        steps = steps_of(chunks)
        for seed in range(plans):
            sizes = [rng.choice(unseen) for _ in range(case.pp * rng.randint(1, 3))]
            items = batches(case, 100 + seed, sizes)
            wanted_losses, wanted = theirs(case, items, chunks)
            saved = Saved()
            with saved.counted():
                found_losses, found = ours(case, items, chunks)
            worst = max(worst, difference(found, wanted))
            worst_loss = max(worst_loss, losses_differ(found_losses, wanted_losses))
            order = from_planner(steps, steps.planner and steps.planner._known[True, tuple(sizes)])
            problem = from_planner(steps, steps.planner and steps.planner.problem)
            used |= {strategy for each in order.strategies for strategy in each}
            for (number, microbatch), num_bytes in saved.bytes.items():
                stage = steps._here.stages[number]
                of = problem.costs.chunk_costs(problem.layout.chunks[stage], Workload((sizes[microbatch],)))
                chosen = order.strategies[microbatch][stage]
                cost = next(each for each in of if layer_word(strategy_word(each.strategy, each.layers)) == chosen)
                worst_bytes = max(worst_bytes, abs(cost.activation_bytes / num_bytes - 1))
                pairs += 1
    assert settings_of(chunks) == before
    close(chunks)
    return {"gradients": worst, "losses": worst_loss, "bytes": worst_bytes, "used": sorted(used), "pairs": pairs}


def within_limit(case: Case, lengths: Sequence[int], share: float) -> dict[str, Any]:
    """Steps under a limit: a share of what one microbatch of each length keeps on a rank, all in flight at once.

    Returns the limit, the bytes that were really held at most, and the strategies by size.
    """
    from pipeloom.integrations.megatron.core.forward_backward import close
    from pipeloom.integrations.steps.planning import Planning
    from pipeloom.spec import Workload

    set_up(case)
    chunks = chunks_of(case)
    planning = Planning(budget_s=0.05, deadline_s=30.0)
    with planned(planner=planning, activation_bytes=MUCH):
        measured(case, chunks, lengths)
        taken(chunks)
        steps = steps_of(chunks)
        problem = from_planner(steps, steps.planner and steps.planner.problem)
    kept = {
        rank: sum(
            problem.costs.chunk_costs(chunk, Workload((length,)))[0].activation_bytes
            for length in lengths
            for chunk in problem.layout.chunks
            if chunk.rank == rank
        )
        for rank in range(case.pp)
    }
    close(chunks)
    limit = int(share * max(kept.values()))
    items = batches(case, 50, lengths)
    wanted_losses, wanted = theirs(case, items, chunks)
    saved = Saved()
    with planned(planner=planning, activation_bytes=limit):
        measured(case, chunks, lengths)
        taken(chunks)
        with saved.counted():
            found_losses, found = ours(case, items, chunks)
        steps = steps_of(chunks)
        order = from_planner(steps, steps.planner and steps.planner._known[True, tuple(lengths)])
    close(chunks)
    return {
        "gradients": difference(found, wanted),
        "losses": losses_differ(found_losses, wanted_losses),
        "limit": limit,
        "most": saved.most,
        "kept": kept[dist.get_rank()],
        "strategies": [list(each) for each in order.strategies],
    }


def with_dropout(case: Case, lengths: Sequence[int]) -> dict[str, float]:
    """One order with dropout, from the same random state: all keep, and strategies that differ by microbatch."""
    from megatron.core.tensor_parallel import random as rng

    from pipeloom.integrations.megatron.core.forward_backward import close
    from pipeloom.integrations.steps.planning import Planning
    from pipeloom.timeline.schedule import Schedule, random_schedule

    set_up(case)
    chunks = chunks_of(case)
    items, first = batches(case, 0, lengths), True

    def order(graph: Any) -> Schedule:
        nonlocal first
        schedule = random_schedule(random.Random(5), graph)
        assert schedule.candidate is not None
        if first:
            schedule = Schedule(schedule.order, 0 * schedule.candidate)
        first = False
        return schedule

    results = []
    with planned(planner=Planning(order=order), activation_bytes=MUCH):
        measured(case, chunks, [length + 1 for length in lengths])
        taken(chunks)
        steps = steps_of(chunks)
        for _ in range(2):
            if steps.planner is not None:
                steps.planner._known.clear()
            torch.manual_seed(7)
            rng.get_cuda_rng_tracker().reset()
            results.append(ours(case, items, chunks))
    close(chunks)
    (losses, gradients), (again, found) = results
    return {"gradients": difference(found, gradients), "losses": losses_differ(again, losses)}
