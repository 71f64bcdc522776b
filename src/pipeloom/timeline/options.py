"""Candidates of all pairs as arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.taskgraph.candidates import candidate_cube

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Options:
    """Costs of every pair by candidate, padded by repeating the first; shape (num_pairs, most candidates)."""

    forward_ns: IntArray
    backward_ns: IntArray
    weight_ns: IntArray
    activation_bytes: IntArray
    weight_gradient_bytes: IntArray
    host_bytes: IntArray

    def only(self, column: IntArray) -> Options:
        """The same with every candidate replaced by a copy of the one that ``column``, of the same shape, names."""
        return Options(*(np.take_along_axis(getattr(self, field.name), column, axis=1) for field in fields(self)))


def pair_options(graph: TaskGraph) -> Options:
    """Candidates of all pairs as arrays; one column with the graph's own costs where it has none."""
    if graph.candidates is None:
        backward = np.where(graph.backward_of == NO_TASK, 0, graph.duration_ns[graph.backward_of])
        weight = np.where(graph.weight_of == NO_TASK, 0, graph.duration_ns[graph.weight_of])
        columns = (
            graph.duration_ns[graph.forward_of],
            backward,
            weight,
            graph.activation_bytes,
            graph.weight_gradient_bytes,
            np.zeros(graph.num_pairs, np.int64),
        )
        return Options(*(column[:, None] for column in columns))
    cube, _ = candidate_cube(graph.candidates)
    forward, backward, weight, activation, gradient, host = (cube[:, :, i] for i in range(6))
    backward = np.where((graph.backward_of == NO_TASK)[:, None], 0, backward)
    weight = np.where((graph.weight_of == NO_TASK)[:, None], 0, weight)
    return Options(forward, backward, weight, activation, gradient, host)


def least_held(graph: TaskGraph, options: Options) -> IntArray:
    """Bytes that a pair holds for some time under each candidate, in whatever order; shape as the options'.

    What is held from one moment to the same one does not count, as what a task without duration holds may be.
    """
    trained, split = (graph.backward_of != NO_TASK)[:, None], (graph.weight_of != NO_TASK)[:, None]
    lasts = (options.forward_ns > 0) | (trained & (options.backward_ns > 0))
    activation = np.where(lasts, options.activation_bytes, 0)
    return np.maximum(activation, np.where(split & (options.weight_ns > 0), options.weight_gradient_bytes, 0))


def off_host(graph: TaskGraph, options: Options) -> BoolArray:
    """Candidates that fit whatever other pairs hold on the host, shape as the options'.

    All where the host has no limit and nothing is staged; else those that hold nothing there, or all of a pair that has
    none of these.
    """
    free: BoolArray = options.host_bytes == 0
    return free | (not graph.limits_offload) | ~free.any(axis=1, keepdims=True)


def keeping_off_host(options: Options) -> Options:
    """The same, with candidates that hold something on the host replaced by a copy of one that does not.

    A pair that has none of these keeps all.
    """
    return options.only(first_of(options.host_bytes == 0))


def without_too_large(graph: TaskGraph, options: Options) -> Options:
    """The same, with candidates that alone exceed their rank's room replaced by a copy of one that does not.

    A pair of which none fits keeps all; it has no schedule anyway.
    """
    if graph.most_room_bytes is None:
        return options
    room = graph.most_room_bytes[graph.rank[graph.forward_of]]
    return options.only(first_of(least_held(graph, options) <= room[:, None]))


def first_of(fits: BoolArray) -> IntArray:
    """Per pair and candidate its own number where it fits; else that of the pair's first that does, if there is one."""
    column: IntArray = np.where(fits, np.arange(fits.shape[1]), fits.argmax(axis=1)[:, None])
    column[~fits.any(axis=1)] = np.arange(fits.shape[1])
    return column
