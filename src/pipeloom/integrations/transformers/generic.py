"""Find the parts of a model on a small model of the same configuration, and test them on it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.assembly import Anatomy
from pipeloom.integrations.transformers.balance import check_balance
from pipeloom.integrations.transformers.description import Family
from pipeloom.integrations.transformers.discovery import (
    find_encoders,
    find_whole,
    has_encoders,
    run,
    runs,
    shifts_labels,
    text_samples,
    video_samples,
    with_videos,
)
from pipeloom.integrations.transformers.reference import Gradients, double, library_gradients, rows_of
from pipeloom.integrations.transformers.samples import num_targets
from pipeloom.integrations.transformers.smaller import line, smaller
from pipeloom.integrations.transformers.trace import Trace
from pipeloom.runtime import batch_of
from pipeloom.runtime.execute.blocks import ChunkActivation, ChunkStreams
from pipeloom.runtime.execute.split import run_backward
from pipeloom.runtime.model.model import Emit, Part
from pipeloom.spec import STRATEGIES, Strategy
from pipeloom.spec.model import num_instances

_TOLERANCE = 1e-9
_REMEDY = "write its layers as docs/bring-your-own-model.md says"


def find_family(kind: type, config: Any, assemble: Callable[[Any, Family], Any]) -> Family:
    """Detect the parts of a model, and check that its layers reproduce the library's gradients.

    ``assemble`` builds a `TransformersModel` from a model of the library and a `Family`. Loss and gradients of the
    returned family equal the library's on a small model of the same configuration. Memory strategies that fail or give
    other gradients are excluded. Raise `InputError` if a part is not found, or gradients differ.
    """
    try:
        with double(), torch.random.fork_rng(devices=[]), _quietly():
            return _find(kind, config, assemble)
    except Exception as error:
        problem = error.problem if isinstance(error, InputError) else f"cannot be tested: {line(error)}"
        raise InputError("model", f"is a {kind.__name__} and cannot be used: {problem}", _REMEDY) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the library's warnings about the small models."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _find(kind: type, config: Any, assemble: Callable[[Any, Family], Any]) -> Family:
    if any(value for name, value in vars(config.get_text_config()).items() if name.endswith("layerdrop")):
        raise InputError("model", "leaves out layers at random (layerdrop)")
    small, towers, reached = smaller(kind, config, runs)
    if getattr(config, "vision_config", None) is not None and not has_encoders(small):
        raise InputError("model", "has an encoder of images, and no function that runs it on pixels")
    # Some models change themselves when they first run. The layers are made from one that has not run.
    encoders = find_encoders(copy.deepcopy(small)) if has_encoders(small) else ()
    if encoders:
        try:
            return _find_whole(small, towers, reached, assemble)
        except InputError as error:
            if all(each.reads != "audio" for each in encoders):
                raise
            # The features of a recording may depend on the padding behind it.
            with suppress(InputError):
                return _find_whole(small, towers, reached, assemble, padded=True)
            raise error
    usual: Exception | None = None
    if reached:
        # Packing can only be tested if the short samples reach beyond all windows.
        try:
            return _find_usual(small, towers, assemble)
        except Exception as error:
            usual = error
    try:
        return _find_whole(small, towers, reached, assemble)
    except Exception as error:
        raise (usual or error) from None


def _find_usual(small: Any, towers: Sequence[str], assemble: Callable[[Any, Family], Any]) -> Family:
    """Find the parts of a language model whose blocks pass on nothing but their state, and which can be packed."""
    fresh, small = small, copy.deepcopy(small)
    samples = text_samples(small)
    usual = _find_text(small, towers, samples[0])
    wanted = _library_gradients(small, samples, usual)
    found: list[Family] = []
    problem = ""
    for family in (usual, replace(usual, eager=True)):
        model = copy.deepcopy(fresh)
        problems = try_strategies(model, samples, wanted, partial(assemble, model, family))
        if not problems:
            return family
        problem = problems.pop("keep", "")
        if not problem:
            found.append(replace(family, excluded=problems))
    if not found:
        raise InputError("model", problem)
    return min(found, key=lambda family: len(family.excluded))


def _find_whole(
    small: Any, towers: Sequence[str], reached: bool, assemble: Callable[[Any, Family], Any], *, padded: bool = False
) -> Family:
    """Find the parts of a model by running it, and the best way in which it can be packed."""
    check_balance(small.config.get_text_config())
    fresh, small = small, copy.deepcopy(small)
    family, samples = find_whole(small, towers, padded=padded)
    family = replace(family, shifts=shifts_labels(small, samples[0]))
    wanted = _library_gradients(small, samples, family)

    def problem_of(family: Family) -> str:
        model = copy.deepcopy(fresh)
        return _try_strategy(model, samples, wanted, partial(assemble, model, family), "keep")

    def first_exact(ways: Iterable[Family]) -> Family | None:
        return next((each for each in ways if not problem_of(each)), None)

    encoders = tuple(replace(each, packs=True, lengths=True) for each in family.encoders)
    typed = (False, True) if family.per_token else (False,)
    # Packing can only be tested if the short samples reach beyond all windows.
    ways = [replace(family, packs=True, encoders=encoders, typed=each) for each in typed if reached]
    found = first_exact(ways)
    if found is None:
        problem = problem_of(family)
        if problem:
            raise InputError("model", problem)
        for number in range(len(encoders)):
            ways = [family.with_encoder(number, packs=True, lengths=lengths) for lengths in (True, False)]
            family = first_exact(ways) or family
        eager = (False, True) if reached else ()
        ways = [replace(family, packs=True, eager=own, typed=each) for own in eager for each in typed]
        found = first_exact(ways) or family
    model = copy.deepcopy(fresh)
    problems = try_strategies(model, samples, wanted, partial(assemble, model, found), agrees=True)
    return _with_videos(fresh, replace(found, excluded=problems), assemble)


def _with_videos(small: Any, family: Family, assemble: Callable[[Any, Family], Any]) -> Family:
    """Return the family of a model that also reads videos, if its layers reproduce the library's gradients on them."""
    # Some models need words between the frames of a video, and others take none there.
    for found, apart in itertools.product(with_videos(small, family), (True, False)):
        try:
            samples = video_samples(Anatomy(copy.deepcopy(small), found), apart=apart)
            wanted = _library_gradients(small, samples, found)
        except Exception:
            continue
        # Videos pass through the blocks of images, for which all memory strategies were tried.
        model = copy.deepcopy(small)
        if not _try_strategy(model, samples, wanted, partial(assemble, model, found), "keep"):
            return found
    return family


