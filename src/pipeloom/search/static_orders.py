"""GPipe, 1F1B and interleaved 1F1B, as Megatron-LM runs them.

They order what the layout gives and judge nothing: memory capacity and costs do not enter. Microbatches that
miss a stage keep their turn there, which removes tasks from a schedule that is free of deadlock and so leaves
it free of deadlock.
"""

from __future__ import annotations

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

    Rank r runs (p - r - 1) * 2 + (v - 1) * g forwards ahead. Stages go to the ranks in turn; where the
    layout skips a rank in its turn, an empty stage stands in, and where the last group has fewer microbatches than
    there are ranks (which Megatron refuses), empty ones fill it up to p.

    Parameters
    ----------
    group_size : int or None
        Microbatches that a stage takes in turn, at least p; None: p. Megatron's ``microbatch_group_size_per_vp_stage``.

    Raises
    ------
    InputError
        The graph has no labels, or groups are smaller than p.
    """
    orders = interleaved_orders(chain_of(graph), graph.num_ranks, group_size)
    return as_schedule(graph, orders, "interleaved 1f1b")


def group_sizes(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Group sizes that Megatron's interleaved schedule takes, rising.

    From the number of ranks up to that of microbatches; what is left over for a last group is nothing, or no less than
    the number of ranks.
    """
    sizes = range(num_ranks, num_microbatches + 1)
    return tuple(n for n in sizes if num_microbatches % n == 0 or num_microbatches % n >= num_ranks)


def check_group_size(
    entity: str, size: int, num_ranks: int, num_microbatches: int, remedy: str = "use more microbatches"
) -> None:
    """Raise `InputError` for a group size that Megatron's interleaved schedule rejects.

    ``remedy`` is what helps where no group size does.
    """
    sizes = group_sizes(num_ranks, num_microbatches)
    if size not in sizes:
        raise InputError(
            entity,
            f"{size} does not suit {num_microbatches} microbatches on {num_ranks} ranks",
            f"use {' or '.join(map(str, sizes[:3]))}" if sizes else remedy,
        )


def interleaved_as_megatron(graph: TaskGraph) -> Schedule:
    """Run `interleaved_one_f_one_b` with the smallest group size that Megatron takes.

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
    """Tasks per rank of the stages of a chain, interleaved."""
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
    """``ahead`` forwards, then forward and backward by turns, then the backwards that are left."""
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
