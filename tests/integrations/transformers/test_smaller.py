"""Small models of large configurations, and the forms in which encoders take images and recordings."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.assembly import rows_of_features
from pipeloom.integrations.transformers.forms import audio_forms, image_forms, merged
from pipeloom.integrations.transformers.hollow import HollowRun, hollow, probes, run_with
from pipeloom.integrations.transformers.smaller import _cut, _narrow_all, signature, tower_lists, words_of

CLASSES = (
    "Blip2ForConditionalGeneration",
    "DeepseekOcr2ForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "Molmo2ForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
)
"""Each has a form of images or of layers that no other has."""


@pytest.mark.full
def test_classes_with_unusual_forms_are_exact() -> None:
    command = [sys.executable, "-m", "tests.integrations.transformers.every_model", *CLASSES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = [line.split(" | ")[:3] for line in done.stdout.splitlines() if " | " in line]
    assert {name: result for name, result, _ in results} == dict.fromkeys(CLASSES, "exact"), done.stdout


def narrowed(config: Any, head_dim: int | None, *, every_width: bool = False) -> Any:
    return _narrow_all(config, {}, False, True, head_dim, every_width)


def test_towers_of_one_width_become_narrow_each_by_its_own_heads() -> None:
    config = hf.GlmOcrConfig()
    assert config.text_config.hidden_size == config.vision_config.hidden_size
    small = narrowed(config, None)
    assert small.text_config.hidden_size // small.text_config.num_attention_heads == 64
    assert small.vision_config.out_hidden_size == small.text_config.hidden_size


def test_lists_of_widths_follow_the_towers_that_are_as_wide() -> None:
    config = hf.UnlimitedOcrConfig().vision_config
    small = narrowed(hf.UnlimitedOcrConfig(), 32).vision_config
    assert config.sam_config.downsample_channels[-1] == config.encoder_config.hidden_size
    assert small.sam_config.downsample_channels[-1] == small.encoder_config.hidden_size < 256


def test_widths_beside_the_towers_become_narrow_at_last() -> None:
    before, after = narrowed(hf.JanusConfig(), 32), narrowed(hf.JanusConfig(), 32, every_width=True)
    assert after.vq_config.projection_dim < before.vq_config.projection_dim
    assert after.vision_config.hidden_size == before.vision_config.hidden_size


def test_ids_of_special_tokens_are_found_by_their_alias() -> None:
    small = _cut(hf.Molmo2Config(), {}, True)
    assert small.image_token_id < small.text_config.vocab_size
    assert small.image_token_id not in words_of(small)


def test_layers_that_are_only_listed_are_counted() -> None:
    config = hf.NemotronHConfig()
    assert "num_hidden_layers" not in vars(config)
    count = len(config.layers_block_type)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)] * count), "others": nn.ModuleList([nn.ReLU()])})
    assert list(tower_lists(model, SimpleNamespace(get_text_config=lambda: config, config=config))) == ["layers"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [("SmolLM3", {"no_rope_layers": [1, 1, 0]}), ("Gemma3nText", {"activation_sparsity_pattern": [0.5, 0.5, 0.0]})],
)
def test_blocks_that_differ_in_a_number_as_a_switch_are_kinds(name: str, fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}
    more = {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 3, "vocab_size_per_layer_input": 64}
    config = getattr(hf, f"{name}Config")(**sizes, **fields, **(more if name == "Gemma3nText" else {}))
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    first, second, third = (signature(block) for block in model.model.layers)
    assert first == second != third


class NamesItsState(nn.Module):
    def forward(self, hidden_state: torch.Tensor, mask: Any = None) -> torch.Tensor:
        del mask
        return hidden_state


def test_a_probe_takes_the_state_by_the_name_that_its_block_gives_it() -> None:
    (probe,) = probes("vision", [NamesItsState()])
    state = torch.ones(2, 3)
    with run_with(HollowRun(lambda _, x, __: x + 1)):
        assert probe(hidden_state=state, mask=None).tolist() == probe(state).tolist() == (state + 1).tolist()


class ReadsItsType(nn.Module):
    dtype = property(lambda self: torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self) -> torch.dtype:
        return next(self.parameters()).dtype


def test_a_part_without_parameters_tells_the_library_its_type_and_no_one_else() -> None:
    empty = hollow(ReadsItsType(), set(), {})
    assert list(nn.Sequential(empty).parameters()) == []
    assert empty() == torch.float64


def test_features_are_the_pooled_output_or_else_the_last_state() -> None:
    state, pooled = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8)
    assert rows_of_features(SimpleNamespace(pooler_output=None, last_hidden_state=state)).shape == (4, 8)
    assert rows_of_features(SimpleNamespace(pooler_output=pooled, last_hidden_state=state)).shape == (2, 8)
    assert rows_of_features((state, pooled)).shape == (6, 8)


def test_patches_that_follow_each_other_along_the_width_are_split_as_they_were_joined() -> None:
    config = hf.MiniCPMV4_6Config()

    def features(pixel_values: Any, target_sizes: Any) -> None:
        del pixel_values, target_sizes

    (form,) = image_forms(SimpleNamespace(config=config), features)
    images = [form.blank((1, 2)), form.blank((2, 3))]
    sample = merged(form, images)
    pieces = form.split(sample)
    assert [pixels.shape for pixels, _ in pieces] == [each["pixel_values"].shape for each in images]
    assert [given["target_sizes"].tolist() for _, given in pieces] == [e["target_sizes"].tolist() for e in images]


def test_indices_of_patches_continue_from_one_image_to_the_next() -> None:
    def features(pixel_values: Any, image_token_pooling: Any, image_grids: Any) -> None:
        del pixel_values, image_token_pooling, image_grids

    config = hf.Molmo2Config(vision_config={"image_size": [28, 28]})
    (form,) = image_forms(SimpleNamespace(config=config), features)
    images = [form.blank((1, 2)), form.blank((2, 3))]
    images[1]["image_token_pooling"][0, 0] = -1  # a place without a patch
    sample = merged(form, images)
    assert len(sample["pixel_values"]) == 3
    # The first image has one crop with four patches
    assert sample["image_token_pooling"][2].tolist() == [-1, 5, 6, 7]
    for image, (pixels, given) in zip(images, form.split(sample), strict=True):
        assert pixels.shape == image["pixel_values"].shape
        assert given["image_token_pooling"].equal(image["image_token_pooling"])
    sample["image_grids"][0, 0] = 3
    with pytest.raises(InputError, match=r"sample.image_token_pooling: has 8 rows for 12"):
        form.split(sample)


@pytest.mark.parametrize(
    ("config", "frames", "bins"),
    [(hf.Qwen3ASRConfig, 100, 128), (hf.FunAsrNanoConfig, 8, 560), (hf.Nemotron3_5TranscribeConfig, 8, 128)],
)
def test_recordings_have_the_bins_and_windows_of_the_encoder(config: Any, frames: int, bins: int) -> None:
    def features(input_features: Any, input_features_mask: Any) -> None:
        del input_features, input_features_mask

    form = next(iter(audio_forms(SimpleNamespace(config=config()), features)))
    assert form.blank((1, 1))["input_features"].shape == (1, bins, frames)
