"""`pipeline_planned`, which replaces torchtitan's ``pipeline_llm`` and ``pipeline_vlm``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pipeloom.errors import InputError
from pipeloom.integrations.pipelining import PlannedSchedule
from pipeloom.integrations.torchtitan.costs import completed, estimated_costs, split_by_costs
from pipeloom.integrations.torchtitan.measured import Trial, measured_costs
from pipeloom.integrations.torchtitan.parts import model_part, with_all_modules

_LOG = logging.getLogger(__name__)


def pipeline_planned(
    model: Any,
    *,
    parallel_dims: Any,
    parallelism: Any,
    model_config: Any,
    training: Any,
    device: torch.device,
    loss_fn: Callable[..., Any],
    **config: Any,
) -> tuple[PlannedSchedule, list[nn.Module], bool, bool]:
    """Split a torchtitan model into stages and make their schedule. torchtitan's trainer calls it.

    Bind its own options before: ``functools.partial(pipeline_planned, costs=..., planner=...)``.

    Parameters
    ----------
    model, parallel_dims, parallelism, model_config, training, device, loss_fn
        Passed by torchtitan.
    config
        Passed by torchtitan: ``parallelize_fn``, with its ``compile_config``, ``ac_config`` and ``dump_folder``. Own
        options: ``costs`` by which the model is split, one of ``"measured"`` (the default, see `measured_costs`),
        ``"estimated"`` (see `estimated_costs`) or `Costs`, whose missing parts are estimated; ``vision_tokens``
        (patches per token of the sequence, by default 1); and ``planner`` (`Planning`).

    Returns
    -------
    schedule, model parts of this rank, whether it has the first stage, whether it has the last

    Raises
    ------
    InputError
        When there are fewer parts than stages, a cost is of an unknown part, a CSV schedule is requested, modules have
        no stage, or the local batch is no multiple of the microbatches' size.
    """
    if parallelism.pipeline_parallel_schedule_csv:
        raise InputError(
            "parallelism.pipeline_parallel_schedule_csv",
            "names a schedule file, but steps are planned",
            "leave it out, or use pipeline_llm for schedules from files",
        )
    n_microbatches = _num_microbatches(training.local_batch_size, parallelism.pipeline_parallel_microbatch_size)
    own = {name: config.pop(name) for name in ("costs", "vision_tokens", "planner") if name in config}
    parallelize = config.pop("parallelize_fn")
    pp_mesh = parallel_dims.get_mesh("pp")
    num_stages = _num_stages(parallelism, parallel_dims.pp, len(model_config.layers))
    names = parallelism.module_fqns_per_model_part
    if names is None:
        trial = Trial(
            parallelism.pipeline_parallel_microbatch_size,
            training.seq_len,
            device,
            getattr(torch, training.mixed_precision_param),
            own.get("vision_tokens", 1.0),
        )
        names = split_by_costs(_costs(model, own.get("costs", "measured"), trial), num_stages)
    names = with_all_modules(model, names)
    _LOG.info("parallelism.module_fqns_per_model_part: %s", names)
    mesh_of = functools.partial(_mesh, parallel_dims)
    stages, parts = [], []
    for number in range(pp_mesh.get_local_rank(), len(names), pp_mesh.size()):
        part = model_part(model, names, number)
        part = parallelize(part, parallel_dims=parallel_dims, training=training, parallelism=parallelism, **config)
        group = pp_mesh.get_group("pp")
        stages.append(PipelineStage(part, number, len(names), device, group=group, get_mesh=mesh_of))
        parts.append(part)
    schedule = PlannedSchedule(
        stages,
        own.get("planner"),
        _scalar(loss_fn),
        n_microbatches=n_microbatches,
        scale_grads=False,
        # Experts and shards compute together over replicas, so that all replicas run one plan.
        together=torch.distributed.group.WORLD,
    )
    return schedule, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def _num_microbatches(batch_size: int, microbatch_size: int) -> int:
    """Return the number of microbatches of a local batch."""
    if batch_size % microbatch_size:
        raise InputError(
            "training.local_batch_size",
            f"is {batch_size}, no multiple of the {microbatch_size} sequences of a microbatch",
            "change it, or parallelism.pipeline_parallel_microbatch_size",
        )
    return batch_size // microbatch_size


def _mesh(parallel_dims: Any, names: tuple[str, ...], _: Any) -> Any:
    """Return the mesh of a DTensor from the stage before."""
    return parallel_dims.get_mesh(list(names))


def _costs(model: Any, asked: Any, trial: Trial) -> dict[str, float]:
    """Return the costs that are requested, the same on all ranks."""
    estimated = estimated_costs(model, trial.length, trial.vision_tokens)
    if asked == "measured":
        return measured_costs(model, estimated, trial)
    # "reckoned" is an older name; accepted for one release.
    if asked in ("estimated", "reckoned"):
        return estimated
    if not isinstance(asked, Mapping):
        raise InputError("costs", f"is {asked!r}", "give 'measured', 'estimated', or seconds by part of the model")
    return completed(asked, estimated)


def _scalar(loss_fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """Wrap a loss of torchtitan so that it returns the loss only."""

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        found = loss_fn(*args, **kwargs)
        value: Tensor = found[0] if isinstance(found, tuple) else found
        return value

    return loss


def _num_stages(parallelism: Any, num_ranks: int, num_layers: int) -> int:
    """Return torchtitan's number of stages: by layers per stage; else one per rank, two if interleaved."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        count: int = num_ranks * -(-num_layers // (per_stage * num_ranks))
        return count
    single = issubclass(get_schedule_class(parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    return num_ranks * (1 if single else 2)
