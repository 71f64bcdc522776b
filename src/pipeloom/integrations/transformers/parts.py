"""Inputs of a language model for a part of a batch: those of its first layer, and the arguments of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.description import Family
from pipeloom.integrations.transformers.layers import has_mask, record
from pipeloom.integrations.transformers.packed import as_contexts
from pipeloom.integrations.transformers.samples import clean, num_targets
from pipeloom.integrations.transformers.whole import Tower, sample_call
from pipeloom.runtime.model.model import Part


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
            outer["targets"] = torch.tensor([num_targets(sample) for sample in samples])
        return as_contexts([(found, outer)])
