"""GPipe, 1F1B and interleaved 1F1B, as Megatron-LM runs them.

The orders depend only on the layout, not on costs or memory capacity. A microbatch without tasks in a stage keeps its
turn there. This only removes tasks from a deadlock-free schedule, so the result is deadlock-free.
"""

from __future__ import annotations

import numpy as np

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search.stage_chain import Chain, as_schedule, chain_of
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule

Unit = tuple[int, int]
"""A stage and a microbatch."""


def gpipe(graph: TaskGraph) -> Schedule:
    """Run all forwards, then all backwards, on every rank stage by stage and microbatch by microbatch.

    Raises
    ------
    InputError
        The graph has no labels.
    """
    chain = chain_of(graph)
    order = []
    for rank in range(graph.num_ranks):
        stages = chain.stages_of(rank)
        forwards = [(stage, m) for stage in stages for m in range(chain.num_microbatches)]
        backwards = [(stage, m) for stage in reversed(stages) for m in range(chain.num_microbatches)]
        order.append(_tasks(chain, forwards, backwards, len(forwards)))
    return as_schedule(graph, order, "gpipe")


def one_f_one_b(graph: TaskGraph) -> Schedule:
    """Run stage s of p ahead by p - s - 1 forwards, then alternate one forward and one backward.

    Raises
    ------
    InputError
        The graph has no labels, or a rank has more than one stage.
    """
    chain = chain_of(graph)
    num_stages = len(chain.rank_of_stage)
    order: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    for stage, rank in enumerate(chain.rank_of_stage):
        if order[rank]:
            count = len(chain.stages_of(rank))
            raise InputError(
                "layout",
                f"rank {rank} has {count} stages, 1F1B takes one",
                "put consecutive layers on each rank, or use interleaved 1F1B",
            )
        units = [(stage, m) for m in range(chain.num_microbatches)]
        order[rank] = _tasks(chain, units, units, num_stages - stage - 1)
    return as_schedule(graph, order, "1f1b")


def interleaved_one_f_one_b(graph: TaskGraph, group_size: int | None = None) -> Schedule:
    """Run v stages on each of p ranks, taking microbatches in groups of g.

    Rank r runs (p - r - 1) * 2 + (v - 1) * g forwards ahead. Ranks take stages in turn. If the layout skips the turn of
    a rank, an empty stage takes it. If the last group has fewer than p microbatches, which Megatron rejects, empty
    microbatches fill it up to p.

    Parameters
    ----------
    group_size : int or None
        Number of consecutive microbatches that a stage takes, at least p. None: p. Megatron calls it
        ``microbatch_group_size_per_vp_stage``.

    Raises
    ------
    InputError
        The graph has no labels, or groups are smaller than p.
    """
    orders = interleaved_orders(chain_of(graph), graph.num_ranks, group_size)
    return as_schedule(graph, orders, "interleaved 1f1b")


def group_sizes(num_ranks: int, num_microbatches: int, *others: int) -> tuple[int, ...]:
    """Return the group sizes that Megatron's interleaved schedule accepts, in increasing order.

    A group size is between the number of ranks and the number of microbatches. The last group may be smaller than the
    others, but not smaller than the number of ranks. A size must suit ``others``, further numbers of microbatches, too.
    """
    counts = (num_microbatches, *others)
    sizes = np.arange(num_ranks, min(counts) + 1)
    for count in counts:
        rest = count % sizes
        sizes = sizes[(rest == 0) | (rest >= num_ranks)]
    return tuple(sizes.tolist())


def check_group_size(
    entity: str, size: int, num_ranks: int, num_microbatches: int, remedy: str = "use more microbatches"
) -> None:
    """Raise `InputError` for a group size that Megatron's interleaved schedule rejects.

    ``remedy`` is used in the message if no group size is valid.
    """
    sizes = group_sizes(num_ranks, num_microbatches)
    if size not in sizes:
        raise InputError(
            entity,
            f"{size} does not suit {num_microbatches} microbatches on {num_ranks} ranks",
            f"use {' or '.join(map(str, sizes[:3]))}" if sizes else remedy,
        )


def interleaved_as_megatron(graph: TaskGraph) -> Schedule:
    """Run `interleaved_one_f_one_b` with the smallest group size that Megatron accepts.

    Raises
    ------
    InputError
        The graph has no labels.
    InfeasibleError
        There are fewer microbatches than ranks, which Megatron rejects.
    """
    count = chain_of(graph).num_microbatches
    sizes = group_sizes(graph.num_ranks, count)
    if not sizes:
        raise InfeasibleError(f"Megatron interleaves no {count} microbatches on {graph.num_ranks} ranks")
    return interleaved_one_f_one_b(graph, sizes[0])


def interleaved_orders(chain: Chain, num_ranks: int, group_size: int | None = None) -> list[list[int]]:
    """Return the tasks of every rank in interleaved order."""
    size = num_ranks if group_size is None else group_size
    if size < num_ranks:
        raise InputError("group_size", f"{size} is below {num_ranks} ranks", "use at least as many")
    column: list[int | None] = []
    for stage, rank in enumerate(chain.rank_of_stage):
        column += [None] * ((rank - len(column)) % num_ranks)
        column.append(stage)
    column += [None] * (-len(column) % num_ranks)
    depth = len(column) // num_ranks
    groups = [
        range(first, max(min(first + size, chain.num_microbatches), first + num_ranks))
        for first in range(0, chain.num_microbatches, size)
    ]
    order = []
    for rank in range(num_ranks):
        mine = column[rank::num_ranks]
        forwards, backwards = (
            [
                (stage if stage is not None else -1, microbatch)
                for group in groups
                for stage in stages
                for microbatch in group
            ]
            for stages in (mine, mine[::-1])
        )
        ahead = (num_ranks - rank - 1) * 2 + (depth - 1) * size
        order.append(_tasks(chain, forwards, backwards, ahead))
    return order


def _tasks(chain: Chain, forwards: list[Unit], backwards: list[Unit], ahead: int) -> list[int]:
    """Return ``ahead`` forwards, then alternate forwards and backwards, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    tasks: list[int] = []
    for unit in forwards[:ahead]:
        tasks += chain.forward.get(unit, [])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        tasks += chain.forward.get(forward, [])
        tasks += chain.backward.get(backward, [])
    for unit in backwards[len(forwards) - ahead :]:
        tasks += chain.backward.get(unit, [])
    return tasks
