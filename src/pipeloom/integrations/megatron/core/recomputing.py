"""Apply a memory strategy to one forward of a model chunk, by Megatron's own recomputation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.spec import TRAITS, Strategy

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
        self._flags = [
            (module, name, word)
            for module in modules
            for word, names in _FLAGS.items()
            for name in names
            if name in module.__dict__ and _can_set(module, name)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context of a step, after which all settings are as before."""
        settings = [(config, name, getattr(config, name)) for config in self._configs for name in _SETTINGS]
        flags = [(module, name, getattr(module, name)) for module, name, _ in self._flags]
        self._set("keep")
        try:
            yield
        finally:
            for holder, name, value in (*settings, *flags):
                setattr(holder, name, value)

    @contextmanager
    def under(self, strategy: Strategy) -> Iterator[None]:
        """Return a context of one forward, whose activations are held by a strategy."""
        if strategy == "keep":
            yield
            return
        self._set(strategy)
        try:
            yield
        finally:
            self._set("keep")

    def _set(self, strategy: Strategy) -> None:
        settings: tuple[Any, ...]
        match TRAITS[strategy].recomputes:
            case "nothing":
                settings = (None, None, None)
            case "cheap":
                settings = ("selective", None, None)
            case "all":
                # Each layer by itself, since the backward then recomputes one layer at a time.
                settings = ("full", "uniform", 1)
            case unknown:
                assert_never(unknown)
        for config in self._configs:
            for name, value in zip(_SETTINGS, settings, strict=True):
                setattr(config, name, value)
        for module, name, word in self._flags:
            setattr(module, name, settings[0] == "selective" and word in (module.config.recompute_modules or ()))


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


class SavedTensors:
    """Context of a forward that measures which tensors autograd saves in it."""

    def __init__(self) -> None:
        self._saved: list[weakref.ref[Tensor]] = []
        self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *given: object) -> None:
        self._hooks.__exit__(*given)

    def _save(self, tensor: Tensor) -> Tensor:
        # Autograd holds the returned tensor for as long as it needs it.
        self._saved.append(weakref.ref(tensor))
        return tensor

    def num_bytes(self, others: nn.Module, *held: Tensor) -> int:
        """Return the bytes that are held now, each storage once.

        Parameters
        ----------
        others : torch.nn.Module
            Module whose weights do not count.
        held : torch.Tensor
            Tensors that are held although autograd may not save them.
        """
        # Megatron's wrapper has an attribute `buffers`.
        weights = {each.untyped_storage().data_ptr() for each in (*others.parameters(), *nn.Module.buffers(others))}
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in (*held, *(ref() for ref in self._saved)):
            if tensor is not None:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage
        return sum(storage.nbytes() for place, storage in found.items() if place not in weights)
