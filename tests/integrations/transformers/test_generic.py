"""Parts of many classes are found: exact, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.integrations.transformers import build
from pipeloom.integrations.transformers.build import family_of
from pipeloom.packing import PackingSpec
from pipeloom.runtime import profile_model
from pipeloom.runtime.execute import memory
from pipeloom.training.config import PlannerConfig
from pipeloom.training.layouts import offered
from pipeloom.training.run import TrainingRun

from . import tiny

TOLERANCE = 1e-9
WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 12}
GPT2 = {name: value for name, value in tiny.TEXT.items() if name not in ("num_key_value_heads", "intermediate_size")}
NEO = {name: value for name, value in GPT2.items() if name != "num_hidden_layers"} | {"num_layers": 3, "window_size": 3}
NEO |= {"attention_types": [[["global", "local", "global"], 1]]}
ZAYA = {"num_experts_per_tok": 1, "head_dim": 4, "router_hidden_size": 8}
MAMBA = {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 4}
SEQ2SEQ = {name: tiny.TEXT[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
SEQ2SEQ |= {"d_model": 16, "max_position_embeddings": 64, "is_encoder_decoder": False, "is_decoder": True}
SEQ2SEQ |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24}
SEQ2SEQ |= {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}

ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2], "long_factor": [2.0, 3.0]}
ROPE |= {"original_max_position_embeddings": 6, "factor": 4.0}
LONG = {"rope_parameters": ROPE, "original_max_position_embeddings": 6}

PACKED, EAGER, ONE_BY_ONE = "packed", "eager", "one by one"
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2, PACKED),
    "phi3": ("Phi3ForCausalLM", tiny.TEXT | {"sliding_window": 3}, PACKED),
    "phi3_long": (
        "Phi3ForCausalLM",
        tiny.TEXT | {"rope_parameters": LONG, "original_max_position_embeddings": 6},
        ONE_BY_ONE,
    ),
    "gemma2": ("Gemma2ForCausalLM", tiny.TEXT | WINDOWS | {"head_dim": 4, "query_pre_attn_scalar": 4}, EAGER),
    "bloom": ("BloomForCausalLM", GPT2, ONE_BY_ONE),
    "olmo2": ("Olmo2ForCausalLM", tiny.TEXT, PACKED),
    "granite": ("GraniteForCausalLM", tiny.TEXT | {"logits_scaling": 3.0, "residual_multiplier": 0.5}, PACKED),
    "stablelm": ("StableLmForCausalLM", tiny.TEXT | {"partial_rotary_factor": 0.5}, PACKED),
    "gpt_neox": ("GPTNeoXForCausalLM", tiny.TEXT, PACKED),
    "gpt_neo": ("GPTNeoForCausalLM", NEO, ONE_BY_ONE),
    "falcon": ("FalconForCausalLM", GPT2, ONE_BY_ONE),
    "starcoder2": ("Starcoder2ForCausalLM", tiny.TEXT | {"sliding_window": 3}, PACKED),
    "cohere": ("CohereForCausalLM", tiny.TEXT, PACKED),
    "glm4": ("Glm4ForCausalLM", tiny.TEXT | {"head_dim": 4}, PACKED),
    "smollm3": ("SmolLM3ForCausalLM", tiny.TEXT | {"no_rope_layers": [1, 0, 1]}, PACKED),
    "ernie4_5": ("Ernie4_5ForCausalLM", tiny.TEXT | {"head_dim": 4}, PACKED),
    "opt": ("OPTForCausalLM", tiny.TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 8}, PACKED),
    "qwen2_moe": ("Qwen2MoeForCausalLM", tiny.TEXT | EXPERTS | {"shared_expert_intermediate_size": 12}, PACKED),
    "olmoe": ("OlmoeForCausalLM", tiny.TEXT | EXPERTS, PACKED),
    "olmoe_balanced": (
        "OlmoeForCausalLM",
        tiny.TEXT | EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.7},
        PACKED,
    ),
    "gpt_oss": ("GptOssForCausalLM", tiny.TEXT | WINDOWS | EXPERTS | {"head_dim": 4}, EAGER),
    "jamba": ("JambaForCausalLM", tiny.TEXT | {"attn_layer_period": 2, "attn_layer_offset": 1}, PACKED),
    "mamba2": ("Mamba2ForCausalLM", tiny.TEXT | MAMBA, PACKED),
    # Their labels are those of the tokens themselves
    "bart": ("BartForCausalLM", SEQ2SEQ, PACKED),
    "trocr": ("TrOCRForCausalLM", SEQ2SEQ | {"cross_attention_hidden_size": 16}, ONE_BY_ONE),
    # Its embedding of positions is a constant
    "marian": ("MarianForCausalLM", SEQ2SEQ | {"decoder_vocab_size": tiny.WORDS}, PACKED),
    # Its blocks return lists
    "openai_gpt": ("OpenAIGPTLMHeadModel", GPT2, PACKED),
    # Its routers take the states of the routers before them
    "zaya": ("ZayaForCausalLM", tiny.TEXT | EXPERTS | ZAYA, PACKED),
    # It changes embeddings in place
    "ctrl": ("CTRLLMHeadModel", GPT2 | {"dff": 24}, PACKED),
}
SIGLIP = hf.SiglipVisionConfig(**tiny.VIT, image_size=16, patch_size=4, vision_use_head=False, projection_dim=16)
SMALL = {"vision_config": tiny.VIT | {"image_size": 16, "patch_size": 4}, "text_config": hf.LlamaConfig(**tiny.TEXT)}
SMALL |= {"image_token_id": tiny.IMAGE, "scale_factor": 2}


def paligemma() -> Any:
    text = hf.GemmaConfig(**tiny.TEXT | {"head_dim": 4})
    return hf.PaliGemmaConfig(vision_config=SIGLIP, text_config=text, image_token_index=tiny.IMAGE, projection_dim=16)


def aya_vision() -> Any:
    text = hf.Cohere2Config(**tiny.TEXT | {"head_dim": 4, "sliding_window": 3})
    more = {"vision_feature_select_strategy": "full", "vision_feature_layer": -2, "downsample_factor": 2}
    return hf.AyaVisionConfig(vision_config=SIGLIP, text_config=text, image_token_index=tiny.IMAGE, **more)


def nested_batch() -> tiny.Batch:
    """As processors of the Idefics3 kind give images."""
    batch = tiny.square_batch(16, 4)
    return [s | {"pixel_values": s["pixel_values"][None]} if "pixel_values" in s else s for s in batch]


SEEING: dict[str, tuple[str, Callable[[], Any], Callable[[], tiny.Batch], str]] = {
    "aya_vision": ("AyaVisionForConditionalGeneration", aya_vision, lambda: tiny.square_batch(16, 4), PACKED),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        paligemma,
        lambda: tiny.square_batch(16, 16, types="token_type_ids"),
        ONE_BY_ONE,
    ),
    "idefics3": ("Idefics3ForConditionalGeneration", lambda: hf.Idefics3Config(**SMALL), nested_batch, PACKED),
    "smolvlm": ("SmolVLMForConditionalGeneration", lambda: hf.SmolVLMConfig(**SMALL), nested_batch, PACKED),
}
SOME = ("gemma2", "bloom", "aya_vision", "bart")


def make(name: str) -> tuple[Any, tiny.Batch, str]:
    if name in MODELS:
        kind, settings, way = MODELS[name]
        config, batch = getattr(hf, kind).config_class(**settings), tiny.text_batch()
    else:
        kind, configure, samples, way = SEEING[name]
        config, batch = configure(), samples()
    torch.manual_seed(0)
    model = getattr(hf, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, batch, way


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in (*MODELS, *SEEING)]
)
def test_gradients_are_the_librarys(name: str) -> None:
    model, batch, way = make(name)
    family = family_of(type(model), model.config)
    assert (EAGER if family.eager else PACKED if family.packs else ONE_BY_ONE) == way
    found = pl.check_gradients(model, batch, ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)
    if name in SEEING:
        whole = pl.from_transformers(model)
        assert whole.describe is not None
        assert whole.examples is not None
        example_samples = [whole.describe(sample)["image_tokens"] for sample in whole.examples("vision")]
        assert [len(images) for images in example_samples] == [1, 2, 4]


class Unshifted(hf.OlmoeForCausalLM):
    """One whose labels are those of the tokens themselves."""

    def forward(self, *, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None:
            kwargs["shift_labels"] = labels
        return super().forward(labels=labels, **kwargs)


def test_the_balancing_loss_counts_the_first_target_of_unshifted_labels() -> None:
    torch.manual_seed(0)
    model = Unshifted(hf.OlmoeConfig(**MODELS["olmoe_balanced"][1]))
    # Finding the family compares losses and gradients with those of the library.
    assert not family_of(type(model), model.config).shifts


def llama4() -> Any:
    """Its experts add to a product in place."""
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 24, "head_dim": 4, "moe_layers": [0, 1, 2]}
    torch.manual_seed(0)
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**tiny.TEXT | experts))


@pytest.mark.full
def test_layers_that_change_a_product_in_place_train_under_every_strategy() -> None:
    found = pl.check_gradients(llama4(), tiny.text_batch(), ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.full
def test_a_strategy_under_which_a_model_fails_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are offered, measured and right."""
    monkeypatch.setattr(build, "_DETECTED", {})
    monkeypatch.setattr(memory, "_CopiesBeforeChanges", lambda _: nullcontext())
    batch = tiny.text_batch()
    model = pl.from_transformers(llama4())
    assert list(model.excluded) == ["selective"]
    assert "mutated" in model.excluded["selective"]
    assert "\n" not in model.excluded["selective"]
    assert pl.check_gradients(llama4(), batch, ranks=2, plans=3).worst < TOLERANCE
    options = pl.ProfileOptions(strategies=True)
    profile = profile_model(model, [batch], packing=PackingSpec(64), placements={}, options=options)
    assert all(fit.strategies is not None for fit in profile.layers.values())


