"""Architecture: a model's layers with all sizes that determine its cost.

`ModelSpec` has what the planner needs. `Architecture` has what the emulator needs: every projection, head and expert.
It is read from TOML, and `pipeloom.emulator.build` builds modules from it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from pipeloom.bounds import Count, Number, NumBytes, Ratio
from pipeloom.errors import InputError
from pipeloom.spec.batch import Sample
from pipeloom.spec.model import Reads, StreamEnd, check_layers, check_modules, check_streams, find_module, lengths_in
from pipeloom.spec.traced import (
    AttentionOperator,
    ExpertsOperator,
    KernelOperator,
    Operator,
    ScanOperator,
    TracedInput,
    check_operators,
)

Norm = Literal["layer", "rms"]


MOST_SIZE = 2**31
"""Largest size of a layer: widths, heads, experts, vocabularies."""

_NO_SIZES = ("reads", "parameters", "tap_parameters", "unused")
"""Fields of traced layers that are no sizes: numbers of tensors, and sums over all weights."""


@cache
def _sizes(kind: type[msgspec.Struct]) -> tuple[tuple[str, int], ...]:
    """Return the fields of a type that may be sizes, and the least value of each."""
    fields = msgspec.structs.fields(kind)
    return tuple((f.name, 0 if f.default == 0 else 1) for f in fields if f.name not in _NO_SIZES)


def check_sizes(node: msgspec.Struct, where: str) -> None:
    """Raise `InputError` with the field for a size of a layer out of range. Sizes with default 0 may be 0."""
    for name, least in _sizes(type(node)):
        value = getattr(node, name)
        entity = f"{where}.{name}"
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= MOST_SIZE:
            raise InputError(entity, f"{value} is not from {least} to {MOST_SIZE}")
        for i, each in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(each, msgspec.Struct):
                check_sizes(each, f"{entity}[{i}]" if isinstance(value, tuple) else entity)


class _MixerBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mixer"):
    pass


class AttentionMixer(_MixerBase, frozen=True, tag="attention"):
    """Self-attention. If ``kv_heads`` is below ``heads``, it is grouped-query attention."""

    heads: Count
    kv_heads: Count
    head_width: Count
    causal: bool = True
    qkv_bias: bool = False
    key_bias: bool = True
    """Whether keys have biases too, if queries and values have."""
    output_bias: bool = False
    rotary: bool = True
    norm_heads: bool = False
    """Whether queries and keys of each head are normalized, with two vectors of the head's width."""
    norm_whole: bool = False
    """Whether queries and keys of all heads are normalized together, with two vectors of their joint width."""
    output_gate: bool = False
    """Whether a linear layer as wide as the queries gates the result elementwise."""
    window: Count | None = None
    """If causal, the number of keys that a query attends to, itself included. Otherwise the length of the blocks into
    which sequences are cut."""
    rotary_scaled: bool = False
    """Whether sine and cosine of rotary embeddings have a scale (YaRN's concentration), for which no fused kernel
    exists."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InputError("attention.window", f"{self.window} is below 1", "leave it out for full attention")


class CrossAttentionMixer(_MixerBase, frozen=True, tag="cross_attention"):
    """Attention to ``condition_tokens`` tokens of another module per instance."""

    heads: Count
    head_width: Count
    condition_tokens: Count
    condition_width: Count
    bias: bool = False


class LatentAttentionMixer(_MixerBase, frozen=True, tag="latent_attention"):
    """Multi-head latent attention. Without ``query_rank``, queries are projected directly from the hidden width."""

    heads: Count
    kv_rank: Count
    nope_width: Count
    rope_width: Count
    value_width: Count
    query_rank: Count | None = None
    bias: bool = False
    """Biases of the projections from the hidden width down, and of the output projection."""


class MLPMixer(_MixerBase, frozen=True, tag="mlp"):
    """Dense feed-forward network, gated (SwiGLU) or not."""

    inner: Count
    gated: bool = True
    bias: bool = False


class ExpertsMixer(_MixerBase, frozen=True, tag="experts"):
    """Mixture of experts, each of width ``inner`` and gated or not, and a shared expert of ``shared_inner``."""

    inner: Count
    experts: Count
    chosen: Count
    shared_inner: Number = 0
    imbalance: Ratio = 1.0
    gated: bool = True
    latent: Count | None = None
    """Width to which tokens are projected before the experts, and from which they are projected back; None: no
    projection."""
    shared_gate: bool = False
    """Whether a linear layer computes a scale of the shared expert's output for each token."""
    bias: bool = False
    """Biases of the shared expert, and of the projections to and from ``latent``."""
    expert_bias: bool = False
    """Biases of the routed experts."""
    clamped: bool = False
    """Whether the inputs of the experts' activation are clamped, as in gpt-oss."""
    groups: Count = 1
    """Groups of experts, of which each token may choose experts from ``chosen_groups`` (DeepSeek-V3)."""
    chosen_groups: Count = 1


