"""Tiny transformers and text encoders with random weights, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from diffusers import LTXVideoTransformer3DModel, WanTransformer3DModel

WORDS, TEXT_WIDTH, HEADS, HEAD = 32, 12, 2, 12
Batch = list[dict[str, Any]]


def wan(**more: Any) -> Any:
    shape = {"num_attention_heads": HEADS, "attention_head_dim": HEAD, "in_channels": 4, "out_channels": 4}
    sizes = {"text_dim": TEXT_WIDTH, "freq_dim": 8, "ffn_dim": 20, "num_layers": 3, "rope_max_seq_len": 16}
    return WanTransformer3DModel(**shape | sizes | more)


def ltx(**more: Any) -> Any:
    shape = {"num_attention_heads": HEADS, "attention_head_dim": HEAD, "in_channels": 8, "out_channels": 8}
    sizes = {"cross_attention_dim": HEADS * HEAD, "caption_channels": TEXT_WIDTH, "num_layers": 3}
    return LTXVideoTransformer3DModel(**shape | sizes | {"patch_size": 2} | more)


def encoder(kind: str) -> Any:
    """T5 or UMT5; of both, position biases that matter."""
    sizes = {"vocab_size": WORDS, "d_model": TEXT_WIDTH, "d_kv": 6, "d_ff": 16, "num_layers": 3, "num_heads": 2}
    config, model = (hf.T5Config, hf.T5EncoderModel) if kind == "t5" else (hf.UMT5Config, hf.UMT5EncoderModel)
    return model(config(**sizes, feed_forward_proj="gated-gelu", relative_attention_num_buckets=8)).eval()


CASES = {"wan": (wan, "umt5", 4, (1, 2, 2)), "ltx": (ltx, "t5", 2, (1, 2, 2))}


def make(name: str, seed: int = 0) -> tuple[Any, Any, Batch]:
    """Return a transformer, a text encoder and samples of several sizes, two of them alike."""
    torch.manual_seed(seed)
    transformer, kind, channels, patch = CASES[name]
    model, text = transformer(), encoder(kind)
    for parameter in (*model.parameters(), *text.parameters()):
        if parameter.dim() == 1:
            # Else norms and biases are ones and zeros.
            torch.nn.init.normal_(parameter, 1.0 if parameter.mean() > 0.5 else 0.0, 0.3)
    return model, text, batch(channels, patch, seed)


def batch(channels: int, patch: tuple[int, int, int], seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    grids = [(2, 1, 2), (2, 1, 2), (1, 1, 1), (3, 2, 1), (2, 1, 2), (1, 2, 3)]
    samples = []
    for number, grid in enumerate(grids):
        shape = [side * of for side, of in zip(grid, patch, strict=True)]
        words, padded = (int(torch.randint(1, 6, (), generator=draw)) for _ in range(2))
        if number < 2:
            words, padded = 3, 2
        samples.append(
            {
                "id": str(number),
                "latents": torch.randn(channels, *shape, generator=draw),
                "input_ids": torch.cat(
                    [torch.randint(1, WORDS, (words,), generator=draw), torch.zeros(padded, dtype=torch.int64)]
                ),
                "attention_mask": torch.cat([torch.ones(words), torch.zeros(padded)]).long(),
            }
        )
    return samples
