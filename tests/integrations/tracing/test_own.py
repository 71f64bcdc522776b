"""Users' own modules: traced on their batches, emulated, and refused in one line."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pipeloom as pl
from examples import hybrid_vlm as example
from examples import own_model
from pipeloom.cli.app import run
from pipeloom.emulator import Placement, layer_template, module_parameters
from pipeloom.emulator.build import layer_module
from pipeloom.emulator.rules import PRODUCTS
from pipeloom.emulator.tape import Context, Tape
from pipeloom.errors import InputError
from pipeloom.integrations.describe import describe
from pipeloom.integrations.tracing.architecture import trace_config
from pipeloom.integrations.tracing.own import OwnModel, trace_own
from pipeloom.spec import Workload
from pipeloom.spec.architecture import Architecture, LanguageHeadLayer, TokenEmbeddingLayer, TracedLayer
from pipeloom.spec.catalog import load_cluster
from pipeloom.spec.media_tokens import encoder_of
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.traced import AttentionOperator, ProductOperator
from tests.integrations.tracing import models
from tests.integrations.tracing import own_models as own
from tests.integrations.transformers import tiny

HERE = "tests.integrations.tracing.own_models"


def traced(model: nn.Module, batch: Any) -> Architecture:
    return trace_own(model, batch, "own").architecture


def operations(architecture: Architecture, works: dict[str, Workload]) -> float:
    """Operations of the forward pass of all layers."""
    return sum(
        kind.count * kind.operations.of(works[module.name])
        for module in describe(architecture)
        for kind in module.kinds
    )


def counted(model: nn.Module, *args: torch.Tensor) -> int:
    """Operations that PyTorch counts when the model really runs."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # whose products are counted
        model.train()(*args)
    return int(counter.get_total_flops())


def blocks(architecture: Architecture) -> list[TracedLayer]:
    return [each for each in architecture.modules[-1].layers if isinstance(each, TracedLayer) and each.block]


# ------------------------------------------------------------------ what is counted


@pytest.mark.parametrize("block", [own.ByHand, own.Library, own.Layer, own.Fused])
def test_operations_of_another_size_are_those_that_pytorch_counts(block: type[nn.Module]) -> None:
    model = own.Language(block)
    found = traced(model, own.ids(4, 128))
    assert module_parameters(found) == {"lm": sum(p.numel() for p in model.parameters())}
    assert blocks(found)[0].count == 1  # dropout is between them
    wanted = counted(model, own.ids(3, 80))
    # Beside products, kernels around them count an operation for each number.
    assert operations(found, {"lm": Workload((80,) * 3)}) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("model", [own.Pooling(own.Fused), own.Language(own.FromFirst)], ids=["head", "block"])
def test_an_attention_may_start_from_the_first_place_alone(model: nn.Module) -> None:
    found = traced(model, own.ids(4, 128))
    wanted = counted(model, own.ids(3, 400))
    assert operations(found, {"lm": Workload((400,) * 3)}) == pytest.approx(wanted, rel=0.001)


def test_one_head_needs_no_dimension_and_the_attention_may_be_imported_by_its_name() -> None:
    three, four = (blocks(traced(own.Language(partial(own.OneHead, dims)), own.ids())) for dims in (3, 4))
    assert three == four
    (attention,) = (each for each in three[0].operators if isinstance(each, AttentionOperator))
    assert (attention.heads, attention.query_key_width) == (1, own.WIDTH)


def test_the_attention_may_be_in_a_file_that_a_block_imports() -> None:
    here, there = (blocks(traced(own.Language(block), own.ids())) for block in (own.Fused, own.Importing))
    assert [block.operators for block in there] == [block.operators for block in here]


def test_a_product_with_weights_runs_twice_in_the_backward_however_it_is_written() -> None:
    def passes(how: str) -> list[float]:
        layer, tape = blocks(traced(own.Language(partial(own.Written, how)), own.ids(2, 128)))[0], Tape(Context())
        module, width = layer_module(layer)
        module(tape.input(width))
        products = [record for record in tape.records if record.forward.kind in PRODUCTS]
        costs = ([r.forward, r.input_gradient, r.weight_gradient] for r in products)
        return [sum(c.flops.of(Workload((64,))) for c in each if c) for each in zip(*costs, strict=True)]

    plain = passes("@")
    assert plain == [2 * 2 * 64 * 64 * 128] * 3
    assert passes("einsum") == pytest.approx(plain)
    assert passes("heads") == pytest.approx([each / own.HEADS for each in plain])


