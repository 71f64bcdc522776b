"""Find the towers of a model, and the part of each parameter, by running a small model with real numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.assembly import (
    BEHIND,
    BETWEEN,
    FIRST,
    LAST,
    PER_TOKEN,
    Anatomy,
    _Leaves,
    pattern,
    rows_of_features,
)
from pipeloom.integrations.transformers.carried import find_carried
from pipeloom.integrations.transformers.description import Family, FoundEncoder
from pipeloom.integrations.transformers.forms import FORMS, InputForm, Sides, forward_path, function_path, merged
from pipeloom.integrations.transformers.hollow import HollowRun, Probe, hollow, run_with
from pipeloom.integrations.transformers.reference import doubled
from pipeloom.integrations.transformers.smaller import line, tower_lists, words_of
from pipeloom.integrations.transformers.trace import Trace
from pipeloom.integrations.transformers.whole import encoder_call, reach, sample_call, tensors_in

Reads = Literal["images", "audio"]
_FUNCTIONS: tuple[tuple[str, Reads, str, tuple[str, ...]], ...] = (
    ("vision", "images", "get_image_features", ("image_token_id", "image_token_index")),
    ("audio", "audio", "get_audio_features", ("audio_token_id", "audio_token_index")),
)
"""Name of the encoder, what it reads, the library's method, and fields with the id of its placeholder tokens."""
_SIZES = ((2, 3), (3, 2), (1, 2))
"""Sides of the images of the test samples, in what encoders merge."""
_LENGTHS = (7, 4, 11, 5)
"""Token counts of the text of the test samples: longer than windows, and none begins at a multiple of a window."""


def find_encoders(model: Any, *, padded: bool = False) -> tuple[FoundEncoder, ...]:
    """Return the encoders of a model whose library functions run on a known form of instances.

    ``padded`` says whether recordings keep their padding. Raise `InputError` if none of the functions runs on any form.
    """
    found, reason = [], None
    for name, reads, function, fields in _FUNCTIONS:
        path = _path(model, name, function)
        if path is None or getattr(model.config, f"{name}_config", model) is None:
            continue
        place = next((each for each in fields if type(getattr(model.config, each, None)) is int), None)
        if place is None:
            reason = reason or InputError(
                "model", f"has an encoder of {reads}, and its configuration has no {fields[0]}"
            )
            continue
        try:
            crosses = function_path(model, function) is None
            found.append(_find_encoder(model, FoundEncoder(name, reads, "", path, 0, place, crosses=crosses), padded))
        except InputError as error:
            reason = reason or error
    if reason is not None and not found:
        raise reason
    return tuple(found)


def _path(model: Any, name: str, function: str) -> str | None:
    """Return the path of the library's function for features, or of the forward method of the encoder of images."""
    config = getattr(model.config, "vision_config", None) if name == "vision" else None
    path = function_path(model, function)
    return forward_path(model, config) if path is None and config is not None else path


def _find_encoder(model: Any, encoder: FoundEncoder, padded: bool) -> FoundEncoder:
    function = attrgetter(encoder.function)(model)
    reason = ""
    for number, form in enumerate(FORMS[encoder.reads](model, function)):
        if padded and encoder.reads == "audio" and form.is_sized:
            continue
        try:
            pixels, given = form.split(form.blank(_SIZES[0]))[0]
            pixels = torch.randn(pixels.shape, dtype=torch.float64)
            with torch.no_grad():
                trace = Trace(model, partial(encoder_call(encoder.function, pixels, given), model))
                if not len(rows_of_features(trace.output)):
                    raise InputError("model", "returns no features")
        except Exception as error:
            # The first form is the most likely one.
            reason = reason or line(error)
            continue
        path = trace.first_tower(tower_lists(model, model.config))
        return replace(encoder, path=path, form=number, extras=trace.extras(path))
    raise InputError("model", f"has an encoder of {encoder.reads} that runs on no known form of them: {reason}")


