"""Small devices, clusters and models for the emulator's tests."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from pipeloom.emulator.rules import Device
from pipeloom.spec import architecture as a
from pipeloom.spec.hardware import ClusterSpec, DeviceSpec

# Round rates: one operation and one memory byte take a nanosecond each, a byte on a link two.
PLAIN = (
    Device("compute", flops_per_s=1e9, memory_bytes_per_s=1e9),
    Device("nvlink", network_bytes_per_s=5e8),
    Device("nic", network_bytes_per_s=1e8),
    Device("pcie", network_bytes_per_s=1e8),
)


def machine(num_nodes=2, per_node=4, **changes):
    values = {
        "name": "test",
        "basis": "datasheet",
        "source": "made up",
        "flops_per_s": 1e12,
        "memory_bytes": 10**12,
        "memory_bytes_per_s": 1e11,
        "nvlink_bytes_per_s": 1e10,
        "nvlink_latency_s": 1e-6,
        "pcie_bytes_per_s": 1e10,
    }
    device = DeviceSpec(**(values | changes))
    return ClusterSpec("test", "made up", device, per_node, num_nodes, nic_bytes_per_s=1e9, nic_latency_s=1e-6)


ATTENTION = a.AttentionMixer(heads=4, kv_heads=2, head_width=8)
MIXERS = (
    ATTENTION,
    a.AttentionMixer(heads=4, kv_heads=4, head_width=8, causal=False, qkv_bias=True, rotary=False),
    a.CrossAttentionMixer(heads=4, head_width=8, condition_tokens=5, condition_width=32),
    a.LatentAttentionMixer(heads=4, kv_rank=16, nope_width=8, rope_width=4, value_width=8, query_rank=24),
    a.AttentionMixer(heads=4, kv_heads=2, head_width=8, window=16),
    a.AttentionMixer(heads=4, kv_heads=4, head_width=8, causal=False, qkv_bias=True, key_bias=False, window=12),
    a.LatentAttentionMixer(heads=4, kv_rank=16, nope_width=8, rope_width=4, value_width=8, bias=True),
    a.MLPMixer(inner=64),
    a.MLPMixer(inner=64, gated=False, bias=True),
    a.ExpertsMixer(inner=16, experts=8, chosen=2, shared_inner=32),
    a.ExpertsMixer(inner=16, experts=8, chosen=2, shared_inner=32, shared_gate=True, gated=False, latent=8, bias=True),
    a.Mamba2Mixer(heads=8, head_width=8, state=16, groups=4),
    a.Mamba2Mixer(heads=8, head_width=8, state=16, groups=4, bias=True, kernel_bias=False),
)


@st.composite
def residual_layers(draw):
    mixers = tuple(draw(st.lists(st.sampled_from(MIXERS), min_size=1, max_size=2)))
    modulated = draw(st.booleans())
    return a.ResidualLayer(
        hidden=32,
        mixers=mixers,
        count=draw(st.integers(1, 3)),
        norm=draw(st.sampled_from(["layer", "rms"])),
        post_norm=draw(st.booleans()),
        scaled=draw(st.booleans()),
        modulated=modulated,
        modulation_projection=modulated and draw(st.booleans()),
    )


@st.composite
def architectures(draw):
    """A language model of random layers, with or without a random vision encoder before it.

    Features of a block of the encoder may be added in the language model.
    """
    body = draw(st.lists(residual_layers(), min_size=1, max_size=3))
    vision, taps = draw(st.booleans()), draw(st.booleans())
    plain = a.ResidualLayer(hidden=32, mixers=(ATTENTION,))
    if vision and taps:
        body.insert(draw(st.integers(0, len(body))), msgspec.structs.replace(plain, takes="features"))
    lm = a.ModuleArchitecture(
        "lm",
        "sequence",
        (
            a.TokenEmbeddingLayer(vocabulary=64, hidden=32),
            *body,
            a.LanguageHeadLayer(hidden=32, vocabulary=64, tied=draw(st.booleans())),
        ),
        after=("vision",) if vision else (),
        frozen=vision and draw(st.booleans()),
    )
    if not vision:
        return a.Architecture("random", "drawn", (lm,))
    layers = draw(st.lists(residual_layers(), min_size=1, max_size=2))
    if taps:
        steps = (a.JoinStep(4), a.NormStep(), a.LinearStep(48), a.ActivationStep(), a.LinearStep(32))
        tapped = msgspec.structs.replace(plain, emits="features", tap=steps)
        layers.insert(draw(st.integers(0, len(layers))), tapped)
    merger = a.PatchMergerLayer(hidden=32, factor=4, out_width=32, inner=64)
    averaged = a.AdapterLayer(32, (a.AverageStep(4), a.NormStep("rms"), a.VectorsStep(), a.LinearStep(32)))
    encoder = a.ModuleArchitecture(
        "vision",
        "images",
        (a.PatchEmbeddingLayer(patch_numbers=12, hidden=32), *layers, draw(st.sampled_from([merger, averaged]))),
        frozen=draw(st.booleans()),
    )
    return a.Architecture("random", "drawn", (encoder, lm))
