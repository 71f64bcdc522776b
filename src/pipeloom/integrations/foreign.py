"""Recognize files of programs that Pipeloom does not read, so that an error can name them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeloom.io.files import read_text

_SUFFIXES = {".py": "a Python file", ".csv": "a table of comma-separated values", ".parquet": "a Parquet file"}
MODELS = (
    "a Hugging Face configuration, which describes a model and no run",
    "a configuration of the diffusers library, which describes a model and no run",
)
"""Kinds that describe a model."""
_JSON = {
    MODELS[0]: ({"model_type", "num_hidden_layers"}, {"model_type", "architectures"}, {"model_type", "text_config"}),
    MODELS[1]: ({"_class_name"},),
    "a configuration of DeepSpeed": ({"zero_optimization"}, {"train_micro_batch_size_per_gpu"}, {"train_batch_size"}),
    "a file of SimuMax": ({"tp_size", "pp_size"}, {"head_num", "layer_num"}, {"sys_name", "accelerator"}),
}
"""By kind of file, sets of fields of which all belong to it."""
_TEXTS = {
    "a configuration of NeMo Automodel": r"\bnemo_automodel\b",
    "a file of LoongForge": r"(?i)\bloongforge|\baiak_training",
    "a configuration of Galvatron": r"(?i)galvatron|^search_engine:",
    "a configuration of Accelerate": r"^compute_environment:|^distributed_type:",
    "a configuration of LLaMA-Factory": r"^finetuning_type:",
    "a configuration of Axolotl": r"^base_model:",
}
"""By kind of file, what stands only in its YAML."""
_SIZED = re.compile(r"num[-_]layers|NUM_LAYERS|--load|use-checkpoint-args|MODEL_ARGS")


def foreign_kind(path: Path) -> str:
    """Name what a file is, where it is one of a program that Pipeloom does not read; empty: it is not known.

    Raises
    ------
    InputError
        The file cannot be read.
    """
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    text = read_text(path)
    if path.suffix == ".json":
        return _json_kind(text)
    if path.suffix in (".yaml", ".yml"):
        for kind, pattern in _TEXTS.items():
            if re.search(pattern, text, re.MULTILINE):
                return kind
    return "" if _SIZED.search(text) else "a file without arguments of Megatron, such as --num-layers"


def _json_kind(text: str) -> str:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(content, dict):
        for kind, sets in _JSON.items():
            if any(fields <= content.keys() for fields in sets):
                return kind
    return ""
