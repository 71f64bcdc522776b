"""Parts of a pipeline from the folder that it was saved in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.families import family_of

_STEM = "diffusion_pytorch_model"


def load(path: Path, device: torch.device | str | None, *, trains_text: bool) -> dict[str, Any]:
    """Load transformer, text encoder and scheduler: of a pipeline's folder, or of a transformer's that alone.

    Parameters
    ----------
    path : Path
    device : torch.device, str or None
        ``"meta"``: shapes alone. None: the CPU.
    trains_text : bool
        Whether the text encoder is to have its dropout, which the library turns off.

    Raises
    ------
    InputError
        No such folder, or an architecture that is not supported.
    """
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise InputError(
            "model", "is a folder of the diffusers library", "pip install 'pipeloom[diffusers]'"
        ) from error

    place = torch.device(device or "cpu")
    index = path / "model_index.json"
    if not index.is_file():
        return {"transformer": _transformer(path, place)}
    parts = _read(index)
    if (parts.get("transformer_2") or [None])[0] is not None:
        raise InputError(str(index), "has two transformers, each for some of the times", "give one of their folders")
    found: dict[str, Any] = {"transformer": _transformer(path / "transformer", place)}
    if (parts.get("text_encoder") or [None])[0] is not None:
        kind = _class(transformers, parts["text_encoder"][1], index)
        folder = str(path / "text_encoder")
        if place.type == "meta":
            with torch.device("meta"):
                found["text_encoder"] = kind._from_config(kind.config_class.from_pretrained(folder))
        else:
            found["text_encoder"] = kind.from_pretrained(folder).to(place).train(trains_text)
    if (parts.get("scheduler") or [None])[0] is not None:
        kind = _class(diffusers, parts["scheduler"][1], index)
        found["scheduler"] = kind.from_pretrained(str(path / "scheduler"))
    return found


def _transformer(path: Path, place: torch.device) -> Any:
    import diffusers

    file = path / "config.json"
    if not file.is_file():
        raise InputError(str(path), "is no folder with a config.json or model_index.json", "give a saved pipeline's")
    name = str(_read(file).get("_class_name"))
    # Before weights are read.
    family = family_of(name)
    kind = _class(diffusers, name, file)
    with torch.device("meta"):
        model = kind.from_config(kind.load_config(str(path)))
    if family.rope is not None:
        model.rope = family.rope(model.config)
    if place.type == "meta":
        return model
    _fill(model, path)
    return model.to(place).train()


def _fill(model: Any, path: Path) -> None:
    """Give a model of shapes the weights of a folder, in torch's default dtype.

    By the library's own way some families cannot be loaded without another package.
    """
    from safetensors import safe_open

    index = path / f"{_STEM}.safetensors.index.json"
    files = sorted(set(_read(index)["weight_map"].values())) if index.is_file() else [f"{_STEM}.safetensors"]
    wanted, found = set(model.state_dict()), dict[str, torch.Tensor]()
    for name in files:
        file = path / name
        if not file.is_file():
            raise InputError(str(file), "is not there", "fetch the folder again, its weights as safetensors")
        with safe_open(file, "pt") as tensors:
            found |= {key: tensors.get_tensor(key).to(torch.get_default_dtype()) for key in tensors.keys()}  # noqa: SIM118
    for problem, keys in (("is in none of the files", wanted - set(found)), ("is too many", set(found) - wanted)):
        if keys:
            raise InputError(f"{path}: {min(keys)}", problem, "let config.json and weights be of one model")
    for key, tensor in model.state_dict().items():
        if tensor.shape != found[key].shape:
            raise InputError(
                f"{path}: {key}",
                f"has the shape {tuple(found[key].shape)}, the model's is {tuple(tensor.shape)}",
                "let config.json and weights be of one model",
            )
    model.load_state_dict(found, assign=True)


def _class(library: Any, name: str, file: Path) -> Any:
    kind = getattr(library, name, None)
    if kind is None:
        raise InputError(str(file), f"names a {name}, which {library.__name__} does not know")
    return kind


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(str(file), f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(str(file), "is not a JSON object")
    return found
