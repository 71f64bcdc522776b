"""Hugging Face configs, without the library: published parameter counts come out, and faults are named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipeloom.emulator import count_parameters
from pipeloom.errors import InputError
from pipeloom.spec.architecture import AttentionMixer, ResidualLayer
from tests.integrations.hand_counted import architecture_of, read_huggingface
from tests.integrations.hand_counted.families import FAMILIES
from tests.integrations.published import (
    BAMBA_9B,
    GEMMA_3_4B,
    LLAVA_7B,
    NEMOTRON_H_8B,
    PUBLISHED,
    QWEN2_5_VL_7B,
    QWEN2_VL_7B,
    QWEN3_30B_A3B,
    QWEN3_VL_8B,
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    config, published = PUBLISHED[name]
    assert count_parameters(architecture_of(config, "m")) == published


def test_modules_and_what_they_read():
    model = architecture_of(QWEN2_VL_7B, "")
    assert model.name == "qwen2_vl"
    assert [(m.name, m.reads, m.after) for m in model.modules] == [
        ("vision", "images", ()),
        ("lm", "sequence", ("vision",)),
    ]
    assert [m.name for m in architecture_of(QWEN3_30B_A3B, "x").modules] == ["lm"]


def test_what_nothing_runs_is_counted_and_not_run():
    vision = architecture_of(LLAVA_7B, "x").modules[0]
    # The last of 24 blocks, and the norm behind them.
    assert len(vision.flat_layers) == 1 + 23 + 1
    assert [type(layer).__name__ for layer in vision.unused] == ["ResidualLayer", "AdapterLayer"]


def windows(config, module):
    """The window of every block's attention."""
    found = [layer.mixers[0] for layer in architecture_of(config, "x").module(module).flat_layers[1:-1]]
    return [mixer.window if isinstance(mixer, AttentionMixer) else "" for mixer in found]


def test_windows():
    seen = windows(QWEN2_5_VL_7B, "vision")
    assert [i for i, window in enumerate(seen) if window is None] == [7, 15, 23, 31]
    assert set(seen) == {64, None}
    assert windows(GEMMA_3_4B, "lm") == [None if (i + 1) % 6 == 0 else 1024 for i in range(34)]
    mistral = {"model_type": "mistral", "num_hidden_layers": 2}
    assert windows(mistral, "lm") == [4096] * 2
    assert windows(mistral | {"sliding_window": None}, "lm") == [None] * 2
    assert [i for i, mixer in enumerate(windows(BAMBA_9B, "lm")) if mixer is None] == [9, 18, 27]


def test_layers_that_are_not_alike_stay_apart_and_equal_ones_are_one_entry():
    lm = architecture_of(NEMOTRON_H_8B, "x").module("lm")
    blocks = [layer for layer in lm.layers if isinstance(layer, ResidualLayer)]
    assert sum(layer.count for layer in blocks) == 52
    assert len(set(blocks)) == 3
    assert [layer.count for layer in architecture_of(QWEN3_30B_A3B, "x").modules[0].layers[1:-1]] == [48]


def test_streams_of_inner_features():
    model = architecture_of(QWEN3_VL_8B, "x")
    vision, lm = model.modules
    assert [(end.stream, end.layer) for end in vision.emits] == [
        ("deepstack_0", 9),
        ("deepstack_1", 17),
        ("deepstack_2", 25),
    ]
    assert [(end.stream, end.layer) for end in lm.takes] == [("deepstack_0", 1), ("deepstack_1", 2), ("deepstack_2", 3)]


