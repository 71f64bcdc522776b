"""Which rank has which chunk, and which ranks run one plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from pipeloom.errors import InputError
from pipeloom.integrations.steps.running import encoder_layout, stage_layout
from pipeloom.spec import Layout


class RankReport(NamedTuple):
    """What a rank reports before the first step."""

    stages: tuple[int, ...]
    """Numbers of its stages."""
    pipeline: tuple[int, ...]
    """Global ranks of its pipeline, in pipeline order."""
    together: tuple[tuple[int, ...], ...]
    """Global ranks of the groups whose collectives its layers call."""
    reads: bool
    """Whether its first chunk has a data iterator."""
    problem: str
    """Why this rank cannot run; empty if it can."""
    encoder: tuple[int, int, int] | None = None
    """If its chunks are cut by modality: numbers of stages of the encoder and of the language model, and most images
    that pass through the encoder together (0: all of a microbatch)."""
    trains_encoder: bool = False
    """Whether any of its chunks of the encoder is trained."""
    num_layers: tuple[int, ...] = ()
    """Number of layers of each of its stages that may recompute in different ways."""


class Place(NamedTuple):
    """A rank's place among all ranks."""

    layout: Layout
    """Stages of this rank's pipeline."""
    group: Any
    """Group of all ranks that run one plan, of the CPU."""
    source: int
    """Global rank that decides what they run."""
    is_first: bool
    """Whether this rank belongs to the pipeline of the source."""
    one_order: bool
    """Whether one plan runs on all ranks."""
    num_layers: tuple[int, ...]
    """Number of layers of each stage that may recompute in different ways."""


def default_groups() -> ProcessGroupCollection:
    """Return Megatron's global groups.

    They are those of its schedules unless parameters are rematerialized over groups (GTP), which `check_config`
    refuses.
    """
    names = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp", "dp", "tp_dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


def layers_span_replicas(config: Any) -> bool:
    """Return whether layers call collectives over data-parallel ranks.

    Expert-parallel groups and the balance of experts span them, and so does the largest value of FP8 tensors under
    delayed scaling.
    """
    recipe = getattr(config, "fp8_recipe", None)
    delayed = getattr(config, "fp8", None) and getattr(recipe, "value", recipe) == "delayed"
    return bool(
        getattr(config, "num_moe_experts", None) or (delayed and not getattr(config, "tp_only_amax_red", False))
    )


def groups_together(groups: Any, config: Any) -> tuple[tuple[int, ...], ...]:
    """Return the global ranks of the groups that must run their layers in one order."""
    names = ["pp", "tp", "cp"]
    if layers_span_replicas(config):
        names.append("dp_cp")
    found = (getattr(groups, name, None) for name in names)
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in found if group is not None)


def find_place(report: RankReport) -> Place:
    """Exchange reports, check them, and make the group of this rank. All ranks call it together.

    All ranks raise `InputError` if a rank cannot run, or the stages of a pipeline do not form a chain.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(report))
    reports = [RankReport(*each) for each in every]
    encoder = report.encoder
    for rank, each in enumerate(reports):
        if each.problem:
            raise InputError(f"rank {rank}", each.problem)
        if each.encoder != reports[0].encoder:
            raise InputError(
                f"rank {rank}",
                f"has chunks of {_described(each.encoder)}, rank 0 of {_described(reports[0].encoder)}",
                "call vision_language_chunks with the same arguments on all ranks",
            )
    count = None if encoder is None else encoder[0] + encoder[1]
    ranks_of = {each.pipeline: _ranks_of_stages(each.pipeline, reports, count) for each in reports}
    rank_of = ranks_of[report.pipeline]
    for pipeline, other in ranks_of.items():
        if other != rank_of:
            raise InputError(
                f"the pipeline of ranks {', '.join(map(str, pipeline))}",
                "has its chunks on other pipeline ranks than the rest",
                "place the chunks of all pipelines alike",
            )
    if encoder is None:
        layout = stage_layout(rank_of, len(report.pipeline))
    else:
        frozen = not any(each.trains_encoder for each in reports)
        layout = encoder_layout(
            rank_of, len(report.pipeline), encoder[0], most_images=encoder[2] or None, frozen=frozen
        )
    here, own, source = dist.get_rank(), None, 0
    cells = _connected(ranks for each in reports for ranks in (each.pipeline, *each.together))
    for cell in cells:
        group = dist.new_group(cell, backend="gloo")
        if here in cell:
            own, source = group, _source(cell, reports)
    pipeline_reports = [reports[rank] for rank in report.pipeline]
    counts = {stage: n for each in pipeline_reports for stage, n in zip(each.stages, each.num_layers, strict=True)}
    num_layers = tuple(counts[stage] for stage in range(len(rank_of)))
    return Place(layout, own, source, source in report.pipeline, len(cells) == 1, num_layers)


def _described(encoder: tuple[int, int, int] | None) -> str:
    if encoder is None:
        return "a model that is not cut by modality"
    together = f"{encoder[2]} images" if encoder[2] else "all images"
    return f"{encoder[0]} stages of an encoder and {encoder[1]} of a language model, {together} at once"


def _ranks_of_stages(pipeline: Sequence[int], reports: Sequence[RankReport], count: int | None) -> list[int]:
    """Return the pipeline rank of every stage; ``count`` is None if they end with the last one that a rank has.

    Raises `InputError` if the stages do not form a chain.
    """
    rank_of: dict[int, int] = {}
    remedy = "give every stage of the chain to one rank"
    for place, rank in enumerate(pipeline):
        for number in reports[rank].stages:
            if number in rank_of:
                raise InputError(f"stage {number}", f"is on pipeline ranks {rank_of[number]} and {place}", remedy)
            rank_of[number] = place
    last = max(rank_of, default=-1) if count is None else count - 1
    for number in range(last + 1):
        if number not in rank_of:
            raise InputError(f"stage {number}", f"of 0..{last} is on no pipeline rank", remedy)
    for place in range(len(pipeline)):
        if place not in rank_of.values():
            raise InputError(f"pipeline rank {place}", "has no model chunk", "give every rank at least one")
    return [rank_of[number] for number in range(last + 1)]


def _source(cell: Iterable[int], reports: Sequence[RankReport]) -> int:
    """Return the rank that decides: the lowest one with the first stage, if possible one that reads data."""
    firsts = [rank for rank in cell if 0 in reports[rank].stages]
    return min([rank for rank in firsts if reports[rank].reads] or firsts)


def _connected(groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the ranks that are connected through groups, in order."""
    cells: list[set[int]] = []
    for group in dict.fromkeys(map(tuple, groups)):
        joined = [cell for cell in cells if not cell.isdisjoint(group)]
        cells = [cell for cell in cells if cell.isdisjoint(group)] + [set(group).union(*joined)]
    return sorted(map(sorted, cells))
