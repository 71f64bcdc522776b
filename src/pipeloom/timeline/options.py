"""Candidates of all pairs as arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from pipeloom.taskgraph import NO_TASK, BoolArray, IntArray, TaskGraph
from pipeloom.taskgraph.candidates import candidate_cube


@dataclass(frozen=True, slots=True)
class Options:
    """Costs of every pair by candidate, each of shape (num_pairs, most candidates), padded with the first candidate."""

    forward_ns: IntArray
    backward_ns: IntArray
    weight_ns: IntArray
    activation_bytes: IntArray
    weight_gradient_bytes: IntArray
    host_bytes: IntArray

    @property
    def total_ns(self) -> IntArray:
        """Time of all tasks of each pair by candidate."""
        return self.forward_ns + self.backward_ns + self.weight_ns

    def only(self, column: IntArray) -> Options:
        """Return the same with each candidate replaced by the one at index ``column``, of the same shape."""
        return Options(*(np.take_along_axis(getattr(self, field.name), column, axis=1) for field in fields(self)))


def pair_options(graph: TaskGraph) -> Options:
    """Return the candidates of all pairs as arrays; one column with the graph's own costs if it has none."""
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
    """Return the bytes that each candidate holds for some time, in any order; the shape is that of the options.

    Bytes of tasks without duration do not count, since they may be held for no time.
    """
    split = (graph.weight_of != NO_TASK)[:, None]
    activation = np.where(_lasts(graph, options), options.activation_bytes, 0)
    return np.maximum(activation, np.where(split & (options.weight_ns > 0), options.weight_gradient_bytes, 0))


def _lasts(graph: TaskGraph, options: Options) -> BoolArray:
    """Return under which candidates some time passes between the start of F and the end of B or I."""
    trained = (graph.backward_of != NO_TASK)[:, None]
    lasts: BoolArray = (options.forward_ns > 0) | (trained & (options.backward_ns > 0))
    return lasts


def fits_alone(graph: TaskGraph, options: Options, home: IntArray | None = None) -> BoolArray:
    """Return which candidates fit into device and host memory alone; the shape is that of the options.

    Other candidates are in no feasible schedule. ``home`` has the rank of every pair, by default that of the graph.
    """
    home = graph.rank[graph.forward_of] if home is None else home
    fits: BoolArray = np.ones(options.host_bytes.shape, np.bool_)
    if graph.most_headroom_bytes is not None:
        free_bytes = graph.most_headroom_bytes[home][:, None]
        if graph.staging_bytes is not None:
            free_bytes = free_bytes - np.where(options.host_bytes > 0, graph.staging_bytes[home][:, None], 0)
        fits &= least_held(graph, options) <= free_bytes
    if graph.host_capacity_bytes is not None:
        held = np.where(_lasts(graph, options), options.host_bytes, 0)
        fits &= held <= graph.host_capacity_bytes[home][:, None]
    return fits


def usable(graph: TaskGraph, options: Options) -> BoolArray:
    """Return which candidates fit alone, or all candidates of a pair if none fits."""
    fits = fits_alone(graph, options)
    return fits | ~fits.any(axis=1, keepdims=True)


def off_host(graph: TaskGraph, options: Options) -> BoolArray:
    """Return the preferred candidates: the usable ones, without host bytes if offloading is limited.

    The shape is that of the options. If all usable candidates of a pair hold host bytes, it keeps all of them.
    """
    fits = usable(graph, options)
    if not graph.limits_offload:
        return fits
    free = fits & (options.host_bytes == 0)
    return np.where(free.any(axis=1, keepdims=True), free, fits)


def without_host_bytes(options: Options) -> Options:
    """Return the same with candidates that hold host bytes replaced by one that does not, if the pair has one."""
    return options.only(first_of(options.host_bytes == 0))


def without_oversized(graph: TaskGraph, options: Options) -> Options:
    """Return the same with candidates that do not fit alone replaced by one that does, if the pair has one."""
    if graph.most_headroom_bytes is None and graph.host_capacity_bytes is None:
        return options
    return options.only(first_of(fits_alone(graph, options)))


def first_of(fits: BoolArray) -> IntArray:
    """Return each candidate's own index if it fits, else the index of the pair's first that fits, if any."""
    column: IntArray = np.where(fits, np.arange(fits.shape[1]), fits.argmax(axis=1)[:, None])
    column[~fits.any(axis=1)] = np.arange(fits.shape[1])
    return column
