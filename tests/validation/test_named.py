"""Runs whose source names a hybrid, or a model that reads images, are expressed by the public model."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pipeloom.emulator.build import Placement, module_templates
from pipeloom.integrations.megatron.model import Block, described_model
from pipeloom.integrations.megatron.timing import Timing
from pipeloom.spec.architecture import ExpertsMixer, has_scan, layer_mixers, num_mixers
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.parallelism import Degrees
from pipeloom.validation.constants import shipped, with_values
from pipeloom.validation.express import express
from pipeloom.validation.named import named_model, predictor, with_frozen_encoders
from pipeloom.validation.predict import predict
from pipeloom.validation.runs import PublishedRun, published_runs
from pipeloom.validation.sizes import described, has_pattern, public_model
from pipeloom.validation.unstated import IMAGE_TOKENS, complete

HYBRID = PublishedRun(
    id="a", device="H100", gpus=8, model="nemotron-3-nano-30b-a3b", seq_len=8192, ep=8, mbs=1, gbs=64, zero=1
)
IMAGES = PublishedRun(
    id="b", device="A800", gpus=8, model="InternVL3.5-8B", seq_len=16384, tp=4, sp=True, mbs=1, gbs=32, zero=1
)


def seconds(run: PublishedRun) -> float:
    return express(complete(run).run).predict()[0]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Nemotron V3 Nano 30B (26.02)", "nemotron-3-nano-30b-a3b"),
        ("Nemotron_3_Super", "nemotron-3-super-120b-a12b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16", "nemotron-3-nano-4b"),
        ("NEMOTRONH_56B", "nemotron-h-56b"),
        ("google/gemma-4-26B-A4B-it", "gemma-4-26b-a4b"),
        ("qwen3_8_27b", "qwen3.5-27b"),
        ("Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
        ("internvl2.5_8b", "internvl2.5-8b"),
    ],
)
def test_a_model_is_found_by_many_spellings(name: str, model: str) -> None:
    found = public_model(name)
    assert found is not None
    assert found.name == model
    assert described(name) == found


@pytest.mark.parametrize("name", ["nemotron-3-nano-31b", "qwen4-27b", "nano", "gemma-4"])
def test_a_name_that_is_only_similar_is_not_known(name: str) -> None:
    assert public_model(name) is None


def test_every_run_of_a_known_model_on_a_known_device_is_predicted() -> None:
    runs = [run for run in published_runs() if (not run.arch or has_pattern(run.model)) and described(run.model)]
    reasons = {run.id: found.reason for run in runs if (found := predict(run)).reason}
    assert len(runs) > 40
    missing = ("device undisclosed", "seq_len is not stated")
    assert all(reason.startswith(missing) for reason in reasons.values()), reasons


def test_a_pattern_replaces_the_columns_of_a_transformer() -> None:
    (run,) = (each for each in published_runs() if each.id == "megatron-golden-778")
    model = express(complete(run).run).run.model
    assert run.arch == "moe"
    assert [bool(block.experts) for block in model.blocks].count(True) == 23
    assert sum(has_scan(block.whole) for block in model.blocks) == 23


def test_more_tokens_and_layers_take_longer() -> None:
    base = seconds(HYBRID)
    assert seconds(replace(HYBRID, gbs=128)) > 1.5 * base
    assert seconds(replace(HYBRID, seq_len=16384)) > 1.5 * base
    assert seconds(replace(HYBRID, recompute="full")) > base
    assert seconds(replace(HYBRID, mtp=1)) > base


def test_what_is_recomputed_costs_time_and_frees_memory_in_layers_of_one_mixer() -> None:
    kept, dropped = (express(replace(complete(HYBRID).run, recompute=text)) for text in ("none", "moe,layernorm"))
    (long, much), (longer, less) = ((time, max(ranks)) for time, ranks in (kept.predict(), dropped.predict()))
    assert longer > long
    assert less < 0.9 * much


def test_modules_of_traced_layers_are_recomputed() -> None:
    run = replace(HYBRID, model="Qwen3-Next-80B-A3B", pp=4, gpus=32)
    kept, dropped = (express(replace(complete(run).run, recompute=text)) for text in ("none", "layernorm,moe_act"))
    assert dropped.predict()[0] > kept.predict()[0]
    assert max(dropped.predict()[1]) < max(kept.predict()[1])
    assert "is not known for a traced layer" in predict(replace(run, recompute="moe")).reason


def test_images_are_a_range_that_widens_the_interval() -> None:
    known = complete(IMAGES)
    assert (known.run.images, known.run.patches) == (32, 4 * IMAGE_TOKENS)
    assert [other.images for other in known.others] == [16, 48]
    few, many = (seconds(replace(IMAGES, images=n, patches=1024)) for n in (1, 48))
    assert few < seconds(IMAGES) < many
    assert any("16 to 48 of 256 tokens" in note for note in predict(IMAGES).notes)
    stated, unstated = predict(replace(IMAGES, images=32)), predict(IMAGES)
    assert stated.seconds == unstated.seconds
    assert stated.high_s - stated.low_s < unstated.high_s - unstated.low_s


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"images": 2**31}, "images: 2147483648 of a sample are more than 65536"), ({"patches": 2**31}, "large")],
)
def test_absurd_images_have_a_reason(changes: dict[str, int], reason: str) -> None:
    assert reason in predict(replace(IMAGES, **changes)).reason  # type: ignore[arg-type]
    assert predict(replace(IMAGES, patches=1)).seconds > 0


def test_a_frozen_encoder_runs_forward_alone_and_its_adapter_is_trained() -> None:
    model = public_model("internvl3.5-8b")
    assert model is not None
    whole = with_frozen_encoders(model)
    vision, adapter, language = whole.modules
    assert (vision.frozen, adapter.frozen, language.after) == (True, False, (vision.name, adapter.name))
    assert vision.layers + adapter.layers == model.modules[0].layers
    placement = Placement(load_cluster("8xh100"), Degrees())
    assert {"B" in each.passes["keep"].programs for each in module_templates(whole, vision, placement)} == {False}
    assert all("B" in each.passes["keep"].programs for each in module_templates(whole, adapter, placement))
    (frozen,) = with_frozen_encoders(model, adapters=True).modules[:-1]
    assert frozen.frozen
    times = [seconds(replace(IMAGES, frozen=text)) for text in ("", "encoder", "encoder,adapter")]
    assert times[0] > times[1] >= times[2]


def test_a_predictor_has_attention_and_experts() -> None:
    hybrid, whole = (public_model(name) for name in ("nemotron-3-super", "qwen3-next-80b-a3b"))
    assert hybrid is not None
    assert whole is not None
    joined = predictor(hybrid.modules[-1])
    assert [type(each).__name__ for each in layer_mixers(joined.whole)] == ["AttentionMixer", "ExpertsMixer"]
    traced = predictor(whole.modules[-1]).whole
    assert num_mixers(traced) == 2
    assert not has_scan(traced)


def test_rows_that_pad_experts_are_more() -> None:
    card = {"source": "bridge-cards", "ref": "super pretrain", "model": "nemotron_3_super_120b_a12b"}
    model = named_model(replace(HYBRID, **card))  # type: ignore[arg-type]
    assert model is not None
    mixers = [each for block in model.blocks for each in layer_mixers(block.whole) if isinstance(each, ExpertsMixer)]
    assert {each.imbalance for each in mixers} == {1.1}


def test_only_models_with_scans_depend_on_their_constant() -> None:
    slower = {**shipped(), "scan": 2 * shipped()["scan"]}
    hybrid, dense = express(complete(HYBRID).run), express(complete(replace(IMAGES, images=4)).run)
    assert with_values(hybrid, slower).predict()[0] > hybrid.predict()[0]
    assert with_values(dense, slower).predict() == dense.predict()


def test_deterministic_delta_rules_run_by_loops_of_the_host() -> None:
    run = replace(HYBRID, model="qwen3.5-27b", ep=1, tp=4, sp=True, gbs=8, images=1)
    loops = seconds(replace(run, overlap="deterministic"))
    # Three quarters of the 64 layers have loops of 64 or more chunks, each for two microbatches of a replica.
    assert loops > seconds(run) + 0.05 * 48 * 2
    assert seconds(replace(HYBRID, overlap="deterministic")) == seconds(HYBRID)


def test_the_language_model_is_the_last_module() -> None:
    vision = public_model("internvl3.5-8b")
    assert vision is not None
    model = described_model(vision, 4)
    assert model.head.vocabulary % 512 == 0
    assert model.towers is not None
    assert [each.name for each in model.towers.modules] == ["vision", "lm"]
    backwards = msgspec.structs.replace(vision, modules=vision.modules[:1])
    with pytest.raises(Exception, match="is no language model"):
        described_model(backwards, 1)


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen3-vl-30b-a3b", "llava-1.5-7b", "gemma-3-4b", "vlm-s", "bamba-9b"])
def test_streams_and_other_encoders_are_expressed(name: str) -> None:
    run = PublishedRun(id="a", model=name, device="H100", gpus=8, seq_len=4096, tp=2, mbs=1, gbs=16, zero=1)
    assert predict(run).seconds > 0


@pytest.mark.parametrize("name", ["t2v-s", "siglip-so400m", "vit-2b"])
def test_a_model_without_a_language_model_is_not_described(name: str) -> None:
    found = predict(PublishedRun(id="a", model=name, device="H100", gpus=8, seq_len=4096, mbs=1, gbs=16))
    assert found.reason == f"model that is not described: {name}"


def test_the_halves_of_a_block() -> None:
    llama = load_architecture("llama3-8b").modules[0].flat_layers[1]
    block = Block(llama)  # type: ignore[arg-type]
    assert block.attention is not None
    assert block.feed_forward is not None
    assert block.attention.mixers + block.feed_forward.mixers == layer_mixers(llama)
    alone = Block(load_architecture("nemotron-3-nano-4b").modules[0].flat_layers[1])  # type: ignore[arg-type]
    assert alone.attention == alone.whole
    assert alone.feed_forward is None


def test_the_encoder_runs_on_the_first_stage() -> None:
    found = express(replace(complete(IMAGES).run, pp=2, tp=2, layers=36))
    costs = Timing(found.run, found.cluster, found.trainer).costs
    first, last = costs.of(found.run.now)
    without = replace(found.run, encoder_lengths=())
    plain, same = Timing(without, found.cluster, found.trainer).costs.of(without.now)
    assert first.forward_ns > plain.forward_ns
    assert last == same
