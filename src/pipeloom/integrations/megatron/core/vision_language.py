"""Cut Megatron Core's vision-language models by modality: layers of the encoder are stages of their own."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from pipeloom.errors import ExecutionError, InputError
from pipeloom.integrations.megatron.core.modality import ImageRange, ModalityCut

AFTER_ENCODER = ("ln_post", "vision_projection", "input_projections")
"""Submodules of Megatron's vision models, `LLaVAModel` and MIMO that run after the layers of the encoder."""


class _BlockEnd(Exception):
    """Leaves the forward of an encoder at the end of its transformer block, with the block's output."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class NumberedLayers(nn.ModuleList):
    """Consecutive layers of a block, from number ``first``, so that their weights have the names of the whole model."""

    def __init__(self, layers: Iterable[nn.Module], first: int) -> None:
        super().__init__()
        self.first = first
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def _get_abs_string_index(self, idx: Any) -> str:
        index = operator.index(idx)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range")
        return str(index % len(self) + self.first)


class ModalityChunk(MegatronModule):  # type: ignore[misc]
    """A chunk of a vision-language model. Attributes, and names in checkpoints, are those of Megatron's model."""

    def __init__(self, calls: LlavaCalls, cut: ModalityCut) -> None:
        super().__init__(config=calls.model.config)
        self.model, self.calls, self.cut = calls.model, calls, cut

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict_for_save_checkpoint(*args, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.sharded_state_dict(*args, **kwargs)


class EncoderChunk(ModalityChunk):
    """Some layers of an encoder of images: from the first of ``layers`` to before the second.

    The first chunk of the encoder also has what comes before its layers, such as the embedding of patches, and the last
    one what comes after them, such as the projector, and the submodules named ``after``. Its forward takes the
    arguments of Megatron's whole model for a microbatch, and encodes the images that are noted in its `cut`.

    The chunk runs the forward of Megatron's own model. In place of what other chunks have, it has weights of zeros that
    are no parameters: a later chunk runs what comes before the layers only for the shapes and for the arguments of the
    layers, such as positions.
    """

    def __init__(self, calls: LlavaCalls, cut: ModalityCut, *, layers: tuple[int, int], after: Sequence[str]) -> None:
        super().__init__(calls, cut)
        self.pre_process, self.post_process = False, False
        self._tied: tuple[Any, ...] = ()
        """The first chunk of the language model, if it is on this rank."""
        self._is_first, self._is_last = cut.stage == 0, cut.stage == cut.num_encoder - 1
        self._left_block = False
        block = _block_of(calls.encoder)
        first, end = layers
        block.layers = NumberedLayers(list(block.layers)[first:end], first)
        block.num_layers_per_pipeline_rank = end - first
        block.pre_process = self._is_first
        self._block = (block,)
        self._end_block(block)
        self._leave_out(calls.encoder, block, {*AFTER_ENCODER, *after})

    def _end_block(self, block: TransformerBlock) -> None:
        """Note the end of the block, and leave the encoder there unless this chunk has what comes after it."""
        run = block.forward
        if not self._is_last:
            block.final_layernorm = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            self._left_block = True
            if not self._is_last:
                raise _BlockEnd(output)
            return output

        block.forward = forward

    def _leave_out(self, root: nn.Module, block: TransformerBlock, after: set[str]) -> None:
        """Replace the parameters that belong to other chunks."""
        inside = set(block.modules())
        for name, module in root.named_modules():
            if module in inside:
                continue
            is_after = not after.isdisjoint(name.split("."))
            if self._is_last if is_after else self._is_first:
                continue
            parameters = list(module.named_parameters(recurse=False))
            for own, parameter in parameters:
                delattr(module, own)
                # Expanded from one element, so that it takes no memory.
                blank = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
                module.register_buffer(own, blank, persistent=False)
            if parameters and not is_after:
                module.register_forward_pre_hook(self._checked(name))

    def _checked(self, name: str) -> Callable[..., None]:
        def check(*_: Any) -> None:
            if self._left_block:
                raise InputError(name, "runs after the layers of the encoder", "name it in `after`")

        return check

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """Whether the language model on this rank ties its embeddings; Megatron asks the first chunk of a rank."""
        return bool(self._tied) and bool(self._tied[0].share_embeddings_and_output_weights)

    def shared_embedding_or_output_weight(self) -> Any:
        """Return the embedding of the language model on this rank."""
        return self._tied[0].shared_embedding_or_output_weight() if self._tied else None

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the output of the chunk before."""
        self._block[0].set_input_tensor(_only(input_tensor))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoded images, and the mask of the loss as it was given."""
        images = self.cut.images
        if images is None:
            raise ExecutionError("a chunk of an encoder runs only by a plan; call planned_forward_backward")
        call = inspect.signature(self.model.forward).bind(*args, **kwargs).arguments
        self._left_block = False
        try:
            output = self.calls.encode(call, images, self._is_first)
        except _BlockEnd as end:
            output = end.output
        finally:
            self._block[0].set_input_tensor(None)
        return output, call.get("loss_mask")


class LanguageChunk(ModalityChunk):
    """A chunk of the language model. The first one merges the encoded images with the text.

    Its forward takes the arguments of Megatron's whole model.
    """

    def __init__(self, calls: LlavaCalls, cut: ModalityCut) -> None:
        super().__init__(calls, cut)
        language = calls.language
        self.pre_process, self.post_process = language.pre_process, language.post_process
        self.share_embeddings_and_output_weights = language.share_embeddings_and_output_weights

    def shared_embedding_or_output_weight(self) -> Any:
        """Return the embedding of the language model."""
        return self.calls.language.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the encoded images, or the output of the chunk before."""
        given = _only(input_tensor)
        if self.cut.stage > self.cut.num_encoder:
            self.calls.language.set_input_tensor(given)
        else:
            self.calls.set_images(given)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the language model, and the mask of its loss."""
        if self.cut.stage == self.cut.num_encoder:
            return self.calls.merge(args, kwargs)
        return self.calls.go_on(args, kwargs)


class LlavaCalls:
    """How a `LLaVAModel` is called for its encoder and for its language model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def encoder(self) -> Any:
        """The module with the encoder and its projector."""
        return self.model

    @property
    def language(self) -> Any:
        return self.model.language_model

    def prepare(self) -> None:
        """Check a model that was built for one chunk, and change what a plan does not need.

        Raises `InputError` for a model that encodes images in a way that cannot be cut.
        """
        model = self.model
        if model._tile_tags is not None:
            raise InputError("tile_tags", "need the embedding of text in the encoder", "leave them out")
        if getattr(model, "dynamic_resolution", False):
            raise InputError("dynamic_resolution", "packs all images to one sequence", "give images of one size")
        if model.config.variable_seq_lengths:
            # Otherwise it pads all sequences to the longest one wherever there is a pipeline.
            model._language_is_pipeline_parallel = False

    def encode(self, call: dict[str, Any], images: ImageRange, is_first: bool) -> Tensor:
        """Return the encoded images, an image a row.

        ``call`` has the arguments of the whole model for the microbatch. Unless the chunk ``is_first``, which embeds
        patches, it needs no images, so that its rank need not read them.
        """
        model = self.model
        if is_first:
            pixels = _rows(call.get("images"), "images", images)
        else:
            vision = model.vision_model
            shape = images.end - images.first, 3, vision.img_h, vision.img_w
            parameter = next(model.parameters())
            pixels = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(shape)
        output, _ = model(pixels, None, None, None)
        encoded: Tensor = output.transpose(0, 1).contiguous()
        return encoded

    def set_images(self, encoded: Tensor | None) -> None:
        """Set the encoded images of the next forward; None if it has none."""
        if encoded is None:
            parameter = next(self.model.parameters())
            self.model.encoder_hidden_state = torch.zeros(0, 0, 0, dtype=parameter.dtype, device=parameter.device)
        else:
            self.model.encoder_hidden_state = encoded.transpose(0, 1).contiguous()

    def merge(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first chunk of the language model."""
        try:
            return self.model(*args, **kwargs)
        finally:
            self.model.encoder_hidden_state = None

    def go_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a later chunk of the language model."""
        return self.model(*args, **kwargs)


class MimoCalls(LlavaCalls):
    """How a `MimoModel` with one modality is called for its encoder and for its language model."""

    @property
    def encoder(self) -> Any:
        (found,) = self.model.modality_submodules.values()
        return found

    def prepare(self) -> None:
        modalities = self.model.modality_submodules
        if len(modalities) != 1:
            names = ", ".join(modalities) or "none"
            raise InputError("modality_submodules_spec", f"has {names}", "give the submodules of one modality, images")

    def encode(self, call: dict[str, Any], images: ImageRange, is_first: bool) -> Tensor:
        """Return the encoded images, a token a row."""
        ((name, submodules),) = self.model.modality_submodules.items()
        given = (call.get("modality_inputs") or {}).get(name)
        if given is None:
            raise ExecutionError(f"modality_inputs[{name!r}] is missing; read the data on all pipeline ranks")
        dtype = None if is_first else next(self.model.parameters()).dtype
        encoded: Tensor = submodules.forward(encoder_inputs=_selected(given, images, dtype))
        return encoded

    def set_images(self, encoded: Tensor | None) -> None:
        (name,) = self.model.special_token_ids
        self.model.modality_submodules[name] = _Encoded(encoded)

    def merge(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ((name, encoded),) = self.model.modality_submodules.items()
        call = inspect.signature(self.model.forward).bind(*args, **kwargs).arguments
        try:
            return self.model(**call | {"modality_inputs": {name: {}}})
        finally:
            encoded.tensor = None

    def go_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = inspect.signature(self.model.forward).bind(*args, **kwargs).arguments
        output = self.model.language_model(
            input_ids=None,
            position_ids=None,
            decoder_input=None,
            labels=call.get("labels"),
            attention_mask=call.get("attention_mask"),
        )
        return output, call.get("loss_mask")


class _Encoded(nn.Module):
    """Stands for the submodules of a modality where its output is there already."""

    def __init__(self, tensor: Tensor | None) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, **_: Any) -> Tensor | None:
        return self.tensor


@dataclass
class VisionLanguageProvider:
    """Builds the chunks of a vision-language model, as Megatron-LM's training script asks for them.

    Pass it to ``pretrain`` in place of your ``model_provider``, and give the script
    ``encoder_chunks + language_chunks`` virtual stages on each pipeline rank. The first ones of a rank are chunks of
    the encoder: of p ranks, chunk i of rank r is stage i·p + r of the encoder. The others are chunks of the language
    model, which Megatron divides as without the encoder.

    Attributes
    ----------
    model : callable
        Builds a `LLaVAModel` or a `MimoModel` from the keywords ``pre_process``, ``post_process``, ``add_encoder``,
        ``add_decoder`` and ``vp_stage``; with ``config`` and ``pg_collection`` if the script gives them. The encoder is
        built as for a pipeline of one rank. ``vp_stage`` counts the chunks of the language model on this rank; it is
        None if there is one, and 0 for the encoder.
    encoder_chunks, language_chunks : int
        Number of chunks on each pipeline rank.
    most_images : int or None
        Most images that pass through the encoder together; None: all of a microbatch.
    encoder_layers : sequence of int or None
        Number of layers of each chunk of the encoder, by stage. None: as even as possible.
    after : sequence of str
        Names of submodules that run after the layers of the encoder, beside `AFTER_ENCODER`.
    """

    model: Callable[..., Any]
    encoder_chunks: int = 1
    language_chunks: int = 1
    most_images: int | None = None
    encoder_layers: Sequence[int] | None = None
    after: Sequence[str] = ()
    _first: list[EncoderChunk] = field(default_factory=list, repr=False)
    """First chunk of this rank."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("encoder_chunks", "language_chunks", "most_images"):
            value = getattr(self, name)
            if (value is not None or name != "most_images") and (not isinstance(value, int) or value < 1):
                raise InputError(name, f"is {value!r}", "give a whole number from 1")

    def __call__(
        self, *, vp_stage: int | None = None, config: Any = None, pg_collection: Any = None, **more: Any
    ) -> nn.Module:
        """Build one chunk of this rank.

        Parameters
        ----------
        vp_stage : int
            Number of the chunk on this rank.
        config, pg_collection, more
            Passed to ``model``. The number of virtual stages in ``config`` is that of the language model there.
            ``pre_process`` and ``post_process`` are not: encoder and language model have a first and a last chunk each.
        """
        more = {name: value for name, value in more.items() if name not in ("pre_process", "post_process")}
        size, rank = _pipeline(pg_collection)
        every = self.encoder_chunks + self.language_chunks
        if vp_stage is None or not 0 <= vp_stage < every:
            raise InputError(
                "vp_stage",
                f"is {vp_stage}, and a rank has {every} chunks",
                f"train with {every} virtual stages on each pipeline rank, --num-virtual-stages-per-pipeline-rank",
            )
        if config is not None:
            more["config"] = copy.copy(config)
            more["config"].virtual_pipeline_model_parallel_size = self._virtual
        if pg_collection is not None:
            more["pg_collection"] = pg_collection
        stage, numbers = vp_stage * size + rank, (self.encoder_chunks * size, self.language_chunks * size)
        cut = ModalityCut(stage, *numbers, self.most_images)
        chunk = self._encoder(cut, more) if cut.encodes else self._language(cut, vp_stage - self.encoder_chunks, more)
        chunk.vp_stage = vp_stage
        if vp_stage == 0:
            assert isinstance(chunk, EncoderChunk)
            self._first = [chunk]
        elif self._first and not cut.encodes and chunk.pre_process:
            self._first[0]._tied = (chunk,)
        return chunk

    @property
    def _virtual(self) -> int | None:
        return self.language_chunks if self.language_chunks > 1 else None

    def _encoder(self, cut: ModalityCut, more: dict[str, Any]) -> EncoderChunk:
        # MIMO's functions also build a language model, with the configuration of one with virtual stages.
        ends = {"pre_process": False, "post_process": False, "vp_stage": None if self._virtual is None else 0}
        model = self.model(add_encoder=True, add_decoder=False, **ends, **more)
        calls = _calls(model)
        calls.prepare()
        if isinstance(getattr(model, "language_model", None), nn.Module):
            del model.language_model
        # Tokens of an image in the language model; MIMO does not say.
        cut.image_size = int(getattr(model, "img_seq_len", 1))
        layers = self._layers(len(_block_of(calls.encoder).layers), cut)
        return EncoderChunk(calls, cut, layers=layers, after=self.after)

    def _layers(self, total: int, cut: ModalityCut) -> tuple[int, int]:
        """Return the first layer and the end of a stage of the encoder.

        All ranks raise `InputError` if a stage has no layer, or the stages have not all layers.
        """
        count = cut.num_encoder
        counts = self.encoder_layers or [total * (i + 1) // count - total * i // count for i in range(count)]
        if count > total:
            raise InputError(
                "encoder_chunks",
                f"is {self.encoder_chunks}, for {count} stages of the encoder, which has {total} layers",
                f"give at most {total * self.encoder_chunks // count}",
            )
        if len(counts) != count or sum(counts) != total or min(counts) < 1:
            raise InputError(
                "encoder_layers",
                f"is {list(counts)}, the encoder has {count} stages and {total} layers",
                "give every stage at least one layer",
            )
        first = sum(counts[: cut.stage])
        return first, first + counts[cut.stage]

    def _language(self, cut: ModalityCut, number: int, more: dict[str, Any]) -> LanguageChunk:
        pre_process, post_process = cut.stage == cut.num_encoder, cut.stage == cut.num_encoder + cut.num_language - 1
        vp_stage = None if self._virtual is None else number
        model = self.model(
            pre_process=pre_process,
            post_process=post_process,
            add_encoder=False,
            add_decoder=True,
            vp_stage=vp_stage,
            **more,
        )
        calls = _calls(model)
        if type(calls) is LlavaCalls:
            calls.prepare()
            if self._first:
                # Megatron counts one class token wherever there is no encoder.
                model.img_seq_len = self._first[0].cut.image_size
        else:
            model.modality_submodules = nn.ModuleDict()
        language = calls.language
        if (language.pre_process, language.post_process) != (pre_process, post_process):
            raise InputError(
                "model", "builds the language model with another pre_process or post_process", "pass on both"
            )
        found = language.config.virtual_pipeline_model_parallel_size
        if (found or 1) != self.language_chunks:
            raise InputError(
                "config.virtual_pipeline_model_parallel_size",
                f"is {found}, and a rank has {self.language_chunks} chunks of the language model",
                f"set it to {self._virtual}",
            )
        return LanguageChunk(calls, cut)


def vision_language_chunks(
    model: Callable[..., Any],
    *,
    encoder_chunks: int = 1,
    language_chunks: int = 1,
    most_images: int | None = None,
    encoder_layers: Sequence[int] | None = None,
    after: Sequence[str] = (),
    pg_collection: Any = None,
) -> list[nn.Module]:
    """Return the chunks of a vision-language model on this rank, for `planned_forward_backward`.

    Layers of the encoder are stages of their own, on every pipeline rank. The images of a microbatch pass through them
    in sub-microbatches. For the parameters, see `VisionLanguageProvider`, which does the same for Megatron-LM's
    training script.

    Raises
    ------
    InputError
        When the model cannot be cut like this.
    """
    provider = VisionLanguageProvider(model, encoder_chunks, language_chunks, most_images, encoder_layers, after)
    every = encoder_chunks + language_chunks
    return [provider(vp_stage=number, pg_collection=pg_collection) for number in range(every)]


def _calls(model: Any) -> LlavaCalls:
    """Return how a model is called; raises `InputError` for one of no known kind."""
    if hasattr(model, "modality_submodules"):
        return MimoCalls(model)
    if hasattr(model, "vision_projection"):
        return LlavaCalls(model)
    raise InputError("model", f"returns a {type(model).__name__}", "return a LLaVAModel or a MimoModel")


def _block_of(encoder: nn.Module) -> Any:
    """Return the transformer block of an encoder; raises `InputError` if it has none, several, or a part of one."""
    blocks: list[Any] = [module for module in encoder.modules() if isinstance(module, TransformerBlock)]
    if len(blocks) != 1:
        raise InputError(
            type(encoder).__name__,
            f"has {len(blocks)} transformer blocks",
            "build an encoder with one TransformerBlock of Megatron Core",
        )
    found, wanted = len(blocks[0].layers), blocks[0].config.num_layers
    if found != wanted:
        raise InputError(
            "the encoder",
            f"is built with {found} of {wanted} layers",
            "set pipeline_model_parallel_size to 1 in its configuration",
        )
    return blocks[0]


def _pipeline(groups: Any) -> tuple[int, int]:
    """Return the number of pipeline ranks, and this one."""
    if groups is not None:
        return groups.pp.size(), groups.pp.rank()
    return (parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank())


def _only(input_tensor: Any) -> Any:
    return input_tensor[0] if isinstance(input_tensor, list) else input_tensor


def _rows(tensor: Any, name: str, images: ImageRange) -> Tensor:
    """Return the rows of some images; raises `ExecutionError` unless every image of the microbatch has a row."""
    count = len(tensor) if isinstance(tensor, Tensor) else 0
    if count != len(images.lengths):
        raise ExecutionError(
            f"{name} has {count} images, the plan {len(images.lengths)}; correct options.images, or read the data on "
            "the rank of the encoder's first stage"
        )
    found: Tensor = tensor[images.first : images.end]
    return found


def _selected(value: Any, images: ImageRange, dtype: torch.dtype | None) -> Any:
    """Return the inputs of an encoder for some images, with floats cast to a type.

    Tensors with a row for each image, or for each unit of the images' sizes, such as patches, are cut.
    """
    if isinstance(value, dict):
        return {name: _selected(each, images, dtype) for name, each in value.items()}
    if not isinstance(value, Tensor) or not value.dim():
        return value
    before, inside = sum(images.lengths[: images.first]), images.signature[1]
    if len(value) == len(images.lengths):
        value = value[images.first : images.end]
    elif len(value) == sum(images.lengths):
        value = value[before : before + inside]
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
