"""Bytes of a rank, tensor by tensor: what layers keep, what a pass needs besides, what libraries and messages take."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.megatron import read_megatron
from pipeloom.integrations.megatron.costs import StageCosts
from pipeloom.integrations.megatron.timing import Timing
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.trainer import FUSED, TrainerSpec

MEGATRON, EAGER = load_trainer("megatron"), load_trainer("torchtitan")

B200 = load_cluster("8xb200")
HIDDEN, INNER, HEADS, WORDS, TOKENS = 1024, 4096, 8, 32768, 2048
SIZES = (
    *(f"--hidden-size={HIDDEN}", f"--ffn-hidden-size={INNER}", f"--num-attention-heads={HEADS}", "--num-layers=4"),
    *(f"--vocab-size={WORDS}", "--make-vocab-size-divisible-by=1", f"--seq-length={TOKENS}", "--swiglu", "--bf16"),
    *(f"--max-position-embeddings={TOKENS}", "--disable-bias-linear", "--normalization=RMSNorm"),
    *("--position-embedding-type=rope", "--micro-batch-size=1", "--global-batch-size=8"),
)
APART = "--untie-embeddings-and-output-weights"
LOGITS = TOKENS * WORDS
STREAM = TOKENS * HIDDEN * 2
"""Bytes of the hidden states."""


def costs_of(*arguments: str, trainer: TrainerSpec = FUSED) -> StageCosts:
    given = {word.partition("=")[0]: word for word in (*SIZES, "--hidden-dropout=0", *arguments)}
    run = read_megatron(list(given.values()), num_devices=8, one_rank=True)
    return StageCosts(run, B200, trainer)


def held(*arguments: str, trainer: TrainerSpec = FUSED) -> int:
    costs = costs_of(*arguments, trainer=trainer)
    return costs.of(costs.run.now)[0].held_bytes


def static(*arguments: str, trainer: TrainerSpec = FUSED) -> int:
    costs = costs_of(*arguments, trainer=trainer)
    return costs.of_ranks(costs.run.now)[0].static_bytes


def needed(*arguments: str, trainer: TrainerSpec = FUSED) -> int:
    costs = costs_of(*arguments, trainer=trainer)
    return costs.of(costs.run.now)[0].workspace_bytes


def test_one_rank_has_the_embedding_and_the_head_and_shares_tied_weights() -> None:
    costs = costs_of(APART)
    assert costs.run.now.stages == ("EttttL",)
    assert static(APART) - static() == WORDS * HIDDEN * 18


def test_a_dense_layer_holds_what_transformer_engine_saves() -> None:
    layers = held(APART) - held(APART, "--num-layers=3")
    # Input and result of two norms, the result of attention, queries, keys and values, both halves of the gate and its
    # result; a statistic of each norm and head.
    numbers = TOKENS * (8 * HIDDEN + 3 * INNER)
    assert layers == numbers * 2 + TOKENS * 4 * (2 + HEADS)


def test_dropout_holds_a_mask_after_the_embedding_and_each_half_of_a_layer() -> None:
    assert held(APART, "--hidden-dropout=0.1") - held(APART) == TOKENS * HIDDEN * (2 * 4 + 1)


def test_a_loss_in_place_holds_the_logits_and_the_other_a_softmax_in_float32() -> None:
    fused = msgspec.structs.replace(FUSED, loss_in_place=True)
    assert held(APART) - held(APART, trainer=fused) == LOGITS * (4 - 2)
    # The backward makes the gradient of the logits beside the softmax, or over the logits.
    assert needed(APART) - needed(APART, trainer=fused) == pytest.approx(LOGITS * 2, abs=STREAM)


def test_context_parallelism_by_all_to_all_keeps_attention_twice() -> None:
    both = msgspec.structs.replace(FUSED, output_twice=True)
    more = held("--context-parallel-size=2", trainer=both) - held("--context-parallel-size=2")
    assert more == 4 * STREAM / 2
    assert held(trainer=both) == held()


def test_every_shape_of_weight_has_one_buffer_in_the_place_of_its_gradient() -> None:
    layer = HIDDEN * (3 * HIDDEN + HIDDEN + 3 * INNER)
    more = static(APART, trainer=MEGATRON) - static(APART)
    assert more == (layer + HIDDEN * WORDS) * 2 + MEGATRON.library_bytes
    assert static(APART, "--num-layers=8", trainer=MEGATRON) - static(APART, "--num-layers=8") == more


def test_the_gradient_of_the_embedding_needs_the_whole_table_for_a_moment() -> None:
    # One layer holds less than the table, so the embedding's backward is the peak of the stage.
    arguments = (APART, "--num-layers=2", "--pipeline-model-parallel-layout=E|ttL", "--pipeline-model-parallel-size=2")
    assert needed(*arguments) == pytest.approx(WORDS * HIDDEN * 2 + STREAM, abs=2 * 8 * TOKENS)


def test_the_gradient_that_a_rank_sent_stays_until_the_next_one() -> None:
    costs = costs_of(APART, "--pipeline-model-parallel-size=4")
    timing, now = Timing(costs.run, B200), costs.run.now
    numbers = timing.costs.of(now)
    messages = timing._other_bytes(now, numbers) - np.array([one.workspace_bytes for one in numbers])
    assert messages.tolist() == [0, STREAM, STREAM, STREAM]


def test_a_pass_needs_more_only_as_far_as_other_layers_hold_less() -> None:
    """The head's backward is first. When layers before it run, its logits are free already."""
    few, many = (needed(APART, f"--vocab-size={words}") for words in (32768, 65536))
    assert many - few == pytest.approx(TOKENS * 32768 * 2, rel=0.01)


