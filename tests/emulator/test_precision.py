"""Quantized products: casts around them, what is kept, weights, messages, and devices that lack them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.emulator import modules as m
from pipeloom.emulator.build import Placement, layer_template, module_templates
from pipeloom.emulator.rules import Device
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.static import static_bytes, update_costs
from pipeloom.emulator.tape import Context
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.spec import Workload
from pipeloom.spec import architecture as a
from pipeloom.spec.catalog import load_architecture, load_cluster, load_device
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.precision import PRECISIONS, RECIPES, Precision, quantization
from pipeloom.spec.trainer import TrainerSpec
from tests.emulator.cases import PLAIN, residual_layers

ROOT = Path(__file__).resolve().parents[2]
NS = 1000
H100, GB200 = load_cluster("1x8xh100"), load_cluster("1x8xgb200")
DELAYED = RECIPES["fp8_delayed"]
FAST = (replace(PLAIN[0], quantized={"fp8": (4e9, 0.5)}), *PLAIN[1:])
"""`PLAIN` with FP8 products of four times its rate, of which it sustains half."""


def operators(layer: LayerTemplate, part: str) -> list[tuple[str, int]]:
    """Kind and nanoseconds of each operator on ten tokens."""
    costs = layer.passes["keep"].programs[part].costs  # type: ignore[index]
    durations = layer.on(Workload((10,))).leaves["keep", part].duration_ps  # type: ignore[index]
    return [(c.rule, int(d) // NS) for c, d in zip(costs, durations, strict=True)]


def seconds(layer: a.Layer, precision: Precision, tokens: int, cluster=H100, **degrees) -> float:
    """Seconds of forward and backward of a layer."""
    template = layer_template(layer, Placement(cluster, Degrees(**degrees), TrainerSpec(precision=precision)))
    cost = Stage(runs_of([template], ["keep"])).cost(Workload((tokens,)), ("F", "B"))
    return sum(cost.duration_ps.values()) / 1e12


def block(hidden: int, inner: int) -> a.ResidualLayer:
    heads = max(1, hidden // 128)
    mixer = a.AttentionMixer(heads=heads, kv_heads=heads, head_width=hidden // heads)
    return a.ResidualLayer(hidden, (mixer, a.MLPMixer(inner)))


def test_a_quantized_product_by_hand() -> None:
    layer = LayerTemplate(m.Linear(8, 16, bias=False), 8, Context(quantization=DELAYED), FAST)
    # The cast reads 2 and writes 1 + 1 bytes of 80 numbers. The product has 2 x 10 x 8 x 16 operations at 2 a
    # nanosecond. The gradient of 160 numbers is cast once for both products.
    assert operators(layer, "F") == [("cast", 320), ("matmul@fp8", 1280), ("view", 0)]
    assert operators(layer, "B") == [("cast", 640), ("matmul@fp8", 1280), ("matmul@fp8", 1280)]
    # 80 numbers of a byte are kept instead of two; model operations stay.
    assert layer.on(Workload((10,))).activation_bytes["keep"] == 80
    assert layer.on(Workload((10,))).model_flops == 2 * 10 * 8 * 16
    forward, weight = layer.passes["keep"].programs["F"].costs[1], layer.passes["keep"].programs["B"].costs[2]
    assert forward.memory.of(Workload((10,))) == 10 * (8 + 16 * 2) + 8 * 16
    assert weight.memory.of(Workload((10,))) == 10 * (8 + 16) + 8 * 16 * 8


def test_current_scaling_reads_once_more() -> None:
    layer = LayerTemplate(m.Linear(8, 16, bias=False), 8, Context(quantization=RECIPES["fp8_current"]), FAST)
    assert operators(layer, "F")[0] == ("cast", 480)
    assert operators(layer, "B")[0] == ("cast", 960)


def test_an_input_is_cast_once_for_all_products_that_read_it() -> None:
    gated = LayerTemplate(m.MLP(16, fused=False, hidden=8), 8, Context(quantization=DELAYED), FAST)
    kinds = [kind for kind, _ in operators(gated, "F")]
    assert kinds.count("matmul@fp8") == 3
    assert kinds.count("cast") == 2


def test_the_router_is_not_quantized() -> None:
    layer = LayerTemplate(m.MixtureOfExperts(16, 4, 2, hidden=8), 8, Context(quantization=DELAYED), FAST)
    kinds = [kind for kind, _ in operators(layer, "F")]
    assert kinds[0] == "matmul"
    assert kinds.count("grouped_matmul@fp8") == 2
    quantized = sum(p.local for p in layer.parameters if p.quantized)
    assert quantized == sum(p.local for p in layer.parameters) - 8 * 4


def test_tensor_parallel_peers_send_what_they_quantized() -> None:
    """Both all-gathers of a pass have a byte a number; sums stay in two. Each peer casts its own rows."""
    wide = LayerTemplate(m.MLP(16, gated=False, hidden=8), 8, Context(tensor=2), PLAIN)
    layer = LayerTemplate(m.MLP(16, gated=False, hidden=8), 8, Context(tensor=2, quantization=DELAYED), FAST)
    for part in ("F", "B"):
        before, now = operators(wide, part), operators(layer, part)
        for kind, factor in (("all_gather@2", 2), ("reduce_scatter@2", 1)):
            assert [t for k, t in before if k == kind] == [t * factor for k, t in now if k == kind]
    assert operators(layer, "F")[0] == ("cast", 5 * 8 * 4)
    casts = [t for kind, t in operators(layer, "B") if kind == "cast"]
    assert casts == [10 * 8 * 4 // 2, 10 * 8 * 4]
    # The gathered input is gathered again in the backward: this device's rows are kept, quantized.
    assert layer.on(Workload((10,))).activation_bytes["keep"] == 5 * 8 + 10 * 8 * 2 + 10 * 8


@pytest.mark.parametrize("cluster", [H100, GB200], ids=["h100", "gb200"])
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_large_layers_are_faster_and_small_ones_slower(cluster, precision: Precision) -> None:
    if cluster is H100 and precision in ("mxfp8", "nvfp4"):
        with pytest.raises(InputError, match=f"no products of precision {precision}; use bf16, fp8_delayed, fp8_curr"):
            Placement(cluster, Degrees(), TrainerSpec(precision=precision))
        return
    large, small = block(8192, 28672), block(64, 64)
    assert seconds(large, precision, 8192, cluster) < 0.85 * seconds(large, "bf16", 8192, cluster)
    assert seconds(small, precision, 64, cluster) > seconds(small, "bf16", 64, cluster)


@given(layer=residual_layers(), tokens=st.integers(1, 64), tensor=st.sampled_from((1, 2, 4)))
def test_quantized_layers_have_the_same_weights_and_operations(
    layer: a.ResidualLayer, tokens: int, tensor: int
) -> None:
    work = Workload((tokens * 4,))
    plain = layer_template(layer, Placement(GB200, Degrees(tensor=tensor)))
    for precision in PRECISIONS[1:]:
        quantized = layer_template(layer, Placement(GB200, Degrees(tensor=tensor), TrainerSpec(precision=precision)))
        assert quantized.num_parameters == plain.num_parameters
        assert quantized.local_parameters == plain.local_parameters
        assert quantized.on(work).model_flops == pytest.approx(plain.on(work).model_flops)
        for strategy in ("selective", "recompute"):
            kept = quantized.on(work).activation_bytes
            assert kept[strategy] <= kept["keep"]
        memory = quantized.memory(work, "keep", "B")
        assert memory.exit <= memory.peak


def test_what_a_block_keeps() -> None:
    """Inputs of the products take a byte; the output of attention is kept for attention too."""
    layer, tokens = block(1024, 4096), 512
    plain = layer_template(layer, Placement(H100, Degrees())).on(Workload((tokens,))).activation_bytes["keep"]
    fp8 = layer_template(layer, Placement(H100, Degrees(), TrainerSpec(precision="fp8_delayed")))
    kept = fp8.on(Workload((tokens,))).activation_bytes["keep"]
    # Of two norms and the activation, a byte instead of two; of the output of attention, one more.
    assert plain - kept == tokens * (1024 + 1024 + 4096 - 1024)


def test_weights_and_their_copies() -> None:
    layer = block(1024, 4096)
    products = 4 * 1024**2 + 3 * 1024 * 4096
    norms = 2 * 1024
    degrees = Degrees(data=8, zero=1)
    plain = static_bytes([layer_template(layer, Placement(GB200, degrees))], degrees)

    def more(precision: Precision, *, quantized_weights: bool = False) -> float:
        placement = Placement(GB200, degrees, TrainerSpec(precision=precision, quantized_weights=quantized_weights))
        template = layer_template(layer, placement)
        assert sum(template.local_parameters) == products + norms
        return static_bytes([template], degrees) - plain

    # Blackwell needs one copy of a tensor with one scale, and two with scales of blocks.
    assert more("fp8_current") == products
    assert more("mxfp8") == pytest.approx(2 * products * 33 / 32)
    assert more("mxfp8", quantized_weights=True) == pytest.approx(products * (2 * 33 / 32 - 2))
    assert more("nvfp4", quantized_weights=True) == pytest.approx(products * (2 * 9 / 16 - 2))
    hopper = layer_template(layer, Placement(H100, degrees, TrainerSpec(precision="fp8_current")))
    assert sum(hopper.copied_bytes) == 2 * products


def test_encoders_are_not_quantized_and_what_follows_them_is() -> None:
    quantized = Placement(H100, Degrees(), TrainerSpec(precision="fp8_current"))
    plain = quantized.in_bf16
    for name, wanted in (("vlm-s", {"vision": False, "lm": True}), ("t2v-s", {"lm": False, "dit": True})):
        architecture = load_architecture(name)
        found = {
            module.name: module_templates(architecture, module, quantized)
            != module_templates(architecture, module, plain)
            for module in architecture.modules
        }
        assert found == wanted


def test_quantized_weights_are_gathered_as_they_are() -> None:
    layer = block(1024, 4096)
    for degrees in (Degrees(data=8, zero=1), Degrees(data=8, zero=3)):
        sent = []
        for quantized in (False, True):
            place = Placement(GB200, degrees, TrainerSpec(precision="mxfp8", quantized_weights=quantized))
            template = layer_template(layer, place)
            costs = [*update_costs([template], place), *template.passes["keep"].programs["F"].costs]
            sent.append(sum(cost.network.one for cost in costs if cost.kind == "all_gather"))
        assert sent[1] == pytest.approx(sent[0] / 2 * 33 / 32, rel=1e-3)


@pytest.mark.parametrize(
    "layer",
    [a.TokenEmbeddingLayer(1024, 512), a.LanguageHeadLayer(512, 1024), a.ProjectorLayer(512, 512)],
    ids=["embedding", "head", "projector"],
)
def test_the_ends_of_a_model_are_not_quantized(layer: a.Layer) -> None:
    quantized = Placement(H100, Degrees(), TrainerSpec(precision="fp8_current"))
    assert layer_template(layer, quantized) is layer_template(layer, Placement(H100, Degrees()))


@pytest.mark.parametrize("name", ["a100", "a800"])
def test_devices_without_such_products(name: str) -> None:
    device = load_device(name)
    assert quantization("bf16", device) is None
    with pytest.raises(InputError, match="has no products of precision fp8_delayed; use bf16, or another device"):
        quantization("fp8_delayed", device)


def test_sustained_rates_of_quantized_products() -> None:
    device = load_device("gb200")
    assert device.quantized_products["mxfp8"] == (5e15, device.generation.sustained_fp8)
    changed = msgspec.structs.replace(device, sustained_fp8_flops_per_s=4e15, sustained_fp4_flops_per_s=9e15)
    assert changed.quantized_products["fp8"] == (5e15, 0.8)
    assert changed.quantized_products["nvfp4"] == (10e15, 0.9)
    with pytest.raises(InputError, match=r"sustained_fp4_flops_per_s: 2e\+16 is above the peak of 1e\+16"):
        msgspec.structs.replace(device, sustained_fp4_flops_per_s=2e16)


def test_a_device_without_a_table_of_its_own_scales_that_of_bfloat16() -> None:
    plain = Device("x", flops_per_s=1.0, quantized={"fp8": (2.0, 1.0)}, efficiency=PLAIN[0].efficiency)
    assert plain.efficiency_of("matmul@fp8") == plain.efficiency_of("matmul")
    assert plain.rates_of("matmul@fp8")[0] == 2.0
    assert plain.rates_of("causal_attention@128")[0] == 1.0


def test_the_tables_are_those_of_the_fit_and_predict_held_out_kernels() -> None:
    spec = importlib.util.spec_from_file_location("fit_efficiencies", ROOT / "scripts" / "fit_efficiencies.py")
    assert spec is not None
    assert spec.loader is not None
    fit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fit)
    device = load_device("gb200")
    rows = fit.read("gb200")
    cast, _ = fit.fit_casts("gb200", rows)
    found = dict(device.efficiency["compute"])
    assert np.allclose(found["cast"].memory, [(2.0**x, y) for x, y in zip(*cast[:2], strict=True)], rtol=5e-3)
    for precision, most in (("fp8", 0.1), ("fp8_block", 0.1), ("nvfp4", 0.15)):
        lines, said = fit.fit_quantized("gb200", rows, precision, cast)
        assert all(line.split("@")[1].split('"')[0] in device.quantized_products for line in lines)
        median = float(said.split("median ")[1].split("%")[0]) / 100
        assert median < most, said
