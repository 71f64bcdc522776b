"""Load the parts of a pipeline from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.smaller import shapes_only
from pipeloom.integrations.diffusers.text import check_kind
from pipeloom.integrations.diffusers.weights import CONFIG, INDEX, load_into
from pipeloom.integrations.transformers.weights import load as load_text
from pipeloom.integrations.transformers.weights import load_config


def load(
    path: Path, device: torch.device | str | None, *, trains_text: bool, checks_text: bool = True
) -> dict[str, Any]:
    """Load transformer, text encoder and scheduler of a pipeline's folder, or the transformer of its own folder.

    With the device ``"meta"``, only shapes are created; None is the CPU. ``trains_text`` puts the text encoder in
    training mode, because the library loads it in evaluation mode. ``checks_text`` demands a class that can be trained
    from a folder. Raise `InputError` if the folder does not exist, or the architecture is not supported.
    """
    try:
        import diffusers
    except ImportError as error:
        raise InputError(
            "model", "is a folder of the diffusers library", "pip install 'pipeloom[diffusers]'"
        ) from error

    place = torch.device(device or "cpu")
    if not is_pipeline(path):
        return {"transformer": _transformer(path, place)}
    parts = parts_of(path)
    if "transformer_2" in parts:
        raise InputError(str(path), "has two transformers, each for some of the times", "give one of their folders")
    found: dict[str, Any] = {"transformer": _transformer(path / "transformer", place)}
    if "text_encoder" in parts:
        folder = path / "text_encoder"
        # The dtype of the files, because the encoder is large and mostly frozen.
        dtype = load_config(folder).dtype if (folder / CONFIG).is_file() else None
        encoder = load_text(folder, lambda kind, _: check_kind(kind) if checks_text else None, place, dtype)
        found["text_encoder"] = encoder.train(trains_text)
    if "scheduler" in parts:
        file = path / "scheduler" / "scheduler_config.json"
        named = str(_read(file).get("_class_name"))
        kind = _class(diffusers, parts["scheduler"] or named, file)
        found["scheduler"] = kind.from_pretrained(str(file.parent))
    return found


def is_pipeline(path: Path) -> bool:
    """Return whether a folder holds a pipeline, not only a transformer."""
    return (path / INDEX).is_file() or (path / "transformer").is_dir()


def parts_of(path: Path) -> dict[str, str | None]:
    """Return the class name of each part of a pipeline's folder. None if only the part's own folder has it."""
    index = path / INDEX
    if not index.is_file():
        return {each.name: None for each in sorted(path.iterdir()) if each.is_dir()}
    named = {name: each for name, each in _read(index).items() if isinstance(each, list)}
    return {name: str(each[1]) for name, each in named.items() if len(each) > 1 and each[0] is not None}


def _transformer(path: Path, place: torch.device) -> Any:
    import diffusers

    file = path / CONFIG
    if not file.is_file():
        raise InputError(
            str(path), "is not a folder with a config.json or model_index.json", "give the folder of a pipeline"
        )
    name = str(_read(file).get("_class_name"))
    kind = _class(diffusers, name, file)
    with shapes_only():
        model = kind.from_config(kind.load_config(str(path)))
    if place.type == "meta":
        return model
    load_into(model, path)
    return model.to(place).train()


def _class(library: Any, name: str, file: Path) -> Any:
    kind = getattr(library, name, None)
    if kind is None:
        raise InputError(str(file), f"names a {name}, which {library.__name__} does not have")
    return kind


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(str(file), f"cannot be read ({error.strerror})", "fetch the folder again") from error
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(str(file), "is not a JSON object")
    return found
