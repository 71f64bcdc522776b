"""Hugging Face configs: published parameter counts come out, and faults are named."""

from __future__ import annotations

import json

import pytest

from pipeloom.emulator import count_parameters
from pipeloom.errors import InputError
from pipeloom.integrations.huggingface import architecture_of, read_huggingface

QWEN2_VL_7B = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
LLAVA_7B = {
    "model_type": "llava",
    "vision_feature_layer": -2,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "vocab_size": 32064,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "image_size": 336,
    },
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "published", "share"),
    [
        (QWEN2_VL_7B, 8_291_375_616, 0.001),
        # One CLIP layer is never run and not counted here.
        (LLAVA_7B, 7_063_427_072, 0.003),
        (QWEN3_30B_A3B, 30_532_122_624, 0.001),
    ],
)
def test_parameters_are_the_published_ones(config, published, share):
    assert count_parameters(architecture_of(config, "m")) == pytest.approx(published, rel=share)


def test_modules_and_what_they_read():
    model = architecture_of(QWEN2_VL_7B, "")
    assert model.name == "qwen2_vl"
    assert [(m.name, m.reads, m.after) for m in model.modules] == [
        ("vision", "images", ()),
        ("lm", "sequence", ("vision",)),
    ]
    assert [m.name for m in architecture_of(QWEN3_30B_A3B, "x").modules] == ["lm"]
    assert len(architecture_of(LLAVA_7B, "x").modules[0].flat_layers) == 1 + 23 + 1


@pytest.mark.parametrize("dropped", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_a_missing_size_is_named(dropped):
    config = {key: value for key, value in QWEN3_30B_A3B.items() if key != dropped}
    with pytest.raises(InputError, match=f"{dropped}: is missing"):
        architecture_of(config, "x")


def test_wrong_sizes_and_files_are_told(tmp_path):
    with pytest.raises(InputError, match="depth: '32' is not a whole number"):
        architecture_of({**QWEN2_VL_7B, "vision_config": {**QWEN2_VL_7B["vision_config"], "depth": "32"}}, "x")
    with pytest.raises(InputError, match=r"config\.json"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="not a JSON object"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_huggingface(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_7B))
    assert read_huggingface(tmp_path) == architecture_of(LLAVA_7B, tmp_path.name)