def test_eager_layers_keep_norms_in_float32_and_the_activation_of_the_gate() -> None:
    eager = held(trainer=EAGER) - held("--num-layers=3", trainer=EAGER)
    more = eager - (held() - held("--num-layers=3"))
    norms = 2 * TOKENS * HIDDEN * (4 + 2 - 2)
    assert more == norms + TOKENS * INNER * 2
    # 1.35 to 2 times as much as fused layers
    assert 1.35 < eager / (eager - more) < 2.0


def test_eager_sequence_parallelism_keeps_gathered_inputs() -> None:
    arguments = (APART, "--tensor-model-parallel-size=2", "--sequence-parallel")
    layers = held(*arguments, trainer=EAGER) - held(*arguments, "--num-layers=3", trainer=EAGER)
    without = held(*arguments) - held(*arguments, "--num-layers=3")
    # Two gathered inputs of a layer in the place of their shards.
    assert layers - without == 2 * TOKENS * HIDDEN * (4 + 2 - 2) / 2 + TOKENS * INNER * 2 / 2 + 2 * STREAM / 2


EXPERTS = (
    *("--num-experts=8", "--moe-router-topk=2", f"--moe-ffn-hidden-size={INNER}", "--moe-grouped-gemm"),
    *("--tensor-model-parallel-size=2", "--sequence-parallel", "--expert-model-parallel-size=2", APART),
)


def test_tensor_parallelism_divides_experts_by_default() -> None:
    whole = (*EXPERTS, "--expert-tensor-parallel-size=1")
    weights = 4 * 8 * 3 * HIDDEN * INNER
    # A quarter of the experts' weights in the place of a half, 18 bytes each without a distributed optimizer.
    assert static(*whole) - static(*EXPERTS) == weights / 4 * 18
    # Every device holds the rows of both, each with half of the gate and its result, and the input twice as long.
    more = held(*EXPERTS) - held(*whole)
    assert more == pytest.approx(4 * 2 * STREAM / 2, rel=0.01)


def test_experts_that_the_devices_cannot_hold_are_refused() -> None:
    with pytest.raises(InputError, match="expert-tensor-parallel-size"):
        costs_of(*EXPERTS, "--expert-model-parallel-size=8")
    alone = [each for each in EXPERTS if not each.startswith("--expert-model")]
    with pytest.raises(InputError, match="1 differs from tensor parallelism 2, and expert parallelism is 1"):
        costs_of(*alone, "--expert-tensor-parallel-size=1")
