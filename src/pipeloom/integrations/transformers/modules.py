"""Build the module of a language model: assign the library's parts to layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers import parts
from pipeloom.integrations.transformers.balance import Balancing, BalancingHead, RoutedBlock, find_balancing, stream
from pipeloom.integrations.transformers.description import LM, Family
from pipeloom.integrations.transformers.hollow import hollow, probes
from pipeloom.integrations.transformers.layers import LibraryLayer
from pipeloom.integrations.transformers.packed import ATTENTION, EAGER
from pipeloom.integrations.transformers.smaller import signature
from pipeloom.integrations.transformers.whole import SampleFirst, SampleLast, Tower, TowerBlock
from pipeloom.runtime.model.model import Module, Shape
from pipeloom.spec import TensorShape


class Builder:
    """Builds the module of a language model."""

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family, self.config = model, family, model.config
        self.num_blocks = len(model.get_submodule(family.path))
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def module(self, freeze: Sequence[str]) -> Module:
        """Build the module, and freeze it if ``freeze`` names it."""
        check_names(freeze, (LM,))
        family, path = self.family, self.family.path
        blocks: Any = self.model.get_submodule(path)
        config = self.config.get_text_config()
        # Unpacked inputs take the library's own path, so that the original model can still be used.
        self.model.get_submodule(family.trunk).config._attn_implementation = EAGER if family.eager else ATTENTION

        def shell(keep: tuple[str, ...]) -> nn.Module:
            # New probes for each shell, because the library registers its hooks on them.
            return hollow(self.model, keep, {path: probes(LM, blocks, family.extras)})

        tower = Tower(LM, path, len(blocks), axis=1)
        layers: list[LibraryLayer] = [SampleFirst(shell(family.first), tower, ())]
        layers += [TowerBlock(block, place, tower) for place, block in enumerate(blocks)]
        layers.append(SampleLast(shell(family.last), tower, alone=True))
        balancing = find_balancing(self.model.get_submodule(family.trunk), blocks, config)
        if balancing is not None:
            layers = self._balanced(layers, balancing)
        width = self.model.get_input_embeddings().weight.shape[1]
        context = parts.TextContext(
            shell(()), family, tower, config.hidden_size, width, self.dtype, balances=balancing is not None
        )
        return Module(
            LM,
            layers,
            reads="sequence",
            hidden=("tokens", config.hidden_size),
            output=("tokens", config.vocab_size),
            inputs=parts.ids,
            context=context,
            frozen=LM in freeze,
            kinds=("first", *kinds_of(blocks, lambda i: layer_type(config, blocks[i], i)), "last"),
            emits=self._sums(balancing),
            takes=self._taken(balancing),
        )

    def _balanced(self, layers: list[LibraryLayer], balancing: Balancing) -> list[LibraryLayer]:
        """Wrap the layers so that they compute the load-balancing loss."""
        before: int | None = None
        for place in balancing.routers:
            layers[place + 1] = RoutedBlock(layers[place + 1], balancing, place, before)
            before = place
        return [*layers[:-1], BalancingHead(layers[-1], balancing)]

    def _sums(self, balancing: Balancing | None) -> dict[int, dict[str, Shape | None]]:
        if balancing is None:
            return {}
        dtype = "float64" if self.dtype is torch.float64 else "float32"
        shape = TensorShape(("instances", balancing.width), dtype)
        return {place + 1: {stream(place): shape} for place in balancing.routers}

    def _taken(self, balancing: Balancing | None) -> dict[int, tuple[str, ...]]:
        if balancing is None:
            return {}
        places = list(balancing.routers)
        takers = [*(place + 1 for place in places[1:]), self.num_blocks + 1]
        return {taker: (stream(place),) for place, taker in zip(places, takers, strict=True)}


def check_names(freeze: Sequence[str], known: Sequence[str]) -> None:
    """Raise `InputError` if a name is not that of a module."""
    for name in freeze:
        if name not in known:
            raise InputError("freeze", f"{name!r} is not a module", f"choose from {', '.join(known)}")


def kinds_of(blocks: Sequence[nn.Module], what: Callable[[int], str]) -> list[str]:
    """Return the kind of each block. ``what`` returns a word that distinguishes blocks of equal class and size."""
    kinds: list[str] = []
    seen: dict[str, list[Any]] = {}
    for place, block in enumerate(blocks):
        size = sum(p.numel() for p in block.parameters())
        kind = f"{type(block).__name__}[{' '.join(filter(None, (what(place), str(size))))}]"
        # Blocks of equal class and size may still differ: with or without a window, local or global.
        forms, form = seen.setdefault(kind, []), signature(block)
        if form not in forms:
            forms.append(form)
        number = forms.index(form)
        kinds.append(f"{kind}#{number + 1}" if number else kind)
    return kinds


def layer_type(config: Any, block: nn.Module, place: int) -> str:
    """Return the type of a block in the config, because sliding and full attention differ in cost."""
    types = getattr(config, "layer_types", None)
    return str(types[place] if types is not None else getattr(block, "block_type", ""))
