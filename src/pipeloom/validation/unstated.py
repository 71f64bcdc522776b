"""Complete a published run: what its source leaves out becomes an assumed value, with the ends of a stated range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.spec.architecture import LanguageHeadLayer, num_experts
from pipeloom.validation.express import has_encoder, virtual_stages
from pipeloom.validation.recipes import recipe_of, states_recompute
from pipeloom.validation.runs import PublishedRun
from pipeloom.validation.sizes import described, has_pattern, sizes_of

MOST_LAYERS = 10_000
"""Largest number of layers and stages for which a layout is made."""
MOST_SAMPLES = 8
"""Largest microbatch that is assumed: published runs of large models have at most this many samples."""


@dataclass(frozen=True)
class CompleteRun:
    """A run with assumed values in place of what its source leaves out."""

    run: PublishedRun
    others: tuple[PublishedRun, ...] = ()
    """The run with the other ends of the ranges, each value by itself."""
    notes: tuple[str, ...] = ()
    """What was assumed, and the range."""


def complete(published: PublishedRun) -> CompleteRun:
    """Return a run with assumed values in place of what its source leaves out."""
    run, notes = published, []
    others: list[PublishedRun] = []
    for rule in _RULES:
        for changed, rest, note in rule(run):
            others = [replace(other, **changed) for other in others] + [replace(run, **each) for each in rest]
            run = replace(run, **changed)
            notes.append(note)
    return CompleteRun(run, tuple(others), tuple(notes))


_Change = tuple[dict[str, Any], tuple[dict[str, Any], ...], str]
"""Assumed values, the other ends of their range, and a note."""


def _devices(run: PublishedRun) -> Iterator[_Change]:
    """Assume a number of devices if it is not stated, or the degrees or the published time contradict the stated one.

    If expert parallelism alone contradicts it, and utilization does not, the largest part of this degree that fits is
    assumed. Otherwise the range is from the least that the degrees need to one microbatch a replica; the middle of it,
    by ratio, is assumed.
    """
    one = (run.tp or 1) * (run.pp or 1) * (run.cp or 1)
    if not run.gpus:
        if run.dp:
            yield {"gpus": run.dp * one}, (), f"devices are those of the degrees: {run.dp * one}"
        return
    fits = run.gpus % one == 0 and (run.gpus // (run.pp or 1)) % (run.ep or 1) == 0
    if fits and (run.mfu or 0.0) <= 1:
        replicas = run.gpus // one
        if run.dp not in (None, replicas):
            note = f"dp {run.dp} contradicts {run.gpus} devices, which have {replicas} replicas; correct dp or gpus"
            yield {"dp": replicas}, (), note
        return
    expert = math.gcd(run.ep or 1, run.gpus // (run.pp or 1))
    if run.gpus % one == 0 and run.mfu and run.mfu <= 1 and expert > 1:
        # The published time is possible on these devices.
        yield {"ep": expert}, (), f"expert parallelism {run.ep} does not fit {run.gpus} devices, {expert} is assumed"
        return
    least = _least_replicas(run, one)
    batch = max(1, (run.gbs or 1) // (run.mbs or 1))
    doubled = (least << power for power in range(batch.bit_length()))
    counts = [n for n in doubled if batch % n == 0] or [least]
    assumed = min(counts, key=lambda n: abs(math.log(n * n / counts[0] / counts[-1])))
    others = {counts[0], counts[-1]} - {assumed}
    why = "MFU above 1 contradicts" if fits else "the degrees contradict"
    yield (
        {"gpus": assumed * one, "dp": assumed},
        tuple({"gpus": n * one, "dp": n} for n in sorted(others)),
        f"{why} {run.gpus} devices, {counts[0] * one} to {counts[-1] * one} are assumed",
    )


def _least_replicas(run: PublishedRun, one: int) -> int:
    """Return the least number of replicas whose devices hold all experts once."""
    inside, expert = one // (run.pp or 1), run.ep or 1
    return expert // math.gcd(expert, inside)


def _named(run: PublishedRun) -> Iterator[_Change]:
    """Take the sizes of a public model if the source states its name alone."""
    if not run.layers and not run.hidden and not run.arch:
        sizes = sizes_of(run.model)
        if sizes:
            yield sizes, (), f"sizes are those of the published {run.model}"


def _public(run: PublishedRun) -> Iterator[_Change]:
    """Take the layers of a public model that has no columns: a hybrid, or one that reads images."""
    model = described(run.model)
    if model is None or not (has_pattern(run.model) or not (run.layers or run.hidden or run.arch)):
        return
    last = model.modules[-1]
    head = last.layers[-1]
    assert isinstance(head, LanguageHeadLayer)
    columns: dict[str, Any] = {"arch": "", "layers": last.num_blocks, "hidden": head.hidden, "vocab": head.vocabulary}
    columns["experts"] = max(map(num_experts, last.layers)) or None
    yield columns, (), f"layers are those of {model.name} ({model.source.split(';')[0]})"


IMAGE_TOKENS = 256
"""Tokens of an image: 448 x 448 pixels in InternVL, Qwen2.5-VL and Qwen 3.5, 512 x 512 in C-RADIO; Gemma 4 has 280."""
IMAGE_SHARES = (1 / 4, 1 / 2, 3 / 4)
"""Share of a sample's tokens that its images make: assumed range and value."""


