"""Precision of a run: how Megatron and Megatron Bridge write it, and which layers have it."""

from __future__ import annotations

import textwrap

import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.megatron import Timing, read_megatron
from pipeloom.integrations.megatron.costs import StageCosts
from pipeloom.integrations.megatron.trainer import RunPrecision
from pipeloom.spec.catalog import load_cluster
from tests.integrations.megatron.cases import listed

H100, GB200, A100 = load_cluster("h100-8"), load_cluster("1x8xgb200"), load_cluster("1x8xa100")
CURRENT = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, RunPrecision()),
        ({"fp8_recipe": "mxfp8"}, RunPrecision()),
        ({"fp8_format": "hybrid"}, RunPrecision("fp8_delayed")),
        (CURRENT, RunPrecision("fp8_current")),
        ({"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, RunPrecision("fp8_block")),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}, RunPrecision("mxfp8", True)),
        ({"fp4_format": "e2m1"}, RunPrecision("nvfp4")),
        ({"fp4_format": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True}, RunPrecision("nvfp4", True)),
        (CURRENT | {"first_last_layers_bf16": True}, RunPrecision("fp8_current", False, 1, 1)),
        (
            CURRENT
            | {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 3},
            RunPrecision("fp8_current", False, 0, 3),
        ),
        (CURRENT | {"num_layers_at_end_in_bf16": 3}, RunPrecision("fp8_current")),
    ],
)
def test_precision_is_read(changes: dict[str, object], found: RunPrecision) -> None:
    assert read_megatron(listed(changes)).precision == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8_format": "hybrid", "fp4_format": "e2m1"}, "--fp4-format: does not go with --fp8-format; leave one"),
        (
            {"fp8_format": "hybrid", "fp8_recipe": "custom"},
            "'custom' is not one of delayed, tensorwise, blockwise, mxfp8",
        ),
        ({"fp8_format": "hybrid", "first_last_layers_bf16": True}, "does not go with delayed scaling; leave it out"),
        (
            CURRENT | {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 12},
            "12 [+] 1 layers in bfloat16 are more than the model's 12; lower a number",
        ),
    ],
)
def test_impossible_precisions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_megatron(listed(changes))


@pytest.mark.parametrize(
    ("text", "found", "noted"),
    [
        ("bf16_mixed", RunPrecision(), False),
        ("bf16_with_fp8_current_scaling_mixed", RunPrecision("fp8_current", True, 1, 1), False),
        ("bf16-with-mxfp8-mixed", RunPrecision("mxfp8", True), False),
        ("bf16_with_nvfp4_mixed", RunPrecision("nvfp4", True), False),
        ("nemotron_h_bf16_with_fp8_subchannel_scaling_mixed", RunPrecision("fp8_block"), True),
        ("{bf16: true, fp8: hybrid, fp8_recipe: tensorwise}", RunPrecision("fp8_current"), False),
        ("{bf16: true, fp4: e2m1, fp4_param: true}", RunPrecision("nvfp4", True), False),
        ("{bf16: true}", RunPrecision(), False),
    ],
)
def test_precision_of_a_recipe(text: str, found: RunPrecision, noted: bool, tmp_path) -> None:
    """It overrides the fields of the model."""
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text(
        textwrap.dedent(
            f"""
            model: {{num_layers: 12, hidden_size: 2048, num_attention_heads: 16, vocab_size: 512, seq_length: 4096,
              pipeline_model_parallel_size: 4, fp8: e4m3, fp8_recipe: mxfp8, max_position_embeddings: 4096}}
            train: {{micro_batch_size: 1, global_batch_size: 16}}
            mixed_precision: {text}
            """
        )
    )
    run = read_megatron(file)
    assert run.precision == found
    assert any(note.startswith("mixed_precision") for note in run.notes) == noted


def test_layers_at_the_ends_cost_what_they_do_in_bfloat16() -> None:
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "swiglu": True}
    plain = Timing(read_megatron(listed(sizes)), H100)
    whole = Timing(read_megatron(listed(sizes | CURRENT)), H100)
    ends = CURRENT | {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3}
    mixed = Timing(read_megatron(listed(sizes | ends)), H100)
    setup = plain.run.now
    of_plain, of_whole, of_mixed = (timing.costs.of(setup) for timing in (plain, whole, mixed))
    assert of_whole[1] == of_mixed[1]
    assert of_whole[1].forward_ns < 0.8 * of_plain[1].forward_ns
    assert of_mixed[3] == of_plain[3]
    assert of_whole[0].forward_ns < of_mixed[0].forward_ns < of_plain[0].forward_ns
    ranks = [timing.costs.of_ranks(setup) for timing in (plain, whole, mixed)]
    # Hopper keeps two quantized copies of a weight.
    assert ranks[0][3] == ranks[2][3]
    assert ranks[1][1].static_bytes > ranks[0][1].static_bytes
    assert whole.of(setup).iteration_s < mixed.of(setup).iteration_s < plain.of(setup).iteration_s


def test_recomputing_modules_frees_what_is_quantized() -> None:
    moe = {"num_experts": 8, "moe_grouped_gemm": True, "moe_layer_freq": "[0]*6+[1]*6", "swiglu": True}
    run = read_megatron(listed(moe | CURRENT | {"moe_ffn_hidden_size": 4096}))
    costs, tokens = StageCosts(run, H100), 4096
    dense, routed = run.model.blocks[0], run.model.blocks[-1]
    # Only the norm before experts is a separate module. The router reads its result in 16 bits; two statistics are
    # held of each token.
    assert costs.saving(dense, ("layernorm",)).bytes == 0
    assert costs.saving(routed, ("layernorm",)).bytes == tokens * (2048 * 2 + 2 * 4)
    assert costs.saving(routed, ("moe_act",)).bytes == tokens * 2 * 4096
    assert costs.saving(routed, ("moe_act",)).more_ps > 0


def test_a_device_that_lacks_the_precision_is_named() -> None:
    run = read_megatron(listed(CURRENT))
    with pytest.raises(InputError, match=r"device 'A100.*': has no products of precision fp8_current; use bf16, or"):
        StageCosts(run, A100)
    with pytest.raises(InputError, match="has no products of precision nvfp4; use bf16, fp8_delayed, fp8_current"):
        StageCosts(read_megatron(listed(fp4_format="e2m1")), H100)
    assert StageCosts(read_megatron(listed(fp4_format="e2m1")), GB200).num_parameters
