"""The layers that the engine runs: the library's blocks, and what is before and behind them.

What passes between them has the transformer's own dtype, also where autocast computes in another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.families import Family, Video
from pipeloom.integrations.diffusers.samples import Reader, runs_of
from pipeloom.integrations.transformers.hollow import Arguments, Probe, Reached, Running, run_with
from pipeloom.integrations.transformers.layers import stop
from pipeloom.integrations.transformers.packed import Calls, as_context
from pipeloom.runtime.model.model import Emit, Part


@dataclass(frozen=True)
class FromStream:
    """Stands among what a block is called with for a tensor that comes as a stream."""

    name: str
    shape: tuple[int, ...]


class Words(nn.Module):
    """Brings prompts to the transformer's width, as rows one after the other."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype, pads: bool) -> None:
        super().__init__()
        self.inner, self.dtype, self.pads = inner, dtype, pads

    def forward(self, rows: Tensor, *, count: int) -> Emit:
        """Take the rows of so many prompts; emit them, and what the library makes of a row of padding."""
        rows = rows.to(self.dtype)
        if not self.pads:
            words = self.inner(rows).to(self.dtype)
            return Emit(words, {"words": words})
        every = self.inner(torch.cat([rows, rows.new_zeros(1, rows.shape[1])])).to(self.dtype)
        words = every[:-1]
        return Emit(words, {"words": words, "padding": every[-1:].expand(count, -1)})


