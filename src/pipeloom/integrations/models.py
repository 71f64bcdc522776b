"""A described model, wherever its description comes from."""

from __future__ import annotations

from pathlib import Path

from pipeloom.integrations.huggingface import read_huggingface
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_architecture


def load_model(name: str) -> Architecture:
    """A model of the zoo, a TOML file, a Hugging Face `config.json`, or a folder that holds one."""
    if name.endswith(".json") or Path(name).is_dir():
        return read_huggingface(name)
    return load_architecture(name)
