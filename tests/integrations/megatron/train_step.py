"""Gradients of one training step of Megatron Core under several pipeline layouts, on CPU ranks.

Run as a module by ``test_core.py``, in processes of its own: Megatron Core keeps its groups in global variables.

    python -m tests.integrations.megatron.train_step CASE.json OUT.pt

``CASE.json``: ranks, sizes of the model, and for every run its layout, virtual stages, group size and recomputation.
``OUT.pt`` gets one dictionary a run, from a parameter's name in the whole model to its gradient.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Make on the CPU what Megatron Core's schedules make on ``device="cuda"`` whatever the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def model_of(case: dict, run: dict, chunk: int | None, num_chunks: int, rank: int):
    """One model chunk of this rank, its weights a function of their names in the whole model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=case["layers"],
        hidden_size=case["hidden"],
        num_attention_heads=case["heads"],
        ffn_hidden_size=2 * case["hidden"],
        pipeline_model_parallel_size=case["ranks"],
        virtual_pipeline_model_parallel_size=run["virtual"],
        pipeline_model_parallel_layout=run["layout"],
        microbatch_group_size_per_vp_stage=run.get("group"),
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        attention_softmax_in_fp32=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        overlap_p2p_comm=run["virtual"] is not None,
        batch_p2p_comm=run["virtual"] is None,
        deallocate_pipeline_outputs=False,  # gloo may still be sending them
        **run.get("recompute", {}),
    )
    first = rank == 0 and (chunk or 0) == 0
    last = rank == case["ranks"] - 1 and (chunk or 0) == num_chunks - 1
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=case["vocabulary"],
        max_sequence_length=case["tokens"],
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=chunk,
    ).double()
    for name, parameter in named(model):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(values * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model


def named(model):
    """Parameters by their names in the whole model: a layer's number there, not in its chunk."""
    numbers = {f"decoder.layers.{i}": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        prefix = ".".join(parts[:3])
        if prefix in numbers:
            name = ".".join(["decoder.layers", str(numbers[prefix]), *parts[3:]])
        yield name, parameter


def gradients(case: dict, run: dict, rank: int) -> dict[str, torch.Tensor]:
    """Run one step and return the gradients of this rank's parameters."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.initialize_model_parallel(1, case["ranks"], run["virtual"])
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    num_chunks = run["virtual"] or 1
    chunks = [model_of(case, run, None if run["virtual"] is None else i, num_chunks, rank) for i in range(num_chunks)]
    shape = (case["microbatches"], 1, case["tokens"])
    tokens = torch.randint(case["vocabulary"], shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, case["tokens"], case["tokens"], dtype=torch.bool).triu(1)

    def step(iterator, model):
        batch = next(iterator)
        positions = torch.arange(case["tokens"])[None]
        output = model(batch, positions, mask, labels=batch.roll(-1, 1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    function = get_forward_backward_func()
    function(
        forward_step_func=step,
        data_iterator=[iter(tokens) for _ in chunks] if num_chunks > 1 else iter(tokens),
        model=chunks if num_chunks > 1 else chunks[0],
        num_microbatches=case["microbatches"],
        seq_length=case["tokens"],
        micro_batch_size=1,
        forward_only=False,
    )
    parallel_state.destroy_model_parallel()
    return {name: parameter.grad for chunk in chunks for name, parameter in named(chunk)}


def work(rank: int, case: dict, out: str, store: str) -> None:
    """One rank: every run after the other; rank 0 writes them all."""
    from megatron.core.tensor_parallel import random

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    random._set_cuda_rng_state = lambda *_, **__: None
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=case["ranks"])
    found = []
    with OnCpu():
        for run in case["runs"]:
            mine = gradients(case, run, rank)
            parts: list = [None] * case["ranks"]
            dist.all_gather_object(parts, mine)
            found.append({name: value for part in parts for name, value in part.items()})
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (case, sys.argv[2], f"{folder}/store"), case["ranks"])


if __name__ == "__main__":
    main()
