"""Data sets as samplers: sample sizes drawn from distributions that are fitted to published statistics.

A sampler reads no data. It draws lengths, image counts and durations. Every entry of the zoo says which of its numbers
are published and which are assumed. Samples are prepared as in the papers: images of 2704 patches merged to 169 tokens,
packing to 8192 tokens with at most 48 images, videos of at most 16 s grouped by length and aspect (DIP §7.1); 576
tokens per image (PipeTune §5).
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np

from pipeloom.bounds import Count, Magnitude, Number, Share
from pipeloom.conversion import check_fields, convert
from pipeloom.errors import InputError, check_seed
from pipeloom.limits import MAX_IN_MICROBATCH, MAX_VALUE
from pipeloom.spec.batch import Sample, audio_tokens
from pipeloom.spec.catalog import read
from pipeloom.totals import check_work

CONTEXT_TOKENS = 8192
"""Most tokens of a microbatch by default (DIP §7.1)."""
CLIP_SECONDS = 16.0
"""Most seconds of the videos of a microbatch by default (DIP §7.1)."""
_SLICES = 4000
MOST_CLIPS = 8
"""Most videos of a microbatch."""


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log-normal distribution with a median and a mean, rounded and clipped to [minimum, maximum].

    The clipped distribution keeps the median. Its sigma is chosen so that it also keeps the mean, as far as the bounds
    allow. If ``mean`` equals ``median``, it is a constant.
    """

    median: Magnitude
    mean: Magnitude
    minimum: Magnitude = 0.0
    maximum: Magnitude = 1e9
    whole: bool = True

    def __post_init__(self) -> None:
        for name in ("median", "mean"):
            if not self.minimum <= getattr(self, name) <= self.maximum or getattr(self, name) <= 0:
                raise InputError(f"spread.{name}", f"{getattr(self, name)} is not within its bounds and positive")

    def _at(self, sigma: float, z: np.ndarray) -> np.ndarray:
        value = self.median * np.exp(sigma * z)
        value = np.rint(value) if self.whole else value
        out: np.ndarray = np.clip(value, self.minimum, self.maximum)
        return out

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm for which the clipped mean is closest to ``mean``."""
        return _sigma(self)

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw ``count`` values."""
        return self._at(self.sigma, generator.standard_normal(count))


@cache
def _sigma(spread: Spread) -> float:
    if spread.mean <= spread.median:
        return 0.0
    z = _normal_quantiles()
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        if float(spread._at(middle, z).mean()) < spread.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@cache
def _normal_quantiles() -> np.ndarray:
    """Return standard normal quantiles at the midpoints of equally likely slices."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / _SLICES) for i in range(_SLICES)])


class DatasetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data set.

    ``images_share`` is the share of samples that have images. ``frames`` lists (height, width, share) of the videos.
    ``text_tokens`` is per sample.
    """

    name: str
    source: str
    fitted: Literal[True]
    """Always true: numbers are fitted to statistics, not read from the data."""
    text_tokens: Spread
    images: Spread | None = None
    images_share: Share = 1.0
    image_tokens: Count = 169
    image_patches: Count = 2704
    video_seconds: Spread | None = None
    frames: tuple[tuple[Count, Count, Magnitude], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, f"dataset {self.name!r}")
        if self.frames and not 0 < sum(share for *_, share in self.frames) <= MAX_VALUE:
            raise InputError(f"dataset {self.name!r}.frames", "have shares that sum to 0", "raise one")
        if self.video_seconds is not None and not self.frames:
            raise InputError(f"dataset {self.name!r}.frames", "is empty", "give (height, width, share) of the videos")

    def draw(self, generator: np.random.Generator, count: int, prefix: str = "") -> list[Sample]:
        """Draw ``count`` samples, named by ``prefix``, data set and number."""
        text = self.text_tokens.draw(generator, count)
        images = np.zeros(count)
        if self.images is not None:
            has = generator.random(count) < self.images_share
            images = np.where(has, self.images.draw(generator, count), 0)
            most = int(images.max(initial=0))
            check_work(f"dataset {self.name!r}.images", most, "images of a sample", MAX_IN_MICROBATCH, "lower maximum")
        seconds = None if self.video_seconds is None else self.video_seconds.draw(generator, count)
        shares = np.array([share for *_, share in self.frames])
        size = generator.choice(len(shares), count, p=shares / shares.sum()) if len(shares) else None
        out = []
        for i in range(count):
            n = int(images[i])
            video: dict[str, tuple[float, ...] | tuple[int, ...]] = {}
            if seconds is not None and size is not None:
                height, width, _ = self.frames[int(size[i])]
                video = {"video_seconds": (float(seconds[i]),), "video_height": (height,), "video_width": (width,)}
            out.append(
                convert(
                    {
                        "id": f"{prefix}{self.name}.{i}",
                        "text_tokens": int(text[i]),
                        "image_tokens": (self.image_tokens,) * n,
                        "image_patches": (self.image_patches,) * n,
                        **video,
                    },
                    Sample,
                    f"dataset {self.name!r}: sample {i}",
                )
            )
        return out


class MixtureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data sets with weights, and how their samples are prepared."""

    name: str
    source: str
    fitted: Literal[True]
    weights: dict[str, Magnitude]
    context_tokens: Count = CONTEXT_TOKENS
    max_images: Number = 48
    image_tokens: Count | None = None
    """Tokens per image, and below patches per image, if they differ from the data sets'."""
    image_patches: Count | None = None

    def __post_init__(self) -> None:
        if not 0 < sum(self.weights.values()) <= MAX_VALUE:
            raise InputError(f"mixture {self.name!r}.weights", "sum to 0", "give one above 0")


def load_mixture(name: str) -> tuple[MixtureSpec, tuple[tuple[DatasetSpec, float], ...]]:
    """Load a mixture with its data sets, by name or file. A single data set is a mixture of one."""
    content = read("datasets", name)
    if "weights" not in content:
        dataset = convert(content, DatasetSpec, name)
        return MixtureSpec(dataset.name, dataset.source, True, {name: 1.0}), ((dataset, 1.0),)
    mixture = convert(content, MixtureSpec, name)
    total = sum(mixture.weights.values())
    parts = []
    for key, weight in mixture.weights.items():
        dataset = convert(read("datasets", key), DatasetSpec, key)
        changes = {k: getattr(mixture, k) for k in ("image_tokens", "image_patches") if getattr(mixture, k)}
        parts.append((msgspec.structs.replace(dataset, **changes), weight / total))
    return mixture, tuple(parts)


def draw_samples(name: str, count: int, seed: int) -> list[Sample]:
    """Draw ``count`` samples of a data set or mixture, in random order."""
    check_seed("seed", seed)
    _, parts = load_mixture(name)
    generator = np.random.default_rng(seed)
    which = generator.choice(len(parts), count, p=[weight for _, weight in parts])
    drawn = [iter(spec.draw(generator, int((which == k).sum()))) for k, (spec, _) in enumerate(parts)]
    return [next(drawn[k]) for k in which.tolist()]


def pack_documents(
    samples: list[Sample], context_tokens: int = CONTEXT_TOKENS, max_images: int = 48
) -> list[list[Sample]]:
    """Pack samples greedily, in order, into sequences of at most ``context_tokens``. Longer samples are cut."""
    packs: list[list[Sample]] = [[]]
    used = images = 0
    for original in samples:
        sample = cut(original, context_tokens, max_images)
        if packs[-1] and (
            used + sample.sequence_tokens > context_tokens or images + len(sample.image_tokens) > max_images
        ):
            packs.append([])
            used = images = 0
        packs[-1].append(sample)
        used += sample.sequence_tokens
        images += len(sample.image_tokens)
    return [pack for pack in packs if pack]


