"""Hybrid models, whose layers and stages Megatron takes as a pattern."""

from __future__ import annotations

import random
import re

import pytest

from pipeloom.emulator import module_parameters
from pipeloom.errors import InputError
from pipeloom.integrations.megatron import best_layout, plan_gain, read_megatron
from pipeloom.integrations.megatron.model import pattern_of
from pipeloom.integrations.megatron.timing import Timing
from pipeloom.search import Budget
from pipeloom.spec.architecture import AttentionMixer, ExpertsMixer, Mamba2Mixer, MLPMixer
from pipeloom.spec.catalog import load_architecture, load_cluster
from tests.integrations.megatron.cases import listed

NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
SIZES = {
    "num_layers": None,
    "hidden_size": 4096,
    "ffn_hidden_size": 21504,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "mamba_num_heads": 128,
    "normalization": "RMSNorm",
    "squared_relu": True,
    "disable_bias_linear": True,
    "position_embedding_type": "none",
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 131072,
}


def arguments(pattern=NEMOTRON_H_8B, **changes):
    return listed(SIZES, hybrid_layer_pattern=pattern, **changes)


def test_the_parameters_of_a_known_model():
    run = read_megatron(arguments())
    published = load_architecture("nemotron-h-8b")
    assert sum(module_parameters(run.architecture).values()) == sum(module_parameters(published).values())
    kinds = {"M": Mamba2Mixer, "*": AttentionMixer, "-": MLPMixer}
    assert [type(block.whole.mixers[0]) for block in run.model.blocks] == [kinds[each] for each in NEMOTRON_H_8B]
    assert run.model.blocks[0].whole.mixers[0] == Mamba2Mixer(128, 64, 128, 8, chunk=128)
    assert run.now.stages[0] == "E" + "t" * 13


def test_stages_experts_and_predictions_of_a_pattern():
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 512}
    run = read_megatron(arguments("ME|M*|ME|MM|ME|*E|M|M/*E/*E", **experts))
    assert run.now.stages == ("Ett", "tt", "tt", "tt", "tt", "tt", "t", "tmmL")
    assert run.now.virtual == 2
    assert isinstance(run.model.blocks[1].whole.mixers[0], ExpertsMixer)
    (first, second) = run.model.predictors
    assert first == second
    assert [type(each) for each in first.whole.mixers] == [AttentionMixer, ExpertsMixer]
    assert run.now.layout == "ME|M*|ME|MM|ME|*E|M|M/*E/*E"
    assert run.now.arguments[0] == "--hybrid-layer-pattern 'ME|M*|ME|MM|ME|*E|M|M/*E/*E'"
    assert run.now.fields("model")[0] == "model.hybrid_layer_pattern: 'ME|M*|ME|MM|ME|*E|M|M/*E/*E'"


def test_the_older_argument_and_a_standard_stack():
    old = listed(SIZES, hybrid_override_pattern="M-M-M*M-", is_hybrid_model=True, num_layers=8)
    run = read_megatron([*old, "--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"])
    bracketed = [*old, "--spec", "[megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec]"]
    assert read_megatron(bracketed).architecture == run.architecture
    assert run.now.layout == "M-|M-|M*|M-"
    assert run.replaced == ("--hybrid-override-pattern",)


def test_one_virtual_stage_is_none():
    run = read_megatron(arguments("M-M-M*M-", num_virtual_stages_per_pipeline_rank=1))
    assert run.now.layout == "M-|M-|M*|M-"


def test_norms_are_recomputed_only_where_megatron_has_them_as_modules():
    """Transformer Engine fuses the norms before Mamba, attention and an MLP into the linear layer behind them."""
    assert "layernorm" not in read_megatron(arguments()).recomputable
    run = read_megatron(arguments("ME*-", num_experts=8, moe_ffn_hidden_size=512))
    assert "layernorm" in run.recomputable
    costs = Timing(run, load_cluster("8xH100"), None).costs
    saved = [costs.saving(block, ("layernorm",)).bytes > 0 for block in run.model.blocks]
    assert saved == [False, True, False, False]


def test_a_random_pattern_is_read_as_it_is_written():
    draw = random.Random(0)
    for _ in range(20):
        stages = 4 * draw.randint(1, 3)
        pattern = "|".join("".join(draw.choices("M*-", k=draw.randint(1, 4))) for _ in range(stages))
        pattern += "/*-" * draw.randint(0, 2)
        assert read_megatron(arguments(pattern)).now.layout == pattern


