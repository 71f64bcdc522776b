"""Check whether samples have as many tokens per image and recording as a model makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from pipeloom.errors import InputError
from pipeloom.spec.architecture import Architecture, ModuleArchitecture
from pipeloom.spec.batch import AUDIO_FRAMES_PER_SECOND, Sample, audio_frames, audio_tokens

_SLACK = 0.1
"""Tolerated relative difference of tokens. Some processors add tokens to an image, such as line ends."""


def encoder_of(architecture: Architecture, reads: Literal["images", "audio"]) -> ModuleArchitecture | None:
    """Return the encoder of a model with its adapter; None if no module reads images (or recordings) and text."""
    if all(module.reads != "sequence" for module in architecture.modules):
        return None
    found = next((module for module in architecture.modules if module.reads == reads), None)
    if found is None:
        return None
    # The adapter of a frozen encoder may be a separate module.
    behind = [each.layers for each in architecture.modules if found.name in each.after and each.reads == reads]
    return msgspec.structs.replace(found, layers=sum(behind, found.layers))


def fitted_images(architecture: Architecture, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with the images that a model makes of them.

    Their tokens follow from their patches. If no patches are given, patches follow from tokens. If the model takes
    images of one size only, each image has this size, or is as many tiles of it as it has patches for. Lengths that a
    sample declares for the encoder stay.
    """
    module = encoder_of(architecture, "images")
    if module is None:
        return list(samples)

    def fitted(sample: Sample) -> Sample:
        if module.fixed_rows is not None:
            patches = tuple(max(1, count) * module.fixed_rows for count in _num_tiles(module, sample))
        elif sample.image_patches is None:
            patches = tuple(tokens * module.joined for tokens in sample.image_tokens)
        else:
            patches = sample.image_patches
        tokens = tuple(map(module.outputs, patches))
        return msgspec.structs.replace(sample, image_tokens=tokens, image_patches=patches)

    return _in_tiles(module, _with_images(module, samples, fitted))


def _with_images(
    module: ModuleArchitecture, samples: Sequence[Sample], change: Callable[[Sample], Sample]
) -> list[Sample]:
    """Change the samples that have images, unless they declare their lengths for the encoder."""
    return [change(each) if each.image_tokens and not _declares(module, each) else each for each in samples]


def _declares(module: ModuleArchitecture, sample: Sample) -> bool:
    return sample.lengths is not msgspec.UNSET and module.name in sample.lengths


