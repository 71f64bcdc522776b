"""Published models: their configs, and their parameters, which are those of the library's own classes for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "hand_counted" / "published"

_PARAMETERS = {
    "Qwen2-VL-7B": 8_291_375_616,
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen2.5-VL-32B": 33_452_718_336,
    "Qwen2.5-VL-72B": 73_410_777_344,
    "LLaVA-1.5-7B": 7_063_427_072,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-VL-8B": 8_767_123_696,
    "DeepSeek-V3": 671_026_404_352,
    "Bamba-9B": 9_780_235_392,
    "Nemotron-H-8B": 8_100_852_736,
    "Gemma-3-4B": 4_300_079_472,
    "Mistral-Small-3.1-24B": 24_011_361_280,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    name: (json.loads((_FOLDER / f"{name.lower()}.json").read_text("utf-8")), number)
    for name, number in _PARAMETERS.items()
}
"""Config and parameters by name."""
QWEN2_VL_7B, QWEN2_5_VL_7B = PUBLISHED["Qwen2-VL-7B"][0], PUBLISHED["Qwen2.5-VL-7B"][0]
QWEN3_VL_8B, QWEN3_30B_A3B = PUBLISHED["Qwen3-VL-8B"][0], PUBLISHED["Qwen3-30B-A3B"][0]
LLAVA_7B, BAMBA_9B = PUBLISHED["LLaVA-1.5-7B"][0], PUBLISHED["Bamba-9B"][0]
GEMMA_3_4B, NEMOTRON_H_8B = PUBLISHED["Gemma-3-4B"][0], PUBLISHED["Nemotron-H-8B"][0]
