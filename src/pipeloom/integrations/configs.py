"""Hugging Face `config.json` files, without torch or transformers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError, visible_line
from pipeloom.io.files import read_text
from pipeloom.spec.architecture import MOST_SIZE
from pipeloom.spec.catalog import read_index
from pipeloom.spec.model import MOST_LAYERS

Config = Mapping[str, Any]

_IRRELEVANT = frozenset(
    {"_name_or_path", "auto_map", "dtype", "initializer_range", "quantization_config", "torch_dtype"}
    | {"transformers_version", "transformers.js_config", "unsloth_fixed", "unsloth_version", "use_cache"}
)
"""Fields that change neither layers nor sizes: the precision of stored weights, initialization, generation."""
_SECTIONS = ("text_config", "vision_config", "audio_config")
_REMEDY = "see the config of a published model of this type"


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the contents of a `config.json`, or of the one in a folder. Raise `InputError` if it cannot be read."""
    file = config_file(path)
    if not file.is_file():
        raise InputError(str(path), "is neither a config.json nor a folder with one")
    text = read_text(file)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(str(file), "is not a JSON object")
    return config


def config_file(path: str | Path) -> Path:
    """Return a `config.json`, or the one of a folder."""
    file = Path(path)
    return file / "config.json" if file.is_dir() else file


def model_name(config: Config, path: str | Path) -> str:
    """Return the name of the model in a file: the one that its config has, or else that of the file or its folder."""
    own = Path(os.path.realpath(config_file(path)))
    name = own.parent.name if own.name == "config.json" else own.name.removesuffix(".json")
    return str(config.get("_name_or_path") or visible_line(name))


def check_config(config: Config) -> None:
    """Raise `InputError` for a config of another library, and for numbers that no model has."""
    if config.get("model_type") is None:
        if "_class_name" in config:
            problem = f"{config['_class_name']!r} belongs to the diffusers library, whose configs are not supported"
            raise InputError("_class_name", problem, "describe the model in a .toml file, as dit-5b of the zoo is")
        raise InputError("model_type", "is missing", "give the config of a transformers model")
    _check_fields(config, "")


def _check_fields(fields: Config, where: str) -> None:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_fields(value, f"{where}{name}.")
        elif name in _SECTIONS and value is not None:
            raise InputError(f"{where}{name}", f"{value!r} is not a JSON object", _REMEDY)
        elif isinstance(value, int):
            most = MOST_LAYERS if name.endswith("layers") or name == "depth" else MOST_SIZE
            if value > most:
                raise InputError(f"{where}{name}", f"{value} is above {most}", _REMEDY)


def config_digest(config: Config) -> str:
    """Return a digest of the fields that describe layers and sizes."""
    text = json.dumps(_relevant(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _relevant(config: Config) -> dict[str, Any]:
    return {
        name: _relevant(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _IRRELEVANT and not name.endswith(("_token_id", "_dropout"))
    }


def zoo_model(config: Config) -> str | None:
    """Return the model of the zoo whose published `config.json` has these fields, or None."""
    return read_index().digests.get(config_digest(config))
