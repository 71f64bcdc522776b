"""Layers of published models on this GPU: planned against measured, and the library's own loop.

``python -m benchmarks.gpu_models [--dry] [--out models.json] [--case NAME]``. Models have their published widths and a
few of their layers, with random weights in bfloat16. Each microbatch is one sample. For every memory strategy, a plan
is made from the profile of the layers and executed; its planned seconds and peak bytes stand beside the measured ones.
``python -m benchmarks.gpu_models --emulate models.json`` adds what `pipeloom.emulate` predicts for the library's own
loop, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

import pipeloom as pl
from benchmarks.gpu import allocated, forget_peak, now, peak
from pipeloom.errors import PipeloomError
from pipeloom.io import write_text
from pipeloom.layout import single_rank
from pipeloom.packing import PackingSpec, budget_tokens
from pipeloom.planner import PlanningProblem, plan_batch
from pipeloom.report import markdown_table
from pipeloom.runtime import ExecutionOptions, Executor, ProfileOptions, ThreadHub, profile_model
from pipeloom.runtime.data.prefetch import batch_of
from pipeloom.runtime.launch.device import DeviceType
from pipeloom.search import Budget
from pipeloom.spec import Chunk, Layout, RankSpec

STRATEGIES = ("keep", "selective", "recompute", "offload")
REPEATS = 3
Sample = dict[str, torch.Tensor]
_WORDS = 32000


@dataclass(frozen=True)
class Case:
    """A model with fewer layers, and the samples of an iteration."""

    name: str
    configuration: Callable[[bool], Any]
    """Takes whether widths are tiny, for a rehearsal."""
    texts: tuple[int, ...]
    """Tokens of text of each sample."""
    images: tuple[tuple[int, int], ...] = ()
    """Patches along height and width of the image of each sample."""


def _text(kind: str, dry: bool, **sizes: Any) -> Any:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"num_hidden_layers": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4}
    small |= {"num_experts_per_tok": 2, "vocab_size": 256}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return getattr(transformers, kind)(
        **ids, **(sizes | {k: v for k, v in small.items() if k in sizes} if dry else sizes)
    )


def _qwen3_8b(dry: bool) -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    return _text("Qwen3Config", dry, num_hidden_layers=8, head_dim=128, vocab_size=_WORDS, **sizes)


def _llama_70b(dry: bool) -> Any:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    return _text("LlamaConfig", dry, num_hidden_layers=4, vocab_size=_WORDS, **sizes)


def _qwen3_30b_a3b(dry: bool) -> Any:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    return _text("Qwen3MoeConfig", dry, num_hidden_layers=6, head_dim=128, vocab_size=_WORDS, **sizes, **experts)


def _qwen2_5_vl_7b(dry: bool) -> Any:
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    vision = {"depth": 8, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584}
    layers, sections = 6, [16, 24, 24]
    if dry:
        text = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
        layers, sections = 2, [2, 3, 3]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": _WORDS if not dry else 256, "rope_parameters": rope}
    blocks = [1] if dry else [3, 7]
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, **ids, "num_hidden_layers": layers},
        vision_config={**vision, "fullatt_block_indexes": blocks},
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )


CASES = (
    Case("Qwen3 8B, 8 layers", _qwen3_8b, (4096, 2048, 1024, 3072)),
    Case(
        "Qwen2.5-VL 7B, 8 + 6 layers", _qwen2_5_vl_7b, (512, 256, 1024, 128), ((64, 64), (88, 60), (32, 32), (100, 76))
    ),
    Case("Qwen3 30B-A3B, 6 layers", _qwen3_30b_a3b, (4096, 2048, 1024, 3072)),
    Case("Llama 3 70B, 4 layers", _llama_70b, (4096, 2048, 1024, 3072)),
)


def samples_of(case: Case, dry: bool) -> list[Sample]:
    """Return the samples of an iteration, as the library's processor makes them."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(case.texts):
        length = length // 64 if dry else length
        ids = torch.randint(64, 256, (length,), generator=draw)
        sample: Sample = {}
        if case.images:
            height, width = (4, 4) if dry else case.images[number]
            ids = torch.cat([torch.full((height * width // 4,), 60), ids])
            sample["mm_token_type_ids"] = (ids == 60).long()
            sample["pixel_values"] = torch.randn(height * width, 3 * 2 * 14 * 14, generator=draw)
            sample["image_grid_thw"] = torch.tensor([[1, height, width]])
        found.append({"input_ids": ids, "labels": torch.where(ids == 60, -100, ids), **sample})
    return found


def build(case: Case, dry: bool, device: str) -> Any:
    """Return the library's model with random weights."""
    configuration = case.configuration(dry)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            if case.images:
                return transformers.Qwen2_5_VLForConditionalGeneration(configuration)
            return transformers.AutoModelForCausalLM.from_config(configuration)
    finally:
        torch.set_default_dtype(before)


def measure(case: Case, device: DeviceType, dry: bool, *, with_plans: bool = True) -> dict[str, Any]:
    """Measure one case; what failed is a text."""
    torch.manual_seed(0)
    begin = time.perf_counter()
    model = build(case, dry, device)
    host = [_to(sample, "cpu") for sample in samples_of(case, dry)]
    samples = [_to(sample, device) for sample in host]
    found: dict[str, Any] = {"case": case.name, "parameters": sum(p.numel() for p in model.parameters())}
    found["library"] = _tried(lambda: _library(model, samples, device))
    found["tiny"] = _tried(lambda: _library(model, [_shortened(samples[0])] * 4, device))
    found["kernels"] = _tried(lambda: _kernels(model, samples[0], device))
    if with_plans:
        found["plans"] = _tried(lambda: _plans(model, host, device, found))
    found["took_s"] = round(time.perf_counter() - begin, 1)
    return found


def _tried(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:500]}"


def _to(sample: Sample, device: DeviceType) -> Sample:
    return {k: v.to(device, torch.bfloat16 if v.is_floating_point() else v.dtype) for k, v in sample.items()}


def _shortened(sample: Sample) -> Sample:
    """A few tokens without images: what is left is the time of the host."""
    return {name: sample[name][-16:] for name in ("input_ids", "labels")}


_PER_TOKEN = ("input_ids", "labels", "mm_token_type_ids")


def arguments(sample: Sample) -> Sample:
    """Return what the library's model is called with."""
    return {name: value[None] if name in _PER_TOKEN else value for name, value in sample.items()}


def _library(model: Any, samples: Sequence[Sample], device: DeviceType) -> dict[str, Any]:
    """Forward and backward of each sample by the library itself."""
    forward: list[list[float]] = [[] for _ in samples]
    backward: list[list[float]] = [[] for _ in samples]
    held: list[int] = [0] * len(samples)
    peaks: list[int] = [0] * len(samples)
    model.train()
    whole = []
    for repeat in range(REPEATS + 2):
        _clear(model)
        for number, sample in enumerate(samples):
            before = allocated(device)
            forget_peak(device)
            first = now(device)
            loss = model(**arguments(sample), use_cache=False).loss
            middle = now(device)
            held[number] = allocated(device) - before
            loss.backward()
            last = now(device)
            del loss
            peaks[number] = peak(device) - before
            if repeat >= 2:
                forward[number].append(middle - first)
                backward[number].append(last - middle)
        begin = now(device)
        for sample in samples:
            model(**arguments(sample), use_cache=False).loss.backward()
        whole.append(now(device) - begin)
    _clear(model)
    return {
        "forward_s": [statistics.median(times) for times in forward],
        "backward_s": [statistics.median(times) for times in backward],
        "iteration_s": statistics.median(whole[2:]),
        "held_bytes": held,
        "peak_bytes": peaks,
    }


MOST_KERNELS = 40


def _kernels(model: Any, sample: Sample, device: DeviceType) -> dict[str, Any]:
    """Seconds of the device by kernel, in one forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as trace:
        model(**arguments(sample), use_cache=False).loss.backward()
        now(device)
    _clear(model)
    rows = [(each.key[:120], each.count, each.self_device_time_total / 1e6) for each in trace.key_averages()]
    rows.sort(key=lambda row: -row[2])
    return {"device_s": sum(row[2] for row in rows), "kernels": rows[:MOST_KERNELS]}


def _plans(model: Any, samples: Sequence[Sample], device: DeviceType, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A plan under each strategy, executed."""
    made = pl.from_transformers(model)
    batch = batch_of(samples, made.describe, 0)
    size = PackingSpec(int(budget_tokens(batch, made.spec).max()))
    begin = time.perf_counter()
    profile = profile_model(
        made, [samples], packing=size, placements={}, options=ProfileOptions(strategies=True, device=device, repeats=3)
    )
    found["profile_s"] = round(time.perf_counter() - begin, 1)

    found["profile"] = msgspec.to_builtins(profile)
    layout = _layout(made)
    # Weights and gradients, and no optimizer state.
    held = {f"{m.name}/{layer.kind}": 2.0 for m in made.spec.modules for layer in m.flat_layers}
    limit = RankSpec(memory_capacity_bytes=200_000_000_000)
    rows = []
    for module in made.modules:
        for layer in module.layers:
            layer.to(device)
    for strategy in STRATEGIES:
        problem = PlanningProblem.from_profile(
            made.spec, layout, profile, size, limit, strategies=(strategy,), held_copies=held
        )
        planned = plan_batch(problem, batch, budget=Budget(evaluations=200))
        lasts = planned.timeline.end_ns - planned.timeline.start_ns
        row = {"strategy": strategy, "planned_s": planned.timeline.makespan_ns / 1e9, "tasks_s": (lasts / 1e9).tolist()}
        executed = _tried(partial(_executed, made, layout, planned, samples, device))
        row |= executed if isinstance(executed, dict) else {"reason": executed}
        weights = sum(problem.costs.static_bytes(chunk) for chunk in layout.chunks) // 2
        row["planned_peak_bytes"] = planned.peak_bytes[0] - weights
        rows.append(row)
    return rows


def _layout(made: Any) -> Layout:
    """All layers on one rank, in chunks of a few, so that strategies differ in what they hold."""
    chunks = []
    for module in made.spec.modules:
        last = len(module.flat_layers) - 1
        chunks += [Chunk(module.name, (first, min(first + 2, last)), 0) for first in range(0, last + 1, 3)]
    return msgspec.structs.replace(single_rank(made.spec, {}), chunks=tuple(chunks))


def _executed(made: Any, layout: Any, planned: Any, samples: Sequence[Sample], device: DeviceType) -> dict[str, Any]:
    executor = Executor(made, layout, 0, ThreadHub().transport(0), options=ExecutionOptions(device=device))
    times, computed = [], []
    for repeat in range(REPEATS + 2):
        _clear(made)
        linked = executor.prepare(planned.plan, planned.packing)
        before = allocated(device)
        forget_peak(device)
        begin = now(device)
        result = executor.run_linked(linked, samples)
        end = now(device)
        if repeat >= 2:
            times.append(end - begin)
            computed.append([(each.end_ns - each.start_ns) / 1e9 for each in result.compute_times])
        most = peak(device) - before
    _clear(made)
    return {
        "measured_s": statistics.median(times),
        "computed_s": [statistics.median(each) for each in zip(*computed, strict=True)],
        "actions": [f"{each.verb}{each.microbatch} {each.chunk}" for each in result.compute_times],
        "peak_bytes": most,
        "offloaded_bytes": result.offloaded_bytes,
        "recomputed": result.num_recomputed,
    }


def _clear(model: Any) -> None:
    parameters = (
        model.parameters()
        if isinstance(model, torch.nn.Module)
        else (p for module in model.modules for layer in module.layers for p in layer.parameters())
    )
    for parameter in parameters:
        parameter.grad = None


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return planned and measured values as Markdown."""
    rows = []
    for case in found:
        library = case["library"]
        if isinstance(library, dict):
            times = f"{sum(library['forward_s']) * 1e3:.1f} + {sum(library['backward_s']) * 1e3:.1f}"
            rows.append(
                [case["case"], "library's loop", "", times, "", "", f"{max(library['peak_bytes']) / 1e9:.2f}", ""]
            )
        else:
            rows.append([case["case"], f"library's loop: {library}", *[""] * 6])
        if "plans" not in case:
            continue
        if not isinstance(case["plans"], list):
            rows.append([case["case"], f"plans: {case['plans']}", *[""] * 6])
            continue
        for row in case["plans"]:
            if "measured_s" not in row:
                rows.append([case["case"], f"{row['strategy']}: failed", *[""] * 6])
                continue
            planned, measured = row["planned_peak_bytes"] / 1e9, row["peak_bytes"] / 1e9
            rows.append(
                [
                    case["case"],
                    row["strategy"],
                    f"{row['planned_s'] * 1e3:.1f}",
                    f"{row['measured_s'] * 1e3:.1f}",
                    f"{row['measured_s'] / row['planned_s'] - 1:+.1%}",
                    f"{planned:.2f}",
                    f"{measured:.2f}",
                    f"{planned / measured - 1:+.1%}" if measured else "",
                ]
            )
    header = ["model", "strategy", "planned, ms", "measured, ms", "error", "planned, GB", "measured, GB", "error"]
    return markdown_table(header, rows)


def emulated(found: list[dict[str, Any]], cluster: str) -> str:
    """Return the library's loop as emulated and measured, as Markdown."""
    rows = []
    for case in CASES:
        measured = next((each for each in found if each["case"] == case.name), None)
        if measured is None or not isinstance(measured["library"], dict):
            continue
        model = build(case, False, "meta")
        batches = [arguments(_to(sample, "cpu")) for sample in samples_of(case, False)]
        try:
            alone = partial(pl.emulate, model, cluster=cluster, tp=1, pp=1, dp=1, zero=0, microbatches=1)
            steps = [alone(batch, strategy="keep", trainer="pipeloom").step for batch in batches]
        except PipeloomError as error:
            rows.append([case.name, str(error), "", ""])
            continue
        library = measured["library"]
        seconds = sum(library["forward_s"]) + sum(library["backward_s"])
        ours = sum(step.timeline.makespan_ns for step in steps) / 1e9
        rows.append([case.name, f"{ours * 1e3:.1f}", f"{seconds * 1e3:.1f}", f"{ours / seconds - 1:+.1%}"])
    return markdown_table(["model", "emulated, ms", "measured, ms", "error"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure, write all numbers, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_models", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="rehearse on the CPU, with tiny widths")
    parser.add_argument("--out", type=Path, default=Path("models.json"))
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--library", action="store_true", help="only the library's own loop, without plans")
    parser.add_argument("--emulate", type=Path, metavar="models.json", help="compare with the emulator instead")
    parser.add_argument("--cluster", default="1xH100")
    given = parser.parse_args(arguments)
    if given.emulate is not None:
        print(emulated(json.loads(given.emulate.read_text()), given.cluster))
        return 0
    found = []
    for number, case in enumerate(CASES):
        if given.case not in (None, number):
            continue
        found.append(measure(case, "cpu" if given.dry else "cuda", given.dry, with_plans=not given.library))
        write_text(given.out, json.dumps(found))
        gc.collect()
        if not given.dry:
            torch.cuda.empty_cache()
    print(table(found))
    return sum(isinstance(each[name], str) for each in found for name in ("library", "plans") if name in each)


if __name__ == "__main__":
    sys.exit(main())
