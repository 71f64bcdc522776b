"""Inputs of a language model for a part of a batch: those of its first layer, and the arguments of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.description import Text
from pipeloom.integrations.transformers.layers import has_mask, record
from pipeloom.integrations.transformers.packed import as_context
from pipeloom.integrations.transformers.samples import clean, num_targets
from pipeloom.runtime.model.model import Part


def ids(part: Part) -> Tensor:
    """Return the concatenated token ids of the samples."""
    return torch.cat([clean(part.samples[place])["input_ids"] for place, _ in part.instances])


@dataclass(frozen=True)
class TextContext:
    """Returns the arguments of the blocks of a language model for a part."""

    shell: nn.Module
    text: Text
    num_blocks: int
    width: int
    dtype: torch.dtype
    balances: bool = False
    """Whether the last layer computes the load-balancing loss, which needs the numbers of targets."""

    def __call__(self, part: Part) -> dict[str, Any]:
        """Return the arguments of each block for packed samples, and those of the model's own forward pass."""
        text, samples = self.text, [clean(part.samples[place]) for place, _ in part.instances]
        lengths = tuple(len(sample["input_ids"]) for sample in samples)
        positions = torch.cat([torch.arange(length)[None] for length in lengths], dim=-1)
        outer: dict[str, Any] = {"position_ids": positions}
        for name in text.per_token:
            values = [torch.as_tensor(sample[name]).reshape(1, -1) for sample in samples if name in sample]
            if values and len(values) != len(samples):
                raise InputError(f"sample.{name}", "is present in some samples and missing in others")
            if values:
                outer[name] = torch.cat(values, dim=1)
        if self.balances:
            outer["output_router_logits"] = False
        embeddings = torch.zeros((), dtype=self.dtype).expand(1, sum(lengths), self.width)
        ones = torch.ones(1, sum(lengths), dtype=torch.int64)

        def call(shell: nn.Module) -> None:
            shell(inputs_embeds=embeddings, attention_mask=ones, use_cache=False, **outer)

        found = record(self.shell, call, self.num_blocks, lengths)
        if len(lengths) > 1 and not all(map(has_mask, found)):
            raise InputError("a block", "gets no mask", "it cannot be packed; not supported")
        if self.balances:
            outer |= {"targets": torch.tensor([num_targets(sample) for sample in samples])}
        return as_context(found, {**outer, "lengths": lengths})
