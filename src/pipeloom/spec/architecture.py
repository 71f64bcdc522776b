"""Architecture: a model's layers with the sizes that its cost follows from.

`ModelSpec` says what planning needs to know of a model; an `Architecture` says what the emulator needs: every
projection, head and expert. It is data, read from TOML; `pipeloom.emulator.build` turns it into modules.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pipeloom.errors import InputError
from pipeloom.spec.batch import Sample
from pipeloom.spec.model import Reads, check_modules, find_module, instance_lengths

Norm = Literal["layer", "rms"]


class AttentionMixer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mixer", tag="attention"):
    """Self-attention; ``kv_heads`` below ``heads`` is grouped-query attention."""

    heads: int
    kv_heads: int
    head_width: int
    causal: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    rotary: bool = True
    norm_heads: bool = False


class CrossAttentionMixer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mixer", tag="cross_attention"
):
    """Attention to ``condition_tokens`` tokens of another module per instance."""

    heads: int
    head_width: int
    condition_tokens: int
    condition_width: int
    bias: bool = False


class LatentAttentionMixer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mixer", tag="latent_attention"
):
    """Multi-head latent attention; no ``query_rank``: queries straight from the hidden width."""

    heads: int
    kv_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    query_rank: int | None = None


class MLPMixer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mixer", tag="mlp"):
    """Dense feed-forward, gated (SwiGLU) or not."""

    inner: int
    gated: bool = True
    bias: bool = False


class ExpertsMixer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mixer", tag="experts"):
    """Mixture of gated experts of width ``inner`` each, ``shared_inner`` for all tokens."""

    inner: int
    experts: int
    chosen: int
    shared_inner: int = 0
    imbalance: float = 1.0


class Mamba2Mixer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mixer", tag="mamba2"):
    """Mamba-2 state-space mixer."""

    heads: int
    head_width: int
    state: int
    groups: int = 1
    kernel: int = 4
    chunk: int = 256


Mixer = AttentionMixer | CrossAttentionMixer | LatentAttentionMixer | MLPMixer | ExpertsMixer | Mamba2Mixer


class ResidualLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer", tag="residual"):
    """``count`` layers, each of some mixers with a norm before and a residual connection around each.

    ``post_norm``: one more norm after each mixer. ``modulated``: shift, scale and gate by a condition (DiT),
    from a table, or with ``modulation_projection`` from a linear layer of each block's own.
    """

    hidden: int
    mixers: tuple[Mixer, ...]
    count: int = 1
    norm: Norm = "rms"
    post_norm: bool = False
    modulated: bool = False
    modulation_projection: bool = False


class TokenEmbeddingLayer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer", tag="token_embedding"
):
    """Token table, with ``positions`` learned position vectors."""

    vocabulary: int
    hidden: int
    positions: int = 0


class PatchEmbeddingLayer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer", tag="patch_embedding"
):
    """Linear layer from ``patch_numbers`` pixel values of a patch."""

    patch_numbers: int
    hidden: int
    positions: int = 0
    bias: bool = True


class PatchMergerLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer", tag="patch_merger"):
    """MLP over ``factor`` neighbouring patches, which become one token of ``out_width``.

    ``inner``: width between its two linear layers; left out, that of the joined patches, as in Qwen2-VL.
    """

    hidden: int
    factor: int
    out_width: int
    inner: int | None = None
    norm: Norm = "layer"


class ProjectorLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer", tag="projector"):
    """Two-layer MLP adapter."""

    in_width: int
    out_width: int


class LanguageHeadLayer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer", tag="language_head"
):
    """Final norm, vocabulary product and loss."""

    hidden: int
    vocabulary: int
    tied: bool = False
    norm: Norm = "rms"


class DenoisingHeadLayer(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="layer", tag="denoising_head"
):
    """Final norm, linear layer and squared error of a diffusion model."""

    hidden: int
    out_width: int


Layer = (
    ResidualLayer
    | TokenEmbeddingLayer
    | PatchEmbeddingLayer
    | PatchMergerLayer
    | ProjectorLayer
    | LanguageHeadLayer
    | DenoisingHeadLayer
)


class ModuleArchitecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One modality module: what it reads, what feeds it, its layers."""

    name: str
    reads: Reads
    layers: tuple[Layer, ...]
    after: tuple[str, ...] = ()
    frozen: bool = False

    def __post_init__(self) -> None:
        """Refuse modules without layers."""
        if not self.layers:
            raise InputError(f"module {self.name!r}.layers", "is empty", "give at least one layer")

    @property
    def flat_layers(self) -> tuple[Layer, ...]:
        """One entry per layer, counts written out; each entry has count 1, so equal layers are equal."""
        out: list[Layer] = []
        for layer in self.layers:
            if isinstance(layer, ResidualLayer):
                out += [msgspec.structs.replace(layer, count=1)] * layer.count
            else:
                out.append(layer)
        return tuple(out)

    def lengths(self, sample: Sample) -> tuple[int, ...]:
        """Lengths of the sequences that one sample sends through this module (maybe none)."""
        return tuple(n for n in instance_lengths(self.reads, sample) if n)


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole model. ``published_parameters``: of the real model that it stands for, where there is one."""

    name: str
    source: str
    modules: tuple[ModuleArchitecture, ...]
    published_parameters: int | None = None

    def __post_init__(self) -> None:
        """Refuse doubled names and modules that read what comes later."""
        check_modules(self.modules, "architecture.modules")

    def module(self, name: str) -> ModuleArchitecture:
        """Return the module of that name; an `InputError` lists the known ones."""
        return find_module(self.modules, name)
