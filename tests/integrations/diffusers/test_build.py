"""What `from_diffusers` makes of a pipeline, how it draws noise, and what it refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.flow import noising
from pipeloom.integrations.transformers import check
from pipeloom.packing import pack
from pipeloom.runtime import ExecutionOptions, ThreadHub
from pipeloom.runtime.model.model import make_part
from pipeloom.spec import Batch, Chunk, Layout, ModuleLayout
from tests.integrations.transformers.test_build import Largest

from . import tiny


def model_of(name: str = "wan", **more: Any) -> tuple[Any, tiny.Batch]:
    transformer, encoder, batch = tiny.make(name)
    return pl.from_diffusers(transformer, encoder, **more), batch


def part_of(model: Any, batch: tiny.Batch, iteration: int = 0) -> pl.Part:
    return pl.Part(tuple(batch), tuple((i, 0) for i in range(len(batch))), iteration)


# ------------------------------------------------------------------ samples


@pytest.mark.parametrize("name", tiny.CASES)
def test_sizes_of_samples(name: str) -> None:
    model, batch = model_of(name)
    metadata = pl.batch_of(batch, model.describe).samples
    assert [s.id for s in metadata] == [sample["id"] for sample in batch]
    tokens = [model.spec.module("transformer").instance_lengths(s) for s in metadata]
    assert tokens == [(4,), (4,), (1,), (6,), (4,), (6,)]
    words = [model.spec.module("text").instance_lengths(s) for s in metadata]
    seen = [sample["input_ids"] if name == "ltx" else sample["attention_mask"].nonzero() for sample in batch]
    assert words == [(len(each),) for each in seen]


def test_a_sample_without_a_name_is_called_by_its_contents() -> None:
    model, batch = model_of()
    sample = {key: value for key, value in batch[0].items() if key != "id"}
    other = {**sample, "latents": sample["latents"] + 1}
    assert model.describe(sample)["id"] == model.describe(dict(sample))["id"] != model.describe(other)["id"]


def changed(**changes: Any) -> Any:
    _, _, batch = tiny.make("wan")
    return {name: value for name, value in (batch[0] | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (lambda: changed(latents=...), "sample.latents: is missing"),
        (lambda: changed(latents=torch.zeros(3, 1, 2, 2)), r"have the shape \(3, 1, 2, 2\); give \(4, frames"),
        (lambda: changed(latents=torch.zeros(4, 1, 3, 2)), r"of \(1, 3, 2\) do not divide into tokens of \(1, 2, 2\)"),
        (lambda: changed(latents=torch.zeros(4, 17, 2, 2)), "have 17 tokens along a side; cut to 16"),
        (lambda: changed(input_ids=...), "sample.input_ids: is missing"),
        (lambda: changed(prompt_embeds=torch.zeros(1, 12)), "prompt_embeds: is not an input of this model"),
        (lambda: changed(attention_mask=torch.ones(2)), "attention_mask: has 2 entries, input_ids 5"),
        (lambda: changed(attention_mask=torch.tensor([1, 0, 1, 0, 0])), "has a zero before a one"),
        (lambda: changed(attention_mask=torch.zeros(5)), "input_ids: has no token"),
        (lambda: changed(rope_interpolation_scale=(1, 1, 1)), "rope_interpolation_scale: is not an input"),
    ],
)
def test_a_sample_that_is_not_understood_is_refused(sample: Callable[[], Any], message: str) -> None:
    model, _ = model_of()
    with pytest.raises(InputError, match=message) as raised:
        model.describe(sample())
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------ noise


def test_noise_depends_on_seed_iteration_and_name_alone() -> None:
    latents = torch.randn(4, 2, 2, 2)
    draw = noising(pl.FlowMatching(seed=3), None)
    first = draw.of(latents, "a", 7)
    for other, same in (
        (noising(pl.FlowMatching(seed=3), None).of(latents, "a", 7), True),
        (draw.of(latents + 1, "a", 7), True),
        (draw.of(latents, "a", 8), False),
        (draw.of(latents, "b", 7), False),
        (noising(pl.FlowMatching(seed=4), None).of(latents, "a", 7), False),
    ):
        assert torch.equal(other.time, first.time) == same
    again = draw.of(latents + 1, "a", 7)
    torch.testing.assert_close(again.target + 1, first.target)
    # In half precision the same noise.
    half = draw.of(latents.bfloat16(), "a", 7)
    torch.testing.assert_close(half.target, first.target, atol=0.05, rtol=0)


def test_noise_and_time_are_those_of_the_training_scripts() -> None:
    latents, sigmas = torch.randn(4, 2, 2, 2), []
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    draw = noising(pl.FlowMatching(), scheduler)
    for number in range(200):
        found = draw.of(latents, str(number), 0)
        noise = found.target + latents
        torch.testing.assert_close(found.noisy, scheduler.scale_noise(latents[None], found.time, noise[None])[0])
        sigmas.append(float(found.time) / 1000)
    u = compute_density_for_timestep_sampling("none", 20000)
    wanted = float(scheduler.sigmas[(u * 1000).long()].mean())
    assert sum(sigmas) / len(sigmas) == pytest.approx(wanted, abs=0.06)


def test_a_scheduler_that_reverses_the_time_is_refused() -> None:
    with pytest.raises(InputError, match="scheduler: has invert_sigmas: time 0 is noise"):
        noising(pl.FlowMatching(), diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True))


def test_packings_give_the_same_noise() -> None:
    model, batch = model_of()
    metadata = pl.batch_of(batch, model.describe, 5)
    modules = tuple(ModuleLayout.of(m, 2 if m.name == "transformer" else None) for m in model.spec.modules)
    layout = Layout(1, modules, tuple(Chunk(m.name, (0, len(m.flat_layers) - 1), 0) for m in model.spec.modules))
    module, seen = model.module("transformer"), []
    assert module.inputs is not None
    for budget in (6, 12, 100):
        packing = pack(metadata, model.spec, layout, pl.PackingSpec(budget, "first_fit"))
        found = {}
        for number, microbatch in enumerate(packing.microbatches):
            for sub in range(len(packing.parts_of(number, "transformer"))):
                part = make_part(module.spec, packing, batch, number, sub)
                assert part.iteration == 5
                times, *_ = module.inputs(part)
                found |= {
                    microbatch.samples[place]: float(t) for (place, _), t in zip(part.instances, times, strict=True)
                }
        seen.append([found[i] for i in range(len(batch))])
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) > 3


def test_iterations_draw_anew_and_resumed_the_same() -> None:
    model, batch = model_of()
    metadata = pl.batch_of(batch, model.describe).samples
    losses = [pl.run_undivided(model, Batch(metadata, i), batch, backward=False) for i in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


# ------------------------------------------------------------------ the model


def test_the_condition_is_embedded_once_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, encoder, batch = tiny.make("wan")
    calls = []
    for name in ("time_embedder", "text_embedder"):
        part = getattr(transformer.condition_embedder, name)
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
    model = pl.from_diffusers(transformer, encoder)
    pl.run_undivided(model, pl.batch_of(batch[:2], model.describe), batch[:2], backward=False)
    assert sorted(calls) == ["text_embedder", "time_embedder"]


def test_the_library_goes_on_working() -> None:
    transformer, encoder, batch = tiny.make("wan")
    given = {"hidden_states": batch[0]["latents"][None], "timestep": torch.tensor([300.0])}
    given["encoder_hidden_states"] = encoder(batch[0]["input_ids"][None])[0]
    before = transformer(**given).sample
    model = pl.from_diffusers(transformer, encoder)
    pl.run_undivided(model, pl.batch_of(batch, model.describe), batch, backward=False)
    torch.testing.assert_close(transformer(**given).sample, before)


@pytest.mark.parametrize("name", tiny.CASES)
def test_library_names(name: str) -> None:
    transformer, encoder, _ = tiny.make(name)
    names = pl.from_diffusers(transformer, encoder).library_names()
    theirs = {f"transformer.{key}" for key, _ in transformer.named_parameters()}
    theirs |= {f"text_encoder.{key}" for key, _ in encoder.named_parameters()}
    assert set(names.values()) == theirs


def save(folder: Path, name: str = "wan", **more: Any) -> tuple[Any, Any]:
    """A pipeline's folder without what is not trained."""
    transformer, encoder, _ = tiny.make(name)
    transformer.save_pretrained(folder / "transformer")
    encoder.save_pretrained(folder / "text_encoder")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    index: dict[str, Any] = {
        "transformer": ["diffusers", type(transformer).__name__],
        "text_encoder": ["transformers", type(encoder).__name__],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index | more))
    return transformer, encoder


