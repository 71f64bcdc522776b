"""Configs read without the library, against the library: parameters to the last one, defaults, operations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.emulator import count_parameters
from pipeloom.emulator.build import layer_module
from pipeloom.emulator.tape import Context, Tape
from pipeloom.integrations.transformers.families import FAMILIES as TRAINED
from pipeloom.spec import Workload
from tests.integrations.hand_counted import architecture_of
from tests.integrations.hand_counted.defaults import DEFAULTS
from tests.integrations.hand_counted.families import FAMILIES
from tests.integrations.published import PUBLISHED

from . import tiny


def shape_of(config: Any) -> Any:
    """The library's model of a config, its weights nowhere."""
    kind = config["model_type"] if isinstance(config, dict) else config.model_type
    model = getattr(hf, FAMILIES[kind].architecture)
    with torch.device("meta"):
        return model(model.config_class.from_dict(config) if isinstance(config, dict) else config)


def num_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def counted(config: dict[str, Any]) -> int:
    return count_parameters(architecture_of(config, ""))


def test_every_family_that_is_trained_is_read():
    assert set(TRAINED) <= {family.architecture for family in FAMILIES.values()}


@pytest.mark.parametrize("name", tiny.CASES)
def test_tiny_models(name):
    with torch.device("meta"):
        model = tiny.CASES[name][0]()
    assert counted(json.loads(model.config.to_json_string())) == num_parameters(model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    config, number = PUBLISHED[name]
    model = shape_of(config)
    assert num_parameters(model) == number
    # As the library writes it, too.
    assert counted(json.loads(model.config.to_json_string())) == number


def library_defaults() -> dict[str, Any]:
    """Configs of the library by model type, parts included, with nothing stated."""
    found: dict[str, Any] = {}
    for family in FAMILIES.values():
        config = getattr(hf, family.architecture).config_class()
        found[config.model_type] = config
        for part in ("text_config", "vision_config", "audio_config"):
            inner = getattr(config, part, None)
            if inner is not None:
                found.setdefault(inner.model_type, type(inner)())
    found["clip_vision_model"] = hf.CLIPVisionConfig()
    return found


def test_defaults_are_the_librarys():
    library = library_defaults()
    assert set(DEFAULTS) == set(library)
    for kind, fields in DEFAULTS.items():
        config = type(library[kind])
        stated = {field.name: field.default for field in dataclasses.fields(config)}
        for name, value in fields.items():
            if name == "tie_word_embeddings" and kind not in (*FAMILIES, "gemma3_text"):
                continue  # the whole model's says it
            known = config.default_config_fields()[name] if isinstance(value, dict) else stated[name]
            if isinstance(value, dict):
                assert value.items() <= known.items(), (kind, name)
            else:
                assert value == known, (kind, name)


# ------------------------------------------------------------------ random configs


class Draw:
    """Fields of a config, drawn; some are left out, and some are null."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def int(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def any(self, *values: Any) -> Any:
        return self.data.draw(st.sampled_from(values))

    def maybe(self, **fields: Any) -> dict[str, Any]:
        """Some of some fields."""
        return {name: value for name, value in fields.items() if self.data.draw(st.booleans())}

    def text(self, **more: Any) -> dict[str, Any]:
        """Sizes of a language model."""
        heads = self.any(2, 4)
        sizes = {
            "hidden_size": heads * self.any(4, 6, 8),
            "intermediate_size": self.int(5, 40),
            "num_hidden_layers": self.int(1, 5),
            "num_attention_heads": heads,
            "num_key_value_heads": self.any(1, 2, heads),
            "vocab_size": self.int(20, 90),
            "pad_token_id": None,
        }
        return sizes | more

    def kinds(self, layers: int) -> list[str]:
        return [self.any("full_attention", "sliding_attention") for _ in range(layers)]

    def experts(self) -> dict[str, Any]:
        sizes = {"num_experts": self.int(2, 6), "num_experts_per_tok": self.int(1, 2)}
        sizes |= {"moe_intermediate_size": self.int(3, 20)}
        return sizes | self.maybe(decoder_sparse_step=2, mlp_only_layers=[self.int(0, 4)])

    def tower(self, **more: Any) -> dict[str, Any]:
        """Sizes of an encoder of images of one size."""
        patch = self.any(2, 3)
        return {
            "hidden_size": 2 * self.any(4, 6),
            "intermediate_size": self.int(5, 20),
            "num_hidden_layers": self.int(2, 4),
            "num_attention_heads": 2,
            "image_size": patch * 4,
            "patch_size": patch,
            "num_channels": self.any(1, 3),
        } | more

    def qwen_tower(self, **more: Any) -> dict[str, Any]:
        return (
            {
                "depth": self.int(1, 4),
                "num_heads": 2,
                "patch_size": self.any(2, 4),
                "hidden_size": 8,
                "out_hidden_size": self.any(12, 16),
                "intermediate_size": self.int(5, 20),
            }
            | self.maybe(in_channels=1, temporal_patch_size=1, spatial_merge_size=3)
            | more
        )


def _llama(draw: Draw) -> dict[str, Any]:
    bias = {"attention_bias": True, "mlp_bias": draw.any(True, False), "head_dim": 6, "tie_word_embeddings": True}
    return draw.text() | draw.maybe(**bias)


def _window(draw: Draw) -> dict[str, Any]:
    return draw.text() | draw.maybe(head_dim=draw.any(6, None), sliding_window=draw.any(None, 5))


def _qwen(draw: Draw) -> dict[str, Any]:
    text = draw.text()
    slides = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": draw.int(0, 5)}
    slides |= {"layer_types": draw.kinds(text["num_hidden_layers"])}
    return text | draw.maybe(head_dim=6, attention_bias=True, tie_word_embeddings=True, **slides)


def _gemma(draw: Draw) -> dict[str, Any]:
    text = draw.text()
    kinds = draw.kinds(text["num_hidden_layers"])
    return text | draw.maybe(head_dim=6, attention_bias=True, tie_word_embeddings=False, layer_types=kinds)


def _mixtral(draw: Draw) -> dict[str, Any]:
    return _window(draw) | {"num_local_experts": draw.int(2, 5), "num_experts_per_tok": 2}


def _experts(draw: Draw) -> dict[str, Any]:
    more = {"head_dim": 6, "attention_bias": True, "qkv_bias": False, "use_sliding_window": True}
    more |= {"tie_word_embeddings": True, "shared_expert_intermediate_size": 7}
    return draw.text() | draw.experts() | draw.maybe(**more)


def _deepseek(draw: Draw) -> dict[str, Any]:
    sizes = {"n_routed_experts": 4, "moe_intermediate_size": draw.int(3, 9), "n_group": 2, "topk_group": 1}
    sizes |= {"num_experts_per_tok": 2, "kv_lora_rank": draw.int(3, 9), "qk_rope_head_dim": 4}
    sizes |= {"qk_nope_head_dim": draw.int(3, 9), "v_head_dim": draw.int(3, 9), "q_lora_rank": draw.any(None, 5)}
    text = draw.text()
    more = {"first_k_dense_replace": draw.int(0, 3), "attention_bias": True, "n_shared_experts": draw.int(1, 2)}
    return text | {"num_key_value_heads": text["num_attention_heads"]} | sizes | draw.maybe(**more)


def _bamba(draw: Draw) -> dict[str, Any]:
    text = draw.text()
    sizes = {"mamba_n_heads": 4, "mamba_d_state": draw.int(2, 8), "mamba_n_groups": draw.any(1, 2)}
    flags = {"mamba_conv_bias": False, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}
    more = {"mamba_d_conv": 3, "attn_layer_indices": [draw.int(0, 4)], "tie_word_embeddings": True}
    return text | sizes | draw.maybe(**flags, **more)


def _nemotron(draw: Draw) -> dict[str, Any]:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": draw.int(2, 6), "ssm_state_size": draw.int(2, 8)}
    sizes |= {"n_groups": draw.any(1, 2), "n_routed_experts": 3, "moe_intermediate_size": draw.int(3, 9)}
    sizes |= {"moe_shared_expert_intermediate_size": draw.int(3, 9), "head_dim": 6}
    flags = {"use_bias": True, "use_conv_bias": False, "mlp_bias": True, "moe_latent_size": 5}
    text = {name: value for name, value in draw.text().items() if name != "num_hidden_layers"}
    words = ["linear_attention", "full_attention", "moe", "mlp"]
    kinds = draw.data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=5))
    letters = dict(zip(words, "M*E-", strict=True))
    stated = draw.any({"layers_block_type": kinds}, {"hybrid_override_pattern": "".join(map(letters.get, kinds))}, {})
    return text | sizes | stated | draw.maybe(tie_word_embeddings=True, **flags)


def _qwen2_vl(draw: Draw) -> dict[str, Any]:
    text = draw.text() | draw.maybe(tie_word_embeddings=True, head_dim=6)
    vision = draw.qwen_tower(embed_dim=12, mlp_ratio=draw.any(2, 4))
    # Old configs have the language model's fields at the top.
    whole = {"text_config": text} if draw.any(True, False) else text
    return whole | {"vision_config": vision} | draw.maybe(tie_word_embeddings=draw.any(True, False))


def _qwen3_vl(draw: Draw) -> dict[str, Any]:
    more = {"head_dim": 6, "attention_bias": True}
    vision = draw.qwen_tower(
        deepstack_visual_indexes=draw.data.draw(st.lists(st.integers(0, 5), max_size=3)),
        num_position_embeddings=draw.any(4, 9),
    )
    return {"text_config": draw.text() | draw.experts() | draw.maybe(**more), "vision_config": vision} | draw.maybe(
        tie_word_embeddings=True
    )


def _omni(draw: Draw) -> dict[str, Any]:
    audio = {"d_model": 8, "encoder_layers": draw.int(1, 3), "encoder_attention_heads": 2, "num_mel_bins": 4}
    audio |= {"encoder_ffn_dim": draw.int(5, 20), "output_dim": draw.int(5, 20), "n_window": 3}
    audio |= {"max_source_positions": 16}
    text = draw.text() | draw.maybe(head_dim=6, tie_word_embeddings=False)
    whole = {"text_config": text, "vision_config": draw.qwen_tower(), "audio_config": audio}
    return whole | draw.maybe(tie_word_embeddings=True)


def _some_text(draw: Draw) -> dict[str, Any]:
    return draw.any({"model_type": "llama"} | _llama(draw), {"model_type": "qwen2"} | _qwen(draw))


def _some_tower(draw: Draw) -> dict[str, Any]:
    siglip = {"model_type": "siglip_vision_model"} | draw.tower() | draw.maybe(vision_use_head=False)
    return draw.any({"model_type": "clip_vision_model"} | draw.tower(), siglip)


def _llava(draw: Draw) -> dict[str, Any]:
    picks = {"vision_feature_layer": draw.any(-1, -2, 1), "multimodal_projector_bias": False}
    return {"text_config": _some_text(draw), "vision_config": _some_tower(draw)} | draw.maybe(**picks)


def _gemma3(draw: Draw) -> dict[str, Any]:
    vision = draw.tower() | draw.maybe(vision_use_head=False)
    whole = {"text_config": _gemma(draw), "vision_config": vision, "mm_tokens_per_image": draw.any(1, 4)}
    return whole | draw.maybe(tie_word_embeddings=False)


def _internvl(draw: Draw) -> dict[str, Any]:
    flags = {"attention_bias": True, "use_qk_norm": True, "use_mask_token": True, "use_mean_pooling": False}
    flags |= {"use_absolute_position_embeddings": False, "norm_type": "rms_norm"}
    vision = draw.tower() | draw.maybe(**flags)
    picks = {"vision_feature_layer": draw.any(-1, -2), "downsample_ratio": 0.25, "tie_word_embeddings": False}
    return {"text_config": _some_text(draw), "vision_config": vision} | draw.maybe(**picks)


def _mistral3(draw: Draw) -> dict[str, Any]:
    picks = {"vision_feature_layer": draw.any(-1, -2), "spatial_merge_size": 3, "multimodal_projector_bias": True}
    vision = {"model_type": "pixtral"} | draw.tower()
    whole = {"text_config": {"model_type": "mistral"} | _window(draw), "vision_config": vision}
    return whole | draw.maybe(tie_word_embeddings=False, **picks)


RANDOM = {
    "llama": _llama,
    "mistral": _window,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "mixtral": _mixtral,
    "qwen2_moe": _experts,
    "qwen3_moe": _experts,
    "deepseek_v3": _deepseek,
    "bamba": _bamba,
    "nemotron_h": _nemotron,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen2_5_omni_thinker": _omni,
    "llava": _llava,
    "llava_onevision": _llava,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "mistral3": _mistral3,
}


def test_every_family_is_drawn():
    assert set(RANDOM) == set(FAMILIES)


def check_random(kind: str, data: st.DataObject) -> None:
    config = {"model_type": kind} | RANDOM[kind](Draw(data))
    model = shape_of(json.loads(json.dumps(config)))
    assert counted(config) == num_parameters(model)
    assert counted(json.loads(model.config.to_json_string())) == num_parameters(model)


@settings(max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize("kind", FAMILIES)
def test_random_models(kind, data):
    check_random(kind, data)


@pytest.mark.full
@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("kind", FAMILIES)
def test_many_random_models(kind, data):
    check_random(kind, data)


# ------------------------------------------------------------------ operations


def library_operations(call: Callable[[], Any]) -> tuple[int, int]:
    """Operations of linear layers and convolutions, and of the products of attention."""
    with FlopCounterMode(display=False) as counter:
        call()
    found = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    return sum(found.get(f"aten.{name}", 0) for name in ("mm", "addmm", "convolution")), found.get("aten.bmm", 0)


def own_operations(config: Any, module: str, *lengths: int) -> tuple[float, float]:
    """The same by the emulator."""
    model, work = architecture_of(json.loads(config.to_json_string()), ""), Workload(lengths)
    linear = attention = 0.0
    for layer in model.module(module).flat_layers:
        built, width = layer_module(layer)
        tape = Tape(Context())
        built(tape.input(width))
        for record in tape.records:
            operations = record.forward.flops.of(work)
            linear += operations if "matmul" in record.forward.kind else 0.0
            attention += operations if "attention" in record.forward.kind else 0.0
    return linear, attention


def eager(model: Any) -> Any:
    """The model with attention, and experts, as plain products."""
    model.set_attn_implementation("eager")
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = "eager"
    return model


def dense_deepseek() -> Any:
    """Latent attention alone: what its experts get depends on numbers."""
    model = tiny.deepseek_v3()
    model.config.first_k_dense_replace = model.config.num_hidden_layers
    return hf.DeepseekV3ForCausalLM(model.config)


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, tiny.qwen3, tiny.gemma3_text, tiny.mistral, dense_deepseek])
def test_operations_of_language_models(build):
    with torch.device("meta"):
        model, length = eager(build()), 60
        linear, attention = library_operations(lambda: model(input_ids=torch.zeros(1, length, dtype=torch.long)))
    config = model.config
    # The library masks what is not seen and computes it all the same.
    config.sliding_window = None
    own, seen = own_operations(config, "lm", length)
    assert linear == own
    assert attention == pytest.approx(seen * 2 * length / (length + 1), rel=0.01)


@pytest.mark.parametrize("build", [tiny.mixtral, tiny.qwen3_moe, tiny.bamba, tiny.nemotron_h])
def test_operations_of_experts_and_of_projections_to_state_spaces(build):
    torch.manual_seed(0)
    model, length = eager(build()), 12
    ids = torch.randint(0, 40, (1, length))
    with torch.no_grad():
        counted_linear = library_operations(lambda: model(input_ids=ids, use_cache=False))[0]
    own, _ = own_operations(model.config, "lm", length)
    mixers = [m for m in model.modules() if isinstance(m, torch.nn.Conv1d)]
    # Convolutions of state spaces run over padding, and are no products of matrices to the emulator.
    padded = sum(2 * m.in_channels * m.kernel_size[0] * (length + m.kernel_size[0] - 1) for m in mixers)
    assert counted_linear - padded == own


def pixels(*sides: int) -> torch.Tensor:
    return torch.randn(1, 3, *sides)


ENCODED: dict[str, tuple[str, Callable[[Any], Any], tuple[int, ...]]] = {
    # Images of whole windows: 4 x 4 patches.
    "qwen2_5_vl": (
        "vision",
        lambda m: m.model.visual(torch.randn(96, 24), torch.tensor([[1, 8, 8], [1, 4, 8]])),
        (64, 32),
    ),
    "qwen2_vl": ("vision", lambda m: m.model.visual(torch.randn(64, 24), torch.tensor([[1, 8, 8]])), (64,)),
    "qwen3_vl": ("vision", lambda m: m.model.visual(torch.randn(64, 24), torch.tensor([[1, 8, 8]])), (64,)),
    "gemma3": ("vision", lambda m: m.model.get_image_features(pixels(16, 16)), (16,)),
    "mistral3": (
        "vision",
        lambda m: m.model.get_image_features(pixels(16, 16), image_sizes=torch.tensor([[16, 16]])),
        (64,),
    ),
    "qwen2_5_omni": (
        "audio",
        lambda m: m.get_audio_features(
            torch.randn(1, 4, 16), feature_attention_mask=torch.ones(1, 16, dtype=torch.long)
        ),
        (8,),
    ),
}
"""Of some families: an encoder, a call of it with what stands behind it, and lengths of what it is called on."""


@pytest.mark.parametrize("name", ENCODED)
def test_operations_of_encoders(name):
    module, call, lengths = ENCODED[name]
    model = eager(tiny.CASES[name][0]())
    with torch.no_grad():
        linear, attention = library_operations(lambda: call(model))
    own, pairs = own_operations(model.config, module, *lengths)
    assert linear == own
    assert attention == pytest.approx(pairs, rel=0.01)