def test_a_file_need_not_be_among_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = traced(own.Language(own.Fused), own.ids())
    monkeypatch.delitem(sys.modules, own.__name__)
    assert traced(own.Language(own.Fused), own.ids()) == wanted


@pytest.mark.parametrize("block", [own.Fused, own.Windowed])
def test_an_encoder_grows_with_images_patches_and_pairs(block: type[nn.Module]) -> None:
    model = own.AnySize(block)
    sizes = ((2, 64, 64), (1, 128, 64), (3, 128, 128), (1, 256, 64), (1, 128, 192))
    found = traced(model, [torch.zeros(n, 3, height, width) for n, height, width in sizes])
    assert found.modules[0].fixed_rows is None
    wanted = counted(model, torch.zeros(5, 3, 256, 256))
    assert operations(found, {"lm": Workload((256,) * 5)}) == pytest.approx(wanted, rel=0.02)


def test_packed_rows_are_divided_where_positions_restart() -> None:
    model, ids = tiny.llama(), own.ids(1, 32)

    def lengths(**more: torch.Tensor) -> list[int]:
        (samples,) = trace_own(model, {"input_ids": ids, **more}).batches
        return [sample.text_tokens for sample in samples]

    places = torch.arange(8).repeat(4)[None]
    assert lengths(position_ids=places) == [8] * 4
    assert lengths(position_ids=torch.arange(32)[None]) == [32]
    # The library does not look at places beside a mask.
    assert lengths(position_ids=places, attention_mask=torch.ones_like(ids)) == [32]
    two = {"input_ids": own.ids(2, 32), "position_ids": torch.cat([places, torch.arange(32)[None]])}
    assert [sample.text_tokens for sample in trace_own(model, two).batches[0]] == [8, 8, 8, 8, 32]


def test_a_batch_may_be_what_a_tokenizer_returns() -> None:
    batch = {"input_ids": own.ids(2, 16), "labels": own.ids(2, 16)}
    model = tiny.llama()
    wanted = trace_own(model, batch)
    assert trace_own(model, transformers.BatchEncoding(batch)) == wanted
    assert trace_own(model, [transformers.BatchEncoding(batch)]) == wanted
    by_name = {"ids": own.ids(2, 16)}
    assert trace_own(own.Language(), transformers.BatchFeature(by_name)) == trace_own(own.Language(), by_name)


def test_the_model_is_not_changed() -> None:
    model = own.Language()
    before = copy.deepcopy(model.state_dict())
    traced(model.eval(), own.ids())
    assert not model.training
    assert model.head.weight is model.words.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        there = own.Language()
    assert traced(there, own.ids()).modules == traced(model, own.ids()).modules


@pytest.mark.parametrize("block", [own.Experts, own.Masked])
def test_experts_in_loops_run_the_tokens_that_chose_them(block: type[own.Experts]) -> None:
    (layer, *_) = blocks(traced(own.Language(block), own.ids(2, 128)))
    share = block.chosen / block.number
    products = [each for each in layer.operators if isinstance(each, ProductOperator)]
    rows = [each.rows for each in products if 32 in (each.in_width, each.out_width)]
    assert rows == [(0.0, 0.0, share, 0.0)] * 2 * block.number


@pytest.mark.parametrize("has_loss", [False, True])
@pytest.mark.parametrize("kind", [own.Language, own.Capped])
def test_a_cap_of_the_logits_is_one_of_the_head(kind: type[own.Language], has_loss: bool) -> None:
    batch = (own.ids(2, 128), own.ids(2, 128)) if has_loss else own.ids(2, 128)
    head = traced(kind(own.Fused), batch).modules[-1].layers[-1]
    assert isinstance(head, LanguageHeadLayer)
    assert head.capped is (kind is own.Capped)


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(own.WIDTH, bias=False), nn.LayerNorm(own.WIDTH, elementwise_affine=False), own.PlainNorm()],
    ids=["no biases", "no weights", "a function"],
)
def test_the_last_norm_may_lack_biases_or_weights(norm: nn.Module) -> None:
    model = own.Language(own.Fused)
    model.norm = norm
    found = traced(model, own.ids(2, 128))
    assert module_parameters(found) == {"lm": sum(p.numel() for p in model.parameters())}
    wanted = counted(model, own.ids(3, 80))
    assert operations(found, {"lm": Workload((80,) * 3)}) == pytest.approx(wanted, rel=0.001)


