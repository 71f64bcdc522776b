"""Create a small Qwen2.5-VL and WebDataset shards to train it on.

``python examples/hf_vlm/make.py`` writes to ``runs/hf_vlm_data``: ``model`` (configuration, random weights, tokenizer,
image processor), ``train-*.tar`` and ``held-out.tar``. A document is a conversation about images. Each image shows a
handwritten digit of scikit-learn's data set at one of three sizes, and the assistant names the digit.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FOLDER = Path("runs/hf_vlm_data")
HELD_OUT_DIGITS = 360
MOST_IMAGES = 8
WORDS = (*"0123456789", "user", "assistant", "read")
MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|unk|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ c['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def main(num_shards: int = 4, documents_per_shard: int = 2000, num_held_out: int = 200) -> None:
    """Write the model and the shards. Existing files are replaced."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    save_model(FOLDER / "model")
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    held_out, training = order[:HELD_OUT_DIGITS], order[HELD_OUT_DIGITS:]
    for number in range(num_shards):
        rng = np.random.default_rng((1, number))
        documents = (document(rng, digits, training, moved=True) for _ in range(documents_per_shard))
        write_shard(FOLDER / f"train-{number}.tar", documents)
    rng = np.random.default_rng(2)
    write_shard(FOLDER / "held-out.tar", (document(rng, digits, held_out) for _ in range(num_held_out)))
    print(f"{num_shards * documents_per_shard} training documents and {num_held_out} held-out ones in {FOLDER}")


def save_model(folder: Path) -> None:
    """Save a Qwen2.5-VL with 0.8 million random weights, its tokenizer and its image processor."""
    token = {word: number for number, word in enumerate((*WORDS, *MARKS))}
    words = Tokenizer(models.WordLevel(token, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        additional_special_tokens=list(MARKS[:6]),
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    # A token is four patches of 4 x 4 pixels: a digit of 8 x 8 pixels is one token, or nine at three times the size.
    size = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    small = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope, "initializer_range": 0.1}
    text = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 6, "vocab_size": len(token), **small}
    marks = {"bos_token_id": None, "eos_token_id": token["<|im_end|>"], "pad_token_id": None}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1, 3]}
    width = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 96}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, **marks},
        vision_config={**width, **patches, "initializer_range": 0.1},
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|video_pad|>"],
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
    )
    torch.manual_seed(0)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def document(rng: np.random.Generator, digits: Any, rows: np.ndarray, moved: bool = False) -> dict[str, bytes]:
    """Return one to eight images of digits and a conversation about them, by file extension."""
    messages, images = [], {}
    for number, row in enumerate(rng.choice(rows, size=min(int(rng.geometric(1 / 3)), MOST_IMAGES))):
        scale = int(rng.choice((1, 2, 3)))
        pixels = np.kron(digits.images[row], np.ones((scale, scale)))
        if moved:
            pixels = np.roll(pixels, rng.integers(-(scale // 2), scale // 2 + 1, size=2), (0, 1))
        image = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).convert("RGB").save(image, "PNG")
        images[f"{number}.png"] = image.getvalue()
        messages += [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "read"}]},
            {"role": "assistant", "content": str(digits.target[row])},
        ]
    return {**images, "json": json.dumps(messages).encode()}


def write_shard(path: Path, documents: Iterable[dict[str, bytes]]) -> None:
    """Write a WebDataset tar."""
    with tarfile.open(path, "w") as shard:
        for number, contents in enumerate(documents):
            for extension, content in contents.items():
                member = tarfile.TarInfo(f"{path.stem}-{number:05d}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main()