def test_a_run_offers_its_planner_the_strategies_under_which_the_model_runs() -> None:
    model = pl.from_transformers(tiny.llama())
    model = replace(model, excluded={"selective": "it is mutated"})
    config = SimpleNamespace(planner=PlannerConfig(strategies=("selective", "keep", "recompute")))
    assert offered(config, model) == ("keep", "recompute")  # type: ignore[arg-type]
    said: list[str] = []
    run: Any = SimpleNamespace(
        name="run",
        config=SimpleNamespace(name="run", layout=SimpleNamespace(modules={}), planner=config.planner),
        display=SimpleNamespace(say=said.append),
        build_model=lambda: model,
        _in_file=lambda *_: nullcontext(),
    )
    assert TrainingRun._checked_model(run) is model
    assert said[1:] == [f"Without the memory strategy 'selective', under which {model.name} fails: it is mutated"]
    config.planner = PlannerConfig(strategies=("selective",))
    with pytest.raises(InputError, match=r"planner.strategies: .* fails under 'selective': it is mutated"):
        offered(config, model)  # type: ignore[arg-type]


class Llama(hf.LlamaForCausalLM):
    """One whose configuration makes it."""

    config_class = hf.LlamaConfig


class Scaled(hf.LlamaModel):
    """Does something between its blocks, which no list of blocks tells."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **_: Any) -> Any:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        places = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        mask = hf.masking_utils.create_causal_mask(self.config, x, None, None)
        for layer in self.layers:
            x = 1.1 * layer(x, mask, position_embeddings=self.rotary_emb(x, places))
        return hf.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class Other(Llama):
    trunk: type = Scaled

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.trunk(config)
        self.post_init()


class ChangesItself(hf.LlamaModel):
    """Changes its blocks when it first runs."""

    changed = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.changed:
            self.changed = True
            for layer in self.layers:
                layer.mlp.gate_proj.register_buffer("seen", torch.zeros(()))
        return super().forward(*args, **kwargs)


class OtherChanging(Other):
    trunk = ChangesItself


class Shifting(hf.models.llama.modeling_llama.LlamaDecoderLayer):
    """Has attention within sequences, and mixes tokens beside it."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        shifted = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(hidden_states + 0.5 * shifted, *args, **kwargs)


