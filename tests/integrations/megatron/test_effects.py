"""Every argument of Megatron is modeled, harmless for a reason, noted with a direction, or rejected."""

from __future__ import annotations

import itertools
import textwrap
import tomllib
from collections import Counter
from dataclasses import replace
from importlib import resources

import msgspec
import pytest

from pipeloom.compare.model_on_cluster import put_on_cluster
from pipeloom.compare.now import run_costs
from pipeloom.errors import InputError
from pipeloom.integrations.current_runs import load_run
from pipeloom.integrations.megatron import Timing, read_megatron
from pipeloom.integrations.megatron.effects import effects_of, known_fields
from pipeloom.integrations.megatron.files import _INVERTED, _RENAMED
from pipeloom.integrations.megatron.trainer import RunPrecision
from pipeloom.integrations.models import load_model
from pipeloom.layout import single_rank
from pipeloom.spec import Chunk
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.parallelism import MIXED_PRECISION, StateBytes
from pipeloom.spec.trainer import FUSED, Overlap
from tests.integrations.megatron.cases import SMALL, beside_defaults, listed

FILES = ("arguments", "fields")
REASONS = {
    "numerics and optimization: the same operations with other numbers",
    "what the emulator assumes anyway",
    "details of arguments that have notes",
    "details of arguments that are rejected",
    "elastic models, read with --flextron alone",
    "other models, without effect on GPT",
    "logging and profiling",
    "checkpoints",
    "data and tokenizers",
    "initialization",
    "launch and failures",
    "length of training and evaluation",
    "inference",
    "other names of arguments",
}
MOE = {
    "num_experts": 8,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 1,
    "global_batch_size": 16,
}
"""A run in which every argument does something."""


def run_of(*more, **changes):
    return read_megatron([*listed(MOE | changes), *more], num_devices=32)


def leaves(table):
    return itertools.chain.from_iterable(
        leaves(each) if isinstance(each, dict) else each.split() for each in table.values()
    )


def test_every_name_stands_once() -> None:
    names: Counter[str] = Counter()
    for file in FILES:
        text = resources.files("pipeloom.integrations.megatron").joinpath("names", f"{file}.toml").read_text("utf-8")
        tables = tomllib.loads(text)
        unless, absent, implied = (tables.pop(name, {}) for name in ("unless", "absent", "implied"))
        assert set(leaves(absent)) >= implied.keys()
        assert {*leaves(absent), *leaves(implied)} <= effects_of(file).names
        assert tables.keys() == {"modeled", "harmless", "noted", "refused"}
        assert unless.keys() <= effects_of(file).noted.keys()
        names.update(leaves(tables))
    assert {name for name, count in names.items() if count > 1} == set()
    assert len(names) == len(known_fields()) > 1100


def test_every_reason_and_direction_is_one_of_few() -> None:
    for file in FILES:
        effects = effects_of(file)
        assert set(effects.harmless.values()) <= REASONS
        for direction in [note.direction for note in effects.noted.values()] + [each for _, each in effects.absent]:
            assert direction.startswith("the emulated ")
            assert any(word in direction for word in ("too high", "too low"))
        assert all(effects.rejected.values())
    renamed = {name for name, why in effects_of("fields").harmless.items() if why == "other names of arguments"}
    assert (
        renamed - {"activation-func", "should-pad-vocab", "grad-reduce-in-fp32"}
        == _RENAMED.keys() | _INVERTED.keys() - known_arguments()
    )


def known_arguments() -> frozenset[str]:
    return effects_of("arguments").names


