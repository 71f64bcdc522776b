"""Build the modules of a model: assign the library's parts to layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers import parts
from pipeloom.integrations.transformers.balance import Balancing, BalancingHead, RoutedBlock, find_balancing, stream
from pipeloom.integrations.transformers.families import Encoder, Taps, Text
from pipeloom.integrations.transformers.hollow import ConvolutionFiller, EmbeddingFiller, Filler, hollow, probes
from pipeloom.integrations.transformers.layers import (
    PACKED,
    AddedFeatures,
    AddingBlock,
    Block,
    EncoderFirst,
    EncoderLast,
    EncoderOutput,
    LibraryLayer,
    OneByOne,
    TappedBlock,
    TextFirst,
    TextLast,
)
from pipeloom.integrations.transformers.packed import ATTENTION, EAGER, LENGTHS
from pipeloom.integrations.transformers.smaller import signature
from pipeloom.runtime.model.model import Module, Shape
from pipeloom.spec import TensorShape


class Builder:
    """Builds the modules of one model."""

    def __init__(self, model: Any, text: Text, encoders: Sequence[Encoder]) -> None:
        self.model, self.text, self.encoders, self.config = model, text, encoders, model.config
        self.num_blocks = len(model.get_submodule(text.blocks))
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def modules(self, freeze: Sequence[str]) -> list[Module]:
        """Build all modules, and freeze those named by ``freeze``."""
        known = [*(encoder.name for encoder in self.encoders), "lm"]
        for name in freeze:
            if name not in known:
                raise InputError("freeze", f"{name!r} is not a module", f"choose from {', '.join(known)}")
        return [*(self._encoder(each, each.name in freeze) for each in self.encoders), self._text("lm" in freeze)]

    def _fillers(self, paths: Sequence[str]) -> dict[str, nn.Module]:
        """Return replacements of the parts before the blocks."""
        return {path: _filler(self.model.get_submodule(path)) for path in paths if _has(self.model, path)}

    def _outline(self, model: nn.Module, paths: Sequence[str]) -> nn.Module:
        """Give an outline of the model empty parameters, from which the library reads its dtype."""
        for path in paths:
            if not _has(model, path):
                continue
            empty = torch.empty(0, dtype=self.dtype)
            model.get_submodule(path).register_parameter("like", nn.Parameter(empty, requires_grad=False))
        return model

    def _text(self, frozen: bool) -> Module:
        text, path = self.text, self.text.blocks
        blocks: Any = self.model.get_submodule(path)
        config = self.config.get_text_config()
        if not text.one_by_one:
            # Unpacked inputs take the library's own path, so that the original model can still be used.
            self.model.get_submodule(text.trunk).config._attn_implementation = EAGER if text.eager else ATTENTION

        def shell(keep: tuple[str, ...], swap: dict[str, nn.Module]) -> nn.Module:
            # New probes for each shell, because the library registers its hooks on them.
            return hollow(self.model, keep, {path: probes("lm", blocks, text.gives_tuple), **swap})

        keep, taken = [*text.first], []
        swap: dict[str, nn.Module] = {}
        for each in self.encoders:
            tapped = each.taps.features if each.taps else ""
            taken.append(EncoderOutput(each.name, each.given, each.listed, tapped, each.form if each.in_lm else None))
            if each.in_lm:
                keep += each.last
                swap |= self._fillers((*each.first, *each.unused))
                swap[each.blocks] = self._probes(each)
        before = TextFirst(shell(tuple(keep), swap), tuple(taken))
        layers: list[LibraryLayer] = [before]
        added = self._added()
        for place, block in enumerate(blocks):
            alone = getattr(block, "block_type", None) in text.alone
            layer = Block(block, place, f"{path}.{place}", PACKED, alone=alone)
            layers.append(AddingBlock(layer, added[place]) if place in added else layer)
        skipped = self._fillers([name for name in text.first if name not in text.last])
        layers.append(TextLast(shell(text.last, skipped), ("position_ids", "output_router_logits", *text.per_token)))
        balancing = find_balancing(self.model.get_submodule(text.trunk), blocks, config)
        if balancing is not None:
            layers = self._balanced(layers, balancing)
        if text.one_by_one:
            layers = [OneByOne(layer) for layer in layers]
        outline = self._outline(shell((), self._fillers(text.first)), text.first)
        context = parts.TextContext(
            outline, text, tuple(self.encoders), len(blocks), config.hidden_size, self.dtype, balancing is not None
        )
        return Module(
            "lm",
            layers,
            reads="sequence",
            hidden=("tokens", config.hidden_size),
            output=("tokens", config.vocab_size),
            inputs=parts.ids,
            context=context,
            after=tuple(encoder.name for encoder in self.encoders),
            frozen=frozen,
            kinds=("first", *kinds_of(blocks, lambda i: layer_type(config, blocks[i], i)), "last"),
            emits=self._sums(balancing),
            takes=self._taken(added, balancing),
        )

    def _balanced(self, layers: list[LibraryLayer], balancing: Balancing) -> list[LibraryLayer]:
        """Wrap the layers so that they compute the load-balancing loss."""
        if self.text.one_by_one:
            entity, remedy = "model.config.output_router_logits", "set it to False"
            raise InputError(entity, "is set, but this model's layers are called once per sequence", remedy)
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

    def _taken(self, added: dict[int, AddedFeatures], balancing: Balancing | None) -> dict[int, tuple[str, ...]]:
        taken: dict[int, tuple[str, ...]] = {place + 1: (each.stream,) for place, each in added.items()}
        if balancing is not None:
            places = list(balancing.routers)
            takers = [*(place + 1 for place in places[1:]), self.num_blocks + 1]
            for place, taker in zip(places, takers, strict=True):
                taken[taker] = (*taken.get(taker, ()), stream(place))
        return taken

    def _added(self) -> dict[int, AddedFeatures]:
        """Return the encoder features added after each block of the language model, by block number."""
        found: dict[int, AddedFeatures] = {}
        for encoder in self.encoders:
            if encoder.taps is not None:
                method = getattr(type(self.model.get_submodule(self.text.trunk)), encoder.taps.add)
                # The method does not use the trunk, which no layer has as a whole.
                add = partial(method, None)
                found |= {i: AddedFeatures(_stream(i), encoder.name, add) for i in range(len(encoder.taps.ends))}
        return found

    def _probes(self, encoder: Encoder) -> nn.Module:
        blocks: Any = self.model.get_submodule(encoder.blocks)
        return probes(encoder.name, blocks, encoder.gives_tuple)

    def _encoder(self, vision: Encoder, frozen: bool) -> Module:
        every: Any = self.model.get_submodule(vision.blocks)
        if vision.takes_lengths:
            # The library reads this setting from the tower, which contains the blocks.
            self.model.get_submodule(".".join(vision.blocks.split(".")[:2])).config._attn_implementation = LENGTHS
        blocks, taps = every[: vision.used], vision.taps

        def shell(keep: tuple[str, ...], swap: dict[str, nn.Module]) -> nn.Module:
            found = hollow(self.model, keep, {vision.blocks: self._probes(vision), **swap})
            if taps is not None:
                setattr(found.get_submodule(taps.tower), taps.switch, ())
            return found

        width = _width(every[0])
        hidden = (width,) if vision.patches is None else (vision.patches, width)
        layers: list[nn.Module] = [EncoderFirst(shell(vision.first, {}), vision.form, vision.features)]
        for place, block in enumerate(blocks):
            layers.append(self._tapped(Block(block, place, f"{vision.blocks}.{place}", vision.form), taps))
        rows: tuple[int, ...] = hidden
        kinds = kinds_of(blocks, lambda i: vision.kinds[i] if vision.kinds else "")
        if not vision.in_lm:
            rows = self._rows(vision)
            behind = shell(vision.last, self._fillers((*vision.first, *vision.unused)))
            layers.append(EncoderLast(behind, vision.form, vision.features, rows))
            kinds = [*kinds, "last"]
        outline = self._outline(shell((), self._fillers(vision.first)), vision.first)
        return Module(
            vision.name,
            layers,
            reads=vision.reads,
            hidden=("tokens" if vision.patches is None else "instances", *hidden),
            output=("tokens" if vision.tokens is None else "instances", *rows),
            inputs=partial(parts.pixels, vision),
            context=parts.EncoderContext(outline, vision, len(blocks), hidden, self.dtype),
            frozen=frozen,
            kinds=("first", *kinds),
            emits={} if taps is None else self._emits(taps, vision.merge),
        )

    def _tapped(self, block: Block, taps: Taps | None) -> Block:
        if taps is None or block.place not in taps.ends:
            return block
        path = taps.ends[block.place]
        stream = _stream(list(taps.ends).index(block.place))
        return TappedBlock(block, self.model.get_submodule(path), path, stream)

    def _emits(self, taps: Taps, merge: int) -> dict[int, dict[str, Shape | None]]:
        """Return the streams that each layer emits. Layer 0 is the one before the blocks."""
        shape = ("tokens" if merge == 1 else f"tokens/{merge}", self.config.get_text_config().hidden_size)
        return {place + 1: {_stream(number): shape} for number, place in enumerate(taps.ends)}

    def _rows(self, vision: Encoder) -> tuple[int, ...]:
        """Return the shape of the encoder's output without its first dimension."""
        width = self.config.get_text_config().hidden_size
        if vision.tokens is not None:
            return (vision.tokens, width)
        if width % vision.merge:
            raise InputError(
                "model.config", f"merges {vision.merge} patches into {width} numbers, which is not a multiple"
            )
        # Where patches are merged, a token's features are split into one row per patch.
        return (width // vision.merge,)


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


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _stream(number: int) -> str:
    return f"deep{number}"


def _filler(part: nn.Module) -> nn.Module:
    if isinstance(part, nn.Embedding):
        return EmbeddingFiller()
    return ConvolutionFiller(part) if hasattr(part, "out_channels") else Filler()


def layer_type(config: Any, block: nn.Module, place: int) -> str:
    """Return the type of a block in the config, because sliding and full attention differ in cost."""
    types = getattr(config, "layer_types", None)
    return str(types[place] if types is not None else getattr(block, "block_type", ""))


def _width(block: nn.Module) -> int:
    """Return the width of the hidden state, which is that of the block's first norm."""
    for part in block.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1:
            return int(weight.shape[0])
    return 0
