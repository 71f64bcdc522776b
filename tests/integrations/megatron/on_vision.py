"""What the tests of vision-language models run inside launched processes, with Megatron Core on gloo CPU ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.megatron.on_core import (
    Case,
    OnCpu,
    difference,
    fill,
    losses_differ,
    planned,
    random_orders,
    set_up,
    wrapped,
)
from tests.integrations.megatron.torch_mixer import hybrid_pattern, hybrid_stack

IMAGE = -200
"""Token that stands for an image."""
SIDE, PATCH = 8, 4


@dataclass(frozen=True)
class Vision:
    """A tiny vision-language model and how it is cut."""

    pp: int = 2
    kind: str = "clip"
    """Of LLaVA's vision model: ``clip``, ``siglip`` or ``radio``; or ``mimo``."""
    hybrid: bool = False
    """Whether LLaVA's language model is a hybrid, with a mixer of plain torch."""
    encoder_chunks: int = 1
    language_chunks: int = 1
    most_images: int | None = 2
    encoder_layers: tuple[int, ...] | None = None
    depth: int = 4
    """Layers of the encoder."""
    layers: int = 4
    hidden: int = 16
    variable: bool = True
    tied: bool = False
    images: tuple[int, ...] = (0, 1, 2, 3, 5)
    """Numbers of images of a microbatch."""
    reads_everywhere: bool = True
    """Whether ranks between the first and the last read data."""
    frozen: str = ""
    """What is not trained: ``vision``, ``encoder`` with the projector, or ``language``."""
    ddp: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        """Degrees, as the other tests have them."""
        return Case(pp=self.pp, vpp=self.encoder_chunks + self.language_chunks)

    @property
    def tokens_of_image(self) -> int:
        return {"clip": 5, "siglip": 4, "radio": 4 + 8, "mimo": 5}[self.kind]


def set_up_vision(vision: Vision) -> None:
    """Prepare this process. Without Transformer Engine, norms of vision models lack a class that can be built."""
    set_up(vision.case)
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.radio import RADIOViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # Megatron makes the default mask on ``cuda``.
    fused_softmax.get_default_causal_mask = lambda size: torch.ones(size, size, dtype=torch.bool).triu(1)
    for made in (CLIPViTModel, RADIOViTModel):
        defaults = made.__init__.__defaults__
        made.__init__.__defaults__ = tuple(
            WrappedTorchNorm if each is torch.nn.LayerNorm else each for each in defaults
        )


LONGEST = 64
"""Longest sequence of the language model."""


