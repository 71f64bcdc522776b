"""A transformer that no library has: double blocks, a part with parameters between lists, skips, and single blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn


class Double(nn.Module):
    """Mixes two streams, and returns them in a dictionary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, image: Tensor, text: Tensor, *, clock: Tensor) -> dict[str, Tensor]:
        mean = torch.cat([image, text], 1).mean(1, keepdim=True)
        return {"text": text + self.one(mean * text), "image": image + self.two(torch.tanh(mean + image) * clock)}


class Single(nn.Module):
    """Takes the joined streams, and scales by a list of tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.only = nn.Linear(width, width)

    def forward(self, state: Tensor, scales: list[Tensor]) -> Tensor:
        return state + torch.relu(self.only(state)) * scales[0] + scales[1].cumsum(1)


class MadeUp(ModelMixin, ConfigMixin):
    """``reads_noise`` makes the layers after the blocks read the noisy latents, which only the first layer has.

    ``more`` is the part that embeds ``more_words``, an input that most samples lack.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 5,
        text_dim: int = 7,
        num_layers: int = 3,
        num_single_layers: int = 4,
        num_attention_heads: int = 2,
        attention_head_dim: int = 4,
        reads_noise: bool = False,
        more: str = "words",
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        self.enter = nn.Linear(in_channels, width)
        self.words = nn.Sequential(nn.Linear(text_dim, width), nn.Tanh())
        if more != "words":
            self.add_module(more, nn.Linear(text_dim, width))
        self.clock = nn.Linear(3, width)
        self.places = nn.Parameter(torch.randn(1, 1, width))
        self.gain = nn.Parameter(torch.randn(width))
        self.doubles = nn.ModuleList(Double(width) for _ in range(num_layers))
        self.bridge = nn.Linear(width, width)
        self.singles = nn.ModuleList(Single(width) for _ in range(num_single_layers))
        self.leave = nn.Linear(width, in_channels)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        more_words: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        image, text = self.enter(hidden_states) + self.places, self.words(encoder_hidden_states)
        if more_words is not None:
            text = torch.cat([text, self.get_submodule(self.config.more)(more_words)], 1)
        clock = self.clock(torch.stack([timestep, timestep.sin(), timestep.cos()], -1) / 1000)[:, None]
        kept = []
        for block in self.doubles:
            found = block(image, text, clock=clock)
            image, text = found["image"] * self.gain, found["text"]
            kept.append(image)
        state = torch.cat([self.bridge(text), image], 1)
        for block in self.singles:
            state = block(state, [clock, state.mean(1, keepdim=True)])
            if kept:
                # Long skips, the last output first.
                skip = kept.pop()
                state = torch.cat([state[:, : text.shape[1]], state[:, text.shape[1] :] + skip], 1)
        out = self.leave(state[:, text.shape[1] :] + self.places)
        if self.config.reads_noise:
            out = out + hidden_states**2
        return (out,) if not return_dict else {"sample": out}


def samples() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "id": str(number),
            "latents": torch.randn(tokens, 5, generator=draw),
            "prompt_embeds": torch.randn(words, 7, generator=draw),
        }
        for number, (tokens, words) in enumerate([(4, 2), (3, 5), (4, 2), (1, 1), (6, 3)])
    ]