def test_a_librarys_model_is_read_as_from_its_configuration() -> None:
    config = transformers.LlamaConfig(**{k: v for k, v in models.LLAMA.items() if k != "architectures"})
    found = traced(transformers.LlamaForCausalLM(config), {"input_ids": own.ids(2, 256)})
    assert found.modules == trace_config(models.LLAMA, "").modules


def test_a_librarys_model_without_a_batch_keeps_its_frozen_modules() -> None:
    model = tiny.qwen3_vl()
    model.model.visual.requires_grad_(False)
    assert [module.frozen for module in trace_own(model).architecture.modules] == [True, False]


def test_images_and_text_are_two_modules() -> None:
    model = own.Seeing()
    found = trace_own(model, {"ids": own.ids(2, 96), "pixels": torch.zeros(4, 3, 64, 64)})
    vision, lm = found.architecture.modules
    assert (vision.reads, vision.fixed_rows, vision.fixed_outputs) == ("images", 17, 16)
    assert (lm.after, lm.fixed_rows) == (("vision",), None)
    assert isinstance(lm.layers[-1], LanguageHeadLayer)
    ((sample, other),) = found.batches
    assert (sample.image_tokens, sample.image_patches, sample.text_tokens) == ((16, 16), (17, 17), 96)
    assert lm.lengths(other) == (128,)
    assert sum(module_parameters(found.architecture).values()) == sum(p.numel() for p in model.parameters())
    wanted = counted(model, own.ids(2, 96), torch.zeros(4, 3, 64, 64))
    works = {"vision": Workload((17,) * 4), "lm": Workload((128,) * 2)}
    assert operations(found.architecture, works) == pytest.approx(wanted, rel=0.02)


def test_batches_with_images_of_any_sides_are_read() -> None:
    """Edges of images cut windows, and how many tokens are of images does not follow from the length."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"num_hidden_layers": 2, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1, "rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 320, "num_heads": 4, "intermediate_size": 1280, "out_hidden_size": 64}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config={**vision, "fullatt_block_indexes": [1]}, image_token_id=60
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)

    def batch(height: int, width: int, words: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[*[60] * (height * width // 4), *range(100, 100 + words)]])
        return {
            "input_ids": ids,
            "labels": ids,
            "mm_token_type_ids": (ids == 60).long(),
            "pixel_values": torch.randn(height * width, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }

    sizes = [(24, 12, 64), (12, 20, 8), (16, 16, 100), (28, 20, 32)]
    found = trace_own(model, [batch(*size) for size in sizes])
    assert [module.name for module in found.architecture.modules] == ["vision", "lm"]
    lm = found.architecture.modules[-1]
    lengths = [(group[0].image_patches, *lm.lengths(group[0])) for group in found.batches]
    assert lengths == [((h * w,), h * w // 4 + words) for h, w, words in sizes]
    windows = [w for x in found.architecture.modules[0].layers for o in x.operators for w in getattr(o, "windows", ())]
    assert [window.length for window in windows] == [64]


class Wrapped(nn.Module):
    """A library's model inside of a user's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**batch).logits
        return logits


IMAGES = [(60, (32, 32), (8, 8)), (90, (12, 40)), (20, (48, 24), (4, 4), (40, 20))]
"""Tokens of text, and the patches of each image along its sides."""


