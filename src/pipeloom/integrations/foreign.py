"""Recognize files of other programs that Pipeloom does not support, so that errors can name them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeloom.io.files import read_text

SUFFIXES = {
    ".py": "a Python file, which is not run",
    ".ipynb": "a notebook, which is not run",
    ".csv": "a table of comma-separated values",
    ".tsv": "a table of tab-separated values",
    ".parquet": "a Parquet file",
}
"""Kind of file by suffix."""
MODELS = (
    "a Hugging Face configuration, which describes a model and no run",
    "a configuration of the diffusers library, which describes a model and no run",
)
"""Kinds of files that describe a model."""
_SETTINGS = {
    "a file of SimuMax": (
        {"sys_name", "accelerator"},
        {"head_num", "layer_num"},
        {"tp_size", "pp_size"},
        {"tp_size", "micro_batch_num"},
    ),
    "a file of Galvatron": ({"search_engine"}, {"profiler"}, {"galvatron"}),
    "a file of LoongForge": (
        {"model_name", "huggingface_path"},
        {"model_name", "scenarios"},
        {"model.foundation"},
        {"model.image_encoder"},
    ),
    "a file of NeMo Automodel": ({"step_scheduler"}, {"dist_env", "model"}, {"nemo_automodel"}),
    "a file of DeepSpeed": ({"train_micro_batch_size_per_gpu"}, {"zero_optimization"}, {"train_batch_size"}),
    "a file of Accelerate": ({"distributed_type", "num_processes"}, {"compute_environment"}),
    "a file of LLaMA-Factory": ({"finetuning_type"},),
    "a file of Axolotl": ({"base_model", "datasets"},),
    MODELS[0]: ({"model_type"}, {"architectures"}),
    MODELS[1]: ({"_class_name"},),
}
"""Sets of settings by kind of file. Only files of that kind have all settings of a set."""
_MARKS = {"nemo_automodel": r"\bnemo_automodel\b", "galvatron": r"(?i)galvatron"}
_LOONGFORGE = r"(?i)\bloongforge|\baiak_training"


LONGEST_PATH = 4096


def is_megatron(name: str) -> bool:
    """Return whether a file is read as Megatron's arguments, because its suffix belongs to no other format."""
    path = Path(name)
    return not name.endswith((".toml", ".json")) and len(name) < LONGEST_PATH and "\0" not in name and path.is_file()


def foreign_kind(path: Path) -> str:
    """Return the kind of a file of an unsupported program, or an empty string if it is not recognized."""
    if path.suffix in SUFFIXES:
        return SUFFIXES[path.suffix]
    if path.suffix == ".json":
        document = json_document(read_text(path))
        return kind_of_settings(document) if isinstance(document, dict) else ""
    if path.suffix in (".yaml", ".yml"):
        text = read_text(path)
        # Regular expressions, because no YAML library may be installed.
        if re.search(_LOONGFORGE, text):
            return "a file of LoongForge"
        names = set(re.findall(r"^([\w.-]+)\s*:", text, re.MULTILINE))
        names |= {name for name, pattern in _MARKS.items() if re.search(pattern, text)}
        return _kind(names)
    return ""


def json_document(text: str) -> Any:
    """Parse JSON. Return None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def kind_of_settings(document: Mapping[Any, Any]) -> str:
    """Return the kind of file with these settings, or an empty string if it is not recognized."""
    return _kind(set(_setting_names(document)))


def _kind(names: set[str]) -> str:
    return next((kind for kind, sets in _SETTINGS.items() if any(names >= each for each in sets)), "")


def _setting_names(document: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the names of settings, with the section as prefix, and the package of ``_target_`` classes."""
    for name, value in document.items():
        yield str(name)
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
            if str(value.get("_target_", "")).startswith("nemo_automodel"):
                yield "nemo_automodel"
