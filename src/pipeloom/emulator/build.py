"""Build traced templates from an architecture's layers and a cluster's hardware."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pipeloom.emulator import modules
from pipeloom.emulator.rules import Device, RuleTable
from pipeloom.emulator.tape import DEVICE_NAMES, NIC, NVLINK, Context, Group, Tape
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec.architecture import (
    AdapterLayer,
    Architecture,
    JoinStep,
    LanguageHeadLayer,
    Layer,
    LinearStep,
    Mixer,
    MLPMixer,
    ModuleArchitecture,
    Norm,
    PredictionLayer,
    ProjectorLayer,
    ResidualLayer,
    Step,
    TracedLayer,
    is_traced_block,
)
from pipeloom.spec.hardware import ClusterSpec, DevicePart, DeviceSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.precision import quantization
from pipeloom.spec.traced import ProductOperator
from pipeloom.spec.trainer import FUSED, TrainerSpec

_MODULES: dict[type, Callable[..., modules.Module]] = {
    module.__base__: module
    for module in (getattr(modules, name) for name in modules.__all__)
    if hasattr(module, "__struct_fields__")
}
"""Module of each part of an architecture, whose class it inherits."""


def mixer_module(mixer: Mixer, hidden: int) -> modules.Module:
    """Return the module of a mixer."""
    return _MODULES[type(mixer)](hidden=hidden, **msgspec.structs.asdict(mixer))


def _steps_module(hidden: int, steps: Sequence[Step]) -> modules.Module:
    """Return the module of an adapter's steps."""
    parts: list[modules.Module] = []
    width = hidden
    for step in steps:
        if isinstance(step, LinearStep):
            parts.append(modules.Linear(width, step.out_width, step.bias))
            width = step.out_width
        else:
            parts.append(_MODULES[type(step)](**msgspec.structs.asdict(step)))
        if isinstance(step, JoinStep):
            width *= step.factor
    return modules.Sequential(tuple(parts))


def _residual_module(layer: ResidualLayer) -> modules.Module:
    parts: list[modules.Module] = []
    for mixer in layer.mixers:
        inner = mixer_module(mixer, layer.hidden)
        if layer.post_norm:
            inner = modules.Sequential((inner, modules.Norm(layer.norm)))
        if layer.scaled:
            inner = modules.Scaled(inner)
        if layer.modulated:
            parts.append(modules.Modulated(inner, layer.norm, layer.modulation_projection))
        else:
            parts.append(modules.Residual(inner, layer.norm))
    return _with_streams(modules.Sequential(tuple(parts)), layer, _steps_module(layer.hidden, layer.tap))


def _with_streams(module: modules.Module, layer: ResidualLayer | TracedLayer, tap: modules.Module) -> modules.Module:
    """Return a layer's module with the ends of its streams. Its features pass ``tap`` before they are emitted."""
    whole = module if layer.takes is None else modules.Taking(module)
    return whole if layer.emits is None else modules.Emitting(whole, tap)


def joining_layer(hidden: int, norm: Norm) -> ResidualLayer:
    """Return the layer that joins two hidden states: two half-width products have the same weights and operations."""
    return ResidualLayer(hidden, (MLPMixer(hidden, gated=False),), norm=norm)


def _prediction_module(layer: PredictionLayer) -> modules.Module:
    joining = _residual_module(joining_layer(layer.hidden, layer.norm))
    block = _residual_module(ResidualLayer(layer.hidden, layer.mixers, norm=layer.norm))
    return modules.Prediction(layer.vocabulary, layer.hidden, modules.Sequential((joining, block)), layer.depth)


def layer_module(layer: Layer) -> tuple[modules.Module, int]:
    """Return the module of a layer, and the width of its input."""
    if isinstance(layer, TracedLayer):
        whole = modules.Traced(layer.inputs, layer.operators, layer.parameters, layer.result)
        tap = modules.Traced(layer.inputs[:1], layer.taps, layer.tap_parameters) if layer.taps else modules.Join(1)
        return _with_streams(whole, layer, tap), layer.hidden
    if isinstance(layer, ResidualLayer):
        return _residual_module(layer), layer.hidden
    if isinstance(layer, AdapterLayer):
        return _steps_module(layer.hidden, layer.steps), layer.hidden
    if isinstance(layer, PredictionLayer):
        return _prediction_module(layer), layer.hidden
    width = layer.in_width if isinstance(layer, ProjectorLayer) else layer.hidden
    return _MODULES[type(layer)](**msgspec.structs.asdict(layer)), width


