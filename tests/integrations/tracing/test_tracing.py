"""What the tracer finds in blocks, also in blocks that are made up here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeloom.emulator import module_parameters
from pipeloom.emulator.build import layer_module
from pipeloom.emulator.tape import Context, Tape
from pipeloom.errors import InputError
from pipeloom.integrations.describe import LayerKind, describe
from pipeloom.integrations.tracing.architecture import trace_config
from pipeloom.integrations.tracing.build import build
from pipeloom.integrations.tracing.checks import check_parameters
from pipeloom.integrations.tracing.fitting import Features, TraceError, fit
from pipeloom.integrations.tracing.own import trace_own
from pipeloom.spec import Workload
from pipeloom.spec.architecture import Architecture, TracedLayer
from pipeloom.spec.traced import (
    AttentionOperator,
    ExpertsOperator,
    KernelOperator,
    Operator,
    PairWindow,
    ProductOperator,
    ScanOperator,
)
from tests.integrations.tracing import models


def own(block: type[nn.Module]) -> Architecture:
    with torch.device("meta"):
        model = models.Language(block)
    return trace_own(model, name="own").architecture


def blocks(architecture: Architecture) -> list[TracedLayer]:
    return [each for each in architecture.modules[-1].layers if isinstance(each, TracedLayer) and each.block]


def operators(layer: TracedLayer, kind: type[Operator]) -> list[Any]:
    return [each for each in layer.operators if isinstance(each, kind)]


def saved(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that autograd really keeps of one block."""
    others = tree_leaves((args[1:], kwargs, list(block.parameters())))
    skip = {t.untyped_storage().data_ptr() for t in others if isinstance(t, Tensor)}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in skip:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(args[0].detach().requires_grad_(), *args[1:], **kwargs)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def block_kind(architecture: Architecture) -> LayerKind:
    return describe(architecture)[-1].kinds[1]


# ------------------------------------------------------------------ made up


def test_a_block_that_no_library_has_is_read_from_its_code() -> None:
    traced = own(models.Odd)
    (layer,) = blocks(traced)
    assert layer.count == 3
    with torch.device("meta"):
        wanted = sum(p.numel() for p in models.Language().parameters())
    assert module_parameters(traced) == {"lm": wanted}
    (attention,) = operators(layer, AttentionOperator)
    assert (attention.heads, attention.causal, attention.pairs) == (4, True, (0.0, 0.0, 0.5, 0.5))
    into, out, down = operators(layer, ProductOperator)
    assert (into.out_width, into.split) == (3 * 64 + 2 * 96, "columns")
    assert (out.split, down.split) == ("rows", "rows")
    assert [k.kind for k in operators(layer, KernelOperator)] == ["norm", "activation", "add"]
    # Products, and the causal half of the pairs: 4 x 16 numbers of queries with keys, and as many of values.
    n = 1000
    products = 2 * n * (64 * 384 + 64 * 64 + 96 * 64)
    assert block_kind(traced).operations.of(Workload((n,))) == products + n * (n + 1) // 2 * 2 * 4 * 32


def test_its_eager_bytes_are_those_that_autograd_keeps() -> None:
    block = models.Odd().to(torch.bfloat16)
    n = 256
    x = torch.randn(1, n, 64, dtype=torch.bfloat16)
    assert block_kind(own(models.Odd)).saved["eager"].of(Workload((n,))) == saved(block, (x,), {})


