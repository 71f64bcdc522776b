"""Name the program whose file was given in place of Megatron's arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError

_REMEDY = "give Megatron's arguments: a text file, a shell script, or YAML of Megatron-LM or Megatron Bridge"
_SUFFIXES = {
    ".py": (
        "is a Python file, which is not run",
        "save a recipe of Megatron Bridge with ConfigContainer.to_yaml, or give the argument list",
    ),
    ".csv": ("is a table, not a list of arguments", _REMEDY),
    ".tsv": ("is a table, not a list of arguments", _REMEDY),
    ".toml": ("is TOML, in which Megatron has no arguments", "pipeloom compare MODEL --now FILE reads torchtitan's"),
    ".ipynb": ("is a notebook, which is not run", _REMEDY),
}
_PROGRAMS: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = (
    (
        "SimuMax",
        (
            frozenset(("sys_name", "accelerator")),
            frozenset(("layer_num", "head_num")),
            frozenset(("micro_batch_num", "tp_size")),
        ),
    ),
    ("Galvatron", (frozenset(("search_engine",)), frozenset(("profiler",)), frozenset(("galvatron",)))),
    (
        "LoongForge",
        (
            frozenset(("model_name", "huggingface_path")),
            frozenset(("model_name", "scenarios")),
            frozenset(("model.foundation",)),
            frozenset(("model.image_encoder",)),
        ),
    ),
    (
        "NeMo Automodel",
        (frozenset(("step_scheduler",)), frozenset(("dist_env", "model")), frozenset(("nemo_automodel",))),
    ),
    (
        "DeepSpeed",
        (
            frozenset(("train_micro_batch_size_per_gpu",)),
            frozenset(("zero_optimization",)),
            frozenset(("train_batch_size",)),
        ),
    ),
    ("Accelerate", (frozenset(("distributed_type", "num_processes")),)),
    ("LLaMA-Factory", (frozenset(("finetuning_type",)),)),
    ("Axolotl", (frozenset(("base_model", "datasets")),)),
)
"""Programs, with settings that a file of theirs has and one of Megatron has not."""


def check_form(source: str, text: str) -> None:
    """Raise `InputError` for a file that cannot hold Megatron's arguments, by its name or as JSON."""
    suffix = Path(source).suffix.lower()
    if suffix in _SUFFIXES:
        raise InputError(source, *_SUFFIXES[suffix])
    if suffix != ".json" and not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        check_program(source, document)
    if document is not None or suffix == ".json":
        raise InputError(source, "is JSON, in which Megatron has no arguments", _REMEDY)


def check_program(source: str, document: Mapping[Any, Any]) -> None:
    """Raise `InputError` for settings of another program.

    Raises
    ------
    InputError
        Naming the program.
    """
    names = set(_setting_names(document))
    for program, signatures in _PROGRAMS:
        if any(signature <= names for signature in signatures):
            raise InputError(source, f"is a file of {program}, not of Megatron", _REMEDY)
    if "model_type" in names or "architectures" in names:
        raise InputError(
            source,
            "is a Hugging Face configuration, which describes a model and no run",
            f"pipeloom compare {source} reads it; or {_REMEDY}",
        )


def _setting_names(document: Mapping[Any, Any]) -> Iterator[str]:
    """Names of settings, those of a model with the section; and the package whose classes are named."""
    for name, value in document.items():
        yield str(name)
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
            if str(value.get("_target_", "")).startswith("nemo_automodel"):
                yield "nemo_automodel"
