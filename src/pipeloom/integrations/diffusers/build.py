"""`from_diffusers` converts a transformer of the library and its text encoder to a `Model`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers import generic
from pipeloom.integrations.diffusers.families import FAMILIES, Family
from pipeloom.integrations.diffusers.flow import FlowMatching, NoiseSampler, loss_of, noising
from pipeloom.integrations.diffusers.inputs import GenericReader
from pipeloom.integrations.diffusers.layers import (
    TransformerBlock,
    TransformerContext,
    TransformerFirst,
    TransformerLast,
    Words,
)
from pipeloom.integrations.diffusers.library import library_gradients
from pipeloom.integrations.diffusers.load import is_pipeline, load, parts_of
from pipeloom.integrations.diffusers.prompts import prompts_of
from pipeloom.integrations.diffusers.samples import Reader, inputs_of, noisy_samples, one
from pipeloom.integrations.diffusers.text import check_encoder, layer_kinds, prompts_in, text_module
from pipeloom.integrations.diffusers.weights import INDEX, KIND, STEM, DiffusersWeights, PartWeights, TransformerWeights
from pipeloom.integrations.transformers.hollow import ValueSource, hollow, note, probes
from pipeloom.integrations.transformers.modules import check_names
from pipeloom.integrations.transformers.weights import TransformersWeights
from pipeloom.runtime.checkpoint.safetensors_files import TensorFiles
from pipeloom.runtime.model.model import Model, Module, Part
from pipeloom.spec import TensorShape


@dataclass(frozen=True, eq=False)
class Source:
    """The library's parts and the options from which a model is built."""

    transformer: Any
    text_encoder: Any
    noising: NoiseSampler
    freeze: tuple[str, ...]
    examples: tuple[Any, ...] | None = None

    def doubled(self) -> Source:
        """Return a copy in double precision and evaluation mode."""
        transformer, text_encoder = copy.deepcopy((self.transformer, self.text_encoder))
        for each in (transformer, text_encoder):
            if each is not None:
                nn.Module.double(each).eval()
        return replace(self, transformer=transformer, text_encoder=text_encoder)


@dataclass(frozen=True, eq=False)
class DiffusersModel(Model):
    """A `Model` that consists of the layers of a transformer of the `diffusers` library.

    Its ``describe`` returns the sizes of a sample. The ``id`` is the sample's own, or a digest of its contents.
    """

    _: KW_ONLY
    source: Source
    reader: Reader | GenericReader
    names: dict[str, str] = field(repr=False)

    def library_names(self) -> dict[str, str]:
        """Return the library's name of each parameter ``module.layer.parameter``.

        It begins with the part's folder in a pipeline: ``transformer`` or ``text_encoder``.
        """
        return dict(self.names)

    def beside_library(self, batch: Sequence[Any]) -> tuple[DiffusersModel, float, dict[str, Tensor]]:
        """Return a copy in double precision and evaluation mode, and the library's loss and gradients of a batch."""
        if any(p.is_meta for module in self.modules for layer in module.layers for p in layer.parameters()):
            raise InputError("model", "is on the meta device", 'create it without device="meta"')
        source = self.source.doubled()
        if isinstance(self.reader, Reader):
            found = library_gradients(source.transformer, source.text_encoder, self.reader, source.noising, batch)
        else:
            found = generic.library_gradients(
                source.transformer, self.reader, source.noising, batch, source.text_encoder
            )
        return build(self.source.doubled()), *found