def _num_tiles(module: ModuleArchitecture, sample: Sample) -> list[int]:
    """Return the number of tiles of each image of a sample; 0 if its patches (or else tokens) are no whole tiles."""
    assert module.fixed_rows is not None
    counts, tile = sample.image_patches, module.fixed_rows
    if counts is None:
        counts, tile = sample.image_tokens, module.outputs(tile)
    return [0 if count % tile else count // tile for count in counts]


def _in_tiles(module: ModuleArchitecture, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples whose images are their tiles, if a model takes images of one size: each is a sequence."""
    rows = module.fixed_rows
    if rows is None:
        return list(samples)

    def cut(sample: Sample) -> Sample:
        tiles = [max(1, count) for count in _num_tiles(module, sample)]
        tokens = tuple(itertools.chain.from_iterable(map(_shares, sample.image_tokens, tiles)))
        return msgspec.structs.replace(sample, image_tokens=tokens, image_patches=(rows,) * len(tokens))

    return _with_images(module, samples, cut)


def _shares(tokens: int, count: int) -> Iterator[int]:
    """Yield the tokens of each of ``count`` parts of an image or a recording, at least one."""
    return (max(1, tokens * (place + 1) // count - tokens * place // count) for place in range(count))


def as_model_makes(architecture: Architecture, samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Return a user's samples with images and recordings as the model makes them, and a message for each difference.

    Tokens that differ by less than a tenth stay: some processors add tokens to an image, such as line ends.
    """
    notes = list(disagreements(architecture, samples))
    module = encoder_of(architecture, "images")
    if any(note.startswith("images") for note in notes):
        samples = fitted_images(architecture, samples)
    elif module is not None:
        samples = _in_tiles(module, samples)
    return fitted_recordings(architecture, samples), notes


def fitted_recordings(architecture: Architecture, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with the tokens that a model makes of its recordings, unless they state nearly the same number.

    If the encoder takes windows of one length only, it pads recordings, and each window is a recording of its own.
    Some models drop the tokens of what was padded, so stated tokens may be as few as those of the recording itself.
    """
    module = encoder_of(architecture, "audio")
    if module is None:
        return list(samples)
    out = []
    for sample in samples:
        frames = audio_frames(sample)
        if not frames:
            out.append(sample)
            continue
        padded = _padded(module, sample)
        seconds, tokens = sample.audio_seconds, sample.audio_tokens
        if tokens is None or any(_compared(module.joined, frames, sum(tokens), padded)):
            tokens = tuple(map(module.outputs, padded))
        if module.fixed_rows is not None and not _declares(module, sample):
            windows = [count // module.fixed_rows for count in padded]
            tokens = tuple(itertools.chain.from_iterable(map(_shares, tokens, windows)))
            seconds = (module.fixed_rows / AUDIO_FRAMES_PER_SECOND,) * len(tokens)
        out.append(msgspec.structs.replace(sample, audio_seconds=seconds, audio_tokens=tokens))
    return out


def _padded(module: ModuleArchitecture, sample: Sample) -> tuple[int, ...]:
    """Return the frames that an encoder runs of each recording: whole windows, if it takes no others."""
    frames, window = audio_frames(sample), module.fixed_rows
    if window is None or _declares(module, sample):
        return frames
    return tuple(-(-count // window) * window for count in frames)


def check_lengths(architecture: Architecture, samples: Iterable[Sample]) -> None:
    """Raise `InputError` for a sample of a length at which a model's code was not read.

    Costs of a model that was read at one length alone do not show how they grow.
    """
    modules = [m for m in architecture.modules if m.fixed_rows is not None and m.reads in ("sequence", "text")]
    for module, sample in itertools.product(modules, samples if modules else ()):
        other = next((length for length in module.lengths(sample) if length != module.fixed_rows), None)
        if other is not None:
            raise InputError(
                f"sample {sample.id!r}",
                f"has {other} tokens, but {architecture.name} was read at {module.fixed_rows} alone",
                "return a list of batches of different lengths beside the model",
            )


def disagreements(architecture: Architecture, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a message for images or recordings of samples that differ from the model's, with what is planned."""
    tokens = sum(sum(sample.image_tokens) for sample in samples)
    patches = [count for sample in samples for count in sample.patches]
    module, name = encoder_of(architecture, "images"), architecture.name
    if module is not None and module.fixed_rows is not None:
        rows, made = module.fixed_rows, module.outputs(module.fixed_rows)
        odd = [
            (n, patches)
            for sample in samples
            for n, patches, tiles in zip(sample.image_tokens, sample.patches, _num_tiles(module, sample), strict=True)
            if not tiles or abs(n / (tiles * made) - 1) > _SLACK
        ]
        if odd:
            n, count = max(odd)
            yield (
                f"images of the data have, for example, {count} patches and {n} tokens, but {name} takes images of "
                f"{rows} patches, which are {made} tokens; they are planned with these"
            )
    elif module is not None and any(_compared(module.joined, patches, tokens)):
        stated = any(sample.image_patches for sample in samples)
        cause = "" if stated else " (image_patches is missing)"
        follow = "tokens follow from their patches" if stated else "patches follow from their tokens"
        yield (
            f"images of the data have {sum(patches) / tokens:.3g} patches a token{cause}, but {name} joins "
            f"{module.joined}; they are planned with the model's number: their {follow}"
        )
    # Tokens that are not stated follow from the frames.
    recorded = [sample for sample in samples if sample.audio_tokens is not None]
    tokens = sum(sum(audio_tokens(sample)) for sample in recorded)
    frames = [count for sample in recorded for count in audio_frames(sample)]
    module = encoder_of(architecture, "audio")
    if module is None:
        return
    padded = [count for sample in recorded for count in _padded(module, sample)]
    if any(_compared(module.joined, frames, tokens, padded)):
        yield (
            f"recordings of the data have {sum(frames) / tokens:.3g} frames a token, but {name} joins {module.joined}; "
            "they are planned with the model's number: their tokens follow from their frames"
        )


def missing_data(architecture: Architecture, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a message for each module that has no work in the samples of an iteration."""
    for module in architecture.modules:
        if not any(map(module.lengths, samples)):
            yield (
                f"no sample of the iteration has {module.reads}, so {module.name} does no work; "
                f"give --data with {module.reads}"
            )


def _compared(joined: int, rows: Sequence[int], tokens: int, padded: Sequence[int] | None = None) -> tuple[bool, bool]:
    """Return whether there are more, and whether there are fewer tokens than the model makes of its encoder's rows.

    ``padded`` has the rows with those that the encoder pads, whose tokens the model may keep or drop. None: the same.
    """
    if not tokens:
        return False, False
    least, most = (sum(-(-count // joined) for count in each) for each in (rows, padded or rows))
    return tokens / most > 1 + _SLACK, tokens / least < 1 - _SLACK
