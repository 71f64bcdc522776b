"""Predict the absolute figures of the papers whose systems Pipeloom repeats. No constant is fitted to them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from pipeloom.bounds import Count, Factor, Number
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InfeasibleError, InputError
from pipeloom.iteration import (
    Draw,
    EmulatedStep,
    Points,
    batch_of,
    even_pipeline,
    fastest_step,
    pack_microbatches,
    sweep,
)
from pipeloom.iteration.emulation import DEFAULT_STRATEGIES, image_sizes, instance_tokens, model_flops
from pipeloom.iteration.microbatches import Microbatches
from pipeloom.layout import chain_of_stages, encoder_first, single_rank
from pipeloom.packing import PackingSpec, Policy, group, token_loads
from pipeloom.search import first_in_first_out, interleaved_as_megatron, one_f_one_b
from pipeloom.search.schedules import Order
from pipeloom.spec import Batch, ChunkStrategy, Layout, Sample
from pipeloom.spec.catalog import load_architecture, load_trainer
from pipeloom.spec.datasets import CONTEXT_TOKENS, cut, draw_samples, load_mixture
from pipeloom.spec.media_tokens import fitted_images
from pipeloom.spec.parallelism import Degrees
from pipeloom.validation.runs import DATA

IMAGE_PATCHES = 2704
"""Patches of an image of 728 pixels (DIP section 7.1)."""
ATTENTION_TOKENS = 12 * 5120
"""Length at which causal attention of PipeTune's 13B model has as many operations as the rest of a layer."""
SEEDS = 4
"""Iterations of samples that a mean is taken over."""
_ORDERS: dict[str, Order | None] = {
    "searched": None,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_as_megatron,
    "fifo": first_in_first_out,
}
_RECOMPUTE: dict[str, tuple[ChunkStrategy | str, ...]] = {"fastest": DEFAULT_STRATEGIES, "all": ("recompute",)}


class PaperFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure of a paper, and how the paper made it. Tuples are ranges of what it leaves unstated."""

    id: str
    paper: str
    where: str
    what: str
    published: Factor
    """The paper's figure: seconds of an iteration, MFU, or a ratio of the times of degrees."""
    unit: Literal["s", "MFU", "ratio"] = "s"
    model: str
    cluster: str
    degrees: Degrees
    trainer: str
    layout: Literal["even", "chain", "first"] = "even"
    """Every module over all ranks, one chain of stages of equal parameters, or the encoders on the first rank."""
    order: Literal["searched", "1f1b", "interleaved", "fifo"] = "searched"
    """Schedule of the tasks. ``searched`` is the fastest of the emulator's orders, ``fifo`` first in, first out."""
    chunks: tuple[Count, ...] = (1,)
    recompute: tuple[Literal["fastest", "all"], ...] = ("fastest",)
    """``fastest`` is the fastest strategy that fits in memory, ``all`` recomputes everything."""
    microbatches: tuple[Count, ...] = ()
    """Microbatches of one replica."""
    petaflops: Factor | None = None
    """Operations of an iteration, which decide the number of microbatches."""
    images: tuple[Number, ...] = ()
    """Images of every microbatch, in place of ``data``."""
    data: tuple[str, ...] = ()
    together: Count | None = None
    """Images of a sub-microbatch if the layout is ``even``. None: by DIP's rule."""
    samples: Count | None = None
    contexts: Count = 1
    packing: Policy = "random"
    filled: tuple[bool, ...] = (False,)
    adaptive: bool = False
    """Samples of an iteration that is packed into the largest microbatches that fit, of at most as many contexts.
    ``filled`` ones are filled up with text. If ``adaptive``, the fastest size is taken."""
    unstated: str = ""
    """What the paper leaves unstated, in words."""
    reason: str = ""
    """Why the figure cannot be expressed."""