def _library_gradients(small: Any, samples: Sequence[Any], family: Family) -> tuple[float, Gradients]:
    listed = frozenset(("input_ids", "labels", *family.per_token))
    return library_gradients(copy.deepcopy(small), samples, listed, partial(num_targets, shifts=family.shifts))


# ------------------------------------------------------------------ parts


def _find_text(model: Any, towers: Sequence[str], sample: dict[str, Tensor]) -> Family:
    """Find the blocks and the parts before and after them by tracing a forward pass."""
    trace = Trace(model, lambda: run(model, sample))
    tower = trace.tower(towers)
    width, hidden = trace.state(tower).shape[-1], model.config.get_text_config().hidden_size
    if width != hidden:
        raise InputError("model", f"passes on a state of width {width} between blocks, and its hidden size is {hidden}")
    first, last = trace.around(tower)
    per_token = tuple(name for name in sample if name not in ("input_ids", "labels"))
    shifts, extras = shifts_labels(model, sample), trace.extras(tower)
    return Family(tower, 1, extras=extras, packs=True, per_token=per_token, shifts=shifts, first=first, last=last)


# ------------------------------------------------------------------ test


def try_strategies(
    small: Any,
    samples: Sequence[Any],
    wanted: tuple[float, Gradients],
    make: Callable[[], Any],
    *,
    agrees: bool = False,
) -> dict[Strategy, str]:
    """Compare the layers with the library's forward pass; return the difference by memory strategy.

    A difference under ``keep`` ends the comparison, because all other strategies would have it too. ``agrees`` says
    that there is none with a whole backward.
    """
    problems: dict[Strategy, str] = {}
    for strategy in STRATEGIES:
        problem = "" if agrees and strategy == "keep" else _try_strategy(small, samples, wanted, make, strategy)
        if strategy == "keep" and not problem:
            problem = _try_strategy(small, samples, wanted, make, strategy, split=True)
        if problem:
            problems[strategy] = problem
        if "keep" in problems:
            break
    return problems