@pytest.mark.newer_torch("attention in bfloat16 on a CPU takes the math path")
@pytest.mark.parametrize(("name", "options"), [("LLAMA", {}), ("QWEN3_MOE", {"experts_implementation": "grouped_mm"})])
def test_eager_bytes_of_library_blocks_are_those_that_autograd_keeps(name: str, options: dict[str, str]) -> None:
    config = getattr(models, name)
    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    model = transformers.AutoModelForCausalLM.from_config(
        made, dtype=torch.bfloat16, attn_implementation="sdpa", **options
    )
    call: dict[str, Any] = {}
    first, n = model.model.layers[0], 512
    hook = first.register_forward_pre_hook(
        lambda _, args, kwargs: call.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    model(input_ids=torch.randint(200, (1, n)), use_cache=False)
    hook.remove()
    assert block_kind(trace_config(config, "")).saved["eager"].of(Workload((n,))) == saved(first, **call)


@pytest.mark.parametrize(
    ("block", "text"), [(models.Stepwise, "depending on the size"), (models.Crowded, "the other sizes predict")]
)
def test_what_does_not_grow_linearly_is_an_error(block: type[nn.Module], text: str) -> None:
    with pytest.raises(TraceError, match=rf"block blocks\.0.*{text}"):
        own(block)


def test_counts_are_checked_on_the_size_that_was_left_out() -> None:
    sizes = [Features((n,)) for n in (4, 8, 16)] + [Features((4, 8)), Features((8, 8))]
    assert fit("a", sizes, [3 * n.row[2] + n.row[3] for n in sizes]) == (0, 0, 3, 1)
    with pytest.raises(TraceError, match="a: is 999 for lengths"):
        fit("a", sizes, [*(3 * n.row[2] for n in sizes[:-1]), 999.0])


# ------------------------------------------------------------------ functions that run as one kernel


def test_a_linear_attention_is_one_scan_behind_one_convolution() -> None:
    linear, full = blocks(trace_config(models.HYBRID, ""))
    (scan,) = operators(linear, ScanOperator)
    # Yang et al. 2024: 4 heads of 16 x 16 in chunks of 64.
    assert scan.flops == (0, 0, 4 * (2 * 64 * 16 + 64 * 32 + 64 * 16 + 6 * 256), 0)
    assert [k.kind for k in operators(linear, KernelOperator)].count("depthwise") == 1
    assert not operators(full, ScanOperator)
    assert len(linear.operators) < 20


def test_experts_run_the_chosen_ones() -> None:
    (layer,) = blocks(trace_config(models.QWEN3_MOE, ""))
    (experts,) = operators(layer, ExpertsOperator)
    assert (experts.hidden, experts.inner, experts.experts, experts.chosen, experts.gated) == (64, 32, 8, 2, True)
    router = next(p for p in operators(layer, ProductOperator) if p.out_width == 8)
    assert router.plain


def test_a_scan_of_mamba_1_has_a_row_for_each_token() -> None:
    """The library has its channels before the tokens, and copies them if there are several sequences."""
    config = {"model_type": "mamba", "hidden_size": 256, "num_hidden_layers": 2, "state_size": 16, "vocab_size": 256}
    layer = blocks(trace_config(config | {"architectures": ["MambaForCausalLM"]}, ""))[-1]
    (scan,) = operators(layer, ScanOperator)
    assert (scan.rows, scan.width) == ((0, 0, 1, 0), 512)
    assert [(p.in_width, p.out_width) for p in operators(layer, ProductOperator)][-1] == (512, 256)


def test_experts_in_a_loop_of_the_library_are_run_for_the_chosen_ones() -> None:
    sizes = models.LLAMA | {
        "model_type": "step3p5",
        "sliding_window": 64,
        "n_routed_experts": 8,
        "share_expert_dim": 32,
    }
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    sizes |= {"layer_types": ["full_attention"] * 3, "num_sliding_attention_heads": 4}
    model = {"model_type": "step3p7", "text_config": sizes, "architectures": ["Step3p7ForConditionalGeneration"]}
    dense, sparse = blocks(trace_config(model, ""))
    assert (dense.count, sparse.count) == (1, 2)
    (experts,) = operators(sparse, ExpertsOperator)
    assert (experts.hidden, experts.inner, experts.experts, experts.chosen, experts.gated) == (64, 32, 8, 2, True)
    assert experts.rows == (0, 0, 1, 0)
    assert not any(experts.eager_bytes)


def test_experts_that_return_their_tokens_take_their_share_of_the_choices() -> None:
    config = {k: v for k, v in models.SPARSE.items() if not k.startswith(("index_", "n_"))}
    config |= {"model_type": "longcat_flash", "architectures": ["LongcatFlashForCausalLM"], "num_layers": 2}
    config |= {"n_routed_experts": 8, "zero_expert_num": 4, "num_experts_per_tok": 3, "expert_ffn_hidden_size": 32}
    traced = trace_config(config | {"ffn_hidden_size": 128, "head_dim": 8}, "")
    (experts,) = operators(blocks(traced)[0], ExpertsOperator)
    assert (experts.experts, experts.chosen, experts.unused) == (8, 2, 4 * 2 * 32 * 64)
    parameters = describe(traced)[-1].kinds[1].parameters
    assert parameters == blocks(traced)[0].parameters
    # The unused weights are divided as those of the others are.
    tape = Tape(Context(expert=4))
    module, width = layer_module(blocks(traced)[0])
    module(tape.input(width))
    assert sum(p.total for p in tape.parameters if p.expert) == (12 * 2 + 8) * 32 * 64
    assert sum(p.total for p in tape.parameters) == parameters


def test_experts_whose_code_runs_all_on_every_token_count_the_chosen_one() -> None:
    layer = blocks(trace_config(models.DENSE_EXPERTS, ""))[0]
    (experts,) = operators(layer, ExpertsOperator)
    assert (experts.experts, experts.chosen, experts.rows) == (8, 1, (0, 0, 1, 0))
    largest = max(kernel.forward_bytes[2] for kernel in operators(layer, KernelOperator))
    assert largest <= 4 * 64 * 8  # nothing has a row for each token and expert


def test_a_sparse_attention_counts_the_keys_that_it_selects() -> None:
    layer = blocks(trace_config(models.SPARSE, ""))[0]
    (attention,) = operators(layer, AttentionOperator)
    assert attention.windows == (PairWindow(64, True),)
    (selection,) = [k for k in operators(layer, KernelOperator) if k.forward_only]
    assert selection.flops[3] > 0
    assert selection.parameters > 0


def test_layers_that_share_keys_compute_none() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma4TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=32,
        vocab_size=512,
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=16,
        layer_types=kinds,
        num_kv_shared_layers=2,
    )
    traced = trace_config(config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}, "")
    layers = blocks(traced)
    widths = [{each.out_width for each in operators(layer, ProductOperator)} for layer in layers]
    # Queries of four heads; with keys and values of one head in the layers that have their own
    assert [each & {4 * 32, 6 * 32} for each in widths] == [{6 * 32}, {6 * 32}, {4 * 32}]
    assert all(operators(layer, AttentionOperator) for layer in layers)
    # The table of words for every block, the product of the state for it, and a norm
    behind = traced.modules[-1].layers[1]
    assert isinstance(behind, TracedLayer)
    assert (behind.block, behind.parameters) == (False, 512 * 4 * 16 + 64 * 4 * 16 + 16)
    assert not traced.modules[-1].unused


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_weights_are_traced_in_the_precision_of_training_however_they_are_stored(name: str) -> None:
    assert trace_config(models.LLAMA | {name: "float32"}, "").modules == trace_config(models.LLAMA, "").modules