@pytest.mark.parametrize("name", ["wan", pytest.param("ltx", marks=pytest.mark.full)])
def test_a_pipelines_folder(name: str, tmp_path: Path) -> None:
    transformer, encoder = save(tmp_path, name)
    _, _, batch = tiny.make(name)
    made = pl.from_diffusers(transformer, encoder, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    real, shapes = pl.from_diffusers(tmp_path), pl.from_diffusers(tmp_path, device="meta")
    metadata = pl.batch_of(batch, made.describe)
    losses = [pl.run_undivided(each, metadata, batch, backward=False) for each in (made, real)]
    # Weights are the same, and lie elsewhere in memory.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for ours, theirs in zip(real.modules, made.modules, strict=True):
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), other.parameters(), strict=True))
    assert real.spec == made.spec == shapes.spec
    assert all(p.is_meta for module in shapes.modules for layer in module.layers for p in layer.parameters())
    profile = pl.profile_model(
        shapes, [batch], packing=pl.PackingSpec(80), placements={}, options=pl.ProfileOptions(repeats=1)
    )
    assert profile.layers.keys() == {f"{m.name}/{layer.kind}" for m in real.spec.modules for layer in m.flat_layers}


def test_a_pipeline() -> None:
    transformer, encoder, _ = tiny.make("wan")
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    pipeline = diffusers.WanPipeline(None, encoder, None, scheduler, transformer)
    made, wanted = pl.from_diffusers(pipeline), pl.from_diffusers(transformer, encoder, scheduler=scheduler)
    assert made.spec == wanted.spec
    assert made.source.transformer is transformer
    torch.testing.assert_close(made.source.noising.times, wanted.source.noising.times)
    pipeline.transformer_2 = tiny.wan()
    with pytest.raises(InputError, match="has two transformers"):
        pl.from_diffusers(pipeline)


