"""What the examples of Megatron Core share: settings of tiny models, and the training loop."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from on_cpu import OnCpu, prepare

MICROBATCHES = 8


def settings(layers: int, width: int, virtual: int | None, **more: Any) -> dict[str, Any]:
    """Return arguments of a `TransformerConfig`."""
    return {
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": 4,
        "pipeline_model_parallel_size": dist.get_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # which variable lengths require, also without experts
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
    } | more


def begin(virtual: int | None) -> None:
    """Prepare this process: a pipeline over all ranks, with so many virtual stages on each."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    prepare()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(1, dist.get_world_size(), virtual)
    initialize_rng_tracker(inference_rng_tracker=True)


def train(
    chunks: Sequence[Any],
    data: Callable[[], Iterator[Any]],
    forward_step: Callable[..., Any],
    theirs: bool,
    steps: int,
    seq_length: int,
) -> None:
    """Train the model chunks of this rank as Megatron-LM's training loop does.

    Parameters
    ----------
    data : callable
        Returns a data iterator, for each chunk.
    theirs : bool
        Whether Megatron's schedule runs, not a plan for each step.
    seq_length : int
        Longest sequence.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=3e-3)
    iterators = [data() for _ in chunks]
    function = get_forward_backward_func()
    for step in range(steps):
        began = time.monotonic()
        with OnCpu() if theirs else contextlib.nullcontext():
            losses = function(
                forward_step_func=forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=list(chunks) if len(chunks) > 1 else chunks[0],
                num_microbatches=MICROBATCHES,
                seq_length=seq_length,
                micro_batch_size=1,
                forward_only=False,
            )
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            mean = sum(float(each["loss"]) for each in losses) / len(losses)
            print(f"step {step}: loss {mean:.4f}, {time.monotonic() - began:.2f} s", flush=True)
    if not theirs:
        from pipeloom.integrations.megatron import step_counts
        from pipeloom.integrations.megatron.core.forward_backward import close

        if counts := step_counts(chunks):
            print(f"plans: {counts}", flush=True)
        close(chunks)
    dist.destroy_process_group()


def options(description: str) -> argparse.ArgumentParser:
    """Return the parser of the options that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--theirs", action="store_true", help="run Megatron's schedule instead")
    parser.add_argument("--steps", type=int, default=20)
    return parser