def text_samples(model: Any) -> list[dict[str, Tensor]]:
    """Return random text samples from a fixed seed."""
    words = torch.tensor(words_of(model.config))
    draw = torch.Generator().manual_seed(0)
    every = [words[torch.randint(len(words), (length,), generator=draw)] for length in _LENGTHS]
    samples = [{"input_ids": ids, "labels": ids.clone()} for ids in every]
    for sample in samples if "token_type_ids" in inspect.signature(model.forward).parameters else []:
        # Attention depends on them in some models.
        kinds = getattr(model.config, "type_vocab_size", 2)
        sample["token_type_ids"] = ((torch.arange(len(sample["input_ids"])) > 1) & (kinds > 1)).long()
    return samples


def samples_of(anatomy: Anatomy, *, always: bool) -> list[dict[str, Tensor]]:
    """Return text samples with instances of all encoders: one in the first, two in the second, none in the last.

    ``always`` puts one into the last too.
    """
    draw = torch.Generator().manual_seed(1)
    samples = []
    for number, text in enumerate(text_samples(anatomy.model)[:3]):
        sides = (_SIZES[:1], _SIZES[1:], _SIZES[2:] if always else ())[number]
        sides = sides[:1] if any(each.crosses for each in anatomy.family.encoders) else sides
        forms = anatomy.forms if sides else ()
        entries = {name: each for form in forms for name, each in _random_entries(form, sides, draw).items()}
        samples.append(anatomy.with_placeholders(text["input_ids"], entries))
    return samples


def with_videos(model: Any, family: Family) -> Iterator[Family]:
    """Yield descriptions whose encoder of images also reads videos, by the placeholder tokens that these may have."""
    path = function_path(model, "get_video_features")
    number = next((i for i, each in enumerate(family.encoders) if each.reads == "images" and not each.crosses), None)
    if path is None or number is None:
        return
    encoder = family.encoders[number]
    for place in ("video_token_id", "video_token_index", encoder.place):
        if type(getattr(model.config, place, None)) is int:
            yield family.with_encoder(number, video_function=path, video_place=place)


def video_samples(anatomy: Anatomy, *, apart: bool) -> list[dict[str, Tensor]]:
    """Return samples with an image and a video, with two videos, and with one; ``apart`` as in `with_placeholders`.

    Raise `InputError` if the function for videos takes another form, or does not run the blocks of images.
    """
    found = next(((i, form) for i, form in enumerate(anatomy.video_forms) if form is not None), None)
    if found is None:
        raise InputError("model", "takes videos in an unknown form")
    (which, videos), draw, samples = found, torch.Generator().manual_seed(2), []
    encoder = anatomy.family.encoders[which]
    for number, text in enumerate(text_samples(anatomy.model)[:3]):
        sides = (_SIZES[2:], _SIZES[:2], _SIZES[1:2])[number]
        entries = [_random_entries(videos, sides, draw)]
        if number == 0:
            # With an image, unless the model cannot tell its tokens from those of a video.
            others = [
                form for i, form in enumerate(anatomy.forms) if i != which or encoder.place != encoder.video_place
            ]
            entries += [_random_entries(form, _SIZES[:1], draw) for form in others]
        here = {name: each for one in entries for name, each in one.items()}
        samples.append(anatomy.with_placeholders(text["input_ids"], here, apart=apart))
    return samples


def _random_entries(form: InputForm, sides: Sequence[Sides], draw: torch.Generator) -> dict[str, Tensor]:
    """Return the entries of a sample with instances of some sizes."""
    entries: dict[str, Tensor] = doubled([merged(form, [form.blank(each) for each in sides])])[0]
    entries[form.keys[0]] = torch.randn(entries[form.keys[0]].shape, generator=draw, dtype=torch.float64)
    return entries


# ------------------------------------------------------------------ the whole model


