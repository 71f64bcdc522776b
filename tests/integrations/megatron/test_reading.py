"""Runs as Megatron's arguments say them, and what is refused."""

from __future__ import annotations

import textwrap

import pytest

from pipeloom.emulator import module_parameters
from pipeloom.errors import InputError
from pipeloom.integrations.megatron import Recompute, read_megatron
from pipeloom.spec.architecture import AttentionMixer, ExpertsMixer, LatentAttentionMixer, MLPMixer
from tests.integrations.megatron.cases import beside_defaults, listed


def read(*more, devices=None, **changes):
    return read_megatron([*listed(changes), *more], num_devices=devices)


def test_a_plain_gpt():
    run = read(devices=8)
    assert (run.degrees.pipeline, run.degrees.data, run.num_microbatches) == (4, 2, 8)
    assert run.now.layout == "Et*3|t*3|t*3|t*3L"
    assert run.now.recompute == Recompute()
    block = run.model.blocks[0]
    assert block.attention.mixers[0] == AttentionMixer(16, 16, 128, qkv_bias=True, output_bias=True, rotary=False)
    assert block.feed_forward.mixers[0] == MLPMixer(4 * 2048, gated=False, bias=True)
    assert block.attention.norm == "layer"
    assert run.model.embedding.vocabulary == 50304
    assert run.model.embedding.positions == 4096
    assert run.model.head.tied
    assert run.workload.lengths == (4096,)
    assert "--num-layers" in run.read
    assert run.ignored == ()


def test_the_parameters_of_known_models():
    """GPT-3 175B and Llama 3 8B, as their papers and files have them."""
    gpt = read(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048, max_position_embeddings=2048)
    h, words = 12288, 50304
    expected = 96 * (12 * h * h + 13 * h) + (words + 2048) * h + 2 * h
    assert sum(module_parameters(gpt.architecture).values()) == expected
    llama = read_megatron(LLAMA)
    assert sum(module_parameters(llama.architecture).values()) == 8_030_261_248


LLAMA = listed(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    vocab_size=128256,
)


def test_llama():
    block = read_megatron(LLAMA).model.blocks[0]
    assert block.attention.mixers[0] == AttentionMixer(32, 8, 128, rotary=True)
    assert block.feed_forward.mixers[0] == MLPMixer(14336)


@pytest.mark.parametrize("kind", ["rope", "yarn", "none", None])
def test_only_the_learned_positions_are_switched_off(kind):
    plain, off = (read(position_embedding_type=kind, no_position_embedding=flag) for flag in (None, True))
    assert off.model == (plain.model if kind else read(position_embedding_type="none").model)
    assert "--no-position-embedding" in off.read


