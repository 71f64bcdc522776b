"""PyTorch's schedule files: cells like ``2F0``, ``0I1``, ``3SEND_F1``, one row per rank.

They express only one chain of stages, whole microbatches, one shape, and kept activations. Stage numbers are chunk
numbers. PyTorch names a receive by the stage that receives, whereas plans name it by the chunk that sends.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

import numpy as np

from pipeloom.errors import InputError
from pipeloom.plan.action import Action, ExecutionPlan, Verb
from pipeloom.spec import Layout
from pipeloom.taskgraph import KIND_NAMES, NO_TASK, TaskGraph
from pipeloom.timeline import Schedule

_CELL = re.compile(r"(\d+)(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)
_STAGE_OF_MESSAGE = {Verb.SEND_F: 0, Verb.RECV_F: 1, Verb.SEND_B: 1, Verb.RECV_B: 0}
"""Number of PyTorch's stage minus the number of the producing chunk."""


def to_pytorch_csv(plan: ExecutionPlan, layout: Layout, *, communication: bool = False) -> str:
    """Write a plan as PyTorch's ``compute_only`` or, with ``communication``, ``compute_comms`` schedule.

    Raises
    ------
    InputError
        PyTorch's runtime cannot run the plan. Its modules must form a chain, and none may be frozen or replicated. The
        plan may not have sub-microbatches, activations that are not kept, or microbatches that overtake each other.
    """
    _check_chain(layout)
    number_of = {name: i for i, name in enumerate(layout.chunk_names)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, actions in enumerate(plan.ranks):
        cells = []
        last_forward = -1
        for step, action in enumerate(actions):
            where = f"plan, rank {rank}, step {step}"
            if action.sub_microbatch:
                raise InputError(where, "is on a sub-microbatch", "PyTorch has none")
            if action.strategy not in ("", "keep") or action.verb.is_memory:
                raise InputError(where, "does not keep its activations", "PyTorch keeps them")
            if action.verb == "F" and number_of[action.chunk] == len(layout.chunks) - 1:
                if action.microbatch < last_forward:
                    problem = f"microbatch {action.microbatch} reaches the last chunk after {last_forward}"
                    raise InputError(where, problem, "PyTorch takes losses in order")
                last_forward = action.microbatch
            cell = _cell(action, number_of, communication)
            if cell:
                cells.append(cell)
        writer.writerow(cells)
    return text.getvalue()


def schedule_from_pytorch_csv(text: str, graph: TaskGraph) -> Schedule:
    """Read PyTorch's schedule for a graph whose chunks are PyTorch's stages.

    Communication in the file is ignored, since lowering adds it. Empty cells are bubbles. If the graph's backwards are
    split, a whole backward in the file becomes I and W.

    Raises
    ------
    InputError
        A cell is not an action, or a task is unknown, on another rank, repeated or missing. The message has the row and
        column.
    """
    if graph.labels is None:
        raise InputError("graph.labels", "is null", "give a graph that was built from a layout")
    task_of = _tasks_by_name(graph)
    seen: set[int] = set()
    orders: list[list[int]] = []
    for row, cells in enumerate(csv.reader(io.StringIO(text))):
        order = []
        for column, cell in enumerate(cells):
            where = f"row {row + 1}, column {column + 1}"
            for name in _in_parts(_compute_of(cell.strip(), where), task_of):
                task = task_of.get(name)
                if task is None:
                    raise InputError(where, f"{cell.strip()!r} is no task of the graph", _remedy(name, task_of))
                if int(graph.rank[task]) != row:
                    raise InputError(where, f"{cell.strip()!r} is on rank {graph.rank[task]} in the graph")
                if task in seen:
                    raise InputError(where, f"{cell.strip()!r} comes twice")
                seen.add(task)
                order.append(task)
        orders.append(order)
    if len(orders) != graph.num_ranks:
        raise InputError("schedule", f"has {len(orders)} rows, the graph {graph.num_ranks} ranks")
    missing = next((name for name, task in task_of.items() if task not in seen), None)
    if missing is not None:
        raise InputError("schedule", f"'{missing[0]}{missing[1]}{missing[2]}' is missing")
    return Schedule(tuple(np.array(order, dtype=np.int64) for order in orders), method="pytorch csv")


_Name = tuple[int, str, int]
"""Stage, verb, microbatch."""


def _check_chain(layout: Layout) -> None:
    for before, module in zip((None, *layout.modules), layout.modules, strict=False):
        if module.after != (() if before is None else (before.name,)):
            raise InputError(
                f"module {module.name!r}.after", "is not the previous module", "PyTorch connects a chain only"
            )
        if module.emits or module.takes:
            raise InputError(f"module {module.name!r}", "has streams", "a PyTorch stage passes on only one tensor")
        if module.on_ranks == "replicated":
            raise InputError(f"module {module.name!r}", "is replicated", "a PyTorch schedule has each stage once")
        if not layout.has_backward(module.name):
            raise InputError(f"module {module.name!r}", "has no backward", "PyTorch runs one for every stage")


def _cell(action: Action, number_of: dict[str, int], communication: bool) -> str:
    if action.verb.is_compute:
        return f"{number_of[action.chunk]}{action.verb}{action.microbatch}"
    if not communication:
        return ""
    if action.verb in _STAGE_OF_MESSAGE:
        return f"{number_of[action.chunk] + _STAGE_OF_MESSAGE[action.verb]}{action.verb}{action.microbatch}"
    return f"{number_of[action.chunk]}{action.verb}" if action.verb.is_chunk else ""


def _compute_of(cell: str, where: str) -> Iterator[_Name]:
    """Yield the computations of one cell: none, one, or two overlapped ones."""
    if not cell:
        return
    overlapped = _OVERLAPPED.fullmatch(cell)
    for part in overlapped.group(1).split(";") if overlapped else (cell,):
        found = _CELL.fullmatch(part.strip())
        if found is None or (found.group(2) in KIND_NAMES and not found.group(3)):
            raise InputError(where, f"{cell!r} is not an action of PyTorch", "write for example 2F0 or 3SEND_F1")
        stage, verb, microbatch = found.groups()
        if verb in KIND_NAMES:
            yield int(stage), verb, int(microbatch)


def _in_parts(names: Iterator[_Name], known: dict[_Name, int]) -> Iterator[_Name]:
    """Replace a whole backward by I and W if the graph splits it (DualPipeV has both kinds)."""
    for stage, verb, microbatch in names:
        if verb == "B" and (stage, "I", microbatch) in known:
            yield stage, "I", microbatch
            yield stage, "W", microbatch
        else:
            yield stage, verb, microbatch


def _tasks_by_name(graph: TaskGraph) -> dict[_Name, int]:
    names: dict[_Name, int] = {}
    for pair, label in enumerate(graph.labels or ()):
        if label.sub_microbatch:
            raise InputError(f"pair {pair}", "is a sub-microbatch", "PyTorch's schedules have whole microbatches")
        for task in (graph.forward_of[pair], graph.backward_of[pair], graph.weight_of[pair]):
            if task != NO_TASK:
                names[label.chunk, KIND_NAMES[graph.kind[task]], label.microbatch] = int(task)
    return names


def _remedy(name: _Name, known: dict[_Name, int]) -> str:
    stage, verb, microbatch = name
    if verb in ("I", "W") and (stage, "B", microbatch) in known:
        return "build the graph with split backwards"
    return "stages are chunk numbers, microbatches count from 0"
