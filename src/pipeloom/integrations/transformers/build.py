"""`from_transformers` converts a model of the library to a `Model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.assembly import Anatomy, build_modules
from pipeloom.integrations.transformers.description import Encoder, Family
from pipeloom.integrations.transformers.found import read_family, write_family
from pipeloom.integrations.transformers.generic import find_family
from pipeloom.integrations.transformers.layers import LibraryLayer
from pipeloom.integrations.transformers.modules import text_module
from pipeloom.integrations.transformers.packed import register
from pipeloom.integrations.transformers.samples import Sizes, num_targets, summed_loss
from pipeloom.integrations.transformers.smaller import check_as_configured
from pipeloom.integrations.transformers.weights import TransformersWeights, load
from pipeloom.runtime.checkpoint.safetensors_files import TensorFiles
from pipeloom.runtime.model.model import Model, Module

_DETECTED: dict[tuple[type, str], Family] = {}
"""Cache of `find_family`, which takes seconds, by class and configuration."""


@dataclass(frozen=True, eq=False)
class TransformersModel(Model):
    """A `Model` that consists of the layers of a model of the `transformers` library.

    Its ``describe`` returns the sizes of a sample. The ``id`` is the sample's own, or a digest of its contents.

    Attributes
    ----------
    per_token : frozenset of str
        Entries of a sample with one number per token.
    shifts : bool
        Whether the model shifts the labels itself. Otherwise the label of a token is the next token.
    """

    per_token: frozenset[str] = frozenset()
    shifts: bool = True

    def library_names(self) -> dict[str, str]:
        """Return the library's name of each parameter ``module.layer.parameter``."""
        return {ours: theirs for ours, theirs, tensor in _named(self.modules) if isinstance(tensor, nn.Parameter)}


def shapes(folder: Path | str) -> TransformersModel:
    """Return a model on the meta device for a folder that may lack weights. It can be saved, but not loaded."""
    if TensorFiles.are_in(Path(folder)):
        return from_transformers(folder, device="meta")
    made = from_transformers(load(folder, family_of, "meta", None))
    assert isinstance(made.pretrained, TransformersWeights)
    made.pretrained.folder = Path(folder)
    return made