def _images(run: PublishedRun) -> Iterator[_Change]:
    """Assume a number of images in a sample, and their size."""
    model = described(run.model)
    if model is None or len(model.modules) == 1 or not run.seq_len:
        return
    patches = run.patches or IMAGE_TOKENS * model.modules[0].joined
    if run.images is not None:
        if not run.patches:
            yield {"patches": patches}, (), f"the size of an image is not stated, {IMAGE_TOKENS} tokens are assumed"
        return
    tokens = max(1, patches // model.modules[0].joined)
    low, middle, high = (max(1, int(run.seq_len * share) // tokens) for share in IMAGE_SHARES)
    note = f"images of a sample are not stated, {low} to {high} of {tokens} tokens are assumed"
    others = tuple({"images": n, "patches": patches} for n in sorted({low, high} - {middle}))
    yield {"images": middle, "patches": patches}, others, note


_T5_LAYERS = {512: 6, 768: 12, 1024: 24, 4096: 24}
"""Layers of encoder and decoder by width: T5 small, base and large (Raffel et al. 2020), and the 11B model of
Megatron-LM's functional tests."""
ENCODER_LENGTH = 512


def _encoder(run: PublishedRun) -> Iterator[_Change]:
    """Take the published number of layers and length of a T5 of this width."""
    layers = run.layers or _T5_LAYERS.get(run.hidden or 0)
    if has_encoder(run) and layers and not (run.layers and run.seq_len):
        note = f"{layers} layers each of encoder and decoder are assumed, and {ENCODER_LENGTH} tokens of the encoder"
        yield {"layers": layers, "seq_len": run.seq_len or ENCODER_LENGTH}, (), note


def _samples(run: PublishedRun) -> Iterator[_Change]:
    """Take one sample a microbatch, up to `MOST_SAMPLES`, if their number is not stated."""
    if run.mbs or not run.gbs or not run.gpus:
        return
    replicas = max(1, run.gpus // ((run.tp or 1) * (run.pp or 1) * (run.cp or 1)))
    most = math.gcd(max(1, run.gbs // replicas), MOST_SAMPLES)
    note = f"samples of a microbatch are not stated, 1 to {most} are assumed"
    yield {"mbs": 1}, ({"mbs": most},) if most > 1 else (), note


def _recipe(run: PublishedRun) -> Iterator[_Change]:
    """Take recomputation and expert parallelism of the run's recipe, if the source does not state them."""
    recipe = recipe_of(run)
    if recipe is not None and recipe.attention is not None:
        yield {"attention": recipe.attention}, (), f"attention is that of the recipe: {recipe.attention}"
    if recipe is not None and recipe.recompute is not None and not states_recompute(run):
        yield {"recompute": recipe.recompute}, (), f"recomputation is that of the recipe: {recipe.recompute}"
    if recipe is not None and recipe.expert is not None and recipe.expert != run.ep:
        yield {"ep": recipe.expert}, (), f"expert parallelism is that of the recipe: {recipe.expert}"
    for name, value in () if recipe is None else recipe.columns:
        if getattr(run, name) != value:
            yield {name: value}, (), f"{name} is that of the recipe: {value}"


def _recompute(run: PublishedRun) -> Iterator[_Change]:
    """Recompute nothing, or everything, if it is not stated."""
    if run.recompute == "unknown":
        note = "recomputation is not stated, none is assumed, up to all of it"
        yield {"recompute": "none"}, ({"recompute": "full"},), note


def _layers(run: PublishedRun) -> Iterator[_Change]:
    """Divide layers over stages that do not divide them evenly: as many on each as on the first, the rest on the last.

    Embedding and loss take the place of a layer where this makes the division even, which the arguments express.
    """
    stages = (run.pp or 1) * virtual_stages(run)
    if run.layout or not run.layers or -run.layers % stages in (0, 1, 2) or not stages <= run.layers <= MOST_LAYERS:
        return
    each = -(-run.layers // stages)
    counts = [min(each, max(0, run.layers - i * each)) for i in range(stages)]
    note = f"the stages of {run.layers} layers on {stages} are not described, {each} each and the rest last are assumed"
    yield {"layout": layout_of(counts, run.mtp or 0)}, (), note


def _balanced(run: PublishedRun) -> Iterator[_Change]:
    """Divide layers over stages by their operations, and those of the product with the vocabulary on the last.

    A layer counts 12 h^2 + 2 s h operations a token, all pairs of attention included, as in the experiments of
    vocabulary parallelism (Yeung et al. 2024).
    """
    stages = run.pp or 1
    if "by load" not in run.reason or run.layout or stages < 2 or not (run.layers and run.hidden and run.vocab):
        return
    if max(run.layers, stages) > MOST_LAYERS:
        return
    width = run.hidden
    inner = (3 if run.gated else 2) * (run.ffn or 4 * width)
    keys = (run.kv_heads or run.heads or 1) / (run.heads or 1)
    layer = width * (width * (2 + 2 * keys) + inner + 2 * (run.seq_len or 0))
    counts = balanced_layers(run.layers, stages, run.vocab * width / layer)
    note = f"layers are divided over stages by operations, {counts[0]} to {counts[-2]} and {counts[-1]} on the last"
    yield {"layout": layout_of(counts)}, (), note


def balanced_layers(layers: int, stages: int, loss: float) -> list[int]:
    """Return the layers of each stage if the last has a loss as long as ``loss`` layers.

    The last stage gets what the loss leaves of the mean, rounded up. A remainder of the others goes to the last of
    them. The artifact of vocabulary parallelism (sail-sg/VocabularyParallelism, ``exp_one_host.csv``) lists these
    numbers for its baseline.
    """
    last = min(layers, max(0, math.ceil((layers + loss) / stages - loss)))
    each, more = divmod(layers - last, stages - 1)
    return [each + (i >= stages - 1 - more) for i in range(stages - 1)] + [last]


def layout_of(counts: list[int], predictors: int = 0) -> str:
    """Return Megatron's layout of stages with these numbers of layers."""
    letters = ["t" * count for count in counts]
    letters[0] = "E" + letters[0]
    letters[-1] += "m" * predictors + "L"
    return "|".join(letters)


_RULES: tuple[Callable[[PublishedRun], Iterator[_Change]], ...] = (
    *(_named, _public, _encoder, _recipe, _images, _devices, _samples, _recompute, _balanced, _layers),
)
