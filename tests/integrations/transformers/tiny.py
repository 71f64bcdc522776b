"""A tiny model of every family with random weights, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

WORDS = 48
IMAGE, VISION_START, VISION_END = 40, 41, 42
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
Batch = list[dict[str, Any]]


def draw(generator: torch.Generator, low: int, high: int, size: tuple[int, ...] = ()) -> Any:
    """Whole numbers."""
    return torch.randint(low, high, size, generator=generator)


def text_sample(generator: torch.Generator, number: int, least: int = 2) -> dict[str, Any]:
    ids = draw(generator, 0, IMAGE, (int(draw(generator, least, 11)),))
    labels = ids.clone()
    labels[: int(draw(generator, 1, 3))] = -100
    return {"id": str(number), "input_ids": ids, "labels": labels}


def text_batch(seed: int = 0, count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return [text_sample(generator, number) for number in range(count)]


def image_sample(generator: torch.Generator, number: int, tokens: list[int]) -> dict[str, Any]:
    """Text with runs of places for images in it."""
    pieces = [draw(generator, 0, IMAGE, (int(draw(generator, 1, 4)),))]
    for count in tokens:
        pieces += [torch.tensor([VISION_START]), torch.full((count,), IMAGE), torch.tensor([VISION_END])]
        pieces.append(draw(generator, 0, IMAGE, (int(draw(generator, 1, 5)),)))
    ids = torch.cat(pieces)
    labels = torch.where(ids >= IMAGE, -100, ids)
    return {"id": str(number), "input_ids": ids, "labels": labels}


def grid_batch(width: int, seed: int = 0, *, types: bool = True) -> Batch:
    """Images of several sizes, patches one after the other; some samples without any."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number, images in enumerate((1, 0, 2, 1, 0, 3)):
        grids = [[1, 2 * int(draw(generator, 1, 4)), 2 * int(draw(generator, 1, 4))] for _ in range(images)]
        sample = image_sample(generator, number, [t * h * w // 4 for t, h, w in grids])
        if types:
            sample["mm_token_type_ids"] = (sample["input_ids"] == IMAGE).long()
        if images:
            patches = sum(t * h * w for t, h, w in grids)
            sample["pixel_values"] = torch.randn(patches, width, generator=generator, dtype=torch.float64)
            sample["image_grid_thw"] = torch.tensor(grids)
        batch.append(sample)
    return batch


VIDEO = 43


def video_batch(frames_apart: bool, seed: int = 0, *, seconds: bool = False) -> Batch:
    """Images and videos of several sizes, in several orders; with text between a video's frames or without."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number, kinds in enumerate(("v", "iv", "", "viiv", "i", "vi")):
        ids, grids = [torch.tensor([1, 2])], {"i": [], "v": []}
        for kind in kinds:
            t, h, w = (int(draw(generator, 1, 4)) if kind == "v" else 1, *(2 * draw(generator, 1, 3, (2,))).tolist())
            grids[kind].append([t, h, w])
            frame = torch.full((h * w // 4,), VIDEO if kind == "v" else IMAGE)
            for place in range(t):
                ids += [torch.tensor([VISION_START])] if place == 0 or frames_apart else []
                ids.append(frame)
                ids += [torch.tensor([VISION_END, 5])] if place == t - 1 or frames_apart else []
        ids.append(draw(generator, 0, IMAGE, (3,)))
        words = torch.cat(ids)
        sample = {"id": str(number), "input_ids": words, "labels": torch.where(words >= IMAGE, -100, words)}
        sample["mm_token_type_ids"] = (words == IMAGE).long() + 2 * (words == VIDEO).long()
        names = {"i": ("pixel_values", "image_grid_thw"), "v": ("pixel_values_videos", "video_grid_thw")}
        for kind, (pixels, grid) in names.items():
            if grids[kind]:
                sample[grid] = torch.tensor(grids[kind])
                count = int(sample[grid].prod(1).sum())
                sample[pixels] = torch.randn(count, QWEN_PATCH, generator=generator, dtype=torch.float64)
        if seconds and grids["v"]:
            sample["second_per_grid_ts"] = torch.tensor([0.5 + 0.5 * i for i in range(len(grids["v"]))])
        batch.append(sample)
    return batch


def square_batch(side: int, tokens: int, seed: int = 0, *, types: str = "") -> Batch:
    """Images of one size."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number, images in enumerate((1, 0, 2, 1, 0, 3)):
        sample = image_sample(generator, number, [tokens] * images)
        if types:
            sample[types] = (sample["input_ids"] == IMAGE).long()
        if images:
            sample["pixel_values"] = torch.randn(images, 3, side, side, generator=generator, dtype=torch.float64)
        batch.append(sample)
    return batch


# ------------------------------------------------------------------ language models


def llama(**more: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT | more))


def qwen3(**more: Any) -> Any:
    sliding = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    sliding |= {"use_sliding_window": True, "sliding_window": 3}
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT | sliding | {"head_dim": 4} | more))


def mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**TEXT, sliding_window=3))


def qwen2() -> Any:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT))


def mixtral(**more: Any) -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2} | more))


def qwen3_moe(**more: Any) -> Any:
    settings = TEXT | EXPERTS | {"head_dim": 4, "mlp_only_layers": [0]} | more
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**settings))


def deepseek_v3(**more: Any) -> Any:
    sizes = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_group": 2,
        "topk_group": 1,
    }
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    heads = {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**TEXT | sizes | latent | heads | more))


def gemma3_text() -> Any:
    sizes = {"head_dim": 4, "sliding_window": 3, "tie_word_embeddings": True}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**TEXT | sizes, layer_types=types))


def bamba(**more: Any) -> Any:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_expand": 2, "mamba_n_groups": 1}
    mamba |= {"mamba_chunk_size": 4, "attn_layer_indices": [1], "z_loss_coefficient": 0.0}
    return hf.BambaForCausalLM(hf.BambaConfig(**TEXT | mamba | more))


def nemotron_h() -> Any:
    mamba = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 1,
        "chunk_size": 4,
        "expand": 2,
    }
    mamba |= {"head_dim": 4, "conv_kernel": 4, "use_mamba_kernels": False}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_group": 1,
        "topk_group": 1,
    }
    experts |= {"moe_shared_expert_intermediate_size": 12, "n_shared_experts": 1}
    sizes = {name: value for name, value in TEXT.items() if name != "num_hidden_layers"}
    types = ["linear_attention", "full_attention", "moe", "linear_attention"]
    return hf.NemotronHForCausalLM(hf.NemotronHConfig(**sizes | mamba | experts, layers_block_type=types))


# ------------------------------------------------------------------ vision-language models

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}
PLACES = {"image_token_id": IMAGE, "video_token_id": 43, "vision_start_token_id": 41, "vision_end_token_id": 42}
INTERLEAVED = {"head_dim": 8, "rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 1, 1]}}
QWEN_PATCH = 3 * 2 * 2 * 2
QWEN_VISION = {"depth": 3, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2}

QWEN3_VISION = QWEN_VISION | {"hidden_size": 8, "out_hidden_size": 16, "intermediate_size": 12}
QWEN3_VISION |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}


def qwen2_vl() -> Any:
    vision = QWEN_VISION | {"embed_dim": 8, "hidden_size": 16, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(text_config=TEXT | MROPE, vision_config=vision, **PLACES)
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl(**more: Any) -> Any:
    vision = QWEN_VISION | {"hidden_size": 8, "out_hidden_size": 16, "intermediate_size": 12}
    vision |= {"window_size": 8, "fullatt_block_indexes": [1]}
    config = hf.Qwen2_5_VLConfig(text_config=TEXT | MROPE, vision_config=vision, **PLACES | more)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(**more: Any) -> Any:
    config = hf.Qwen3VLConfig(text_config=TEXT | INTERLEAVED, vision_config=QWEN3_VISION | more, **PLACES)
    return hf.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe(**more: Any) -> Any:
    """Two dense layers, one of which takes features, and experts between them."""
    text = TEXT | INTERLEAVED | EXPERTS | {"num_hidden_layers": 4, "mlp_only_layers": [0, 3]} | more
    config = hf.Qwen3VLMoeConfig(text_config=text, vision_config=QWEN3_VISION, **PLACES)
    return hf.Qwen3VLMoeForConditionalGeneration(config)


VIT = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}


