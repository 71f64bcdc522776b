"""`planned_forward_backward` on one GPU: gradients, the time of a step and peak memory beside Megatron Core's schedule.

``python -m benchmarks.gpu_megatron [--dry]``. One rank has the chunks of a GPT model, and the same layers in one model
run by ``forward_backward_no_pipelining``. The default process group is NCCL's. ``--dry`` rehearses on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import allocated, forget_peak, now, peak
from pipeloom.errors import InfeasibleError
from pipeloom.report import markdown_table
from pipeloom.runtime.launch.device import DeviceType
from pipeloom.timeline.schedule import random_schedule

CHUNKS = 2
WARM, REPEATS = 10, 5


class Size(NamedTuple):
    """What is computed."""

    layers: int
    """Layers of each chunk."""
    width: int
    ffn: int
    heads: int
    vocabulary: int
    lengths: tuple[int, ...]
    """Tokens of each microbatch."""
    dtype: torch.dtype


EXACT = Size(2, 256, 512, 4, 128, (96, 40, 64, 128, 24, 80), torch.float64)
LARGE = Size(4, 4096, 14336, 32, 32000, (2048, 1024, 512, 1536, 2048, 768, 1280, 256), torch.bfloat16)
DRY = Size(2, 16, 32, 2, 32, (12, 7, 20, 9), torch.float64)


def begin(device: DeviceType) -> None:
    """Prepare this process: a world of one rank."""
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if device == "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "megatron"))
        import on_cpu  # type: ignore[import-not-found]

        on_cpu.prepare()
    else:
        torch.cuda.set_device(0)
    store = torch.distributed.FileStore(  # type: ignore[attr-defined]
        str(Path(tempfile.mkdtemp()) / "store"), 1
    )
    # As Megatron-LM does, whose groups are NCCL's alone.
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    if device == "cuda":
        model_parallel_cuda_manual_seed(1)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)


def model_of(size: Size, layers: int, first: int, device: DeviceType, *, starts: bool, ends: bool) -> Any:
    """Return a model chunk whose weights depend on their names in the whole model alone."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        ffn_hidden_size=size.ffn,
        params_dtype=size.dtype,
        bf16=size.dtype == torch.bfloat16,
        pipeline_dtype=size.dtype,
        attention_softmax_in_fp32=size.dtype == torch.bfloat16,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        recompute_modules=["core_attn"],
        deallocate_pipeline_outputs=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=size.vocabulary,
        max_sequence_length=4096,
        pre_process=starts,
        post_process=ends,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(device, size.dtype)
    for name, parameter in model.named_parameters():
        name = whole_name(name, first)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        draw = torch.Generator(device).manual_seed(seed)
        values = torch.randn(parameter.shape, generator=draw, device=device, dtype=torch.float32)
        scale, mean = (0.1, 1.0) if "norm" in name and name.endswith("weight") else (size.width**-0.5, 0.0)
        with torch.no_grad():
            parameter.copy_(values * scale + mean)
        parameter.grad = torch.zeros_like(parameter)
    return model


def whole_name(name: str, first: int) -> str:
    """Return the name of a chunk's parameter in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + first)
    return ".".join(parts)


def gradients(models: Sequence[Any], size: Size) -> dict[str, Tensor]:
    """Return copies of the gradients by name in the whole model, and clear them."""
    found = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            found[whole_name(name, number * size.layers)] = parameter.grad.clone()
    clear(models)
    return found


def clear(models: Sequence[Any]) -> None:
    """Set all gradients to zero; their memory is kept."""
    for model in models:
        for parameter in model.parameters():
            parameter.grad.zero_()


def items_of(lengths: Sequence[int], size: Size, device: DeviceType, seed: int) -> list[dict[str, Tensor]]:
    """Return a step's items of the data iterator."""
    draw = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(size.vocabulary, (1, length + 1), generator=draw).to(device) for length in lengths]
    return [{"tokens": each[:, :-1], "labels": each[:, 1:]} for each in tokens]


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any, *_: Any) -> tuple[Tensor, Any]:
    """The forward step of a training script."""
    item = next(iterator)
    tokens = item["tokens"]
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    output = model(tokens, torch.arange(length, device=tokens.device)[None], mask, labels=item["labels"])
    return output, loss


def loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over tokens."""
    mean = losses.double().mean()
    return mean, {"loss": mean.detach().clone()}


def arguments(items: Sequence[Any], models: Sequence[Any]) -> dict[str, Any]:
    """Return what a training loop passes to a forward-backward function."""
    several = len(models) > 1
    return {
        "forward_step_func": forward_step,
        "data_iterator": [iter(items) for _ in models] if several else iter(items),
        "model": list(models) if several else models[0],
        "num_microbatches": len(items),
        "seq_length": max(item["tokens"].shape[1] for item in items),
        "micro_batch_size": 1,
    }


def theirs(device: DeviceType, items: Sequence[Any], whole: Any) -> list[Any]:
    """Run a step by Megatron Core's schedule."""
    from megatron.core.pipeline_parallel import schedules

    context: Any = contextlib.nullcontext()
    if device == "cpu":
        import on_cpu

        context = on_cpu.OnCpu()
    with context:
        return list(schedules.forward_backward_no_pipelining(**arguments(items, [whole])))


def ours(options: Any, items: Sequence[Any], chunks: Sequence[Any]) -> list[Any]:
    """Run a step by a plan. The public function would call Megatron Core's own for one pipeline rank."""
    from pipeloom.integrations.megatron.core.call import StepCall
    from pipeloom.integrations.megatron.core.forward_backward import steps_of

    call = StepCall(**arguments(items, chunks))
    return steps_of(call, options).run(call)


def models_of(size: Size, device: DeviceType) -> tuple[Any, list[Any]]:
    """Return the whole model, and its chunks."""
    whole = model_of(size, CHUNKS * size.layers, 0, device, starts=True, ends=True)
    chunks = [
        model_of(size, size.layers, i * size.layers, device, starts=i == 0, ends=i == CHUNKS - 1) for i in range(CHUNKS)
    ]
    return whole, chunks


def settings(**options: Any) -> Any:
    """Return options of planning, with the chunks of this rank one after the other."""
    from pipeloom.integrations.megatron.core.session import StepOptions

    return StepOptions(stages=range(CHUNKS), **options)


def planned_steps(chunks: Sequence[Any]) -> Any:
    """Return the planned steps of a model that has run one."""
    from pipeloom.integrations.megatron.core import forward_backward

    return chunks[0].__dict__[forward_backward._ATTRIBUTE].steps


def random_orders(seed: int) -> Callable[[Any], Any]:
    """Return a function that draws a schedule."""
    return partial(random_schedule, random.Random(seed))


def exactness(size: Size, device: DeviceType) -> str:
    """Random plans: gradients and losses beside Megatron Core's."""
    from pipeloom.integrations.megatron.core.forward_backward import close
    from pipeloom.integrations.steps.planning import Planning

    whole, chunks = models_of(size, device)
    rows = []
    for words, whole_only, limit in (
        ("keep, whole backward", True, None),
        ("keep, either backward", False, None),
        ("random strategies", True, 1 << 40),
    ):
        planning = Planning(order=random_orders(0), backward="whole" if whole_only else "either")
        options = settings(planner=planning, activation_bytes=limit)
        worst, worst_loss, used = 0.0, 0.0, set()
        for seed in range(20):
            lengths = [*size.lengths]
            random.Random(seed).shuffle(lengths)
            items = items_of(lengths, size, device, seed)
            wanted_losses = theirs(device, items, whole)
            wanted = gradients([whole], size)
            losses = ours(options, items, chunks)
            found = gradients(chunks, size)
            assert found.keys() == wanted.keys()
            largest = max(float(each.abs().max()) for each in wanted.values())
            worst = max(worst, *(float((found[name] - wanted[name]).abs().max()) / largest for name in wanted))
            for one, other in zip(losses, wanted_losses, strict=True):
                worst_loss = max(worst_loss, abs(float(one["loss"] - other["loss"])))
            known = planned_steps(chunks).planner._known.get((True, tuple(lengths)))
            used |= {word for each in (known.strategies if known else ()) for word in each}
        close(chunks)
        rows.append([words, "20", f"{worst:.1e}", f"{worst_loss:.1e}", ", ".join(sorted(used)) or "keep"])
        if worst > 1e-10:
            raise SystemExit(f"{words}: gradients differ by {worst:.1e}")
    header = ["plans", "number", "gradients, relative to the largest", "losses", "strategies"]
    return f"{size.dtype}\n\n{markdown_table(header, rows)}"


