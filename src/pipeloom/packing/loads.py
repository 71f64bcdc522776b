"""Loads: what every sample weighs when microbatches are balanced.

A packed document attends to itself alone, so a microbatch's work is the sum of its samples' (plus a constant that no
packing changes): attention costs the sum of squared lengths, never the square of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeloom.cost import CostModel
from pipeloom.cost.dealt import DealtCosts, laid_out
from pipeloom.errors import InputError
from pipeloom.limits import MAX_TASKS
from pipeloom.spec import Batch, Chunk, Layout, ModelSpec, ModuleSpec, Sample, Workload
from pipeloom.spec.batch import audio_tokens
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
        What the token budget counts.
    backbone, encoder : array, shape (num_samples,)
        Work in the last module, and in all modules before it: seconds, operations or any other unit, the same in both.
    instances : array, shape (num_samples,), optional
        Sequences in the modules whose instances are dealt to devices; None: none is dealt.
    num_devices : int
        To which they are dealt. A microbatch takes as long there as the device with most instances.
    """

    tokens: IntArray
    backbone: FloatArray
    encoder: FloatArray
    instances: IntArray | None = None
    num_devices: int = 1

    @property
    def rows(self) -> FloatArray:
        """What is to be even where all modules are: the backbone's work and all work, shape (2, num_samples)."""
        return np.stack([self.backbone, self.backbone + self.encoder])

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.tokens)


def budget_tokens(batch: Batch, model: ModelSpec) -> IntArray:
    """Tokens of every sample as the budget counts them: its sequence, or videos where the last module reads those."""
    backbone = model.modules[-1]
    if backbone.reads == "videos":
        counts = [sum(backbone.instance_lengths(sample)) for sample in batch.samples]
    else:
        counts = [sample.sequence_tokens for sample in batch.samples]
    return summable("tokens of the samples", counts, "tokens")


def token_loads(batch: Batch, model: ModelSpec, attention_tokens: int | None = None) -> Loads:
    """Loads where no costs are known: tokens, and attention by the square of each length.

    Parameters
    ----------
    batch : Batch
    model : ModelSpec
    attention_tokens : int or None
        Length of a sequence whose attention costs as much as everything else in a layer: about 6 times the hidden
        width, 12 times where attention is causal. None: attention costs nothing.
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
        """Seconds of sequences of these lengths."""
        squares = sum(n * n for n in lengths)
        return self.instance_s * len(lengths) + self.token_s * sum(lengths) + self.pair_s * squares


def marginal_cost(costs: CostModel, chunks: tuple[Chunk, ...], length: int, devices: int = 1) -> MarginalCost:
    """Read the three coefficients off a cost model, forward and backward, at sequences of about ``length``.

    Three differences of workloads: twice as many equal sequences; sequences that differ in their squares alone; and
    ones that differ in their number alone (three of 4, against one of 6 and three of 2). Where sequences are dealt to
    several devices, there are so many for each.
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
    """Loads in seconds, as a cost model reckons them for samples in large microbatches.

    The linear part is what matters to a balance: what a microbatch costs however small it is, every one pays.
    """
    costs, backbone = laid_out(costs, layout), np.zeros(len(batch.samples))
    encoder, instances, num_devices = np.zeros(len(batch.samples)), np.zeros(len(batch.samples), np.int64), 1
    for module in model.modules:
        lengths = [module.instance_lengths(sample) for sample in batch.samples]
        every = [n for each in lengths for n in each if n > 0]
        if not every:
            continue
        chunks = tuple(layout.chunks[i] for i in layout.chunks_of(module.name))
        if layout.module(module.name).on_ranks == "replicated":
            # Whole on every rank, and a sample passes one of them.
            chunks = chunks[:1]
        devices = costs.num_ranks if isinstance(costs, DealtCosts) and module.name in costs.names else 1
        if devices > 1:
            num_devices = devices
            instances += np.array([len(each) for each in lengths], np.int64)
        marginal = marginal_cost(costs, chunks, round(sum(every) / len(every)), devices)
        target = backbone if module is model.modules[-1] else encoder
        target += np.array([marginal.of(each) for each in lengths])
    dealt = instances if num_devices > 1 else None
    return Loads(budget_tokens(batch, model), backbone, encoder, dealt, num_devices)


def split_oversized(batch: Batch, model: ModelSpec, token_budget: int) -> Batch:
    """Cut samples that exceed the budget into pieces that do not; nothing is lost.

    The pieces of sample ``a`` are ``a#0``, ``a#1`` and so on: its images in order, each whole, its recordings
    likewise, then its text. They become samples of their own, so a token of one piece does not see another piece.

    Raises
    ------
    InputError
        When an image or a recording alone exceeds the budget, or the samples are videos.
    """
    tokens = budget_tokens(batch, model).tolist()
    if max(tokens) <= token_budget:
        return batch
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
            samples += split_sample(sample, token_budget)
    return Batch(tuple(samples), batch.iteration)


def split_sample(sample: Sample, token_budget: int) -> list[Sample]:
    """Cut one sample into pieces of at most the budget; see `split_oversized`."""
    check_work(f"sample {sample.id!r}", sample.text_tokens // token_budget, "pieces", MAX_TASKS, "raise the budget")
    # Images and recordings of a piece by number, and its text.
    pieces: list[tuple[tuple[list[int], list[int]], int]] = [(([], []), 0)]
    room = token_budget
    wholes = [(0, "image_tokens", k, tokens) for k, tokens in enumerate(sample.image_tokens)]
    wholes += [(1, "audio_seconds", k, tokens) for k, tokens in enumerate(audio_tokens(sample))]
    for which, field, k, tokens in wholes:
        if tokens > token_budget:
            raise InputError(
                f"sample {sample.id!r}.{field}[{k}]",
                f"{tokens} exceed the token budget of {token_budget}",
                f"raise it: {('an image', 'a recording')[which]} is not divided",
            )
        if tokens > room:
            pieces.append((([], []), 0))
            room = token_budget
        pieces[-1][0][which].append(k)
        room -= tokens
    left = sample.text_tokens
    while left:
        here = min(left, room)
        pieces[-1] = (pieces[-1][0], here)
        left -= here
        if left:
            pieces.append((([], []), 0))
            room = token_budget
    out = []
    for number, ((images, recordings), text) in enumerate(pieces):
        patches = None if sample.image_patches is None else tuple(sample.image_patches[k] for k in images)
        image_tokens = tuple(sample.image_tokens[k] for k in images)
        audio = tuple(sample.audio_seconds[k] for k in recordings)
        out.append(Sample(f"{sample.id}#{number}", text, image_tokens, patches, audio_seconds=audio))
    return out


def module_lengths(batch: Batch, samples: tuple[int, ...], module: ModuleSpec) -> tuple[int, ...]:
    """Lengths of all sequences that some samples send through a module."""
    return tuple(n for i in samples for n in module.instance_lengths(batch.samples[i]))
