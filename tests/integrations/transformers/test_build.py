"""What `from_transformers` makes of a model, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.spec import batch_from_dicts

from . import tiny


def logits_of(model: pl.Model, samples: list[Any]) -> torch.Tensor:
    """Of packed samples, through the layers of a language model."""
    (module,) = model.modules
    part = pl.Part(tuple(samples), tuple((i, 0) for i in range(len(samples))))
    assert module.inputs is not None
    assert module.context is not None
    context, x = module.context(part), module.inputs(part)
    for layer in module.layers:
        x = layer(x, **context)
    return x


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return out


@pytest.mark.parametrize("name", ["llama", "qwen3", "bamba"])
def test_a_sample_sees_itself_alone(name: str) -> None:
    library, batch = tiny.make(name)
    model = pl.from_transformers(library.eval())
    with torch.no_grad():
        packed = logits_of(model, batch)
        alone = [library(input_ids=sample["input_ids"][None]).logits[0] for sample in batch]
    torch.testing.assert_close(packed, torch.cat(alone))


_FEW = ("qwen2_5_vl", "qwen2_5_omni", "llava_onevision")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _FEW else pytest.mark.full)
        for name, (_, batch) in tiny.CASES.items()
        if batch is not tiny.text_batch
    ],
)
def test_modules_that_no_sample_needs_are_measured_on_samples_that_are_made_up(name: str) -> None:
    library, _ = tiny.make(name)
    model = pl.from_transformers(library)
    texts = tiny.text_batch()
    encoders = [module.name for module in model.modules[:-1]]
    for encoder in encoders:
        assert model.examples is not None
        assert model.describe is not None
        described = batch_from_dicts([model.describe(sample) for sample in model.examples(encoder)])
        spec = model.module(encoder).spec
        sizes = [sum(spec.instance_lengths(sample)) for sample in described.samples]
        assert sizes[0] > 0
        assert sizes == sorted(sizes)
    profile = pl.profile_model(
        model,
        [texts],
        packing=pl.PackingSpec(2000),
        placements={},
        options=pl.ProfileOptions(repeats=1, strategies=name == "qwen3_vl"),
    )
    assert all(seconds > 0 for seconds in profile.typical_s.values())
    assert len(profile.layers) == len({(m.name, layer.kind) for m in model.spec.modules for layer in m.layers})
    for encoder in encoders:
        block = profile.layers[f"{encoder}/{model.module(encoder).spec.flat_layers[1].kind}"]
        # No constant alone: images that come later cost by their size.
        assert sum(block.activation_bytes[1:]) > 0


def test_no_tensor_is_as_large_as_the_square_of_the_packed_length() -> None:
    library, _ = tiny.make("qwen3")
    model = pl.from_transformers(library)
    generator = torch.Generator().manual_seed(0)
    samples = [tiny.text_sample(generator, i, least=10) for i in range(20)]
    length = sum(len(sample["input_ids"]) for sample in samples)
    with Largest() as largest:
        logits_of(model, samples).sum().backward()
    assert largest.most < length * length / 2


def test_an_encoder_makes_no_mask_of_all_its_patches_squared() -> None:
    library, _ = tiny.make("mistral3")
    module = pl.from_transformers(library).module("vision")
    samples = tiny.sized_batch(4, seed=1) * 8
    part = pl.Part(
        tuple(samples), tuple((i, j) for i, s in enumerate(samples) for j in range(len(s.get("image_sizes", ()))))
    )
    with Largest() as largest:
        assert module.context is not None
        assert module.inputs is not None
        context, pixels = module.context(part), module.inputs(part)
        x = module.layers[0](*pixels, **context)
        for layer in module.layers[1:]:
            x = layer(x, **context)
    assert largest.most < len(x) ** 2 / 2


def test_the_number_of_tiled_images_is_an_entry_of_the_processor() -> None:
    library, batch = tiny.make("llava_onevision")
    model = pl.from_transformers(library)
    (sample, *_) = (each for each in batch if "pixel_values" in each)
    assert model.describe is not None
    assert model.describe({**sample, "batch_num_images": torch.tensor([1])}) == model.describe(sample)
    with pytest.raises(InputError, match="batch_num_images: is above 1; give one image per sample"):
        model.describe({**sample, "batch_num_images": torch.tensor([2])})


def test_what_costs_unlike_is_of_another_kind() -> None:
    model = pl.from_transformers(tiny.qwen3())
    kinds = [layer.kind for layer in model.spec.module("lm").flat_layers]
    assert kinds[1] == kinds[3] != kinds[2]
    assert "sliding_attention" in kinds[2]
    model = pl.from_transformers(tiny.qwen2_5_vl())
    kinds = [layer.kind for layer in model.spec.module("vision").flat_layers]
    assert kinds[1] == kinds[3] != kinds[2]
    assert len(set(kinds)) == 3
    model = pl.from_transformers(tiny.qwen3_moe())
    assert len({layer.kind for layer in model.spec.module("lm").flat_layers}) == 4
    model = pl.from_transformers(tiny.mixtral(output_router_logits=True))
    kinds = [layer.kind for layer in model.spec.module("lm").flat_layers]
    assert kinds[2] == kinds[3] != kinds[1]
    model = pl.from_transformers(tiny.qwen3_vl_moe())
    kinds = [layer.kind for layer in model.spec.module("lm").flat_layers]
    # Features are added before the second and third block.
    assert kinds[2] == kinds[3] != kinds[1]
    assert len(set(kinds)) == 4


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "qwen3_vl_moe", "mistral3"])
def test_every_parameter_has_the_librarys_name(name: str) -> None:
    library, _ = tiny.make(name)
    model = pl.from_transformers(library)
    parameters = dict(library.named_parameters(remove_duplicate=False))
    names = model.library_names()
    assert set(names.values()) == set(parameters)
    for ours, theirs in names.items():
        module, layer, parameter = ours.split(".", 2)
        assert model.module(module).layers[int(layer)].get_parameter(parameter) is parameters[theirs]


def test_the_librarys_model_goes_on_working() -> None:
    library, batch = tiny.make("qwen3")
    length = max(len(sample["input_ids"]) for sample in batch)
    pad = [(length - len(sample["input_ids"])) for sample in batch]
    ids = torch.stack([torch.nn.functional.pad(s["input_ids"], (p, 0)) for s, p in zip(batch, pad, strict=True)])
    mask = torch.stack([(torch.arange(length) >= p).long() for p in pad])
    with torch.no_grad():
        before = library.eval()(input_ids=ids, attention_mask=mask).logits
        pl.from_transformers(library)
        after = library(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(before, after)


def test_a_saved_folder_is_read_whole_or_as_shapes(tmp_path: Path) -> None:
    library, batch = tiny.make("qwen2_5_vl")
    library.save_pretrained(tmp_path)
    read = pl.from_transformers(tmp_path)
    assert read.spec == pl.from_transformers(library).spec
    ours, theirs = (dict(m.modules[1].layers[1].named_parameters()) for m in (read, pl.from_transformers(library)))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    shapes = pl.from_transformers(str(tmp_path), device="meta")
    assert shapes.spec == read.spec
    assert all(p.is_meta for m in shapes.modules for layer in m.layers for p in layer.parameters())
    assert shapes.describe(batch[0]) == read.describe(batch[0])


def test_sizes_of_a_sample() -> None:
    library, batch = tiny.make("qwen2_5_vl")
    model = pl.from_transformers(library)
    described = batch_from_dicts([model.describe(sample) for sample in batch]).samples
    for sample, reported in zip(batch, described, strict=True):
        assert reported.sequence_tokens == len(sample["input_ids"])
        assert sum(reported.patches) == len(sample.get("pixel_values", ()))
        assert len(reported.image_tokens) == len(sample.get("image_grid_thw", ()))
    nameless = {name: value for name, value in batch[0].items() if name != "id"}
    other = nameless | {"pixel_values": nameless["pixel_values"] + 1}
    assert model.describe(nameless) == model.describe(dict(nameless))
    assert model.describe(nameless)["id"] != model.describe(other)["id"]


def sampled(**changes: Any) -> dict[str, Any]:
    _, batch = tiny.make("qwen2_5_vl")
    return {name: value for name, value in (batch[0] | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (lambda: sampled(labels=...), "sample.labels: is missing"),
        (lambda: sampled(labels=torch.zeros(2)), "labels: has 2 entries"),
        (lambda: sampled(spectrum=torch.zeros(2)), "spectrum: is not an input of this model"),
        (lambda: sampled(attention_mask=torch.tensor([1, 0])), "attention_mask: has zeros"),
        (lambda: sampled(pixel_values=...), "places for images, whose tokens are 0"),
        (lambda: sampled(pixel_values=torch.zeros(3, 24)), "has 3 patches, image_grid_thw says"),
    ],
)
def test_a_sample_that_is_not_understood_is_refused(sample: Callable[[], Any], message: str) -> None:
    model = pl.from_transformers(tiny.qwen2_5_vl())
    with pytest.raises(InputError, match=message) as raised:
        model.describe(sample())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny.deepseek_v3(output_router_logits=True), "output_router_logits: is set"),
        (lambda: tiny.qwen3_vl_moe(output_router_logits=True), "is set, but the balancing loss of this model is not"),
        (lambda: tiny.qwen3_vl_moe(num_hidden_layers=1), "the loss of its layers differs from the library's"),
        (
            lambda: tiny.llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "'dynamic', which packing would change",
        ),
    ],
)
def test_a_model_that_is_not_supported_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        pl.from_transformers(build())
    assert "\n" not in str(raised.value)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'tower' is not a module; choose from lm"):
        pl.from_transformers(tiny.llama(), freeze=("tower",))
    with pytest.raises(InputError, match="exists already"):
        pl.from_transformers(tiny.llama(), device="meta")
    with pytest.raises(InputError, match="is not a folder with a config"):
        pl.from_transformers(tmp_path / "nothing")
    checkpointed = tiny.llama()
    checkpointed.activation_checkpointing_enable()
    with pytest.raises(InputError, match="recomputes its blocks itself"):
        pl.from_transformers(checkpointed)


def test_a_folder_keeps_its_dtype_and_trains_with_its_dropout(tmp_path: Path) -> None:
    tiny.llama().to(torch.bfloat16).save_pretrained(tmp_path)
    real, shapes = pl.from_transformers(tmp_path), pl.from_transformers(tmp_path, device="meta")
    assert real.spec == shapes.spec
    assert all(layer.training for module in real.modules for layer in module.layers)


def test_layers_move_to_other_devices_one_by_one() -> None:
    """As where they are divided: the first layer's positions were the last one's and the context's too."""
    library, batch = tiny.make("qwen3")
    model = pl.from_transformers(library)
    (module,) = model.modules
    part = pl.Part(tuple(batch), tuple((i, 0) for i in range(len(batch))))
    assert module.context is not None
    before = module.context(part)
    for layer in module.layers:
        layer.to("meta")
    after = module.context(part)
    for key in before.keys() - {"calls"}:
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", *(pytest.param(n, marks=pytest.mark.full) for n in ("gemma3", "llava"))]
)
def test_shapes_alone_are_called_and_measured_as_the_model_is(name: str, tmp_path: Path) -> None:
    library, batch = tiny.make(name)
    library.save_pretrained(tmp_path)
    real, shapes = pl.from_transformers(tmp_path), pl.from_transformers(tmp_path, device="meta")
    samples = [{k: v.float() if v.dtype == torch.float64 else v for k, v in s.items() if k != "id"} for s in batch]
    metadata = pl.batch_of(samples, real.describe)
    for ours, theirs in zip(shapes.modules, real.modules, strict=True):
        images = [(i, j) for i, s in enumerate(metadata.samples) for j in range(len(s.image_tokens))]
        part = pl.Part(
            tuple(samples), tuple(images if ours.reads == "images" else [(i, 0) for i in range(len(samples))])
        )
        assert ours.context is not None
        assert theirs.context is not None
        found, wanted = ours.context(part), theirs.context(part)
        assert found.keys() == wanted.keys()
        for key in found.keys() - {"calls", "packs"}:
            torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=0)
    profile = pl.profile_model(
        shapes, [samples], packing=pl.PackingSpec(80), placements={}, options=pl.ProfileOptions(repeats=1)
    )
    assert profile.layers.keys() == {f"{m.name}/{layer.kind}" for m in real.spec.modules for layer in m.flat_layers}
    assert all(p.is_meta for m in shapes.modules for layer in m.layers for p in layer.parameters())


@pytest.mark.full
def test_batch_norms_use_their_saved_statistics() -> None:
    text = {"model_type": "granite", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    encoder = {"input_dim": 8, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "dim_head": 8, "output_dim": 16}
    encoder |= {"context_size": 8, "max_pos_emb": 16, "feedforward_mult": 2, "conv_kernel_size": 3}
    projector = {"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    projector |= {"intermediate_size": 64, "encoder_hidden_size": 32, "vocab_size": 64}
    config = hf.GraniteSpeechConfig(
        text_config={**text, "pad_token_id": 0},
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=5,
        has_lora_adapter=False,
        downsample_rate=2,
        window_size=4,
    )
    made = pl.from_transformers(hf.GraniteSpeechForConditionalGeneration(config).train())
    layers = [layer for module in made.modules for layer in module.layers]
    norms = [each for layer in layers for each in layer.modules() if isinstance(each, torch.nn.BatchNorm1d)]
    assert [norm.training for norm in norms] == [False, False]
    assert all(layer.training for layer in layers)
