"""Train three modules in a chain on two ranks: an image encoder, its language model, and an image generator behind it.

The models are a tiny Qwen2.5-VL and a tiny Qwen-Image, as in Qwen-Image-Edit, with random weights. The latents to
generate depend on the source picture, so that gradients must reach the image encoder.
"""

import diffusers
import torch
import transformers

import pipeloom as pl

PICTURE, WIDTH = 2, 32  # token id of a picture's place; width of the language model


def build_model():
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    text = {
        "vocab_size": 16,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "rope_scaling": rope,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": WIDTH, "intermediate_size": 32, "num_heads": 2}
    vision |= {"patch_size": 2, "temporal_patch_size": 1, "window_size": 8, "fullatt_block_indexes": [1]}
    places = {"image_token_id": PICTURE, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **places)
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6), "num_layers": 4}
    widths = {"in_channels": 8, "out_channels": 2, "joint_attention_dim": WIDTH}
    transformer = diffusers.QwenImageTransformer2DModel(**heads, **widths)
    return pl.from_diffusers(transformer, encoder, freeze=())


def batches():  # every process must produce the same batches
    draw = torch.Generator().manual_seed(0)
    for number in range(30):
        yield [sample(f"{number}.{place}", draw) for place in range(6)]


def sample(name, draw):  # a picture and an instruction as from the processor, and packed latents of another size
    rows, columns, height, width = (int(torch.randint(1, 4, (), generator=draw)) for _ in range(4))
    tone = float(torch.randint(-1, 2, (), generator=draw))
    ids = torch.tensor([1, 4, *[PICTURE] * (rows * columns), 5, 10, 11])
    patches = tone + 0.1 * torch.randn(4 * rows * columns, 3 * 2 * 2, generator=draw)
    return {
        "id": name,
        "input_ids": ids,
        "mm_token_type_ids": (ids == PICTURE).long(),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns]]),
        "prompt_start": 1,  # the transformer does not see the template
        "latents": tone + 0.1 * torch.randn(height * width, 8, generator=draw),
        "img_shapes": [(1, height, width)],
    }


if __name__ == "__main__":
    result = pl.fit(build_model, batches, ranks=2)
    first, last = (sum(part) / 5 for part in (result.losses[:5], result.losses[-5:]))
    print(f"loss {first:.3f} to {last:.3f}, weights in {result.checkpoint}")
