"""A described model, wherever its description comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from pipeloom.integrations.huggingface import read_huggingface
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_architecture


def load_model(name: str, freeze: Sequence[str] = ()) -> Architecture:
    """A model of the zoo, a TOML file, a Hugging Face `config.json`, or a folder that holds one.

    Parameters
    ----------
    freeze : sequence of str
        Modules that are not trained, beside those that the description says.

    Raises
    ------
    InputError
        A module that the model does not have, or what reading raises.
    """
    huggingface = name.endswith(".json") or Path(name).is_dir()
    model = read_huggingface(name) if huggingface else load_architecture(name)
    for each in freeze:
        model.module(each)
    frozen = tuple(msgspec.structs.replace(m, frozen=m.frozen or m.name in freeze) for m in model.modules)
    return msgspec.structs.replace(model, modules=frozen) if freeze else model