def test_positions_are_added_behind_the_words() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": 512}
    traced = trace_config(config | {"architectures": ["GPT2LMHeadModel"]}, "")
    behind = traced.modules[-1].layers[1]
    assert isinstance(behind, TracedLayer)
    assert (behind.block, behind.parameters) == (False, 256 * 64)


@pytest.mark.parametrize(("cap", "capped"), [(30.0, True), (None, False)])
def test_a_cap_of_the_logits_is_one_of_the_head(cap: float | None, capped: bool) -> None:
    config = models.LLAMA | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    traced = trace_config(config | {"final_logit_softcapping": cap}, "")
    assert getattr(traced.modules[-1].layers[-1], "capped", None) is capped


def test_windows_and_chunks_are_kinds_of_their_own() -> None:
    sliding, full = dict.fromkeys(layer.operators for layer in blocks(trace_config(models.WINDOWED, "")))
    windows = [next(o for o in each if isinstance(o, AttentionOperator)).windows for each in (sliding, full)]
    assert windows == [(PairWindow(128, True),), ()]
    chunked = blocks(trace_config(models.DENSE_EXPERTS, ""))[0]
    assert operators(chunked, AttentionOperator)[0].windows == (PairWindow(128, False, 0.5),)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "no_such_model"}, "'no_such_model' is not in transformers"),
        ({"model_type": "step3p7", "hidden_size": 64, "num_hidden_layers": 2}, "hidden_size: is 64 in the file"),
        (models.LLAMA | {"num_attention_heads": 0}, "cannot be built by the library: ZeroDivisionError"),
    ],
)
def test_a_configuration_that_the_library_cannot_build_is_one_line(config: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        trace_config(config, "")
    assert "\n" not in str(caught.value)


def test_parameters_that_no_module_has_are_an_error() -> None:
    traced = trace_config(models.LLAMA, "")
    model, _ = build(models.LLAMA | {"num_hidden_layers": 4})
    with pytest.raises(TraceError, match=r"model\.parameters: are .*, but .* are found"):
        check_parameters(traced, model)


def test_a_type_that_the_library_lacks_is_read_as_another_and_says_so() -> None:
    config = {k: v for k, v in models.SPARSE.items() if not k.startswith("index_")}
    traced = trace_config(config | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, "")
    assert "as deepseek_v3" in traced.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
        ({"num_attention_heads": 7}, "hidden size .64. is not a multiple of the number of attention heads .7."),
        ({"num_hidden_layers": "3"}, "Field 'num_hidden_layers' expected int, got str"),
        ({"num_hidden_layers": 0}, "has no list of blocks"),
        ({"architectures": ["LlamaForTokenClassification"]}, "has a head of 2 columns, which is none of 256 words"),
        ({"architectures": ["LlamaModel"]}, "has no product with a vocabulary"),
        (
            {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
            "has a decoder that attends to an encoder.*; plan MODULE:FUNCTION that returns the model and a batch",
        ),
        ({"model_type": "no_such_type"}, "'no_such_type' is not in transformers"),
    ],
)
def test_what_is_no_language_model_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        trace_config(models.LLAMA | change, "")
    assert "\n" not in str(caught.value)