def local_devices(
    device: DeviceSpec, nic_bytes_per_s: float, nic_latency_s: float, copy_bytes_per_s: float | None = None
) -> tuple[Device, ...]:
    """Return compute, NVLink, NIC and PCIe of one accelerator, in the order of `DEVICE_NAMES`.

    ``copy_bytes_per_s`` is the PCIe rate if the host limits it; None: the full rate.
    """
    links: tuple[tuple[DevicePart, float, float], ...] = (
        ("nvlink", device.nvlink_bytes_per_s, device.nvlink_latency_s),
        ("nic", nic_bytes_per_s, nic_latency_s),
        ("pcie", device.pcie_bytes_per_s if copy_bytes_per_s is None else copy_bytes_per_s, device.pcie_latency_s),
    )
    compute = Device(
        DEVICE_NAMES[0],
        flops_per_s=device.flops_per_s,
        sustained=device.sustained,
        quantized=device.quantized_products,
        memory_bytes_per_s=device.memory_bytes_per_s,
        launch_s=device.launch_s,
        efficiency=device.efficiency.get("compute", {}),
    )
    return (
        compute,
        *(
            Device(name, network_bytes_per_s=rate, latency_s=latency, efficiency=device.efficiency.get(name, {}))
            for name, rate, latency in links
        ),
    )


def cluster_devices(cluster: ClusterSpec, trainer: TrainerSpec = FUSED) -> tuple[Device, ...]:
    """Return the local devices of a cluster's accelerators, as a trainer uses them."""
    compute, *links = local_devices(
        cluster.device, cluster.nic_bytes_per_s, cluster.nic_latency_s, cluster.copy_bytes_per_s
    )
    slowdown = {"*": trainer.elementwise, "cross_entropy": trainer.cross_entropy, "scan": trainer.scan}
    if trainer.attention == "flash2":
        slowdown["attention"] = 1 / cluster.device.generation.flash2
    return replace(compute, slowdown=slowdown), *links