def from_diffusers(
    model: Any,
    text_encoder: Any = None,
    *,
    scheduler: Any = None,
    freeze: Sequence[str] = ("text",),
    device: torch.device | str | None = None,
    flow: FlowMatching = FlowMatching(),  # noqa: B008 - frozen
    examples: Sequence[Any] | None = None,
) -> DiffusersModel:
    """Convert a diffusion transformer of the `diffusers` library to a `Model`.

    It is trained by flow matching: given a noisy sample and the time, the transformer predicts the velocity from the
    sample to the noise. The loss is the mean squared error, averaged over samples, as in the library's training
    scripts. The library's layers are shared, so the original model can still be used.

    A sample is a mapping with ``latents`` of shape (channels, frames, height, width) from the autoencoder, and a
    prompt: ``input_ids`` and optionally ``attention_mask`` from the pipeline's tokenizer, or ``prompt_embeds`` if there
    is no text encoder.

    Parameters
    ----------
    model : diffusers.ModelMixin, diffusers.DiffusionPipeline, str or pathlib.Path
        A transformer, a pipeline with a transformer, or the folder of a saved one.
    text_encoder : transformers.PreTrainedModel or None
        A T5 or UMT5 encoder for a transformer without a pipeline. If None, samples have ``prompt_embeds``.
    scheduler : diffusers.SchedulerMixin or None
        Scheduler with the times and sigmas of training. None for the pipeline's, or else the library's defaults.
    freeze : sequence of str
        Modules that are not trained: ``"text"`` (all modules of the text encoder), or the name of any module of the
        result, such as ``"transformer"``, ``"condition"`` (the projection of the prompt to the transformer's width)
        or ``"vision"``.
    device : torch.device, str or None
        Device on which the parts of a folder are created. With ``"meta"``, only shapes are created, and in training
        each rank reads the weights of its own layers from the folder. None for the CPU.
    flow : FlowMatching
        Distribution and weighting of times, and the seed.
    examples : sequence of mapping or None
        Two or more samples of different sizes for a class that is not known by name. With them, its layers are tested
        on a small model. None lets Pipeloom make samples up.

    Returns
    -------
    DiffusersModel
        A `Model` with ``describe``, which returns the sizes of a sample.

    Raises
    ------
    InputError
        The architecture or one of its options is not supported, or ``freeze`` names no module.
    """
    folder = Path(model) if isinstance(model, (str, Path)) else None
    if folder is not None:
        parts = load(folder, device, trains_text="text" not in freeze)
    elif device is not None:
        raise InputError("device", f"is {str(device)!r}, but the model exists already", "leave it out")
    else:
        parts = dict(getattr(model, "components", {"transformer": model}))
    if parts.get("transformer_2") is not None:
        raise InputError("model", "has two transformers, each for some of the times", "give one of them")
    transformer = parts.get("transformer")
    encoder = parts.get("text_encoder") if text_encoder is None else text_encoder
    own = parts.get("scheduler")
    drawing = noising(flow, own if scheduler is None else scheduler)
    tried = None if examples is None else tuple(examples)
    made = build(Source(transformer, encoder, drawing, tuple(freeze), tried))
    # "text" names all modules of the prompt, and it is the default without a text encoder too.
    check_names(freeze, list(dict.fromkeys(["text", *(module.name for module in made.modules)])))
    # The pipeline's own scheduler is saved, because the one passed here only applies to training.
    written = {**parts, "scheduler": scheduler if own is None else own}
    return replace(made, pretrained=_weights(transformer, encoder, made.names, written, folder))


def shapes(folder: Path, names: Mapping[str, str]) -> tuple[dict[str, Tensor], DiffusersWeights]:
    """Return the shapes of the trained tensors, and the writer of their weights.

    Nothing is tested again: ``names`` are those of the model that was trained. The folder may lack weights. Raise
    `InputError` if a part of it lacks one of the tensors.
    """
    parts = load(folder, "meta", trains_text=True, checks_text=False)
    theirs = {
        f"{part}.{name}": tensor
        for part in ("transformer", "text_encoder")
        for name, tensor in (parts[part].state_dict().items() if part in parts else ())
    }
    # The source may be a transformer's folder. Then only its weights are exported.
    own = {ours: name for ours, name in names.items() if name.partition(".")[0] in parts}
    for name in own.values():
        if name not in theirs:
            raise InputError(f"{folder}: {name}", "is not a parameter of this model", "give the model's own folder")
    made = _weights(parts["transformer"], parts.get("text_encoder"), own, parts, folder)
    return {ours: theirs[name] for ours, name in own.items()}, made


def _weights(
    transformer: Any, encoder: Any, names: Mapping[str, str], parts: Mapping[str, Any], folder: Path | None
) -> DiffusersWeights:
    """Return the reader and writer of the weights of a pipeline's parts."""
    pipeline = folder is not None and is_pipeline(folder)
    place = "transformer/" if pipeline or encoder is not None else ""
    own = folder / "transformer" if folder is not None and pipeline else folder
    read = _files_to_read(transformer, own, STEM)
    found: dict[str, PartWeights] = {place: TransformerWeights(transformer, _part_names(names, "transformer"), read)}
    unread = set() if read else {place}
    is_whole = encoder is parts.get("text_encoder")
    if encoder is not None:
        own = folder / "text_encoder" if folder is not None and is_whole else None
        read = _files_to_read(encoder, own)
        text_names = _part_names(names, "text_encoder")
        found["text_encoder/"] = TransformersWeights(encoder, text_names, own, is_loaded=read is None)
        unread |= set() if read else {"text_encoder/"}
    beside, others = {}, list[str]()
    if place and parts.get("scheduler") is not None:
        beside["scheduler/scheduler_config.json"] = parts["scheduler"].to_json_string()
    if folder is not None and (folder / INDEX).is_file():
        beside[INDEX] = (folder / INDEX).read_text(encoding="utf-8")
        others = [name for name in parts_of(folder) if (folder / name).is_dir() and f"{name}/" not in found]
    origin = f"{KIND}:{folder.resolve() if folder is not None and is_whole else ''}"
    return DiffusersWeights(found, names, folder, origin, frozenset(unread), beside, tuple(others))