def _named(modules: Sequence[Module]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield each parameter and persistent buffer with its name and the library's name."""
    for module in modules:
        for number, layer in enumerate(module.layers):
            assert isinstance(layer, LibraryLayer)
            for name, tensor in layer.state_dict(keep_vars=True).items():
                yield f"{module.name}.{number}.{name}", layer.library_name(name), tensor


def from_transformers(
    model: Any,
    *,
    freeze: Sequence[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TransformersModel:
    """Convert a model of the `transformers` library to a `Model`.

    A sample is the output of the library's processor for one example, without padding: ``input_ids``, ``labels`` and
    the entries that the model takes, such as ``pixel_values`` and ``image_grid_thw``. The loss is the library's own,
    over all targets of the batch. The model's layers are shared, so the original model can still be used. Its parts are
    detected and tested on a small model of the same configuration, which takes seconds the first time. Batch norms are
    put into evaluation mode: they use their saved statistics, because those of a pack would mix its samples. Call
    ``model.train()`` before, not afterwards.

    Parameters
    ----------
    model : transformers.PreTrainedModel, str or pathlib.Path
        A model with a language-modeling head, or the folder of a saved one.
    freeze : sequence of str
        Modules that are not trained. ``"vision"`` is the encoder with its projector. Their parameters no longer require
        gradients, in the given model too.
    device : torch.device, str or None
        Device on which the model of a folder is created. With ``"meta"``, only shapes are created, and in training each
        rank reads the weights of its own layers from the folder. None for the CPU.
    dtype : torch.dtype or None
        Data type of the model of a folder. None for torch's default, which `pipeloom train` sets.

    Returns
    -------
    TransformersModel
        A `Model` with ``describe``, which returns the sizes of a sample.

    Raises
    ------
    InputError
        The architecture or one of its options is not supported, or the files of the folder do not match the model.
    """
    folder = Path(model) if isinstance(model, (str, Path)) else None
    is_loaded = torch.device(device or "cpu").type != "meta"
    if folder is not None:
        model = load(folder, family_of, device, dtype)
    else:
        for option, given in (("device", device), ("dtype", dtype)):
            if given is not None:
                raise InputError(option, f"is {str(given)!r}, but the model exists already", "leave it out")
    if getattr(model, "is_activation_checkpointing", False):
        remedy = "turn it off by model.activation_checkpointing_disable(); plans choose what is recomputed"
        raise InputError("model", "recomputes its blocks itself", remedy)
    with torch.enable_grad():  # parts are found by their gradients, also for a caller that only evaluates
        family = family_of(type(model), model.config)
        check_as_configured(model)
        _keep_statistics(model)
        made = _assemble(model, family, freeze)
    names = {ours: theirs for ours, theirs, _ in _named(made.modules)}
    return replace(made, pretrained=TransformersWeights(model, names, folder, is_loaded=is_loaded))


def _assemble(model: Any, family: Family, freeze: Sequence[str] = ()) -> TransformersModel:
    _check_loss(model)
    text = model.config.get_text_config()
    _check_rotary(text, packs=family.packs)
    register()
    encoders: tuple[Encoder, ...] = ()
    if family.first:
        modules = [text_module(model, family, freeze)]
    else:
        anatomy = Anatomy(model, family)
        encoders = tuple(map(anatomy.encoder, range(len(family.encoders))))
        modules = build_modules(anatomy, freeze)
    if not encoders:
        _check_complete(model, modules)
    sizes = Sizes(model.config, family.per_token, encoders)
    return TransformersModel(
        modules,
        partial(
            summed_loss,
            model.loss_function,
            text.vocab_size,
            z_weight=getattr(text, "z_loss_coefficient", 0),
            shifts=family.shifts,
        ),
        partial(num_targets, shifts=family.shifts),
        name=type(model).__name__,
        targets="target tokens",
        describe=sizes.describe,
        examples=sizes.examples if encoders else None,
        excluded=family.excluded,
        per_token=sizes.per_token,
        shifts=family.shifts,
    )


def family_of(kind: type, config: Any) -> Family:
    """Return what is found out about a class with a configuration. Raise `InputError` if it is not supported."""
    key = (kind, config.to_json_string(use_diff=False))
    if key not in _DETECTED:
        family = read_family(kind, config)
        if family is None:
            family = find_family(kind, config, _assemble)
            write_family(kind, config, family)
        _DETECTED[key] = family
    return _DETECTED[key]


def _check_loss(model: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        raise InputError("model.loss_function", "is not the library's loss for language models")


def _check_rotary(config: Any, *, packs: bool) -> None:
    """Raise `InputError` for rotary embeddings that depend on the longest sequence.

    In a pack, samples would change each other's positions. Type ``dynamic`` also depends on earlier calls.
    """
    given = getattr(config, "rope_parameters", None) or {}
    for each in (given, *(inner for inner in given.values() if isinstance(inner, dict))):
        kind = str(each.get("rope_type"))
        if kind == "dynamic" or (kind == "longrope" and packs):
            raise InputError("model.config.rope_parameters", f"are of type {kind!r}, which packing would change")


def _keep_statistics(model: nn.Module) -> None:
    """Put batch norms into evaluation mode, because the statistics of a pack would mix its samples."""
    for each in model.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            if each.running_mean is None:
                raise InputError("model", "has a batch norm without saved statistics, so samples of a pack would mix")
            each.eval()


def _check_complete(model: nn.Module, modules: Sequence[Module]) -> None:
    """Raise `InputError` if a parameter belongs to no layer."""
    held = {id(p) for module in modules for layer in module.layers for p in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held:
            raise InputError(f"parameter {name!r}", "belongs to no layer", "this form of the model is not supported")
