"""Inputs of a step on one rank: whole batches or microbatches, as PyTorch's schedules take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from torch.utils._pytree import tree_flatten

from pipeloom.errors import InputError
from pipeloom.integrations.pipelining.running import StageMicrobatch

Args = tuple[Any, ...]
Keywords = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Splitting:
    """Options of PyTorch's schedules for splitting whole batches and merging outputs."""

    count: int | None
    args_spec: tuple[TensorChunkSpec, ...] | None
    kwargs_spec: dict[str, TensorChunkSpec] | None
    merge_spec: Any


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Arguments of `PlannedSchedule.step` on this rank."""

    args: Args
    kwargs: Keywords
    target: Any = None
    arg_mbs: Sequence[Args] | None = None
    kwarg_mbs: Sequence[Keywords] | None = None
    target_mbs: Sequence[Any] | None = None

    def check(self, wants_target: bool) -> tuple[str, int]:
        """Check the inputs before the number of microbatches is known. A rank that computes the loss needs targets.

        Return the name of an argument that has microbatches, and their number; an empty name and 0 if no argument has.
        """
        if (self.arg_mbs is not None or self.kwarg_mbs is not None) and (self.args or self.kwargs):
            raise InputError("step()", "has microbatches and whole-batch inputs", "give either")
        if self.target is not None and self.target_mbs is None and not isinstance(self.target, Tensor):
            raise InputError("target", f"is a {type(self.target).__name__}", "give a tensor, or target_mbs")
        if wants_target and self.target is None and self.target_mbs is None:
            raise InputError("target", "is not given on the rank of the last stage", "give target or target_mbs there")
        given = {"arg_mbs": self.arg_mbs, "kwarg_mbs": self.kwarg_mbs, "target_mbs": self.target_mbs}
        counts = [(name, len(each)) for name, each in given.items() if each is not None]
        for name, count in counts:
            if not count:
                raise InputError(name, "is empty", "give at least one microbatch")
            if count != counts[0][1]:
                problem = f"has {count} microbatches, {counts[0][0]} has {counts[0][1]}"
                raise InputError(name, problem, "give one for each")
        return counts[0] if counts else ("", 0)

    def split(self, how: Splitting, count: int | None = None) -> list[tuple[Args, Keywords]]:
        """Return the inputs by microbatch, of which the step has ``count``; None if this rank decides."""
        if self.arg_mbs is None and self.kwarg_mbs is None:
            return self._split_whole(how, count)
        args = self.arg_mbs if self.arg_mbs is not None else [()] * len(self.kwarg_mbs or ())
        kwargs = self.kwarg_mbs if self.kwarg_mbs is not None else [{}] * len(args)
        return [(tuple(a), dict(k)) for a, k in zip(args, kwargs, strict=True)]

    def _split_whole(self, how: Splitting, count: int | None) -> list[tuple[Args, Keywords]]:
        count = count or how.count
        if count is None:
            raise InputError("n_microbatches", "is None, and no microbatches are given", "give one of both")
        if not self.args and not self.kwargs:
            return [((), {}) for _ in range(count)]
        if how.args_spec is None and not self.kwargs and all(_splits_plainly(value, count) for value in self.args):
            # The same as PyTorch's function does, without its traversal of nested inputs.
            columns = [torch.tensor_split(value, count) for value in self.args]
            return [(row, {}) for row in zip(*columns, strict=True)]
        args, kwargs = split_args_kwargs_into_chunks(self.args, self.kwargs, count, how.args_spec, how.kwargs_spec)
        if len(args) != count:
            raise InputError("the batch", f"splits into {len(args)} microbatches, not {count}", "give more rows")
        return list(zip(args, kwargs, strict=True))

    def targets(self, count: int) -> list[Any] | None:
        """Return the targets by microbatch, or None if there are none."""
        if self.target_mbs is not None:
            return list(self.target_mbs)
        return None if self.target is None else list(torch.tensor_split(self.target, count))


def _splits_plainly(value: Any, count: int) -> bool:
    # Pieces of a leaf keep their gradients only with PyTorch's function.
    return type(value) is Tensor and not value.requires_grad and value.dim() > 0 and len(value) >= count


def merged(microbatches: Sequence[StageMicrobatch], how: Splitting) -> Any:
    """Return the merged outputs of the microbatches, or a list of them if they cannot be merged."""
    outputs = [microbatch.output for microbatch in microbatches]
    if how.merge_spec is None and all(type(output) is Tensor and output.dim() for output in outputs):
        # PyTorch's functions take a hundred times as long.
        alike = len({(output.shape[1:], output.dtype) for output in outputs}) == 1
        return torch.cat(outputs) if alike else outputs
    if how.merge_spec is None and not _can_merge(outputs):
        return outputs
    return merge_chunks(outputs, how.merge_spec)


def _can_merge(outputs: Sequence[Any]) -> bool:
    """Return whether outputs differ in dimension 0 only."""
    forms = set()
    for output in outputs:
        leaves, form = tree_flatten(output)
        if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            return False
        forms.add((str(form), tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)))
    return len(forms) == 1