class PaperPrediction(NamedTuple):
    """The predicted range of a paper's figure."""

    figure: PaperFigure
    low: float = 0.0
    high: float = 0.0
    """Least and most over the ranges of what the paper leaves unstated. 0 if the figure cannot be expressed."""
    reason: str = ""
    """Why the figure cannot be expressed; empty if it can."""

    @property
    def error(self) -> float | None:
        """The nearest predicted value over the published one, less 1. 0 inside the range; None without prediction."""
        if self.reason:
            return None
        published = self.figure.published
        return min(max(published, self.low), self.high) / published - 1

    @property
    def row(self) -> dict[str, object]:
        """The prediction as a row of a table."""
        figure = self.figure
        named = {name: getattr(figure, name) for name in ("id", "paper", "where", "what", "unit", "published")}
        if self.reason:
            return named | {"reason": self.reason}
        found = {"predicted_low": self.low, "predicted_high": self.high, "error": self.error, "fitted": False}
        return named | found | {"unstated": figure.unstated}


@cache
def paper_figures() -> tuple[PaperFigure, ...]:
    """Read the papers' figures that come with Pipeloom."""
    setups = tomllib.loads((DATA / "papers.toml").read_text())["setups"]
    rows: list[dict[str, Any]] = [
        {**{name: value for name, value in setup.items() if name != "figures"}, **figure}
        for setup in setups
        for figure in setup["figures"]
    ]
    return tuple(msgspec.convert(row, PaperFigure) for row in rows)


def predict_figure(figure: PaperFigure) -> PaperPrediction:
    """Predict a paper's figure at the ends of what the paper leaves unstated."""
    if figure.reason:
        return PaperPrediction(figure, reason=figure.reason)
    values, problem = list[float](), "no microbatches are given"
    for point in _points(figure):
        try:
            values.append(_value(figure, *point))
        except (InfeasibleError, InputError) as error:
            problem = str(error)
    if not values:
        return PaperPrediction(figure, reason=problem)
    return PaperPrediction(figure, min(values), max(values))


def _points(figure: PaperFigure) -> Iterable[tuple[str, int, int | str, int | bool]]:
    """Return all combinations of recomputation, chunks, content, and number of microbatches or whether filled."""
    content: tuple[int | str, ...] = figure.images or figure.data
    amounts: tuple[int | bool, ...] = figure.filled if figure.samples else figure.microbatches or (0,)
    return product(figure.recompute, figure.chunks, content, amounts)


def _value(figure: PaperFigure, recompute: str, chunks: int, content: int | str, amount: int | bool) -> float:
    """Return the predicted figure for one choice of what the paper leaves unstated."""
    trainer = load_trainer(figure.trainer)
    if figure.unit == "ratio":
        return _behind_the_fastest(figure, str(content), amount)
    costs = EmulatedCosts(
        figure.model, figure.cluster, figure.degrees, _RECOMPUTE[recompute], split=False, trainer=trainer
    )
    if figure.samples:
        assert isinstance(content, str)
        return float(np.mean([_packed_s(figure, costs, content, bool(amount), seed) for seed in range(SEEDS)]))
    drawn = _microbatches(figure, costs, content, amount)
    replicas = [drawn[r :: figure.degrees.data] for r in range(figure.degrees.data)]
    tokens = instance_tokens(costs)
    # All replicas wait for the one with the most work.
    step = _step(figure, costs, max(replicas, key=lambda replica: sum(map(tokens, replica))), chunks)
    if figure.unit == "s":
        return step.iteration_s
    work = model_flops(costs, step.layout, pack_microbatches(costs.model_spec, step.layout, drawn))
    return work / (figure.degrees.num_devices * step.peak_flops_per_s * step.iteration_s)


def _step(figure: PaperFigure, costs: EmulatedCosts, microbatches: Microbatches, chunks: int = 1) -> EmulatedStep:
    """Emulate an iteration. Raise `InfeasibleError` if it does not fit in memory."""
    layout = _layout(figure, costs, microbatches, chunks)
    return fastest_step(costs, layout, microbatches, order=_ORDERS[figure.order])


def _layout(figure: PaperFigure, costs: EmulatedCosts, microbatches: Microbatches, chunks: int) -> Layout:
    model, ranks = costs.model_spec, figure.degrees.pipeline
    if figure.layout == "even":
        return even_pipeline(costs, microbatches, _sizes(figure) or image_sizes(costs, microbatches), {})
    if figure.layout == "first":
        return encoder_first(model, ranks, lambda _module, _layer: 1.0, even_layers=True)
    return chain_of_stages(model, ranks, chunks, lambda _module, layer: float(max(1, layer.num_parameters)))


