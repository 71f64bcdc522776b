"""Train Megatron Core's GPTModel with a plan for each step.

torchrun --nproc-per-node 2 examples/megatron/train_text.py

Only the line marked (*) differs from a script with Megatron's interleaved schedule. ``--theirs`` runs that schedule.
Both print the same losses. The texts of a microbatch are packed to one sequence, whose length differs by a factor of
up to eight.
"""

import argparse
import contextlib
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from on_cpu import OnCpu, prepare
from torch import Tensor

VOCABULARY, WIDTH, LAYERS, VIRTUAL, MICROBATCHES = 64, 64, 8, 2, 8


def texts(seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield texts that count up in steps of their own, one for each microbatch."""
    rng = random.Random(seed)
    while True:
        length, first, stride = rng.choice([32, 64, 128, 256]), rng.randrange(VOCABULARY), rng.randint(1, 3)
        tokens = (first + stride * torch.arange(length + 1))[None] % VOCABULARY
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(1, length)}


def loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mean = (losses.float() * mask).sum() / mask.sum()
    return mean, {"loss": mean.detach().clone()}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(iterator)
    length = batch["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(batch["tokens"], torch.arange(length)[None], mask, labels=batch["labels"])
    return output, partial(loss, batch["loss_mask"])


def model_chunks() -> list[Any]:
    """Return the model chunks of this rank, as Megatron-LM's `get_model` makes them."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    rank, size = parallel_state.get_pipeline_model_parallel_rank(), dist.get_world_size()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=VIRTUAL,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # which variable lengths require, also without experts
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
    )
    chunks = []
    for number in range(VIRTUAL):
        torch.manual_seed(number * size + rank)
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=256,
                pre_process=rank == 0 and number == 0,
                post_process=rank == size - 1 and number == VIRTUAL - 1,
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                vp_stage=number,
            )
        )
    return chunks


def main(theirs: bool, steps: int) -> None:
    if not theirs:
        import pipeloom.integrations.megatron.auto  # noqa: F401 - (*)

    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    prepare()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(1, dist.get_world_size(), VIRTUAL)
    initialize_rng_tracker(inference_rng_tracker=True)
    chunks = model_chunks()
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=3e-3)
    iterators = [texts() for _ in chunks]
    function = get_forward_backward_func()
    for step in range(steps):
        began = time.monotonic()
        with OnCpu() if theirs else contextlib.nullcontext():
            losses = function(
                forward_step_func=forward_step,
                data_iterator=iterators,
                model=chunks,
                num_microbatches=MICROBATCHES,
                seq_length=256,
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--theirs", action="store_true", help="run Megatron's interleaved schedule instead")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    main(given.theirs, given.steps)
