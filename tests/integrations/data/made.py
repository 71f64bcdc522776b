"""A tokenizer, a processor, a tiny model and shards, all made here."""

from __future__ import annotations

import io
import json
import random
import tarfile
import wave
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MARKS = ("<end>", "<turn>", "<stop>", "<see>", "<seen>", "<image_pad>", "<video_pad>")
LETTERS = "\n .:?abcdefghijklmnopqrstuvwxyz0123456789"
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<see><image_pad><seen>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<stop>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def tokenizer(chat: bool = True) -> Any:
    """A letter is a token."""
    words = {word: i for i, word in enumerate((*MARKS, *LETTERS, "<unk>"))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    special = {"eos_token": "<stop>", "pad_token": "<end>", "additional_special_tokens": list(MARKS[1:])}
    out = hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    out.image_token, out.video_token = "<image_pad>", "<video_pad>"
    if chat:
        out.chat_template = TEMPLATE
    return out


def save_processor(folder: Path, chat: bool = True) -> Path:
    """A processor of Qwen2.5-VL: one token for 28 x 28 pixels."""
    words = tokenizer(chat)
    words.init_kwargs |= {"image_token": "<image_pad>", "video_token": "<video_pad>"}
    words.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 8).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    return folder


def vlm(dtype: torch.dtype = torch.float64) -> Any:
    """A tiny Qwen2.5-VL with the tokens of `tokenizer`."""
    words = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {"vocab_size": 56, "bos_token_id": 0, "eos_token_id": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16, "fullatt_block_indexes": [1]}
    places = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
    config = hf.Qwen2_5_VLConfig(text_config=words | names | {"rope_parameters": rope}, vision_config=vision, **places)
    torch.manual_seed(0)
    return hf.Qwen2_5_VLForConditionalGeneration(config).to(dtype)


def png(seed: int, width: int = 40, height: int = 30, kind: str = "PNG", **options: Any) -> bytes:
    """An image of noise."""
    data = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(data).save(out, kind, **options)
    return out.getvalue()


def write_shard(path: Path, samples: Iterable[Mapping[str, bytes]]) -> Path:
    """A tar file of samples, each from extensions to contents."""
    with tarfile.open(path, "w") as shard:
        for number, sample in enumerate(samples):
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"{number:03d}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    return path


def talks(count: int, seed: int = 0) -> list[dict[str, bytes]]:
    """Conversations about no, one or two images of several sizes."""
    draw = random.Random(seed)
    out = []
    for number in range(count):
        images = [
            png(100 * number + place, draw.randint(20, 90), draw.randint(20, 90))
            for place in range((1, 0, 2)[number % 3])
        ]
        said = [
            {"role": "user", "content": "<image>" * len(images) + "what?"},
            {"role": "assistant", "content": str(draw.randint(0, 99))},
        ]
        sample = {f"{place}.png": image for place, image in enumerate(images)}
        out.append({**sample, "json": json.dumps(said).encode()})
    return out


def wav(seed: int, count: int, rate: int = 16000, channels: int = 1) -> bytes:
    """A recording of noise."""
    data = np.random.default_rng(seed).integers(-(2**15), 2**15, (count, channels), np.int16)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(data.tobytes())
    return out.getvalue()


def hearing() -> Any:
    """A processor that hears, with recordings of at most a fifth of a second."""
    words = tokenizer()
    marks = {"audio_token": "<video_pad>", "vision_bos_token": "<see>", "vision_eos_token": "<seen>"}
    for name, word in {**marks, "audio_bos_token": "<see>", "audio_eos_token": "<seen>"}.items():
        setattr(words, name, word)
    words.audio_token_id, words.image_token_id, words.video_token_id = 6, 5, 0
    words.video_token = "<end>"
    words.chat_template = TEMPLATE.replace(
        "{% else %}{{ c['text'] }}", "{% elif c['type'] == 'audio' %}<see><video_pad><seen>{% else %}{{ c['text'] }}"
    )
    kind: Any = hf.Qwen2_5OmniProcessor
    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})
    ears = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=400, hop_length=160)
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 8)
    return unchecked(images, None, ears, words, chat_template=words.chat_template)