def costs(size: Size, device: DeviceType) -> str:
    """Seconds and peak bytes of a step, without a limit of memory and under several."""
    from pipeloom.integrations.megatron.core.forward_backward import close
    from pipeloom.integrations.steps.planning import Planning

    whole, chunks = models_of(size, device)
    items = items_of(size.lengths, size, device, 0)
    planning = Planning(budget_s=0.2, deadline_s=30.0)
    seconds, most = timed(lambda: theirs(device, items, whole), [whole], device)
    rows = [["Megatron Core, one microbatch at a time", "", f"{seconds * 1e3:.1f}", "", f"{most / 1e9:.3f}", ""]]
    seconds, most = timed(lambda: ours(settings(planner=planning), items, chunks), chunks, device)
    close(chunks)
    rows.append(["plan, no limit", "", f"{seconds * 1e3:.1f}", "", f"{most / 1e9:.3f}", ""])
    kept = 0
    for share in (None, 0.6, 0.3, 0.15):
        limit = 1 << 40 if share is None else int(share * kept)
        options = settings(planner=planning, activation_bytes=limit)
        run = partial(ours, options, items, chunks)
        name = "all in flight" if share is None else f"limit {share:.0%} of that"
        try:
            for seed in range(20):
                lengths = [length - seed % 4 for length in size.lengths]
                ours(options, items_of(lengths, size, device, seed), chunks)
                if planned_steps(chunks).planner.is_measured:
                    break
            run()
        except InfeasibleError as error:
            rows.append([name, str(error), "", "", "", ""])
            close(chunks)
            continue
        seconds, most = timed(run, chunks, device)
        planner = planned_steps(chunks).planner
        order = planner._known[True, tuple(size.lengths)]
        if share is None:
            of = [planner.problem.costs.chunk_costs(c, w) for c in planner.problem.layout.chunks for w in loads(size)]
            kept = sum(each[0].activation_bytes for each in of)
        words = sorted({word for each in order.strategies for word in each})
        said = f"{(kept if share is None else limit) / 1e9:.3f}"
        counts = "; ".join(f"{word} {sum(word in each for each in order.strategies)}" for word in words)
        rows.append([name, counts, f"{seconds * 1e3:.1f}", said, f"{most / 1e9:.3f}", str(dict(planner.counts))])
        close(chunks)
    header = ["step", "strategies", "ms", "bytes held or allowed, GB", "measured peak, GB", "plans"]
    return f"{size}\n\n{markdown_table(header, rows)}"


def loads(size: Size) -> list[Any]:
    """Return the workloads of the microbatches."""
    from pipeloom.spec import Workload

    return [Workload((length,)) for length in size.lengths]


def timed(run: Callable[[], object], models: Sequence[Any], device: DeviceType) -> tuple[float, int]:
    """Return the median of seconds, and the peak of bytes beyond what is held before."""
    seconds, most = [], 0
    # The first steps are measured; then the planner's process starts.
    for repeat in range(WARM + REPEATS):
        clear(models)
        before = allocated(device)
        forget_peak(device)
        first = now(device)
        run()
        if repeat >= WARM:
            seconds.append(now(device) - first)
        most = peak(device) - before
    return statistics.median(seconds), most


def main(given: Sequence[str] | None = None) -> int:
    """Run all, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_megatron", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="rehearse on the CPU, with tiny widths")
    parser.add_argument("--costs", action="store_true", help="only time and memory")
    parsed = parser.parse_args(given)
    dry = parsed.dry
    device: DeviceType = "cpu" if dry else "cuda"
    begin(device)
    if not parsed.costs:
        print(exactness(DRY if dry else EXACT, device), flush=True)
    print(costs(DRY if dry else LARGE, device), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