def _sizes(figure: PaperFigure) -> dict[str, int] | None:
    return {"vision": figure.together} if figure.together else None


def _microbatches(figure: PaperFigure, costs: EmulatedCosts, content: int | str, count: int) -> Microbatches:
    """Return the microbatches of all replicas: with equally many images, or drawn from a data set."""

    def of(count: int) -> Microbatches:
        return _drawn(figure.model, content, count) if isinstance(content, str) else _alike(costs, content, count)

    if figure.petaflops is None:
        return of(count * (figure.degrees.data if figure.degrees.pipeline > 1 else 1))
    target, count = figure.petaflops * 1e15, 1
    single = single_rank(costs.model_spec, {})
    while True:
        count *= 2
        drawn = of(count)
        flops = [
            model_flops(costs, single, pack_microbatches(costs.model_spec, single, [microbatch]))
            for microbatch in drawn
        ]
        total = np.cumsum(flops)
        if total[-1] >= target:
            return drawn[: int(np.argmin(abs(total - target))) + 1]


@lru_cache(maxsize=8)
def _drawn(model: str, data: str, count: int) -> Microbatches:
    return Draw(count, data).of(load_architecture(model))


def _alike(costs: EmulatedCosts, images: int, count: int) -> Microbatches:
    """Return microbatches of `CONTEXT_TOKENS` tokens with equally many images."""
    one = Sample("0", CONTEXT_TOKENS)
    if images:
        bare = Sample("0", 0, (1,) * images, (IMAGE_PATCHES,) * images)
        (fitted,) = fitted_images(costs.architecture, [bare])
        one = msgspec.structs.replace(fitted, text_tokens=CONTEXT_TOKENS - sum(fitted.image_tokens))
    return [[one]] * count


def _packed_s(figure: PaperFigure, costs: EmulatedCosts, data: str, filled: bool, seed: int) -> float:
    """Return the seconds of samples in the largest microbatches that fit, or if ``adaptive`` in the best ones.

    Raise `InfeasibleError` if not even microbatches of one context fit.
    """
    assert figure.samples is not None
    context = load_mixture(data)[0].context_tokens
    drawn = [cut(sample, context, len(sample.image_tokens)) for sample in draw_samples(data, figure.samples, seed)]
    batch = batch_of([drawn])
    seconds, tried = list[float](), list[Microbatches]()
    problem = InfeasibleError("no microbatch fits")
    for contexts in range(figure.contexts, 0, -1):
        packed = _packed(costs, batch, PackingSpec(contexts * context, figure.packing, seed=seed), filled)
        if packed in tried:
            continue
        tried.append(packed)
        try:
            seconds.append(_step(figure, costs, packed).iteration_s)
        except InfeasibleError as error:
            problem = error
        if seconds and not figure.adaptive:
            break
    if not seconds:
        raise problem
    return min(seconds)


def _packed(costs: EmulatedCosts, batch: Batch, packing: PackingSpec, filled: bool) -> Microbatches:
    """Pack samples into microbatches. Filled ones have a sequence of text in place of what they lack."""
    loads = token_loads(batch, costs.model_spec, ATTENTION_TOKENS)
    found: list[list[Sample]] = []
    for number, members in enumerate(group(loads, packing)):
        found.append([batch.samples[i] for i in members])
        lacking = packing.token_budget - int(loads.tokens[list(members)].sum())
        if filled and lacking:
            found[-1].append(Sample(f"filling of {number}", lacking))
    return found


def _behind_the_fastest(figure: PaperFigure, data: str, count: int) -> float:
    """Return the time of the figure's degrees over that of the fastest degrees of as many devices."""
    points = Points(figure.degrees.num_devices)
    entries = sweep(
        figure.model,
        figure.cluster,
        batch=_drawn(figure.model, data, count * figure.degrees.data),
        points=points,
        sub_microbatch=_sizes(figure),
        trainer=load_trainer(figure.trainer),
    )
    mine = next(entry for entry in entries if entry.degrees == figure.degrees)
    if mine.result is None:
        raise InfeasibleError(mine.problem)
    return mine.iteration_s / entries[0].iteration_s
