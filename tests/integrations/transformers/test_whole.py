"""Models whose towers are found by running them: encoders of any image size, streams, recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.integrations.transformers.assembly import Anatomy
from pipeloom.integrations.transformers.build import family_of
from pipeloom.integrations.transformers.discovery import runs, samples_of, text_samples, video_samples
from pipeloom.integrations.transformers.forms import joined
from pipeloom.integrations.transformers.found import AGAIN, read_family, write_family
from pipeloom.integrations.transformers.reference import double
from pipeloom.integrations.transformers.smaller import smaller

from . import every_model, tiny

TOLERANCE = 1e-9


def gemma4() -> Any:
    """With inputs of each layer that depend on parameters, shared keys and values, and images of several sizes."""
    vision = hf.Gemma4VisionConfig(**tiny.VIT | {"num_key_value_heads": 2, "head_dim": 8})
    kinds = ["sliding_attention", "full_attention"] * 3
    text = hf.Gemma4TextConfig(num_hidden_layers=6, layer_types=kinds, num_kv_shared_layers=3)
    return hf.Gemma4Config(vision_config=vision, text_config=text)


def mllama() -> Any:
    """With blocks that attend to images of up to two tiles, and states of two inner blocks of the encoder."""
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_global_layers": 2}
    tiles = {"image_size": 28, "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
    taps = {"intermediate_layers_indices": [0, 2], "vision_output_dim": 48, "attention_heads": 2}
    return hf.MllamaConfig(
        text_config={**text, **heads, **rope, "cross_attention_layers": [1, 4]},
        vision_config={**vision, **tiles, **taps},
        image_token_index=90,
    )


BY_NAME: dict[str, Callable[[], Any] | None] = {
    "SmolVLMForConditionalGeneration": None,
    "LlavaNextForConditionalGeneration": None,
    "Lfm2VlForConditionalGeneration": None,
    "Qwen3_5ForConditionalGeneration": None,
    "Qwen3_5MoeForConditionalGeneration": None,
    "Qwen3OmniMoeThinkerForConditionalGeneration": None,
    "Gemma4ForConditionalGeneration": gemma4,
    "Glm46VForConditionalGeneration": None,
    "Kimi_K25ForConditionalGeneration": None,
    "MllamaForConditionalGeneration": mllama,
}
"""Classes with the function that makes their configuration; None for the library's default."""
FEW = "Lfm2VlForConditionalGeneration"