@dataclass(frozen=True)
class Placement:
    """Placement of parallel groups on devices: tensor peers are adjacent, then context, data, pipeline."""

    cluster: ClusterSpec
    degrees: Degrees
    trainer: TrainerSpec = FUSED

    def __post_init__(self) -> None:
        """Raise `InputError` if the degrees need more devices than the cluster has, or these lack the precision."""
        quantization(self.trainer.precision, self.cluster.device)
        need, have = self.degrees.num_devices, self.cluster.num_devices
        if need > have:
            raise InputError(
                "degrees",
                f"tensor x context x data x pipeline is {need}, {self.cluster.name!r} has {have} devices",
                "lower a degree",
            )

    def crosses_nodes(self, span: int) -> bool:
        """Return whether ``span`` consecutive devices are on more than one node."""
        return span > self.cluster.devices_per_node

    def link(self, span: int) -> int:
        """Return the slowest link inside ``span`` consecutive devices."""
        return NIC if self.crosses_nodes(span) or not self.cluster.device.nvlink_bytes_per_s else NVLINK

    @property
    def in_bf16(self) -> Placement:
        """The same with all products in bfloat16."""
        if self.trainer.precision == "bf16":
            return self
        return replace(self, trainer=msgspec.structs.replace(self.trainer, precision="bf16", quantized_weights=False))

    @property
    def context(self) -> Context:
        """Parallelism of traced layers."""
        d = self.degrees
        return Context(
            tensor=d.tensor,
            context=d.context,
            expert=d.expert,
            expert_tensor=d.expert_tensor,
            sequence_parallel=d.sequence_parallel,
            tensor_group=self.group(d.tensor),
            context_group=self.group(d.context, d.tensor),
            expert_group=self.group(d.expert, d.expert_tensor),
            expert_tensor_group=self.group(d.expert_tensor),
            gradient_bytes=d.state.gradient,
            shards=d.shards if d.zero == 3 else (1, 1),
            shard_groups=self.data_groups,
            unfused_attention=self.trainer.attention == "unfused",
            hidden_tensor=self.trainer.hidden_tensor,
            hidden_expert=self.trainer.hidden_expert,
            dispatcher=self.trainer.dispatcher,
            fused_experts=self.trainer.fused_experts,
            quantization=quantization(self.trainer.precision, self.cluster.device),
            quantized_weights=self.trainer.quantized_weights,
            dropout=self.trainer.dropout,
            loss_in_place=self.trainer.loss_in_place,
            output_twice=self.trainer.output_twice,
            eager=self.trainer.eager,
            in_blocks=self.trainer.in_blocks,
        )

    def group(self, peers: int, stride: int = 1) -> Group:
        """Return the link of ``peers`` devices, each ``stride`` devices after the other."""
        node, device = self.cluster.devices_per_node, self.cluster.device
        # Without links inside a node, all peers are reached over the network.
        local = min(peers, max(1, node // stride)) if device.nvlink_bytes_per_s else 1
        if not self.crosses_nodes(peers * stride) and device.nvlink_bytes_per_s:
            return Group(NVLINK, 1.0, local)
        lanes = min(local, max(1.0, device.nvlink_bytes_per_s / self.cluster.nic_bytes_per_s))
        return Group(NIC, float(lanes), local)

    @property
    def data_groups(self) -> tuple[Group, Group]:
        """Links of the groups that share gradients: of dense weights, and of experts."""
        d = self.degrees
        dense, experts = d.shards
        whole = self.group(dense, d.tensor)
        return whole, self.group(experts, d.expert * d.expert_tensor) if d.expert > 1 else whole

    @property
    def rank_span(self) -> int:
        """Consecutive devices of one pipeline rank, all of its replicas together."""
        return self.degrees.tensor * self.degrees.context * self.degrees.data

    def pipeline_link(self, first: int, second: int) -> int:
        """Return the link between two pipeline ranks: the network if any device has its peer on another node."""
        span, node = self.rank_span, self.cluster.devices_per_node
        crosses = any((first * span + k) // node != (second * span + k) // node for k in range(min(span, node)))
        return NIC if crosses or not self.cluster.device.nvlink_bytes_per_s else NVLINK

    @property
    def slowest_pipeline_link(self) -> int:
        """Slowest link between neighboring pipeline ranks, including the last and the first."""
        ranks = max(2, self.degrees.pipeline)
        return max(self.pipeline_link(rank, (rank + 1) % ranks) for rank in range(ranks))

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """Local devices of one accelerator."""
        return _devices(self.cluster_key, self.trainer)

    @functools.cached_property
    def cluster_key(self) -> bytes:
        """The cluster as a key of caches."""
        return msgspec.json.encode(self.cluster)

    def send_ps(self, num_bytes: int, link: int) -> int:
        """Return the picoseconds of one message over a link."""
        table = RuleTable(self.devices, ("send",), np.array([link]), np.array([1.0]))
        return int(table.durations_ps(np.array([[0.0, 0.0, float(num_bytes)]]))[0])


@functools.lru_cache(maxsize=64)
def _devices(cluster: bytes, trainer: TrainerSpec) -> tuple[Device, ...]:
    return cluster_devices(msgspec.json.decode(cluster, type=ClusterSpec), trainer)


@functools.lru_cache(maxsize=512)
def _template(
    layer: Layer,
    context: Context,
    cluster: bytes,
    trainer: TrainerSpec,
    trainable: bool,
    input_gradient: bool,
    joined: int,
) -> LayerTemplate:
    module, width = layer_module(layer)
    devices = _devices(cluster, trainer)
    return LayerTemplate(
        module, width, context, devices, trainable=trainable, input_gradient=input_gradient, joined=joined
    )


def clear_template_cache() -> None:
    """Clear the cache of templates, to measure the time of tracing and evaluation."""
    _template.cache_clear()


def single_layer(layer: Layer) -> tuple[Layer, int]:
    """Return one of the equal layers of an entry, without the names of its streams, and their number."""
    if not isinstance(layer, ResidualLayer | TracedLayer):
        return layer, 1
    return msgspec.structs.replace(unnamed(layer), count=1), layer.count


def stream_template(layer: ResidualLayer | TracedLayer, placement: Placement, *, joined: int = 1) -> LayerTemplate:
    """Return the template of a stream's features, whose output is the stream. ``joined`` is as in `LayerTemplate`."""
    if isinstance(layer, TracedLayer) and layer.taps:
        changed = {"operators": layer.taps, "parameters": layer.tap_parameters, "inputs": layer.inputs[:1]}
        whole = msgspec.structs.replace(
            layer, **changed, taps=(), tap_parameters=0, emits=None, takes=None, result=None
        )
        return layer_template(whole, placement)
    # A traced layer counts the rows of the module's input itself, so that ``joined`` is 1.
    steps = () if isinstance(layer, TracedLayer) else layer.tap
    return layer_template(AdapterLayer(layer.hidden, steps or (JoinStep(1),)), placement, joined=joined)


def unnamed(layer: Layer) -> Layer:
    """Return the layer without the names of its streams, which do not change its cost."""
    if not isinstance(layer, ResidualLayer | TracedLayer) or (layer.emits is None and layer.takes is None):
        return layer
    ends = {field: "" for field in ("emits", "takes") if getattr(layer, field) is not None}
    return msgspec.structs.replace(layer, **ends)


def untied(layer: Layer) -> Layer:
    """Return the layer with its own copy of a weight that belongs to another layer: that of a tied head."""
    if isinstance(layer, LanguageHeadLayer):
        return msgspec.structs.replace(layer, tied=False)
    if not isinstance(layer, TracedLayer):
        return layer
    tied = [each for each in layer.operators if isinstance(each, ProductOperator) and not each.owned]
    return msgspec.structs.replace(
        layer,
        operators=tuple(msgspec.structs.replace(o, owned=True) if o in tied else o for o in layer.operators),
        parameters=layer.parameters + sum(each.in_width * each.out_width for each in tied),
    )


def layer_template(
    layer: Layer, placement: Placement, *, trainable: bool = True, input_gradient: bool = True, joined: int = 1
) -> LayerTemplate:
    """Return the template of one layer, which is traced once for each structure, parallelism and device.

    The options are those of `LayerTemplate`.
    """
    if not isinstance(layer, (ResidualLayer, PredictionLayer)) and not is_traced_block(layer):
        placement = placement.in_bf16
    context, cluster = placement.context, placement.cluster_key
    return _template(unnamed(layer), context, cluster, placement.trainer, trainable, input_gradient, joined)


def module_templates(
    architecture: Architecture, module: ModuleArchitecture, placement: Placement
) -> tuple[LayerTemplate, ...]:
    """Return the templates of a module's layers, shared by equal layers.

    Gradients flow back to the first layer that is trained, or follows a trained module. Products of encoders are in
    bfloat16, as `pipeloom.integrations.megatron` has them.
    """
    if module.reads != "sequence" and any(module.name in other.after for other in architecture.modules):
        placement = placement.in_bf16
    upstream = any(_trains(architecture, name) for name in module.after)
    out = []
    for i, (layer, joined) in enumerate(zip(module.flat_layers, module.joins, strict=True)):
        flows = upstream or (not module.frozen and i > 0)
        out.append(layer_template(layer, placement, trainable=not module.frozen, input_gradient=flows, joined=joined))
    return tuple(out)


def _trains(architecture: Architecture, name: str) -> bool:
    module = architecture.module(name)
    return not module.frozen or any(_trains(architecture, source) for source in module.after)


def count_parameters(architecture: Architecture) -> int:
    """Return the number of parameters of a model, including layers that never run."""
    return sum(module_parameters(architecture).values())


def module_parameters(architecture: Architecture) -> dict[str, int]:
    """Return the number of parameters of each module."""
    totals: dict[str, int] = {}
    known: dict[Layer, int] = {}
    for module in architecture.modules:
        totals[module.name] = 0
        for each in (*module.layers, *module.unused):
            layer, count = single_layer(each)
            if layer not in known:
                built, width = layer_module(layer)
                tape = Tape(Context())
                built(tape.input(width))
                known[layer] = round(sum(p.total for p in tape.parameters))
            totals[module.name] += known[layer] * count
    return totals