class ShiftingModel(hf.LlamaModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(Shifting(config, i) for i in range(config.num_hidden_layers))


class OtherShifting(Other):
    trunk = ShiftingModel


def of_class(kind: Any, **more: Any) -> Callable[[], Any]:
    return lambda: kind(kind.config_class(**tiny.TEXT | more))


def adapted() -> Any:
    model = of_class(Llama)()
    model.model.layers[1].adapter = torch.nn.Linear(2, 2)
    return model


def test_mixing_that_no_mask_tells_is_called_one_by_one() -> None:
    model = of_class(OtherShifting)()
    assert not family_of(type(model), model.config).packs
    found = pl.check_gradients(model, tiny.text_batch(), ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)


def test_a_window_that_cannot_be_lessened_is_not_packed() -> None:
    config = hf.LlamaConfig(**tiny.TEXT)
    assert family_of(Llama, config).packs
    config.sparse = {"layers": [{"block_size": 64}]}
    assert not family_of(Llama, config).packs


@pytest.mark.parametrize("chunk", [3, 8192])
def test_chunks_of_attention_are_the_samples_own(chunk: int) -> None:
    """In a pack they would begin elsewhere, which no sample shorter than a chunk tells."""
    config = hf.Llama4TextConfig(**tiny.TEXT | EXPERTS | {"attention_chunk_size": chunk, "head_dim": 4})
    assert not family_of(hf.Llama4ForCausalLM, config).packs


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: hf.T5ForConditionalGeneration(hf.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1)), "an encoder"),
        (of_class(Other), "the loss of its layers differs from the library's by"),
        (of_class(OtherChanging), "cannot be called one after the other: AttributeError: .* 'mlp'"),
        (of_class(hf.OPTForCausalLM, layerdrop=0.1), "leaves out layers at random"),
        (lambda: hf.BartForCausalLM(hf.BartConfig(**SEQ2SEQ, decoder_layerdrop=0.1)), "leaves out layers at random"),
        (adapted, "has 'model.layers.1.adapter.bias', unlike a Llama of its configuration"),
        (lambda: hf.BertForMaskedLM(hf.BertConfig(**tiny.TEXT)), "is a BertForMaskedLM and cannot be used: "),
    ],
)
def test_what_cannot_be_exact_is_refused_in_one_line(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        pl.from_transformers(build())
    assert "\n" not in str(raised.value)


def test_trying_leaves_random_numbers_and_the_configuration_as_they_were() -> None:
    model, _, _ = make("gpt_neo")
    config, state = model.config.to_dict(), torch.get_rng_state()
    kinds = [layer.kind for layer in pl.from_transformers(model).spec.module("lm").flat_layers]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert kinds[1] == kinds[3] != kinds[2]


def test_a_large_configuration_is_tried_on_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3.8 billion parameters, with a window that short samples reach beyond."""
    from pipeloom.integrations.transformers import generic

    seen: list[Any] = []
    run = generic.run
    monkeypatch.setattr(generic, "run", lambda model, sample: seen.append(model) or run(model, sample))
    family_of(hf.Phi3ForCausalLM, hf.Phi3Config(sliding_window=2047))
    small = seen[0]
    assert sum(p.numel() for p in small.parameters()) < 3e6
    assert small.config.sliding_window < 8
    assert small.config.num_attention_heads > 1