def small_model(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """The small model that the product makes of a class, and samples with one, two and no images."""
    kind = getattr(hf, name)
    make = BY_NAME.get(name)
    config = every_model.config_of(kind) if make is None else make()
    with double():
        small, _, _ = smaller(kind, config, runs)
        family = family_of(kind, small.config)
        samples: Any = text_samples(small)
        if not family.first:
            samples = samples_of(Anatomy(small, family), always=False)
    return small, [{"id": str(number), **sample} for number, sample in enumerate(samples)]


@pytest.mark.parametrize("name", [n if n == FEW else pytest.param(n, marks=pytest.mark.full) for n in BY_NAME])
def test_gradients_are_the_librarys(name: str) -> None:
    """Also with images in sub-microbatches of their own, split backwards, and every memory strategy."""
    small, samples = small_model(name)
    found = pl.check_gradients(small, samples, ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)


WITH_VIDEOS = {
    "Lfm3VlForConditionalGeneration": True,
    "Ernie4_5_VLMoeForConditionalGeneration": False,
    "Gemma4ForConditionalGeneration": True,
    "Glm46VForConditionalGeneration": True,
    "Qwen3_5ForConditionalGeneration": True,
    "Qwen3OmniMoeThinkerForConditionalGeneration": True,
}
"""Classes, and whether there is text between the frames of a video."""
QUICK = "Lfm3VlForConditionalGeneration"


def with_videos(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A small model and samples with videos: beside an image, two, and one."""
    small, _ = small_model(name)
    with double():
        anatomy = Anatomy(small, family_of(type(small), small.config))
        samples = video_samples(anatomy, apart=WITH_VIDEOS[name])
    return small, [{"id": str(number), **sample} for number, sample in enumerate(samples)]


@pytest.mark.parametrize("name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.full) for n in WITH_VIDEOS])
def test_gradients_with_videos_are_the_librarys(name: str) -> None:
    small, samples = with_videos(name)
    assert all(any("video" in key for key in sample) for sample in samples)
    found = pl.check_gradients(small, samples, ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)


def test_a_video_is_an_instance_of_the_encoder_of_images() -> None:
    small, samples = with_videos(QUICK)
    model = pl.from_transformers(small)
    both, two, one = (model.describe(sample) for sample in samples)
    assert [len(each["image_tokens"]) for each in (both, two, one)] == [2, 2, 1]
    # Two frames of 3 x 2 merged patches
    assert one["image_tokens"] == [12]
    lost = {**samples[2], "video_grid_thw": samples[2]["video_grid_thw"] * 2}
    with pytest.raises(InputError, match=r"pixel_values_videos: has \d+ patches, video_grid_thw says"):
        model.describe(lost)


@pytest.mark.full
def test_images_and_videos_with_one_placeholder_token_are_refused_in_one_sample() -> None:
    small, samples = with_videos("Glm46VForConditionalGeneration")
    _, images = small_model("Glm46VForConditionalGeneration")
    mixed = {**images[0], **{key: value for key, value in samples[2].items() if "video" in key}}
    with pytest.raises(InputError, match="has images and videos, whose placeholder tokens are the same"):
        pl.from_transformers(small).describe(mixed)


@pytest.mark.full
def test_features_between_the_blocks_are_streams() -> None:
    """The small model has them too, so the gradients of what makes them are compared."""
    small, samples = small_model("Qwen3OmniMoeThinkerForConditionalGeneration")
    model = pl.from_transformers(small)
    streams = [name for module in model.modules for emitted in module.emits.values() for name in emitted]
    assert any(name.startswith("vision") for name in streams)
    assert any(name.startswith("lm") for name in streams)
    assert {module.name for module in model.modules} == {"vision", "audio", "lm"}
    rows = pl.check_gradients(small, samples, ranks=2, plans=1).rows
    merger = next(row for row in rows if "merger_list" in row.name)
    assert merger.largest > 0
    assert merger.relative < TOLERANCE


@pytest.mark.full
def test_keys_that_later_blocks_share_are_streams_of_the_block_that_computes_them() -> None:
    small, _ = small_model("Gemma4ForConditionalGeneration")
    (module,) = (each for each in pl.from_transformers(small).modules if each.name == "lm")
    shared = {layer: set(streams) for layer, streams in module.emits.items() if layer}
    # Keys and values of the last two layers that have their own, as layers of Pipeloom: the first one embeds
    assert {layer: len(streams) for layer, streams in shared.items()} == {2: 2, 3: 2}
    later = {layer: set(names) for layer, names in module.takes.items() if layer > 3}
    assert later
    assert all((shared[2] | shared[3]) & names for names in later.values())


def tiled_samples(num_images: int = 1) -> list[dict[str, Any]]:
    """Samples of Mllama's processor with images of one and two tiles, and one without; some words see no tile."""
    draw = torch.Generator().manual_seed(3)
    samples = []
    for number, (length, ratio, tiles) in enumerate(((5, 1, 1), (9, 2, 2), (4, 0, 0), (7, 3, 2))):
        ids = torch.randint(3, 80, (length,), generator=draw)
        sample: dict[str, Any] = {"id": str(number), "input_ids": ids, "labels": ids.clone()}
        if tiles:
            ids[1 : 1 + num_images] = 90
            sample["labels"][1 : 1 + num_images] = -100
            sees = (torch.arange(2) < tiles) & (torch.arange(length) >= 1)[:, None]
            sample |= {
                "pixel_values": torch.randn(1, num_images, 2, 3, 28, 28, generator=draw, dtype=torch.float64),
                "aspect_ratio_ids": torch.full((1, num_images), ratio),
                "aspect_ratio_mask": (torch.arange(2) < tiles).long().expand(1, num_images, 2).clone(),
                "cross_attention_mask": sees[None, :, None].long().expand(1, length, num_images, 2).clone(),
            }
        samples.append(sample)
    return samples


def test_blocks_attend_to_the_tiles_of_an_image_and_are_left_out_without_one() -> None:
    with double():
        small, _, _ = smaller(hf.MllamaForConditionalGeneration, mllama(), runs)
    found = pl.check_gradients(small, tiled_samples(), ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)
    gates = [row for row in found.rows if "cross_attn" in row.name or "global_transformer" in row.name]
    assert gates
    assert all(row.largest > 0 for row in gates)


def test_bad_entries_of_images_to_attend_to_are_refused() -> None:
    with double():
        small, _, _ = smaller(hf.MllamaForConditionalGeneration, mllama(), runs)
    model = pl.from_transformers(small)
    assert model.describe is not None
    good = tiled_samples()[1]
    pixels, mask = good["pixel_values"], good["cross_attention_mask"]
    for entry, value, problem in (
        ("pixel_values", pixels[:, :, :1], "is of shape"),
        ("pixel_values", pixels[..., :14], "is of shape"),
        ("pixel_values", pixels[0], "is of shape"),
        ("pixel_values", "an image", "is not a tensor"),
        ("aspect_ratio_ids", None, "is missing beside pixel_values"),
        ("aspect_ratio_ids", torch.tensor([[4]]), "is not between 1 and 3"),
        ("aspect_ratio_ids", torch.tensor([[1.0]]), "is not between 1 and 3"),
        ("aspect_ratio_ids", torch.tensor([1]), "is of shape"),
        ("aspect_ratio_mask", torch.ones(1, 1, 3), "is of shape"),
        ("aspect_ratio_mask", None, "is missing beside pixel_values"),
        ("cross_attention_mask", mask[:, :-1], "is of shape"),
        ("cross_attention_mask", mask[0], "is of shape"),
        ("attention_mask", torch.ones(5), "has 5 entries, input_ids 9"),
    ):
        with pytest.raises(InputError, match=rf"sample\.{entry}: {problem}"):
            model.describe({**good, entry: value})
    with pytest.raises(
        InputError, match=r"sample.pixel_values: has 2 instances, of which the model takes 1 per sample"
    ):
        model.describe(tiled_samples(2)[0])


def test_sizes_of_instances_are_the_models_own() -> None:
    small, samples = small_model(FEW)
    model = pl.from_transformers(small)
    assert model.describe is not None
    one, two, none = (model.describe(sample) for sample in samples)
    merged = small.config.downsample_factor**2
    for described in (one, two):
        assert [tokens * merged for tokens in described["image_tokens"]] == described["image_patches"]
    assert len(two["image_tokens"]) == 2
    assert two["image_tokens"][0] != two["image_tokens"][1]
    assert "image_tokens" not in none
    assert [module.name for module in model.modules] == ["vision", "lm"]


@pytest.mark.parametrize("name", [FEW, "MllamaForConditionalGeneration"])
def test_what_was_found_is_kept_on_disk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = small_model(name)
    kind, config = type(small), small.config
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    family = family_of(kind, config)
    write_family(kind, config, family)
    assert not list(tmp_path.rglob("*.json"))
    monkeypatch.delenv(AGAIN)
    assert read_family(kind, config) is None
    write_family(kind, config, family)
    assert read_family(kind, config) == family
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(file.read_bytes()[:-9])
    assert read_family(kind, config) is None
    # Of classes of your own nothing is kept: another process may have another class of the same name.
    own = type(kind.__name__, (kind,), {"__module__": "mine"})
    write_family(own, config, family)
    assert read_family(own, config) is None


@pytest.mark.full
def test_what_blocks_pass_on_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = small_model("Gemma4ForConditionalGeneration")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(AGAIN)
    family = family_of(type(small), small.config)
    assert family.carried
    write_family(type(small), small.config, family)
    assert read_family(type(small), small.config) == family


def test_a_model_is_converted_where_gradients_are_off() -> None:
    small, _ = small_model(FEW)
    with torch.no_grad():
        model = pl.from_transformers(small)
    assert model.spec == pl.from_transformers(small).spec


def test_a_folder_on_meta_gives_the_layers_of_the_model_itself(tmp_path: Path) -> None:
    """Parts that were found on a small model belong to the same layers of a model without weights."""
    small, _ = small_model(FEW)
    model = small.float()
    model.save_pretrained(tmp_path)
    whole, empty = pl.from_transformers(model), pl.from_transformers(tmp_path, device="meta")
    assert empty.library_names() == whole.library_names()
    assert empty.spec == whole.spec
    tensors = {name: torch.empty_like(each, device="cpu") for name, each in empty.saved_tensors().items()}
    assert empty.pretrained is not None
    empty.pretrained.fill(tensors)
    for name, each in whole.saved_tensors().items():
        torch.testing.assert_close(tensors[name], each, rtol=0, atol=0)


def test_a_sample_with_other_entries_is_refused() -> None:
    small, samples = small_model(FEW)
    model = pl.from_transformers(small)
    assert model.describe is not None
    with pytest.raises(InputError, match=r"sample.pixel_values_videos: is not an input of this model"):
        model.describe({**samples[0], "pixel_values_videos": torch.zeros(1)})
    incomplete = {name: value for name, value in samples[0].items() if name != "spatial_shapes"}
    with pytest.raises(InputError, match=r"sample.spatial_shapes: is missing beside pixel_values"):
        model.describe(incomplete)


def test_an_encoder_without_an_id_for_its_tokens_is_refused_in_one_line() -> None:
    with pytest.raises(
        InputError, match="has an encoder of images, and its configuration has no image_token_id"
    ) as raised:
        family_of(hf.MiniCPMV4_6ForConditionalGeneration, hf.MiniCPMV4_6Config())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_tensors_are_filled_up_where_they_are_smaller(dim: int) -> None:
    first, second = torch.ones(2, 3, 4), 2 * torch.ones(2, 3, 2)
    found = joined([first, second], dim, filling=-1)
    rest = found.narrow(dim, found.shape[dim] // 2, found.shape[dim] // 2)
    assert found.shape[dim] == 2 * first.shape[dim]
    assert bool((rest[..., :2] == 2).all())
    assert bool((rest[..., 2:] == -1).all())
