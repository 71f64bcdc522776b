"""Published runs with parts that Megatron itself does not have, and with values that their source leaves out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeloom.emulator.build import layer_module
from pipeloom.emulator.tape import Context, Tape
from pipeloom.errors import InputError
from pipeloom.validation import PublishedRun, predict
from pipeloom.validation.express import express, trainer_of
from pipeloom.validation.reasons import NotExpressible, kind_of
from pipeloom.validation.sizes import described, sizes_of
from pipeloom.validation.unstated import balanced_layers, complete
from tests.validation.test_runs import LLAMA

GPT = replace(
    LLAMA,
    id="gpt",
    device="A100-80",
    gpus=8,
    layers=30,
    hidden=4096,
    ffn=16384,
    heads=32,
    kv_heads=32,
    vocab=51200,
    seq_len=2048,
    gated=False,
    norm="layer",
    pos="learned",
    tp=1,
    pp=8,
    sp=False,
    zero=0,
    gbs=64,
)
"""A GPT of 30 layers on eight ranks; embedding and loss take the place of two layers."""


def seconds(run: PublishedRun) -> float:
    found = predict(run)
    assert not found.reason
    return found.seconds


def peak(run: PublishedRun) -> int:
    return predict(run).peak_bytes


def test_zero_bubble_schedules_trade_memory_for_time() -> None:
    plain, one, two, wave = (replace(GPT, schedule=name) for name in ("1f1b", "ZB-1p", "ZB-2p", "ZB-V"))
    assert seconds(two) < seconds(one) < seconds(plain)
    assert seconds(wave) < seconds(plain)
    assert peak(two) > 1.3 * peak(one)
    # Other spellings and fixed patterns with the same memory.
    assert seconds(replace(GPT, schedule="zb-h2")) == seconds(two)
    # All activations of a half or a third of the microbatches; weights and the vocabulary stay.
    peaks = [peak(replace(GPT, schedule=name)) for name in ("V-Min", "V-Half", "V-ZB")]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.9 * peaks[2]


def test_a_v_has_two_stages_a_rank_in_both_directions() -> None:
    now = express(replace(GPT, schedule="ZB-V")).run.now
    assert now.virtual == 2
    assert now.ranks == (*range(8), *reversed(range(8)))
    assert sum(stage.count("t") for stage in now.stages) == 30


@pytest.mark.parametrize("variant", ["vocab-1", "vocab-2", "interlaced"])
def test_a_spread_vocabulary_evens_the_ranks_out(variant: str) -> None:
    wide = replace(GPT, layers=32, vocab=256_000, tied=False)
    spread = replace(wide, reason=f"vocabulary parallelism ({variant})")
    assert seconds(spread) < 0.7 * seconds(wide)
    # The last rank no longer has the whole vocabulary's weights and logits.
    assert peak(spread) < peak(wide)
    assert express(replace(wide, pp=1, gpus=1, reason=spread.reason)).run.now.vocabulary == "ends"


def test_waiting_for_the_vocabulary_holds_more_microbatches() -> None:
    small = replace(GPT, layers=32, vocab=32_768)
    variants = (f"vocabulary parallelism ({name})" for name in ("vocab-2", "vocab-1", "interlaced"))
    peaks = [peak(replace(small, reason=reason)) for reason in variants]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 3


@pytest.mark.parametrize(
    ("vocabulary", "sequence", "last"),
    [
        (256_000, 2048, 0),
        (128_000, 2048, 2),
        (64_000, 2048, 3),
        (32_000, 2048, 4),
        (128_000, 4096, 2),
        (64_000, 4096, 3),
    ],
)
def test_layers_are_divided_by_load_as_published(vocabulary: int, sequence: int, last: int) -> None:
    """The numbers of layers on the last stage are those of the artifact of arXiv 2411.05288."""
    run = replace(GPT, layers=32, hidden=3072, ffn=12288, heads=24, kv_heads=24, vocab=vocabulary, seq_len=sequence)
    known = complete(replace(run, reason="layers dealt by load: the dealing is not published"))
    stages = express(known.run).run.now.stages
    assert stages[-1] == "t" * last + "L"
    assert sum(stage.count("t") for stage in stages) == 32
    assert known.notes


@pytest.mark.parametrize("loss", [0.0, 0.3, 5.0, 1000.0])
@pytest.mark.parametrize(("layers", "stages"), [(32, 8), (7, 2), (1, 4)])
def test_divided_layers_are_all_there(layers: int, stages: int, loss: float) -> None:
    counts = balanced_layers(layers, stages, loss)
    assert len(counts) == stages
    assert sum(counts) == layers
    assert min(counts) >= 0


def test_one_layer_is_a_share_of_an_iteration() -> None:
    one = replace(LLAMA, layers=1, pp=1, gpus=2, gbs=1, schedule="one layer")
    whole = replace(one, schedule="1f1b")
    assert 0 < seconds(one) < seconds(whole)
    # The vocabulary and the update do not count.
    assert seconds(replace(one, vocab=2 * 128256)) == seconds(one)
    assert seconds(replace(one, recompute="full")) > 1.2 * seconds(one)


def test_adapters_leave_out_weight_gradients_and_state() -> None:
    whole = replace(LLAMA, device="H200", gpus=2, tp=1, gbs=16)
    tuned = replace(whole, task="lora")
    assert 0.6 * seconds(whole) < seconds(tuned) < 0.8 * seconds(whole)
    assert peak(tuned) < 0.7 * peak(whole)
    assert any("adapters" in note for note in predict(tuned).notes)


def test_adapters_run_again_with_their_block() -> None:
    whole = replace(LLAMA, device="H200", gpus=2, tp=1, gbs=16, task="lora")
    kept, again = whole, replace(whole, recompute="full")
    assert peak(again) < 0.6 * peak(kept)
    assert seconds(again) > 1.2 * seconds(kept)


def test_recomputed_modules_of_frozen_layers_free_only_what_they_hold() -> None:
    experts = replace(
        LLAMA, device="H200", gpus=2, tp=1, gbs=16, arch="moe", experts=8, topk=2, moe_ffn=14336, bias=True
    )
    frozen = replace(experts, task="lora")
    for modules in ("moe_act", "layernorm,moe_act", "moe"):
        freed = peak(experts) - peak(replace(experts, recompute=modules))
        assert 0 <= peak(frozen) - peak(replace(frozen, recompute=modules)) < freed


def test_a_window_may_be_in_all_layers_or_in_some() -> None:
    runs = [replace(LLAMA, seq_len=32768, window=text) for text in ("4096", "4096/1", "4096/2", "4096/4", "")]
    all_layers, every, second, fourth, none = map(seconds, runs)
    assert all_layers == every < fourth < second < none


@pytest.mark.parametrize(
    "words", ["CUDA graphs off", "without CUDA graphs", "no cuda graph", "CUDA graphs: off", "CUDA graphs are disabled"]
)
def test_cuda_graphs_that_are_off_are_not_on(words: str) -> None:
    assert trainer_of(replace(LLAMA, overlap=words)) == trainer_of(LLAMA)
    assert trainer_of(replace(LLAMA, overlap="CUDA graphs")) != trainer_of(LLAMA)


def test_layer_norms_without_biases_have_no_dropout() -> None:
    assert express(replace(GPT, bias=True)).run.dropout
    assert express(replace(GPT, bias=None)).run.dropout
    assert not express(replace(GPT, bias=False)).run.dropout
    assert express(replace(GPT, bias=False, source="megatron-golden")).run.dropout


def test_devices_are_those_of_the_degrees_if_they_are_not_stated() -> None:
    known = replace(LLAMA, iteration_s=None, tokens_s_gpu=5000.0)
    wanted = predict(known)
    found = predict(replace(known, gpus=None, dp=16))
    assert found.seconds == wanted.seconds
    assert found.error == wanted.error is not None
    assert found.notes == ("devices are those of the degrees: 64",)


def test_an_encoder_attends_to_all_tokens() -> None:
    decoder = replace(GPT, model="gpt-30x2048", seq_len=8192)
    assert seconds(replace(decoder, model="bert-30x2048")) > 1.05 * seconds(decoder)


def test_an_optimizer_on_the_host_frees_memory_and_takes_time() -> None:
    sharded = replace(LLAMA, gpus=8, tp=1, pp=1, gbs=8, zero=3, schedule="zero", recompute="full")
    offloaded = replace(sharded, reason="optimiser offloaded to the host")
    state = 8.03e9 * 16 / 8
    assert peak(sharded) - peak(offloaded) == pytest.approx(state, rel=0.02)
    # Adam moves 30 bytes a parameter through memory of 75 GB/s a device.
    assert seconds(offloaded) - seconds(sharded) == pytest.approx(8.03e9 / 8 * 30 / 75e9, rel=0.25)


def test_checkpointing_by_operator_is_between_none_and_all() -> None:
    sharded = replace(LLAMA, gpus=8, tp=1, pp=1, gbs=16, mbs=2, zero=3, schedule="fsdp")
    none, some, full = (replace(sharded, recompute=how) for how in ("none", "selective-op", "full"))
    assert seconds(none) < seconds(some) < seconds(full)
    assert peak(none) > peak(some) > peak(full)
    # All products but keys, projection and gate, attention and the collectives are kept.
    assert seconds(some) - seconds(none) < 0.5 * (seconds(full) - seconds(none))
    routed = replace(sharded, arch="moe", experts=8, topk=2, recompute="selective-op")
    assert predict(routed).reason


@pytest.mark.parametrize("words", ["torch.compile, async TP", "asynchronous tensor parallelism"])
def test_asynchronous_tensor_parallelism_hides_messages(words: str) -> None:
    assert trainer_of(replace(LLAMA, how=words)).hidden_tensor > 0
    assert trainer_of(replace(LLAMA, how="vanilla TP")).hidden_tensor == 0
    assert seconds(replace(LLAMA, how=words)) < seconds(LLAMA)


def test_latent_attention_alone_is_no_experts() -> None:
    run = replace(LLAMA, arch="mla-moe", mla="default", pp=1, gpus=2)
    assert express(run).run.model.blocks[0].experts is None
    assert "experts is not stated" in predict(replace(run, topk=2)).reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"mbs": None}, "samples of a microbatch"),
        ({"recompute": "unknown"}, "recomputation"),
        ({"gpus": 6}, "the degrees contradict 6 devices, 4 to 512"),
        ({"mfu": 1.5}, "MFU above 1 contradicts 64 devices, 4 to 512"),
    ],
)
def test_what_a_source_leaves_out_widens_the_interval(changes: dict[str, object], word: str) -> None:
    found, stated = predict(replace(LLAMA, **changes)), predict(LLAMA)  # type: ignore[arg-type]
    assert not found.reason
    assert any(word in note for note in found.notes)
    assert found.high_s / found.low_s > 1.05 * stated.high_s / stated.low_s


def test_experts_need_as_many_devices_as_hold_them() -> None:
    run = replace(LLAMA, arch="moe", experts=16, topk=2, ep=16, gpus=8, tp=2, pp=4, gbs=128, ffn=2048)
    known = complete(run)
    # Sixteen experts over the two devices of a rank of eight replicas; up to one microbatch for each replica.
    assert [other.gpus for other in known.others] == [8 * 8, 128 * 8]
    assert known.run.gpus == 32 * 8
    assert express(known.run).run.degrees.expert == 16


@pytest.mark.parametrize("schedule", ["ZB-V", "V-Half", "V-Min"])
def test_a_v_shaped_schedule_has_two_stages_a_rank_if_the_table_states_none(schedule: str) -> None:
    for layers in range(21, 33):
        run = replace(GPT, layers=layers, pp=4, schedule=schedule)
        unstated, stated = (express(complete(each).run).run.now for each in (run, replace(run, vpp=2)))
        assert unstated == stated
        assert len(unstated.stages) == 8
        if layers in (21, 27, 32):
            assert seconds(run) == seconds(replace(run, vpp=2)) > 0


def test_unstated_stages_are_filled_in_turn() -> None:
    known = complete(replace(LLAMA, layers=61, pp=16, gpus=32))
    assert [stage.count("t") for stage in express(known.run).run.now.stages] == [4] * 15 + [1]
    assert "61 layers on 16" in known.notes[0]
    # Embedding and loss take the place of a layer where this evens the stages out, so nothing is assumed.
    assert complete(replace(LLAMA, layers=30, pp=16, gpus=32)).notes == ()


def test_a_run_that_states_everything_is_left_alone() -> None:
    assert complete(LLAMA).run is LLAMA
    assert complete(LLAMA).others == complete(LLAMA).notes == ()


def test_reasons_are_counted_by_kind() -> None:
    kinds = set()
    for device in ("TPU", "MI300X"):
        with pytest.raises(NotExpressible) as caught:
            express(replace(LLAMA, device=device))
        kinds.add(kind_of(caught.value))
        assert device in str(caught.value)
    assert kinds == {"device"}
    assert kind_of(InputError("arguments: --seq-length", "7 is odd")) == "arguments: --seq-length"
    assert predict(replace(LLAMA, device="TPU")).reason_kind == "device"


def test_a_run_without_a_pipeline_has_its_embedding() -> None:
    assert express(replace(LLAMA, gpus=2, pp=1)).run.now.stages == ("E" + "t" * 32 + "L",)


T5 = replace(GPT, model="t5-base", layers=None, hidden=768, ffn=3072, heads=12, kv_heads=12, pp=1, seq_len=None)


def test_an_encoder_and_a_decoder_have_their_own_lengths() -> None:
    run = express(complete(T5).run).run
    assert len(run.model.encoder) == len(run.model.blocks) == 12
    assert run.workload.lengths == (128,)
    assert run.encoder_workload.lengths == (512,)
    assert seconds(replace(T5, layers=24, seq_len=512)) > 1.7 * seconds(T5)
    assert peak(replace(T5, layers=12, seq_len=2048)) > peak(T5)
    assert "pipeline" in predict(replace(T5, pp=2)).reason


def test_a_decoder_with_attention_to_an_encoder_has_more_weights() -> None:
    model = express(complete(T5).run).run.model
    encoder, decoder = (layer_module(blocks[0].whole)[0] for blocks in (model.encoder, model.blocks))
    counts = []
    for module in (encoder, decoder):
        tape = Tape(Context())
        module(tape.input(768))
        counts.append(sum(each.total for each in tape.parameters))
    # Queries, keys, values and the projection, with a norm and biases.
    assert counts[1] - counts[0] == pytest.approx(4 * 768**2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "layers", "ffn", "kv_heads"),
    [("Qwen2.5 7B", 28, 18944, 4), ("Qwen/Qwen2.5-32B-Instruct", 64, 27648, 8), ("llama-3.1-8b", 32, 14336, 8)],
)
def test_a_run_without_sizes_is_read_by_its_model(name: str, layers: int, ffn: int, kv_heads: int) -> None:
    bare = PublishedRun(id="a", device="H100", gpus=8, model=name, seq_len=4096, tp=2, zero=3, mbs=1, gbs=32)
    known = complete(bare)
    assert (known.run.layers, known.run.ffn, known.run.kv_heads, known.run.kind) == (layers, ffn, kv_heads, "dense")
    assert known.notes
    assert predict(bare).seconds > 0


def test_experts_are_read_by_the_model_too() -> None:
    assert sizes_of("Qwen3-30B-A3B") | {"arch": "moe", "experts": 128, "topk": 8} == sizes_of("Qwen3-30B-A3B")


@pytest.mark.parametrize("name", ["", "no such model", "nemotron-h-8b", "vlm-m", "qwen2.5_vl_7b", "a/b/(c"])
def test_unknown_models_and_other_kinds_have_no_sizes(name: str) -> None:
    assert sizes_of(name) == {}
    known = described(name) is not None
    assert known == (name in ("nemotron-h-8b", "vlm-m", "qwen2.5_vl_7b"))
    found = predict(PublishedRun(id="a", device="H100", gpus=8, model=name, seq_len=4096, gbs=8))
    assert bool(found.reason) != known


@pytest.mark.parametrize("seed", range(30))
def test_any_row_is_predicted_or_has_a_reason(seed: int) -> None:
    """Nothing but a reason, in bounded time, whatever the cells say."""
    random_ = random.Random(seed)
    words = {
        "schedule": ("", "1f1b", "interleaved", "fsdp", "zero", "one layer", "ZB-1p", "ZB-2p", "ZB-V", "V-Half", "?"),
        "recompute": ("none", "full", "unknown", "selective-op", "core_attn", "block:2", "?"),
        "reason": (
            "",
            "layers dealt by load",
            "vocabulary parallelism (vocab-1)",
            "optimiser offloaded",
            "MegaScale's",
        ),
        "task": ("pretrain", "sft", "lora", "dpo"),
        "model": ("", "bert-2x2", "t5-2x2", "gpt"),
        "arch": ("dense", "moe", "mla-moe", ""),
        "mla": ("", "default", "q1"),
    }
    sizes = ("gpus", "layers", "hidden", "heads", "vocab", "seq_len", "tp", "pp", "vpp", "cp", "ep", "mbs", "gbs")
    changes: dict[str, object] = {name: random_.choice(choices) for name, choices in words.items()}
    for name in random_.sample(sizes, 4):
        changes[name] = random_.choice((None, 0, 1, 2, 3, 7, 8, 64, 1000))
    changes |= {"experts": random_.choice((None, 8)), "topk": 2, "moe_ffn": 512, "seq_len": changes.get("seq_len", 512)}
    found = predict(replace(GPT, **changes))  # type: ignore[arg-type]
    assert bool(found.reason) != (found.seconds > 0)
    assert bool(found.reason) == bool(found.reason_kind)
    assert found.reason or found.low_s < found.high_s
