"""Evaluate an exported model on held-out documents: ``python examples/hf_vlm/read.py FOLDER``.

FOLDER is the output of `pipeloom export`. The script uses only the transformers library, not Pipeloom.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

SHARD = Path("runs/hf_vlm_data/held-out.tar")


def main(folder: str) -> None:
    """Print the accuracy on digits, with the images and with blank images."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    for blank in (False, True):
        pairs = [pair for each in documents(SHARD) for pair in read(model, tokenizer, processor, *each, blank=blank)]
        right = sum(answer == wanted for answer, wanted in pairs)
        what = "blank images" if blank else "images"
        print(f"{what}: {right} of {len(pairs)} digits right ({right / len(pairs):.3f})")


def read(
    model: Any, tokenizer: Any, processor: Any, images: list[Image.Image], messages: Any, *, blank: bool = False
) -> list[tuple[str, str]]:
    """Return pairs of the model's answer and the correct answer."""
    given = encode(tokenizer, processor, images, messages)
    if blank:
        given["pixel_values"] = torch.zeros_like(given["pixel_values"])
    wanted = [message["content"] for message in messages if message["role"] == "assistant"]
    return list(zip(answered(model, tokenizer, given), wanted, strict=True))


def documents(shard: Path) -> list[tuple[list[Image.Image], Any]]:
    """Return the images and messages of each document."""
    contents: dict[str, dict[str, bytes]] = defaultdict(dict)
    with tarfile.open(shard) as file:
        for member in file:
            key, _, extension = member.name.partition(".")
            contents[key][extension] = file.extractfile(member).read()
    return [
        (
            [Image.open(io.BytesIO(data)) for name, data in sorted(each.items()) if name.endswith("png")],
            json.loads(each["json"]),
        )
        for each in contents.values()
    ]


def encode(tokenizer: Any, processor: Any, images: list[Image.Image], messages: Any) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a document. An image has one token for each square of four patches."""
    pixels = processor(images, return_tensors="pt")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    for grid in pixels["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|placeholder|>" * (int(grid.prod()) // processor.merge_size**2), 1)
    ids = tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"), return_tensors="pt")["input_ids"]
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {"input_ids": ids, "mm_token_type_ids": (ids == image).long(), **pixels}


@torch.no_grad()
def answered(model: Any, tokenizer: Any, given: dict[str, torch.Tensor]) -> list[str]:
    """Return the most likely word of each assistant turn, given the correct answers of the earlier turns."""
    assistant = tokenizer.convert_tokens_to_ids("assistant")
    likeliest = model(**given).logits[0].argmax(-1)
    return tokenizer.convert_ids_to_tokens(likeliest[given["input_ids"][0] == assistant].tolist())


if __name__ == "__main__":
    main(sys.argv[1])
