"""The arguments of Megatron Core's forward-backward functions, and the parts of its interface that we rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import schedules
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.setup import ORDER_BOUND
from pipeloom.integrations.steps.strategies import StepMemory

TRIED_VERSIONS = ("0.16.1", "0.19.2")
"""Versions of Megatron Core with which the tests were run."""
_FORWARD_STEP = (
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store"),
    *("config", "cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch"),
    *("is_first_microbatch", "current_microbatch", "vp_stage", "is_last_stage"),
)
"""Parameters of ``schedules.forward_step`` that we pass."""


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """The arguments of one call, as Megatron Core's training loop passes them."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False

    @cached_property
    def chunks(self) -> list[nn.Module]:
        """Model chunks of this rank."""
        return self.model if isinstance(self.model, list) else [self.model]

    @cached_property
    def iterators(self) -> list[Any]:
        """Data iterator of each chunk of this rank; None where a chunk reads no data."""
        return each_chunk(self.data_iterator, len(self.chunks))

    def keywords(self) -> dict[str, Any]:
        """Return the arguments by name, to call Megatron Core's own function."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def each_chunk(given: Any, num_chunks: int) -> list[Any]:
    """Return what each chunk has of an argument or setting that is a list, or one for all."""
    return list(given) if isinstance(given, (list, tuple)) else [given] * num_chunks


def check_interface(version: str = megatron.core.__version__, library: Any = schedules) -> None:
    """Raise `InputError` if this version of Megatron Core has another interface than the one that we rely on."""
    problem = next(_differences(library), "")
    if problem:
        tried = f"{TRIED_VERSIONS[0]} to {TRIED_VERSIONS[-1]}"
        raise InputError(f"megatron-core {version}", problem, f"install a version from {tried}")


def _differences(library: Any) -> Any:
    """Yield what differs, in words."""
    step = getattr(library, "forward_step", None)
    if step is None:
        yield "has no schedules.forward_step"
        return
    parameters = inspect.signature(step).parameters
    for name in _FORWARD_STEP:
        if name not in parameters:
            yield f"has no parameter {name!r} of schedules.forward_step"
    for name, parameter in parameters.items():
        if name not in _FORWARD_STEP and parameter.default is inspect.Parameter.empty:
            yield f"requires a parameter {name!r} of schedules.forward_step"
    for kind in ("with", "without"):
        function = getattr(library, f"forward_backward_pipelining_{kind}_interleaving", None)
        if function is None:
            yield f"has no schedules.forward_backward_pipelining_{kind}_interleaving"
            continue
        names = set(inspect.signature(function).parameters)
        for name in sorted(names ^ set(StepCall.__dataclass_fields__)):
            yield f"{'has' if name in names else 'lacks'} the parameter {name!r} of {function.__name__}"


def check_config(config: Any, backward: str, memory: StepMemory | None) -> None:
    """Raise `InputError` for a setting that needs Megatron Core's own order of microbatches.

    Raise it too for a setting about recomputation if plans choose what is recomputed (``memory``), and for one that
    runs the backward of a layer as a whole if plans split backwards (``backward``).
    """
    for kind in ("", "expert_"):
        number = getattr(config, f"{kind}gtp_weight_remat_size", None) or 1
        if number > 1:
            raise InputError(
                f"config.{kind}gtp_weight_remat_size",
                f"is {number}: ranks with other microbatches gather weights together, in Megatron Core's own order",
                f"leave out {kind}tensor_parallel_num_weight_shards, or use Megatron's schedule",
            )
    for name, remedy in ORDER_BOUND.items():
        if getattr(config, name, None) not in (None, False, "none"):
            raise InputError(f"config.{name}", "needs the order of Megatron Core's own schedule", remedy)
    if memory is not None:
        if backward != "whole":
            raise InputError(
                "planner.backward", f"is {backward!r}, and activation_bytes is given", "use 'whole', or give no limit"
            )
        for name in ("num_microbatches_with_partial_activation_checkpoints", "cpu_offloading"):
            if getattr(config, name, None):
                raise InputError(f"config.{name}", "is set, and activation_bytes is given", "set only one of them")
    for name in ("gradient_accumulation_fusion", "recompute_granularity", "cpu_offloading"):
        if backward != "whole" and getattr(config, name, None):
            raise InputError(
                "planner.backward",
                f"is {backward!r}, and config.{name} runs the backward of a layer as a whole",
                "give 'whole', or switch it off",
            )


def check_chunks(chunks: Sequence[nn.Module], moved: bool) -> None:
    """Raise `InputError` for chunks whose gradients Megatron would sum elsewhere, or twice.

    Tied embeddings are summed over the first and last pipeline rank only, so that their chunks may not be ``moved`` by
    ``options.stages``. Of a reduction in two steps, planned steps would repeat the first.
    """
    for chunk in chunks:
        inner: Any = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        if moved and getattr(inner, "share_embeddings_and_output_weights", False):
            raise InputError(
                "share_embeddings_and_output_weights",
                "is on, and Megatron sums the gradients over the first and last pipeline rank only",
                "untie them, or leave out options.stages",
            )
        settings = getattr(chunk, "ddp_config", None)
        number = getattr(settings, "num_distributed_optimizer_instances", 1)
        if number > 1 and getattr(settings, "overlap_grad_reduce", False):
            raise InputError(
                "num_distributed_optimizer_instances",
                f"is {number}, and overlap_grad_reduce is on",
                "switch overlap_grad_reduce off, or use one instance",
            )


def iterators_fit(iterators: Sequence[Any], chunks: Sequence[nn.Module]) -> None:
    """Raise `InputError` unless every chunk has an iterator that can be read."""
    if len(iterators) != len(chunks):
        raise InputError(
            "data_iterator", f"has {len(iterators)} iterators for {len(chunks)} model chunks", "give one for each"
        )
    for iterator in iterators:
        if iterator is not None and not hasattr(iterator, "__next__"):
            raise InputError("data_iterator", f"is a {type(iterator).__name__}", "give an iterator, or None")