class Mamba2Mixer(_MixerBase, frozen=True, tag="mamba2"):
    """Mamba-2 state-space mixer."""

    heads: Count
    head_width: Count
    state: Count
    groups: Count = 1
    kernel: Count = 4
    chunk: Count = 256
    bias: bool = False
    """Biases of both projections."""
    kernel_bias: bool = True


Mixer = AttentionMixer | CrossAttentionMixer | LatentAttentionMixer | MLPMixer | ExpertsMixer | Mamba2Mixer


class _StepBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="step"):
    pass


class NormStep(_StepBase, frozen=True, tag="norm"):
    """Normalization over the width."""

    kind: Norm = "layer"


class JoinStep(_StepBase, frozen=True, tag="join"):
    """Join ``factor`` rows into one row that is ``factor`` times as wide."""

    factor: Count


class AverageStep(_StepBase, frozen=True, tag="average"):
    """Replace ``factor`` rows by their mean."""

    factor: Count


class LinearStep(_StepBase, frozen=True, tag="linear"):
    """Linear layer."""

    out_width: Count
    bias: bool = True


class ActivationStep(_StepBase, frozen=True, tag="activation"):
    """Elementwise function."""


class VectorsStep(_StepBase, frozen=True, tag="vectors"):
    """``count`` learned vectors of the current width. Only their weights count."""

    count: Count = 1


Step = NormStep | JoinStep | AverageStep | LinearStep | ActivationStep | VectorsStep


class _LayerBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer"):
    pass


class ResidualLayer(_LayerBase, frozen=True, tag="residual"):
    """``count`` layers of several mixers, each with a norm before it and a residual connection around it.

    ``post_norm`` adds a norm after each mixer. ``scaled`` adds a learned factor for each column of a mixer's output.
    ``modulated`` adds shift, scale and gate by a condition (DiT), from a table, or with ``modulation_projection`` from
    a linear layer of each block.
    """

    hidden: Count
    mixers: tuple[Mixer, ...]
    count: Count = 1
    norm: Norm = "rms"
    post_norm: bool = False
    scaled: bool = False
    modulated: bool = False
    modulation_projection: bool = False
    emits: str | None = None
    """Stream to a later layer, with the output's features after ``tap``."""
    tap: tuple[Step, ...] = ()
    takes: str | None = None
    """Stream of the model's width that is added to the output."""

    def __post_init__(self) -> None:
        """Raise `InputError` for a tap without a stream, and for a stream with several ends."""
        if self.tap and self.emits is None:
            raise InputError("residual.tap", "is given without `emits`", "name the stream")
        if self.count != 1 and (self.emits is not None or self.takes is not None):
            raise InputError("residual.count", f"{self.count} layers share a stream's end", "give each its own")


class TokenEmbeddingLayer(_LayerBase, frozen=True, tag="token_embedding"):
    """Token embedding table, with ``positions`` learned position vectors."""

    vocabulary: Count
    hidden: Count
    positions: Number = 0


