"""Loads: the work of every sample, used to balance microbatches.

A packed document attends only to itself. The work of a microbatch is therefore the sum over its samples and a constant
that no packing changes: attention costs the sum of squared lengths, not the square of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import UNSET
from msgspec.structs import replace

from pipeloom.cost import CostModel
from pipeloom.cost.encoder_dp import EncoderDpCosts, costs_under_layout
from pipeloom.errors import InputError
from pipeloom.limits import MAX_TASKS
from pipeloom.spec import Batch, Chunk, Layout, ModelSpec, ModuleSpec, Sample, Workload
from pipeloom.spec.batch import audio_tokens
from pipeloom.spec.model import declared_lengths
from pipeloom.totals import check_work, summable

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_PROBE_SEQUENCES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Sizes of every sample of a batch.

    Attributes
    ----------
    tokens : array, shape (num_samples,)
        Tokens that the token budget counts.
    backbone, encoder : array, shape (num_samples,)
        Work in the last module, and in all modules before it. Both have the same unit: seconds, operations or another.
    instances : array, shape (num_samples,), optional
        Sequences in the modules with encoder data parallelism. None: there are no such modules.
    num_devices : int
        Devices that share these sequences. A microbatch takes as long as the device with the most sequences.
    encoder_weight : float
        Number of ranks that share the backbone, divided by the number of ranks that share the encoders. The work of a
        rank with both is proportional to the backbone's load plus this multiple of the encoders' load.
    """

    tokens: IntArray
    backbone: FloatArray
    encoder: FloatArray
    instances: IntArray | None = None
    num_devices: int = 1
    encoder_weight: float = 1.0

    @property
    def rows(self) -> FloatArray:
        """The two loads to balance over all modules: the backbone's and the total, shape (2, num_samples)."""
        return np.stack([self.backbone, self.backbone + self.encoder])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.tokens)


def budget_tokens(batch: Batch, model: ModelSpec) -> IntArray:
    """Return the tokens of each sample that count.

    They are its `lengths` in the last module if it declares them, its videos if that module reads videos, and otherwise
    its sequence.
    """
    backbone = model.modules[-1]
    counts = [
        sum(backbone.instance_lengths(sample))
        if backbone.reads == "videos" or declared_lengths(backbone.name, sample) is not None
        else sample.sequence_tokens
        for sample in batch.samples
    ]
    return summable("tokens of the samples", counts, "tokens")


def token_loads(batch: Batch, model: ModelSpec, attention_tokens: int | None = None) -> Loads:
    """Return loads without known costs: tokens, plus attention by the square of each length.

    Parameters
    ----------
    attention_tokens : int or None
        Length of a sequence whose attention costs as much as everything else in a layer: about 6 times the hidden
        width, or 12 times if attention is causal. None: attention costs nothing.
    """
    backbone = [_weight(model.modules[-1].instance_lengths(sample), attention_tokens) for sample in batch.samples]
    encoder = [
        sum(_weight(module.instance_lengths(sample), attention_tokens) for module in model.modules[:-1])
        for sample in batch.samples
    ]
    return Loads(budget_tokens(batch, model), np.array(backbone, float), np.array(encoder, float))


def _weight(lengths: tuple[int, ...], attention_tokens: int | None) -> float:
    squares = sum(n * n for n in lengths) / attention_tokens if attention_tokens else 0.0
    return sum(lengths) + squares


@dataclass(frozen=True, slots=True)
class MarginalCost:
    """Seconds that one more sequence adds to a large microbatch: per sequence, token and squared token."""

    instance_s: float
    token_s: float
    pair_s: float

    def of(self, lengths: tuple[int, ...]) -> float:
        """Return the seconds that sequences of these lengths add."""
        squares = sum(n * n for n in lengths)
        return self.instance_s * len(lengths) + self.token_s * sum(lengths) + self.pair_s * squares


