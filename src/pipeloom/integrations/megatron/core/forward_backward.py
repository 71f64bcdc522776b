"""`planned_forward_backward`, in place of Megatron Core's forward-backward functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.core.call import StepCall
from pipeloom.integrations.megatron.core.places import default_groups
from pipeloom.integrations.megatron.core.session import PlannedSteps, StepOptions

_ATTRIBUTE = "_pipeloom_steps"


class _Holder:
    """Holds the planned steps of a model on its first chunk. Copies of the model do not get them."""

    def __init__(self, steps: PlannedSteps | None = None) -> None:
        self.steps = steps

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def planned_forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
    options: StepOptions | None = None,
) -> list[Any]:
    """Run one step by a plan made for its own microbatches.

    Call it as you call the function that Megatron Core's ``get_forward_backward_func`` returns. Every rank calls it.
    Parameters that are not described here are those of that function.

    Parameters
    ----------
    data_iterator : iterator, list of iterators or None
        As for Megatron. Each microbatch takes one item. Microbatches run in any order, and each gets the item that it
        would get from Megatron.
    model : torch.nn.Module or list of torch.nn.Module
        Model chunks of this rank.
    adjust_tensor_shapes_fn, p2p_communicator
        Unused: shapes are found in the first step, and plans send by the pipeline group.
    options : StepOptions or None
        Options of planning; they are read with the model's first step. None: the options of `configure`.

    Returns
    -------
    list
        What the loss function returned for each microbatch, in their order; empty on ranks without the last stage.

    Raises
    ------
    InputError
        When a rank cannot run the step. It has not begun on any rank.
    ExecutionError
        When the step failed.
    """
    call = StepCall(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
        force_all_reduce=force_all_reduce,
    )
    groups = pg_collection or default_groups()
    # From Megatron Core 0.19 on, groups that are not set are None.
    if getattr(groups, "pp", None) is None:
        raise InputError("pg_collection", "has no group 'pp'", "give one collection, not those of several modules")
    if dist.get_world_size(groups.pp) == 1:
        # One rank has nothing to wait for, so that any order takes the same time.
        return list(schedules.forward_backward_no_pipelining(**call.keywords()))
    return steps_of(call, options).run(call)


def steps_of(call: StepCall, options: StepOptions | None = None) -> PlannedSteps:
    """Return the planned steps of a model. They are made with its first step."""
    first = call.chunks[0]
    holder = first.__dict__.get(_ATTRIBUTE)
    steps: PlannedSteps | None = None if holder is None else holder.steps
    if steps is None:
        steps = PlannedSteps(call, options or _configured)
        first.__dict__[_ATTRIBUTE] = _Holder(steps)
    return steps


def close(model: nn.Module | Sequence[nn.Module]) -> None:
    """Stop the planner of a model, after its last step. Items that were read ahead are lost."""
    first = model if isinstance(model, nn.Module) else model[0]
    holder = first.__dict__.pop(_ATTRIBUTE, None)
    if holder is not None and holder.steps is not None:
        holder.steps.close()


def step_counts(model: nn.Module | Sequence[nn.Module]) -> dict[str, int]:
    """Return the number of training steps by origin of their plan: ``search``, ``heuristic`` (the fallback) or ``own``.

    Empty on ranks that do not plan. The rank of the first stage plans, the lowest if there are several.
    """
    first = model if isinstance(model, nn.Module) else model[0]
    holder = first.__dict__.get(_ATTRIBUTE)
    planner = None if holder is None or holder.steps is None else holder.steps.planner
    return {} if planner is None else dict(planner.counts)


_configured = StepOptions()


def configure(options: StepOptions | None = None, **changes: Any) -> None:
    """Set the options of all models whose first step is still to come.

    Parameters
    ----------
    options : StepOptions or None
        The options; None for the defaults.
    changes
        Fields of `StepOptions` that differ.
    """
    global _configured
    _configured = dataclasses.replace(options or StepOptions(), **changes)