def test_experts_latent_attention_windows_and_prediction():
    moe = read(num_experts=8, moe_layer_freq="([0]*2+[1]*10)", moe_router_topk=2, moe_ffn_hidden_size=512, swiglu=True)
    kinds = [type(block.feed_forward.mixers[0]) for block in moe.model.blocks]
    assert kinds == [MLPMixer] * 2 + [ExpertsMixer] * 10
    assert [b.routed for b in read(num_experts=8, moe_layer_freq=3).model.blocks] == [i % 3 == 0 for i in range(12)]
    mla = read(multi_latent_attention=True, q_lora_rank=1536, kv_lora_rank=512, mtp_num_layers=1)
    assert mla.model.blocks[0].attention.mixers[0] == LatentAttentionMixer(16, 512, 128, 64, 128, 1536, bias=True)
    assert mla.now.stages[-1] == "tttmL"
    slides = read(window_size="(127,0)", window_attn_skip_freq=4)
    windows = [block.attention.mixers[0].window for block in slides.model.blocks]
    assert windows == [128, 128, 128, None] * 3


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 1}, "Et|(t|)*10tL"),
        ({"num_virtual_stages_per_pipeline_rank": 3}, "Et|(t|)*10tL"),
        ({"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2}, "Ett|t*4|t*4|ttL"),
        (
            {
                "num_layers": 10,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            "Ett|t*3|t*3|ttL",
        ),
        ({"pipeline_model_parallel_layout": "E|(tt|)*5tt|L"}, "E|(tt|)*6L"),
    ],
)
def test_stages_as_they_are_now(changes, layout):
    assert read(**changes).now.layout == layout


def test_recomputation_as_it_is_now():
    assert read(recompute_activations=True).now.recompute == Recompute("selective", modules=("core_attn",))
    # Megatron adds the experts to the modules that are recomputed by default.
    experts = read(num_experts=8, moe_ffn_hidden_size=64, moe_layer_recompute=True).now.recompute
    assert experts == Recompute("selective", modules=("core_attn", "moe"))
    both = read(recompute_granularity="selective", recompute_modules="layernorm moe_act").now.recompute
    assert both.modules == ("layernorm", "moe_act")
    block = read(recompute_granularity="full", recompute_method="block", recompute_num_layers=2).now.recompute
    assert [block.recomputed(n) for n in (1, 3)] == [1, 2]
    assert block.arguments == ("--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 2")


SCRIPT = """
    #!/bin/bash
    GPUS=8  # of a node
    HIDDEN=${HIDDEN:-2048}
    GPT_ARGS="
        --num-layers 12 \\
        --hidden-size $HIDDEN --num-attention-heads 16
        --seq-length 4096 --max-position-embeddings 4096
    "
    MORE=(
        --micro-batch-size 1       # sequences
        "--global-batch-size 16"
        --pipeline-model-parallel-size 4
        --pipeline-model-parallel-layout "E|(tt|)*5tt|L"
        --vocab-size=50257
        --bf16
    )
    if [ "$1" == "resume" ]; then MORE+=(--load /checkpoints); fi
    torchrun --nproc_per_node $GPUS --nnodes=2 pretrain_gpt.py $GPT_ARGS ${MORE[@]} \\
        --moe-layer-freq '([1]*12)' | tee log.txt
"""


def test_a_shell_script(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(textwrap.dedent(SCRIPT))
    run = read_megatron(file)
    assert (run.degrees.data, run.now.layout, run.model.embedding.hidden) == (4, "E|(tt|)*6L", 2048)
    assert run.ignored == ("--moe-layer-freq",)


BRIDGE = """
    _target_: megatron.bridge.training.config.ConfigContainer
    model:
      _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
      num_layers: 12
      hidden_size: 2048
      num_attention_heads: 16
      num_query_groups: 4
      kv_channels: null
      add_bias_linear: false
      gated_linear_unit: true
      activation_func: {_target_: torch.nn.functional.silu, _call_: false}
      ffn_hidden_size: 5632
      normalization: RMSNorm
      position_embedding_type: rope
      share_embeddings_and_output_weights: false
      vocab_size: 32000
      should_pad_vocab: true
      seq_length: 4096
      num_moe_experts: null
      tensor_model_parallel_size: 2
      sequence_parallel: true
      pipeline_model_parallel_size: 4
      virtual_pipeline_model_parallel_size: 3
      pipeline_model_parallel_layout: LAYOUT
      microbatch_group_size_per_vp_stage: 4
      recompute_granularity: full
      recompute_method: uniform
      recompute_num_layers: 1
      cuda_graph_impl: none
      hf_model_id: null
    train: {micro_batch_size: 1, global_batch_size: 16, train_iters: 10}
    dataset: {seq_length: 4096, data_path: null}
    ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true}
    optimizer: {lr: 0.0003, use_distributed_optimizer: true}
    mixed_precision: bf16_mixed
    logger: {log_interval: 1}
"""


@pytest.mark.parametrize(
    ("layout", "first"),
    [("null", "Et"), ("[[embedding], [decoder, decoder], " + ", ".join(["[decoder]"] * 9) + ", [decoder, loss]]", "E")],
)
def test_a_recipe_of_megatron_bridge(tmp_path, layout, first):
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text(textwrap.dedent(BRIDGE).replace("LAYOUT", layout))
    run = read_megatron(file, default_devices=16)
    assert (run.degrees.tensor, run.degrees.data, run.degrees.zero, run.degrees.sequence_parallel) == (2, 2, 1, True)
    block = run.model.blocks[0]
    assert block.attention.mixers[0] == AttentionMixer(16, 4, 128)
    assert block.feed_forward.mixers[0] == MLPMixer(5632)
    assert run.model.embedding.vocabulary == 32000
    assert (run.now.stages[0], run.now.virtual) == (first, 3)
    assert run.now.recompute == Recompute("full", "uniform", 1)
    assert "logger.*" in run.ignored


def test_what_a_recipe_leaves_empty_or_says_otherwise(tmp_path):
    pytest.importorskip("yaml")
    text = textwrap.dedent(BRIDGE).replace("LAYOUT", "''").replace("ffn_hidden_size: 5632", "ffn_hidden_size: null")
    file = tmp_path / "recipe.yaml"
    file.write_text(text.replace("kv_channels: null", "window_size: [127, 0]\n  recompute_modules: []"))
    run = read_megatron(file)
    # Megatron Core's configuration does not narrow a gated perceptron, as Megatron-LM's arguments do.
    assert run.model.blocks[0].feed_forward.mixers[0].inner == 4 * 2048
    assert run.model.blocks[0].attention.mixers[0].window == 128
    assert run.now.virtual == 3
    assert run.section == "model"
    assert run.replaced[:2] == (
        "model.microbatch_group_size_per_vp_stage",
        "model.virtual_pipeline_model_parallel_size",
    )
    assert run.now.fields(run.section)[:2] == (
        "model.pipeline_model_parallel_layout: 'Et|(t|)*10tL'",
        "model.virtual_pipeline_model_parallel_size: 3",
    )
    assert run.now.fields(run.section)[-1] == "model.recompute_modules: null"
    file.write_text(text + "dist: {use_megatron_fsdp: true}\n")
    with pytest.raises(InputError, match=r"dist\.use_megatron_fsdp: cannot be planned"):
        read_megatron(file)


BUILT = """
    model:
      _target_: megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig
      _builder_: megatron.bridge.models.gpt.gpt_builder.GPTModelBuilder
      transformer:
        _target_: megatron.bridge.models.transformer_config.TransformerConfig
        num_layers: 8
        hidden_size: 512
        num_attention_heads: 8
        pipeline_model_parallel_size: 2
        bf16: true
      transformer_layer_spec: {_target_: megatron.bridge.models.gpt.gpt_builder.default_layer_spec, _call_: false}
      vocab_size: 1024
      seq_length: 2048
      extra_checkpoint_metadata: {hf_model_id: some}
    train: {micro_batch_size: 1, global_batch_size: 8}
"""


def test_a_recipe_whose_builder_nests_the_sizes(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text(textwrap.dedent(BUILT))
    run = read_megatron(file)
    assert (run.num_layers, run.model.head.hidden, run.degrees.pipeline) == (8, 512, 2)
    assert run.model.embedding.positions == 2048
    assert run.now.fields(run.section)[0] == "model.transformer.pipeline_model_parallel_layout: 'Et*4|t*4L'"
    assert beside_defaults(run.notes) == ()


def test_a_recipe_of_a_hybrid_model(tmp_path):
    pytest.importorskip("yaml")
    fields = [
        "hybrid_layer_pattern: M-M-M*M-",
        "mamba_chunk_size: 256",
        "hybrid_stack_spec: {_target_: megatron.bridge.models.hybrid.hybrid_provider.get_default_hybrid_stack_spec}",
        "mamba_stack_spec: null",
        "keep_mtp_spec_in_bf16: true",
        "position_embedding_type: none",
        "vocab_size: 1024",
    ]
    file = tmp_path / "recipe.yaml"
    file.write_text(textwrap.dedent(BUILT).replace("vocab_size: 1024", "\n  ".join(fields)))
    run = read_megatron(file)
    assert run.model.blocks[0].whole.mixers[0].chunk == 256
    assert run.rules.several_stages == "hybrid-layer-pattern"
    lines = run.now.fields(run.section)
    assert lines[0] == "model.hybrid_layer_pattern: 'M-M-|M*M-'"
    assert all(line.startswith("model.transformer.") for line in lines[1:])
    assert beside_defaults(run.notes) == ()


LANGUAGE_MODEL = """
    language_model:
      num_layers: 12
      hidden_size: 2048
      num_attention_heads: 16
      activation_func: swiglu
      add_bias_linear: false
      normalization: RMSNorm
    model_parallel: {pipeline_model_parallel_size: 4, tensor_model_parallel_size: 1}
    micro_batch_size: 1
    global_batch_size: 16
    seq_length: 4096
    vocab_size: 50257
    max_position_embeddings: 4096
    bf16: true
"""


def test_the_yaml_of_megatron_lm(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yml"
    file.write_text(textwrap.dedent(LANGUAGE_MODEL))
    run = read_megatron(file)
    assert run.model.blocks[0].feed_forward.mixers[0] == MLPMixer(5440)
    assert (run.now.layout, beside_defaults(run.notes), run.section) == ("Et*3|t*3|t*3|t*3L", (), "")


def test_arguments_in_a_test_recipe(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "model_config.yaml"
    words = listed(pipeline_model_parallel_layout="Et|t*4|t*4|t*3L", swiglu=True)
    lines = []
    for word in words:
        if word.startswith("--"):
            lines.append(f"  {word}: true")
        else:
            lines[-1] = lines[-1].replace("true", word)
    file.write_text("ENV_VARS:\n  A: 1\nMODEL_ARGS:\n" + "\n".join(lines) + "\n  --fp16: false\n")
    assert read_megatron(file).now.layout == "Et|t*4|t*4|t*3L"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, "--num-layer: is not an argument of Megatron; did you mean --num-layers?"),
        ({"num_moe_experts": 3}, "--num-moe-experts: is not an argument of Megatron; did you mean --num-experts?"),
        ({"hidden_size": None}, "--hidden-size: is missing; add it"),
        ({"vocab_size": None}, "--vocab-size: is missing; add it; its value is the size of the tokenizer's vocabulary"),
        ({"micro_batch_size": None}, "--micro-batch-size: is missing"),
        ({"seq_length": "long"}, "--seq-length: 'long' is not a whole number"),
        ({"hidden_size": 0}, "--hidden-size: 0 is below 1"),
        ({"num_attention_heads": 17}, "--num-attention-heads: 17 does not divide --hidden-size 2048"),
        (
            {"tensor_model_parallel_size": 3},
            "degrees: tensor 3 x pipeline 4 x context 1 = 12 does not divide 8 devices",
        ),
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size: 1 is not a pipeline"),
        (
            {"global_batch_size": 17},
            "17 is not a multiple of 1 sequences a microbatch on 2 replicas; take a multiple of 2",
        ),
        ({"num_layers": 13}, "--num-layers: 13 layers cannot be divided evenly over 4 ranks"),
        ({"pipeline_model_parallel_layout": "Et*11L|||"}, "has 11 layers, --num-layers says 12"),
        ({"pipeline_model_parallel_layout": "Et*12L"}, "has 1 stages, which is not a multiple of 4 ranks"),
        ({"pipeline_model_parallel_layout": "Et*6|x|t*6|L"}, "'x' is not known; use E, t, m, L"),
        ({"pipeline_model_parallel_layout": "t*6E|t|t|t*4L"}, "is not the model in its order"),
        (
            {"pipeline_model_parallel_layout": "Et*6|t|t|t*4L", "decoder_first_pipeline_num_layers": 2},
            "--decoder-first-pipeline-num-layers: contradicts --pipeline-model-parallel-layout",
        ),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "2 does not divide the 3 layers of a rank"),
        (
            {"num_layers_per_virtual_pipeline_stage": 1, "num_virtual_stages_per_pipeline_rank": 3},
            "--num-layers-per-virtual-pipeline-stage: contradicts --num-virtual-stages-per-pipeline-rank",
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 3, "microbatch_group_size_per_virtual_pipeline_stage": 5},
            "5 does not suit 8 microbatches on 4 ranks; use 4 or 8",
        ),
        ({"num_virtual_stages_per_pipeline_rank": 3, "global_batch_size": 4}, "use a larger --global-batch-size"),
        ({"recompute_granularity": "full"}, "--recompute-method: nothing is neither uniform nor block"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "--recompute-num-layers: is missing"),
        ({"recompute_method": "block"}, "--recompute-method: has no granularity"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "contradicts selective"),
        ({"recompute_granularity": "selective", "recompute_modules": "attn"}, "'attn' is not one of core_attn"),
        ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size: 2 does not divide 0 experts"),
        ({"num_experts": 16, "expert_model_parallel_size": 16}, "16 does not divide data 2 x context 1 x tensor 1"),
        ({"num_experts": 1, "moe_router_topk": 2}, "--moe-router-topk: 2 is more than 1 experts"),
        ({"num_experts": 4, "moe_layer_freq": "[1]*11"}, "has 11 entries, the model 12 layers"),
        ({"num_experts": 4, "moe_layer_freq": "__import__('os')"}, "is neither a number nor a list of 0 and 1"),
        ({"num_experts": 4, "moe_layer_freq": "[1]*99999999999"}, "is neither a number nor a list of 0 and 1"),
        ({"spec": "my.layers my_spec"}, "--spec: cannot be planned"),
        ({"seq_length": 4098, "context_parallel_size": 2}, "--seq-length: 4098 is not a multiple of 4"),
        ({"hidden_size": "$HIDDEN"}, "--hidden-size: $HIDDEN is not set in this file"),
        ({"normalization": "BatchNorm"}, "'BatchNorm' is neither LayerNorm nor RMSNorm"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(InputError) as caught:
        read(devices=8, **changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("arguments: ")


def test_an_argument_given_twice():
    with pytest.raises(InputError, match="--num-layers: is given twice, with 12 and 24; leave one"):
        read("--num-layers", "24")
    with pytest.raises(InputError, match="--num-layers: is given twice, with 12 and 24; leave one"):
        read("--num-layers", "24", "--num-layers", "12")
    assert read("--num-layers", "12", "--lr", "1", "--lr", "2").num_layers == 12


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "model: [", "is not YAML"),
        ("a.yaml", "- 1", "is not a table of settings"),
        (
            "a.yaml",
            "model: {hidden_sizes: 3}",
            "model.hidden_sizes: is not an argument of Megatron; did you mean hidden_size?",
        ),
        ("a.yaml", "model: {hidden_size: 3}", "--num-layers: is missing; add it; a Megatron Bridge recipe"),
        ("a.yaml", "model: !!python/object:os.system {}", "is not YAML"),
        ("a.sh", "--num-layers '3", "cannot be read"),
        ("a.sh", "", "is missing"),
    ],
)
def test_files_that_are_refused(tmp_path, name, text, message):
    pytest.importorskip("yaml")
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_megatron(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_megatron(tmp_path / "none.sh")


def test_what_is_emulated_otherwise_is_said():
    run = read(kitchen_recipe_number=1, overlap_grad_reduce=True, cuda_graph_impl="none")
    assert beside_defaults(run.notes) == (
        "--kitchen-recipe-number: bfloat16 is emulated in its place; the emulated time and memory are too high",
    )
    assert "float32" in " ".join(read(bf16=None).notes)
