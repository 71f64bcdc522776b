"""Train a tiny vision-language model of the transformers library on two ranks, with random weights and images."""

import torch
import transformers

import pipeloom as pl


def build_model():  # for a saved model: pl.from_transformers("its/folder")
    words = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    names = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    text = {**words, **names, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": 4, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [3]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=60)
    return pl.from_transformers(transformers.Qwen2_5_VLForConditionalGeneration(config))


def batches():  # every process must produce the same batches
    draw = torch.Generator().manual_seed(0)
    for _ in range(6):
        yield [sample(draw) for _ in range(8)]


def sample(draw):  # the output of the library's processor, and labels
    height, width, words = (int(torch.randint(1, 5, (), generator=draw)) for _ in range(3))
    ids = torch.tensor([1, *[60] * (height * width), *range(2, 2 + 3 * words)])
    return {
        "input_ids": ids,
        "labels": torch.where(ids == 60, -100, ids),
        "mm_token_type_ids": (ids == 60).long(),
        "pixel_values": torch.randn(4 * height * width, 3 * 2 * 14 * 14, generator=draw),
        "image_grid_thw": torch.tensor([[1, 2 * height, 2 * width]]),
    }


if __name__ == "__main__":
    result = pl.fit(build_model, batches, ranks=2)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, weights in {result.checkpoint}")
