"""Apply a memory strategy to one forward of a model chunk, by Megatron's own recomputation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, assert_never

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.spec import TRAITS, word_strategies

_SETTINGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_FLAGS = {
    "core_attn": ("checkpoint_core_attention",),
    "layernorm": ("recompute_input_layernorm", "recompute_pre_mlp_layernorm"),
    "mla_up_proj": ("recompute_up_proj",),
    "mlp": ("recompute_mlp",),
    "moe": ("moe_layer_recompute",),
    "moe_act": ("activation_recompute",),
    "shared_experts": ("shared_experts_recompute",),
}
"""Attributes of Megatron's layers that follow from ``recompute_modules`` when a layer is built."""
_SET_UP = ("recompute_input_layernorm", "recompute_pre_mlp_layernorm", "activation_recompute")
"""Attributes for which layers of FP8 or FP4 are built in another way."""


class Recomputing:
    """What the layers of a model chunk recompute.

    Megatron's forwards read these settings from configurations and layers. A backward that recomputes a layer reads
    them again, so outside of forwards they are those of ``keep``, until `restored`.
    """

    def __init__(self, chunk: nn.Module) -> None:
        modules: list[Any] = list(chunk.modules())
        configs = (getattr(each, "config", None) for each in modules)
        self._configs: list[Any] = list({id(each): each for each in configs if hasattr(each, _SETTINGS[0])}.values())
        places = {id(part): i for i, layer in enumerate(_layers_of(chunk)) for part in layer.modules()}
        self._flags = [
            (module, name, word, places.get(id(module), 0))
            for module in modules
            for word, names in _FLAGS.items()
            for name in names
            if name in module.__dict__ and _can_set(module, name)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context of a step, after which all settings are as before."""
        settings = [(config, name, getattr(config, name)) for config in self._configs for name in _SETTINGS]
        flags = [(module, name, getattr(module, name)) for module, name, *_ in self._flags]
        self._set("keep")
        try:
            yield
        finally:
            for holder, name, value in (*settings, *flags):
                setattr(holder, name, value)

    @contextmanager
    def under(self, strategy: str) -> Iterator[None]:
        """Return a context of one forward, whose activations are held by a strategy.

        It is one word, or one for each layer of the chunk, of which the first ones recompute the most.
        """
        if strategy == "keep":
            yield
            return
        self._set(strategy)
        try:
            yield
        finally:
            self._set("keep")

    def _set(self, strategy: str) -> None:
        recomputed = [TRAITS[each].recomputes for each in word_strategies(strategy)]
        settings: tuple[Any, ...]
        match recomputed[0]:
            case "nothing":
                settings = (None, None, None)
            case "cheap":
                settings = ("selective", None, None)
            case "all" if len(recomputed) == 1:
                # Each layer by itself, since the backward then recomputes one layer at a time.
                settings = ("full", "uniform", 1)
            case "all":
                settings = ("full", "block", recomputed.count("all"))
            case unknown:
                assert_never(unknown)
        for config in self._configs:
            for name, value in zip(_SETTINGS, settings, strict=True):
                setattr(config, name, value)
        for module, name, word, layer in self._flags:
            cheap = recomputed[layer if len(recomputed) > 1 else 0] == "cheap"
            setattr(module, name, cheap and word in (module.config.recompute_modules or ()))


def num_equal_layers(chunk: nn.Module) -> int:
    """Return the number of a model chunk's layers that may recompute in different ways; 1 if all recompute alike.

    Megatron can recompute the first layers of a transformer block and keep the others. The layers must be equal, so
    that bytes and seconds measured for the whole chunk are shared evenly by them.
    """
    config: Any = getattr(chunk, "config", None)
    layers = _layers_of(chunk)
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        # The first layer of a block may then not be recomputed, and some layers may have another precision.
        return 1
    if not layers or any(isinstance(module, MultiTokenPredictionLayer) for module in chunk.modules()):
        return 1
    return len(layers) if len({_structure(layer) for layer in layers}) == 1 else 1


def _layers_of(chunk: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of the one transformer block of a model chunk, if it has one."""
    blocks = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    return list(blocks[0].layers) if len(blocks) == 1 else ()


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    """Return what equal layers have in common: the classes of their modules and the shapes of their weights."""
    classes = tuple((name, type(module)) for name, module in layer.named_modules())
    return classes, tuple((name, each.shape, each.dtype) for name, each in layer.named_parameters())


def _can_set(module: Any, name: str) -> bool:
    """Return whether a layer can recompute this part in some forwards only."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "recompute_modules"):
        return False
    if name in _SET_UP and (getattr(config, "fp8", None) or getattr(config, "fp4", None)):
        return False
    # Megatron sets these two only where there is such a part to recompute.
    if name == "recompute_mlp":
        # The checkpoint returns the bias, a weight. Autograd takes it for its result, and its backward calls itself.
        return not (module.is_moe_layer or config.add_bias_linear)
    if name in _NORMS:
        return any(True for _ in getattr(module, _NORMS[name]).parameters())
    return True


_NORMS = {"recompute_input_layernorm": "input_layernorm", "recompute_pre_mlp_layernorm": "pre_mlp_layernorm"}


class SavedTensors(saved_tensors_hooks):
    """Context of a forward that measures which tensors autograd saves in it."""

    def __init__(self) -> None:
        saved: list[weakref.ref[Tensor]] = []

        def save(tensor: Tensor) -> Tensor:
            # Autograd holds the returned tensor for as long as it needs it.
            saved.append(weakref.ref(tensor))
            return tensor

        # A method as a hook would be a cycle, which only the garbage collector frees.
        super().__init__(save, lambda tensor: tensor)
        self._saved = saved

    def num_bytes(self, others: nn.Module, *held: Tensor) -> int:
        """Return the bytes that are held now, each storage once.

        The weights of ``others`` do not count; the tensors ``held`` do, even if autograd does not save them.
        """
        # Megatron's wrapper has an attribute `buffers`.
        weights = {each.untyped_storage().data_ptr() for each in (*others.parameters(), *nn.Module.buffers(others))}
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in (*held, *(ref() for ref in self._saved)):
            if tensor is not None:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage
        return sum(storage.nbytes() for place, storage in found.items() if place not in weights)