MODELED = [
    {"attention_output_gate": True, "group_query_attention": True, "num_query_groups": 4, "kv_channels": 64},
    {"add_qkv_bias": True, "disable_bias_linear": True, "qk_layernorm": True, "quick_geglu": True},
    {"num_experts": 8, "moe_latent_size": 64, "moe_layer_freq": 1, "moe_router_topk": 2, "moe_grouped_gemm": True},
    {"num_experts": 8, "moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 8},
    {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_layer_recompute": True, "expert_tensor_parallel_size": 1},
    {
        "window_size": "(127,0)",
        "window_attn_skip_freq": 4,
        "ffn_hidden_size": 64,
        "swiglu": True,
        "normalization": "RMSNorm",
    },
    {"overlap_grad_reduce": True, "overlap_param_gather": True, "tp_comm_overlap": True},
    {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
    {"use_rotary_position_embeddings": True},
    {"overlap_moe_expert_parallel_comm": True, "num_virtual_stages_per_pipeline_rank": 3},
    {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
    {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
    {"enable_cuda_graph": True, "cuda_graph_scope": "attn", "use_transformer_engine_op_fuser": True},
    {"enable_cuda_graph": True, "cuda_graph_modules": "attn"},
    {"fine_grained_activation_offloading": True, "offload_modules": "core_attn attn_proj"},
    {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "activation_func_clamp_value": 7.0},
    {"position_embedding_type": "rope", "no_position_embedding": True},
    {"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "v_head_dim": 8},
    {"multi_latent_attention": True, "qk_pos_emb_head_dim": 8, "untie_embeddings_and_output_weights": True},
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True, "num_layers": 10},
    {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 3, "sequence_parallel": True},
    {"num_virtual_stages_per_pipeline_rank": 3, "microbatch_group_size_per_virtual_pipeline_stage": 4},
    {"num_layers_per_virtual_pipeline_stage": 1, "pipeline_model_parallel_layout": None},
    {"pipeline_model_parallel_layout": "Et*3|t*3|t*3|t*3mL", "mtp_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_activations": True, "recompute_modules": "core_attn", "tensor_model_parallel_size": 1},
    {"num_experts": 8, "expert_model_parallel_size": 1, "context_parallel_size": 1, "make_vocab_size_divisible_by": 64},
    {"padded_vocab_size": 512, "hidden_dropout": 0.0},
    {"no_pad_vocab_size": True},
    {"disable_pad_vocab_size": True},
    {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "main_grads_dtype": "bf16"}
    | {"main_params_dtype": "fp16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16", "grad_reduce_in_bf16": True},
    {"accumulate_allreduce_grads_in_fp32": True, "optimizer": "sgd", "sgd_momentum": 0.9},
    {"bf16": None, "fp16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    {"fp4_format": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True, "first_last_layers_bf16": True}
    | {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 4},
    {"num_layers": 4, "hybrid_layer_pattern": "MM*-", "mamba_num_heads": 8, "mamba_head_dim": 64, "mamba_num_groups": 2}
    | {"mamba_state_dim": 16, "spec": "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"},
    {"num_layers": 4, "hybrid_override_pattern": "MM*-", "is_hybrid_model": True},
    {"eval_global_batch_size": 8, "eval_micro_batch_size": 2},
    {"num_experts": 8, "moe_enable_routing_replay": True},
]
"""Runs that together have all modeled arguments."""


def test_reading_asks_for_what_is_modeled_and_for_nothing_else() -> None:
    asked: set[str] = set()
    for changes in MODELED:
        asked |= {label[2:] for label in read_megatron(listed(changes)).read}
    effects = effects_of("arguments")
    assert effects.modeled <= asked
    assert asked <= effects.modeled | effects.noted.keys()


VALUES = {
    "transformer-impl": "local",
    "optimizer": "muon",
    "cuda-graph-impl": "local",
    "attention-backend": "unfused",
    "vocab-extra-ids": "100",
    "rampup-batch-size": "8 4 1000",
}


@pytest.mark.parametrize("name", sorted(effects_of("arguments").noted))
def test_what_is_noted_is_said_with_its_direction(name) -> None:
    run = run_of(f"--{name}", VALUES.get(name, "7"))
    note = effects_of("arguments").noted[name]
    assert f"--{name}: {note.text}; {note.direction}" in run.notes
    assert f"--{name}" not in run.ignored
    for value in ("0", "0.0", "none", "False", *note.unless):
        assert not any(f"--{name}:" in each for each in run_of(f"--{name}", value).notes if name != "transformer-impl")


@pytest.mark.parametrize("name", sorted(effects_of("arguments").rejected))
def test_what_is_rejected_is_named(name) -> None:
    with pytest.raises(InputError, match=rf"^arguments: --{name}: cannot be planned; "):
        run_of(f"--{name}", "7")
    if name == "cpu-offloading-num-layers":
        assert run_of(f"--{name}", "0")


def test_what_is_harmless_changes_nothing() -> None:
    effects = effects_of("arguments")
    plain, names = run_of(), sorted(effects.harmless.keys() - set().union(*effects.absent.values()))
    found = run_of(*itertools.chain.from_iterable((f"--{name}", "7") for name in names))
    assert found.ignored == tuple(f"--{name}" for name in names)
    assert replace(found, ignored=plain.ignored) == plain


def test_the_output_gate_of_attention_has_weights_of_its_own() -> None:
    changes = {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 256, "disable_bias_linear": True}
    cluster = load_cluster("h100-8")
    plain, gated = (
        Timing(read_megatron(listed(changes, attention_output_gate=gate)), cluster) for gate in (None, True)
    )
    assert gated.costs.num_parameters - plain.costs.num_parameters == 12 * 2048 * 16 * 256
    times = [timing.of(timing.run.now).iteration_s for timing in (plain, gated)]
    assert times[0] < times[1]


PRECISION_AWARE = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
KINDS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@pytest.mark.parametrize(("gradient", "main", "first", "second"), [*itertools.product(KINDS, repeat=4)][::7])
def test_a_precision_aware_optimizer_has_the_bytes_of_its_data_types(gradient, main, first, second) -> None:
    run = read_megatron(
        listed(
            use_precision_aware_optimizer=True,
            use_distributed_optimizer=True,
            main_grads_dtype=gradient,
            main_params_dtype=main,
            exp_avg_dtype=first,
            exp_avg_sq_dtype=second,
        ),
        num_devices=8,
    )
    # Of a main weight in float32, only the bits that the weight in bfloat16 lacks are kept.
    assert run.degrees.state == StateBytes(KINDS[gradient], min(2, KINDS[main]) + KINDS[first] + KINDS[second])


def test_data_types_count_in_memory() -> None:
    """Bytes a parameter: those of weights, gradients, and over two replicas of the state."""
    dtypes = {"main_grads_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    both = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    cluster = load_cluster("h100-8")
    static = []
    for changes in ({"use_distributed_optimizer": True}, both | dtypes):
        timing = Timing(read_megatron(listed(changes), num_devices=8), cluster, FUSED)
        static.append([rank.static_bytes for rank in timing.costs.of_ranks(timing.run.now)])
    for plain, small in zip(*static, strict=True):
        assert plain / small == pytest.approx((2 + 4 + 12 / 2) / (2 + 2 + 6 / 2))


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, (4, 12)),
        ({"optimizer": "sgd"}, (4, 8)),
        ({"optimizer": "sgd", "sgd_momentum": "0.0"}, (4, 4)),
        ({"optimizer": "lion", "grad_reduce_in_bf16": True}, (2, 8)),
        ({"accumulate_allreduce_grads_in_fp32": True}, (4, 12)),
        ({"accumulate_allreduce_grads_in_fp32": True, "grad_reduce_in_bf16": True}, (2, 12)),
        ({"optimizer": "muon"}, (4, 8)),
        ({"bf16": None, "fp16": True}, (2, 12)),
        ({"bf16": None, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, (4, 12)),
        ({"exp_avg_dtype": "bf16"}, (4, 12)),
        ({**PRECISION_AWARE}, (4, 10)),
        ({**PRECISION_AWARE, "fp8_format": "hybrid"}, (4, 10)),
        ({**PRECISION_AWARE, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, (4, 12)),
        ({**PRECISION_AWARE, "bf16": None, "fp16": True}, (2, 12)),
    ],
)
def test_bytes_of_gradients_and_optimizer_states(changes, state) -> None:
    assert read_megatron(listed(changes)).degrees.state == state


@pytest.mark.parametrize(
    ("changes", "zero"),
    [
        ({"optimizer": "muon"}, 0),
        ({"optimizer": "dist_muon"}, 1),
        ({"optimizer": "muon", "use_distributed_optimizer": True}, 1),
    ],
)
def test_muon_of_distributed_optimizers_shards_its_states(changes, zero) -> None:
    run = read_megatron(listed(changes))
    assert run.degrees.zero == zero
    assert run.degrees.state == StateBytes(4, 8)
    (note,) = beside_defaults(run.notes)
    assert note.endswith("is emulated; the emulated time and memory are too low")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_precision_aware_optimizer": True}, "goes with --optimizer adam and --use-distributed-optimizer alone"),
        ({"main_grads_dtype": "int4"}, "--main-grads-dtype: 'int4' is not one of fp32, bf16, fp16, fp8"),
    ],
)
def test_optimizers_that_megatron_rejects(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        read_megatron(listed(changes))


RECIPE = """
    model: {num_layers: 12, hidden_size: 2048, num_attention_heads: 16, vocab_size: 512, seq_length: 4096,
      pipeline_model_parallel_size: 4, bf16: true, max_position_embeddings: 4096, FIELD}
    train: {micro_batch_size: 1, global_batch_size: 16}
"""


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("fp8: hybrid, fp8_recipe: mxfp8, fp8_param: true", ""),
        (
            "fp8: hybrid, fp8_multi_head_attention: true",
            "bfloat16 attention is emulated; the emulated time is too high",
        ),
        ("bias_activation_fusion: false", "fused kernels are emulated; the emulated time is too low"),
        ("quant_recipe: {_target_: q}", "model.quant_recipe: bfloat16 is emulated in its place"),
        ("cpu_offloading: true", "model.cpu_offloading: cannot be planned"),
        ("experimental_attention_variant: gdn", "model.experimental_attention_variant: cannot be planned"),
        ("attention_output_gate: true", ""),
        ("hf_model_id: x", ""),
    ],
)
def test_the_lists_hold_for_recipes(field, found, tmp_path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text(textwrap.dedent(RECIPE).replace("FIELD", field))
    try:
        said = "\n".join(beside_defaults(read_megatron(file).notes))
    except InputError as error:
        said = str(error)
    assert found in said if found else not said


def test_evaluation_of_a_recipe_is_read(tmp_path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    text = textwrap.dedent(RECIPE).replace("FIELD", "context_parallel_size: 2")
    file.write_text(text + "validation: {eval_iters: 32, eval_micro_batch_size: 2, eval_global_batch_size: 16}\n")
    run = read_megatron(file)
    assert (run.other_counts, run.ignored) == ((8,), ("validation.eval_iters",))
    file.write_text(text + "dist: {eval_context_parallel_size: 1}\n")
    assert read_megatron(file).other_counts == (8,)


def test_scopes_of_graphs_in_a_recipe(tmp_path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    scope = "cuda_graph_scope: [{_target_: CudaGraphScope, _name_: full_iteration}]"
    field = f"cuda_graph_impl: local, {scope}, recompute_granularity: full, recompute_method: uniform"
    file.write_text(textwrap.dedent(RECIPE).replace("FIELD", f"{field}, recompute_num_layers: 1"))
    assert read_megatron(file).rules.full == ""


def test_sections_of_a_recipe(tmp_path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    plain = textwrap.dedent(RECIPE).replace(", FIELD", "")
    file.write_text(
        plain + "logger: {log_interval: 1}\nmixed_precision: {bf16: true, fp8: hybrid}\noptimizer: {sparkle: 1}\n"
    )
    run = read_megatron(file)
    assert run.ignored == ("logger.*",)
    assert beside_defaults(run.notes) == ("optimizer.sparkle: unknown, and emulated without",)
    assert run.precision == RunPrecision("fp8_delayed")
    file.write_text(plain + "mixed_precision: bf16_mixed\n")
    assert beside_defaults(read_megatron(file).notes) == ()
    file.write_text(plain + "peft: {dim: 8}\n")
    with pytest.raises(InputError, match=r"peft\.\*: cannot be planned; only training of all parameters is emulated"):
        read_megatron(file)


OVERLAPPING = """
    model: {num_layers: 12, hidden_size: 2048, num_attention_heads: 16, vocab_size: 512, seq_length: 4096,
      pipeline_model_parallel_size: 4, virtual_pipeline_model_parallel_size: 3, tensor_model_parallel_size: 2,
      sequence_parallel: true, num_moe_experts: 8, moe_token_dispatcher_type: alltoall, bf16: true,
      expert_model_parallel_size: 2, tp_comm_overlap: true}
    ddp: {use_distributed_optimizer: DISTRIBUTED, overlap_grad_reduce: false}
    train: {micro_batch_size: 1, global_batch_size: 16}
    comm_overlap: {_target_: megatron.bridge.training.comm_overlap.CommOverlapConfig, data_parallel_size: null, FIELDS}
"""


@pytest.mark.parametrize(
    ("distributed", "fields", "overlap"),
    [
        ("true", "tp_comm_overlap: true", Overlap(reduction=True, gather=True, tensor=True, expert=False)),
        ("true", "tp_comm_overlap: false", Overlap(reduction=True, gather=True, tensor=False, expert=False)),
        (
            "true",
            "overlap_grad_reduce: false, overlap_param_gather: null, overlap_moe_expert_parallel_comm: true",
            Overlap(reduction=False, gather=True, tensor=False, expert=True),
        ),
        ("false", "overlap_grad_reduce: true", Overlap(reduction=False, gather=False, tensor=False, expert=False)),
    ],
)
def test_overlap_of_a_recipe_wins_over_its_other_sections(distributed, fields, overlap, tmp_path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    text = textwrap.dedent(OVERLAPPING).replace("FIELDS", fields).replace("DISTRIBUTED", distributed)
    file.write_text(text)
    run = read_megatron(file, default_devices=16)
    assert run.trainer == msgspec.structs.replace(load_trainer("megatron").overlapping(overlap), dispatcher="alltoall")
    assert not any("comm_overlap" in each for each in run.notes + run.ignored)


def test_lists_in_brackets_are_those_of_a_command_line(tmp_path) -> None:
    pytest.importorskip("yaml")
    more = {"num_experts": 8, "moe_router_topk": 2, "enable_cuda_graph": True, "recompute_granularity": "selective"}
    wanted = read_megatron(
        listed(more, cuda_graph_scope="attn moe_router", recompute_modules="layernorm shared_experts")
    )
    lines = [f"  --{name.replace('_', '-')}: {str(value).lower()}" for name, value in (SMALL | more).items()]
    lines += ['  --cuda-graph-scope: "[attn moe_router]"', '  --recompute-modules: "[layernorm shared_experts]"']
    file = tmp_path / "model_config.yaml"
    file.write_text("MODEL_ARGS:\n" + "\n".join(lines) + "\n")
    found = read_megatron(file)
    assert found.trainer == wanted.trainer != read_megatron(listed(more, cuda_graph_scope=None)).trainer
    assert found.notes == wanted.notes
    assert any("shared_experts" in note for note in found.notes)


def test_deepep_may_be_chosen_by_its_older_argument() -> None:
    run = read_megatron(listed(num_experts=8, moe_token_dispatcher_type="flex", moe_enable_deepep=True))
    assert run.trainer.dispatcher == "deepep"
    assert not any("deepep" in note for note in run.notes)


def test_devices_hold_all_experts_once_if_nothing_else_states_them() -> None:
    run = read_megatron(
        listed(num_experts=8, expert_model_parallel_size=8, tensor_model_parallel_size=2, sequence_parallel=True)
    )
    assert (run.degrees.data, run.degrees.expert_tensor) == (8, 2)


def test_compare_takes_the_precision_and_dropout_of_the_run(tmp_path) -> None:
    file = tmp_path / "arguments.txt"
    file.write_text(" ".join(listed(fp8_format="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True)))
    run = load_run(str(file), 8)
    assert run.trainer is not None
    assert run.trainer.precision == "fp8_current"
    assert run.trainer.dropout == read_megatron(file).dropout
    assert "fp8_current is emulated in the 2 layers at the ends in bfloat16 too" in run.notes


def test_compare_has_the_bytes_of_optimizer_states(tmp_path) -> None:
    """Of every system: static memory on two ranks is that of `pipeloom megatron`."""
    file = tmp_path / "arguments.txt"
    words = listed(optimizer="sgd", grad_reduce_in_bf16=True, use_distributed_optimizer=True)
    file.write_text(" ".join(words))
    run = load_run(str(file), 8)
    assert run.state == (2, 8)
    assert run.degrees(8).state == run.state
    model, cluster = load_model(str(file)), load_cluster("h100-8")
    chunk = Chunk("lm", (0, 3), 0)
    plain, own = (
        put_on_cluster(model, cluster, msgspec.structs.replace(run.degrees(8), state=state))
        for state in (MIXED_PRECISION, run.state)
    )
    # The state is divided over two replicas.
    assert own.costs.static_bytes(chunk) / plain.costs.static_bytes(chunk) == pytest.approx((2 + 2 + 4) / (2 + 4 + 6))
    assert own.levels.static_bytes(chunk) == own.costs.static_bytes(chunk)
    assert run_costs(own, run).static_bytes(chunk) == own.costs.static_bytes(chunk)
    layout = single_rank(own.model, {})
    assert (own.update_ns(layout) < plain.update_ns(layout)).all()


@pytest.mark.parametrize(
    ("changes", "rejected"),
    [
        # Without experts, Megatron has no norm that it could recompute.
        ({}, ("selective",)),
        ({"num_experts": 8}, ()),
        ({"num_experts": 8, "transformer_impl": "local"}, ("selective",)),
        ({"num_experts": 8, "fp8_format": "hybrid"}, ("selective",)),
        ({"num_experts": 8, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, ()),
        (
            {"overlap_moe_expert_parallel_comm": True, "num_experts": 8, "num_virtual_stages_per_pipeline_rank": 3},
            ("recompute",),
        ),
        ({"cuda_graph_impl": "local"}, ("selective", "recompute")),
    ],
)
def test_compare_tries_the_recomputation_that_megatron_accepts(changes, rejected, tmp_path) -> None:
    file = tmp_path / "arguments.txt"
    file.write_text(" ".join(listed(changes)))
    run = load_run(str(file), 8)
    case = put_on_cluster(load_model(str(file)), load_cluster("h100-8"), run.degrees(8))
    offered = {strategy.first for strategy in run_costs(case, run).strategies}
    assert offered == {"keep", "selective", "recompute"} - set(rejected)


@pytest.mark.parametrize(("batches", "only"), [("12 4 1000", "1f1b"), ("16 8 1000", None)])
def test_compare_tries_virtual_stages_that_megatron_accepts_in_the_ramp_up(batches, only, tmp_path) -> None:
    file = tmp_path / "arguments.txt"
    file.write_text(" ".join(listed({"rampup_batch_size": batches, "global_batch_size": 64})))
    assert load_run(str(file), 8).only == only


@pytest.mark.parametrize("resets", [False, True])
def test_compare_says_how_samples_attend(resets, tmp_path) -> None:
    file = tmp_path / "arguments.txt"
    file.write_text(" ".join(listed({"reset_attention_mask": resets})))
    said = [note for note in load_run(str(file), 8).notes if "attention to whole" in note or "attend to each" in note]
    assert len(said) == (not resets)


ABSENT = [
    (name, text, direction) for (text, direction), names in effects_of("arguments").absent.items() for name in names
]


@pytest.mark.parametrize(("name", "text", "direction"), ABSENT)
def test_a_default_that_is_not_emulated_is_said(name, text, direction) -> None:
    def said(*more) -> bool:
        lines = [note for note in run_of(*more).notes if note.startswith("without --") and f" --{name}" in note]
        assert all(note.endswith(f": {text}; {direction}") for note in lines)
        return bool(lines)

    assert said()
    assert not said(f"--{name}", "0")
    assert not said(
        *itertools.chain.from_iterable((f"--{one}", "1") for one in effects_of("arguments").implied.get(name, [name]))
    )


def test_defaults_of_experts_are_said_of_experts_alone() -> None:
    assert not any("--moe-" in note for note in read_megatron(listed()).notes)


@pytest.mark.parametrize(
    ("section", "state"),
    [
        ("ddp: {grad_reduce_in_fp32: true}", (4, 12)),
        ("ddp: {grad_reduce_in_fp32: false}", (2, 12)),
        ("ddp: {}", (2, 12)),
        ("mixed_precision: bf16_mixed", (4, 12)),
        ("mixed_precision: fp16-mixed", (2, 12)),
        ("mixed_precision: {fp16: true}", (4, 12)),
        ("mixed_precision: {bf16: true, grad_reduce_in_fp32: false}\nddp: {grad_reduce_in_fp32: true}", (2, 12)),
        ("mixed_precision: {bf16: true, grad_reduce_in_fp32: true}\nddp: {grad_reduce_in_fp32: false}", (4, 12)),
        ("optimizer: {main_grads_dtype: torch.bfloat16, clip_grad: 1.0}\nddp: {grad_reduce_in_fp32: true}", (4, 12)),
    ],
)
def test_gradients_of_a_recipe_are_reduced_as_it_says(section, state, tmp_path) -> None:
    """The data types of mixed precision override those of other sections, as in Megatron Bridge."""
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text(textwrap.dedent(RECIPE).replace(", FIELD", "") + section + "\n")
    assert read_megatron(file).degrees.state == state


@pytest.mark.parametrize("section", ["dist_muon}", "muon, use_layer_wise_distributed_optimizer: true}"])
def test_muon_of_a_recipe_shards_its_states(section, tmp_path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text(textwrap.dedent(RECIPE).replace(", FIELD", "") + "optimizer: {optimizer: " + section)
    run = read_megatron(file)
    assert (run.degrees.zero, run.degrees.state, run.ignored) == (1, StateBytes(2, 8), ())
