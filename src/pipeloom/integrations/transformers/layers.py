"""The layers that Pipeloom runs: the library's blocks with their arguments, and the parts before and after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.integrations.transformers.hollow import Arguments, BlockReached, HollowRun, Probe, outputs_of, run_with
from pipeloom.integrations.transformers.packed import Calls, Mask
from pipeloom.runtime.model.model import Emit


@dataclass(frozen=True)
class Form:
    """Shape of the hidden state in the library's blocks, compared with the shape that passes between layers."""

    packs: bool = False
    """Whether the library has a leading batch dimension of size 1."""
    group: int | None = None
    """Rows per image, if the library has a separate dimension for them. Between layers there is one dimension."""

    def theirs(self, state: Tensor) -> Tensor:
        """Return the hidden state in the library's shape."""
        if self.group is not None:
            return state.reshape(-1, self.group, state.shape[-1])
        return state[None] if self.packs else state

    def ours(self, state: Tensor) -> Tensor:
        """Return the hidden state in the shape that passes between layers."""
        if self.group is not None:
            return state.reshape(-1, state.shape[-1])
        return state[0] if self.packs else state


PLAIN, PACKED = Form(), Form(packs=True)


class LibraryLayer(nn.Module):
    """A layer that knows the library's names of its parameters."""

    def library_name(self, parameter: str) -> str:
        """Return the library's name of a parameter of this layer."""
        raise NotImplementedError


