"""The library's own loss and gradients, computed sample by sample as in its training scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.integrations.diffusers.flow import NoiseSampler
from pipeloom.integrations.diffusers.samples import Reader, Sample


def library_gradients(
    transformer: Any, text_encoder: Any, reader: Reader, noising: NoiseSampler, batch: Sequence[Sample]
) -> tuple[float, dict[str, Tensor]]:
    """Return the library's loss in iteration 0, and its gradients by the library's names."""
    losses = []
    for sample in batch:
        item = reader.read(sample)
        noised = noising.of(item.latents, item.name, 0)
        target = reader.enter(noised.target)[None]
        (predicted,) = transformer(
            hidden_states=reader.enter(noised.noisy)[None].to(target.dtype),
            timestep=noised.time,
            encoder_hidden_states=_prompt(text_encoder, reader, sample).to(target.dtype),
            return_dict=False,
            **reader.family.arguments(item.video),
        )
        error = (noised.weight * (predicted - target) ** 2).reshape(1, -1)
        losses.append(error.mean(1).mean())
    return mean_gradients(losses, {"transformer": transformer, "text_encoder": text_encoder})


def mean_gradients(losses: Sequence[Tensor], parts: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return the mean of losses, and its gradients by folder and name. A part may be None."""
    loss = torch.stack(list(losses)).mean()
    torch.autograd.backward(loss)
    return float(loss.detach()), {
        f"{folder}.{name}": parameter.grad
        for folder, part in parts.items()
        if part is not None
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }


def _prompt(text_encoder: Any, reader: Reader, sample: Sample) -> Tensor:
    """Embed a prompt with all of its padding, as the family's pipeline does."""
    given = torch.as_tensor(sample[reader.prompt_key])
    if text_encoder is None:
        return given.reshape(1, -1, reader.text_width)
    ids = given.reshape(1, -1)
    if reader.family.attends_to_padding:
        found: Tensor = text_encoder(ids)[0]
        return found
    mask = torch.as_tensor(sample.get("attention_mask", torch.ones_like(ids))).reshape(1, -1)
    states = text_encoder(ids, mask).last_hidden_state
    count = int(mask.sum())
    rest = states.new_zeros(1, ids.shape[1] - count, states.shape[2])
    return torch.cat([states[:, :count], rest], dim=1)