def _try_strategy(
    small: Any,
    samples: Sequence[Any],
    wanted: tuple[float, Gradients],
    make: Callable[[], Any],
    strategy: Strategy,
    *,
    split: bool = False,
) -> str:
    small.zero_grad(set_to_none=True)
    try:
        loss = _train(make(), samples, strategy, split=split)
    except InputError as error:
        return str(error)
    except Exception as error:
        return f"its layers cannot be called one after the other: {line(error)}"
    found = {name: each.grad for name, each in small.named_parameters() if each.grad is not None}
    apart = abs(loss - wanted[0]) / max(abs(wanted[0]), 1e-300)
    if not apart < _TOLERANCE:
        return f"the loss of its layers differs from the library's by {apart:.1e}"
    worst = rows_of(found, wanted[1])[0]
    if not worst.relative < _TOLERANCE:
        return f"the gradient of {worst.name!r} differs from the library's by {worst.relative:.1e}"
    extra = [name for name, each in found.items() if name not in wanted[1] and bool((each != 0).any())]
    return f"{extra[0]!r} has a gradient that the library's has not" if extra else ""


def _train(model: Any, samples: Sequence[Any], strategy: Strategy, *, split: bool = False) -> float:
    """Run the layers on all samples, packed, and backpropagate. Return the loss.

    ``split`` computes the gradients of each layer's weights after those of its inputs.
    """
    described = batch_of(samples, model.describe).samples
    given: dict[str, Tensor] = {}
    beside: Any = 0.0
    for module in model.modules:
        counts = [num_instances(module.reads, each) for each in described]
        part = Part(tuple(samples), tuple((place, i) for place, count in enumerate(counts) for i in range(count)))
        context, x = module.context(part), module.inputs(part)
        upstream = tuple(given[name] for name in module.after)
        for number, layer in enumerate(module.layers):
            taken = {name: given[name] for name in module.takes.get(number, ())}
            inputs = (*x, *upstream) if isinstance(x, tuple) else (x, *upstream)
            emits = tuple(module.emits.get(number, ()))
            x = _call_held(layer, (strategy, split), inputs, context, taken, emits)
            upstream = ()
            if isinstance(x, Emit):
                given |= x.streams
                beside, x = beside + (0.0 if x.loss is None else x.loss), x.output
        given[module.name] = x
    loss = (model.loss(x, part) + beside) / sum(map(model.num_targets, samples))
    # Unlike torch.autograd.backward, it keeps the casts of `double` during recomputation.
    run_backward([loss], [torch.ones_like(loss)])
    return float(loss.detach())


def _call_held(
    layer: Callable[..., Tensor | Emit],
    way: tuple[Strategy, bool],
    inputs: tuple[Any, ...],
    context: dict[str, Any],
    taken: Mapping[str, Tensor],
    emits: tuple[str, ...],
) -> Tensor | Emit:
    """Call a layer and hold its activations as the runtime does under a memory strategy.

    ``way`` is the memory strategy, and whether the backward is split. ``context`` has keyword arguments that need no
    gradient, ``taken`` the streams that the layer takes, and ``emits`` the names of those that it emits.
    """
    ports = ChunkStreams({0: tuple(taken)}, {0: emits}, frozenset(emits))
    activation = ChunkActivation(torch.device("cpu"), context, None, ports)
    # Autograd does not see the parameters, on which the output depends. This input makes the output require gradients.
    depends = torch.zeros((), requires_grad=True)
    given = (*inputs, *taken.values())
    output, *rest = _HeldLayer.apply(activation, layer, way, tuple(taken), depends, *given)  # type: ignore[no-untyped-call]
    streams = dict(zip(activation.given or {}, rest, strict=False))
    loss = rest[-1] if activation.losses else None
    return Emit(output, streams, loss) if streams or loss is not None else output


class _HeldLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: ChunkActivation, layer: Any, way: Any, taken: Any, *given: Any) -> Any:
        leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given[1:]]
        count = len(leaves) - len(taken)
        activation.streams = dict(zip(taken, leaves[count:], strict=True))
        output = activation.forward([layer], ((0, 1, way[0]),), tuple(leaves[:count]), True)
        activation.offload()
        ctx.activation, ctx.leaves, ctx.split = activation, leaves, way[1]
        return (output, *(activation.given or {}).values(), *activation.losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *others: Tensor) -> Any:
        activation: ChunkActivation = ctx.activation
        if activation.losses:
            activation.loss_scale = float(others[-1])
        activation.load()
        arrived = dict(zip(activation.given or {}, others, strict=False))
        if ctx.split:
            activation.backward_input(gradient, arrived)
            activation.backward_weight()
        else:
            activation.backward(gradient, arrived)
        return (None,) * 5 + tuple(x.grad if isinstance(x, Tensor) else None for x in ctx.leaves)
