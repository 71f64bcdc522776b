"""Train a tiny text-to-video transformer of the diffusers library on two ranks, with random weights and videos."""

import diffusers
import torch
import transformers

import pipeloom as pl


def build_model():  # for a saved pipeline: pl.from_diffusers("its/folder")
    heads = {"num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4}
    sizes = {"text_dim": 32, "freq_dim": 32, "ffn_dim": 96, "num_layers": 4, "rope_max_seq_len": 64}
    transformer = diffusers.WanTransformer3DModel(**heads, **sizes)
    text = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    text_encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(**text)).eval()
    return pl.from_diffusers(transformer, text_encoder)


def batches():  # every process must produce the same batches
    draw = torch.Generator().manual_seed(0)
    for _ in range(30):
        yield [sample(draw) for _ in range(8)]


def sample(draw):  # latents of various sizes as from the autoencoder, and a prompt as from the tokenizer
    frames, height, width, word = (int(torch.randint(1, 4, (), generator=draw)) for _ in range(4))
    latents = torch.full((4, frames, 4 * height, 4 * width), float(word - 2))
    return {
        "latents": latents + 0.1 * torch.randn(latents.shape, generator=draw),
        "input_ids": torch.tensor([10 + word, 20 + frames, 1, 0, 0]),
        "attention_mask": torch.tensor([1, 1, 1, 0, 0]),
    }


if __name__ == "__main__":
    result = pl.fit(build_model, batches, ranks=2)
    first, last = (sum(part) / 5 for part in (result.losses[:5], result.losses[-5:]))
    print(f"loss {first:.3f} to {last:.3f}, weights in {result.checkpoint}")
