"""Build the modules of a model whose parts were found by running it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.description import LM, Encoder, Family, FoundEncoder, Instance, Sample
from pipeloom.integrations.transformers.forms import FORMS, InputForm, joined, joined_shape, video_form
from pipeloom.integrations.transformers.hollow import (
    READ,
    Arguments,
    HollowRun,
    Probe,
    hollow,
    probes,
    remember_shapes,
    run_with,
    running,
    shape_only,
)
from pipeloom.integrations.transformers.layers import has_mask
from pipeloom.integrations.transformers.modules import check_names, ids, kinds_of, layer_type
from pipeloom.integrations.transformers.packed import ATTENTION, EAGER, LENGTHS, OnHost, as_contexts
from pipeloom.integrations.transformers.samples import clean
from pipeloom.integrations.transformers.smaller import line, signature
from pipeloom.integrations.transformers.whole import (
    InstanceBetween,
    InstanceFirst,
    Recording,
    SampleFirst,
    SampleLast,
    Stream,
    Tower,
    TowerBlock,
    as_dtype,
    call_without_numbers,
    encoder_call,
    entry,
    filled,
    reach,
    replaced,
    sample_call,
    tensors_in,
    width_of,
    with_tokens,
)
from pipeloom.runtime.launch.device import moved
from pipeloom.runtime.model.model import Module, Part, Shape

FIRST, LAST, BETWEEN, BEHIND = "first", "last", "between blocks", "behind blocks"
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Entries of a sample with one number per token, which some models take."""
KINDS = {"images": (1, 2), "audio": (3,)}
"""Numbers of the placeholder tokens of images, videos and recordings in ``mm_token_type_ids``."""
_ENDS = "cu_seqlens"
"""The library's name for the first position of each sequence, and the end of the last one."""
_SIDES = (2, 3)
"""Sides of the images that show how a model uses its encoders, in what it merges."""
_LARGE = (9, 10)
"""The same for an image that is larger than windows."""


Pixels = Callable[[Sequence[int]], Tensor]
"""Makes pixels or states of a shape."""