class Block(LibraryLayer):
    """A block of the library, called with the arguments that the library's own forward pass gives it."""

    def __init__(self, inner: nn.Module, place: int, path: str, form: Form, *, alone: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.place, self.path, self.form, self.alone = place, path, form, alone

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return f"{self.path}.{parameter.removeprefix('inner.')}"

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Map the hidden state of packed sequences, which has no batch dimension."""
        arguments = calls.block(self.place, tensors)
        if not self.alone:
            return self.form.ours(self._call(self.form.theirs(x), arguments))
        lengths = calls.outer["lengths"]
        return torch.cat([self._call(each[None], arguments)[0] for each in torch.split(x, lengths)])

    def _call(self, x: Tensor, arguments: Arguments) -> Tensor:
        args, kwargs = arguments
        out: Tensor = outputs_of(self.inner(x, *args, **kwargs))[0]
        return out


class OneByOne(LibraryLayer):
    """A layer of a language model that is called once per sequence."""

    def __init__(self, inner: LibraryLayer) -> None:
        super().__init__()
        self.inner = inner

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return self.inner.library_name(parameter.removeprefix("inner."))

    def forward(self, x: Tensor, *upstream: Tensor, calls: tuple[Calls, ...], **tensors: Tensor) -> Tensor:
        """Map the rows of all sequences. ``upstream`` holds the outputs of the encoders."""
        pieces = torch.split(x, [length for each in calls for length in each.outer["lengths"]])
        counts = [each.outer["counts"] for each in calls]
        given = [torch.split(rows, [count[i] for count in counts]) for i, rows in enumerate(upstream)]
        rows_of = zip(*given, strict=True) if given else ((),) * len(calls)
        return torch.cat(
            [
                self.inner(piece, *rows, calls=each, **tensors)
                for piece, rows, each in zip(pieces, rows_of, calls, strict=True)
            ]
        )


class TappedBlock(Block):
    """An encoder block whose output is also merged and sent to the language model as a stream."""

    def __init__(self, block: Block, tap: nn.Module, tap_path: str, stream: str) -> None:
        super().__init__(block.inner, block.place, block.path, block.form)
        self.tap = tap
        self.tap_path, self.stream = tap_path, stream

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        if parameter.startswith("tap."):
            return f"{self.tap_path}.{parameter.removeprefix('tap.')}"
        return super().library_name(parameter)

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Any:
        """Return the hidden state, and the merged features as a stream."""
        state = super().forward(x, calls=calls, **tensors)
        return Emit(state, {self.stream: self.tap(self.form.theirs(state))})


@dataclass(frozen=True)
class AddedFeatures:
    """Features that are added to the hidden state after a block of the language model."""

    stream: str
    encoder: str
    """Name of the encoder at whose tokens the features are added."""
    add: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The library's function of the hidden state, the mask of those tokens, and the features."""


class AddingBlock(Block):
    """A block of the language model after which encoder features from a stream are added."""

    def __init__(self, block: Block, added: AddedFeatures) -> None:
        super().__init__(block.inner, block.place, block.path, block.form, alone=block.alone)
        self.added = added

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """As `Block`. ``tensors`` contains the stream."""
        features = tensors.pop(self.added.stream)
        state = self.form.theirs(super().forward(x, calls=calls, **tensors))
        places = calls.forward(tensors)["encoders"][self.added.encoder]["places"]
        return self.form.ours(self.added.add(state, places, features))


class _Shell(LibraryLayer):
    """A hollow model with the parts that run before or after the blocks."""

    shell: Any

    def __init__(self, shell: nn.Module) -> None:
        super().__init__()
        self.shell = shell

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return parameter.removeprefix("shell.")


def stop(probe: Probe, state: Tensor, arguments: Arguments) -> Tensor:
    """Leave the forward pass at the first block."""
    del probe, arguments
    raise BlockReached(state)


@dataclass(frozen=True)
class EncoderOutput:
    """How the first layer of a language model takes the output of an encoder. For the fields see `Encoder`."""

    name: str
    given: str
    listed: bool = True
    tapped: str = ""
    """Attribute of the library's encoder output with the features of inner blocks. Empty if there are none."""
    finishes: Form | None = None
    """Shape of the encoder's hidden state if the projector runs in this layer, else None."""


class TextFirst(_Shell):
    """The part before the blocks of a language model: embed tokens and insert the outputs of encoders."""

    def __init__(self, shell: nn.Module, encoders: tuple[EncoderOutput, ...] = ()) -> None:
        super().__init__(shell)
        self.encoders = encoders

    def forward(self, ids: Tensor, *upstream: Tensor, calls: Calls, **tensors: Tensor) -> Tensor:
        """Embed the ids of packed sequences. ``upstream`` holds the outputs of the encoders."""
        given = calls.forward(tensors)
        del given["lengths"], given["counts"]
        given.pop("targets", None)
        called, states = given.pop("encoders"), {}
        for encoder, rows in zip(self.encoders, upstream, strict=True):
            if encoder.finishes is None:
                videos = called[encoder.name].get("videos", ())
                given.setdefault("mm_encoder_outputs", {}).update(self._features(rows, encoder, videos))
            elif called[encoder.name]:
                states[encoder.name] = encoder.finishes.theirs(rows)
                given |= called[encoder.name]
                given[encoder.given] = rows.new_zeros(()).expand(given.pop("shape"))

        def play(probe: Probe, x: Tensor, _: Arguments) -> Tensor:
            if probe.tower in states:
                return states[probe.tower]
            raise BlockReached(x)

        # At most one encoder has its projector in this layer.
        filling = next(iter(states.values())).detach() if states else None
        try:
            with run_with(HollowRun(play, filling)):
                self.shell(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **given)
        except BlockReached as reached:
            # The empty sum connects each encoder to the graph, so that it gets a gradient even without images.
            return reached.state[0] + sum(rows[:0].sum() for rows in upstream) if upstream else reached.state[0]
        raise AssertionError("the library's forward pass never reached a block")

    def _features(self, rows: Tensor, encoder: EncoderOutput, videos: tuple[tuple[int, bool], ...]) -> dict[str, Any]:
        """Return features in the library's form, separately for images and videos.

        ``videos`` has the number of rows of each instance, and whether it is a video.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        rows = rows.reshape(-1, self.shell.config.get_text_config().hidden_size)
        kinds = {"image": rows}
        if videos:
            pieces = list(zip(torch.split(rows, [count for count, _ in videos]), videos, strict=True))
            kinds = {
                name: torch.cat([rows[:0], *(piece for piece, (_, is_video) in pieces if is_video is wanted)])
                for name, wanted in (("image", False), ("video", True))
            }
        found = {}
        for name, each in kinds.items():
            found[name] = BaseModelOutputWithPooling(pooler_output=[each] if encoder.listed else each[None])
            if encoder.tapped:
                # Features of inner blocks travel as streams.
                setattr(found[name], encoder.tapped, [])
        return found


class TextLast(_Shell):
    """The part after the blocks of a language model: norm and head."""

    def __init__(self, shell: nn.Module, takes: tuple[str, ...]) -> None:
        super().__init__(shell)
        self.takes = takes

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Return the logits of packed sequences."""
        state = x[None]
        given = {name: value for name, value in calls.forward(tensors).items() if name in self.takes}
        ones = torch.ones(state.shape[:2], dtype=torch.int64, device=x.device)
        with run_with(HollowRun(lambda *_: state, state.detach())):
            out = self.shell(inputs_embeds=state.detach(), attention_mask=ones, use_cache=False, **given)
        logits: Tensor = out.logits[0]
        return logits


class EncoderFirst(_Shell):
    """The part before the blocks of an encoder."""

    def __init__(self, shell: nn.Module, form: Form, features: str) -> None:
        super().__init__(shell)
        self.form, self.features = form, features

    def forward(self, pixels: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Embed pixels in the form that the library's processor returns."""
        given = calls.forward(tensors)
        given.pop("shape")
        try:
            with run_with(HollowRun(stop)):
                getattr(self.shell, self.features)(pixels, **given)
        except BlockReached as reached:
            return self.form.ours(reached.state)
        raise AssertionError("the library's forward pass never reached a block")


class EncoderLast(_Shell):
    """The part after the blocks of an encoder: norm and projector."""

    def __init__(self, shell: nn.Module, form: Form, features: str, rows: tuple[int, ...]) -> None:
        super().__init__(shell)
        self.form, self.features, self.rows = form, features, rows

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Tensor:
        """Return the features in the module's output shape."""
        state, given = self.form.theirs(x), calls.forward(tensors)
        # Only the shape of the pixels matters, because their embedding is replaced. Zeros could look like padding.
        pixels = x.new_ones(()).expand(given.pop("shape"))
        with run_with(HollowRun(lambda *_: state, state.detach())):
            features = getattr(self.shell, self.features)(pixels, **given).pooler_output
        if isinstance(features, (tuple, list)):
            features = torch.cat(tuple(features))
        out: Tensor = features.reshape(-1, *self.rows)
        return out


def record(
    shell: nn.Module, call: Any, num_blocks: int, filling: Tensor, lengths: tuple[int, ...] | None
) -> list[Arguments]:
    """Return the arguments with which the library's forward pass calls its blocks, without running the blocks."""
    found: list[Arguments] = []

    def play(probe: Probe, state: Tensor, arguments: Arguments) -> Tensor:
        assert probe.place == len(found), "blocks run in another order"
        found.append(arguments)
        if len(found) == num_blocks:
            raise BlockReached(state)
        return state

    try:
        with torch.no_grad(), run_with(HollowRun(play, filling, lengths)):
            call(shell)
    except BlockReached:
        return found
    raise AssertionError("the library's forward pass never reached its last block")


def has_mask(arguments: Arguments | None) -> bool:
    """Return whether the arguments of a block contain the mask of packed sequences. A block left out has none."""
    args, kwargs = arguments or ((), {})
    return any(isinstance(each, Mask) for each in (*args, *kwargs.values()))