def packed(width: int, start: int, image: int, words: int, *grids: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A sample with images of several sizes, whose patches are in one row."""
    images = [[start, *[image] * (rows * columns // 4)] for rows, columns in grids]
    ids = torch.tensor([[*chain.from_iterable(images), *[1] * (words - len(images))]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == image).long(),
        "pixel_values": torch.zeros(sum(rows * columns for rows, columns in grids), width),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in grids]),
    }


def check_sizes(found: OwnModel) -> None:
    for (words, *grids), (sample,) in zip(IMAGES, found.batches, strict=True):
        patches = tuple(rows * columns for rows, columns in grids)
        tokens = tuple(n // 4 for n in patches)
        assert (sample.text_tokens, sample.image_tokens, sample.image_patches) == (words, tokens, patches)


def test_packed_images_of_several_sizes_are_read_in_a_wrapped_model_too() -> None:
    """The encoder has a table of positions, and its attention takes the boundaries of images of different sizes."""
    model = example.library_model()
    batches = [packed(16, example.START, example.IMAGE, *each) for each in IMAGES]
    whole, wrapped = trace_own(model, batches), trace_own(Wrapped(model), batches)
    check_sizes(whole)
    check_sizes(wrapped)
    for mine, wanted in zip(wrapped.architecture.modules, whole.architecture.modules, strict=True):
        assert (mine.name, mine.reads, mine.after) == (wanted.name, wanted.reads, wanted.after)
        first, other = (next(each for each in m.layers if getattr(each, "block", False)) for m in (mine, wanted))
        assert first == other


@pytest.mark.parametrize("make", [tiny.qwen3_vl, tiny.qwen3_vl_moe])
def test_librarys_models_with_streams_are_read_as_from_their_configurations(make: Callable[[], Any]) -> None:
    """Deepstack features go from blocks of the encoder to blocks of the language model."""
    model = make()
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(False)
    found = trace_own(model, [packed(tiny.QWEN_PATCH, tiny.VISION_START, tiny.IMAGE, *each) for each in IMAGES])
    check_sizes(found)
    vision, lm = found.architecture.modules
    assert (vision.frozen, lm.frozen) == (True, False)
    assert [end.stream for end in vision.emits] == [end.stream for end in lm.takes] != []


def test_padding_is_left_out_and_images_belong_to_the_rows_with_their_places() -> None:
    vit = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **vit, "image_size": 64, "patch_size": 8},
        text_config={"model_type": "llama", **tiny.TEXT},
        image_token_id=tiny.IMAGE,
        image_seq_length=64,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    ids, mask = torch.ones(3, 200, dtype=torch.long), torch.ones(3, 200, dtype=torch.long)
    ids[0, :128], ids[2, 5:69] = tiny.IMAGE, tiny.IMAGE
    mask[1, 50:] = 0
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask, "pixel_values": torch.zeros(3, 3, 64, 64)}
    (samples,) = trace_own(model, batch).batches
    assert [(s.text_tokens, s.image_tokens, s.patches) for s in samples] == [
        (72, (64, 64), (64, 64)),
        (50, (), ()),
        (136, (64,), (64,)),
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_a_librarys_text_on_the_meta_device_has_the_lengths_of_its_rows(masked: bool) -> None:
    """A function that the command line calls creates its batch there too."""
    config = transformers.LlamaConfig(**{k: v for k, v in models.LLAMA.items() if k != "architectures"})
    ids = torch.empty(2, 96, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if masked else ids
    found = trace_own(transformers.LlamaForCausalLM(config), batch)
    assert [sample.text_tokens for sample in found.batches[0]] == [96, 96]


@pytest.mark.parametrize("name", ["input_ids", "image_grid_thw"])
def test_a_librarys_images_need_the_numbers_of_their_batch(name: str) -> None:
    batch = packed(tiny.QWEN_PATCH, tiny.VISION_START, tiny.IMAGE, *IMAGES[0])
    batch[name] = batch[name].to("meta")
    with pytest.raises(InputError, match=rf'batch\.{name}: is on the meta device.*create it with device="cpu"'):
        trace_own(tiny.qwen3_vl(), batch)


def test_a_decoder_reads_its_encoder() -> None:
    model = own.Translating()
    batch = (own.ids(2, 128), own.ids(2, 64))
    encoder, decoder = traced(model, batch).modules
    assert decoder.after == (encoder.name,)
    assert isinstance(encoder.layers[0], TokenEmbeddingLayer)
    works = {encoder.name: Workload((256, 256)), "lm": Workload((128, 128))}  # both are twice as long
    wanted = counted(model, own.ids(2, 256), own.ids(2, 128))
    assert operations(traced(model, batch), works) == pytest.approx(wanted, rel=0.02)


def test_a_librarys_decoder_reads_its_encoder_if_there_is_a_batch() -> None:
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 256}
    sizes |= {
        f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("attention_heads", 4), ("ffn_dim", 96))
    }
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))
    encoder, decoder = traced(model, {"input_ids": own.ids(2, 128), "labels": own.ids(2, 64)}).modules
    assert decoder.after == (encoder.name,)
    with pytest.raises(InputError, match="has a decoder that attends to an encoder"):
        trace_own(model)


def test_sequences_may_be_along_the_first_dimension() -> None:
    found = trace_own(own.TimeFirst(), own.ids(128, 3))
    assert [sample.text_tokens for sample in found.batches[0]] == [128] * 3


def test_encoders_may_have_different_numbers_of_sequences() -> None:
    """Those of equal numbers run the same images, with lengths of their own."""
    words, pixels = own.ids(2, 96), torch.zeros(4, 3, 64, 64)
    for count in (6, 4):
        model, sounds = own.Hearing(), torch.zeros(count, 50, 80)
        found = trace_own(model, {"ids": words, "pixels": pixels, "sounds": sounds})
        vision, audio, lm = found.architecture.modules
        assert (vision.reads, audio.reads) == ("images", "audio" if count == 6 else "images")
        assert lm.after == (vision.name, audio.name)
        ((sample, _),) = found.batches
        assert [module.lengths(sample) for module in (vision, audio, lm)] == [
            (17,) * 2,
            (50,) * (count // 2),
            (96 + 2 * 16 + count // 2 * 50,),
        ]
        assert sample.sequence_tokens == sum(lm.lengths(sample))
    found = trace_own(own.Pairs(), (own.ids(4, 32), own.ids(16)))
    queries, texts = found.architecture.modules
    for module, lengths in ((queries, [32] * 4), (texts, [128] * 16)):
        assert [n for sample in found.batches[0] for n in module.lengths(sample)] == lengths


def test_the_trained_adapter_of_a_frozen_encoder_is_a_module_of_its_own() -> None:
    model, batch = own.Seeing(), {"ids": own.ids(2, 96), "pixels": torch.zeros(4, 3, 64, 64)}
    whole = trace_own(model, batch)
    model.vision.requires_grad_(False)
    found = trace_own(model, batch)
    vision, adapter, lm = found.architecture.modules
    assert [(each.name, each.frozen, each.after) for each in (vision, adapter, lm)] == [
        ("vision", True, ()),
        ("vision_adapter", False, ("vision",)),
        ("lm", False, ("vision_adapter",)),
    ]
    assert (*vision.layers, *adapter.layers) == whole.architecture.modules[0].layers
    assert found.batches == whole.batches
    assert encoder_of(found.architecture, "images").joined == encoder_of(whole.architecture, "images").joined


def test_frozen_modules_are_those_without_gradients() -> None:
    model = own.Seeing()
    for part in (model.vision, model.adapter):
        part.requires_grad_(False)
    modules = traced(model, {"ids": own.ids(), "pixels": torch.zeros(2, 3, 64, 64)}).modules
    assert [module.frozen for module in modules] == [True, False]


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode, partial(torch.set_grad_enabled, False)])
def test_an_encoder_may_run_without_gradients(switch: Callable[[], AbstractContextManager[None]]) -> None:
    model = own.Seeing()
    for part in (model.vision, model.adapter):
        part.requires_grad_(False)
    batch = {"ids": own.ids(), "pixels": torch.zeros(2, 3, 64, 64)}
    wanted = traced(model, batch)
    model.sees_under = switch
    found = traced(model, batch)
    assert found == wanted
    assert [module.frozen for module in found.modules] == [True, False]
    with switch():
        assert not torch.is_grad_enabled()  # as before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode, partial(torch.set_grad_enabled, False)])
def test_an_encoder_that_runs_without_gradients_is_not_trained(switch: Callable[[], Any]) -> None:
    batch = {"ids": own.ids(), "pixels": torch.zeros(2, 3, 64, 64)}
    model = own.Seeing()
    model.vision.requires_grad_(False)
    wanted = traced(model, batch)
    model = own.Seeing()
    model.sees_under = switch
    assert traced(model, batch) == wanted
    assert [module.frozen for module in wanted.modules] == [True, False, False]


class Twice(own.Seeing):
    """One layer reads the patches before the blocks of the encoder, and their states behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(own.WIDTH, own.WIDTH)
        self.vision.layers.register_forward_pre_hook(self.before)
        self.vision.layers.register_forward_hook(self.behind)

    def before(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> Any:
        return self.both(inputs[0])

    def behind(self, _: nn.Module, __: Any, output: torch.Tensor) -> Any:
        return self.both(output)


def test_a_layer_that_runs_before_and_behind_the_blocks_of_an_encoder_is_counted_once() -> None:
    model = Twice()
    found = traced(model, {"ids": own.ids(), "pixels": torch.zeros(2, 3, 64, 64)})
    assert sum(module_parameters(found).values()) == sum(p.numel() for p in model.parameters())
    assert module_parameters(found)["vision"] == sum(
        p.numel() for part in (model.vision, model.both, model.adapter) for p in part.parameters()
    )


class Detached(own.Seeing):
    """Detaches what the encoder returns, or what its adapter returns."""

    def __init__(self, ends: str, *, changes: bool = False) -> None:
        super().__init__()
        self.ends, self.changes = ends, changes
        self.get_submodule(ends).register_forward_hook(self.end)

    def end(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        out = output.detach()
        return out.clone() if self.changes else out


@pytest.mark.parametrize("model", [Detached("vision"), Detached("vision", changes=True), Detached("adapter")])
def test_an_encoder_whose_result_is_detached_is_not_trained(model: Detached) -> None:
    batch = {"ids": own.ids(), "pixels": torch.zeros(2, 3, 64, 64)}
    frozen = own.Seeing()
    for part in ("vision", model.ends):
        frozen.get_submodule(part).requires_grad_(False)
    found, wanted = traced(model, batch).modules, traced(frozen, batch).modules
    assert [(m.name, m.frozen, m.after) for m in found] == [(m.name, m.frozen, m.after) for m in wanted]
    assert [m.frozen for m in found] == ([True, False] if model.ends == "adapter" else [True, False, False])
    if not model.changes:
        assert [m.layers[1:] for m in found] == [m.layers[1:] for m in wanted]


def test_an_encoder_whose_last_blocks_are_trained_is_trained() -> None:
    batch = {"ids": own.ids(), "pixels": torch.zeros(2, 3, 64, 64)}
    model = own.Seeing()
    model.vision = own.PartlyFrozen()
    assert [module.frozen for module in traced(model, batch).modules] == [False, False]


def test_blocks_may_be_recomputed_beside_an_encoder_without_gradients() -> None:
    batch = {"ids": own.ids(), "pixels": torch.zeros(2, 3, 64, 64)}
    model = own.Seeing()
    model.blocks = nn.ModuleList(own.Recomputing() for _ in range(3))
    model.vision.requires_grad_(False)
    wanted = traced(model, batch)
    model.sees_under = torch.no_grad
    assert traced(model, batch) == wanted


def test_reentrant_checkpoints_change_nothing() -> None:
    model = own.Checkpointed(own.Fused)
    found = traced(model, own.ids())
    model.reentrant = False
    assert found == traced(model, own.ids())


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("model", "batch", "text"),
    [
        (own.Language(own.Choosy), own.ids(), "depends on numbers of tensors: selects by a mask"),
        (own.Language(own.Branching), own.ids(), r"depends on numbers of tensors: .*item\(\)"),
        (own.Language(own.Cubic), own.ids(), "the other sizes predict"),
        (own.Language(own.Recurrent), own.ids(), "LSTM, whose steps run one after the other"),
        (own.Skipping(own.Fused), own.ids(), r"result of blocks\.0: is read by more than the next block"),
        (own.Summing(own.Fused), own.ids(), "skip connection, which a pipeline would have to send"),
        (own.Flat(), torch.zeros(2, 8), "has no repeated blocks"),
        (own.Seeing(), {"ids": own.ids()}, "batch: lacks 'pixels'.*its arguments are ids, pixels"),
        (own.Seeing(), {"ids": own.ids(), "images": own.ids(), "pixels": own.ids()}, "batch: has 'images'"),
        (own.Language(), (own.ids(), own.ids(), own.ids()), "batch: does not suit the forward pass"),
        (own.Language(), {"name": "a"}, "batch: has no tensor"),
        (own.Language(), own.ids(2, 0), "batch: has an empty tensor"),
        (own.Language(), [], "batch: is an empty list"),
        (own.Language(positions=64), own.ids(), "fails on the batch: IndexError: index 127 of a table of 64 rows"),
        (own.Seeing(), (own.ids(5), torch.zeros(3, 3, 64, 64)), "fails on the batch: RuntimeError"),
        (nn.Identity(), own.ids(), "has no parameters"),
    ],
)
def test_what_cannot_be_traced_is_one_line(model: nn.Module, batch: Any, text: str) -> None:
    with pytest.raises(InputError, match=text) as error:
        traced(model, batch)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------ emulated


@pytest.mark.parametrize("begin", [nn.Dropout(0.1), nn.LayerNorm(own.WIDTH)], ids=["dropout", "norm"])
def test_tensor_parallelism_divides_an_embedding_whatever_follows_it(begin: nn.Module) -> None:
    place = Placement(load_cluster("8xH100"), Degrees(tensor=2))
    plain, more = (
        sum(sum(layer_template(each, place).local_parameters) for each in found.modules[-1].flat_layers)
        for found in (traced(own.Begins(module), own.ids(2, 128)) for module in (nn.Identity(), begin))
    )
    assert more == plain + sum(p.numel() for p in begin.parameters())


def test_emulate_times_your_own_module() -> None:
    model, batch = own.seeing()
    found = pl.emulate(model, batch, cluster="4xH100", pp=2, microbatches=2)
    low, high = found.interval_s
    assert 0 < low < found.iteration_s < high
    assert (found.degrees.pipeline, found.degrees.data, len(found.peak_bytes)) == (2, 2, 2)
    assert found.fits
    assert f"80 % interval {found.interval.text(found.iteration_s)}" in str(found)
    longer = pl.emulate(model, batch, cluster="4xH100", pp=2, microbatches=4)
    assert longer.iteration_s > 1.5 * found.iteration_s


def test_emulate_takes_the_precision_behind_the_trainer() -> None:
    model, batch = own.Language(own.Fused), own.ids(2, 512)
    plain, quantized = (
        pl.emulate(model, batch, cluster="2xH100", pp=1, trainer=trainer) for trainer in ("fused", "fused fp8_current")
    )
    assert (plain.trainer.precision, quantized.trainer.precision) == ("bf16", "fp8_current")
    assert quantized.iteration_s != plain.iteration_s
    assert "with quantized products" in quantized.interval.basis
    with pytest.raises(InputError, match="trainer 'fused fp7': 'fp7' is no precision; known are bf16, fp8_"):
        pl.emulate(model, batch, cluster="2xH100", trainer="fused fp7")
    with pytest.raises(InputError, match="has no products of precision mxfp8; use bf16, fp8_"):
        pl.emulate(model, batch, cluster="2xH100", pp=1, trainer="fused mxfp8")


def test_emulate_chooses_degrees_and_takes_batches_in_turn() -> None:
    short, long = own.ids(2, 64), own.ids(2, 256)
    both = pl.emulate(own.Language(own.Fused), [short, long], cluster="2xH100")
    assert both.chosen_of >= 2
    assert both.degrees.num_devices == 2
    one = pl.emulate(own.Language(own.Fused), [short, long], cluster="1xH100", pp=1, microbatches=2)
    assert one.step.num_tokens == 2 * (64 + 256)
    recomputed = pl.emulate(own.Language(own.Fused), [short, long], cluster="2xH100", strategy="recompute")
    assert recomputed.step.strategy == "recompute"
    assert recomputed.iteration_s > both.iteration_s


def test_no_batch_is_left_out() -> None:
    model, batches = own.Language(own.Fused), [own.ids(1, 8 + n) for n in range(18)]
    found = pl.emulate(model, batches, cluster="1xH100", pp=1)
    assert found.step.num_tokens == sum(8 + n for n in range(18))
    for parallelism in ({"pp": 1}, {}):
        with pytest.raises(InputError, match="microbatches: 17 cannot hold 18 batches, one in each; use at least 18,"):
            pl.emulate(model, batches, cluster="1xH100", microbatches=17, **parallelism)


def test_emulate_divides_sequences_by_context_parallelism() -> None:
    model, batch = own.Language(own.Fused), own.ids(8, 512)
    whole, divided = (pl.emulate(model, batch, cluster="2xH100", microbatches=2, dp=1, cp=cp) for cp in (1, 2))
    assert (divided.degrees.context, divided.degrees.num_devices) == (2, 2)
    assert "context 2" in str(divided)
    assert divided.peak_bytes[0] < whole.peak_bytes[0]
    assert pl.emulate(model, batch, cluster="4xH100", cp=2).degrees.data == 2


def test_emulate_checks_its_arguments() -> None:
    with pytest.raises(InputError, match="batch: is None"):
        pl.emulate(own.Language(), None)
    with pytest.raises(InputError, match="'audio'"):
        pl.emulate(own.Language(), own.ids(), freeze=("audio",), pp=1)
    with pytest.raises(InputError, match="tp"):
        pl.emulate(own.Language(), own.ids(), tp=0)
    for name in ("ep", "etp"):
        with pytest.raises(InputError, match=f"{name}: counts only with degrees; give tp, pp, dp or cp"):
            pl.emulate(own.Language(), own.ids(), **{name: 2})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="zero: counts only with degrees"):
        pl.emulate(own.Language(), own.ids(), zero=3)
    with pytest.raises(InputError, match="'forget'"):
        pl.emulate(own.Language(), own.ids(), strategy="forget")
    with pytest.raises(InputError, match="zero: 2 is no stage of ZeRO; use 0, 1 or 3"):
        pl.emulate(own.Language(), own.ids(), tp=1, zero=2)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match="pipeline: is no argument of emulate; degrees are tp, pp, dp, cp, ep, etp, zero"
    ):
        pl.emulate(own.Language(), own.ids(), pipeline=2)  # type: ignore[call-arg]


