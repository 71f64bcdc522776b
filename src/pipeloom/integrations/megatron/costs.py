"""Emulate time and memory of Megatron's stages."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import msgspec

from pipeloom.emulator.build import Placement, joining_layer, layer_template, module_templates
from pipeloom.emulator.program import Part
from pipeloom.emulator.stage import Stage, StageCost, runs_of
from pipeloom.emulator.static import WEIGHT_BYTES, static_bytes, update_ps
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.integrations.megatron.model import Block, adapter_layers
from pipeloom.integrations.megatron.recomputing import Saving, layer_saving, operator_saving, traced_saving
from pipeloom.integrations.megatron.run import MegatronRun
from pipeloom.integrations.megatron.setup import SELECTIVE_OPERATORS, PipelineSettings, Recompute
from pipeloom.spec import Strategy, Workload
from pipeloom.spec.architecture import Architecture, Layer, ResidualLayer, TracedLayer, has_scan
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.trainer import TrainerSpec
from pipeloom.totals import PS_PER_S

PS_PER_NS = PS_PER_S // 1_000_000_000


class StageNumbers(NamedTuple):
    """Time and memory of one virtual stage for one microbatch.

    ``held_bytes`` are kept between forward and backward, ``workspace_bytes`` are needed beyond them during a pass. If
    the backward is split, ``backward_ns`` is the time of the input gradients, ``weight_ns`` that of the weight
    gradients, and ``weight_bytes`` are kept between them.
    """

    forward_ns: int
    backward_ns: int
    held_bytes: int
    workspace_bytes: int
    weight_ns: int = 0
    weight_bytes: int = 0


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
    placement: Placement | None = None
    """Where a decoder layer runs, and in which precision."""
    adapts: bool = False
    """Whether it is the adapter of a linear layer."""
    encodes: bool = False
    """Whether it belongs to the encoder, which has its own workload."""


class StageCosts:
    """Costs of the stages of a run on a cluster, cached by the parts of a stage.

    Notes
    -----
    Embedding and loss are never recomputed. With several ranks, the last stage has its own weights for the product with
    the vocabulary, even if they are tied to the embedding, which is on another rank. A multi-token prediction layer is
    an embedding, a projection of two hidden states to one (`joining_layer`) and a block. Its stage has a copy of the
    embedding's weights and sends the states of all prediction layers beside the hidden states. The stage of the loss
    multiplies all of them with the vocabulary (``GPTModel._postprocess`` of Megatron Core 0.16.1).

    If the vocabulary is spread over all ranks, each stage has a p-th of embedding and loss, as tensor parallelism over
    the pipeline's ranks would divide them. Low-rank adapters follow their block; their cost is that of a product to and
    from their rank, and all other weights are frozen.
    """

    def __init__(self, run: MegatronRun, cluster: ClusterSpec, trainer: TrainerSpec | None = None) -> None:
        self.run, self.cluster = run, cluster
        precision, model, trains = run.precision, run.model, not run.adapter_rank
        quantized = Placement(cluster, run.degrees, run.with_options(trainer or run.trainer))
        plain = self.placement = quantized.in_bf16
        self._embedding, own = self._ends(plain)
        # The stage of the loss, on another rank than the embedding or beside it.
        tied = _Part(layer_template(model.head, plain, trainable=trains))
        self._heads = own, tied

        @functools.cache
        def part(layer: Layer, block: Block | None = None, *, bf16: bool = False) -> _Part:
            placement = plain if bf16 else quantized
            return _Part(layer_template(layer, placement, trainable=trains), block, placement=placement)

        in_bf16 = [each == "bf16" for each in precision.of_layers(len(model.blocks))]
        self._joining = part(joining_layer(model.head.hidden, model.head.norm))
        self._blocks = [part(block.whole, block, bf16=each) for block, each in zip(model.blocks, in_bf16, strict=True)]
        self._encoder = [_Part(each, encodes=True) for each in _tower_templates(model.towers, plain, trains=trains)]
        if model.encoder:
            # It reads tokens, by the embedding of the decoder.
            encoder = [self._embedding, *(part(block.whole, block) for block in model.encoder)]
            self._encoder += [each._replace(encodes=True) for each in encoder]
        self._predictors = [part(block.whole, block) for block in model.predictors]
        self._known: dict[tuple[object, ...], StageNumbers] = {}
        self._ranks: dict[tuple[int, ...], RankNumbers] = {}
        self._savings: dict[tuple[int, tuple[str, ...]], Saving] = {}

    def on(self, microbatch: Workload) -> StageCosts:
        """Return the costs with other sequences in a microbatch."""
        other = copy.copy(self)
        other.run = replace(self.run, lengths=microbatch.lengths)
        other._known, other._savings = {}, {}
        return other

    def _ends(self, placement: Placement, multiple: int = 1) -> tuple[_Part, _Part]:
        """Return embedding and loss, with the vocabulary padded to a multiple."""
        model, trains = self.run.model, not self.run.adapter_rank
        words = -(-model.head.vocabulary // multiple) * multiple
        embedding = msgspec.structs.replace(model.embedding, vocabulary=words)
        head = msgspec.structs.replace(model.head, vocabulary=words, tied=False)
        return (
            _Part(layer_template(embedding, placement, trainable=trains, input_gradient=False)),
            _Part(layer_template(head, placement, trainable=trains)),
        )

    @functools.cached_property
    def _shares(self) -> tuple[_Part, _Part]:
        """One rank's part of embedding and loss, if the vocabulary is spread over the pipeline's ranks."""
        degrees = self.run.degrees
        number = degrees.tensor * degrees.pipeline
        wide = msgspec.structs.replace(degrees, tensor=number, pipeline=1, expert=1, sequence_parallel=False)
        return self._ends(replace(self.placement, degrees=wide), number)

    @functools.cache  # noqa: B019  as long-lived as the costs
    def _adapters(self, block: Block) -> tuple[_Part, ...]:
        """Return the adapters of a block's linear layers; none for experts."""
        if not self.run.adapter_rank:
            return ()
        layers = adapter_layers(block, self.run.adapter_rank)
        return tuple(_Part(layer_template(layer, self.placement), adapts=True) for layer in layers)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of hidden states sent from stage to stage, on one device."""
        return self._blocks[0].template.on(self.run.workload).output_bytes

    def sent_bytes(self, setup: PipelineSettings) -> tuple[int, ...]:
        """Return the bytes that each stage but the last sends, on one device, with the states of prediction layers."""
        counts = itertools.accumulate(stage.count("m") for stage in setup.stages[:-1])
        return tuple(self.boundary_bytes * (1 + count) for count in counts)

    def message_ns(self, num_bytes: int) -> int:
        """Return the nanoseconds to send a message over the slowest link of the pipeline."""
        return self.placement.send_ps(num_bytes, self.placement.slowest_pipeline_link) // PS_PER_NS

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        parts = (*self._encoder[len(self.run.model.encoder[:1]) :], *self._blocks, *self._predictors)
        blocks = sum(part.template.num_parameters for part in parts)
        joining = len(self._predictors) * self._joining.template.num_parameters
        head = layer_template(self.run.model.head, self.placement).num_parameters
        return self._embedding.template.num_parameters + blocks + joining + head

    def model_flops(self) -> float:
        """Return the FLOPs of matrix products for one microbatch on one device, without recomputation."""
        work = self.run.workload
        parts = [*self._blocks, self._heads[0]]
        for part in self._predictors:
            parts += [part, self._joining]
        encoding = self.run.encoder_workload
        encoder = sum(part.template.on(encoding).model_flops for part in self._encoder)
        return 3 * (encoder + sum(part.template.on(work).model_flops for part in parts))

    def of(self, setup: PipelineSettings) -> tuple[StageNumbers, ...]:
        with self._sizes_named():
            split = setup.splits_backward
            found = tuple(self._stage(parts, setup.recompute, split=split) for parts in self._parts(setup))
            return tuple(map(self._freed_early, found)) if setup.spreads_vocabulary else found

    def _freed_early(self, stage: StageNumbers) -> StageNumbers:
        """Return a stage whose part of the loss is held until its own backward alone, not until the layers' one."""
        held = sum(part.template.on(self.run.workload).activation_bytes["keep"] for part in self._shares)
        return stage._replace(held_bytes=stage.held_bytes - held, workspace_bytes=stage.workspace_bytes + held)

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
        blocks, same_embedding = iter(self._blocks), self._embedding._replace(shares=True)
        out = []
        for letters in setup.stages:
            parts: list[_Part] = list(self._shares) if setup.spreads_vocabulary else []
            for letter in letters:
                if letter in "EL" and setup.spreads_vocabulary:
                    continue
                if letter == "E":
                    parts += [*self._encoder, same_embedding if self.run.model.encoder else self._embedding]
                elif letter == "t":
                    part = next(blocks)
                    assert part.block is not None
                    parts += [part, *self._adapters(part.block)]
                elif letter == "m":
                    embedding = same_embedding if self._embedding in parts else self._embedding
                    parts += [embedding, self._joining, self._predictors[0]]
                else:
                    parts.append(self._heads[setup.num_ranks == 1])
            out.append(parts)
        return out

    def _stage(self, parts: Sequence[_Part], recompute: Recompute, *, split: bool) -> StageNumbers:
        if not parts:
            return StageNumbers(0, 0, 0, 0)
        again = recompute.recomputed(sum(part.block is not None for part in parts))
        predicts = sum(part is self._joining for part in parts)
        if recompute.method == "block":
            # Megatron recomputes no multi-token prediction by blocks.
            again = min(again, sum(part.block is not None for part in parts) - predicts)
        key = (tuple((id(part.template), part.encodes) for part in parts), again, recompute.modules, split)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._numbers(parts, again, recompute.modules, split=split)
        return known

    def _numbers(self, parts: Sequence[_Part], again: int, modules: tuple[str, ...], *, split: bool) -> StageNumbers:
        strategies: list[Strategy] = []
        saving, most = Saving(), 0
        inside, of_adapters = False, 0
        launched = relaunched = 0.0
        for part in parts:
            launches = self._host_ps(part)
            launched += launches
            recomputed = part.block is not None and again > 0
            strategies.append("recompute" if recomputed else "keep")
            again -= recomputed
            relaunched += launches / 3 * recomputed
            # Adapters follow their block. If it runs again, so do they, and do not hold their inputs until then.
            inside = recomputed or (inside and part.adapts)
            of_adapters = of_adapters if inside and part.adapts else 0
            if inside and part.adapts:
                one = self._whole(part)
                saving, of_adapters = saving.and_(one), of_adapters + one.bytes
                most = max(most, of_adapters)
            if part.block is not None and modules:
                one = self._saving(part, modules)
                saving, most = saving.and_(one), max(most, one.bytes)
                relaunched += one.launches * self.placement.trainer.launch_s * PS_PER_S
        cost, workspace = self._cost(parts, strategies, ("F", "I", "W") if split else ("F", "B"))
        forward, backward = cost.duration_ps["F"], cost.duration_ps.get("I" if split else "B", 0) + saving.more_ps
        host = round(launched)
        late = host // 3 if split else 0
        return StageNumbers(
            max(forward, host // 3) // PS_PER_NS,
            max(backward, host - host // 3 - late + round(relaunched)) // PS_PER_NS,
            cost.activation_bytes - saving.bytes,
            # Recomputed activations are in memory while one layer's backward runs.
            workspace + most,
            max(cost.duration_ps.get("W", 0), late) // PS_PER_NS,
            cost.weight_gradient_bytes if split else 0,
        )

    def _workload(self, *, encodes: bool) -> Workload:
        return self.run.encoder_workload if encodes else self.run.workload

    def _cost(
        self, parts: Sequence[_Part], strategies: Sequence[Strategy], passes: Sequence[Part]
    ) -> tuple[StageCost, int]:
        """Return the cost of the layers of a stage, and the workspace of its largest pass."""
        times: Counter[Part] = Counter()
        held = late = workspace = 0
        for encodes in {part.encodes for part in parts}:
            pairs = [(p.template, s) for p, s in zip(parts, strategies, strict=True) if p.encodes == encodes]
            stage, work = Stage(runs_of(*zip(*pairs, strict=True))), self._workload(encodes=encodes)
            cost = stage.cost(work, passes)
            times.update(cost.duration_ps)
            held, late = held + cost.activation_bytes, late + cost.weight_gradient_bytes
            workspace = max(workspace, stage.peak_bytes(work))
        return StageCost(dict(times), held, late, 0), workspace

    def _buffer_bytes(self, templates: Sequence[LayerTemplate]) -> int:
        """Return the bytes that libraries keep on a rank: for products, and in the place of weights' gradients."""
        trainer = self.placement.trainer
        if not templates:
            return 0
        if not trainer.gradient_buffers:
            return trainer.library_bytes
        shapes = {shape for template in templates for shape in template.products}
        return trainer.library_bytes + WEIGHT_BYTES * sum(rows * columns for rows, columns in shapes)

    def _host_ps(self, part: _Part) -> float:
        """Return the picoseconds in which the host launches forward and backward of a part."""
        trainer = self.placement.trainer
        if part.block is None:
            return 0.0 if part.adapts else trainer.host_s(self.run.model.head) * PS_PER_S
        whole = part.block.whole
        seconds = trainer.host_s(whole, self.run.degrees.expert)
        if trainer.scan_loops and isinstance(whole, TracedLayer) and has_scan(whole):
            seconds += trainer.loops_host_s(self.run.seq_length // self.run.degrees.context)
        return seconds * PS_PER_S

    def saving(self, block: Block, modules: tuple[str, ...]) -> Saving:
        """Return the cost and the saved memory of recomputing modules of a block, in the precision of most blocks."""
        alike = [part for part in (*self._blocks, *self._encoder, *self._predictors) if part.block == block]
        return self._saving(alike[len(alike) // 2], modules)

    def _saving(self, part: _Part, modules: tuple[str, ...]) -> Saving:
        key = (id(part.template), modules)
        if key not in self._savings:
            assert part.block is not None
            workload = self._workload(encodes=part.encodes)
            attention, feed_forward = (
                self._half(part, half) for half in (part.block.attention, part.block.feed_forward)
            )
            if SELECTIVE_OPERATORS in modules:
                self._savings[key] = operator_saving(part.block, attention, feed_forward, workload)
            elif isinstance(part.block.whole, ResidualLayer):
                self._savings[key] = layer_saving(attention, feed_forward, modules, workload)
            else:
                self._savings[key] = traced_saving(part.template, modules, workload)
        return self._savings[key]

    def _whole(self, part: _Part) -> Saving:
        """Return the cost and the saved memory of recomputing a layer whole."""
        workload = self._workload(encodes=part.encodes)
        forward = Stage(runs_of([part.template], "keep")).cost(workload, ("F",))
        return Saving(forward.duration_ps["F"], part.template.on(workload).activation_bytes["keep"])

    def _half(self, part: _Part, half: ResidualLayer | None) -> LayerTemplate | None:
        assert part.placement is not None
        return None if half is None else layer_template(half, part.placement, trainable=part.template.trainable)

    def of_ranks(self, setup: PipelineSettings) -> tuple[RankNumbers, ...]:
        mine: list[list[LayerTemplate]] = [[] for _ in range(setup.num_ranks)]
        for rank, parts in zip(setup.ranks, self._parts(setup), strict=True):
            mine[rank] += [part.template for part in parts if not part.shares]
        with self._sizes_named():
            return tuple(map(self._rank, mine))

    def _rank(self, templates: Sequence[LayerTemplate]) -> RankNumbers:
        key = tuple(map(id, templates))
        if key not in self._ranks:
            host = self.placement.trainer.host_optimizer
            static = static_bytes(templates, self.run.degrees, host_optimizer=host) + self._buffer_bytes(templates)
            self._ranks[key] = RankNumbers(static, update_ps(templates, self.placement) // PS_PER_NS)
        return self._ranks[key]


def _tower_templates(towers: Architecture | None, placement: Placement, *, trains: bool) -> tuple[LayerTemplate, ...]:
    """Return the layers of the modules before the language model, which run on its first stage."""
    if towers is None:
        return ()
    if not trains:
        frozen = tuple(msgspec.structs.replace(each, frozen=True) for each in towers.modules)
        towers = msgspec.structs.replace(towers, modules=frozen)
    return tuple(each for module in towers.modules[:-1] for each in module_templates(towers, module, placement))
