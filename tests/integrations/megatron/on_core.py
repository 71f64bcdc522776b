"""What the tests of `planned_forward_backward` run inside launched processes, with Megatron Core on gloo CPU ranks.

Megatron's own schedules run under `OnCpu`, ours without it.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.timeline.schedule import random_schedule
from tests.integrations.megatron.train_step import OnCpu

ENOUGH = 1e-10


@dataclass(frozen=True)
class Case:
    """A tiny model and its degrees."""

    pp: int = 2
    vpp: int | None = None
    tp: int = 1
    cp: int = 1
    layers: int = 4
    hidden: int = 16
    heads: int = 2
    vocabulary: int = 32
    tokens: int = 8
    tied: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    """More settings of the model."""
    ddp: dict[str, Any] | None = None
    """Settings of Megatron's wrapper; None: the model is not wrapped."""
    scale: float = 1.0
    """Scale of the loss in the backward."""
    stages: tuple[tuple[int, ...], ...] | None = None
    """Stages of every pipeline rank; None: as Megatron places them."""

    @property
    def num_stages(self) -> int:
        return self.pp * (self.vpp or 1) if self.stages is None else sum(map(len, self.stages))


def set_up(case: Case) -> None:
    """Prepare this process for Megatron Core without a GPU."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment, return-value]
    # Tied embeddings are summed "on the GPU" when the model is built.
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    rng._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    rng._set_cuda_rng_state = lambda *_, **__: None
    # Without Transformer Engine, 0.16.1 uses this name without defining it.
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # It reads pinned memory.
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda embedding, *_: embedding[sequence_part(len(embedding))]
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = sequence_parallel_norm
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        case.vpp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.config.get("expert_model_parallel_size", 1),
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def sequence_parallel_norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
    """Torch's norm, with the mark by which Megatron sums gradients of norms over tensor ranks."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def chunks_of(case: Case) -> list[Any]:
    """This rank's model chunks; weights are a function of their names in the whole model."""
    from megatron.core import parallel_state

    rank = parallel_state.get_pipeline_model_parallel_rank()
    own = [i * case.pp + rank for i in range(case.vpp or 1)] if case.stages is None else case.stages[rank]
    return wrapped([model_of(case, stage, number) for number, stage in enumerate(own)], case.ddp)


def wrapped(models: list[Any], settings: dict[str, Any] | None) -> list[Any]:
    """Chunks under Megatron's wrapper with these settings; None: as they are."""
    if settings is None:
        return models
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    made = [
        DistributedDataParallel(
            model.config, DistributedDataParallelConfig(**settings), model, disable_bucketing=number > 0
        )
        for number, model in enumerate(models)
    ]
    for model in made:
        model.config.finalize_model_grads_func = finalize_model_grads
        if settings.get("overlap_grad_reduce"):
            functions = [each.no_sync for each in made]
            model.config.no_sync_func = functions if len(made) > 1 else functions[0]
    return made


def model_of(case: Case, stage: int, number: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig

    several = case.vpp is not None or case.stages is not None
    settings = {
        "num_layers": case.layers,
        "hidden_size": case.hidden,
        "num_attention_heads": case.heads,
        "ffn_hidden_size": 2 * case.hidden,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "context_parallel_size": case.cp,
        "pipeline_dtype": torch.float64,
        "params_dtype": torch.float64,
        "attention_softmax_in_fp32": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "overlap_p2p_comm": several,
        "batch_p2p_comm": not several,
        "deallocate_pipeline_outputs": False,
    }
    config = TransformerConfig(**settings | case.config)
    config.grad_scale_func = None if case.scale == 1.0 else lambda loss: loss * case.scale
    spec, predictors = get_gpt_layer_local_spec(num_experts=config.num_moe_experts), None
    if case.cp > 1:
        spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    if config.mtp_num_layers and stage == case.num_stages - 1:
        predictors = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=number)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=predictors,
        vocab_size=case.vocabulary,
        max_sequence_length=8 * case.tokens,
        pre_process=stage == 0,
        post_process=stage == case.num_stages - 1,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        vp_stage=number if case.vpp is not None else None,
    ).double()
    if case.stages is not None:
        # Megatron numbers layers by its own placement.
        each = len(model.decoder.layers)
        for i, layer in enumerate(model.decoder.layers):
            layer.layer_number = stage * each + i + 1
    for name, parameter in named(model):
        sign = name + str(dist.get_rank() if ".experts." in name else 0) if not name.startswith("embedding") else name
        fill(parameter, "output_layer.weight" if case.tied and "word_embeddings" in name else sign)
    return model


