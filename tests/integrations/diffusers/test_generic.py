"""Classes that are not known by name: their gradients are the library's own, or they are refused in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.integrations.diffusers import generic, prompts
from pipeloom.integrations.diffusers.replay import Replay
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.model.weights import give_memory

from ..transformers import tiny as language
from . import generic_models, made_up, on_ranks, tiny

TOLERANCE = 1e-9
FAST = ("sd3", "wan2.1")
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.full)  # the others take some seconds each
    for name in generic_models.CASES
]


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    transformer, batch = generic_models.make(name)
    found = pl.check_gradients(pl.from_diffusers(transformer), batch, ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)
    # Some last blocks have parameters that the library does not use.
    assert len(found.rows) > 0.9 * sum(1 for _ in transformer.parameters())


@pytest.mark.full
@pytest.mark.parametrize("name", generic_models.CASES)
def test_gradients_on_four_ranks(name: str) -> None:
    transformer, batch = generic_models.make(name, seed=4)
    flow = pl.FlowMatching(weighting="cosmap", seed=3)
    found = pl.check_gradients(pl.from_diffusers(transformer, flow=flow), batch, ranks=4, plans=3, seed=1)
    assert found.worst < TOLERANCE, str(found)


def chain() -> tuple[Any, Any, list[dict[str, Any]]]:
    """A vision-language model before a transformer of images, and samples with several images, one or none."""
    encoder, prompts = language.make("qwen2_5_vl")
    transformer, samples = generic_models.make("qwen")
    width = encoder.config.get_text_config().hidden_size
    transformer = generic_models.qwen(joint_attention_dim=width)
    batch = []
    for prompt, sample in zip(prompts, samples, strict=False):
        del sample["prompt_embeds"]
        batch.append({**{name: each for name, each in prompt.items() if name not in ("id", "labels")}, **sample})
    batch[1]["prompt_start"] = 1
    return transformer, encoder, batch


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.full)])
def test_three_modules_in_a_chain(ranks: int) -> None:
    transformer, encoder, batch = chain()
    model = pl.from_diffusers(transformer, encoder, freeze=())
    assert [module.name for module in model.modules] == ["vision", "lm", "transformer"]
    found = pl.check_gradients(model, batch, ranks=ranks, plans=3)
    assert found.worst < TOLERANCE, str(found)
    # The gradient of the transformer's loss reaches the first layer of the vision encoder.
    largest = {row.name: row.largest for row in found.rows}
    assert largest["text_encoder.model.visual.patch_embed.proj.weight"] > 0
    assert len(found.rows) > 100


def test_a_frozen_encoder_of_a_chain() -> None:
    transformer, encoder, batch = chain()
    found = pl.check_gradients(pl.from_diffusers(transformer, encoder), batch[:3], ranks=2, plans=1)
    assert found.worst < TOLERANCE
    assert {row.name.split(".")[0] for row in found.rows} == {"transformer"}


@pytest.mark.parametrize(("freeze", "trains"), [("vision", False), ("lm", True)])
def test_the_projector_of_a_chain_is_frozen_with_its_encoder(freeze: str, trains: bool) -> None:
    """It runs in the first layer of the language model."""
    transformer, encoder, _ = chain()
    model = pl.from_diffusers(transformer, encoder, freeze=(freeze,))
    assert not next(module for module in model.modules if module.name == "lm").frozen
    assert {parameter.requires_grad for parameter in encoder.model.visual.merger.parameters()} == {trains}
    assert {parameter.requires_grad for parameter in encoder.model.language_model.parameters()} == {not trains}


def prompted(name: str, transformer: Any) -> list[dict[str, Any]]:
    """Samples with the ids of prompts, some of them padded, in place of embeddings."""
    _, samples = generic_models.make(name)
    _, _, prompts = tiny.make("wan")
    for sample, prompt in zip(samples, prompts, strict=False):
        del sample["prompt_embeds"]
        sample |= {entry: prompt[entry] for entry in ("input_ids", "attention_mask")}
    del transformer
    return samples


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("pixart", {"caption_channels": None, "cross_attention_dim": tiny.TEXT_WIDTH}),
        pytest.param("wan2.2", {}, marks=pytest.mark.full),
    ],
)
def test_a_t5_encoder(name: str, more: dict[str, Any]) -> None:
    """Also before a transformer whose blocks take the prompt's embedding itself."""
    transformer = generic_models.CASES[name][0](**more)
    model = pl.from_diffusers(transformer, tiny.encoder("umt5"), freeze=())
    found = pl.check_gradients(model, prompted(name, transformer), ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.full
def test_three_processes_train_a_chain_as_the_library_does(tmp_path: Path) -> None:
    transformer, encoder, batch = chain()
    torch.save((transformer, encoder, batch), tmp_path / "chain.pt")
    losses = launch(on_ranks.train_chain, 3, str(tmp_path / "chain.pt"), timeout_s=300.0)
    wanted = on_ranks.train_library_chain(transformer, encoder, batch)
    assert losses[0] == pytest.approx(wanted, rel=1e-9)


# ------------------------------------------------------------------ acceptance


def test_a_part_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a layer replaced a tensor that it needs by zeros, the test on a small model would fail."""
    earlier = Replay._earlier

    def forgets(self: Replay, path: str, number: int, call: Any) -> Any:
        if path == "time_text_embed":
            self.values.clear()
        return earlier(self, path, number, call)

    monkeypatch.setattr(Replay, "_earlier", forgets)
    monkeypatch.setattr(generic, "_ACCEPTED", {})
    with pytest.raises(InputError, match="of its layers differs from the library's"):
        pl.from_diffusers(generic_models.sd3())


def test_blocks_between_the_first_and_the_last_are_those_of_the_model() -> None:
    model = pl.from_diffusers(generic_models.sd3(num_layers=7))
    assert len(model.modules[0].layers) == 9


class Averaged(diffusers.SD3Transformer2DModel):
    """Its forward pass looks at all samples of a batch, and takes no time."""

    def forward(self, hidden_states: Any, encoder_hidden_states: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny.encoder("t5"), "is a T5EncoderModel; give a transformer of the diffusers library"),
        (
            lambda: Averaged(num_layers=1, attention_head_dim=8, num_attention_heads=2, caption_projection_dim=16),
            "'timestep'",
        ),
        (lambda: generic_models.flux(pooled_projection_dim=1, axes_dims_rope=(2, 2, 2)), "no inputs could be"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        pl.from_diffusers(make())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sd3", {"latents": None}, "latents: is missing"),
        ("sd3", {"pooled": torch.zeros(6)}, "pooled: is not an input of this model; choose from id, latents"),
        ("wan2.2", {"condition_latents": torch.zeros(4, 1, 2, 4)}, "condition_latents: have the shape"),
    ],
)
def test_a_sample_that_is_not_understood_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    transformer, batch = generic_models.make(name)
    model = pl.from_diffusers(transformer)
    assert model.describe is not None
    with pytest.raises(InputError, match=message):
        model.describe(batch[0] | change)


def test_samples_of_other_sizes_than_those_of_the_test() -> None:
    """Image rows that all examples have alike are of fixed size. Other samples are refused, never computed wrongly."""
    transformer, batch = generic_models.make("wan2.1")
    model = pl.from_diffusers(transformer, examples=batch)
    batch[0]["encoder_hidden_states_image"] = torch.randn(4, 10)
    assert model.describe is not None
    with pytest.raises(InputError, match="give from_diffusers examples"):
        model.describe(batch[0])


@pytest.mark.parametrize("part", ["words", "extra"])
def test_an_input_that_no_sample_of_the_test_has(part: str) -> None:
    """The part that takes it would run in the first layer, and later layers would compute with zeros."""
    batch = made_up.samples()
    model = pl.from_diffusers(made_up.MadeUp(more=part), examples=batch)
    assert model.describe is not None
    model.describe(batch[0])
    with pytest.raises(InputError, match=f"makes the model call {part} more or less often"):
        model.describe(batch[0] | {"more_words": torch.randn(2, 7)})
    found = pl.check_gradients(model, batch, ranks=2, plans=1)
    assert found.worst < TOLERANCE, str(found)


class Tied(made_up.MadeUp):
    """The part that embeds further words has the weights of another one."""

    def __init__(self, num_layers: int = 3, num_single_layers: int = 4, num_attention_heads: int = 2) -> None:
        counts = {"num_layers": num_layers, "num_single_layers": num_single_layers}
        super().__init__(num_attention_heads=num_attention_heads, more="extra", **counts)
        self.extra.weight, self.extra.bias = self.words[0].weight, self.words[0].bias


def test_a_part_that_no_sample_of_the_test_uses_may_have_the_weights_of_another() -> None:
    batch = made_up.samples()
    model = pl.from_diffusers(Tied(), examples=batch)
    assert model.describe is not None
    with pytest.raises(InputError, match="makes the model call extra more or less often"):
        model.describe(batch[0] | {"more_words": torch.randn(2, 7)})
    found = pl.check_gradients(model, batch, ranks=2, plans=1)
    assert found.worst < TOLERANCE, str(found)


def test_an_input_that_all_samples_of_the_test_have() -> None:
    batch = [sample | {"more_words": torch.randn(2 + at % 2, 7)} for at, sample in enumerate(made_up.samples())]
    model = pl.from_diffusers(made_up.MadeUp(more="extra"), examples=batch)
    found = pl.check_gradients(model, batch, ranks=2, plans=1)
    assert found.worst < TOLERANCE, str(found)
    del batch[0]["more_words"]
    assert model.describe is not None
    with pytest.raises(InputError, match="makes the model call extra more or less often"):
        model.describe(batch[0])


def test_examples_that_fail_are_refused() -> None:
    transformer, batch = generic_models.make("sd3")
    batch[0]["prompt_embeds"] = torch.zeros(3, 5)
    with pytest.raises(InputError, match="examples"):
        pl.from_diffusers(transformer, examples=batch)


@pytest.mark.parametrize("name", ["sd3", pytest.param("wan2.2", marks=pytest.mark.full)])
def test_a_transformers_folder(name: str, tmp_path: Path) -> None:
    """Ranks read their own weights, tables of positions are there, and what is saved can be loaded."""
    transformer, batch = generic_models.make(name)
    transformer.save_pretrained(tmp_path / "from")
    shapes, whole = pl.from_diffusers(tmp_path / "from", device="meta"), pl.from_diffusers(tmp_path / "from")
    assert shapes.spec == whole.spec
    assert all(p.is_meta for layer in shapes.modules[0].layers for p in layer.parameters())
    assert shapes.pretrained is not None
    shapes.pretrained.fill(give_memory(shapes))
    metadata = pl.batch_of(batch, whole.describe)
    losses = [pl.run_undivided(each, metadata, batch, backward=False) for each in (shapes, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ------------------------------------------------------------------ a class that no library has


def test_skips_and_parts_between_lists_of_blocks() -> None:
    torch.manual_seed(0)
    model = pl.from_diffusers(made_up.MadeUp())
    assert len(model.modules[0].layers) == 9
    found = pl.check_gradients(model, made_up.samples(), ranks=3, plans=4)
    assert found.worst < TOLERANCE, str(found)
    assert len(found.rows) == sum(1 for _ in made_up.MadeUp().parameters())


def test_attributes_of_replaced_parts_are_on_the_device_of_the_layer() -> None:
    model = pl.from_diffusers(made_up.MadeUp())
    names = [set(layer.state_dict()) for layer in model.modules[0].layers]
    for layer, known in zip(model.modules[0].layers, names, strict=True):
        layer.to("meta", torch.bfloat16)
        weight = layer.get_submodule("shell.leave").weight
        assert (weight.device.type, weight.dtype) == ("meta", torch.bfloat16)
        assert set(layer.state_dict()) == known == {name for name, _ in layer.named_parameters()}


def test_more_blocks_than_the_tested_model_has() -> None:
    torch.manual_seed(0)
    model = pl.from_diffusers(made_up.MadeUp(num_layers=6, num_single_layers=6, num_attention_heads=6))
    found = pl.check_gradients(model, made_up.samples(), ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)


def test_what_only_the_first_layer_has_is_not_replaced_silently() -> None:
    with pytest.raises(InputError, match="the loss of its layers differs from the library's"):
        pl.from_diffusers(made_up.MadeUp(reads_noise=True))


def test_times_are_scaled_as_by_the_pipelines_of_a_class() -> None:
    def scale(name: str, **config: float) -> float:
        return generic._time_scale(type(f"{name}Transformer2DModel", (), {}), config)

    assert [scale(name) for name in ("Flux", "PRX", "Krea2", "CogView4", "Sana")] == [1e-3, 1e-3, 1e-3, 1.0, 1.0]
    assert scale("Sana", timestep_scale=0.5) == 0.5
    assert scale("Cosmos") == 1e-3
    for name in ("LuminaNextDiT2DModel", "Lumina2", "Mochi", "NucleusMoEImage", "OmniGen", "ZImage"):
        with pytest.raises(InputError, match="reverses the time or negates what the transformer predicts"):
            scale(name)


def test_a_text_encoder_that_caps_its_logits_is_refused() -> None:
    text = SimpleNamespace(final_logit_softcapping=30.0, hidden_size=8)
    encoder = SimpleNamespace(lm_head=object(), config=SimpleNamespace(get_text_config=lambda: text))
    with pytest.raises(InputError, match=r"final_logit_softcapping = 30.0, which would change the prompt's embedding"):
        prompts._language_model(encoder, ())
