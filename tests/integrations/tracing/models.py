"""Tiny configurations, and blocks that are made up here."""

import torch
from torch import nn
from torch.nn import functional as F

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
HYBRID = LLAMA | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 0,
    "mlp_only_layers": [0, 1, 2, 3],
}
SPARSE = {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "vocab_size": 256,
}
VISION = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
    "tie_word_embeddings": False,
    "text_config": LLAMA
    | {
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
WINDOWED = LLAMA | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
DENSE_EXPERTS = LLAMA | {
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "intermediate_size_mlp": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 128,
    "num_hidden_layers": 4,
}


class Odd(nn.Module):
    """A block that no library has: attention and a gated layer side by side, with a norm written by hand."""

    def __init__(self, width: int = 64, heads: int = 4, inner: int = 96) -> None:
        super().__init__()
        self.heads, self.inner = heads, inner
        self.scale = nn.Parameter(torch.ones(width))
        self.into = nn.Linear(width, 3 * width + 2 * inner, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale
        query, key, value, gate, up = self.into(y).split([width] * 3 + [self.inner] * 2, -1)
        query, key, value = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return x + self.out(mixed) + self.down(F.silu(gate) * up)


class Stepwise(Odd):
    """A block whose work does not grow linearly: it runs more operators for longer sequences."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[1] // 512):
            x = x + self.out(x)
        return super().forward(x)


class Crowded(Odd):
    """A block with an intermediate tensor that grows with the square root of the length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = int(x.shape[1] ** 0.5)
        return super().forward(x) + (x[:, :side] * x[:, :side]).sum(1, keepdim=True)


class Language(nn.Module):
    """A language model of made-up blocks."""

    def __init__(self, block: type[nn.Module] = Odd, layers: int = 3, words: int = 128, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> nn.Module:
    """Return a model, as a user's function does."""
    return Language()
