"""Defaults of the `transformers` library for the fields of a `config.json`, by model type.

A `config.json` leaves out every field that has its default, and Pipeloom reads it without `transformers` installed. So
the defaults are copied here, as far as costs and parameters follow from them. A test compares them with the library's.
"""

from __future__ import annotations

from typing import Any

_Defaults = dict[str, Any]


def _decoder(vocab: int, hidden: int, inner: int, blocks: int, heads: int, kv_heads: int | None) -> _Defaults:
    """Return the sizes that most language models have."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _tower(hidden: int, inner: int, blocks: int, heads: int, patch: int) -> _Defaults:
    """Return the sizes that most vision encoders have."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "patch_size": patch,
    }


_NO_BIAS = {"attention_bias": False}
_SLIDING = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_GEMMA = {"head_dim": 256, **_NO_BIAS, "sliding_window": 4096, "layer_types": None, "tie_word_embeddings": True}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_QWEN2_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, **_SPARSE}
_QWEN2_VL = _decoder(152064, 8192, 29568, 80, 64, 8) | _SLIDING | {"max_window_layers": 80}
_TEXT: dict[str, _Defaults] = {
    "llama": _decoder(32000, 4096, 11008, 32, 32, None) | {"head_dim": None, **_NO_BIAS, "mlp_bias": False},
    "mistral": _decoder(32000, 4096, 14336, 32, 32, 8) | {"head_dim": None, "sliding_window": 4096},
    "qwen2": _decoder(151936, 4096, 22016, 32, 32, 32) | _SLIDING,
    "qwen3": _decoder(151936, 4096, 22016, 32, 32, 32) | {"head_dim": 128, **_NO_BIAS, **_SLIDING},
    "gemma2": _decoder(256000, 2304, 9216, 26, 8, 4) | _GEMMA | {"use_bidirectional_attention": None},
    "gemma3_text": _decoder(262208, 2304, 9216, 26, 8, 4) | _GEMMA | {"use_bidirectional_attention": False},
    "mixtral": _decoder(32000, 4096, 14336, 32, 32, 8)
    | {"head_dim": None, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": _decoder(151936, 2048, 5632, 24, 16, 16)
    | _QWEN2_MOE
    | {"qkv_bias": True, "shared_expert_intermediate_size": 5632, **_SLIDING},
    "qwen3_moe": _decoder(151936, 2048, 6144, 24, 32, 4)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, **_SPARSE, **_NO_BIAS}
    | {"use_sliding_window": False, "sliding_window": 4096},
    "deepseek_v3": {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "attention_bias": False,
    },
    "bamba": _decoder(128000, 4096, 14336, 32, 32, 8)
    | {
        "attn_layer_indices": None,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "nemotron_h": {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "layers_block_type": None,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mlp_bias": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "chunk_size": 128,
        "use_bias": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
    },
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": _decoder(152064, 3584, 18944, 28, 28, 4) | _SLIDING | {"sliding_window": 32768},
    "qwen3_vl_text": _decoder(151936, 4096, 22016, 32, 32, 32) | {"head_dim": 128, **_NO_BIAS},
    "qwen3_vl_moe_text": _decoder(151936, 2048, 5632, 24, 16, 16) | _QWEN2_MOE | {"head_dim": None, **_NO_BIAS},
}

_QWEN_VISION: _Defaults = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5_VISION = _QWEN_VISION | {
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_QWEN3_VISION = _QWEN_VISION | {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
_PIXELS = {"num_channels": 3, "image_size": 224}
_ENCODERS: dict[str, _Defaults] = {
    "qwen2_vl_vision": _QWEN_VISION | {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4},
    "qwen2_5_vl_vision": _QWEN2_5_VISION,
    "qwen2_5_omni_vision_encoder": _QWEN2_5_VISION,
    "qwen3_vl_vision": _QWEN3_VISION,
    "qwen3_vl_moe_vision": _QWEN3_VISION,
    "clip_vision_model": _tower(768, 3072, 12, 12, 32) | _PIXELS,
    "siglip_vision_model": _tower(768, 3072, 12, 12, 16) | _PIXELS | {"vision_use_head": True},
    "pixtral": _tower(1024, 4096, 24, 16, 16) | {"num_channels": 3},
    "internvl_vision": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "attention_bias": False,
        "use_qk_norm": False,
        "intermediate_size": 4096,
        "norm_type": "layer_norm",
        "image_size": (448, 448),
        "patch_size": (14, 14),
        "num_channels": 3,
        "use_mask_token": False,
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
    },
    "qwen2_5_omni_audio_encoder": {
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "n_window": 100,
        "output_dim": 3584,
    },
}
_WHOLE: dict[str, _Defaults] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "qwen2_5_omni_thinker": {},
    "gemma3": {"mm_tokens_per_image": 256, "tie_word_embeddings": True},
    "llava": {
        "vision_config": _tower(1024, 4096, 24, 16, 14) | {"image_size": 336},
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
    },
    "llava_onevision": {
        "vision_config": _tower(1152, 4304, 26, 16, 14) | {"image_size": 384, "vision_use_head": False},
        "vision_feature_layer": -1,
        "multimodal_projector_bias": True,
    },
    "internvl": {"downsample_ratio": 0.5, "vision_feature_layer": -1, "tie_word_embeddings": True},
    "mistral3": {
        "text_config": _decoder(131072, 5120, 32768, 40, 32, 8) | {"head_dim": 128, "sliding_window": None},
        "vision_config": _tower(1024, 4096, 24, 16, 14),
        "vision_feature_layer": -1,
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "tie_word_embeddings": True,
    },
}

DEFAULTS: dict[str, _Defaults] = {
    kind: {"tie_word_embeddings": False} | fields for kind, fields in (_TEXT | _WHOLE).items()
} | _ENCODERS
"""The default of each field, by model type."""
