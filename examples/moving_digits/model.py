"""A text encoder, and a diffusion transformer that generates videos from noise and captions.

It is trained as a rectified flow: the input is a point on the straight line between the video at time 0 and noise at
time 1, and the model predicts the video. Prediction and input together give the velocity. The captions and the videos
of a microbatch are concatenated without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .data import Clip

DIM, HEADS, TEXT_BLOCKS, VIDEO_BLOCKS = 64, 4, 2, 6
MOST_WORDS = 16


class Part(Protocol):
    """One microbatch."""

    @property
    def samples(self) -> Sequence[Clip]:
        """The clips."""

    @property
    def instances(self) -> Sequence[tuple[int, int]]:
        """The clips that go through the module together, as pairs: index of the sample, and 0."""


class Block(nn.Module):
    """A pre-norm transformer block. ``mask`` is true for pairs of tokens of the same sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.widen = nn.Linear(DIM, 4 * DIM)
        self.narrow = nn.Linear(4 * DIM, DIM)

    def transform(self, x: Tensor, mask: Tensor, change: Sequence[Tensor]) -> Tensor:
        """Apply attention and MLP, each to a scaled and shifted input. ``change`` has the scales and shifts."""
        heads = self.qkv(self.attention_norm(x) * (1 + change[0]) + change[1])
        query, key, value = heads.view(len(x), 3, HEADS, DIM // HEADS).permute(1, 2, 0, 3).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.mix(mixed.transpose(0, 1).flatten(1))
        wide = self.widen(self.mlp_norm(x) * (1 + change[2]) + change[3])
        out: Tensor = x + self.narrow(functional.gelu(wide))
        return out


class Words(nn.Module):
    """Layer 0 of text: embeds words and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(len(data.VOCABULARY), DIM)
        self.place = nn.Embedding(MOST_WORDS, DIM)

    def forward(self, ids: Tensor, places: Tensor, *, mask: Tensor, owner: Tensor) -> Tensor:
        """Return ``(words, DIM)``."""
        del mask, owner
        out: Tensor = self.word(ids) + self.place(places)
        return out


class TextBlock(Block):
    """A middle layer of text."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Parameter(torch.zeros(4, DIM))

    def forward(self, x: Tensor, *, mask: Tensor, owner: Tensor) -> Tensor:
        """Take and return ``(words, DIM)``."""
        del owner
        return self.transform(x, mask, self.change.unbind(0))


class Pool(nn.Module):
    """The last layer of text: one vector per caption, a gated sum over its words."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, DIM)
        self.project = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, mask: Tensor, owner: Tensor) -> Tensor:
        """Return ``(captions, DIM)``."""
        del mask
        chosen = torch.sigmoid(self.gate(x)) * x
        total = x.new_zeros(int(owner.max()) + 1, DIM).index_add(0, owner, chosen)
        out: Tensor = self.project(total)
        return out


class Patches(nn.Module):
    """Layer 0 of video: embeds noisy patches and their positions, and adds the caption's vector."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(data.PIXELS, DIM)
        self.place = nn.Embedding(data.PATCHES_PER_FRAME, DIM)
        self.frame = nn.Embedding(data.MAX_FRAMES, DIM)
        self.caption = nn.Linear(DIM, DIM)

    def forward(
        self, noisy: Tensor, places: Tensor, captions: Tensor, *, mask: Tensor, owner: Tensor, time: Tensor
    ) -> Tensor:
        """Return ``(patches, DIM)``."""
        del mask, time
        where = self.place(places % data.PATCHES_PER_FRAME) + self.frame(places // data.PATCHES_PER_FRAME)
        out: Tensor = self.project(noisy) + where + self.caption(captions)[owner]
        return out


class VideoBlock(Block):
    """A middle layer of video, whose inputs are scaled and shifted depending on the time."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Linear(DIM, 4 * DIM)
        nn.init.zeros_(self.change.weight)

    def forward(self, x: Tensor, *, mask: Tensor, owner: Tensor, time: Tensor) -> Tensor:
        """Take and return ``(patches, DIM)``."""
        return self.transform(x, mask, self.change(time)[owner].chunk(4, dim=1))


class Pixels(nn.Module):
    """The last layer of video: predicts the video without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.project = nn.Linear(DIM, data.PIXELS)

    def forward(self, x: Tensor, *, mask: Tensor, owner: Tensor, time: Tensor) -> Tensor:
        """Return ``(patches, PIXELS)``."""
        del mask, owner, time
        out: Tensor = self.project(self.norm(x))
        return out


def text_layers(seed: int) -> list[nn.Module]:
    """Build the layers of the text encoder."""
    return _build(seed, 0, [Words, *[TextBlock] * TEXT_BLOCKS, Pool])


def video_layers(seed: int) -> list[nn.Module]:
    """Build the layers of the diffusion transformer."""
    return _build(seed, 1, [Patches, *[VideoBlock] * VIDEO_BLOCKS, Pixels])


def _build(seed: int, module: int, kinds: Sequence[Callable[[], nn.Module]]) -> list[nn.Module]:
    """Build layers, each from its own seed."""
    layers = []
    with torch.random.fork_rng(devices=[]):
        for index, kind in enumerate(kinds):
            torch.manual_seed((seed * 2 + module) * 1000 + index)
            layers.append(kind())
    return layers


def clips_of(part: Part) -> list[Clip]:
    """Return the clips that go through a module together."""
    return [part.samples[sample] for sample, _ in part.instances]


def text_inputs(part: Part) -> tuple[Tensor, Tensor]:
    """Return the words of all captions and their positions."""
    captions = [clip.caption for clip in clips_of(part)]
    ids = torch.tensor([word for caption in captions for word in caption])
    return ids, torch.cat([torch.arange(len(caption)) for caption in captions])


def text_context(part: Part) -> dict[str, Tensor]:
    """Return the caption of each word, and the mask of words of the same caption."""
    return _owners([len(clip.caption) for clip in clips_of(part)])


def video_inputs(part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the noisy patches of all videos and their positions."""
    noisy = []
    for clip in clips_of(part):
        time, noise = noise_of(clip)
        noisy.append((1 - time) * data.video(clip) + time * noise)
    return torch.cat(noisy).to(dtype), places_of([clip.num_tokens for clip in clips_of(part)])


def video_context(part: Part, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the video of each patch, the mask of patches of the same video, and the time of each video."""
    clips = clips_of(part)
    times = torch.tensor([noise_of(clip)[0] for clip in clips])
    return _owners([clip.num_tokens for clip in clips]) | {"time": waves(times).to(dtype)}


def places_of(sizes: Sequence[int]) -> Tensor:
    """Return the position of each patch in its video."""
    return torch.cat([torch.arange(size) for size in sizes])


def waves(times: Tensor) -> Tensor:
    """Return sines and cosines, ``(times, DIM)``, of times between 0 and 1."""
    angles = times[:, None] * torch.exp(torch.linspace(0, 5, DIM // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def noise_of(clip: Clip) -> tuple[float, Tensor]:
    """Return time and noise of a clip. They are the same on all ranks."""
    generator = torch.Generator().manual_seed(clip.seed)
    # Favors large times, because there is little to learn near time 0.
    time = float(torch.sigmoid(1.0 + torch.randn((), generator=generator, dtype=torch.float32)))
    return time, torch.randn(clip.num_tokens, data.PIXELS, generator=generator, dtype=torch.float32)


def loss(output: Tensor, part: Part) -> Tensor:
    """Return the mean squared error of the predicted patches, summed over patches.

    The error of the velocity would be this divided by the squared time. It would have the largest weight near time 0,
    where the prediction hardly depends on the caption.
    """
    wanted = torch.cat([data.video(clip) for clip in clips_of(part)]).to(output)
    return (output - wanted).square().mean(dim=1).sum()


def num_targets(clip: Clip) -> int:
    """Return the number of patches of a clip, all of which count in the loss."""
    return clip.num_tokens


def _owners(lengths: Sequence[int]) -> dict[str, Tensor]:
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {"owner": owner, "mask": owner[:, None] == owner}
