"""`from_transformers`: a model of the library as a `Model`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.families import FAMILIES, Encoder, Family, Instance, Sample, Taps, Text
from pipeloom.integrations.transformers.hollow import ConvolutionFiller, EmbeddingFiller, Filler, Gap, hollow, probes
from pipeloom.integrations.transformers.layers import (
    PACKED,
    Added,
    AddingBlock,
    Block,
    EncoderFirst,
    EncoderLast,
    LibraryLayer,
    Taken,
    TappedBlock,
    TextFirst,
    TextLast,
    has_mask,
    record,
)
from pipeloom.integrations.transformers.packed import ATTENTION, LENGTHS, as_context, register
from pipeloom.integrations.transformers.weights import TransformersWeights, load
from pipeloom.runtime.model import Model, Module, Part, Shape
from pipeloom.runtime.safetensors_files import TensorFiles
from pipeloom.spec.batch import AUDIO_FRAMES_PER_SECOND, AUDIO_FRAMES_PER_TOKEN

_IGNORED = -100
"""Label of what is no target."""
_KNOWN = ("id", "input_ids", "attention_mask", "labels")


@dataclass(frozen=True, eq=False)
class TransformersModel(Model):
    """A `Model` of the layers of a model of the `transformers` library.

    Its ``describe`` tells the sizes of a sample, and as ``id`` the sample's own or a digest of it.
    """

    def library_names(self) -> dict[str, str]:
        """From the name of every parameter, ``module.layer.parameter``, to the library's name."""
        return {ours: theirs for ours, theirs, tensor in _named(self.modules) if isinstance(tensor, nn.Parameter)}


def shapes(folder: Path | str) -> TransformersModel:
    """Make a model of shapes of a folder that need not have weights: to be saved, not to be filled."""
    if TensorFiles.are_in(Path(folder)):
        return from_transformers(folder, device="meta")
    made = from_transformers(load(folder, _family, "meta", None))
    assert isinstance(made.pretrained, TransformersWeights)
    made.pretrained.folder = Path(folder)
    return made


def _named(modules: Sequence[Module]) -> Iterator[tuple[str, str, Tensor]]:
    """All parameters and saved buffers: their names, the library's, and they themselves."""
    for module in modules:
        for number, layer in enumerate(module.layers):
            assert isinstance(layer, LibraryLayer)
            for name, tensor in layer.state_dict(keep_vars=True).items():
                yield f"{module.name}.{number}.{name}", layer.library_name(name), tensor