class PatchEmbeddingLayer(_LayerBase, frozen=True, tag="patch_embedding"):
    """Linear layer from ``patch_numbers`` pixel values of a patch.

    ``positions`` counts learned vectors of positions and of a class.
    """

    patch_numbers: Count
    hidden: Count
    positions: Number = 0
    bias: bool = True
    norm: Norm | None = None
    """Norm of the output; None: none."""


class AudioEmbeddingLayer(_LayerBase, frozen=True, tag="audio_embedding"):
    """Two convolutions of kernel size 3 over a spectrum of ``bins``. The second halves the number of steps."""

    bins: Count
    hidden: Count


class PatchMergerLayer(_LayerBase, frozen=True, tag="patch_merger"):
    """MLP over ``factor`` neighboring patches, which become one token of ``out_width``.

    ``inner`` is the width between its two linear layers. None: that of the joined patches, as in Qwen2-VL.
    """

    hidden: Count
    factor: Count
    out_width: Count
    inner: Count | None = None
    norm: Norm = "layer"


class ProjectorLayer(_LayerBase, frozen=True, tag="projector"):
    """Two-layer MLP adapter."""

    in_width: Count
    out_width: Count


class AdapterLayer(_LayerBase, frozen=True, tag="adapter"):
    """A sequence of steps. Every device holds all weights."""

    hidden: Count
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("adapter.steps", "is empty", "give at least one step")


class LanguageHeadLayer(_LayerBase, frozen=True, tag="language_head"):
    """Final norm, vocabulary projection and loss."""

    hidden: Count
    vocabulary: Count
    tied: bool = False
    norm: Norm = "rms"
    predictions: Number = 0
    """Number of additional states of each token from a `PredictionLayer`."""
    capped: bool = False
    """Whether a function such as a hyperbolic tangent caps the logits before the loss."""


class PredictionLayer(_LayerBase, frozen=True, tag="prediction"):
    """``depth`` multi-token prediction layers in a row, on one device.

    Each joins the hidden states with the embedding of a later token and runs a block of ``mixers``. The output has the
    input and the states of all layers. The device holds a copy of the embedding, which does not count as a parameter of
    the model.
    """

    hidden: Count
    vocabulary: Count
    mixers: tuple[Mixer, ...]
    depth: Count = 1
    norm: Norm = "rms"


class DenoisingHeadLayer(_LayerBase, frozen=True, tag="denoising_head"):
    """Final norm, linear layer and squared error of a diffusion model."""

    hidden: Count
    out_width: Count


class TracedLayer(_LayerBase, frozen=True, tag="traced", omit_defaults=True):
    """``count`` layers, each a list of operators that the model's own code ran (`pipeloom.integrations.tracing`)."""

    name: str
    """Class of the layer, and what tells it from others of its class."""
    hidden: Count
    """Width of the state that it reads."""
    inputs: tuple[TracedInput, ...]
    """Tensors that it reads, the state first."""
    operators: tuple[Operator, ...]
    parameters: NumBytes = 0
    """Parameters of the layer, also those that no operator reads."""
    count: Count = 1
    block: bool = True
    """Whether it is one of a tower's blocks rather than what stands before or behind them."""
    result: Number | None = None
    """Tensor that it returns; None: the result of the last operator."""
    emits: str | None = None
    taps: tuple[Operator, ...] = ()
    """Stream to a later layer: the layer's result after the operators of ``taps``, whose tensor 0 is that result."""
    tap_parameters: NumBytes = 0
    takes: str | None = None
    """Stream of the model's width that is added to the output."""

    @property
    def share(self) -> float:
        """Rows of the output for each row of the module's input. 0 without operators."""
        if not self.operators:
            return 0.0
        last = -1 if self.result is None else self.result - len(self.inputs)
        return self.operators[last].rows[2]

    @property
    def joined(self) -> int:
        """Number of rows that become one row of the output."""
        share = self.share
        if share and self.inputs[0].gradient:  # the state, whose rows may be fewer than those of the module's input
            share /= self.inputs[0].rows[2] or 1
        return max(1, round(1 / share)) if share > 0 else 1

    def __post_init__(self) -> None:
        """Raise `InputError` for operators that read what does not exist, and for a stream with several ends."""
        check_operators(f"layer {self.name!r}", self.inputs, self.operators, self.result)
        check_operators(f"layer {self.name!r}.taps", self.inputs[:1], self.taps)
        if self.taps and self.emits is None:
            raise InputError("traced.taps", "is given without `emits`", "name the stream")
        if self.count != 1 and (self.emits is not None or self.takes is not None):
            raise InputError("traced.count", f"{self.count} layers share a stream's end", "give each its own")


