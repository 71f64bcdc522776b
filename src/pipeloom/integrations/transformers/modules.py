"""The module of a language model whose samples run as one, and names and kinds of the layers of all modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.balance import balance, find_balancing
from pipeloom.integrations.transformers.description import LM, Family
from pipeloom.integrations.transformers.hollow import hollow, probes
from pipeloom.integrations.transformers.layers import LibraryLayer, has_mask, record
from pipeloom.integrations.transformers.packed import ATTENTION, EAGER, as_contexts
from pipeloom.integrations.transformers.samples import clean, num_targets
from pipeloom.integrations.transformers.smaller import signature
from pipeloom.integrations.transformers.whole import SampleFirst, SampleLast, Tower, TowerBlock, sample_call
from pipeloom.runtime.model.model import Module, Part


def text_module(model: Any, family: Family, freeze: Sequence[str]) -> Module:
    """Return the module of a language model whose samples run as one, and freeze it if ``freeze`` names it."""
    check_names(freeze, (LM,))
    blocks: Any = model.get_submodule(family.path)
    trunk: Any = model.get_submodule(family.trunk)
    config = model.config.get_text_config()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    # Unpacked inputs take the library's own path, so that the original model can still be used.
    trunk.config._attn_implementation = EAGER if family.eager else ATTENTION

    def shell(keep: tuple[str, ...]) -> nn.Module:
        # New probes for each shell, because the library registers its hooks on them.
        return hollow(model, keep, {family.path: probes(LM, blocks, family.extras)})

    tower = Tower(LM, family.path, len(blocks), axis=1)
    layers: list[LibraryLayer] = [SampleFirst(shell(family.first), tower, ())]
    layers += [TowerBlock(block, place, tower) for place, block in enumerate(blocks)]
    layers.append(SampleLast(shell(family.last), tower, alone=True))
    balancing = find_balancing(trunk, blocks, config)
    emits, takes = ({}, {}) if balancing is None else balance(layers, balancing, dtype)
    width = model.get_input_embeddings().weight.shape[1]
    return Module(
        LM,
        layers,
        reads="sequence",
        hidden=("tokens", config.hidden_size),
        output=("tokens", config.vocab_size),
        inputs=ids,
        context=TextContext(shell(()), family, tower, config.hidden_size, width, dtype, balances=balancing is not None),
        frozen=LM in freeze,
        kinds=("first", *kinds_of(blocks, lambda i: layer_type(config, blocks[i], i)), "last"),
        emits=emits,
        takes=takes,
    )


def ids(part: Part) -> Tensor:
    """Return the concatenated token ids of the samples."""
    return torch.cat([clean(part.samples[place])["input_ids"] for place, _ in part.instances])


@dataclass(frozen=True)
class TextContext:
    """Returns the arguments of the blocks of a language model for a part."""

    shell: nn.Module
    family: Family
    tower: Tower
    hidden_size: int
    width: int
    """Width of the embeddings of tokens."""
    dtype: torch.dtype
    balances: bool = False
    """Whether the last layer computes the load-balancing loss, which needs the numbers of targets."""

    def __call__(self, part: Part) -> dict[str, Any]:
        """Return the arguments of each block for packed samples, and those of the model's own forward pass."""
        samples = [clean(part.samples[place]) for place, _ in part.instances]
        lengths = tuple(len(sample["input_ids"]) for sample in samples)
        total = sum(lengths)
        values: dict[str, Any] = {
            "attention_mask": torch.ones(1, total, dtype=torch.int64),
            "position_ids": torch.cat([torch.arange(length)[None] for length in lengths], dim=-1),
        }
        for name in self.family.per_token:
            given = [torch.as_tensor(sample[name]).reshape(1, -1) for sample in samples if name in sample]
            if given and len(given) != len(samples):
                raise InputError(f"sample.{name}", "is present in some samples and missing in others")
            if given:
                values[name] = torch.cat(given, dim=1)
        if self.balances:
            values["output_router_logits"] = False
        embeddings = torch.zeros((), dtype=self.dtype).expand(1, total, self.width)
        call = sample_call({"inputs_embeds": embeddings, **values})
        found = record(self.shell, call, self.tower.count, lengths=lengths)
        if len(lengths) > 1 and not all(map(has_mask, found)):
            raise InputError("a block", "gets no mask", "it cannot be packed; not supported")
        outer: dict[str, Any] = {"values": values, "shapes": {}, "tokens": total, "streams": {}, "behind": values}
        outer |= {"shape": (1, total, self.hidden_size), "width": self.width, "lengths": lengths}
        if self.balances:
            outer["targets"] = torch.tensor([num_targets(sample, shifts=self.family.shifts) for sample in samples])
        return as_contexts([(found, outer)])


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
