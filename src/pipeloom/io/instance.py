"""`pipeloom.instance/1`: reads and writes scheduling problems as `TaskGraph`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from pipeloom.bounds import Number, NumBytes, Seconds
from pipeloom.cost.layers import StrategyEntry
from pipeloom.errors import InputError, located
from pipeloom.io.document import (
    convert_format,
    dump,
    int_array,
    read_document,
    seconds,
    show,
    summed_sizes,
    summed_times_ns,
    time_ns,
)
from pipeloom.io.files import PathLike, printable, write_text
from pipeloom.taskgraph import (
    KIND_NAMES,
    NO_TASK,
    NS_PER_S,
    Candidate,
    Edges,
    IntArray,
    Pairs,
    TaskGraph,
    Tasks,
    check_candidates,
    make_graph,
)
from pipeloom.taskgraph.columns import check_length

FORMAT = "pipeloom.instance/1"


class _Tasks(msgspec.Struct, forbid_unknown_fields=True):
    kind: list[str]
    rank: list[Number]
    duration_s: list[Seconds]
    pair: list[Number]
    segment: list[NumBytes]
    microbatch: list[NumBytes]
    module: list[str]


class _Pairs(msgspec.Struct, forbid_unknown_fields=True):
    activation_bytes: list[NumBytes]
    weight_gradient_bytes: list[NumBytes] | None = None
    candidates: list[list[StrategyEntry]] | None = None


class _Edges(msgspec.Struct, forbid_unknown_fields=True):
    source: list[Number]
    target: list[Number]
    delay_s: list[Seconds]
    bytes: list[NumBytes] | None = None


class _Instance(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["pipeloom.instance/1"]
    name: str
    num_ranks: Number
    memory_static_bytes: list[NumBytes]
    tasks: _Tasks
    pairs: _Pairs
    edges: _Edges
    memory_capacity_bytes: list[NumBytes] | None = None
    host_capacity_bytes: list[NumBytes] | None = None
    host_staging_bytes: list[NumBytes] | None = None


def read_instance(path: PathLike) -> TaskGraph:
    """Read a scheduling problem.

    Parameters
    ----------
    path : path
        A ``pipeloom.instance/1``. A name that ends in ``.gz`` is decompressed.

    Raises
    ------
    InputError
        One line with the file, the path inside, the value and the bound, for example ``FILE: tasks.duration_s[17]: -0.2
        is negative``.
    """
    return instance_from_document(read_document(path), printable(str(path)))


def write_instance(path: PathLike, graph: TaskGraph) -> None:
    """Write a scheduling problem.

    Parameters
    ----------
    path : path
        A name that ends in ``.gz`` is compressed.
    graph : TaskGraph
        Labels of its layout are not part of the format.
    """
    write_text(path, dump(instance_document(graph)))


def instance_from_document(document: dict[str, Any], where: str = "instance") -> TaskGraph:
    """Build the task graph of a parsed document. Errors are those of `read_instance`."""
    data = convert_format(document, _Instance, FORMAT, where)
    with located(where):
        return _graph(data)


def _graph(data: _Instance) -> TaskGraph:
    tasks, pairs, edges = data.tasks, data.pairs, data.edges
    kinds = []
    for i, name in enumerate(tasks.kind):
        if name not in KIND_NAMES:
            raise InputError(f"tasks.kind[{i}]", f"{show(name)} is not one of F, B, I, W")
        kinds.append(KIND_NAMES.index(name))
    modules: dict[str, int] = {}
    module = [modules.setdefault(name, len(modules)) for name in tasks.module]
    if data.num_ranks != len(data.memory_static_bytes):
        problem = f"has {len(data.memory_static_bytes)} entries, num_ranks is {show(data.num_ranks)}"
        raise InputError("memory_static_bytes", problem)
    static = summed_sizes("memory_static_bytes", data.memory_static_bytes)
    capacity = data.memory_capacity_bytes
    graph = make_graph(
        name=data.name,
        num_ranks=data.num_ranks,
        tasks=Tasks(
            kind=kinds,
            rank=int_array(tasks.rank),
            duration_ns=summed_times_ns("tasks.duration_s", tasks.duration_s),
            pair=int_array(tasks.pair),
            pass_id=_close_numbers(int_array(tasks.segment)),
            microbatch=int_array(tasks.microbatch),
            module=module,
            module_names=tuple(modules),
        ),
        pairs=Pairs(
            activation_bytes=summed_sizes("pairs.activation_bytes", pairs.activation_bytes),
            weight_gradient_bytes=_sizes("pairs.weight_gradient_bytes", pairs.weight_gradient_bytes),
        ),
        edges=Edges(
            source=int_array(edges.source),
            target=int_array(edges.target),
            delay_ns=summed_times_ns("edges.delay_s", edges.delay_s),
            bytes=_sizes("edges.bytes", edges.bytes),
        ),
        static_bytes=static,
        capacity_bytes=None if capacity is None else int_array(capacity),
    )
    graph = replace(
        graph,
        host_capacity_bytes=_by_rank("host_capacity_bytes", data.host_capacity_bytes, data.num_ranks),
        staging_bytes=_by_rank("host_staging_bytes", data.host_staging_bytes, data.num_ranks),
    )
    return graph if pairs.candidates is None else replace(graph, candidates=_candidates(graph, pairs.candidates))


def _by_rank(path: str, values: list[int] | None, num_ranks: int) -> IntArray | None:
    if values is None:
        return None
    found = int_array(values)
    check_length(path, found, num_ranks)
    return found


def _sizes(path: str, values: list[int] | None) -> IntArray | None:
    return None if values is None else summed_sizes(path, values)


def _candidates(graph: TaskGraph, lists: list[list[StrategyEntry]]) -> tuple[tuple[Candidate, ...], ...]:
    if len(lists) != graph.num_pairs:
        raise InputError("pairs.candidates", f"has {len(lists)} lists, there are {graph.num_pairs} pairs")
    choices = []
    for pair, entries in enumerate(lists):
        path = f"pairs.candidates[{pair}]"
        if not entries:
            raise InputError(path, "is empty", "give at least the base strategy")
        form = pair_form(graph, pair)
        base, *others = (read_candidate(f"{path}[{i}]", entry, form) for i, entry in enumerate(entries))
        choices.append((_base(f"{path}[0]", graph, pair, base), *others))
    check_candidates(choices)
    return tuple(choices)


_ROUNDING_NS = 1
"""Largest difference between a duration and the same duration of the base candidate."""


def _base(path: str, graph: TaskGraph, pair: int, base: Candidate) -> Candidate:
    """Return the first candidate of a pair with the durations of its tasks.

    Raise `InputError` if a duration or size differs from that of the columns.
    """
    remedy = "the first entry repeats the values of the columns"
    split = graph.weight_of[pair] != NO_TASK
    exact: dict[str, Any] = {}
    for tasks, field, name in (
        (graph.forward_of, "forward_ns", "forward_s"),
        (graph.backward_of, "backward_ns", "backward_input_s" if split else "backward_s"),
        (graph.weight_of, "weight_ns", "backward_weight_s"),
    ):
        task, ours = int(tasks[pair]), getattr(base, field)
        if task == NO_TASK:
            continue
        exact[field] = int(graph.duration_ns[task])
        if abs(ours - exact[field]) > _ROUNDING_NS:
            problem = f"{ours / NS_PER_S:.12g} s, tasks.duration_s[{task}] is {exact[field] / NS_PER_S:.12g} s"
            raise InputError(f"{path}.{name}", problem, remedy)
    for name in ("activation_bytes", "weight_gradient_bytes") if split else ("activation_bytes",):
        stated, column = getattr(base, name), int(getattr(graph, name)[pair])
        if stated != column:
            raise InputError(f"{path}.{name}", f"{stated}, pairs.{name}[{pair}] is {column}", remedy)
    return base._replace(**exact)


Form = Literal["forward", "whole", "split"]
"""Backward tasks of a pair: none, one B, or an I and a W."""


def pair_form(graph: TaskGraph, pair: int) -> Form:
    """Return the form of one pair."""
    if graph.backward_of[pair] == NO_TASK:
        return "forward"
    return "whole" if graph.weight_of[pair] == NO_TASK else "split"


def read_candidate(path: str, entry: StrategyEntry, form: Form) -> Candidate:
    """Check one strategy against the form of its pair and round its times.

    Raise `InputError` if a duration that the form needs is missing, or one that it does not have is present.
    """
    if form == "split":
        for name in ("backward_input_s", "backward_weight_s"):
            if getattr(entry, name) is None:
                raise InputError(f"{path}.{name}", "is missing", "a pair with I and W needs both parts")
        if entry.backward_s is not None:
            raise InputError(f"{path}.backward_s", "is given for a pair with I and W", "give its two parts alone")
    else:
        for name in ("backward_input_s", "backward_weight_s"):
            if getattr(entry, name) is not None:
                raise InputError(f"{path}.{name}", "is given for a pair without I and W", "give backward_s alone")
        if form == "whole" and entry.backward_s is None:
            raise InputError(f"{path}.backward_s", "is missing", "a pair with a B needs it")
        if form == "forward" and entry.backward_s:
            raise InputError(f"{path}.backward_s", f"{entry.backward_s:g} for a pair without backward", "use null")
    backward = entry.backward_input_s if form == "split" else entry.backward_s
    activation, kept = entry.activation_bytes, entry.weight_gradient_bytes
    return Candidate(
        strategy=entry.strategy,
        forward_ns=time_ns(entry.forward_s),
        backward_ns=time_ns(backward or 0.0),
        weight_ns=time_ns(entry.backward_weight_s or 0.0),
        activation_bytes=activation,
        weight_gradient_bytes=activation if kept is None else kept,
        layers=tuple(entry.layers or ()),
        host_bytes=entry.host_bytes,
    )


def write_candidate(choice: Candidate, form: Form) -> dict[str, Any]:
    """Return one strategy as a JSON object without fields at their defaults."""
    entry: dict[str, Any] = {"strategy": choice.strategy, "forward_s": choice.forward_ns / NS_PER_S}
    if form == "split":
        entry["backward_input_s"] = choice.backward_ns / NS_PER_S
        entry["backward_weight_s"] = choice.weight_ns / NS_PER_S
    elif form == "whole":
        entry["backward_s"] = choice.backward_ns / NS_PER_S
    entry["activation_bytes"] = choice.activation_bytes
    if choice.weight_gradient_bytes != choice.activation_bytes:
        entry["weight_gradient_bytes"] = choice.weight_gradient_bytes
    if choice.layers:
        entry["layers"] = list(choice.layers)
    if choice.host_bytes:
        entry["host_bytes"] = choice.host_bytes
    return entry


def instance_document(graph: TaskGraph) -> dict[str, Any]:
    """Return the problem as a JSON document. Reading it gives an equal graph."""
    same = bool((graph.weight_gradient_bytes == graph.activation_bytes).all())
    choices, host, staging = graph.candidates, graph.host_capacity_bytes, graph.staging_bytes
    return {
        "format": FORMAT,
        "name": graph.name,
        "num_ranks": graph.num_ranks,
        "memory_capacity_bytes": None if graph.capacity_bytes is None else graph.capacity_bytes.tolist(),
        "memory_static_bytes": graph.static_bytes.tolist(),
        **({} if host is None else {"host_capacity_bytes": host.tolist()}),
        **({} if staging is None else {"host_staging_bytes": staging.tolist()}),
        "tasks": {
            "kind": [KIND_NAMES[k] for k in graph.kind.tolist()],
            "rank": graph.rank.tolist(),
            "duration_s": seconds(graph.duration_ns),
            "pair": graph.pair.tolist(),
            "segment": graph.pass_id.tolist(),
            "microbatch": graph.microbatch.tolist(),
            "module": [graph.module_names[m] for m in graph.module.tolist()],
        },
        "pairs": {
            "activation_bytes": graph.activation_bytes.tolist(),
            "weight_gradient_bytes": None if same else graph.weight_gradient_bytes.tolist(),
            "candidates": None
            if choices is None
            else [
                [write_candidate(choice, pair_form(graph, pair)) for choice in entries]
                for pair, entries in enumerate(choices)
            ],
        },
        "edges": {
            "source": graph.edge_source.tolist(),
            "target": graph.edge_target.tolist(),
            "delay_s": seconds(graph.edge_delay_ns),
            "bytes": graph.edge_bytes.tolist() if graph.edge_bytes.any() else None,
        },
    }


def _close_numbers(segment: IntArray) -> IntArray:
    """Renumber segments from 0 without large gaps, as kernels need. Numbers without such gaps stay."""
    if len(segment) == 0 or segment.max() < len(segment):
        return segment
    closed: IntArray = np.unique(segment, return_inverse=True)[1].astype(np.int64)
    return closed
