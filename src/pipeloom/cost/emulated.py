"""Costs from the emulator: any chunk of a described model, on hardware that need not be present."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import cast

import msgspec

from pipeloom.cost.correction import Correction
from pipeloom.cost.emulated_chunks import ChunkShape, ChunkStages, keep
from pipeloom.cost.emulated_mixtures import ParetoSteps, layer_options, staging_bytes
from pipeloom.cost.mixtures import BACKWARD, HELD, LayerOption, Mixtures, mix, pareto_steps
from pipeloom.cost.model import StrategyCost
from pipeloom.emulator.build import Placement, layer_template, single_layer, stream_template
from pipeloom.emulator.program import Part
from pipeloom.emulator.stage import StageCost
from pipeloom.emulator.static import static_bytes, update_ps
from pipeloom.emulator.tape import NVLINK
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec import (
    STRATEGIES,
    TRAITS,
    Chunk,
    ChunkStrategy,
    EmittedStream,
    LayerSpec,
    Layout,
    ModelSpec,
    ModuleSpec,
    RankSpec,
    Strategy,
    TensorShape,
    Workload,
    chunk_strategy,
)
from pipeloom.spec.architecture import Architecture, Layer, PredictionLayer, ResidualLayer, TracedLayer, is_traced_block
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.hardware import ClusterSpec, HostLink
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.trainer import FUSED, HOST_SHARE, TrainerSpec
from pipeloom.totals import PS_PER_S


class _Links:
    """Messages over the two kinds of links between pipeline ranks: 0 is the slowest between neighbors, 1 NVLink."""

    def __init__(self, placement: Placement) -> None:
        self.slowest = placement.slowest_pipeline_link
        self._placement = placement
        self._known: OrderedDict[tuple[int, int], float] = OrderedDict()

    def transfer_s(self, num_bytes: int, link: int) -> float:
        """Return the seconds of a message, cached."""
        known = self._known.get((num_bytes, link))
        if known is None:
            seconds = self._placement.send_ps(num_bytes, NVLINK if link else self.slowest) / PS_PER_S
            known = keep(self._known, (num_bytes, link), seconds)
        return known


class EmulatedCosts:
    """`CostModel` that emulates each operator.

    Parameters
    ----------
    architecture : Architecture or zoo name
    cluster : ClusterSpec or zoo name
    degrees : Degrees
        Tensor, context, expert and data parallelism of one pipeline, and its ranks.
    strategies : sequence of ChunkStrategy or their texts
        Candidates of every chunk, the base first.
    split : bool
        Whether to compute costs of split backwards (I and W). Without them, computing costs takes half the time.
    pareto_steps : ParetoSteps, optional
        Number of mixtures to offer instead of ``strategies``. In a mixture, each layer of a chunk has its own strategy
        (`pipeloom.cost.mixtures`). ``keep`` is always the first.
    trainer : TrainerSpec
        The framework that runs the model: what its operators take and keep. The zoo's ``pipeloom`` keeps what layers of
        a library keep in eager PyTorch.

    Notes
    -----
    Tensor-parallel peers are one rank here, so bytes are those of one device. A chunk's durations are those on idle
    devices, until every device is idle again, and at least the host's time to launch the chunk's layers. The backward
    launches recomputed operators too; a split one launches them with the input gradients.
    """

    def __init__(
        self,
        architecture: Architecture | str,
        cluster: ClusterSpec | str,
        degrees: Degrees,
        strategies: Sequence[ChunkStrategy | str] = STRATEGIES,
        *,
        split: bool = True,
        pareto_steps: ParetoSteps | None = None,
        trainer: TrainerSpec = FUSED,
    ) -> None:
        self.architecture = load_architecture(architecture) if isinstance(architecture, str) else architecture
        self.cluster = load_cluster(cluster) if isinstance(cluster, str) else cluster
        self.placement = Placement(self.cluster, degrees, trainer)
        if not strategies:
            raise InputError("strategies", "is empty", "give at least the base")
        self.strategies = tuple(map(chunk_strategy, strategies))
        self.split_backward, self.pareto_steps = split, pareto_steps
        self._chunks = ChunkStages(self.architecture, self.placement)
        self._streams = {
            layer.emits: stream_template(layer, self.placement, joined=joined)
            for module in self.architecture.modules
            for layer, joined in zip(module.flat_layers, module.joins, strict=True)
            if isinstance(layer, ResidualLayer | TracedLayer) and layer.emits is not None
        }
        self._host = {
            module.name: tuple(trainer.host_s(layer, degrees.expert) for layer in module.flat_layers)
            for module in self.architecture.modules
        }
        self._links = _Links(self.placement)
        self._options: OrderedDict[tuple[int, Workload], tuple[LayerOption, ...]] = OrderedDict()
        self._known: OrderedDict[tuple[ChunkShape, Workload], tuple[StrategyCost, ...]] = OrderedDict()

    @property
    def factors(self) -> Mapping[str, tuple[float, float]]:
        """No factors, because emulated costs have no corrections."""
        return {}

    @property
    def slowness(self) -> tuple[float, ...]:
        """No slowness, because emulated costs have no corrections."""
        return ()

    @property
    def num_tensor(self) -> int:
        """Number of devices that share a layer."""
        return self.placement.degrees.tensor

    @functools.cached_property
    def undivided(self) -> EmulatedCosts:
        """The same costs of whole layers on one device, experts included."""
        alone = msgspec.structs.replace(self.placement.degrees, tensor=1, expert=1)
        return type(self)(
            self.architecture,
            self.cluster,
            alone,
            self.strategies,
            split=self.split_backward,
            pareto_steps=self.pareto_steps,
            trainer=self.placement.trainer,
        )

    def uncorrected(self) -> EmulatedCosts:
        """Return these costs, because emulated costs have no corrections."""
        return self

    def corrected(self, correction: Correction) -> EmulatedCosts:
        """Raise `InputError` for a correction: only measured costs are corrected."""
        if correction != Correction():
            raise InputError("correction", "does not apply to emulated costs", "recalibrate the device table instead")
        return self

    def whole_backwards(self) -> EmulatedCosts:
        """Return the same costs without split backwards."""
        if not self.split_backward:
            return self
        whole = copy(self)
        whole.split_backward, whole._known = False, OrderedDict()
        whole.__dict__.pop("undivided", None)
        return whole

    def with_strategies(self, strategies: Sequence[ChunkStrategy | str]) -> EmulatedCosts:
        """Return the same costs with other strategies for every chunk."""
        other = copy(self)
        other.strategies, other.pareto_steps = tuple(map(chunk_strategy, strategies)), None
        other._known = OrderedDict()
        other.__dict__.pop("undivided", None)
        return other

    @property
    def _parts(self) -> tuple[Part, ...]:
        return ("F", "B", "I", "W") if self.split_backward else ("F", "B")

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return the costs of a chunk on a workload, one per strategy, the base first.

        The results are cached for all chunks with equal layers.
        """
        key = (self._chunks.shape(chunk), workload)
        known = self._known.get(key)
        if known is None:
            made = self._mixtures(chunk, workload) if self.pareto_steps else self._settings(chunk, workload)
            known = keep(self._known, key, made)
        return known

    def _settings(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return the costs under each strategy. Copies to and from the host are part of the chunk's passes."""
        found = []
        for strategy in self.strategies:
            stage = self._chunks.stage(chunk, strategy)
            layers = tuple(run.strategy for run in stage.runs for _ in range(run.count))
            found.append(_cost(str(strategy), layers, stage.cost(workload, self._parts), self._host_s(chunk, layers)))
        return tuple(found)

    def _host_s(self, chunk: Chunk, strategies: Sequence[Strategy]) -> dict[str, float]:
        """Return the seconds in which the host launches each pass of a chunk, under a strategy for each layer."""
        first, last = chunk.layers
        every = self._host[chunk.module][first : last + 1]
        if not any(every):
            return dict.fromkeys(HOST_SHARE, 0.0)
        again, launch_s = 0.0, self.placement.trainer.launch_s
        for host, layer, strategy in zip(every, self._chunks.layers(chunk), strategies, strict=True):
            # Full recomputation calls the layer, so operators whose results no gradient reads run too.
            whole = TRAITS[strategy].recomputes == "all"
            again += host * HOST_SHARE["F"] if whole else layer.passes[strategy].num_recomputed * launch_s
        seconds = {part: sum(every) * share for part, share in HOST_SHARE.items()}
        return {**seconds, "B": seconds["B"] + again, "I": seconds["I"] + again}

    def _mixtures(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return the costs of the offered mixtures: those of ``keep``, and the time that each layer's strategy adds."""
        assert self.pareto_steps is not None
        found = mix([self._layer_options(layer, workload) for layer in self._chunks.layers(chunk)])
        keep = self._chunks.stage(chunk).cost(workload, self._parts)
        rows = self._offered(found)
        distinct = list(dict.fromkeys(rows))
        amounts = found.amounts[distinct, BACKWARD:].tolist()
        known = {}
        for row, each in zip(distinct, amounts, strict=True):
            layers = cast(tuple[Strategy, ...], found.layers(row))
            known[row] = _mixture(keep, found, layers, each, self._host_s(chunk, layers))
        return tuple(known[row] for row in rows)

    def _offered(self, found: Mixtures) -> list[int]:
        """Return the mixtures that a chunk is offered, with ``keep`` first."""
        assert self.pareto_steps is not None
        return pareto_steps(found, *self.pareto_steps)

    def _layer_options(self, layer: LayerTemplate, workload: Workload) -> tuple[LayerOption, ...]:
        key = (id(layer), workload)
        if key not in self._options:
            keep(self._options, key, layer_options(layer, workload))
        return self._options[key]

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the bytes of the chunk's output on one device."""
        return self._chunks.layers(chunk)[-1].on(workload).output_bytes

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        """Return the bytes on one device of a stream whose emitting layer has this workload."""
        return self._streams[stream].on(workload).output_bytes

    def link_between(self, first: int, second: int) -> int:
        """Return the number of the link between two ranks: 0 is the slowest between neighbors, 1 is inside a node."""
        return int(self.placement.pipeline_link(first, second) != self._links.slowest)

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Return the seconds of a message over a link between pipeline ranks."""
        return self._links.transfer_s(num_bytes, link)

    def static_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of the chunk's weights, gradients and optimizer state on one device."""
        return self.static_bytes_together([chunk])

    def static_bytes_together(self, chunks: Sequence[Chunk]) -> int:
        """Return the bytes of weights, gradients and optimizer state of all chunks of one rank on one device.

        With ZeRO-3, the layers of all chunks share the two layers that are whole.
        """
        layers = [layer for chunk in chunks for layer in self._chunks.layers(chunk)]
        return static_bytes(layers, self.placement.degrees, host_optimizer=self.placement.trainer.host_optimizer)

    def update_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds at a rank's end of an iteration: gradients are reduced, weights updated and gathered."""
        layers = [layer for chunk in chunks for layer in self._chunks.layers(chunk)]
        return update_ps(layers, self.placement) / PS_PER_S

    def held_messages(self, layout: Layout) -> int:
        """Return the number of messages that a rank of a layout holds beside its activations."""
        return self.placement.trainer.held_messages if layout.num_ranks > 1 else 0

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the peak bytes of a pass beyond inputs, outputs and held tensors, without offloading."""
        return self._chunks.workspace_bytes(chunk, workload, self._without_offload or self.strategies)

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the additional peak bytes under any strategy, with staging buffers for copies to and from the host."""
        if not self._without_offload:
            return 0
        every = self._chunks.workspace_bytes(chunk, workload, self.strategies)
        more = every - self.workspace_bytes(chunk, workload)
        moving = self.pareto_steps is not None and self.pareto_steps.offloading > 0
        return more + (staging_bytes(self._chunks.layers(chunk), workload) if moving else 0)

    @property
    def _without_offload(self) -> tuple[ChunkStrategy, ...]:
        """Strategies that do not offload."""
        return tuple(s for s in self.strategies if not any(TRAITS[each].offloads for each in (s.first, s.others)))

    def chunk_flops(self, chunk: Chunk, workload: Workload) -> float:
        """Return the forward's matrix operations on all tensor- and context-parallel devices together."""
        peers = self.placement.degrees.tensor * self.placement.degrees.context
        return self._chunks.stage(chunk).model_flops(workload) * peers

    @property
    def capacity_bytes(self) -> int:
        """Bytes that tensors can use on one device, beside what the trainer's libraries keep."""
        return self.cluster.device.usable_bytes - self.placement.trainer.library_bytes

    @property
    def rank(self) -> RankSpec:
        """The planner's view of the cluster."""
        slowest, inside = (self.placement.devices[link] for link in (self._links.slowest, NVLINK))
        span, node = self.placement.rank_span, self.cluster.devices_per_node
        hosts: tuple[int, ...] = ()
        if self._links.slowest != NVLINK and node % span == 0 and inside.network_bytes_per_s:
            hosts = tuple(rank * span // node for rank in range(self.placement.degrees.pipeline))
        return RankSpec(
            name=self.cluster.name,
            memory_capacity_bytes=self.capacity_bytes,
            host_capacity_bytes=self.cluster.offload_bytes,
            link_bytes_per_s=slowest.network_bytes_per_s,
            link_latency_s=slowest.latency_s,
            hosts=hosts,
            links=tuple(
                HostLink((host, host), inside.network_bytes_per_s, inside.latency_s) for host in sorted(set(hosts))
            ),
        )

    @functools.cached_property
    def model_spec(self) -> ModelSpec:
        """The planner's view of the model. Shapes are those of whole activations."""
        modules = []
        alone = Placement(self.cluster, Degrees())
        for module in self.architecture.modules:
            layers: list[LayerSpec] = []
            names: dict[tuple[Layer, int], str] = {}
            flat, joins, place = module.flat_layers, module.joins, 0
            for layer in module.layers:
                single, count = single_layer(layer)
                whole = layer_template(single, alone, joined=joins[place])
                kind = names.setdefault((single, joins[place]), _kind(single, len(layers), names.values()))
                layers.append(LayerSpec(kind, _shape(whole), count, whole.num_parameters))
                place += count
            emits = tuple(
                EmittedStream(end.stream, end.layer, _stream_shape(flat[end.layer], alone, joins[end.layer]))
                for end in module.emits
            )
            modules.append(
                ModuleSpec(module.name, module.reads, tuple(layers), module.after, module.frozen, emits, module.takes)
            )
        return ModelSpec(self.architecture.name, tuple(modules))


def _mixture(
    keep: StageCost, found: Mixtures, layers: tuple[Strategy, ...], amounts: list[float], host_s: Mapping[str, float]
) -> StrategyCost:
    """Return the cost of one mixture from the cost of the chunk under ``keep``. ``amounts`` has no forward time."""
    backward, held, host, copy_out, copy_in = amounts
    again = round(backward - found.base[BACKWARD])
    # Copies are on separate lanes. The forward's computation does not depend on what it keeps. Tensors are
    # recomputed with the input gradients, so in the second half of a split backward all exist.
    duration = dict(keep.duration_ps)
    duration["F"] = max(duration["F"], round(copy_out))
    for part in ("B", "I"):
        if part in duration:
            duration[part] = max(duration[part] + again, round(copy_in))
    # The input of a chunk is held also if no operator saves it.
    entering = keep.activation_bytes - found.base[HELD]
    cost = StageCost(duration, round(held + entering), keep.weight_gradient_bytes, round(host))
    return _cost(layers[0] if len(set(layers)) == 1 else "mixed", layers, cost, host_s)


def _cost(strategy: str, layers: tuple[Strategy, ...], cost: StageCost, host_s: Mapping[str, float]) -> StrategyCost:
    seconds = {part: max(ps / PS_PER_S, host_s[part]) for part, ps in cost.duration_ps.items()}
    split = "I" in seconds
    return StrategyCost(
        strategy=strategy,
        forward_s=seconds["F"],
        backward_s=seconds.get("B", 0.0),
        activation_bytes=cost.activation_bytes,
        backward_input_s=seconds["I"] if split else None,
        backward_weight_s=seconds["W"] if split else None,
        weight_gradient_bytes=cost.weight_gradient_bytes if split else None,
        layers=layers,
        host_bytes=cost.host_bytes,
    )


def _kind(layer: Layer, number: int, taken: Collection[str]) -> str:
    """Return the name of a layer's kind. Blocks are numbered, since a module may have several kinds of them."""
    plain = (
        "block"
        if isinstance(layer, ResidualLayer | PredictionLayer) or is_traced_block(layer)
        else type(layer).__name__.removesuffix("Layer").lower()
    )
    return f"{plain}{number}" if plain == "block" or plain in taken else plain


def _stream_shape(layer: Layer, placement: Placement, joined: int) -> TensorShape:
    assert isinstance(layer, ResidualLayer | TracedLayer)
    stream = stream_template(layer, placement, joined=joined)
    joined *= round(1 / stream.output_rows.tokens)
    return TensorShape(("tokens" if joined == 1 else f"tokens/{joined}", int(stream.output_width)), "bfloat16")


def _shape(layer: LayerTemplate) -> TensorShape:
    """Return the output as tokens x width. If rows are a part of the tokens (merged patches), the width is too."""
    share = layer.output_rows.tokens / layer.joined
    width = round(layer.output_width * share) if share else int(layer.output_width)
    return TensorShape(("tokens" if share else "instances", max(1, width)), "bfloat16")