def cut(sample: Sample, context_tokens: int, max_images: int) -> Sample:
    """Cut a sample to the context: drop images beyond it, then recordings, then the end of the text."""
    images, left = [], context_tokens
    for tokens in sample.image_tokens[:max_images]:
        if tokens > left:
            break
        images.append(tokens)
        left -= tokens
    audio = []
    for seconds, tokens in zip(sample.audio_seconds, audio_tokens(sample), strict=True):
        if tokens > left:
            break
        audio.append(seconds)
        left -= tokens
    whole = len(images) == len(sample.image_tokens) and len(audio) == len(sample.audio_seconds)
    if whole and sample.text_tokens <= left:
        return sample
    patches = None if sample.image_patches is None else sample.image_patches[: len(images)]
    return msgspec.structs.replace(
        sample,
        image_tokens=tuple(images),
        image_patches=patches,
        audio_seconds=tuple(audio),
        audio_tokens=None if sample.audio_tokens is None else sample.audio_tokens[: len(audio)],
        text_tokens=min(sample.text_tokens, left),
    )


def group_clips(samples: list[Sample], max_seconds: float = CLIP_SECONDS) -> list[list[Sample]]:
    """Group samples with clips of the same sizes and similar length, in the order of the first sample of each group.

    All clips of a group have at most ``max_seconds``, to which longer clips are cut. A group has at most `MOST_CLIPS`,
    unless one sample has more. Raise `InputError` for a sample without clips.
    """
    numbered = []
    for i, sample in enumerate(samples):
        if not sample.video_seconds:
            raise InputError(
                f"sample {sample.id!r}", "has no video, but the model reads videos", "give its video_seconds or omit it"
            )
        seconds = tuple(min(each, max_seconds) for each in sample.video_seconds)
        numbered.append((i, msgspec.structs.replace(sample, video_seconds=seconds)))
    numbered.sort(key=lambda item: (_clip_sizes(item[1]), sum(item[1].video_seconds)))
    groups: list[list[tuple[int, Sample]]] = []
    for item in numbered:
        group = groups[-1] if groups else []
        before, clips = [clip for _, sample in group for clip in sample.video_seconds], item[1].video_seconds
        same = group and _clip_sizes(group[0][1]) == _clip_sizes(item[1])
        if same and len(before) + len(clips) <= MOST_CLIPS and sum(before) + sum(clips) <= max_seconds:
            group.append(item)
        else:
            groups.append([item])
    groups.sort(key=lambda group: min(i for i, _ in group))
    return [[sample for _, sample in group] for group in groups]


def clips_of_iterations(
    samples: list[Sample], num_microbatches: int, max_seconds: float = CLIP_SECONDS
) -> list[list[list[Sample]]]:
    """Divide clips into iterations of ``num_microbatches`` groups each. The last iteration may have fewer.

    A loader groups the clips of one iteration of one pipeline replica: the fewest next clips that make this many
    groups. The papers do not say how far their loaders look ahead. ``max_seconds`` and errors are those of
    `group_clips`.
    """
    out: list[list[list[Sample]]] = []
    begin = 0
    while begin < len(samples):
        end, groups = begin, list[list[Sample]]()
        while len(groups) < num_microbatches and end < len(samples):
            # A sample with one clip adds at most one group.
            end = min(end + num_microbatches - len(groups), len(samples))
            groups = group_clips(samples[begin:end], max_seconds)
        while len(groups) > num_microbatches:
            # A sample with several clips may divide a group of others, and so add two.
            end -= 1
            groups = group_clips(samples[begin:end], max_seconds)
        out.append(groups)
        begin = end
    return out


def own_clips_of_iterations(samples: list[Sample], num_microbatches: int) -> list[list[list[Sample]]]:
    """Divide a user's own clips, whole, into iterations. Parameters and errors are those of `clips_of_iterations`.

    A group has up to `CLIP_SECONDS`, or the seconds of the longest sample.
    """
    longest = max([CLIP_SECONDS, *(sum(sample.video_seconds) for sample in samples)])
    return clips_of_iterations(samples, num_microbatches, longest)


def _clip_sizes(sample: Sample) -> list[tuple[int, int]]:
    """Return the distinct heights and widths of a sample's clips."""
    return sorted(set(zip(sample.video_height, sample.video_width, strict=False)))