Layer = (
    ResidualLayer
    | TracedLayer
    | TokenEmbeddingLayer
    | PatchEmbeddingLayer
    | AudioEmbeddingLayer
    | PatchMergerLayer
    | ProjectorLayer
    | AdapterLayer
    | LanguageHeadLayer
    | PredictionLayer
    | DenoisingHeadLayer
)


def is_traced_block(layer: Layer) -> bool:
    """Return whether a layer is a traced block of a tower."""
    return isinstance(layer, TracedLayer) and layer.block


def num_mixers(layer: Layer) -> int:
    """Return how many mixers a layer has, each with a residual connection; 0 of a layer that is no block."""
    if is_traced_block(layer):
        assert isinstance(layer, TracedLayer)
        return max(1, sum(isinstance(each, KernelOperator) and each.passes for each in layer.operators))
    return len(layer_mixers(layer))


def mixes_alone(layer: Layer) -> bool:
    """Return whether a block has a mixer of tokens, such as attention, and no feed-forward layer."""
    if num_mixers(layer) != 1:
        return False
    if isinstance(layer, TracedLayer):
        return any(isinstance(each, AttentionOperator | ScanOperator) for each in layer.operators)
    return not isinstance(layer_mixers(layer)[0], MLPMixer | ExpertsMixer)


class RoutedExperts(NamedTuple):
    """The number of routed experts of a layer, and whether each has biases."""

    number: int
    have_biases: bool


def routed_experts(layer: Layer) -> RoutedExperts | None:
    """Return the routed experts of a layer; None without experts."""
    if isinstance(layer, TracedLayer):
        found = [RoutedExperts(o.experts, o.biases > 0) for o in layer.operators if isinstance(o, ExpertsOperator)]
    else:
        found = [RoutedExperts(m.experts, m.expert_bias) for m in layer_mixers(layer) if isinstance(m, ExpertsMixer)]
    return max(found, default=None)


def num_experts(layer: Layer) -> int:
    """Return the number of routed experts of a layer; 0 without experts."""
    found = routed_experts(layer)
    return 0 if found is None else found.number


def has_scan(layer: Layer) -> bool:
    """Return whether a layer has a scan: of a state space or a linear attention."""
    if isinstance(layer, TracedLayer):
        return any(isinstance(each, ScanOperator) for each in layer.operators)
    return any(isinstance(each, Mamba2Mixer) for each in layer_mixers(layer))


def layer_mixers(layer: Layer) -> tuple[Mixer, ...]:
    """Return the mixers of a layer; none of a layer that is no block."""
    return layer.mixers if isinstance(layer, ResidualLayer | PredictionLayer) else ()


def _joined_by(layer: Layer) -> int:
    """Return the number of rows that a layer that is not traced makes one row of."""
    steps = layer.steps if isinstance(layer, AdapterLayer) else (layer,)
    return math.prod(step.factor for step in steps if isinstance(step, PatchMergerLayer | JoinStep | AverageStep))


class ModuleArchitecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One modality module: what it reads, which modules feed it, and its layers."""

    name: str
    reads: Reads
    layers: tuple[Layer, ...]
    after: tuple[str, ...] = ()
    frozen: bool = False
    unused: tuple[Layer, ...] = ()
    """Layers that the model has but never runs. Only their weights count, and only in the model's number of
    parameters."""
    fixed_rows: Count | None = None
    """Rows of each of its sequences, such as patches of an image, if it takes no others."""
    fixed_outputs: Count | None = None
    """Rows that it makes of such a sequence, if they do not follow from `joined`: a class token may be dropped."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError(f"module {self.name!r}.layers", "is empty", "give at least one layer")
        for field in ("layers", "unused"):
            for i, layer in enumerate(getattr(self, field)):
                check_sizes(layer, f"module {self.name!r}.{field}[{i}]")
        check_layers(f"module {self.name!r}.layers", sum(getattr(layer, "count", 1) for layer in self.layers))

    @property
    def flat_layers(self) -> tuple[Layer, ...]:
        """Layers with counts expanded. Each entry has count 1, so equal layers are equal."""
        out: list[Layer] = []
        for layer in self.layers:
            if isinstance(layer, ResidualLayer | TracedLayer):
                out += [msgspec.structs.replace(layer, count=1)] * layer.count
            else:
                out.append(layer)
        return tuple(out)

    @property
    def num_blocks(self) -> int:
        """Number of residual layers, or of all layers if there are none."""
        layers = self.flat_layers
        return sum(isinstance(layer, ResidualLayer) or is_traced_block(layer) for layer in layers) or len(layers)

    @property
    def joined(self) -> int:
        """Number of rows, such as patches of an image, that become one row of the output."""
        factor = 1
        for layer in self.layers:
            if isinstance(layer, TracedLayer):
                factor *= 1 if layer.block else layer.joined
            else:
                factor *= _joined_by(layer)
        return factor

    @property
    def joins(self) -> tuple[int, ...]:
        """Number of rows of the module's input that became one row of each layer's input.

        Always 1 for a traced layer, which counts the rows of the module's input itself.
        """
        out: list[int] = []
        joined = 1
        for layer in self.flat_layers:
            if not isinstance(layer, TracedLayer):
                out.append(joined)
                joined *= _joined_by(layer)
                continue
            out.append(1)
            if layer.share:
                joined = max(1, round(1 / layer.share))
        return tuple(out)

    @property
    def emits(self) -> tuple[StreamEnd, ...]:
        """Streams that its layers emit."""
        return self._ends("emits")

    @property
    def takes(self) -> tuple[StreamEnd, ...]:
        """Streams that its layers take."""
        return self._ends("takes")

    def outputs(self, rows: int) -> int:
        """Return the rows that it makes of a sequence, such as the tokens of an image of ``rows`` patches."""
        if self.fixed_rows is not None and self.fixed_outputs is not None and rows % self.fixed_rows == 0:
            return rows // self.fixed_rows * self.fixed_outputs
        return -(-rows // self.joined)

    def _ends(self, field: str) -> tuple[StreamEnd, ...]:
        found = []
        for number, layer in enumerate(self.flat_layers):
            stream = getattr(layer, field, None)
            if stream is not None:
                found.append(StreamEnd(stream, number))
        return tuple(found)

    def lengths(self, sample: Sample) -> tuple[int, ...]:
        """Return the sequence lengths of one sample in this module (possibly none)."""
        return tuple(n for n in lengths_in(self.name, self.reads, sample) if n)


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole model. ``published_parameters`` is the number of parameters of the published model, if there is one."""

    name: str
    source: str
    modules: tuple[ModuleArchitecture, ...]
    published_parameters: NumBytes | None = None

    def __post_init__(self) -> None:
        """Raise `InputError` for repeated names, modules that read later ones, and streams that run backward."""
        check_modules(self.modules, "architecture.modules")
        check_streams(self.modules)

    def module(self, name: str) -> ModuleArchitecture:
        """Return the module with this name. An `InputError` lists the known ones."""
        return find_module(self.modules, name)
