"""Tiny transformers of classes that are not known by name, with random weights, and samples of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

TEXT = 12
GRIDS = ((1, 1, 2), (2, 1, 2), (2, 1, 2), (1, 2, 3), (3, 1, 1))
WORDS = (4, 3, 3, 1, 6)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


def places(frames: int, height: int, width: int) -> Tensor:
    sides = torch.meshgrid(*(torch.arange(float(side)) for side in (frames, height, width)), indexing="ij")
    return torch.stack([each.reshape(-1) for each in sides], 1)


# ------------------------------------------------------------------ models


def flux(**more: Any) -> Any:
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2}
    widths = {"in_channels": 4, "joint_attention_dim": TEXT, "pooled_projection_dim": 6, "axes_dims_rope": (2, 4, 2)}
    return diffusers.FluxTransformer2DModel(**sizes | widths | {"guidance_embeds": True} | more)


def flux_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    return {
        "latents": randn(frames * height * width, 4),
        "prompt_embeds": randn(words, TEXT),
        "pooled_projections": randn(6),
        "img_ids": places(frames, height, width),
        "txt_ids": torch.zeros(words, 3),
        "guidance": 3.5,
    }


def sd3(**more: Any) -> Any:
    sizes = {"num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16}
    widths = {"in_channels": 4, "out_channels": 4, "joint_attention_dim": TEXT, "pooled_projection_dim": 6}
    kinds = {"sample_size": 16, "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    return diffusers.SD3Transformer2DModel(**sizes | widths | kinds | more)


def sd3_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    del frames
    latents = randn(4, 2 * height, 2 * width)
    return {"latents": latents, "prompt_embeds": randn(words, TEXT), "pooled_projections": randn(6)}


def qwen(**more: Any) -> Any:
    sizes = {"num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 4, 2)}
    widths = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": TEXT}
    return diffusers.QwenImageTransformer2DModel(**sizes | widths | more)


def qwen_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    return {
        "latents": randn(frames * height * width, 16),
        "prompt_embeds": randn(words, TEXT),
        "img_shapes": [(frames, height, width)],
    }


def cogvideox(**more: Any) -> Any:
    sizes = {"num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 2, "time_embed_dim": 4}
    widths = {"in_channels": 8, "out_channels": 4, "text_embed_dim": TEXT}
    kinds = {"sample_width": 8, "sample_height": 8, "sample_frames": 9, "use_rotary_positional_embeddings": True}
    return diffusers.CogVideoXTransformer3DModel(**sizes | widths | kinds | more)


def cogvideox_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    """From an image: its latents, in the first frame, are beside the noisy ones."""
    count = frames * height * width
    return {
        "latents": randn(frames, 4, 2 * height, 2 * width),
        "condition_latents": randn(frames, 4, 2 * height, 2 * width),
        "prompt_embeds": randn(words, TEXT),
        "image_rotary_emb": (randn(count, 16).cos(), randn(count, 16).sin()),
    }


def wan(**more: Any) -> Any:
    """Wan 2.1 from an image, which is in the latents and in the cross-attention. Wan 2.2 has the former alone."""
    shape = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 9, "out_channels": 4}
    sizes = {"text_dim": TEXT, "freq_dim": 8, "ffn_dim": 20, "num_layers": 3, "rope_max_seq_len": 16}
    return diffusers.WanTransformer3DModel(**shape | sizes | {"image_dim": 10, "added_kv_proj_dim": 24} | more)


def wan22(**more: Any) -> Any:
    return wan(image_dim=None, added_kv_proj_dim=None, **more)


def wan22_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    return {
        "latents": randn(4, frames, 2 * height, 2 * width),
        "condition_latents": randn(5, frames, 2 * height, 2 * width),
        "prompt_embeds": randn(words, TEXT),
    }


def wan_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    # The library splits the image's rows from the text's, which are the last 512.
    del words
    return wan22_sample(frames, height, width, 512) | {"encoder_hidden_states_image": randn(3, 10)}


def hunyuan(**more: Any) -> Any:
    sizes = {"num_layers": 3, "num_refiner_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    widths = {"in_channels": 9, "out_channels": 4, "text_embed_dim": TEXT, "text_embed_2_dim": 10, "image_embed_dim": 6}
    kinds = {"patch_size": 1, "patch_size_t": 1, "rope_axes_dim": (2, 4, 2), "target_size": 16}
    return diffusers.HunyuanVideo15Transformer3DModel(**sizes | widths | kinds | more)


def hunyuan_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    """Both prompts are padded, and the padding of the second one is attended to by no token."""
    return {
        "latents": randn(4, frames, height, width),
        "condition_latents": randn(5, frames, height, width),
        "prompt_embeds": randn(words + 2, TEXT),
        "encoder_attention_mask": torch.tensor([1] * words + [0, 0]),
        "encoder_hidden_states_2": randn(3, 10),
        "encoder_attention_mask_2": torch.tensor([1, 1, 0]),
        "image_embeds": randn(2, 6),
    }


def pixart(**more: Any) -> Any:
    sizes = {"num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2, "cross_attention_dim": 16}
    widths = {"in_channels": 4, "out_channels": 8, "caption_channels": TEXT, "sample_size": 8}
    return diffusers.PixArtTransformer2DModel(**sizes | widths | {"use_additional_conditions": False} | more)


def pixart_sample(frames: int, height: int, width: int, words: int) -> dict[str, Any]:
    del frames
    added = {"resolution": None, "aspect_ratio": None}
    latents = randn(4, 2 * height, 2 * width)
    return {"latents": latents, "prompt_embeds": randn(words, TEXT), "added_cond_kwargs": added}


Sampler = Callable[[int, int, int, int], dict[str, Any]]
CASES: dict[str, tuple[Callable[..., Any], Sampler]] = {
    "flux": (flux, flux_sample),
    "sd3": (sd3, sd3_sample),
    "qwen": (qwen, qwen_sample),
    "cogvideox": (cogvideox, cogvideox_sample),
    "wan2.1": (wan, wan_sample),
    "wan2.2": (wan22, wan22_sample),
    "hunyuan1.5": (hunyuan, hunyuan_sample),
    "pixart": (pixart, pixart_sample),
}


def make(name: str, seed: int = 0) -> tuple[Any, list[dict[str, Any]]]:
    """Return a transformer and samples, two of them of one size."""
    torch.manual_seed(seed)
    build, sample = CASES[name]
    model = build()
    for parameter in model.parameters():
        if parameter.dim() == 1 or not parameter.any():
            # Else norms and biases are ones and zeros.
            torch.nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.3)
    return model, [
        {"id": str(i), **sample(*grid, words)} for i, (grid, words) in enumerate(zip(GRIDS, WORDS, strict=True))
    ]