def sequence_part(length: int) -> Tensor:
    """Positions of this context rank: two parts of equal distance from the ends, as Megatron assigns them."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    parts = torch.arange(length).chunk(2 * size)
    return torch.cat([parts[rank], parts[-1 - rank]])


class _Gather(torch.autograd.Function):
    """Gather the sequences of all context ranks; the gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class GatheredAttention(torch.nn.Module):
    """Causal attention over context ranks, which Megatron has in Transformer Engine only."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        here = sequence_part(len(query) * dist.get_world_size(group))
        places = _Gather.apply(here[:, None], group)[:, 0]  # type: ignore[no-untyped-call]
        keys, values = (_Gather.apply(each, group) for each in (key, value))  # type: ignore[no-untyped-call]
        scores = torch.einsum("sbhd,tbhd->bhst", query, keys) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(places[None, :] > here[:, None], float("-inf"))
        return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), values).flatten(2)


def fill(parameter: Tensor, name: str) -> None:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        parameter.copy_(values * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


def named(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters by their names in the whole model: a layer's number there, not in its chunk."""
    while hasattr(model, "module"):
        model = model.module
    numbers = {f"decoder.layers.{i}": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        prefix = ".".join(parts[:3])
        if prefix in numbers:
            name = ".".join(["decoder.layers", str(numbers[prefix]), *parts[3:]])
        yield name, parameter


def taken(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Take this rank's gradients."""
    found = {}
    for chunk in chunks:
        for name, parameter in named(chunk):
            main = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if main is None else main
            found[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            parameter.grad = None
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
    return found


def step_function(per_token: bool = False) -> Callable[..., Any]:
    """A forward step as in training scripts: the batch from the iterator, and a loss with a mask."""

    def step(iterator: Any, model: Any, _: bool | None = None) -> Any:
        from functools import partial

        batch = next(iterator)
        length = batch["tokens"].shape[1]
        here = sequence_part(length)
        if len(here) < length:
            batch = {name: value[:, here] for name, value in batch.items()}
        device = batch["tokens"].device
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        output = model(batch["tokens"], here[None].to(device), mask, labels=batch["labels"])
        return output, partial(loss, batch["loss_mask"])

    def loss(mask: Tensor, losses: Tensor) -> Any:
        total = (losses.double() * mask).sum()
        # A context rank may have no token that counts.
        count = mask.sum().clamp(min=1).to(torch.int)
        if per_token:
            return total, count, {"loss": total.detach().clone(), "tokens": count}
        return total / count, {"loss": (total / count).detach().clone()}

    return step


def batches(case: Case, seed: int, lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        tokens = torch.randint(case.vocabulary, (1, length + 1), generator=generator)
        mask = (torch.rand(1, length, generator=generator) < 0.7).double()
        mask[0, 0] = 1.0
        found.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask})
    return found


def iterators(case: Case, items: Sequence[Any], chunks: Sequence[Any]) -> Any:
    return [iter(items) for _ in chunks] if len(chunks) > 1 else iter(items)


def arguments(case: Case, items: Sequence[Any], chunks: list[Any], **more: Any) -> dict[str, Any]:
    """Arguments of a step, as a training loop passes them."""
    return {
        "forward_step_func": step_function(case.config.get("calculate_per_token_loss", False)),
        "data_iterator": iterators(case, items, chunks),
        "model": chunks if len(chunks) > 1 else chunks[0],
        "num_microbatches": len(items),
        "seq_length": items[0]["tokens"].shape[1],
        "micro_batch_size": 1,
        "forward_only": False,
    } | more


def theirs(case: Case, items: Sequence[Any], chunks: list[Any], **more: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses and gradients of Megatron's own schedule."""
    from megatron.core.pipeline_parallel import schedules

    with OnCpu():
        losses = schedules.get_forward_backward_func()(**arguments(case, items, chunks, **more))
    return losses, taken(chunks)


def ours(case: Case, items: Sequence[Any], chunks: list[Any], **more: Any) -> tuple[list[Any], dict[str, Tensor]]:
    from pipeloom.integrations.megatron.core.forward_backward import planned_forward_backward

    losses = planned_forward_backward(**arguments(case, items, chunks, **more))
    return losses, taken(chunks)


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def losses_differ(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    assert len(found) == len(wanted), (found, wanted)
    return max((float((a["loss"] - b["loss"]).abs()) for a, b in zip(found, wanted, strict=True)), default=0.0)


@contextmanager
def planned(**options: Any) -> Iterator[None]:
    from pipeloom.integrations.megatron.core import forward_backward

    forward_backward.configure(**options)
    try:
        yield
    finally:
        forward_backward.configure()


def undivided(case: Case, items: Sequence[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of all stages one after the other on this rank, without a schedule."""
    chunks = [model_of(case, stage, 0) for stage in range(case.num_stages)]
    losses = []
    for item in items:
        tensor = None
        for chunk in chunks:
            if tensor is not None:
                chunk.set_input_tensor(tensor)
            tensor, loss = step_function()(iter([item]), chunk)
        value, _ = loss(tensor)
        losses.append(float(value))
        (value / len(items)).backward()
    return losses, taken(chunks)


def placed_otherwise(case: Case, plans: int) -> dict[str, float]:
    """Chunks on other ranks than Megatron places them, beside the undivided model; and forwards alone."""
    from pipeloom.integrations.megatron.core.forward_backward import close
    from pipeloom.integrations.steps.planning import Planning

    set_up(case)
    assert case.stages is not None
    chunks, own = chunks_of(case), case.stages[dist.get_rank()]
    worst = worst_loss = 0.0
    with planned(planner=Planning(order=random_orders(0), backward="either"), stages=own):
        for seed in range(plans):
            items = batches(case, seed, [case.tokens] * (3 + seed))
            wanted_losses, wanted = undivided(case, items)
            found_losses, found = ours(case, items, chunks)
            worst = max(worst, difference(found, {name: wanted[name] for name in found}))
            with torch.no_grad():
                evaluated, none = ours(case, items, chunks, forward_only=True)
            assert not any(gradient.any() for gradient in none.values())
            for losses in (found_losses, evaluated):
                assert len(losses) == (len(items) if case.num_stages - 1 in own else 0)
                for loss, wanted_loss in zip(losses, wanted_losses[: len(losses)], strict=True):
                    worst_loss = max(worst_loss, abs(float(loss["loss"]) - wanted_loss))
    close(chunks)
    return {"gradients": worst, "losses": worst_loss}


def random_orders(seed: int) -> Callable[..., Any]:
    rng = random.Random(seed)
    return lambda graph: random_schedule(rng, graph)


def against_megatron(
    case: Case, plans: int, backward: str = "whole", lengths: Sequence[int] = (), predict_shapes: bool = True
) -> dict[str, float]:
    """Steps of random plans beside Megatron's schedule, with other microbatches in every step and replica."""
    from megatron.core import parallel_state

    from pipeloom.integrations.megatron.core.forward_backward import close
    from pipeloom.integrations.steps.planning import Planning

    set_up(case)
    chunks = chunks_of(case)
    rng, replica = random.Random(1), parallel_state.get_data_parallel_rank()
    own = random.Random(replica)
    worst = worst_loss = 0.0
    planning = Planning(order=random_orders(replica), backward=backward)
    with planned(planner=planning, predict_shapes=predict_shapes):
        for seed in range(plans):
            count = case.pp * rng.randint(1, 3)
            sizes = [own.choice(lengths) if lengths else case.tokens for _ in range(count)]
            items = batches(case, seed + 1000 * replica, sizes)
            wanted_losses, wanted = theirs(case, items, chunks)
            assert any(gradient.abs().max() > 0 for gradient in wanted.values())
            found_losses, found = ours(case, items, chunks)
            worst = max(worst, difference(found, wanted))
            worst_loss = max(worst_loss, losses_differ(found_losses, wanted_losses))
    close(chunks)
    return {"gradients": worst, "losses": worst_loss}


class Data:
    """Microbatches of a run, as a data loader reads them: item by item, from any sample on."""

    def __init__(self, case: Case, consumed: int = 0, end: int | None = None) -> None:
        self.case, self.number, self.end = case, consumed, end

    def __iter__(self) -> Data:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self.number == self.end:
            raise StopIteration
        length = random.Random(self.number).choice([3, 4, 6, 11])
        (item,) = batches(self.case, self.number, [length])
        self.number += 1
        return item


def trained(case: Case, run: Callable[..., Any], steps: range, consumed: int, states: Any = None) -> Any:
    """Losses of training steps with an optimizer, clipping and a schedule of rates; and the states to resume from."""
    set_up(case)
    chunks = chunks_of(case)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.99**step)
    if states is not None:
        for chunk, state in zip(chunks, states["chunks"], strict=True):
            chunk.load_state_dict(state)
        optimizer.load_state_dict(states["optimizer"])
        rates.load_state_dict(states["rates"])
    sources = [Data(case, consumed) for _ in chunks]
    losses: list[float] = []
    for step in steps:
        # The number of microbatches grows, as with Megatron's ramp-up of the batch size.
        count = case.pp * (1 + step // 10 % 2)
        items = [{"tokens": torch.zeros(1, 1)}] * count
        call = arguments(case, items, chunks) | {"data_iterator": sources if len(chunks) > 1 else sources[0]}
        found = run(call)
        norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
        dist.all_reduce(norm)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, 1.0 / float(norm.sqrt())))
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses += [float(each["loss"]) for each in found]
        consumed += count
    states = {
        "chunks": [chunk.state_dict() for chunk in chunks],
        "optimizer": optimizer.state_dict(),
        "rates": rates.state_dict(),
    }
    return losses, consumed, states, chunks


def resumed(case: Case, num_steps: int) -> dict[str, Any]:
    """A run of ours that is stopped and resumed, beside Megatron's."""
    from megatron.core.pipeline_parallel import schedules

    from pipeloom.integrations.megatron.core import forward_backward
    from pipeloom.integrations.steps.planning import Planning

    def theirs(call: dict[str, Any]) -> Any:
        with OnCpu():
            return schedules.get_forward_backward_func()(**call)

    def ours(call: dict[str, Any]) -> Any:
        return forward_backward.planned_forward_backward(**call)

    wanted, consumed, *_ = trained(case, theirs, range(num_steps), 0)
    half = num_steps // 2
    counts: dict[str, int] = {}
    with planned(planner=Planning(budget_s=0.02, deadline_s=30.0)):
        losses, middle, states, chunks = trained(case, ours, range(half), 0)
        forward_backward.close(chunks)
        more, end, _, chunks = trained(case, ours, range(half, num_steps), middle, states)
        counts = forward_backward.step_counts(chunks)
        forward_backward.close(chunks)
    assert end == consumed
    assert len(losses + more) == len(wanted)
    worst = max((abs(a - b) for a, b in zip(losses + more, wanted, strict=True)), default=0.0)
    return {"losses": worst, "number": len(wanted), "counts": counts}


def checkpointed(case: Case, folder: str, ours_first: bool) -> dict[str, float]:
    """Steps by ours and by Megatron, with a distributed checkpoint between them, beside steps by Megatron alone."""
    from pathlib import Path

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from pipeloom.integrations.megatron.core.forward_backward import close

    def run(function: Callable[..., Any], chunks: list[Any], seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            found, gradients = function(case, batches(case, seed, [case.tokens] * 4), chunks)
            losses += [float(each["loss"]) for each in found]
            with torch.no_grad():
                for chunk in chunks:
                    for name, parameter in named(chunk):
                        parameter -= 0.1 * gradients[name]
        return losses

    def state(chunks: list[Any]) -> dict[str, Any]:
        return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}

    set_up(case)
    # It is logged, and needs psutil.
    filesystem_async._process_memory = lambda: 0
    chunks = chunks_of(case)
    wanted = run(theirs, chunks, range(6))
    weights = [parameter.clone() for chunk in chunks for parameter in chunk.parameters()]
    functions = (ours, theirs) if ours_first else (theirs, ours)
    place = Path(folder) / ("ours" if ours_first else "theirs")
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    chunks = chunks_of(case)
    found = run(functions[0], chunks, range(3))
    dist_checkpointing.save(state(chunks), str(place))
    close(chunks)
    chunks = chunks_of(case)
    loaded = dist_checkpointing.load(state(chunks), str(place))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    found += run(functions[1], chunks, range(3, 6))
    close(chunks)
    now = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return {
        "losses": max((abs(a - b) for a, b in zip(found, wanted, strict=True)), default=0.0),
        "gradients": max(float((a - b).abs().max()) for a, b in zip(now, weights, strict=True)),
    }


def searched(case: Case) -> dict[str, Any]:
    """Train on sizes that never come again, until steps run plans that the planner's process made; then end it."""
    import time

    from pipeloom.integrations.megatron.core import forward_backward
    from pipeloom.integrations.steps.planning import Planning

    set_up(case)
    chunks = chunks_of(case)
    sources = [Data(case) for _ in chunks]
    items = [{"tokens": torch.zeros(1, 1)}] * 4
    call = arguments(case, items, chunks) | {"data_iterator": sources if len(chunks) > 1 else sources[0]}
    done, num_steps = torch.zeros(1), 0
    with planned(planner=Planning(budget_s=0.02, deadline_s=30.0)):
        while not done and num_steps < 2000:
            forward_backward.planned_forward_backward(**call)
            taken(chunks)
            num_steps += 1
            counts = forward_backward.step_counts(chunks)
            done = torch.tensor([float(counts.get("search", 0) >= 3)])
            dist.all_reduce(done, dist.ReduceOp.MAX)
            time.sleep(0.05)
    planner = chunks[0].__dict__[forward_backward._ATTRIBUTE].steps.planner
    if planner is not None:
        planner._requests._planner.process.kill()
    losses = [each for _ in range(5) for each in forward_backward.planned_forward_backward(**call)]
    counts = forward_backward.step_counts(chunks)
    forward_backward.close(chunks)
    return {"done": bool(done), "counts": counts, "num_steps": num_steps + 5, "after": len(losses)}


def refused() -> list[str]:
    """Messages of steps that cannot run. Every call ends on all ranks."""
    from pipeloom.errors import ExecutionError, InputError
    from pipeloom.integrations.megatron.core import forward_backward
    from pipeloom.integrations.steps.planning import Planning

    here, reported = dist.get_rank(), []

    def report(chunks: list[Any], call: dict[str, Any], **options: Any) -> None:
        options.setdefault("planner", Planning(budget_s=0.0))
        try:
            forward_backward.planned_forward_backward(**call, options=forward_backward.StepOptions(**options))
        except (InputError, ExecutionError) as problem:
            reported.append(str(problem))
        else:
            reported.append("nothing")

    case = Case()
    set_up(case)
    chunks = chunks_of(case)
    items = batches(case, 0, [case.tokens] * 4)
    call = arguments(case, items, chunks)
    report(chunks, call, stages=[0])
    report(chunks, call, stages=[2 * here])
    report(chunks, call, stages=[0, 1])
    report(chunks, call | {"data_iterator": list(items) if here else iter(items)})
    report(chunks, call | {"data_iterator": items[0] if here else iter(items)})
    config = chunks[0].config
    config.defer_embedding_wgrad_compute = True
    report(chunks, call)
    config.defer_embedding_wgrad_compute = False
    config.recompute_granularity = "full"
    report(chunks, call, planner=Planning(backward="either"))
    config.recompute_granularity = None
    report(chunks, arguments(case, items, chunks) | {"num_microbatches": 4 if here else 3})
    report(chunks, arguments(case, items[:3] if here else items, chunks) | {"num_microbatches": 4})
    report(chunks, arguments(case, items if here else items[:3], chunks) | {"num_microbatches": 4})
    report(chunks, arguments(case, items, chunks) | {"forward_only": here == 1})
    report(chunks, arguments(case, items, chunks) | {"num_microbatches": 0})
    report(chunks, arguments(case, items, chunks))
    forward_backward.close(chunks)
    return reported


def run_all(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Call several of this module's functions: importing Megatron Core takes longer than a case."""
    return [globals()[name](*given) for name, given in calls]
