"""Train Megatron Core's GPTModel with a plan for each step.

torchrun --nproc-per-node 2 examples/megatron/train_text.py

Only the line marked (*) differs from a script with Megatron's interleaved schedule. ``--theirs`` runs that schedule.
Both print the same losses. The texts of a microbatch are packed to one sequence, whose length differs by a factor of
up to eight. With ``--experts 4``, every layer has four experts, of which each token takes two. All sequences then have
one length: Megatron's dispatcher of tokens for variable lengths needs a GPU.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loop import begin, options, settings, train
from torch import Tensor

VOCABULARY, WIDTH, LAYERS, VIRTUAL, LONGEST = 64, 64, 8, 2, 256


def texts(lengths: Sequence[int], seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield texts that count up in steps of their own, one for each microbatch."""
    rng = random.Random(seed)
    while True:
        length, first, stride = rng.choice(lengths), rng.randrange(VOCABULARY), rng.randint(1, 3)
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


def model_chunks(experts: int) -> list[Any]:
    """Return the model chunks of this rank, as Megatron-LM's `get_model` makes them."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    more: dict[str, Any] = {}
    if experts:
        more = {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.01,
            "add_bias_linear": False,
            "variable_seq_lengths": False,
            "moe_token_dispatcher_type": "allgather",
        }
    rank, size = parallel_state.get_pipeline_model_parallel_rank(), dist.get_world_size()
    config = TransformerConfig(**settings(LAYERS, WIDTH, VIRTUAL, **more))
    chunks = []
    for number in range(VIRTUAL):
        torch.manual_seed(number * size + rank)
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(num_experts=experts or None),
                vocab_size=VOCABULARY,
                max_sequence_length=LONGEST,
                pre_process=rank == 0 and number == 0,
                post_process=rank == size - 1 and number == VIRTUAL - 1,
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                vp_stage=number,
            )
        )
    return chunks


def main(theirs: bool, steps: int, experts: int) -> None:
    if not theirs:
        import pipeloom.integrations.megatron.auto  # noqa: F401 - (*)

    begin(VIRTUAL)
    lengths = [LONGEST] if experts else [32, 64, 128, LONGEST]
    train(model_chunks(experts), partial(texts, lengths), forward_step, theirs, steps, LONGEST)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0: a dense model")
    given = parser.parse_args()
    main(given.theirs, given.steps, given.experts)