def marginal_cost(costs: CostModel, chunks: tuple[Chunk, ...], length: int, devices: int = 1) -> MarginalCost:
    """Derive the three coefficients from a cost model, forward and backward, at sequences of about ``length``.

    Three differences of workloads give them: twice as many equal sequences; sequences that differ only in the sum of
    squares; and sequences that differ only in number (three of length 4 against one of 6 and three of 2). With several
    devices, each device receives that many sequences.
    """
    unit = max(1, length // 4)

    def seconds(lengths: tuple[int, ...]) -> float:
        every = (costs.chunk_costs(chunk, Workload(lengths))[0] for chunk in chunks)
        return sum(cost.forward_s + cost.backward_s for cost in every)

    n = _PROBE_SEQUENCES * devices
    base = seconds((4 * unit,) * n)
    uneven = seconds((6 * unit, 2 * unit) * (n // 2))
    many = seconds(((6 * unit,) + (2 * unit,) * 3) * n)
    few = seconds((4 * unit,) * (3 * n))
    pair = max(0.0, (uneven - base) / (4 * unit * unit * n))
    instance = max(0.0, (many - few) / n)
    doubled = seconds((4 * unit,) * (2 * n))
    token = max(0.0, ((doubled - base) / n - instance - pair * 16 * unit * unit) / (4 * unit))
    return MarginalCost(instance, token, pair)


def cost_loads(batch: Batch, model: ModelSpec, layout: Layout, costs: CostModel) -> Loads:
    """Return the loads in seconds that a cost model estimates for samples in large microbatches.

    Only the linear part matters for balance: every microbatch pays the constant part, whatever its size.
    """
    costs, backbone = costs_under_layout(costs, layout), np.zeros(len(batch.samples))
    encoder, instances, num_devices = np.zeros(len(batch.samples)), np.zeros(len(batch.samples), np.int64), 1
    for module in model.modules:
        lengths = [module.instance_lengths(sample) for sample in batch.samples]
        every = [n for each in lengths for n in each if n > 0]
        if not every:
            continue
        chunks = tuple(layout.chunks[i] for i in layout.chunks_of(module.name))
        if layout.module(module.name).on_ranks == "replicated":
            # Each rank holds the whole module, and a sample passes through one rank.
            chunks = chunks[:1]
        devices = costs.num_ranks if isinstance(costs, EncoderDpCosts) and module.name in costs.names else 1
        if devices > 1:
            num_devices = devices
            instances += np.array([len(each) for each in lengths], np.int64)
        marginal = marginal_cost(costs, chunks, round(sum(every) / len(every)), devices)
        target = backbone if module is model.modules[-1] else encoder
        target += np.array([marginal.of(each) for each in lengths])
    shared = instances if num_devices > 1 else None
    last = model.modules[-1].name
    encoder_ranks = {chunk.rank for chunk in layout.chunks if chunk.module != last}
    weight = len({chunk.rank for chunk in layout.chunks if chunk.module == last}) / max(1, len(encoder_ranks))
    return Loads(budget_tokens(batch, model), backbone, encoder, shared, num_devices, weight)


def split_oversized(batch: Batch, model: ModelSpec, token_budget: int) -> Batch:
    """Split samples that exceed the budget into pieces that fit; no token is lost.

    The pieces of sample ``a`` are named ``a#0``, ``a#1`` and so on. They hold its images in order, each whole, then its
    recordings, each whole, then its text. The first piece holds all videos. Each piece is a separate sample, so its
    tokens do not see other pieces.

    Raises
    ------
    InputError
        If a single image or recording exceeds the budget, the last module reads videos, the sample has `lengths`, or a
        piece has the id of another sample.
    """
    tokens = budget_tokens(batch, model).tolist()
    if max(tokens) <= token_budget:
        return batch
    kept = {sample.id for sample, count in zip(batch.samples, tokens, strict=True) if count <= token_budget}
    samples: list[Sample] = []
    for i, (sample, count) in enumerate(zip(batch.samples, tokens, strict=True)):
        if count <= token_budget:
            samples.append(sample)
        elif model.modules[-1].reads == "videos":
            raise InputError(
                f"batch.samples[{i}] ({sample.id!r})",
                f"{count} tokens of videos cannot be split",
                f"raise the token budget of {token_budget}, or shorten the sample",
            )
        else:
            pieces = split_sample(sample, token_budget)
            taken = next((piece.id for piece in pieces if piece.id in kept), None)
            if taken is not None:
                raise InputError(
                    f"batch.samples[{i}] ({sample.id!r})",
                    f"is split, and its piece {taken!r} has the id of another sample",
                    "rename one of the two samples",
                )
            samples += pieces
    return Batch(tuple(samples), batch.iteration)


def split_sample(sample: Sample, token_budget: int) -> list[Sample]:
    """Split one sample into pieces of at most the budget; see `split_oversized`."""
    if sample.lengths is not UNSET and sample.lengths:
        raise InputError(
            f"sample {sample.id!r}.lengths",
            "are of whole sequences, which cannot be split",
            f"raise the token budget of {token_budget}, or shorten the sample",
        )
    check_work(f"sample {sample.id!r}", sample.text_tokens // token_budget, "pieces", MAX_TASKS, "raise the budget")
    # Positions of images and recordings of each piece, and its text tokens.
    pieces: list[tuple[tuple[list[int], list[int]], int]] = [(([], []), 0)]
    free = token_budget
    wholes = [(0, "image_tokens", k, tokens) for k, tokens in enumerate(sample.image_tokens)]
    wholes += [(1, "audio_seconds", k, tokens) for k, tokens in enumerate(audio_tokens(sample))]
    for which, field, k, tokens in wholes:
        if tokens > token_budget:
            raise InputError(
                f"sample {sample.id!r}.{field}[{k}]",
                f"{tokens} exceed the token budget of {token_budget}",
                f"raise it: {('an image', 'a recording')[which]} is not divided",
            )
        if tokens > free:
            pieces.append((([], []), 0))
            free = token_budget
        pieces[-1][0][which].append(k)
        free -= tokens
    left = sample.text_tokens
    while left:
        here = min(left, free)
        pieces[-1] = (pieces[-1][0], here)
        left -= here
        if left:
            pieces.append((([], []), 0))
            free = token_budget
    out = []
    for number, ((images, recordings), text) in enumerate(pieces):
        patches = None if sample.image_patches is None else tuple(sample.image_patches[k] for k in images)
        image_tokens = tuple(sample.image_tokens[k] for k in images)
        seconds = tuple(sample.audio_seconds[k] for k in recordings)
        stated = None if sample.audio_tokens is None else tuple(sample.audio_tokens[k] for k in recordings)
        piece = Sample(f"{sample.id}#{number}", text, image_tokens, patches, audio_seconds=seconds, audio_tokens=stated)
        out.append(piece)
    # Videos have no tokens in the sequence, so they stay together.
    videos = {name: getattr(sample, name) for name in ("video_seconds", "video_height", "video_width")}
    return [replace(out[0], **videos), *out[1:]]


def module_lengths(batch: Batch, samples: tuple[int, ...], module: ModuleSpec) -> tuple[int, ...]:
    """Return the lengths of all sequences that the given samples send through a module."""
    return tuple(n for i in samples for n in module.instance_lengths(batch.samples[i]))