def pattern(name: str) -> str:
    """Return the name of a parameter without numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


class Anatomy:
    """The towers of a model, and copies of the model with the parameters of some of its parts."""

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.forms = [self._form(each) for each in family.encoders]
        self.video_forms = [self._video_form(*each) for each in zip(family.encoders, self.forms, strict=True)]
        self.outline = self.shell()
        self._note_positions(self.outline)
        self._sizes: dict[Any, tuple[int, int]] = {}
        self.needs_no_values = True
        """Whether no run of the library's forward pass has needed pixels with values."""
        self.mixes = False
        """Whether some blocks get no mask when samples are packed, and run once per sample."""
        self.text = Tower(LM, family.path, len(model.get_submodule(family.path)), family.axis)
        self.towers = tuple(
            Tower(each.name, each.path, len(model.get_submodule(each.path))) for each in family.encoders
        )
        self._look()
        trunks = {each.path.rpartition(".")[0] for each in family.encoders}
        for path in trunks:
            if path and not family.path.startswith(f"{path}."):
                remember_shapes(self.outline.get_submodule(path))

    def _form(self, encoder: FoundEncoder) -> InputForm:
        function = attrgetter(encoder.function)(self.model)
        return list(FORMS[encoder.reads](self.model, function))[encoder.form]

    def _video_form(self, encoder: FoundEncoder, form: InputForm) -> InputForm | None:
        if not encoder.video_function:
            return None
        return video_form(form, self.model, attrgetter(encoder.video_function)(self.model))

    def shell(self, *owners: str) -> nn.Module:
        """Return a copy of the model with the parameters of some parts, and with probes for all blocks."""
        every = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        keep = {name for name in every if not self.family.owners.get(pattern(name), frozenset()).isdisjoint(owners)}
        return hollow(self.model, keep, self.probes())

    def probes(self) -> dict[str, nn.Module]:
        """Return probes for the blocks of all towers, by path."""
        every = [(LM, self.family.path, self.family.extras)]
        every += [(each.name, each.path, each.extras) for each in self.family.encoders]
        blocks: Any = self.model.get_submodule
        return {path: probes(name, blocks(path), extras) for name, path, extras in every}

    def _note_positions(self, outline: nn.Module) -> None:
        trunk = outline.get_submodule(self.family.trunk)
        trunk.register_forward_pre_hook(_note_positions, with_kwargs=True)

    # ------------------------------------------------------------------ instances

    def instances(self, number: int, sample: Sample) -> list[Instance]:
        """Return the instances of a sample for an encoder, with their sizes by the model's own code."""
        found = []
        for is_video, form in enumerate((self.forms[number], self.video_forms[number])):
            if form is None or sample.get(form.keys[0]) is None:
                continue
            for pixels, given in form.split(sample):
                sizes = self._sizes_of(number, form, pixels.shape, given, bool(is_video))
                found.append(Instance(pixels, given, *sizes, bool(is_video)))
        encoder = self.family.encoders[number]
        if encoder.place == encoder.video_place and len({each.is_video for each in found}) > 1:
            problem = "has images and videos, whose placeholder tokens are the same in this model"
            raise InputError("sample", problem, "give them in different samples")
        return found

    def _sizes_of(
        self, number: int, form: InputForm, shape: Sequence[int], given: Mapping[str, Tensor], is_video: bool
    ) -> tuple[int, int]:
        key = (number, *shape, *((name, *each.flatten().tolist()) for name, each in given.items()))
        if key not in self._sizes:
            try:
                self._sizes[key] = self._measured(number, tuple(shape), given, is_video)
            except Exception as error:
                problem = f"is not what the library takes: {line(error)}"
                raise InputError(f"sample.{form.keys[0]}", problem, "use the model's own processor") from error
        return self._sizes[key]

    def _measured(
        self, number: int, shape: tuple[int, ...], given: Mapping[str, Tensor], is_video: bool
    ) -> tuple[int, int]:
        """Return the numbers of patches and tokens of an instance."""
        encoder, patches = self.family.encoders[number], 0

        def play(probe: Probe, x: Tensor, _: Any) -> Tensor:
            nonlocal patches
            if probe.tower == encoder.name and probe.place == 0:
                patches += x.numel() // x.shape[-1]
            return x

        def run(pixels: Pixels) -> tuple[int, int]:
            nonlocal patches
            patches = 0
            with run_with(HollowRun(play)):
                features = encoder_call(encoder.function_of(is_video), pixels(shape), given)(self.outline)
            return patches, 1 if encoder.crosses else len(rows_of_features(features))

        sizes: tuple[int, int] = self.without_values(run)
        return sizes

    def without_values(self, run: Callable[[Pixels], Any]) -> Any:
        """Return what a run of the library's forward pass returns, on pixels without values if it can use them.

        ``run`` takes a function that makes pixels or states of a shape.
        """
        with torch.no_grad():
            if self.needs_no_values:
                # What the library raises for a sample, it raises again below.
                with suppress(Exception):
                    found = run(lambda shape: shape_only(shape, self.dtype))
                    if not any(isinstance(each, FakeTensor) for _, each in tensors_in(found)):
                        return found
            before, self.needs_no_values = self.needs_no_values, False
            try:
                return run(lambda shape: torch.ones((), dtype=self.dtype).expand(tuple(shape)))
            except Exception:
                self.needs_no_values = before
                raise

    def encoder(self, number: int) -> Encoder:
        """Return the description of an encoder, from which samples are described."""
        found, form, videos = self.family.encoders[number], self.forms[number], self.video_forms[number]
        keys = form.keys if videos is None else (*form.keys, *videos.keys)
        return Encoder(found, partial(self.instances, number), partial(_example, form), keys)

    # ------------------------------------------------------------------ towers of this model

    def sample(self) -> dict[str, Any]:
        """Return a sample with one instance for each encoder."""
        entries = {name: each for form in self.forms for name, each in form.blank(_SIDES).items()}
        return self.with_placeholders(torch.zeros(5, dtype=torch.int64), entries)

    def with_placeholders(self, words: Tensor, entries: Mapping[str, Tensor], *, apart: bool = False) -> dict[str, Any]:
        """Return a sample with instances, whose placeholder tokens are between the words of a text.

        ``apart`` puts words between the frames of a video, too.
        """
        config = self.model.config
        marks = [getattr(config, f"video_{name}_token_id", None) for name in ("start", "end")]
        pieces: list[tuple[list[int], int]] = []
        at = 0
        for number, encoder in enumerate(self.family.encoders):
            for instance in self.instances(number, entries):
                if instance.is_video and not instance.patches:
                    raise InputError("model", "runs other blocks for videos than for images")
                # Words between the instances, because models count runs of placeholders.
                pieces.append((words[at : at + 1].tolist(), 0))
                at += 1
                place = getattr(config, encoder.all_places[instance.is_video])
                # A video of `video_form` has two frames.
                runs = 2 if apart and instance.is_video else 1
                placed = [([place] * (instance.tokens // runs), KINDS[encoder.reads][instance.is_video])]
                if runs > 1:
                    placed += [(words[:1].tolist(), 0), *placed]
                if instance.is_video:
                    begin, end = ([] if each is None else [each] for each in marks)
                    placed = [(begin, 0), *placed, (end, 0)]
                pieces += placed
        pieces.append((words[at:].tolist(), 0))
        ids = torch.tensor([each for run, _ in pieces for each in run])
        kinds = torch.tensor([kind for run, kind in pieces for _ in run])
        types = {"mm_token_type_ids": kinds, "token_type_ids": (torch.arange(len(ids)) > 1).long()}
        labels = torch.where(kinds > 0, -100, ids)
        own = {name: types[name] for name in self.family.per_token}
        return {"input_ids": ids, "labels": labels, **entries, **own}

    def _look(self) -> None:
        """Find which states of the encoders the language model takes, and which tensors its blocks take."""
        outer = self.outer(self.sample())
        leaves: dict[tuple[str, int], Tensor] = {}
        values = filled(outer, torch.empty(0, dtype=self.dtype))
        feeds: dict[str, Any] = {each.name: _Leaves(each.name, leaves) for each in self.towers}
        noted: dict[str, Any] = {}
        last = self.text.count - 1
        found = reach(self.outline, sample_call(values), self.text, last, feeds, tracing=True, values=noted)
        shapes = {tuple(x.shape) for x in found.states}
        if len(shapes) > 1:
            raise InputError("model", f"has states of different shapes in its language model: {sorted(shapes)}")
        streams, tensors = self._streams(found, outer["tokens"])
        streams += self._carried(found)
        every = list(leaves)
        ends = [each.sum() for each in (found.states[0], *tensors) if each.requires_grad]
        self._check_owned(values, ends, noted)
        grads = torch.autograd.grad(ends, list(leaves.values()), allow_unused=True) if leaves else ()
        used: dict[str, list[int]] = {each.name: [] for each in self.towers}
        for (name, place), grad in zip(every, grads, strict=True):
            if grad is not None:
                used[name].append(place)
        for name, places in used.items():
            if not places:
                raise InputError("model", f"has an encoder {name!r} whose blocks do not affect its loss")
        self.text = replace(self.text, streams=streams)
        self.towers = tuple(
            replace(each, count=max(used[each.name]) + 1, inner=tuple(sorted(set(used[each.name]))[:-1]))
            for each in self.towers
        )
        self.width = width_of(found.states[0].shape, self.text.axis)

    def _check_owned(self, values: Mapping[str, Any], ends: Sequence[Tensor], noted: dict[str, Any]) -> None:
        """Raise `InputError` if parameters have an effect on the model that they do not have on the small one."""
        if not self.family.owners:
            return
        behind: dict[str, Any] = {}
        with run_with(HollowRun(lambda _, x, __: x.detach(), tracing=True, values=behind)):
            logits = self.outline(**values, use_cache=False).logits
        # Blocks cut the graph, so that the logits depend on nothing before them unless it passes around the blocks.
        for owner, outputs, read in ((FIRST, ends, noted), (LAST, [logits.sum()], behind)):
            own = {name for name, owners in self.family.owners.items() if owner in owners}
            others = [
                (name, leaf) for name, leaf in read.get(READ, ()) if leaf.requires_grad and pattern(name) not in own
            ]
            leaves = [leaf for _, leaf in others]
            used = torch.autograd.grad(outputs, leaves, allow_unused=True, retain_graph=True) if leaves else ()
            for (name, _), grad in zip(others, used, strict=True):
                if grad is not None:
                    problem = f"affects the part {owner!r}, unlike in a small model of the same configuration"
                    raise InputError(f"parameter {name!r}", problem, "this form of the model is not supported")

    def _streams(self, found: Recording, tokens: int) -> tuple[tuple[Stream, ...], list[Tensor]]:
        streams: list[Stream] = []
        names: dict[int, str] = {}
        kept: list[Tensor] = []
        for place, (state, arguments) in enumerate(zip(found.states, found.arguments, strict=True)):
            every = [((), state)] if place else []
            for where, tensor in (*every, *tensors_in(arguments)):
                if not tensor.requires_grad:
                    continue
                name = names.setdefault(id(tensor), f"{LM}__{place}_{len(names)}")
                kept.append(tensor)
                axis = _axis(tensor.shape, tokens)
                if axis is None and not where:
                    raise InputError("model", f"adds a tensor of shape {tuple(tensor.shape)} after a block")
                width = tensor.numel() if axis is None else width_of(tensor.shape, axis)
                streams.append(Stream(name, place, tuple(where), axis, width))
        return tuple(streams), kept

    def _carried(self, found: Recording) -> tuple[Stream, ...]:
        """Return the streams that blocks compute. Their shapes are found by running the blocks without numbers."""
        streams: list[Stream] = []
        latest: dict[int, Stream] = {}
        blocks: Any = self.model.get_submodule(self.family.path) if self.family.carried else ()
        for place, (block, state, arguments) in enumerate(zip(blocks, found.states, found.arguments, strict=False)):
            kind = signature(block)
            taken = [
                replace(latest[number], place=place, where=each.taken[kind])
                for number, each in enumerate(self.family.carried)
                if kind in each.taken and number in latest
            ]
            streams += taken
            computed = {number: each for number, each in enumerate(self.family.carried) if kind in each.givers}
            if not computed or arguments is None:
                continue
            for stream in taken:
                value = torch.empty(with_tokens(stream, state.shape[self.family.axis]), dtype=self.dtype)
                arguments = replaced(arguments, stream.where, value)
            called = call_without_numbers(block, state, arguments)
            for number, each in computed.items():
                try:
                    shape = list(entry(called, each.where).shape)
                except (KeyError, IndexError, AttributeError) as error:
                    problem = "gives later blocks a tensor whose shape cannot be found"
                    raise InputError(f"block {place} of {self.family.path!r}", problem) from error
                shape[each.axis] = 1
                name = f"{LM}__{place}_to_later_{number}"
                latest[number] = Stream(name, place, (), each.axis, math.prod(shape), place, each.where, tuple(shape))
        return tuple(streams)

    # ------------------------------------------------------------------ arguments of calls

    def outer(self, sample: Sample) -> dict[str, Any]:
        """Return the arguments of the library's forward pass of a sample."""
        values: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        pixels = {form.keys[0] for form in (*self.forms, *self.video_forms) if form is not None}
        for name, value in sample.items():
            if name in ("id", "labels"):
                continue
            tensor = torch.as_tensor(value)
            if name in pixels:
                shapes[name] = tuple(tensor.shape)
            else:
                is_listed = name in ("input_ids", "attention_mask", *self.family.per_token)
                # The context is computed on the host.
                values[name] = as_dtype((tensor.reshape(1, -1) if is_listed else tensor).cpu(), self.dtype)
        rows = tuple(tuple(i.patches for i in self.instances(n, sample)) for n in range(len(self.forms)))
        return {"values": values, "shapes": shapes, "tokens": values["input_ids"].shape[1], "rows": rows}


class _Leaves:
    """Gives the states of an encoder's blocks, as leaves of which autograd shows the use."""

    def __init__(self, name: str, leaves: dict[tuple[str, int], Tensor]) -> None:
        self.name, self.leaves = name, leaves

    def take(self, place: int, x: Tensor) -> Tensor:
        """Return a new state."""
        leaf = torch.zeros_like(x).requires_grad_()
        self.leaves[self.name, place] = leaf
        # The library may change a state in place, but not a leaf.
        return leaf.clone()


def rows_of_features(features: Any) -> Tensor:
    """Return the features of encoders as one row per token."""
    for name in ("pooler_output", "last_hidden_state"):
        # Some encoders return no pooled output: their last state is the features.
        if getattr(features, name, None) is not None:
            features = getattr(features, name)
    if isinstance(features, (tuple, list)):
        features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    rows: Tensor = features.reshape(-1, features.shape[-1])
    return rows


def _axis(shape: Sequence[int], tokens: int) -> int | None:
    return next((axis for axis, side in enumerate(shape[:-1]) if side == tokens), None)


def _note_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    del module, args
    now = running()
    if now is not None:
        now.values["position_ids"] = kwargs.get("position_ids")


def _example(form: InputForm, size: int) -> dict[str, Tensor]:
    if form.is_sized:
        return form.blank((4 * size, 4 * size))
    one = form.blank((1, 1))
    assert form.joined is not None
    return {name: torch.cat([each] * size, dim=form.dim_of(name)) for name, each in one.items()}


# ------------------------------------------------------------------ contexts


@dataclass(frozen=True)
class InstanceContext:
    """Returns the arguments of the blocks of an encoder for a part."""

    anatomy: Anatomy
    number: int

    def groups(self, part: Part) -> list[tuple[str, list[Tensor], dict[str, Tensor]]]:
        """Return the path of the library's function, the pixels of all instances, and arguments of each call."""
        anatomy, number = self.anatomy, self.number
        encoder, form = anatomy.family.encoders[number], anatomy.forms[number]
        images = [anatomy.instances(number, clean(part.samples[place]))[index] for place, index in part.instances]
        if not encoder.packs:
            return [(encoder.function_of(each.is_video), [each.pixels], each.given) for each in images]
        groups = []
        for is_video, run in itertools.groupby(images, attrgetter("is_video")):
            each = list(run)
            given = {
                name: torch.cat([image.given[name] for image in each], form.dim_of(name)) for name in each[0].given
            }
            groups.append((encoder.function_of(is_video), [image.pixels for image in each], given))
        return groups

    def pixels(self, part: Part) -> tuple[Tensor, ...]:
        """Return the pixels of each call."""
        form = self.anatomy.forms[self.number]
        return tuple(joined(pixels, form.dim_of(form.keys[0])) for _, pixels, _ in self.groups(part))

    def __call__(self, part: Part) -> dict[str, Any]:
        """Return the context."""
        anatomy, tower = self.anatomy, self.anatomy.towers[self.number]
        calls, form = [], anatomy.forms[self.number]
        for function, pixels, given in self.groups(part):
            given, whole = moved(given, "cpu"), joined_shape(pixels, form.dim_of(form.keys[0]))

            def run(made: Pixels, function: str = function, shape: Any = whole, given: Any = given) -> Any:
                call = encoder_call(function, made(shape), given)
                found = reach(anatomy.outline, call, tower, tower.count - 1, {})
                return found.arguments, tuple(found.states[0].shape)

            arguments, shape = anatomy.without_values(run)
            outer = {"values": given, "shapes": {}, "shape": shape, "tokens": math.prod(shape[:-1])}
            outer |= {"pixels": whole, "function": function}
            calls.append(([_on_host(each) for each in arguments], outer))
        return as_contexts(calls)


def _on_host(arguments: Arguments | None) -> Arguments | None:
    """Return the arguments of a block with the ends of sequences on the host, where attention reads them.

    On a device, each block would wait for all earlier work.
    """
    if arguments is None or _ENDS not in arguments[1]:
        return arguments
    args, kwargs = arguments
    return args, {**kwargs, _ENDS: OnHost(kwargs[_ENDS])}


@dataclass(frozen=True)
class SampleContext:
    """Returns the arguments of the blocks of the language model for a part."""

    anatomy: Anatomy

    def __call__(self, part: Part) -> dict[str, Any]:
        """Return the context."""
        anatomy, last = self.anatomy, self.anatomy.text.count - 1
        family = anatomy.family
        calls, positions = self._calls(part, 0 if family.packs and not anatomy.mixes else last)
        if not family.packs:
            return as_contexts(calls)
        packs = self._packed(positions, [outer for _, outer in calls])
        if not anatomy.mixes and not all(has_mask(arguments) for arguments in packs[0]):
            anatomy.mixes = True
            calls, _ = self._calls(part, last)
        found = as_contexts([packs, *calls])
        every = found.pop("calls")
        return {"packs": every[:1], "calls": every[1:], **found}

    def _calls(self, part: Part, end: int) -> tuple[list[Any], list[Tensor]]:
        """Return the arguments of the blocks of each sample up to block ``end``, and the samples' positions."""
        anatomy, calls, positions = self.anatomy, [], []
        for place, _ in part.instances:
            outer = anatomy.outer(clean(part.samples[place]))

            def run(made: Pixels, outer: Any = outer) -> Any:
                values = {**outer["values"], **{name: made(shape) for name, shape in outer["shapes"].items()}}
                noted: dict[str, Any] = {}
                call = sample_call(values)
                found = reach(
                    anatomy.outline, call, anatomy.text, end, {}, values=noted, reuses=anatomy.needs_no_values
                )
                return self._call(found, outer), noted.get("position_ids")

            call, given = anatomy.without_values(run)
            positions.append(torch.arange(outer["tokens"])[None] if given is None else given)
            calls.append(call)
        return calls, positions

    def _packed(self, positions: Sequence[Tensor], outers: Sequence[dict[str, Any]]) -> Any:
        anatomy, lengths = self.anatomy, tuple(outer["tokens"] for outer in outers)
        total = sum(lengths)
        # Samples without images may have one row of positions where others have several.
        rows = max((each.shape[:-1] for each in positions), key=len)
        positions = [each.expand(*rows, each.shape[-1]) for each in positions]
        width = anatomy.model.config.get_text_config().hidden_size
        given = {
            "attention_mask": torch.ones(1, total, dtype=torch.int64),
            "position_ids": torch.cat(positions, dim=-1),
        }
        runs = anatomy.outline.get_submodule(anatomy.family.trunk)
        if anatomy.family.typed:
            runs = anatomy.outline
            # Zero stands for text, of which a sample may consist without saying so.
            given |= {
                name: torch.cat([_types(outer, name) for outer in outers], 1) for name in anatomy.family.per_token
            }

        def run(made: Pixels) -> Any:
            call = sample_call({"inputs_embeds": made((1, total, width)), **given})
            found = reach(runs, call, anatomy.text, anatomy.text.count - 1, {}, lengths=lengths)
            return self._call(found, {"values": {}, "shapes": {}, "tokens": total})

        return anatomy.without_values(run)

    def _call(self, found: Recording, outer: dict[str, Any]) -> Any:
        """Return the arguments of each block without streams, and what all layers need."""
        every, shapes = list(found.arguments), {}
        for stream in self.anatomy.text.streams:
            if stream.source is not None:
                shapes[stream.name] = with_tokens(stream, outer["tokens"])
                continue
            if stream.place >= len(every) or every[stream.place] is None:
                continue
            value = entry(every[stream.place], stream.where) if stream.where else found.states[stream.place]
            if value is None:
                continue
            shapes[stream.name] = tuple(value.shape)
            if stream.where:
                every[stream.place] = replaced(every[stream.place], stream.where, None)
        width = self.anatomy.model.config.get_text_config().hidden_size
        return every, {**outer, "shape": tuple(found.states[0].shape), "streams": shapes, "width": width}


def _types(outer: dict[str, Any], name: str) -> Tensor:
    given: Tensor | None = outer["values"].get(name)
    return torch.zeros(1, outer["tokens"], dtype=torch.int64) if given is None else given


# ------------------------------------------------------------------ modules


def build_modules(anatomy: Anatomy, freeze: Sequence[str]) -> list[Module]:
    """Return the modules of a model, and freeze those named by ``freeze``."""
    family = anatomy.family
    check_names(freeze, (*(each.name for each in family.encoders), LM))
    if family.packs:
        _config_of(anatomy.model, family.path)._attn_implementation = EAGER if family.eager else ATTENTION
    return [
        *(_encoder(anatomy, i, each.name in freeze) for i, each in enumerate(family.encoders)),
        _text(anatomy, _freeze_projectors(anatomy, freeze)),
    ]


def _freeze_projectors(anatomy: Anatomy, freeze: Sequence[str]) -> bool:
    """Freeze the projectors of frozen encoders, which run in the language model's first layer.

    Return whether the language model is frozen as a whole. If projectors in it are trained, its other parameters are
    frozen one by one.
    """
    family = anatomy.family
    of = {
        name: {each.name for each in family.encoders if f"{each.name} {BEHIND}" in owners}
        for name, owners in family.owners.items()
    }
    trained = {each.name for each in family.encoders} - {*freeze}
    alone = LM in freeze and any(names & trained for names in of.values())
    towers = tuple(f"{each.path}." for each in family.encoders)
    for name, parameter in anatomy.model.named_parameters():
        names = of.get(pattern(name), set())
        own = family.owners.get(pattern(name), frozenset())
        in_encoder = name.startswith(towers) or any(
            each.name in own or f"{each.name} {BETWEEN}" in own for each in family.encoders
        )
        if (names and not names & trained) or (alone and not names and not in_encoder):
            parameter.requires_grad_(False)
    return LM in freeze and not alone


def _config_of(model: nn.Module, path: str) -> Any:
    """Return the configuration of the innermost module around a path that has one."""
    names = path.split(".")
    above = (model.get_submodule(".".join(names[:i])) for i in range(len(names) - 1, -1, -1))
    return next(each.config for each in above if hasattr(each, "config"))


def _encoder(anatomy: Anatomy, number: int, frozen: bool) -> Module:
    found, tower = anatomy.family.encoders[number], anatomy.towers[number]
    if found.lengths:
        _config_of(anatomy.model, found.path)._attn_implementation = LENGTHS
    blocks: Any = anatomy.model.get_submodule(found.path)
    context = InstanceContext(anatomy, number)
    record = _passed(anatomy, number)
    width, windows = int(record.states[0].shape[-1]), _windows(record)
    between = f"{found.name} {BETWEEN}"
    shells = {}
    if any(between in owners for owners in anatomy.family.owners.values()):
        shells = {i: InstanceBetween(anatomy.shell(between), tower, i) for i in record.changed}
    blocks = blocks[: tower.count]
    shape: Shape = ("tokens", width)
    return Module(
        found.name,
        [
            InstanceFirst(anatomy.shell(found.name), tower),
            *(TowerBlock(block, place, tower, shells.get(place)) for place, block in enumerate(blocks)),
        ],
        reads=found.reads,
        hidden=shape,
        output=shape,
        inputs=context.pixels,
        context=context,
        frozen=frozen,
        kinds=("first", *kinds_of(blocks, lambda i: windows[i])),
        emits={place + 1: {tower.inner_stream(place): shape} for place in tower.inner},
    )


def _passed(anatomy: Anatomy, number: int) -> Recording:
    """Return what the library gives the blocks of an encoder."""
    form, found = anatomy.forms[number], anatomy.family.encoders[number]
    pixels, given = form.split(form.blank(_LARGE))[0]
    call = encoder_call(found.function, torch.ones((), dtype=anatomy.dtype).expand(pixels.shape), given)
    with torch.no_grad():
        record = reach(anatomy.outline, call, anatomy.towers[number], anatomy.towers[number].count - 1, {})
    if len({tuple(each.shape) for each in record.states}) > 1:
        raise InputError("model", f"has states of different shapes in {found.path!r}")
    return record


def _windows(record: Recording) -> list[str]:
    """Return a word for each block, which differs where blocks attend within other windows."""
    known: list[Any] = []
    words = []
    for arguments in record.arguments:
        ends = None if arguments is None else arguments[1].get(_ENDS)
        key = None if ends is None else tuple(ends.tolist())
        known += [] if key in known else [key]
        words.append(f"window {known.index(key) + 1}")
    return words if len(known) > 1 else [""] * len(words)


def _text(anatomy: Anatomy, frozen: bool) -> Module:
    text, family, config = anatomy.text, anatomy.family, anatomy.model.config.get_text_config()
    blocks: Any = anatomy.model.get_submodule(text.path)
    takes: dict[int, tuple[str, ...]] = {
        0: tuple(each.inner_stream(place) for each in anatomy.towers for place in each.inner)
    }
    emits: dict[int, dict[str, Shape | None]] = {0: {}}
    for stream in text.streams:
        takes[stream.place + 1] = tuple(dict.fromkeys((*takes.get(stream.place + 1, ()), stream.name)))
        after = 0 if stream.source is None else stream.source + 1
        emits.setdefault(after, {})[stream.name] = ("instances" if stream.axis is None else "tokens", stream.width)
    return Module(
        LM,
        [
            SampleFirst(anatomy.shell(FIRST), text, anatomy.towers),
            *(TowerBlock(block, place, text) for place, block in enumerate(blocks)),
            SampleLast(anatomy.shell(LAST), text, alone=family.alone),
        ],
        reads="sequence",
        hidden=("tokens", anatomy.width),
        output=("tokens", config.vocab_size),
        inputs=ids,
        context=SampleContext(anatomy),
        after=tuple(each.name for each in family.encoders),
        frozen=frozen,
        kinds=("first", *kinds_of(blocks, lambda i: layer_type(config, blocks[i], i)), "last"),
        emits={place: each for place, each in emits.items() if each},
        takes={place: each for place, each in takes.items() if each},
    )