# ------------------------------------------------------------------ on the command line


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("missing", "cannot be imported"),
        ("needs", "needs arguments"),
        ("number", "returns an object of type int; return a torch.nn.Module, or a pair of it and a sample batch"),
        ("A_CONSTANT", "is of type int, not a function"),
        ("reads_numbers", "fails on the meta device"),
        ("branching", "depends on numbers of tensors"),
    ],
)
def test_functions_that_do_not_describe_a_model_are_one_line(
    function: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["describe", f"{HERE}:{function}"]) != 0
    said = capsys.readouterr().err
    assert text in said.splitlines()[-1]
    assert "Traceback" not in said


def test_commands_take_the_batch_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["emulate", f"{HERE}:language", "--cluster", "2xH100", "--microbatches", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["iteration_s"] > 0
    toml = tmp_path / "own.toml"
    assert run(["describe", f"{HERE}:seeing", "--toml", str(toml), "--json"]) == 0
    modules = json.loads(capsys.readouterr().out)["modules"]
    assert [module["name"] for module in modules] == ["vision", "lm"]
    assert run(["describe", str(toml), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"] == modules


def test_other_images_than_the_model_takes_are_planned_as_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "a.jsonl"
    sample = {"text_tokens": 100, "image_tokens": [392], "image_patches": [1568]}
    data.write_text("".join(json.dumps({"id": str(i)} | sample) + "\n" for i in range(200)))
    command = ["emulate", f"{HERE}:seeing", "--cluster", "1xH100", "--microbatches", "1", "--data", str(data)]
    assert run(command) == 0
    written = capsys.readouterr()
    assert "takes images of 17 patches, which are 16 tokens; they are planned with these" in written.err
    assert "70 images of 1,120 tokens" in written.out  # as many as a microbatch has at most


def test_a_model_that_was_read_at_one_length_takes_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"id": str(i), "text_tokens": 100}) + "\n" for i in range(90)))
    assert run(["emulate", f"{HERE}:fixed", "--microbatches", "1", "--data", str(data)]) != 0
    assert "was read at 16 alone" in capsys.readouterr().err