def test_layers_have_the_pattern_that_they_were_read_from():
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 512}
    for pattern in (NEMOTRON_H_8B, "ME|M*|ME|M-/*E/*E"):
        module = read_megatron(arguments(pattern, **experts)).architecture.modules[-1]
        found = pattern_of(module.flat_layers)
        assert found is not None
        assert found.divided([len(found.layers)]) == pattern.replace("|", "")
    assert pattern_of(read_megatron(listed()).architecture.modules[-1].flat_layers) is None


def test_the_best_layout_is_a_pattern_of_the_same_layers():
    run = read_megatron(arguments("M-M*M-M-M*M-M-M-", global_batch_size=32, hidden_size=1024, ffn_hidden_size=4096))
    found = best_layout(run, load_cluster("16xH100"), budget=Budget(evaluations=300))
    layout = found.best.setup.layout
    assert layout.replace("|", "") == "M-M*M-M-M*M-M-M-"
    assert all(layout.split("|"))
    assert found.best.iteration_s <= found.now.iteration_s
    assert found.best.setup.recompute.granularity != "full"
    assert found.arguments()[0] == f"--hybrid-layer-pattern '{layout}'"
    again = read_megatron(arguments(layout, global_batch_size=32, hidden_size=1024, ffn_hidden_size=4096))
    assert again.now.stages == found.best.setup.stages
    assert plan_gain(found.timing, found.best.setup, budget=Budget(evaluations=50)).gain >= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "M*X-"}, "--hybrid-layer-pattern: has a layer 'X'; only M, *, -, E are emulated"),
        ({"pattern": "M*-G"}, "has a layer 'G'"),
        ({"pattern": "[M*]--"}, "has a layer '['"),
        ({"pattern": "||"}, "--hybrid-layer-pattern: has no layers"),
        ({"pattern": "M*|M-|M-"}, "has 3 stages, which is not a multiple of 4 ranks"),
        ({"pattern": "M*M-M/M/-"}, "has unlike parts behind /"),
        ({"pattern": "M*M-M/"}, "has unlike parts behind /"),
        ({"pattern": "M*M-M-M"}, "7 layers cannot be divided evenly over 4 ranks"),
        ({"pattern": "M*M-M-ME"}, "--num-experts: is missing"),
        ({"num_layers": 51}, "--num-layers: is 51, and the pattern of the hybrid model has 52"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers: is 1, and the pattern of the hybrid model has 0"),
        ({"pipeline_model_parallel_layout": "Et|t|t|tL"}, "contradicts --hybrid-layer-pattern"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "contradicts --hybrid-layer-pattern; separate the stages there"),
        ({"pattern": "M|*|M|-", "decoder_first_pipeline_num_layers": 1}, "contradicts --hybrid-layer-pattern"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "full recomp"),
        ({"spec": "my.layers my_spec"}, "--spec: cannot be planned"),
        ({"pattern": None, "num_layers": 12, "is_hybrid_model": True}, "--is-hybrid-model: has no pattern of layers"),
        ({"pattern": None, "num_layers": 12, "hybrid_attention_ratio": 0.1}, "write the layers as --hybrid-layer"),
        ({"hybrid_override_pattern": "MMMM"}, "--hybrid-override-pattern: contradicts --hybrid-layer-pattern"),
        ({"spec": "mine.layers mamba_stack_spec"}, "--spec: cannot be planned"),
        ({"spec": "[mine.layers mamba_stack_spec]"}, "--spec: cannot be planned"),
        ({"pattern": "M" * 200_000}, "has more than 100000 layers"),
        ({"pattern": "MMMM" + "/M" * 100_001}, "has more than 100000 layers"),
        (
            {"num_virtual_stages_per_pipeline_rank": 3, "pattern": "M|M|M|M|M|M|M|M"},
            "contradicts --hybrid-layer-pattern",
        ),
        ({"mamba_num_heads": 30}, "--mamba-num-groups: 8 does not divide 30 Mamba heads"),
        ({"mamba_num_groups": 2, "tensor_model_parallel_size": 4}, "2 is not a multiple of tensor parallelism 4"),
        ({"mamba_num_heads": 12, "mamba_num_groups": 4, "context_parallel_size": 8}, "8 does not suit 12 Mamba heads"),
        ({"mamba_num_heads": None, "mamba_head_dim": 48}, "48 does not divide twice --hidden-size 4096"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        read_megatron(arguments(**changes))