def llava() -> Any:
    vision = hf.CLIPVisionConfig(**VIT, image_size=8, patch_size=4)
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE)
    return hf.LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    vision = hf.SiglipVisionConfig(**VIT, image_size=16, patch_size=4, vision_use_head=False)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    text = hf.Gemma3TextConfig(**TEXT | {"head_dim": 4, "sliding_window": 3}, layer_types=types)
    more = {"mm_tokens_per_image": 4, "image_token_id": IMAGE, "boi_token_id": 41, "eoi_token_id": 42}
    return hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=text, vision_config=vision, **more))


def internvl() -> Any:
    vision = hf.InternVLVisionConfig(**VIT, image_size=[8, 8], patch_size=[2, 2], use_absolute_position_embeddings=True)
    more = {"image_token_id": IMAGE, "downsample_ratio": 0.5}
    config = hf.InternVLConfig(vision_config=vision, text_config=hf.Qwen2Config(**TEXT), **more)
    return hf.InternVLForConditionalGeneration(config)


def mistral3() -> Any:
    vision = hf.PixtralVisionConfig(**VIT, image_size=16, patch_size=2)
    text = hf.MistralConfig(**TEXT, sliding_window=None)
    config = hf.Mistral3Config(vision_config=vision, text_config=text, image_token_id=IMAGE, spatial_merge_size=2)
    return hf.Mistral3ForConditionalGeneration(config)


def sized_batch(unit: int, seed: int = 0) -> Batch:
    """Images of several sizes in one padded tensor for each sample; a token for every square of so many pixels."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number, images in enumerate((1, 0, 2, 1, 0, 3)):
        # The library's own forward fails on an image of a single token by itself.
        sizes = draw(generator, 1, 4, (images, 2)) + torch.tensor([0, 1])
        sample = image_sample(generator, number, sizes.prod(1).tolist())
        if images:
            sample["image_sizes"] = sizes * unit
            height, width = (sizes * unit).amax(0).tolist()
            sample["pixel_values"] = torch.randn(images, 3, height, width, generator=generator, dtype=torch.float64)
        batch.append(sample)
    return batch


def llava_onevision() -> Any:
    vision = hf.SiglipVisionConfig(**VIT, image_size=16, patch_size=4, vision_use_head=False)
    more = {"image_token_id": IMAGE, "video_token_id": 43, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
    text = hf.Qwen2Config(**TEXT | {"max_position_embeddings": 512})
    config = hf.LlavaOnevisionConfig(vision_config=vision, text_config=text, vision_feature_layer=-2, **more)
    return hf.LlavaOnevisionForConditionalGeneration(config)


TILED = {(32, 32): (5, 88), (16, 32): (3, 52), (20, 32): (5, 70)}
"""Tiles of images of some sizes, and tokens: 16 of the whole; those of the tiles, joined and cut, with line ends."""


def tiled_batch(seed: int = 0) -> Batch:
    """Images cut into tiles, one or none a sample."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number, size in enumerate((*TILED, None, (16, 32))):
        count, tokens = TILED.get(size or (0, 0), (0, 0))
        sample = image_sample(generator, number, [tokens] if size else [])
        if size:
            sample["image_sizes"], sample["batch_num_images"] = torch.tensor([size]), torch.tensor([1])
            sample["pixel_values"] = torch.randn(1, count, 3, 16, 16, generator=generator, dtype=torch.float64)
        batch.append(sample)
    return batch