def config_of(vision: Vision, layers: int, pp: int, virtual: int | None, **more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    settings = {
        "num_layers": layers,
        "hidden_size": vision.hidden,
        "num_attention_heads": 2,
        "ffn_hidden_size": 2 * vision.hidden,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_dtype": torch.float64,
        "params_dtype": torch.float64,
        "attention_softmax_in_fp32": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "deallocate_pipeline_outputs": False,
        "variable_seq_lengths": vision.variable,
        "moe_token_dispatcher_type": "alltoall",
    }
    return TransformerConfig(**settings | more)


def build(vision: Vision, pp: int, **settings: Any) -> Any:
    """Build a whole model or a part of it, as a training script's provider does."""
    settings.setdefault("vp_stage", None)
    virtual = vision.language_chunks if vision.language_chunks > 1 and pp > 1 else None
    language = config_of(vision, vision.layers, pp, virtual, **vision.config)
    encoder = config_of(vision, vision.depth, 1, None)
    projector = config_of(vision, 1, 1, None)
    model = (mimo if vision.kind == "mimo" else llava)(vision, language, encoder, projector, settings).double()
    freeze(vision, model)
    for name, parameter in model.named_parameters():
        fill(parameter, whole_name(model, name, vision))
    return model


def projector_layers() -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def llava(vision: Vision, language: Any, encoder: Any, projector: Any, settings: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    spec, more = get_gpt_layer_local_spec(), {}
    if vision.hybrid:
        language.language_model_type = "nemotron5-hybrid"
        spec, more = hybrid_stack(), hybrid_pattern(vision.layers, language.pipeline_model_parallel_size)
    encoder.vision_model_type = vision.kind
    # The class of LLaVA's RADIO has positions of 2048 pixels.
    side, patch = (2048, 1024) if vision.kind == "radio" else (SIDE, PATCH)
    return LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=spec,
        language_vocab_size=32,
        language_max_sequence_length=LONGEST,
        vision_transformer_config=encoder,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=projector,
        vision_projection_layer_spec=projector_layers(),
        share_embeddings_and_output_weights=vision.tied,
        language_position_embedding_type="rope",
        img_h=side,
        img_w=side,
        patch_dim=patch,
        **settings,
        **more,
    )


def mimo(vision: Vision, language: Any, encoder: Any, projector: Any, settings: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mimo import MimoModel, MimoModelConfig
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_layer_local_spec()
    clip = ModuleSpec(
        module=CLIPViTModel,
        params={
            "transformer_config": encoder,
            "transformer_layer_spec": get_vit_layer_with_local_spec(),
            "patch_dim": PATCH,
            "img_h": SIDE,
            "img_w": SIDE,
        },
    )
    projection = ModuleSpec(
        module=MultimodalProjector,
        params={
            "config": projector,
            "submodules": projector_layers(),
            "projector_type": "mlp",
            "input_size": vision.hidden,
        },
    )
    submodules = ModuleSpec(
        module=VisionModalitySubmodules, submodules={"encoders": {"clip": clip}, "input_projections": [projection]}
    )
    gpt = ModuleSpec(
        module=GPTModel,
        params={
            "config": language,
            "transformer_layer_spec": spec,
            "vocab_size": 32,
            "max_sequence_length": LONGEST,
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": vision.tied,
            "pre_process": settings.get("pre_process", True),
            "post_process": settings.get("post_process", True),
            "vp_stage": settings["vp_stage"],
        },
    )
    return MimoModel(MimoModelConfig(gpt, {"images": submodules}, {"images": IMAGE}))


def freeze(vision: Vision, model: Any) -> None:
    parts = {"vision": ("vision_model",), "encoder": ("vision_model", "vision_projection"), "language": ("language_",)}
    for name, parameter in model.named_parameters():
        if name.startswith(parts.get(vision.frozen, ("nothing",))):
            parameter.requires_grad = False


def whole_name(model: Any, name: str, vision: Vision) -> str:
    """Name of a parameter in the whole model: a layer of the language model has its number there."""
    head, mark, rest = name.partition("language_model.decoder.layers.")
    if mark:
        number, _, rest = rest.partition(".")
        name = f"{head}{mark}{model.language_model.decoder.layers[int(number)].layer_number - 1}.{rest}"
    if vision.tied and name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return "tied.weight"
    return name


def taken(vision: Vision, chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Take this rank's gradients by name in the whole model."""
    found = {}
    for chunk in chunks:
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        model = getattr(inner, "model", inner)
        for name, parameter in model.named_parameters():
            main = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if main is None else main
            whole = whole_name(model, name, vision)
            value = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            found[whole] = found[whole] + value if whole in found and len(chunks) == 1 else value
            parameter.grad = None
        if hasattr(chunk, "module"):
            chunk.zero_grad_buffer()
    return found


def batches(vision: Vision, seed: int, count: int) -> list[dict[str, Tensor]]:
    """Microbatches with different numbers of images and lengths."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    side = 2048 if vision.kind == "radio" else SIDE
    found = []
    for _ in range(count):
        num, length = rng.choice(vision.images), rng.choice((4, 7, 12))
        text = torch.randint(32, (length + num,), generator=generator)
        places = torch.randperm(length + num, generator=generator)[:num].sort().values
        if vision.kind == "mimo":
            pieces = [
                torch.full((vision.tokens_of_image,), IMAGE) if i in places else text[i : i + 1]
                for i in range(len(text))
            ]
            text = torch.cat(pieces)
        else:
            text[places] = IMAGE
        labels = torch.randint(32, text.shape, generator=generator)
        mask = (torch.rand(text.shape, generator=generator) < 0.7).double()
        mask[text == IMAGE] = 0.0
        mask[(text != IMAGE).nonzero()[0]] = 1.0
        found.append(
            {
                "tokens": text[None],
                "labels": labels[None],
                "loss_mask": mask[None],
                "images": torch.randn(num, 3, side, side, generator=generator, dtype=torch.float64),
            }
        )
    return found


def step_function(vision: Vision) -> Callable[..., Any]:
    """A forward step as in `pretrain_vlm.py`, where ranks without data pass nothing."""

    def step(iterator: Any, model: Any, _: bool | None = None) -> Any:
        batch = {} if iterator is None else next(iterator)
        tokens, images = batch.get("tokens"), batch.get("images")
        given, mask = (tokens, None), None
        if tokens is not None:
            given, length = (tokens, torch.arange(tokens.shape[1])[None]), tokens.shape[1]
            if vision.kind != "mimo":
                length = length + len(images) * (vision.tokens_of_image - 1) if vision.variable else LONGEST
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        if vision.kind == "mimo":
            inputs = None if images is None or not len(images) else {"images": {"clip": {"x": images}}}
            output, loss_mask = model(
                *given, mask, labels=batch.get("labels"), loss_mask=batch.get("loss_mask"), modality_inputs=inputs
            )
        else:
            tiles = None if images is None else torch.ones(len(images), dtype=torch.int)
            output, loss_mask = model(
                images, *given, mask, batch.get("labels"), batch.get("loss_mask"), num_image_tiles=tiles
            )
        return output, partial(loss, loss_mask)

    def loss(mask: Tensor, losses: Tensor) -> Any:
        mean = (losses.double() * mask).sum() / mask.sum().clamp(min=1)
        return mean, {"loss": mean.detach().clone()}

    return step


def alone() -> Any:
    """Groups of a pipeline of this rank alone. All ranks call it together."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return groups


def undivided(vision: Vision, items: Sequence[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of the whole model on this rank."""
    # A hybrid stack divides its layers by the group, whatever its configuration says.
    model = build(vision, 1, **({"pg_collection": alone()} if vision.hybrid else {}))
    model.train(vision.kind != "radio")
    model._language_is_pipeline_parallel = not vision.variable
    losses = []
    for item in items:
        output, loss = step_function(vision)(iter([item]), model)
        value, _ = loss(output)
        losses.append(float(value.detach()))
        # Without images, nothing depends on what is trained beside a frozen language model.
        if value.requires_grad:
            (value / len(items)).backward()
    return losses, taken(vision, [model])


def pipeline_rank() -> int:
    from megatron.core import parallel_state

    rank: int = parallel_state.get_pipeline_model_parallel_rank()
    return rank


def arguments(vision: Vision, items: Sequence[Any], chunks: list[Any]) -> dict[str, Any]:
    place = pipeline_rank()
    reads = vision.reads_everywhere or place in (0, vision.pp - 1)
    return {
        "forward_step_func": step_function(vision),
        "data_iterator": [iter(items) if reads else None for _ in chunks],
        "model": chunks,
        "num_microbatches": len(items),
        "seq_length": LONGEST,
        "micro_batch_size": 1,
        "forward_only": False,
    }


def chunks_of(vision: Vision) -> list[Any]:
    from pipeloom.integrations.megatron.core.vision_language import vision_language_chunks

    made = vision_language_chunks(
        partial(build, vision, vision.pp),
        encoder_chunks=vision.encoder_chunks,
        language_chunks=vision.language_chunks,
        most_images=vision.most_images,
        encoder_layers=vision.encoder_layers,
    )
    for chunk in made:
        chunk.train(vision.kind != "radio")
    return wrapped(made, vision.ddp)


def against_whole(vision: Vision, plans: int, backward: str = "whole", searched: bool = False) -> dict[str, float]:
    """Steps of random plans beside the undivided model, with other microbatches in every step; and forwards alone."""
    from megatron.core import parallel_state

    from pipeloom.integrations.megatron.core.forward_backward import close, planned_forward_backward
    from pipeloom.integrations.steps.planning import Planning

    set_up_vision(vision)
    chunks, rng = chunks_of(vision), random.Random(0)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    worst = worst_loss = 0.0
    order = None if searched else random_orders(replica)
    with planned(planner=Planning(order=order, backward=backward, budget_s=0.0)):
        for seed in range(plans):
            count = rng.randint(1, 5)
            every = [batches(vision, seed + 1000 * other, count) for other in range(replicas)]
            whole = [undivided(vision, items) for items in every]
            items, (wanted_losses, _) = every[replica], whole[replica]
            wanted = {name: torch.stack([gradients[name] for _, gradients in whole]).mean(0) for name in whole[0][1]}
            found_losses = planned_forward_backward(**arguments(vision, items, chunks))
            found = taken(vision, chunks)
            assert found
            worst = max(worst, difference(found, {name: wanted[name] for name in found}))
            evaluated = planned_forward_backward(**arguments(vision, items, chunks) | {"forward_only": True})
            assert not any(gradient.any() for gradient in taken(vision, chunks).values())
            for losses in (found_losses, evaluated):
                assert len(losses) == (len(items) if pipeline_rank() == vision.pp - 1 else 0)
                for loss, value in zip(losses, wanted_losses[: len(losses)], strict=True):
                    worst_loss = max(worst_loss, abs(float(loss["loss"]) - value))
    close(chunks)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, sorted(found))
    assert {name for each in names for name in each} == set(wanted)
    return {"gradients": worst, "losses": worst_loss}


def against_1f1b(vision: Vision, plans: int) -> dict[str, float]:
    """Steps of random plans beside Megatron's own 1F1B, which runs the whole encoder on the first rank."""
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules

    from pipeloom.integrations.megatron.core.forward_backward import close, planned_forward_backward
    from pipeloom.integrations.steps.planning import Planning

    assert not vision.variable
    set_up_vision(vision)
    # Its 1F1B runs one chunk on each rank.
    set_up(Case(pp=vision.pp))
    rank = pipeline_rank()
    theirs = build(
        replace(vision, language_chunks=1),
        vision.pp,
        pre_process=rank == 0,
        post_process=rank == vision.pp - 1,
        add_encoder=rank == 0,
        add_decoder=True,
    )
    theirs.model_type = ModelType.encoder_or_decoder
    ours, worst, worst_loss = chunks_of(vision), 0.0, 0.0
    with planned(planner=Planning(order=random_orders(0))):
        for seed in range(plans):
            items = batches(vision, seed, 2 * vision.pp)
            given = arguments(vision, items, [theirs])
            with OnCpu():
                wanted_losses = schedules.forward_backward_pipelining_without_interleaving(**given)
            every: list[Any] = [None] * vision.pp
            dist.all_gather_object(every, taken(vision, [theirs]))
            wanted = {name: gradient for each in every for name, gradient in each.items()}
            losses = planned_forward_backward(**arguments(vision, items, ours))
            found = taken(vision, ours)
            worst = max(worst, difference(found, {name: wanted[name] for name in found}))
            worst_loss = max(worst_loss, losses_differ(losses, wanted_losses))
    close(ours)
    return {"gradients": worst, "losses": worst_loss}


def saved(vision: Vision) -> dict[str, float]:
    """The states of all chunks together load into the whole model, and the state of that into the chunks."""
    set_up_vision(vision)
    chunks, whole = chunks_of(vision), build(vision, 1)
    every: list[Any] = [None] * vision.pp
    named = [
        (whole_name(chunk.model, name, vision), value) for chunk in chunks for name, value in chunk.state_dict().items()
    ]
    dist.all_gather_object(every, named)
    together = {name: value for pairs in every for name, value in pairs}
    wanted = {name: value.clone() for name, value in whole.state_dict().items() if isinstance(value, Tensor)}
    # No weight is saved by two chunks.
    assert len(wanted) == sum(isinstance(value, Tensor) for pairs in every for _, value in pairs)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
    whole.load_state_dict(together)
    for chunk in chunks:
        chunk.load_state_dict(chunk.state_dict())
    found = {name: value for name, value in whole.state_dict().items() if isinstance(value, Tensor)}
    return {"names": len(together), "differ": difference(found, wanted)}


def as_the_script_builds(vision: Vision) -> list[str]:
    """Chunks from the calls of Megatron-LM's `get_model`, and errors for those that do not fit."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from pipeloom.errors import InputError
    from pipeloom.integrations.megatron.core.vision_language import VisionLanguageProvider

    set_up_vision(vision)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    virtual = vision.encoder_chunks + vision.language_chunks
    config = config_of(vision, vision.layers, vision.pp, virtual)
    given: list[Any] = []

    def provider(config: Any, pg_collection: Any, **settings: Any) -> Any:
        given.append((config.virtual_pipeline_model_parallel_size, settings))
        assert pg_collection is groups
        return build(vision, vision.pp, **settings)

    provide = VisionLanguageProvider(provider, vision.encoder_chunks, vision.language_chunks)
    made = []
    for number in range(virtual):
        chunk = provide(
            pre_process=number == 0, post_process=False, vp_stage=number, config=config, pg_collection=groups
        )
        chunk.vp_stage = number
        made.append(chunk)
    assert config.virtual_pipeline_model_parallel_size == virtual
    assert all(size == (vision.language_chunks if vision.language_chunks > 1 else None) for size, _ in given)
    kinds = [type(chunk).__name__ for chunk in made]
    try:
        provide(vp_stage=virtual)
    except InputError as problem:
        kinds.append(str(problem))
    return kinds


def refused(vision: Vision) -> list[str]:
    """Messages of models that cannot be cut, and of steps that cannot run. Every call ends on all ranks."""
    from pipeloom.errors import ExecutionError, InputError
    from pipeloom.integrations.megatron.core.forward_backward import StepOptions, close, planned_forward_backward
    from pipeloom.integrations.megatron.core.vision_language import vision_language_chunks
    from pipeloom.integrations.steps.planning import Planning

    set_up_vision(vision)
    reported, here = [], dist.get_rank()

    def report(run: Callable[[], Any]) -> None:
        try:
            run()
        except (InputError, ExecutionError) as problem:
            reported.append(str(problem))
        else:
            reported.append("nothing")

    def step(chunks: list[Any], given: Sequence[Any], **options: Any) -> Callable[[], Any]:
        all_options = StepOptions(planner=Planning(budget_s=0.0), **options)
        return lambda: planned_forward_backward(**arguments(vision, given, chunks), options=all_options)

    part = partial(build, vision, vision.pp)
    report(lambda: vision_language_chunks(part, most_images=0))
    report(lambda: vision_language_chunks(part, encoder_chunks=3))
    report(lambda: vision_language_chunks(part, encoder_layers=(1, 2)))
    report(lambda: vision_language_chunks(part, language_chunks=2))
    report(lambda: vision_language_chunks(lambda **_: torch.nn.Linear(1, 1)))
    chunks, items = vision_language_chunks(part, most_images=2), batches(vision, 3, 3)
    other = vision_language_chunks(part, most_images=1)
    report(step(chunks if here else other, items))
    report(step(chunks[1:] if here else chunks, items))
    report(step([chunks[0], other[1]], items))
    report(step(chunks, items, stages=[2 * here, 2 * here + 1]))
    report(step(chunks, [{**item, "images": None} for item in items]))
    report(step(chunks, items))
    close(chunks)
    return reported


def run_all(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Call several of this module's functions."""
    return [globals()[name](*given) for name, given in calls]