def test_a_transformers_folder(tmp_path: Path) -> None:
    transformer, _, _ = tiny.make("wan")
    transformer.save_pretrained(tmp_path)
    assert [module.name for module in pl.from_diffusers(tmp_path).modules] == ["condition", "transformer"]


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    transformer, encoder, _ = tiny.make("wan")
    for name in ("vae", "lm"):
        with pytest.raises(InputError, match=f"'{name}' is not a module; choose from text, condition, transformer"):
            pl.from_diffusers(transformer, encoder, freeze=(name,))
    with pytest.raises(InputError, match="exists already"):
        pl.from_diffusers(transformer, encoder, device="meta")
    with pytest.raises(InputError, match="is not a folder with a config"):
        pl.from_diffusers(tmp_path)
    with pytest.raises(InputError, match="gives 12 numbers a token, the transformer takes 16"):
        pl.from_diffusers(tiny.wan(text_dim=16), encoder)
    with pytest.raises(InputError, match="is a Linear; use T5EncoderModel"):
        pl.from_diffusers(transformer, torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match="is a DDIMScheduler without sigmas of flow matching"):
        pl.from_diffusers(transformer, encoder, scheduler=diffusers.DDIMScheduler())
    with pytest.raises(InputError, match="'uniform' is unknown; choose from none, logit_normal"):
        pl.FlowMatching(weighting="uniform")  # type: ignore[arg-type]
    save(tmp_path, transformer_2=["diffusers", "WanTransformer3DModel"])
    with pytest.raises(InputError, match="has two transformers"):
        pl.from_diffusers(tmp_path)
    transformer.enable_gradient_checkpointing()
    with pytest.raises(InputError, match="recomputes its blocks itself"):
        pl.from_diffusers(transformer, encoder)


def test_schedulers_for_sampling_train_on_their_shift() -> None:
    given = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    wanted = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    found = noising(pl.FlowMatching(), given)
    torch.testing.assert_close(found.sigmas, wanted.sigmas)
    # One that has sampled has other times.
    wanted.set_timesteps(4)
    torch.testing.assert_close(noising(pl.FlowMatching(), wanted).sigmas, found.sigmas)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("weights", "autocast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
@pytest.mark.parametrize("name", ["wan", pytest.param("ltx", marks=pytest.mark.full)])
def test_half_precision(name: str, weights: torch.dtype, autocast: Any) -> None:
    """Shapes and dtypes are those that are stated, whatever the cuts, and the loss is near."""
    transformer, encoder, batch = tiny.make(name)
    losses = []
    for dtype, region in ((torch.float32, None), (weights, autocast)):
        model = pl.from_diffusers(transformer.to(dtype), encoder.to(dtype), freeze=())
        drawn = check._draw(random.Random(0), model, pl.batch_of(batch, model.describe), 1)
        options = ExecutionOptions(autocast=region)
        executor = pl.Executor(model, drawn.layout, 0, ThreadHub().transport(0), options=options)
        result = executor.run(drawn.plan, drawn.packing, batch)
        losses.append(result.loss_sum / result.normalizer)
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)


def test_samples_of_one_size_go_through_together() -> None:
    model, batch = model_of()
    context = model.module("transformer").context
    assert context is not None
    videos = [run["video"] for run in context(part_of(model, batch))["calls"].outer["runs"]]
    assert videos[0] == replace(model.reader.read(batch[0]).video, count=2)


def test_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    tiny.wan(ffn_dim=24).save_pretrained(tmp_path / "other")
    tiny.wan(num_layers=2).save_pretrained(tmp_path / "fewer")
    tiny.wan().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    for folder, message in (
        ("other", r"proj.weight: has the shape \(24, 24\), the model's is \(20, 24\)"),
        ("fewer", "blocks.2.attn1.norm_k.weight: is in none of the files"),
    ):
        (tmp_path / folder / "config.json").write_text((tmp_path / "shards" / "config.json").read_text())
        with pytest.raises(InputError, match=message):
            pl.from_diffusers(tmp_path / folder)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    pl.from_diffusers(tmp_path / "shards")
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match=r"is missing, .*index.json names it; fetch the folder again"):
        pl.from_diffusers(tmp_path / "shards")


def test_no_tensor_is_as_large_as_the_square_of_the_packed_length() -> None:
    model, _ = model_of()
    samples = tiny.batch(4, (1, 8, 8)) * 8
    samples = [{**sample, "id": str(number)} for number, sample in enumerate(samples)]
    metadata = pl.batch_of(samples, model.describe)
    length = sum(sum(model.spec.module("transformer").instance_lengths(each)) for each in metadata.samples)
    with Largest() as largest:
        pl.run_undivided(model, metadata, samples)
    assert largest.most < length * length / 4