def probe_sample(model: Any, encoders: Sequence[FoundEncoder]) -> dict[str, Tensor]:
    """Return a sample of a few words, and with one instance of each of the encoders."""
    sample = text_samples(model)[0]
    for encoder in encoders:
        function = attrgetter(encoder.function)(model)
        form = list(FORMS[encoder.reads](model, function))[encoder.form]
        (entries,) = doubled([form.blank(_SIZES[0])])
        entries[form.keys[0]] = torch.randn(entries[form.keys[0]].shape, dtype=torch.float64)
        with torch.no_grad():
            features = encoder_call(encoder.function, *form.split(entries)[0])(model)
        count = 1 if encoder.crosses else len(rows_of_features(features))
        run = torch.full((count,), getattr(model.config, encoder.place))
        ids = sample["input_ids"]
        sample |= {"input_ids": torch.cat([ids[:1], run, ids[1:]]), **entries}
    sample["labels"] = sample["input_ids"].clone()
    taken = inspect.signature(model.forward).parameters
    places = torch.tensor([getattr(model.config, each.place) for each in encoders], dtype=torch.int64)
    kinds = torch.isin(sample["input_ids"], places).long()
    return sample | {name: kinds for name in PER_TOKEN if name in taken}


def runs(model: Any) -> None:
    """Run the library's functions for features, and its forward pass on text if that is possible, or else raise."""
    _traced(model, find_encoders(model) if has_encoders(model) else ())


def _traced(model: Any, encoders: Sequence[FoundEncoder]) -> tuple[Trace, dict[str, Tensor]]:
    try:
        # Blocks that attend to an image may be left out without one.
        sample = probe_sample(model, encoders if any(each.crosses for each in encoders) else ())
        return Trace(model, lambda: run(model, sample)), sample
    except Exception:
        if not encoders:
            raise
        sample = probe_sample(model, encoders)
        return Trace(model, lambda: run(model, sample)), sample


def has_encoders(model: Any) -> bool:
    """Return whether the library has functions for features of a model."""
    return any(_path(model, name, function) is not None for name, _, function, _ in _FUNCTIONS)


def find_whole(model: Any, towers: Sequence[str], *, padded: bool) -> tuple[Family, list[dict[str, Tensor]]]:
    """Return what is found out about a model by running it, and samples for it; ``padded`` as in `find_encoders`.

    Raise `InputError` if its blocks, its encoders or what passes between them have a form that is not supported.
    """
    encoders = find_encoders(model, padded=padded)
    trace, sample = _traced(model, encoders)
    own = {each.path for each in encoders}
    path = trace.tower([each for each in towers if each not in own] or towers)
    state, tokens = trace.state(path), len(sample["input_ids"])
    axis = next((i for i, side in enumerate(state.shape[:-1]) if side == tokens), None)
    if axis is None:
        raise InputError("model", f"has a state of shape {tuple(state.shape)} for {tokens} tokens")
    types = tuple(name for name in PER_TOKEN if name in sample)
    carried = find_carried(model, path, lambda: run(model, sample, grad=True), tokens)
    family = Family(path, axis, encoders, carried=carried, extras=trace.extras(path), per_token=types)
    anatomy = Anatomy(model, family)
    always = any(
        form.keys[0] in sample and not each.crosses for form, each in zip(anatomy.forms, encoders, strict=True)
    )
    samples = samples_of(anatomy, always=always)
    try:
        for each in samples:
            run(model, each)
    except Exception as error:
        raise InputError("model", f"is not run by the library itself: {line(error)}") from error
    owners = _owners(anatomy, samples[0])
    return replace(family, owners=owners, alone=_runs_alone(anatomy)), samples


def run(model: Any, sample: Mapping[str, Tensor], *, grad: bool = False) -> Any:
    """Run the library's forward pass of one sample."""
    listed = ("input_ids", "labels", *PER_TOKEN)
    given = {name: each[None] if name in listed else each for name, each in sample.items()}
    with torch.set_grad_enabled(grad):
        return model(**given, use_cache=False)


