"""Emulate time and memory of Megatron's stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from pipeloom.emulator.build import Placement, joining_layer, layer_template
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.static import WEIGHT_BYTES, static_bytes, update_ps
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.integrations.megatron.model import Block
from pipeloom.integrations.megatron.recomputing import Saving, layer_saving
from pipeloom.integrations.megatron.run import MegatronRun
from pipeloom.integrations.megatron.setup import PipelineSettings, Recompute
from pipeloom.spec import Strategy
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.trainer import MEGATRON_KERNELS, TrainerSpec
from pipeloom.totals import PS_PER_S

PS_PER_NS = PS_PER_S // 1_000_000_000


class StageNumbers(NamedTuple):
    """Time and memory of one virtual stage for one microbatch.

    ``held_bytes`` are kept between forward and backward, ``workspace_bytes`` are needed beyond them during a pass.
    """

    forward_ns: int
    backward_ns: int
    held_bytes: int
    workspace_bytes: int


class RankNumbers(NamedTuple):
    """Static memory of a rank (weights, gradients, optimizer state, buffers of libraries), and time of the update.

    The update reduces gradients over the replicas, updates weights, and gathers them if they are sharded.
    """

    static_bytes: int
    update_ns: int


class _Part(NamedTuple):
    """A layer of a stage; ``block`` is None unless it is a decoder layer."""

    template: LayerTemplate
    block: Block | None = None
    shares: bool = False
    """Whether it shares the weights of another layer of the stage."""


class StageCosts:
    """Costs of the stages of a run on a cluster, cached by the parts of a stage.

    Notes
    -----
    Embedding and loss are never recomputed. With several ranks, the last stage has its own weights for the product with
    the vocabulary, even if they are tied to the embedding, which is on another rank. A multi-token prediction layer is
    an embedding, a projection of two hidden states to one (`joining_layer`) and a block. Its stage has a copy of the
    embedding's weights and sends the states of all prediction layers beside the hidden states. The stage of the loss
    multiplies all of them with the vocabulary (``GPTModel._postprocess`` of Megatron Core 0.16.1).
    """

    def __init__(self, run: MegatronRun, cluster: ClusterSpec, trainer: TrainerSpec = MEGATRON_KERNELS) -> None:
        self.run, self.cluster = run, cluster
        self.placement = Placement(cluster, run.degrees, msgspec.structs.replace(trainer, dropout=run.dropout))
        model = run.model
        own = msgspec.structs.replace(model.head, tied=False)
        embedding = layer_template(model.embedding, self.placement, input_gradient=False)
        self._embedding, self._same_embedding = _Part(embedding), _Part(embedding, shares=True)
        # The stage of the loss, beside the embedding or on another rank.
        self._heads = tuple(_Part(layer_template(head, self.placement)) for head in (own, model.head))
        self._joining = _Part(layer_template(joining_layer(model.head.hidden, model.head.norm), self.placement))
        self._blocks = [_Part(layer_template(block.whole, self.placement), block) for block in model.blocks]
        self._predictors = [_Part(layer_template(block.whole, self.placement), block) for block in model.predictors]
        self._known: dict[tuple[object, ...], StageNumbers] = {}
        self._ranks: dict[tuple[int, ...], RankNumbers] = {}
        self._savings: dict[tuple[Block, tuple[str, ...]], Saving] = {}

    @property
    def boundary_bytes(self) -> int:
        """Bytes of hidden states sent from stage to stage, on one device."""
        return self._blocks[0].template.on(self.run.workload).output_bytes

    def sent_bytes(self, setup: PipelineSettings) -> tuple[int, ...]:
        """Return the bytes that each stage but the last sends, on one device, with the states of prediction layers."""
        counts = itertools.accumulate(stage.count("m") for stage in setup.stages[:-1])
        return tuple(self.boundary_bytes * (1 + count) for count in counts)

    @property
    def delay_ns(self) -> int:
        """Nanoseconds to send hidden states."""
        return self.message_ns(self.boundary_bytes)

    def message_ns(self, num_bytes: int) -> int:
        """Return the nanoseconds to send a message over the slowest link of the pipeline."""
        return self.placement.send_ps(num_bytes, self.placement.slowest_pipeline_link) // PS_PER_NS

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        blocks = sum(part.template.num_parameters for part in (*self._blocks, *self._predictors))
        joining = len(self._predictors) * self._joining.template.num_parameters
        head = layer_template(self.run.model.head, self.placement).num_parameters
        return self._embedding.template.num_parameters + blocks + joining + head

    def model_flops(self) -> float:
        """Return the FLOPs of matrix products for one microbatch on one device, without recomputation."""
        work = self.run.workload
        parts = [*self._blocks, self._heads[0]]
        for part in self._predictors:
            parts += [part, self._joining]
        return 3 * sum(part.template.on(work).model_flops for part in parts)

    def of(self, setup: PipelineSettings) -> tuple[StageNumbers, ...]:
        """Return the numbers of every stage."""
        with self._sizes_named():
            return tuple(self._stage(parts, setup.recompute) for parts in self._parts(setup))

    @contextmanager
    def _sizes_named(self) -> Iterator[None]:
        """Name the run's sizes in an error about times or bytes that are too large."""
        run = self.run
        try:
            yield
        except InputError as error:
            sizes = (
                f"hidden size {run.model.head.hidden}, sequences of {run.seq_length}, {run.micro_batch_size} at once"
            )
            problem = f"together too large ({sizes}): {error.entity} {error.problem}"
            raise InputError(f"{run.source}: sizes", problem, "lower the largest of them") from error

    def _parts(self, setup: PipelineSettings) -> list[list[_Part]]:
        blocks = iter(self._blocks)
        out = []
        for letters in setup.stages:
            parts: list[_Part] = []
            for letter in letters:
                if letter == "E":
                    parts.append(self._embedding)
                elif letter == "t":
                    parts.append(next(blocks))
                elif letter == "m":
                    embedding = self._same_embedding if self._embedding in parts else self._embedding
                    parts += [embedding, self._joining, self._predictors[0]]
                else:
                    parts.append(self._heads[setup.num_ranks == 1])
            out.append(parts)
        return out

    def _stage(self, parts: Sequence[_Part], recompute: Recompute) -> StageNumbers:
        if not parts:
            return StageNumbers(0, 0, 0, 0)
        again = recompute.recomputed(sum(part.block is not None for part in parts))
        predicts = sum(part is self._joining for part in parts)
        if recompute.method == "block":
            # Megatron recomputes no multi-token prediction by blocks.
            again = min(again, sum(part.block is not None for part in parts) - predicts)
        key = (tuple(id(part.template) for part in parts), again, recompute.modules)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._numbers(parts, again, recompute.modules)
        return known

    def _numbers(self, parts: Sequence[_Part], again: int, modules: tuple[str, ...]) -> StageNumbers:
        strategies: list[Strategy] = []
        saving, most = Saving(), 0
        for part in parts:
            recomputed = part.block is not None and again > 0
            strategies.append("recompute" if recomputed else "keep")
            again -= recomputed
            if part.block is not None and modules:
                one = self.saving(part.block, modules)
                saving, most = saving.and_(one), max(most, one.bytes)
        work = self.run.workload
        stage = Stage(runs_of([part.template for part in parts], strategies))
        cost = stage.cost(work, ("F", "B"))
        forward, backward = cost.duration_ps["F"], cost.duration_ps.get("B", 0) + saving.more_ps
        host = self._host_ps(parts)
        return StageNumbers(
            max(forward, host // 3) // PS_PER_NS,
            max(backward, host - host // 3) // PS_PER_NS,
            cost.activation_bytes - saving.bytes,
            # Recomputed activations are in memory while one layer's backward runs.
            stage.peak_bytes(work) + most,
        )

    def _buffer_bytes(self, templates: Sequence[LayerTemplate]) -> int:
        """Return the bytes that libraries keep on a rank: for products, and in the place of weights' gradients."""
        trainer = self.placement.trainer
        if not templates:
            return 0
        if not trainer.gradient_buffers:
            return trainer.library_bytes
        shapes = {shape for template in templates for shape in template.products}
        return trainer.library_bytes + WEIGHT_BYTES * sum(rows * columns for rows, columns in shapes)

    def _host_ps(self, parts: Sequence[_Part]) -> int:
        """Return the picoseconds in which the host launches forward and backward of a stage."""
        trainer = self.placement.trainer
        routed = sum(part.block is not None and part.block.routed for part in parts)
        dense = len(parts) - routed
        return round((trainer.layer_host_s * dense + trainer.expert_layer_host_s * routed) * PS_PER_S)

    def saving(self, block: Block, modules: tuple[str, ...]) -> Saving:
        """Return the cost and the saved memory of recomputing modules of a block."""
        key = (block, modules)
        if key not in self._savings:
            attention, feed_forward = (
                layer_template(half, self.placement) for half in (block.attention, block.feed_forward)
            )
            self._savings[key] = layer_saving(attention, feed_forward, modules, self.run.workload)
        return self._savings[key]

    def of_ranks(self, setup: PipelineSettings) -> tuple[RankNumbers, ...]:
        """Return the numbers of every rank."""
        mine: list[list[LayerTemplate]] = [[] for _ in range(setup.num_ranks)]
        for i, parts in enumerate(self._parts(setup)):
            mine[i % setup.num_ranks] += [part.template for part in parts if not part.shares]
        with self._sizes_named():
            return tuple(map(self._rank, mine))

    def _rank(self, templates: Sequence[LayerTemplate]) -> RankNumbers:
        key = tuple(map(id, templates))
        if key not in self._ranks:
            static = static_bytes(templates, self.run.degrees) + self._buffer_bytes(templates)
            self._ranks[key] = RankNumbers(static, update_ps(templates, self.placement) // PS_PER_NS)
        return self._ranks[key]