class _Part(nn.Module):
    """A part of the transformer that its own forward reaches before or behind the blocks."""

    def __init__(self, shell: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.shell, self.dtype = shell, dtype

    def call(self, latents: Tensor, times: Tensor, run: dict[str, Any], running: Running) -> Any:
        """Run the library's forward; what of the prompt and the time is not in ``running`` is filled in."""
        filled = fillers(run["video"], run["width"], latents)
        running.values.update({name: value for name, value in filled.items() if name not in running.values})
        with run_with(running):
            return self.shell(
                hidden_states=latents,
                timestep=times,
                encoder_hidden_states=filled["words"],
                return_dict=False,
                **run["given"],
            )


class TransformerFirst(_Part):
    """What stands before the blocks: latents are cut into tokens, and the time is embedded, for all blocks at once."""

    def forward(self, times: Tensor, *batches: Tensor, calls: Calls, **tensors: Tensor) -> Emit:
        """Take the times of all samples, and their latents run by run."""
        states, found, begin = [], [], 0
        for run, latents in zip(calls.forward(tensors)["runs"], batches, strict=True):
            running = Running(stop)
            try:
                self.call(latents, times[begin : begin + len(latents)], run, running)
            except Reached as reached:
                states.append(reached.state.flatten(0, 1))
            found.append(running.values)
            begin += len(latents)
        streams = {name: torch.cat([values[name] for values in found]) for name in ("modulation", "time")}
        return Emit(torch.cat(states).to(self.dtype), {name: each.to(self.dtype) for name, each in streams.items()})


class TransformerBlock(nn.Module):
    """A block of the library, called as its own forward calls it, a run of samples of one size at a time."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(
        self,
        x: Tensor,
        *,
        calls: Calls,
        words: Tensor,
        modulation: Tensor,
        padding: Tensor | None = None,
        **tensors: Tensor,
    ) -> Tensor:
        """Take and give the tokens of all samples, one after the other."""
        outputs = []
        for run, state, each in _cut(calls.forward(tensors)["runs"], x, {"modulation": modulation, "padding": padding}):
            video: Video = run["video"]
            begin = run["words"]
            prompt = words[begin : begin + video.count * video.words].reshape(video.count, video.words, -1)
            if video.padded > video.words:
                prompt = torch.cat([prompt, each["padding"][:, None].expand(-1, video.padded - video.words, -1)], 1)
            args, kwargs = _with_streams(run["call"], {"words": prompt, "modulation": each["modulation"]})
            outputs.append(self.inner(state, *args, **kwargs).flatten(0, 1))
        return torch.cat(outputs).to(self.dtype)


class TransformerLast(_Part):
    """What stands behind the blocks: the norm, and tokens back to latents."""

    def forward(self, x: Tensor, *, calls: Calls, time: Tensor, **tensors: Tensor) -> Tensor:
        """Give what is predicted, as many numbers a row as each token has."""
        outputs = []
        for run, state, each in _cut(calls.forward(tensors)["runs"], x, {"time": time}):
            running = Running(lambda *_, state=state: state, state.detach(), values=each)
            latents = x.new_zeros(()).expand(len(state), *run["video"].form)
            (output,) = self.call(latents, x.new_zeros(()).expand(len(state)), run, running)
            outputs.append(output.reshape(state.shape[0] * state.shape[1], -1))
        return torch.cat(outputs).to(self.dtype)


def _cut(
    runs: list[dict[str, Any]], x: Tensor, streams: dict[str, Tensor | None]
) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
    """Each run with its tokens as a batch, and its rows of what has a row for each sample."""
    token = sample = 0
    for run in runs:
        video = run["video"]
        state = x[token : token + video.count * video.tokens].reshape(video.count, video.tokens, -1)
        rows = slice(sample, sample + video.count)
        yield run, state, {name: each[rows] for name, each in streams.items() if each is not None}
        token += video.count * video.tokens
        sample += video.count


def _with_streams(value: Any, streams: dict[str, Tensor]) -> Any:
    if isinstance(value, FromStream):
        return streams[value.name].reshape(value.shape)
    if isinstance(value, dict):
        return {key: _with_streams(each, streams) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_with_streams(each, streams) for each in value)
    return value


def fillers(video: Video, width: int, like: Tensor) -> dict[str, Tensor]:
    """What has the shape of the prompt and of what is made of the time, and takes no memory."""
    sizes = {"words": (video.padded, width), "modulation": (6 * width,), "time": (width,)}
    return {name: like.new_zeros(()).expand(video.count, *size) for name, size in sizes.items()}


@dataclass(frozen=True, eq=False)
class TransformerContext:
    """What the blocks of a transformer are called with, for a part.

    Attributes
    ----------
    outline : torch.nn.Module
        The transformer without any part that has parameters.
    family : Family
    reader : Reader
    num_blocks : int
    width : int
    dtype : torch.dtype
    """

    outline: nn.Module
    family: Family
    reader: Reader
    num_blocks: int
    width: int
    dtype: torch.dtype

    def __call__(self, part: Part) -> dict[str, Any]:
        """Return the runs of the part's samples."""
        runs, words = [], 0
        for video in runs_of(self.reader.items(part)):
            given = self.family.arguments(video)
            call = self._recorded(video, given)
            runs.append({"video": video, "width": self.width, "words": words, "given": given, "call": call})
            words += video.count * video.words
        return as_context((), {"runs": runs})

    def _recorded(self, video: Video, given: dict[str, Any]) -> Arguments:
        """What the library's forward calls its blocks with; nothing is computed that streams bring."""
        zero = torch.zeros((), dtype=self.dtype)
        filled = fillers(video, self.width, zero)
        found: list[Arguments] = []

        def play(probe: Probe, state: Tensor, arguments: Arguments) -> Tensor:
            found.append(arguments)
            if probe.place == self.num_blocks - 1:
                raise Reached(state)
            return state

        running = Running(play, zero.expand(video.count, video.tokens, self.width), values=dict(filled))
        with suppress(Reached), torch.no_grad(), run_with(running):
            self.outline(
                hidden_states=zero.expand(video.count, *video.form),
                timestep=zero.expand(video.count),
                encoder_hidden_states=filled["words"],
                return_dict=False,
                **given,
            )
        places = {filled[name].untyped_storage().data_ptr(): name for name in ("words", "modulation")}
        first, *others = [_marked(arguments, places) for arguments in found]
        if any(_identity(other) != _identity(first) for other in others):
            raise InputError("model", "calls its blocks with unlike arguments", "this form of it is not supported")
        return first  # type: ignore[no-any-return]


def _marked(value: Any, places: dict[int, str]) -> Any:
    """Arguments in which tensors that come as streams are marked: the library only gives them another shape."""
    if isinstance(value, Tensor):
        name = places.get(value.untyped_storage().data_ptr())
        return value if name is None else FromStream(name, tuple(value.shape))
    if isinstance(value, dict):
        return {key: _marked(each, places) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_marked(each, places) for each in value)
    return value


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, dict):
        return {key: _identity(each) for key, each in value.items()}
    return tuple(map(_identity, value)) if isinstance(value, tuple) else value
