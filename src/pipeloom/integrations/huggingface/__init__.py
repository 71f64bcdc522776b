"""Read a Hugging Face `config.json` as an `Architecture`, without torch or transformers.

`families.FAMILIES` lists the supported model types. Fields that a config leaves out have the library's defaults.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError, located
from pipeloom.integrations.huggingface.families import FAMILIES
from pipeloom.integrations.huggingface.fields import Config
from pipeloom.io.files import read_text
from pipeloom.spec.architecture import Architecture

__all__ = ["architecture_of", "model_name", "read_config", "read_huggingface"]


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the contents of a `config.json`, or of the one in a folder.

    Raises
    ------
    InputError
        The file does not exist or is not a JSON object.
    """
    file = _file(path)
    if not file.is_file():
        raise InputError(str(path), "is neither a config.json nor a folder with one")
    try:
        config = json.loads(read_text(file))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(str(file), "is not a JSON object")
    return config


def _file(path: str | Path) -> Path:
    file = Path(path)
    return file / "config.json" if file.is_dir() else file


def model_name(config: Config, path: str | Path) -> str:
    """Return the name of the model in a file: the one that its config has, or else that of the file or its folder."""
    own = Path(os.path.realpath(_file(path)))
    name = own.parent.name if own.name == "config.json" else own.name.removesuffix(".json")
    return str(config.get("_name_or_path") or name)


def read_huggingface(path: str | Path) -> Architecture:
    """Read a `config.json`, or the one in a folder.

    Raises
    ------
    InputError
        The file does not exist or is not JSON, the model type is unknown, or a field is invalid.
    """
    config = read_config(path)
    with located(str(_file(path))):
        return architecture_of(config, model_name(config, path))


def architecture_of(config: Config, name: str) -> Architecture:
    """Convert a config to an architecture.

    Parameters
    ----------
    config : mapping
        The contents of a `config.json`.
    name : str
        Name of the architecture. If it is empty, the model type is used.

    Raises
    ------
    InputError
        The model type or class is unknown, or a field is invalid.
    """
    kind = config.get("model_type")
    if kind is None and "_class_name" in config:
        raise InputError(
            "_class_name",
            f"{config['_class_name']!r} belongs to the diffusers library, whose configs are not supported",
            "describe the model in a .toml file, as dit-5b of the zoo is",
        )
    if kind is None:
        raise InputError("model_type", "is missing", "give the config of a transformers model")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise InputError(
            "model_type", f"{kind!r} is not known", f"known are {', '.join(FAMILIES)}; or describe it in a .toml file"
        )
    classes = config.get("architectures")
    if classes and not (isinstance(classes, list) and family.architecture in classes):
        given = ", ".join(map(str, classes)) if isinstance(classes, list) else repr(classes)
        raise InputError("architectures", f"{given} is not known", f"of {kind}, {family.architecture} is")
    return Architecture(name or str(kind), f"Hugging Face config, model type {kind}", family.read(config))