def _part_names(names: Mapping[str, str], part: str) -> dict[str, str]:
    """Return the library's names within one part."""
    begin = f"{part}."
    return {ours: name.removeprefix(begin) for ours, name in names.items() if name.startswith(begin)}


def _files_to_read(model: Any, folder: Path | None, stem: str = "model") -> Path | None:
    """Return the folder if the part is on the meta device and the folder has weights."""
    is_shapes = any(parameter.is_meta for parameter in model.parameters())
    return folder if folder is not None and is_shapes and TensorFiles.are_in(folder, stem) else None


def build(source: Source) -> DiffusersModel:
    """Build the model from its parts."""
    transformer, encoder = source.transformer, source.text_encoder
    if not hasattr(type(transformer), "from_config"):
        raise InputError("model", f"is a {type(transformer).__name__}", "give a transformer of the diffusers library")
    if getattr(transformer, "is_gradient_checkpointing", False):
        remedy = "turn it off by model.disable_gradient_checkpointing(); plans choose what is recomputed"
        raise InputError("model", "recomputes its blocks itself", remedy)
    if getattr(transformer, "is_cache_enabled", False):
        raise InputError("model", "caches outputs of its blocks for later steps", "call model.disable_cache()")
    family = FAMILIES.get(type(transformer).__name__)
    if family is None or family.differs(transformer.config):
        return _generic(source)
    projection = transformer.get_submodule(family.words)
    width = int(next(projection.parameters()).shape[1])
    if encoder is not None:
        check_encoder(encoder, width)
    reader = Reader(transformer.config, family, width, encoder is not None)
    modules = [] if encoder is None else [text_module(encoder, reader.prompt, "text" in source.freeze)]
    modules += _Builder(source, family, reader).modules()
    return DiffusersModel(
        modules,
        partial(_loss, reader, source.noising),
        one,
        name=type(transformer).__name__,
        targets="samples",
        describe=reader.describe,
        source=source,
        reader=reader,
        names=_names(source, modules),
    )


def _generic(source: Source) -> DiffusersModel:
    """Build a model whose class is not known by name."""
    transformer = source.transformer
    encoder = source.text_encoder
    prompts = None if encoder is None else prompts_of(encoder, source.freeze)
    accepted = generic.accept(transformer, source.examples, prompts is not None)
    reader = accepted.reader(prompts)
    modules = [*(prompts.modules if prompts is not None else ())]
    after = () if prompts is None else (prompts.name,)
    frozen = "transformer" in source.freeze
    modules.append(generic.build_module(transformer, reader, source.noising, frozen, after))
    return DiffusersModel(
        modules,
        generic.total,
        one,
        name=type(transformer).__name__,
        targets="samples",
        describe=reader.describe,
        excluded=accepted.excluded,
        source=source,
        reader=reader,
        names=_names(source, modules),
    )


def _names(source: Source, modules: Sequence[Module]) -> dict[str, str]:
    """Return the library's name of each parameter. Raise `InputError` if a parameter belongs to no layer."""
    theirs: dict[int, str] = {}
    for folder, part in (("transformer", source.transformer), ("text_encoder", source.text_encoder)):
        for name, tensor in part.state_dict(keep_vars=True).items() if part is not None else ():
            theirs.setdefault(id(tensor), f"{folder}.{name}")
    names, held = {}, set()
    for module in modules:
        for number, layer in enumerate(module.layers):
            for name, tensor in layer.state_dict(keep_vars=True).items():
                if id(tensor) in theirs:
                    names[f"{module.name}.{number}.{name}"] = theirs[id(tensor)]
                    held.add(id(tensor))
    for key, name in theirs.items():
        # Some text encoders have a second embedding table that they do not use. A language model's head is not used.
        if key not in held and name not in ("text_encoder.shared.weight", "text_encoder.lm_head.weight"):
            raise InputError(f"parameter {name!r}", "belongs to no layer", "this form of the model is not supported")
    return names