def changed(config, part=None, /, **fields):
    return config | ({part: config[part] | fields} if part else fields)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "model_type: is missing"),
        (
            {"_class_name": "WanTransformer3DModel"},
            "_class_name: 'WanTransformer3DModel' belongs to the diffusers library",
        ),
        ({"model_type": "mamba2"}, "model_type: 'mamba2' is not known; known are llama, "),
        (
            changed(QWEN3_30B_A3B, architectures=["Qwen3MoeForTokenClassification"]),
            "architectures: Qwen3MoeForTokenClassification is not known; of qwen3_moe, Qwen3MoeForCausalLM is",
        ),
        (changed(LLAVA_7B, "text_config", model_type="mpt"), "text_config.model_type: 'mpt' is not known"),
        (changed(LLAVA_7B, "vision_config", model_type="dinov2"), "vision_config.model_type: 'dinov2' is not known"),
        (changed(LLAVA_7B, vision_feature_layer=[-2, -5]), r"vision_feature_layer: \[-2, -5\] is not one number"),
        (changed(LLAVA_7B, vision_feature_layer=-25), "vision_feature_layer: -25 is none of 24 blocks"),
        (changed(QWEN2_VL_7B, "vision_config", depth="32"), "vision_config.depth: '32' is not a whole number"),
        (changed(QWEN2_5_VL_7B, "vision_config", window_size=7), "vision_config.window_size: 7 is less than"),
        (changed(QWEN3_30B_A3B, num_hidden_layers=0), "num_hidden_layers: 0 is not a whole number of at least 1"),
        (changed(QWEN3_30B_A3B, num_hidden_layers=27_000_000), "num_hidden_layers: 27000000 is above 100000"),
        (changed(QWEN3_30B_A3B, hidden_size=10**18), "hidden_size: 1000000000000000000 is above 2147483648"),
        (changed(QWEN3_30B_A3B, num_key_value_heads=3), "num_key_value_heads: 3 does not divide 32 heads"),
        ({"model_type": "llama", "num_attention_heads": 7}, "num_attention_heads: 7 does not divide the width 4096"),
        (changed(QWEN3_VL_8B, "vision_config", num_heads=7), "vision_config.num_heads: 7 does not divide the width"),
        (changed(QWEN3_30B_A3B, attention_bias=3), "attention_bias: 3 is neither true nor false"),
        (changed(QWEN3_30B_A3B, mlp_only_layers="none"), "mlp_only_layers: 'none' is not a list of whole numbers"),
        (changed(NEMOTRON_H_8B, hybrid_override_pattern="M-X"), "hybrid_override_pattern: 'M-X' is not of M E"),
        (changed(NEMOTRON_H_8B, layers_block_type=["rnn"]), r"layers_block_type\[0\]: 'rnn' is not known"),
        (changed(BAMBA_9B, mamba_d_head=32), "mamba_d_head: 32 x 128 heads are not mamba_expand x hidden_size"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types: has 1 entries for 32 layers"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention: is true"),
        (changed(GEMMA_3_4B, text_config=[]), r"text_config: \[\] is not a JSON object"),
        (changed(GEMMA_3_4B, mm_tokens_per_image=10**6), "mm_tokens_per_image: 1000000 is more than an image's 4096"),
    ],
)
def test_what_is_not_known_or_cannot_be_is_refused_in_one_line(config, message):
    with pytest.raises(InputError, match=message) as caught:
        architecture_of(config, "x")
    assert "\n" not in str(caught.value)


def test_every_family_reads_a_config_that_leaves_all_out():
    # The library's own defaults of Gemma 3 have fewer patches than tokens: a model that it makes and cannot run.
    images = {"gemma3": {"vision_config": {"image_size": 896}}}
    for kind in FAMILIES:
        assert count_parameters(architecture_of({"model_type": kind} | images.get(kind, {}), "")) > 10**8


def test_wrong_files_are_reported(tmp_path):
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


@pytest.mark.full
def test_neither_torch_nor_the_library_is_needed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_8B))
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'diffusers')))\n"
        "from pipeloom.emulator import count_parameters\n"
        "from pipeloom.integrations.models import load_model\n"
        "print(count_parameters(load_model(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) == PUBLISHED["Qwen3-VL-8B"][1]


def test_a_config_is_named_after_its_file_or_folder(tmp_path):
    config = {field: value for field, value in LLAVA_7B.items() if field != "_name_or_path"}
    for file, name in (("folder/config.json", "folder"), ("folder/tiny-model.json", "tiny-model")):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        assert read_huggingface(path).name == name