def test_emulate_reads_a_converted_model_from_the_librarys_code() -> None:
    config = transformers.LlamaConfig(**{k: v for k, v in models.LLAMA.items() if k != "architectures"})
    model = pl.from_transformers(transformers.LlamaForCausalLM(config))
    samples = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (5, 70)]
    found = pl.emulate(model, samples, cluster="1xH100", pp=1, microbatches=2)
    assert found.model.modules == trace_config(models.LLAMA, "").modules
    assert found.step.num_tokens == 2 * (5 + 70)


def test_emulate_takes_a_model_as_for_fit() -> None:
    model = own_model.build_model()
    model = pl.Model(model.modules, model.loss, model.num_targets, "own", describe=own_model.describe)
    samples = next(own_model.batches())
    found = pl.emulate(model, samples, cluster="1xH100", pp=1, microbatches=2)
    (lm,) = found.model.modules
    assert (lm.name, lm.reads, lm.num_blocks) == ("lm", "sequence", 2)
    tokens = sum(len(ids) for ids, _, _ in samples)
    assert found.step.num_tokens == 2 * tokens
    assert sum(module_parameters(found.model).values()) == sum(
        p.numel() for m in model.modules for layer in m.layers for p in layer.parameters()
    )
    with pytest.raises(InputError, match="give the model `describe`"):
        pl.emulate(own_model.build_model(), samples)


def test_modules_of_a_model_as_for_fit_keep_their_names() -> None:
    vision, language = own_model.build_model().modules
    layers = [own.Square(8, 16), *(own.Square(16, 16) for _ in range(3))]
    camera = pl.Module(
        "camera", layers, reads="images", inputs=own_model.pictures, hidden=vision.hidden, output=vision.output
    )
    writer = pl.Module(
        "writer",
        language.layers,
        reads="sequence",
        inputs=own_model.tokens,
        after=("camera",),
        context=own_model.owner,
        hidden=language.hidden,
        output=language.output,
    )
    model = pl.Model([camera, writer], own_model.loss, lambda ids: len(ids[0]), "own", describe=own_model.describe)
    found = pl.emulate(model, next(own_model.batches()), cluster="1xH100", pp=1)
    assert [(each.name, each.after) for each in found.model.modules] == [("camera", ()), ("writer", ("camera",))]
