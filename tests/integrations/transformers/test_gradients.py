"""Gradients of random plans are the library's own, parameter by parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import pipeloom as pl
from pipeloom.integrations.transformers import check, packed, whole
from pipeloom.packing import pack
from pipeloom.runtime import Executor

from . import tiny

TOLERANCE = 1e-9
SOME = ("qwen3", "qwen2_5_vl", "qwen3_vl")
"""In `make test`: a language model with two kinds of attention, images of free sizes with windows, and streams."""


@pytest.mark.parametrize("name", SOME)
def test_of_some_families(name: str) -> None:
    model, batch = tiny.make(name)
    found = pl.check_gradients(model, batch, ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)
    assert len(found.rows) == sum(1 for p in model.parameters() if p.requires_grad)


def test_of_pixels_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny.make("qwen2_5_vl")
    # As processors give them.
    batch = [{k: v.float() if k == "pixel_values" else v for k, v in sample.items()} for sample in batch]
    taken = set()

    class Noting(Executor):
        def run(self, plan: Any, packing: Any, samples: Any) -> Any:
            taken.update(sample["pixel_values"].dtype for sample in samples if "pixel_values" in sample)
            return super().run(plan, packing, samples)

    monkeypatch.setattr(check, "Executor", Noting)
    found = pl.check_gradients(model, batch, ranks=2, plans=1)
    # Plans take what the library takes.
    assert taken == {torch.float64}
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", tiny.CASES)
def test_of_every_family(name: str, ranks: int) -> None:
    model, batch = tiny.make(name, seed=ranks)
    found = pl.check_gradients(model, batch, ranks=ranks, plans=6)
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", *(pytest.param(n, marks=pytest.mark.full) for n in ("llava", "gemma3"))]
)
def test_of_a_frozen_encoder(name: str) -> None:
    model, batch = tiny.make(name)
    found = pl.check_gradients(model, batch, ranks=2, freeze=("vision",), plans=2)
    assert found.worst < TOLERANCE, str(found)
    assert all(row.name.startswith(("model.language_model.", "lm_head.")) for row in found.rows)


def test_a_projector_is_trained_with_its_encoder_beside_a_frozen_language_model() -> None:
    model, batch = tiny.make("qwen3_vl")
    found = pl.check_gradients(model, batch, ranks=2, freeze=("lm",), plans=2)
    assert found.worst < TOLERANCE, str(found)
    assert {row.name.split(".")[1] for row in found.rows} == {"visual"}
    assert any("merger" in row.name for row in found.rows)


def test_of_an_embedding_that_is_the_head_too() -> None:
    torch.manual_seed(0)
    found = pl.check_gradients(tiny.llama(tie_word_embeddings=True), tiny.text_batch(), ranks=3, plans=3)
    assert found.worst < TOLERANCE, str(found)
    assert "lm_head.weight" not in [row.name for row in found.rows]


@pytest.mark.parametrize("name", [pytest.param("qwen2_5_vl", marks=pytest.mark.full), "qwen3_vl"])
def test_of_microbatches_of_text_alone_beside_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny.make(name)
    generator = torch.Generator().manual_seed(1)
    for number in range(6, 9):
        ids = tiny.draw(generator, 0, tiny.IMAGE, (50,))
        batch.append({"id": str(number), "input_ids": ids, "labels": ids, "mm_token_type_ids": torch.zeros_like(ids)})
    mixed = 0

    def notes(*args: Any) -> Any:
        nonlocal mixed
        packing = pack(*args)
        images = [sum("pixel_values" in batch[i] for i in each.samples) for each in packing.microbatches]
        mixed += min(images) == 0 < max(images)
        return packing

    monkeypatch.setattr(check, "pack", notes)
    found = pl.check_gradients(model, batch, ranks=2, plans=3)
    assert mixed > 0
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral", {"router_aux_loss_coef": 0.7}),
        pytest.param("qwen3_moe", {"router_aux_loss_coef": 0.7}, marks=pytest.mark.full),
        pytest.param("bamba", {"z_loss_coefficient": 0.3}, marks=pytest.mark.full),
    ],
)
def test_of_losses_beside_that_of_words(name: str, settings: dict[str, Any]) -> None:
    """Balancing of experts, over all layers of a sample, and the z-loss: not of each packing, but of each sample."""
    torch.manual_seed(0)
    more = {"output_router_logits": True} if "router_aux_loss_coef" in settings else {}
    model = getattr(tiny, name)(**settings, **more)
    found = pl.check_gradients(model, tiny.CASES[name][1](0), ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)
    without = pl.check_gradients(getattr(tiny, name)(**dict.fromkeys(settings, 0.0)), tiny.CASES[name][1](0), plans=1)
    assert abs(found.loss - without.loss) > 0.01


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.full) for n in ("qwen2_vl", "qwen2_5_vl")), "qwen3_vl"]
)
def test_of_images_and_videos(name: str) -> None:
    model, _ = tiny.make(name)
    batch = tiny.video_batch(name == "qwen3_vl", seconds=name == "qwen2_5_vl")
    found = pl.check_gradients(model, batch, ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.full
@pytest.mark.parametrize("indexes", [[2, 0], [1], []])
def test_of_features_of_other_blocks(indexes: list[int]) -> None:
    """In another order than the blocks', of one block, and of none."""
    torch.manual_seed(0)
    model = tiny.qwen3_vl(deepstack_visual_indexes=indexes)
    found = pl.check_gradients(model, tiny.grid_batch(tiny.QWEN_PATCH, seed=1), ranks=3, plans=4)
    assert found.worst < TOLERANCE, str(found)
    assert sum("deepstack" in row.name for row in found.rows) == 6 * len(indexes)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_batch_without_images_leaves_the_encoder_without_gradients(name: str) -> None:
    model, batch = tiny.make(name)
    found = pl.check_gradients(model, [sample for sample in batch if "pixel_values" not in sample], ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)
    assert all("visual" not in row.name for row in found.rows)