def shifts_labels(model: Any, sample: Mapping[str, Tensor]) -> bool:
    """Return whether the library compares the logits of each token with the label of the next one.

    Then the first label has no effect on its loss.
    """
    labels = sample["labels"].clone()
    labels[0] = (labels[0] + 1) % model.config.get_text_config().vocab_size
    losses = [run(model, {**sample, "labels": each}).loss for each in (sample["labels"], labels)]
    return bool(losses[0] == losses[1])


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    frozen = [each for each in model.parameters() if not each.requires_grad and each.is_floating_point()]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)


def _owners(anatomy: Anatomy, sample: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Return the parts that depend on each parameter outside of the blocks, by its name without numbers."""
    model, family = anatomy.model, anatomy.family
    blocks = tuple(f"{path}." for path in (family.path, *(each.path for each in family.encoders)))
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = [name for name in every if not name.startswith(blocks)]
    owners: dict[str, set[str]] = {}

    def note(owner: str, outputs: Sequence[Tensor]) -> None:
        parameters = [model.get_parameter(name) for name in names]
        outputs = [each.sum() for each in outputs if each.requires_grad]
        if not outputs:
            return
        for name, grad in zip(names, torch.autograd.grad(outputs, parameters, allow_unused=True), strict=True):
            if grad is not None:
                owners.setdefault(pattern(name), set()).add(owner)

    with _all_trained(model):
        shell = hollow(model, set(every), anatomy.probes())
        for number, encoder in enumerate(family.encoders):
            first = anatomy.instances(number, sample)[0]
            tower = anatomy.towers[number]
            call = encoder_call(encoder.function, first.pixels, first.given)
            found = reach(shell, call, tower, tower.count - 1, {})
            if any(each.requires_grad for _, each in tensors_in(found.arguments[0])):
                raise InputError("model", f"gives blocks of {encoder.path!r} tensors that depend on parameters")
            note(encoder.name, found.states[:1])
            note(f"{encoder.name} {BETWEEN}", [found.states[place] for place in found.changed])
            with run_with(HollowRun(_random_state)):
                features = call(shell)
            note(f"{encoder.name} {BEHIND}", [each for _, each in tensors_in(features)])
        outer = anatomy.outer(sample)
        pixels = {name: sample[name] for name in outer["shapes"]}
        feeds: dict[str, Any] = {each.name: _Leaves(each.name, {}) for each in anatomy.towers}
        call = sample_call({**outer["values"], **pixels})
        found = reach(shell, call, anatomy.text, anatomy.text.count - 1, feeds)
        note(FIRST, [*found.states, *(each for _, each in tensors_in(found.arguments))])
        note(LAST, [_logits(shell, outer["values"] | pixels)])
    for name in names:
        if not model.get_parameter(name).requires_grad:
            # Constants, such as sinusoidal embeddings of positions, may be read without gradients.
            owners.setdefault(pattern(name), {FIRST})
    return {name: frozenset(each) for name, each in owners.items()}


def _random_state(_: Probe, x: Tensor, __: Any) -> Tensor:
    return torch.randn_like(x.detach())


def _logits(shell: Any, values: Mapping[str, Any]) -> Tensor:
    """Return logits that depend on the parameters behind the blocks only."""
    with run_with(HollowRun(_random_state)):
        logits: Tensor = shell(**values, use_cache=False).logits
    return logits


def _runs_alone(anatomy: Anatomy) -> bool:
    """Return whether the part behind the blocks runs on embeddings of tokens alone."""
    width = anatomy.model.config.get_text_config().hidden_size
    try:
        with torch.no_grad():
            _logits(anatomy.outline, {"inputs_embeds": torch.zeros((), dtype=anatomy.dtype).expand(1, 3, width)})
    except Exception:
        return False
    return True
