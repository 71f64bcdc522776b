"""Peak memory of published models at full size, counted by PyTorch on meta tensors, beside the plan's.

The executor runs a plan of every rank with tensors that have shapes and no numbers. All storages that operators make
are counted while they live. Attention is PyTorch's operator for packed sequences, as on a GPU.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.integrations.tracing.described import trace_described
from pipeloom.integrations.transformers import varlen
from pipeloom.integrations.transformers.build import TransformersModel, shapes
from pipeloom.iteration.emulation import even_pipeline, fastest_step
from pipeloom.iteration.microbatches import pack_microbatches
from pipeloom.plan import boundary_shapes, lower
from pipeloom.runtime import Executor, ThreadHub
from pipeloom.runtime.execute.iteration import LossSum
from pipeloom.runtime.execute.options import ExecutionOptions
from pipeloom.search.static_orders import one_f_one_b
from pipeloom.spec.batch import batch_from_dicts
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.parallelism import Degrees
from pipeloom.timeline import resolve_candidates
from tests.runtime.small_models import MostLive
from tests.threads import on_threads

TOKENS = 4096


class Published(NamedTuple):
    """A model at its published size, and the ranks of its pipeline."""

    config: Any
    ranks: int = 4


def _config(kind: str, name: str, **sizes: Any) -> Any:
    config = getattr(hf, kind)(**sizes, dtype="bfloat16")
    config.architectures = [name]
    return config


def _decoder(
    family: str, hidden: int, inner: int, layers: int, heads: int, groups: int, words: int, **more: Any
) -> Any:
    return _config(
        f"{family}Config",
        f"{family}ForCausalLM",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=words,
        **more,
    )


# Sizes are those of the config.json files that the models are published with.
PUBLISHED = {
    "Llama 3.1 8B": Published(_decoder("Llama", 4096, 14336, 32, 32, 8, 128256)),
    "Llama 3.1 70B": Published(_decoder("Llama", 8192, 28672, 80, 64, 8, 128256), 8),
    "Mistral 7B": Published(_decoder("Mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None)),
    "Qwen2.5 7B": Published(_decoder("Qwen2", 3584, 18944, 28, 28, 4, 152064)),
    "Qwen2.5 72B": Published(_decoder("Qwen2", 8192, 29568, 80, 64, 8, 152064), 8),
    "Qwen3 14B": Published(_decoder("Qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128)),
    "Qwen3 32B": Published(_decoder("Qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128), 8),
    "Gemma 3 27B": Published(
        _config(
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            hidden_size=5376,
            intermediate_size=21504,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            vocab_size=262208,
            sliding_window=1024,
        ),
        8,
    ),
    "OLMo 2 32B": Published(_decoder("Olmo2", 5120, 27648, 64, 40, 8, 100352), 8),
    "Phi 4 14B": Published(_decoder("Phi3", 5120, 17920, 40, 40, 10, 100352, pad_token_id=None)),
    "Granite 3.3 8B": Published(_decoder("Granite", 4096, 12800, 40, 32, 8, 49159)),
    "Qwen3 30B-A3B": Published(
        _decoder(
            "Qwen3Moe",
            2048,
            6144,
            48,
            32,
            4,
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            output_router_logits=False,
        )
    ),
}


def _choose(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> varlen.Kernel | None:
    # Small models on the CPU show how a class can be divided.
    return varlen.torch_kernel(grouped=query.shape[1] != key.shape[1]) if query.is_meta else None


@contextmanager
def on_meta() -> Iterator[None]:
    """A context in which the executor runs on meta tensors, in bfloat16."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "choose", _choose)
        patch.setattr(LossSum, "total", lambda _: math.nan)
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


class Peaks(NamedTuple):
    """Peak bytes of a rank: as planned, and as counted."""

    planned: int
    counted: int


def model_of(published: Published) -> TransformersModel:
    """The model on meta, through the files of its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        published.config.save_pretrained(folder)
        return shapes(folder)


def peaks(model: TransformersModel, strategy: str, ranks: int) -> list[Peaks]:
    """Peaks of a training step under 1F1B, with twice as many microbatches as ranks."""
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    samples = [{"id": str(number), "input_ids": ids, "labels": ids} for number in range(2 * ranks)]
    assert model.describe is not None
    known = batch_from_dicts([{**model.describe(sample), "id": sample["id"]} for sample in samples]).samples
    microbatches = tuple((sample,) for sample in known)
    architecture = trace_described(model, samples[:1]).architecture
    costs = EmulatedCosts(
        architecture,
        load_cluster("64xH200"),
        Degrees(pipeline=ranks),
        (strategy,),
        split=False,
        trainer=load_trainer("pipeloom"),
    )
    layout = even_pipeline(costs, microbatches, {}, {})
    step = fastest_step(costs, layout, microbatches, or_beyond_memory=True, order=one_f_one_b)
    packing = pack_microbatches(costs.model_spec, layout, microbatches)
    resolved = resolve_candidates(step.graph, step.schedule.candidate)
    plan = lower(
        resolved.graph,
        resolved.schedule(step.schedule),
        resolved.timeline(step.timeline),
        layout,
        packing,
        boundary_shapes(costs.model_spec, layout),
    )
    hub = ThreadHub()

    def work(rank: int) -> Peaks:
        executor = Executor(
            model,
            layout,
            rank,
            hub.transport(rank),
            options=ExecutionOptions(device="meta", random_seed=None, workers=0),
            reduce_gradients=lambda *_: None,
            sum_tied=lambda *_: None,
        )
        with MostLive() as live:
            executor.run(plan, packing, samples)
        weights = {p for layers in executor.layers.values() for layer in layers for p in layer.parameters()}
        made = sum(p.grad.nbytes for p in weights if p.grad is not None)
        for parameter in weights:
            parameter.grad = None
        # Weights, gradients and optimizer state are those of the plan. The run made its own gradients.
        return Peaks(int(step.peak_bytes[rank]), int(step.static_bytes[rank]) - made + live.peak_bytes)

    return on_threads(hub, ranks, work)