def from_transformers(
    model: Any,
    *,
    freeze: Sequence[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TransformersModel:
    """Make a `Model` of a model of the `transformers` library, of the library's own layers.

    A sample is what the library's processor gives for one: ``input_ids`` and ``labels``, and as the model takes them
    ``pixel_values``, ``image_grid_thw`` and so on, without padding. The loss is the library's own, over all targets of
    the batch. The model's own layers are used, and go on working in it.

    Parameters
    ----------
    model : transformers.PreTrainedModel, str or pathlib.Path
        A model with a head for language, or a folder that it was saved in.
    freeze : sequence of str
        Modules that are not trained: ``"vision"`` is the encoder with what brings its output to the language model.
    device : torch.device, str or None
        Where a folder's model is made. ``"meta"``: shapes alone; in training every rank then reads the weights of its
        own layers from the folder. None: on the CPU.
    dtype : torch.dtype or None
        Of a folder's model, whatever the folder has; None: torch's default, which training sets to the run's.

    Returns
    -------
    TransformersModel
        A `Model` with ``describe``, which tells the sizes of a sample.

    Raises
    ------
    InputError
        The architecture, or an option of it, is not supported, or the folder's files are not those of the model.
    """
    folder = Path(model) if isinstance(model, (str, Path)) else None
    is_loaded = torch.device(device or "cpu").type != "meta"
    if folder is not None:
        model = load(folder, _family, device, dtype)
    else:
        for option, given in (("device", device), ("dtype", dtype)):
            if given is not None:
                raise InputError(option, f"is {str(given)!r}, and the model is there already", "leave it out")
    name = type(model).__name__
    family = _family(name)
    if getattr(model, "is_activation_checkpointing", False):
        remedy = "turn it off by model.activation_checkpointing_disable(); plans choose what is recomputed"
        raise InputError("model", "recomputes its blocks itself", remedy)
    for option, is_set, remedy in family.refused:
        if is_set(model.config):
            raise InputError(f"model.config.{option}", "is set", remedy)
    _check_loss(model)
    _check_rotary(model.config.get_text_config())
    register()
    encoders = tuple(make(model.config) for make in family.encoders)
    modules = _Builder(model, family.text, encoders).modules(freeze)
    _check_complete(model, encoders, modules)
    sizes = _Sizes(model.config, family.text, encoders)
    names = {ours: theirs for ours, theirs, _ in _named(modules)}
    return TransformersModel(
        modules,
        partial(_loss, model.loss_function, model.config.get_text_config().vocab_size),
        num_targets,
        name=name,
        targets="target tokens",
        describe=sizes.describe,
        pretrained=TransformersWeights(model, names, folder, is_loaded=is_loaded),
    )


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise InputError("model", f"is a {name}, which is none of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def _check_loss(model: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        raise InputError("model.loss_function", "is not the library's loss of language models")


def _check_rotary(config: Any) -> None:
    """Refuse rotary embeddings that depend on the longest sequence: packed, samples would change each other's."""
    given = getattr(config, "rope_parameters", None) or {}
    for each in (given, *(inner for inner in given.values() if isinstance(inner, dict))):
        kind = str(each.get("rope_type"))
        if "dynamic" in kind or kind == "longrope":
            raise InputError("model.config.rope_parameters", f"are of type {kind!r}, which packing would change")


def _check_complete(model: nn.Module, encoders: Sequence[Encoder], modules: Sequence[Module]) -> None:
    """Refuse to leave out a parameter."""
    held = {id(p) for module in modules for layer in module.layers for p in layer.parameters()}
    # Blocks behind the one whose output is taken are never run.
    unused = tuple(f"{path}." for each in encoders for path in (*each.unused, each.blocks))
    for name, parameter in model.named_parameters():
        if id(parameter) not in held and not name.startswith(unused):
            raise InputError(f"parameter {name!r}", "belongs to no layer", "this form of the model is not supported")


# ------------------------------------------------------------------ samples


def clean(sample: Sample) -> dict[str, Any]:
    """Return a sample with ids and labels as vectors, and entries that are None left out."""
    out = {name: value for name, value in sample.items() if value is not None}
    for name in ("input_ids", "labels"):
        if name not in out:
            raise InputError(f"sample.{name}", "is missing", "give what the library's processor gives, and labels")
        out[name] = torch.as_tensor(out[name]).reshape(-1)
    if len(out["input_ids"]) != len(out["labels"]):
        raise InputError("sample.labels", f"has {len(out['labels'])} entries, input_ids {len(out['input_ids'])}")
    return out


def num_targets(sample: Sample) -> float:
    """Count the tokens that are predicted."""
    return float((clean(sample)["labels"][1:] != _IGNORED).sum())


class _Sizes:
    """What is counted in a sample."""

    def __init__(self, config: Any, text: Text, encoders: Sequence[Encoder]) -> None:
        self.config, self.encoders = config, encoders
        self.known = {*_KNOWN, *text.per_token, *(key for encoder in encoders for key in encoder.keys)}

    def describe(self, sample: Sample) -> dict[str, Any]:
        """Return what the planner is told of a sample."""
        here = clean(sample)
        for name in here:
            if name not in self.known:
                raise InputError(f"sample.{name}", "is nothing that this model is given here", "leave it out")
        if "attention_mask" in here and not torch.as_tensor(here["attention_mask"]).all():
            raise InputError("sample.attention_mask", "has zeros", "give samples without padding")
        ids, rest = here["input_ids"], len(here["input_ids"])
        found: dict[str, Any] = {}
        pixels: list[Tensor] = []
        for encoder in self.encoders:
            instances = encoder.images(here)
            tokens = sum(each.tokens for each in instances)
            places = int((ids == getattr(self.config, encoder.places)).sum())
            if places != tokens:
                what = encoder.reads
                raise InputError("sample.input_ids", f"have {places} places for {what}, whose tokens are {tokens}")
            if not instances:
                continue
            pixels += [each.pixels for each in instances]
            if encoder.reads == "images":
                found["image_tokens"] = [each.tokens for each in instances]
                found["image_patches"] = [each.patches for each in instances]
                rest -= tokens
            else:
                found["audio_seconds"] = [each.patches / AUDIO_FRAMES_PER_SECOND for each in instances]
                # As many as are reckoned from the seconds; what differs is told as text.
                rest -= sum(-(-each.patches // AUDIO_FRAMES_PER_TOKEN) for each in instances)
        own = here.get("id")
        return {"id": _digest(ids, here["labels"], pixels) if own is None else str(own), "text_tokens": rest, **found}


def _digest(*tensors: Any) -> str:
    digest = hashlib.sha256()
    for each in tensors:
        for tensor in each if isinstance(each, list) else [each]:
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _loss(function: Callable[..., Tensor], num_words: int, logits: Tensor, part: Part) -> Tensor:
    """Return the library's loss as a sum over the targets of packed samples."""
    shifted = []
    for place, _ in part.instances:
        labels = clean(part.samples[place])["labels"]
        shifted.append(torch.cat([labels[1:], labels.new_full((1,), _IGNORED)]))
    targets = torch.cat(shifted).to(logits.device)
    return function(logits[None], None, num_words, num_items_in_batch=1, shift_labels=targets[None])


# ------------------------------------------------------------------ modules


class _Builder:
    """Makes the modules of one model."""

    def __init__(self, model: Any, text: Text, encoders: Sequence[Encoder]) -> None:
        self.model, self.text, self.encoders, self.config = model, text, encoders, model.config
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def modules(self, freeze: Sequence[str]) -> list[Module]:
        known = [*(encoder.name for encoder in self.encoders), "lm"]
        for name in freeze:
            if name not in known:
                raise InputError("freeze", f"{name!r} is no module", f"there are {', '.join(known)}")
        return [*(self._encoder(each, each.name in freeze) for each in self.encoders), self._text("lm" in freeze)]

    def _fillers(self, paths: Sequence[str]) -> dict[str, nn.Module]:
        """What stands for parts before the blocks."""
        there = [path for path in paths if _has(self.model, path)]
        return {path: _filler(self.model.get_submodule(path)) for path in there}

    def _outline(self, model: nn.Module, paths: Sequence[str]) -> nn.Module:
        """The same model, without any part: where the library asks for its dtype, it finds an empty parameter."""
        for path in paths:
            empty = torch.empty(0, dtype=self.dtype)
            model.get_submodule(path).register_parameter("like", nn.Parameter(empty, requires_grad=False))
        return model

    def _text(self, frozen: bool) -> Module:
        text, trunk = self.text, self.text.trunk
        path = f"{trunk}.{text.blocks}"
        blocks: Any = self.model.get_submodule(path)
        config = self.model.get_submodule(trunk).config
        # The library's own way for whatever is not packed, so that the model goes on working.
        config._attn_implementation = ATTENTION

        def shell(keep: tuple[str, ...], swap: dict[str, nn.Module]) -> nn.Module:
            # Probes of its own: the library hangs its hooks on them.
            return hollow(self.model, keep, {path: probes("lm", blocks, text.gives_tuple), **swap})

        first = f"{trunk}.{text.first}"
        keep, taken = [first], []
        swap: dict[str, nn.Module] = {}
        for each in self.encoders:
            tapped = each.taps.features if each.taps else ""
            taken.append(Taken(each.name, each.given, each.listed, tapped, each.form if each.in_lm else None))
            if each.in_lm:
                keep += each.last
                swap |= self._fillers((*each.first, *each.unused))
                swap[each.blocks] = self._probes(each)
        before = TextFirst(shell(tuple(keep), swap), tuple(taken))
        layers: list[nn.Module] = [before]
        added = self._added()
        for place, block in enumerate(blocks):
            alone = getattr(block, "block_type", None) in text.alone
            layer = Block(block, place, f"{path}.{place}", PACKED, alone=alone)
            layers.append(AddingBlock(layer, added[place]) if place in added else layer)
        last = (*(f"{trunk}.{name}" for name in text.last), text.head)
        layers.append(TextLast(shell(last, {first: Gap()}), ("position_ids", *text.per_token)))
        outline = self._outline(shell((), self._fillers((first,))), (first,))
        return Module(
            "lm",
            layers,
            reads="sequence",
            hidden=("tokens", config.hidden_size),
            output=("tokens", config.vocab_size),
            inputs=_ids,
            context=_TextContext(outline, text, tuple(self.encoders), len(blocks), config.hidden_size, self.dtype),
            after=tuple(encoder.name for encoder in self.encoders),
            frozen=frozen,
            kinds=("first", *self._kinds(blocks, lambda i: _layer_type(config, blocks[i], i)), "last"),
            takes={place + 1: (each.stream,) for place, each in added.items()},
        )

    def _added(self) -> dict[int, Added]:
        """What is added behind which block of the language model."""
        found: dict[int, Added] = {}
        for encoder in self.encoders:
            if encoder.taps is not None:
                method = getattr(type(self.model.get_submodule(self.text.trunk)), encoder.taps.add)
                # It asks nothing of the trunk, which no layer has as a whole.
                add = partial(method, None)
                found |= {i: Added(_stream(i), encoder.name, add) for i in range(len(encoder.taps.ends))}
        return found

    def _probes(self, encoder: Encoder) -> nn.Module:
        blocks: Any = self.model.get_submodule(encoder.blocks)
        return probes(encoder.name, blocks, encoder.gives_tuple)

    def _encoder(self, vision: Encoder, frozen: bool) -> Module:
        every: Any = self.model.get_submodule(vision.blocks)
        if vision.takes_lengths:
            # Where the library has it from: the tower, above whatever holds the blocks.
            self.model.get_submodule(".".join(vision.blocks.split(".")[:2])).config._attn_implementation = LENGTHS
        blocks, taps = every[: vision.used], vision.taps

        def shell(keep: tuple[str, ...], swap: dict[str, nn.Module]) -> nn.Module:
            found = hollow(self.model, keep, {vision.blocks: self._probes(vision), **swap})
            if taps is not None:
                setattr(found.get_submodule(taps.tower), taps.switch, ())
            return found

        width = _width(every[0])
        hidden = (width,) if vision.patches is None else (vision.patches, width)
        layers: list[nn.Module] = [EncoderFirst(shell(vision.first, {}), vision.form, vision.features)]
        for place, block in enumerate(blocks):
            layers.append(self._tapped(Block(block, place, f"{vision.blocks}.{place}", vision.form), taps))
        rows: tuple[int, ...] = hidden
        kinds = self._kinds(blocks, lambda i: vision.kinds[i] if vision.kinds else "")
        if not vision.in_lm:
            rows = self._rows(vision)
            behind = shell(vision.last, self._fillers((*vision.first, *vision.unused)))
            layers.append(EncoderLast(behind, vision.form, vision.features, rows))
            kinds = [*kinds, "last"]
        outline = self._outline(shell((), self._fillers(vision.first)), vision.first)
        return Module(
            vision.name,
            layers,
            reads=vision.reads,
            hidden=("tokens" if vision.patches is None else "instances", *hidden),
            output=("tokens" if vision.tokens is None else "instances", *rows),
            inputs=partial(_pixels, vision),
            context=_VisionContext(outline, vision, len(blocks), hidden, self.dtype),
            frozen=frozen,
            kinds=("first", *kinds),
            emits={} if taps is None else self._emits(taps, vision.merge),
        )

    def _tapped(self, block: Block, taps: Taps | None) -> Block:
        if taps is None or block.place not in taps.ends:
            return block
        path = taps.ends[block.place]
        stream = _stream(list(taps.ends).index(block.place))
        return TappedBlock(block, self.model.get_submodule(path), path, stream)

    def _emits(self, taps: Taps, merge: int) -> dict[int, dict[str, Shape | None]]:
        """The streams of each layer; layer 0 is before the blocks."""
        shape = ("tokens" if merge == 1 else f"tokens/{merge}", self.config.get_text_config().hidden_size)
        return {place + 1: {_stream(number): shape} for number, place in enumerate(taps.ends)}

    def _rows(self, vision: Encoder) -> tuple[int, ...]:
        """The encoder's output beside its first dimension."""
        width = self.config.get_text_config().hidden_size
        if vision.tokens is not None:
            return (vision.tokens, width)
        if width % vision.merge:
            raise InputError(
                "model.config", f"merges {vision.merge} patches into {width} numbers, which does not divide"
            )
        # Where patches are merged, the features of a token are stated as a row for every patch.
        return (width // vision.merge,)

    def _kinds(self, blocks: Sequence[nn.Module], what: Callable[[int], str]) -> list[str]:
        kinds = []
        for place, block in enumerate(blocks):
            size = sum(p.numel() for p in block.parameters())
            kinds.append(f"{type(block).__name__}[{' '.join(filter(None, (what(place), str(size))))}]")
        return kinds


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _stream(number: int) -> str:
    return f"deep{number}"


def _filler(part: nn.Module) -> nn.Module:
    if isinstance(part, nn.Embedding):
        return EmbeddingFiller()
    return ConvolutionFiller(part) if hasattr(part, "out_channels") else Filler()


def _layer_type(config: Any, block: nn.Module, place: int) -> str:
    """What the configuration calls a block: sliding and full attention cost unlike."""
    types = getattr(config, "layer_types", None)
    return str(types[place] if types is not None else getattr(block, "block_type", ""))


def _width(block: nn.Module) -> int:
    """Width of the state: that of the block's first norm."""
    for part in block.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1:
            return int(weight.shape[0])
    return 0


def _ids(part: Part) -> Tensor:
    return torch.cat([clean(part.samples[place])["input_ids"] for place, _ in part.instances])


def _images(vision: Encoder, part: Part) -> list[Instance]:
    every = {place: vision.images(clean(part.samples[place])) for place in {p for p, _ in part.instances}}
    return [every[place][index] for place, index in part.instances]


def _pixels(vision: Encoder, part: Part) -> Tensor:
    return _joined([image.pixels for image in _images(vision, part)])


def _given(images: Sequence[Instance]) -> dict[str, Tensor]:
    return {name: _joined([image.given[name] for image in images]) for name in images[0].given}


def _joined_shape(pixels: Sequence[Tensor]) -> tuple[int, ...]:
    return (sum(map(len, pixels)), *(max(sides) for sides in zip(*(each.shape[1:] for each in pixels), strict=True)))


def _joined(pixels: Sequence[Tensor]) -> Tensor:
    """Join images; those of other sizes are padded on the right and at the bottom."""
    shape = _joined_shape(pixels)
    if all(each.shape[1:] == shape[1:] for each in pixels):
        return torch.cat(tuple(pixels))
    out = pixels[0].new_zeros(shape)
    begin = 0
    for each in pixels:
        out[(slice(begin, begin + len(each)), *(slice(side) for side in each.shape[1:]))] = each
        begin += len(each)
    return out


@dataclass(frozen=True)
class _TextContext:
    """What the blocks of a language model are called with, for a part."""

    shell: nn.Module
    text: Text
    encoders: tuple[Encoder, ...]
    num_blocks: int
    width: int
    dtype: torch.dtype

    def __call__(self, part: Part) -> dict[str, Any]:
        text = self.text
        samples = [clean(part.samples[place]) for place, _ in part.instances]
        lengths = tuple(len(sample["input_ids"]) for sample in samples)
        outer: dict[str, Any] = {"position_ids": torch.cat([self._positions(sample) for sample in samples], dim=-1)}
        for name in text.per_token:
            values = [torch.as_tensor(sample[name]).reshape(1, -1) for sample in samples if name in sample]
            if values and len(values) != len(samples):
                raise InputError(f"sample.{name}", "is given in some samples and not in others")
            if values:
                outer[name] = torch.cat(values, dim=1)
        filling = torch.zeros((), dtype=self.dtype).expand(1, sum(lengths), self.width)
        ones = torch.ones(1, sum(lengths), dtype=torch.int64)

        def call(shell: nn.Module) -> None:
            shell(inputs_embeds=filling, attention_mask=ones, use_cache=False, **outer)

        called = {each.name: self._called(each, samples) for each in self.encoders if each.in_lm}
        for each in self.encoders:
            if each.taps is not None:
                ids = torch.cat([sample["input_ids"] for sample in samples])[None]
                called[each.name] = {"places": ids == getattr(self.shell.config, each.places)}
        found = record(self.shell, call, self.num_blocks, filling, lengths)
        for block, arguments in zip(self._blocks(), found, strict=True):
            kind = getattr(block, "block_type", None)
            if len(lengths) > 1 and not has_mask(arguments) and kind not in (*text.alone, *text.pointwise):
                raise InputError(f"a {type(block).__name__}", "is given no mask", "it cannot be packed; not supported")
        return as_context(found, {**outer, "encoders": called, "lengths": lengths})

    def _called(self, encoder: Encoder, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the encoder's end is called with, which runs in the first layer."""
        images = [image for sample in samples for image in encoder.images(sample)]
        if not images:
            return {}
        return {**_given(images), "shape": _joined_shape([image.pixels for image in images])}

    def _blocks(self) -> Any:
        return self.shell.get_submodule(f"{self.text.trunk}.{self.text.blocks}")

    def _positions(self, sample: dict[str, Any]) -> Tensor:
        find = self.text.positions
        found = None if find is None else find(self.shell, sample)
        return torch.arange(len(sample["input_ids"]))[None] if found is None else found


@dataclass(frozen=True)
class _VisionContext:
    """What the blocks of an encoder are called with, for a part."""

    shell: nn.Module
    vision: Encoder
    num_blocks: int
    hidden: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, part: Part) -> dict[str, Any]:
        images = _images(self.vision, part)
        # Neither their numbers nor those of the state matter to what the blocks are called with.
        shape = _joined_shape([image.pixels for image in images])
        pixels = images[0].pixels.new_zeros(()).expand(shape)
        given = _given(images)
        rows = sum(image.patches for image in images) if self.vision.patches is None else len(images)
        filling = torch.zeros((), dtype=self.dtype).expand(rows, *self.hidden[:-1], 1)
        filling = self.vision.form.theirs(filling)

        def call(shell: Any) -> None:
            getattr(shell, self.vision.features)(pixels, **given)

        found = record(self.shell, call, self.num_blocks, filling, None)
        return as_context(found, {**given, "shape": shape})