AUDIO = 44


def omni_thinker() -> Any:
    vision = QWEN_VISION | {"hidden_size": 8, "out_hidden_size": 16, "intermediate_size": 12}
    vision |= {"window_size": 8, "fullatt_block_indexes": [1]}
    audio = {"num_mel_bins": 4, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 12, "d_model": 8}
    audio |= {"n_window": 4, "output_dim": 16, "max_source_positions": 32}
    places = {"image_token_index": IMAGE, "video_token_index": 43, "audio_token_index": AUDIO}
    places |= {"audio_start_token_id": 45, "audio_end_token_id": 46}
    text = TEXT | MROPE
    config = hf.Qwen2_5OmniThinkerConfig(text_config=text, vision_config=vision, audio_config=audio, **places)
    config.vision_start_token_id = VISION_START
    return hf.Qwen2_5OmniThinkerForConditionalGeneration(config)


def heard_batch(seed: int = 0) -> Batch:
    """Some samples with images, some with recordings, some with both or neither."""
    generator = torch.Generator().manual_seed(seed)
    batch = grid_batch(QWEN_PATCH, seed, types=False)
    for sample, count in zip(batch, (1, 0, 2, 0, 1, 1), strict=True):
        steps = [int(draw(generator, 6, 21)) for _ in range(count)]
        ids, labels = [sample["input_ids"]], [sample["labels"]]
        for each in steps:
            tokens = ((each - 1) // 2 + 1 - 2) // 2 + 1
            run = torch.tensor([45, *[AUDIO] * tokens, 46, *draw(generator, 0, IMAGE, (2,)).tolist()])
            ids.append(run)
            labels.append(torch.where(run >= IMAGE, -100, run))
        sample |= {"input_ids": torch.cat(ids), "labels": torch.cat(labels)}
        sample["attention_mask"] = torch.ones_like(sample["input_ids"])
        if count:
            mask = torch.arange(max(steps)) < torch.tensor(steps)[:, None]
            sample["feature_attention_mask"] = mask.long()
            sample["input_features"] = torch.randn(count, 4, max(steps), generator=generator, dtype=torch.float64)
    return batch


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Batch]]] = {
    "llama": (llama, text_batch),
    "qwen3": (qwen3, text_batch),
    "qwen2": (qwen2, text_batch),
    "mistral": (mistral, text_batch),
    "mixtral": (mixtral, text_batch),
    "qwen3_moe": (qwen3_moe, text_batch),
    "deepseek_v3": (deepseek_v3, text_batch),
    "gemma3_text": (gemma3_text, text_batch),
    "bamba": (bamba, text_batch),
    "nemotron_h": (nemotron_h, text_batch),
    "qwen2_vl": (qwen2_vl, lambda seed: grid_batch(QWEN_PATCH, seed)),
    "qwen2_5_vl": (qwen2_5_vl, lambda seed: grid_batch(QWEN_PATCH, seed)),
    "qwen3_vl": (qwen3_vl, lambda seed: grid_batch(QWEN_PATCH, seed)),
    "qwen3_vl_moe": (qwen3_vl_moe, lambda seed: grid_batch(QWEN_PATCH, seed)),
    "llava": (llava, lambda seed: square_batch(8, 4, seed)),
    "gemma3": (gemma3, lambda seed: square_batch(16, 4, seed, types="token_type_ids")),
    "llava_onevision": (llava_onevision, tiled_batch),
    "qwen2_5_omni": (omni_thinker, heard_batch),
    "mistral3": (mistral3, lambda seed: sized_batch(4, seed)),
    "internvl": (internvl, lambda seed: square_batch(8, 4, seed)),
}
"""Of every family: the model, and batches by seed."""


def make(name: str, seed: int = 0) -> tuple[Any, Batch]:
    """The model of a family, all of its weights random, and a batch."""
    build, batch = CASES[name]
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            # Zeros and ones, as norms and projectors begin with, hide faults.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, batch(seed)