def _loss(reader: Reader, noising: NoiseSampler, output: Tensor, part: Part) -> Tensor:
    """Return the sum over samples of the weighted mean squared error of the prediction."""
    items = reader.items(part)
    losses, begin = [], 0
    for item, noised in zip(items, noisy_samples(noising, items, part), strict=True):
        target = reader.enter(noised.target)
        predicted = output[begin : begin + item.video.tokens].reshape(target.shape)
        losses.append(loss_of(predicted, replace(noised, target=target)))
        begin += item.video.tokens
    return torch.stack(losses).sum()


class _Builder:
    """Builds the modules of one transformer."""

    def __init__(self, source: Source, family: Family, reader: Reader) -> None:
        self.model, self.freeze, self.family, self.reader = source.transformer, source.freeze, family, reader
        self.noising = source.noising
        self.encodes = source.text_encoder is not None
        first = self.model.get_submodule(family.first)
        self.dtype = first.weight.dtype
        self.width = int(first.weight.shape[0])
        self.blocks: Any = self.model.get_submodule(family.blocks)

    def modules(self) -> list[Module]:
        return [self._condition(), self._transformer()]

    def _shape(self, *dims: int | str) -> TensorShape:
        return TensorShape(dims, str(self.dtype)[6:])

    def _condition(self) -> Module:
        family, rows = self.family, self._shape("tokens", self.width)
        emits: dict[str, Any] = {"words": rows}
        if family.pads:
            emits["padding"] = self._shape("instances", self.width)
        return Module(
            "condition",
            [Words(self.model.get_submodule(family.words), self.dtype, family.pads)],
            reads="text",
            output=rows,
            inputs=None if self.encodes else partial(prompts_in, self.reader.prompt),
            context=_count,
            after=("text",) if self.encodes else (),
            frozen="condition" in self.freeze,
            kinds=("words",),
            emits={0: emits},
        )

    def _transformer(self) -> Module:
        family = self.family
        layers: list[nn.Module] = [TransformerFirst(self._first(), self.dtype)]
        layers += [TransformerBlock(block, self.dtype) for block in self.blocks]
        layers.append(TransformerLast(self._shell(family.last, family.given), self.dtype))
        numbers = self.model.get_submodule("proj_out").out_features
        taken = ("words", "modulation", "padding") if family.pads else ("words", "modulation")
        outline = self._shell((), family.given, with_rope=True)
        return Module(
            "transformer",
            layers,
            reads="videos",
            hidden=self._shape("tokens", self.width),
            output=self._shape("tokens", numbers),
            inputs=partial(inputs_of, self.reader, self.noising, self.dtype),
            context=TransformerContext(outline, family, self.reader, len(self.blocks), self.width, self.dtype),
            frozen="transformer" in self.freeze,
            kinds=layer_kinds(layers),
            emits={
                0: {
                    "modulation": self._shape("instances", 6 * self.width),
                    "time": self._shape("instances", self.width),
                }
            },
            takes={**{1 + i: taken for i in range(len(self.blocks))}, 1 + len(self.blocks): ("time",)},
        )

    def _first(self) -> nn.Module:
        family = self.family
        shell = self._shell((family.first, *family.clock_parts), {family.words: "words"})
        names = family.given[family.clock]
        assert isinstance(names, tuple)
        note(shell.get_submodule(family.clock), names)
        return shell

    def _shell(self, keep: tuple[str, ...], given: Any, with_rope: bool = False) -> nn.Module:
        """Return the transformer with some of its parts, and replacements of the others."""
        family = self.family
        swap: dict[str, nn.Module] = {path: ValueSource(names) for path, names in given.items()}
        swap[family.blocks] = probes("transformer", self.blocks)
        if not with_rope:
            swap["rope"] = ValueSource("rope")
        if family.first not in keep:
            # A convolution keeps the sides of the latents apart.
            is_convolution = hasattr(self.model.get_submodule(family.first), "out_channels")
            swap[family.first] = ValueSource("sides" if is_convolution else "tokens")
        return hollow(self.model, keep, swap)


def _count(part: Part) -> dict[str, Any]:
    return {"count": len(part.instances)}
