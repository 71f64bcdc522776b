"""A text encoder, and a diffusion transformer that turns noise into the video that the text speaks of.

Trained as a rectified flow: between the video at time 0 and noise at time 1 every clip is shown at one time on the
straight way, and the model says what the video was; that, and what it is shown, give the direction of the way.
Captions, and videos, of a microbatch lie one after the other, without padding.
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
    """What one microbatch consists of."""

    @property
    def samples(self) -> Sequence[Clip]:
        """The clips."""

    @property
    def instances(self) -> Sequence[tuple[int, int]]:
        """Those that go through the module together: index into samples, and 0."""


class Block(nn.Module):
    """A pre-norm transformer block within each sequence; ``mask`` says which tokens are of one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.widen = nn.Linear(DIM, 4 * DIM)
        self.narrow = nn.Linear(4 * DIM, DIM)

    def transform(self, x: Tensor, mask: Tensor, change: Sequence[Tensor]) -> Tensor:
        """Apply attention and perceptron, each on a scaled and shifted input: ``change`` has two of each."""
        heads = self.qkv(self.attention_norm(x) * (1 + change[0]) + change[1])
        query, key, value = heads.view(len(x), 3, HEADS, DIM // HEADS).permute(1, 2, 0, 3).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.mix(mixed.transpose(0, 1).flatten(1))
        wide = self.widen(self.mlp_norm(x) * (1 + change[2]) + change[3])
        out: Tensor = x + self.narrow(functional.gelu(wide))
        return out


class Words(nn.Module):
    """Layer 0 of text: words and their places."""

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
    """The last layer of text: one vector for each caption, the sum of those words that matter."""

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
    """Layer 0 of video: noisy patches with their places, and to each what its caption says."""

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
    """A middle layer of video: how far the video is on its way to noise scales and shifts what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Linear(DIM, 4 * DIM)
        nn.init.zeros_(self.change.weight)

    def forward(self, x: Tensor, *, mask: Tensor, owner: Tensor, time: Tensor) -> Tensor:
        """Take and return ``(patches, DIM)``."""
        return self.transform(x, mask, self.change(time)[owner].chunk(4, dim=1))


class Pixels(nn.Module):
    """The last layer of video: what the video was before there was noise."""

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
    """All layers of the text encoder."""
    return _build(seed, 0, [Words, *[TextBlock] * TEXT_BLOCKS, Pool])


def video_layers(seed: int) -> list[nn.Module]:
    """All layers of the diffusion transformer."""
    return _build(seed, 1, [Patches, *[VideoBlock] * VIDEO_BLOCKS, Pixels])


def _build(seed: int, module: int, kinds: Sequence[Callable[[], nn.Module]]) -> list[nn.Module]:
    """Build layers, each from a seed of its own."""
    layers = []
    with torch.random.fork_rng(devices=[]):
        for index, kind in enumerate(kinds):
            torch.manual_seed((seed * 2 + module) * 1000 + index)
            layers.append(kind())
    return layers


def clips_of(part: Part) -> list[Clip]:
    """The clips that go through a module together."""
    return [part.samples[sample] for sample, _ in part.instances]


def text_inputs(part: Part) -> tuple[Tensor, Tensor]:
    """Words of all captions, and their places."""
    captions = [clip.caption for clip in clips_of(part)]
    ids = torch.tensor([word for caption in captions for word in caption])
    return ids, torch.cat([torch.arange(len(caption)) for caption in captions])


def text_context(part: Part) -> dict[str, Tensor]:
    """Which words are of one caption."""
    return _owners([len(clip.caption) for clip in clips_of(part)])


def video_inputs(part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Patches of all videos, each on its way to noise, and their places."""
    noisy = []
    for clip in clips_of(part):
        time, noise = noise_of(clip)
        noisy.append((1 - time) * data.video(clip) + time * noise)
    return torch.cat(noisy).to(dtype), places_of([clip.num_tokens for clip in clips_of(part)])


def video_context(part: Part, dtype: torch.dtype) -> dict[str, Tensor]:
    """Which patches are of one video, and how far each video is on its way."""
    clips = clips_of(part)
    times = torch.tensor([noise_of(clip)[0] for clip in clips])
    return _owners([clip.num_tokens for clip in clips]) | {"time": waves(times).to(dtype)}


def places_of(sizes: Sequence[int]) -> Tensor:
    """Place of every patch in its video."""
    return torch.cat([torch.arange(size) for size in sizes])


def waves(times: Tensor) -> Tensor:
    """Times between 0 and 1 as ``(times, DIM)`` sines and cosines."""
    angles = times[:, None] * torch.exp(torch.linspace(0, 5, DIM // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def noise_of(clip: Clip) -> tuple[float, Tensor]:
    """Time and noise of a clip: the same whoever asks, on whatever rank."""
    generator = torch.Generator().manual_seed(clip.seed)
    # Near the video there is little to learn.
    time = float(torch.sigmoid(1.0 + torch.randn((), generator=generator, dtype=torch.float32)))
    return time, torch.randn(clip.num_tokens, data.PIXELS, generator=generator, dtype=torch.float32)


def loss(output: Tensor, part: Part) -> Tensor:
    """Sum over all patches of the mean squared error of what a patch was.

    The error of the direction would be this over the time squared: it would count the times near the video most, at
    which nothing has to be learnt of the caption.
    """
    wanted = torch.cat([data.video(clip) for clip in clips_of(part)]).to(output)
    return (output - wanted).square().mean(dim=1).sum()


def num_targets(clip: Clip) -> int:
    """How many patches of a clip count in the loss."""
    return clip.num_tokens


def _owners(lengths: Sequence[int]) -> dict[str, Tensor]:
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {"owner": owner, "mask": owner[:, None] == owner}
