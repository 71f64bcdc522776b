"""The layers that Pipeloom runs: the library's blocks, and the parts before and after them.

Tensors between layers have the transformer's dtype, even if autocast computes in another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.families import Family, Video
from pipeloom.integrations.diffusers.samples import Reader, runs_of
from pipeloom.integrations.transformers.hollow import Arguments, HollowRun, run_with
from pipeloom.integrations.transformers.layers import record, run_to_block, stop
from pipeloom.integrations.transformers.packed import Calls, as_context
from pipeloom.runtime.model.model import Emit, Part


@dataclass(frozen=True)
class FromStream:
    """Placeholder for a tensor from a stream among the arguments of a block."""

    name: str
    shape: tuple[int, ...]


class Words(nn.Module):
    """Projects concatenated prompts to the transformer's width."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype, pads: bool) -> None:
        super().__init__()
        self.inner, self.dtype, self.pads = inner, dtype, pads

    def forward(self, rows: Tensor, *, count: int) -> Emit:
        """Emit the projected rows of ``count`` prompts, and the projection of a row of padding."""
        rows = rows.to(self.dtype)
        if not self.pads:
            words = self.inner(rows).to(self.dtype)
            return Emit(words, {"words": words})
        every = self.inner(torch.cat([rows, rows.new_zeros(1, rows.shape[1])])).to(self.dtype)
        words = every[:-1]
        return Emit(words, {"words": words, "padding": every[-1:].expand(count, -1)})


class _Part(nn.Module):
    """A hollow transformer with the parts that run before or after the blocks."""

    def __init__(self, shell: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.shell, self.dtype = shell, dtype

    def call(self, latents: Tensor, times: Tensor, run: dict[str, Any], running: HollowRun) -> Any:
        """Run the library's forward pass. Values that ``running`` lacks are filled in."""
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
    """The part before the blocks: cut latents into tokens, and embed the time for all blocks."""

    def forward(self, times: Tensor, *batches: Tensor, calls: Calls, **tensors: Tensor) -> Emit:
        """Take the times of all samples, and one batch of latents per run of samples of equal size."""
        states, found, begin = [], [], 0
        for run, latents in zip(calls.forward(tensors)["runs"], batches, strict=True):
            running = HollowRun(stop)
            call = partial(self.call, latents, times[begin : begin + len(latents)], run, running)
            states.append(run_to_block(call, running).flatten(0, 1))
            found.append(running.values)
            begin += len(latents)
        streams = {name: torch.cat([values[name] for values in found]) for name in ("modulation", "time")}
        return Emit(torch.cat(states).to(self.dtype), {name: each.to(self.dtype) for name, each in streams.items()})


class TransformerBlock(nn.Module):
    """A block of the library, called once for each run of samples of equal size."""

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
        """Map the concatenated tokens of all samples."""
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
    """The part after the blocks: norm, and projection back to latents."""

    def forward(self, x: Tensor, *, calls: Calls, time: Tensor, **tensors: Tensor) -> Tensor:
        """Return the prediction, with one row per token."""
        outputs = []
        for run, state, each in _cut(calls.forward(tensors)["runs"], x, {"time": time}):
            running = HollowRun(lambda *_, state=state: state, values=each)
            latents = x.new_zeros(()).expand(len(state), *run["video"].form)
            (output,) = self.call(latents, x.new_zeros(()).expand(len(state)), run, running)
            outputs.append(output.reshape(state.shape[0] * state.shape[1], -1))
        return torch.cat(outputs).to(self.dtype)


def _cut(
    runs: list[dict[str, Any]], x: Tensor, streams: dict[str, Tensor | None]
) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
    """Yield each run with its tokens as a batch, and its rows of the streams with one row per sample."""
    token = sample = 0
    for run in runs:
        video = run["video"]
        state = x[token : token + video.count * video.tokens].reshape(video.count, video.tokens, -1)
        rows = slice(sample, sample + video.count)
        yield run, state, {name: each[rows] for name, each in streams.items() if each is not None}
        token += video.count * video.tokens
        sample += video.count


def _with_streams(arguments: Arguments, streams: dict[str, Tensor]) -> Any:
    return tree_map_only(FromStream, lambda each: streams[each.name].reshape(each.shape), arguments)


def fillers(video: Video, width: int, like: Tensor) -> dict[str, Tensor]:
    """Return zeros of the shapes of embeddings: of the prompt, the time and the latents. They take no memory."""
    sizes = {
        "words": (video.padded, width),
        "modulation": (6 * width,),
        "time": (width,),
        "tokens": (video.tokens, width),
        "sides": (1, *video.grid),
    }
    return {name: like.new_zeros(()).expand(video.count, *size) for name, size in sizes.items()}


@dataclass(frozen=True, eq=False)
class TransformerContext:
    """Returns the arguments of the blocks of a transformer for a part.

    ``outline`` is the transformer without any part that has parameters.
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
        """Return the arguments of the library's blocks. Tensors that come as streams are not computed."""
        zero = torch.zeros((), dtype=self.dtype)
        filled = fillers(video, self.width, zero)

        def call(shell: nn.Module) -> Any:
            latents, times = zero.expand(video.count, *video.form), zero.expand(video.count)
            words = filled["words"]
            return shell(hidden_states=latents, timestep=times, encoder_hidden_states=words, return_dict=False, **given)

        found = record(self.outline, call, self.num_blocks, values=dict(filled))
        places = {filled[name].untyped_storage().data_ptr(): name for name in ("words", "modulation")}

        def mark(tensor: Tensor) -> Any:
            # The library only reshapes the tensors that come as streams.
            name = places.get(tensor.untyped_storage().data_ptr())
            return tensor if name is None else FromStream(name, tuple(tensor.shape))

        first, *others = (tree_map_only(Tensor, mark, arguments) for arguments in found)
        if any(tree_map_only(Tensor, id, other) != tree_map_only(Tensor, id, first) for other in others):
            raise InputError("model", "calls its blocks with different arguments", "this form is not supported")
        return first  # type: ignore[no-any-return]
