"""torchtitan: a pipelining function for its model specs, which splits by cost and runs every step by a plan of its own.

In a model's spec, ``pipelining_fn=pipeline_planned`` stands in the place of ``pipeline_llm`` or ``pipeline_vlm``. How a
stage computes (FSDP2, tensor and expert parallelism, activation checkpointing, compilation) stays torchtitan's. Where
stages are cut follows from what layers cost; a vision encoder is cut like the rest, into stages of its own where it is
worth that, instead of lying in the first stage whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pipeloom.errors import InputError
from pipeloom.integrations.pipelining import PlannedSchedule
from pipeloom.layout.layouts import partition_chain

_VISION = "vision_encoder"
_PIXELS = ("pixel_values", "pixel_values_videos")
_BEHIND_LAYERS = ("norm", "lm_head")
Costs = Mapping[str, float]
"""By name of a part of the model, ``"layers.3"`` or ``"vision_encoder.layers.0"``, what it takes, in any one unit."""


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
    """Split a model of torchtitan into stages and make their schedule; called by its trainer, as ``pipeline_llm`` is.

    Options of its own are bound before: ``functools.partial(pipeline_planned, costs=..., planner=...)``.

    Parameters
    ----------
    model, parallel_dims, parallelism, model_config, training, device, loss_fn
        As torchtitan gives them.
    config
        ``parallelize_fn`` with ``compile_config``, ``ac_config`` and ``dump_folder`` that are for it, as torchtitan
        gives them; and of one's own ``costs`` (see `Costs`; what is missing is reckoned, see `reckoned_costs`),
        ``vision_tokens`` (patches for each token of the sequence, by which the reckoning weighs the vision encoder,
        1 where left out), and ``planner`` (`Planning`).

    Returns
    -------
    schedule, model parts of this rank, whether it has the first stage, whether it has the last

    Raises
    ------
    InputError
        When there are fewer parts than stages, or a CSV schedule is asked for.
    """
    if parallelism.pipeline_parallel_schedule_csv:
        raise InputError(
            "parallelism.pipeline_parallel_schedule_csv",
            "names a file, and steps are planned",
            "leave it out, or use pipeline_llm for schedules from files",
        )
    own = {name: config.pop(name) for name in ("costs", "vision_tokens", "planner") if name in config}
    parallelize = config.pop("parallelize_fn")
    pp_mesh = parallel_dims.get_mesh("pp")
    num_stages = _num_stages(parallelism, parallel_dims.pp, len(model_config.layers))
    names = parallelism.module_fqns_per_model_part
    if names is None:
        reckoned = reckoned_costs(model, training.seq_len, own.get("vision_tokens", 1.0))
        names = split_by_costs({**reckoned, **own.get("costs", {})}, num_stages)
    stages, parts = [], []
    for number in range(pp_mesh.get_local_rank(), len(names), pp_mesh.size()):
        part = model_part(model, names, number)
        part = parallelize(part, parallel_dims=parallel_dims, training=training, parallelism=parallelism, **config)
        stages.append(PipelineStage(part, number, len(names), device, group=pp_mesh.get_group("pp")))
        parts.append(part)
    schedule = PlannedSchedule(
        stages,
        own.get("planner"),
        _scalar(loss_fn),
        n_microbatches=training.local_batch_size // parallelism.pipeline_parallel_microbatch_size,
        scale_grads=False,
        # Experts and shards compute together over replicas, so all of these run one plan.
        together=torch.distributed.group.WORLD,
    )
    return schedule, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def _scalar(loss_fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """Losses of torchtitan return more than the loss."""

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        found = loss_fn(*args, **kwargs)
        value: Tensor = found[0] if isinstance(found, tuple) else found
        return value

    return loss


def _num_stages(parallelism: Any, num_ranks: int, num_layers: int) -> int:
    """As torchtitan reckons: from layers a stage, else one stage a rank, or two where the schedule has several."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        count: int = num_ranks * -(-num_layers // (per_stage * num_ranks))
        return count
    single = issubclass(get_schedule_class(parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    return num_ranks * (1 if single else 2)


# ------------------------------------------------------------------ where stages are cut


def reckoned_costs(model: Any, seq_len: int, vision_tokens: float = 1.0) -> dict[str, float]:
    """Operations of a forward for each token of the sequence, by part, in the order in which parts run.

    Two for each weight of a matrix that a token meets; of experts, of those that it is sent to; and those of
    attention over the sequence, which is taken to be as wide as the layer's largest square. It may lie on ``meta``.

    Parameters
    ----------
    model : torch.nn.Module
    seq_len : int
    vision_tokens : float
        Patches for each token of the sequence.
    """
    costs: dict[str, float] = {}
    encoder = getattr(model, _VISION, None)
    if encoder is not None and not _can_be_cut(encoder):
        costs[_VISION] = vision_tokens * _operations(encoder)
    elif encoder is not None:
        ends = sum(_operations(child) for name, child in encoder.named_children() if name != "layers")
        layers = {name: _operations(layer) for name, layer in encoder.layers.items()}
        for name, operations in layers.items():
            costs[f"{_VISION}.layers.{name}"] = vision_tokens * (operations + ends / len(layers))
    costs["tok_embeddings"] = 0.0
    for name, layer in model.layers.items():
        costs[f"layers.{name}"] = _operations(layer) + _attention(layer, seq_len)
    costs["norm"] = 0.0
    costs["lm_head"] = _operations(model.lm_head)
    return costs


def _operations(module: Any) -> float:
    """Of matrices: two a weight and token, and of experts' weights their share."""
    total = 0.0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        share = 1.0
        num_experts = getattr(part, "num_experts", None)
        if num_experts:
            share = _top_k(module) / num_experts
        for weight in part.parameters(recurse=False):
            if weight.dim() >= 2:
                total += 2.0 * weight.numel() * (share if weight.dim() == 3 else 1.0)
    return total


def _top_k(module: Any) -> float:
    found = [part.top_k for part in module.modules() if isinstance(getattr(part, "top_k", None), int)]
    return float(found[0]) if found else 1.0


def _attention(layer: Any, seq_len: int) -> float:
    """Scores and their sums over half of a sequence."""
    attention = getattr(layer, "attention", None) or getattr(layer, "attn", None)
    if attention is None:
        return 0.0
    widths = [weight.shape[0] for weight in attention.parameters() if weight.dim() == 2]
    return 2.0 * seq_len * min(widths, default=0)


def split_by_costs(costs: Costs, num_stages: int) -> list[list[str]]:
    """Cut parts, in their order, into stages whose heaviest is as light as can be.

    Raises
    ------
    InputError
        When there are fewer parts than stages.
    """
    names = list(costs)
    # What takes nothing stays with its neighbour: a stage of it alone would be none.
    groups: list[list[str]] = []
    for name in names:
        if groups and (name in _BEHIND_LAYERS or groups[-1][-1] in (_VISION, "tok_embeddings")):
            groups[-1].append(name)
        else:
            groups.append([name])
    if len(groups) < num_stages:
        raise InputError(
            "pipeline_parallel_degree",
            f"asks for {num_stages} stages, the model has {len(groups)} parts to cut",
            "use fewer stages",
        )
    loads = [sum(costs[name] for name in group) for group in groups]
    cuts = partition_chain(loads, num_stages)
    return [[name for group in groups[first : last + 1] for name in group] for first, last in cuts]


# ------------------------------------------------------------------ one stage


def model_part(model: Any, names: Sequence[Sequence[str]], number: int) -> Any:
    """The model with what one stage has of it, as torchtitan cuts models; a vision encoder may be cut too.

    The rank of a stage that has a part of the encoder gets the model with the encoder's layers of that stage; stages
    before the text's first hand on the tokens with what the encoder has come to.
    """
    from torchtitan.distributed.pipeline_parallel import _split_module

    mine = list(names[number])
    vision = [name for name in mine if name.startswith(f"{_VISION}.")]
    cut = [i for i, stage in enumerate(names) if any(name.startswith(f"{_VISION}.") for name in stage)]
    begins_text = "tok_embeddings" in mine
    whole = [_VISION] if vision or (begins_text and cut) else []
    part: Any = _split_module(model, [*(name for name in mine if name not in vision), *whole])
    if not whole or (cut == [number] and begins_text):
        return part
    if not _can_be_cut(part.vision_encoder):
        raise InputError(
            f"vision encoder {type(part.vision_encoder).__name__}",
            "is none that can be cut",
            "name 'vision_encoder' whole in parallelism.module_fqns_per_model_part",
        )
    layers = {name.rsplit(".", 1)[1] for name in vision}
    _cut_encoder(part.vision_encoder, layers, begins=number == cut[0], ends=begins_text)
    part.forward = functools.partial(_text_forward if begins_text else _vision_forward, part, number == cut[0])
    return part


def _can_be_cut(encoder: Any) -> bool:
    """Whether it is built as Qwen 3.5's."""
    names = ("patch_embed", "pos_embed", "layers", "merger", "compute_position_embeddings")
    return all(hasattr(encoder, name) for name in names)


class _PassedOn(nn.Module):
    """In the place of the patches' embedding, where a stage before has embedded them."""

    def __init__(self) -> None:
        super().__init__()
        # The model asks for the type that its encoder takes.
        self.register_buffer("weight", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def _cut_encoder(encoder: Any, layers: set[str], *, begins: bool, ends: bool) -> None:
    """Leave an encoder some of its layers, its beginning, its end."""
    for name in list(encoder.layers):
        if name not in layers:
            del encoder.layers[name]
    if not ends:
        encoder.merger = nn.Identity()
    if begins:
        return
    encoder.patch_embed = _PassedOn()
    weight = encoder.pos_embed
    del encoder.pos_embed
    encoder.register_buffer("pos_embed", torch.zeros_like(weight), persistent=False)
    positions = encoder.compute_position_embeddings

    def turned_alone(*given: Any) -> tuple[Tensor, Tensor]:
        # Places were added where the patches were embedded; what turns queries and keys is every layer's.
        learned, turns = positions(*given)
        return torch.zeros_like(learned), turns

    encoder.compute_position_embeddings = turned_alone


def _vision_forward(part: Any, begins: bool, tokens: Tensor, *hidden: Tensor, **kwargs: Any) -> Any:
    """Run a stage that has layers of the encoder alone."""
    given = _given(begins, hidden, kwargs)
    grids = {"pixel_values": "grid_thw", "pixel_values_videos": "grid_thw_videos"}
    return (tokens, *(part.vision_encoder(x, grid_thw=kwargs[grids[name]]) for name, x in given.items()))


def _text_forward(part: Any, begins: bool, tokens: Tensor, *hidden: Tensor, **kwargs: Any) -> Any:
    """Run the stage in which the text begins: the model's own forward, on what the encoder has come to."""
    return type(part).forward(part, tokens, **{**kwargs, **_given(begins, hidden, kwargs)})


def _given(begins: bool, hidden: Sequence[Tensor], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the encoder works on: pixels, or what the stage before gave for them."""
    present = [name for name in _PIXELS if kwargs.get(name) is not None]
    values = [kwargs[name] for name in present] if begins else hidden
    return dict(zip(present, values, strict=True))
