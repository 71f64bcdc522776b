"""Simulate one iteration of a run with a setup, in Megatron's own order of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.integrations.megatron.costs import StageCosts, StageNumbers
from pipeloom.integrations.megatron.run import MegatronRun
from pipeloom.integrations.megatron.setup import PipelineSettings
from pipeloom.iteration import TimedIteration
from pipeloom.layout.cooptimize import LayerChain, PartitionPlacement, graph_of
from pipeloom.search import interleaved_one_f_one_b, one_f_one_b, zero_bubble_in_flight
from pipeloom.spec import Workload
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.trainer import TrainerSpec
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, simulate
from pipeloom.units import to_four_digits


@dataclass(frozen=True, eq=False)
class TimedSetup(TimedIteration):
    """A setup and its simulated iteration. Times are emulated."""

    setup: PipelineSettings

    @property
    def preference(self) -> tuple[float, tuple[int, int], float]:
        """Key that sorts setups by time. Setups equally fast to four digits are sorted by recomputation."""
        return to_four_digits(self.iteration_s), self.setup.recomputed, self.iteration_s


class Timing:
    """Times setups of one run on one cluster. Setups with the same number of stages share graphs and orders.

    Raises
    ------
    InputError
        The cluster has fewer devices than the run needs, or tensor parallelism does not divide a width.
    """

    def __init__(self, run: MegatronRun, cluster: ClusterSpec, trainer: TrainerSpec | None = None) -> None:
        self.run, self.cluster, self.trainer = run, cluster, trainer or run.trainer
        self.costs = StageCosts(run, cluster, self.trainer)
        self.evaluations = 0
        self._graphs: dict[tuple[object, ...], TaskGraph] = {}
        self._orders: dict[tuple[int, int], Schedule] = {}
        self._on = {run.workload: self.costs}

    def of(self, setup: PipelineSettings) -> TimedSetup:
        """Time one setup."""
        numbers = self.costs.of(setup)
        columns = np.array(numbers, np.int64).T[..., None]
        shape = (*columns.shape[:2], self.run.num_microbatches)
        return self._timed(setup, numbers, np.broadcast_to(columns, shape))

    def of_step(self, setup: PipelineSettings, microbatches: Sequence[Workload]) -> TimedSetup:
        """Time one setup on the microbatches of a step, which may differ."""
        each = [self._costs_on(work).of(setup) for work in microbatches]
        return self._timed(setup, self.costs.of(setup), np.array(each, np.int64).transpose(2, 1, 0))

    def _timed(self, setup: PipelineSettings, usual: Sequence[StageNumbers], columns: IntArray) -> TimedSetup:
        """Time a setup by the numbers of its stages: ``usual`` ones, and ``columns`` by field, stage and microbatch."""
        self.evaluations += 1
        forward, backward, held, _, weight, late = columns
        passes = [forward, backward, weight] if setup.splits_backward else [forward, backward]
        ranks = self.costs.of_ranks(setup)
        graph = replace(
            self._graph(setup),
            duration_ns=np.concatenate(passes).ravel(),
            # Copies, so that a graph does not keep the other columns.
            activation_bytes=held.flatten(),
            weight_gradient_bytes=(late if setup.splits_backward else held).flatten(),
            static_bytes=np.array([rank.static_bytes for rank in ranks], np.int64),
        )
        schedule = self._order(setup, graph)
        return TimedSetup(
            graph,
            schedule,
            simulate(graph, schedule),
            update_ns=np.array([rank.update_ns for rank in ranks], np.int64),
            other_bytes=self._other_bytes(setup, usual),
            capacity_bytes=self.cluster.device.usable_bytes,
            setup=setup,
        )

    def _costs_on(self, microbatch: Workload) -> StageCosts:
        if microbatch not in self._on:
            self._on[microbatch] = self.costs.on(microbatch)
        return self._on[microbatch]

    def mfu(self, timed: TimedSetup) -> float:
        """Return the share of the devices' peak FLOP/s that the model's matrix products use."""
        available = self.run.degrees.pipeline * self.cluster.device.flops_per_s * timed.iteration_s
        return self.costs.model_flops() * self.run.num_microbatches / available

    def tokens_per_s(self, timed: TimedSetup) -> float:
        """Return the tokens per second of all replicas."""
        return self.run.global_batch_size * self.run.seq_length / timed.iteration_s

    def _graph(self, setup: PipelineSettings) -> TaskGraph:
        """Return the tasks of a setup and what they wait for, without their times and memory."""
        count, sent = len(setup.stages), self.costs.sent_bytes(setup)
        key = (sent, setup.ranks, setup.splits_backward)
        if key not in self._graphs:
            column = np.zeros((count, 1), np.int64)
            chain = LayerChain(
                name="megatron",
                layer_names=tuple(setup.stages),
                num_ranks=setup.num_ranks,
                num_microbatches=self.run.num_microbatches,
                delay_ns=0,
                forward_ns=column,
                backward_ns=column,
                weight_ns=column + setup.splits_backward,
                activation_bytes=column,
                gradient_bytes=column,
                static_bytes=column[:, 0],
                strategies=(("keep",),) * count,
            )
            placement = PartitionPlacement(tuple(range(count + 1)), setup.ranks)
            self._graphs[key] = graph_of(chain, placement, delays_ns=[*map(self.costs.message_ns, sent)])
        return self._graphs[key]

    def _order(self, setup: PipelineSettings, graph: TaskGraph) -> Schedule:
        if setup.splits_backward:
            # The published schedules are the fastest of a search over when weight gradients fill gaps.
            orders = [zero_bubble_in_flight(graph, setup.in_flight, waits=waits) for waits in (False, True)]
            return min(orders, key=lambda order: simulate(graph, order).makespan_ns)
        key = (len(setup.stages), setup.group_size if setup.virtual > 1 else 0)
        if key not in self._orders:
            interleaved = setup.virtual > 1
            made = interleaved_one_f_one_b(graph, setup.group_size) if interleaved else one_f_one_b(graph)
            self._orders[key] = made
        return self._orders[key]

    def _other_bytes(self, setup: PipelineSettings, numbers: Sequence[StageNumbers]) -> IntArray:
        """Return the bytes of every rank beside held activations: its largest pass, and messages.

        The gradient that a rank has sent stays until it has the next one. With virtual stages, the next input and the
        next gradient are received ahead. If groups are larger than the number of ranks, the first rank receives outputs
        of the last rank before it needs them, and the last rank gradients of the first.
        """
        plain, sent = self.costs.boundary_bytes, self.costs.sent_bytes(setup)
        workspace, buffers = (np.zeros(setup.num_ranks, np.int64) for _ in range(2))
        np.maximum.at(workspace, list(setup.ranks), [n.workspace_bytes for n in numbers])
        np.maximum.at(buffers, list(setup.ranks), (0, *sent))
        other_bytes = workspace + buffers
        for rank, stage in zip(setup.ranks, numbers, strict=True):
            other_bytes[rank] += setup.extra_microbatches(rank) * stage.held_bytes
        if setup.virtual > 1:
            other_bytes += 2 * plain
            if not setup.splits_backward:
                other_bytes[[0, -1]] += (setup.group_size - setup.num_ranks) * plain
        return other_bytes