def test_features_of_several_layers_are_joined() -> None:
    model, batch = tiny.make("llava")
    model.config.vision_feature_layer = [-2, -1]
    found = pl.check_gradients(type(model)(model.config), batch, ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)


def test_features_at_other_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny.make("qwen3_vl")

    def shifts(self: whole.Feed, place: int, x: Any) -> Any:
        return take(self, place, x).roll(1, 0)

    take = whole.Feed.take
    assert pl.check_gradients(model, batch, ranks=2, plans=1).worst < TOLERANCE
    monkeypatch.setattr(whole.Feed, "take", shifts)
    assert pl.check_gradients(model, batch, ranks=2, plans=1).worst > 1e-3


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over the whole pack, as without any mask of samples."""
    model, batch = tiny.make("llama")
    # Later, its layers would fail their test and be called in another way.
    pl.from_transformers(model)

    def leaks(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return packed.attention(module, query, key, value, None, **kwargs)

    register = transformers.AttentionInterface.register
    monkeypatch.setattr(transformers.AttentionInterface, "register", lambda name, _: register(name, leaks))
    try:
        found = pl.check_gradients(model, batch, ranks=2, plans=3)
    finally:
        register(packed.ATTENTION, packed.attention)
    assert found.worst > 1e-3
    worst = str(found).splitlines()[1].split()
    assert worst[0] == found.rows[0].name
    assert float(worst[3]) == pytest.approx(found.rows[0].relative, rel=1e-3)


def test_texts_need_no_types_where_masks_depend_on_them() -> None:
    model, batch = tiny.make("gemma3")
    texts = [{**each, "id": f"text {each['id']}"} for each in tiny.text_batch()[:3]]
    assert all("token_type_ids" not in each for each in texts)
    assert pl.check_gradients(model, [*batch[:3], *texts], plans=2).worst < 1e-9
