"""Gradients of random plans are the library's own, parameter by parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.integrations.diffusers import layers

from . import tiny

TOLERANCE = 1e-9


def model_of(name: str, **more: Any) -> tuple[Any, tiny.Batch]:
    transformer, encoder, batch = tiny.make(name)
    return pl.from_diffusers(transformer, encoder, **more), batch


@pytest.mark.parametrize("name", ["wan", pytest.param("ltx", marks=pytest.mark.full)])
def test_of_a_family(name: str) -> None:
    model, batch = model_of(name)
    found = pl.check_gradients(model, batch, ranks=2, plans=2)
    assert found.worst < TOLERANCE, str(found)
    assert {row.name.split(".")[0] for row in found.rows} == {"transformer"}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("freeze", [(), ("text",)])
@pytest.mark.parametrize("name", tiny.CASES)
def test_of_every_family(name: str, freeze: tuple[str, ...], ranks: int) -> None:
    transformer, encoder, batch = tiny.make(name, seed=ranks)
    flow = pl.FlowMatching(weighting="logit_normal" if freeze else "cosmap", seed=ranks)
    model = pl.from_diffusers(transformer, encoder, freeze=freeze, flow=flow)
    found = pl.check_gradients(model, batch, ranks=ranks, plans=6)
    assert found.worst < TOLERANCE, str(found)
    trained = [transformer] if freeze else [transformer, encoder]
    assert len(found.rows) == sum(len(list(each.parameters())) for each in trained)


@pytest.mark.full
@pytest.mark.parametrize("name", tiny.CASES)
def test_of_prompts_that_are_embedded_already(name: str) -> None:
    transformer, _, batch = tiny.make(name)
    for sample in batch:
        ids = sample.pop("input_ids")
        sample["prompt_embeds"] = torch.randn(len(ids), tiny.TEXT_WIDTH)
        if name == "wan":
            del sample["attention_mask"]
    found = pl.check_gradients(pl.from_diffusers(transformer), batch, ranks=3, plans=4)
    assert found.worst < TOLERANCE, str(found)


@pytest.mark.full
def test_of_a_prompt_as_long_as_its_padding_allows() -> None:
    """Beside one that is padded: the row of padding is used by one of them alone."""
    model, batch = model_of("wan")
    batch[3]["attention_mask"] = torch.ones_like(batch[3]["input_ids"])
    found = pl.check_gradients(model, batch[2:4], ranks=2, plans=3)
    assert found.worst < TOLERANCE, str(found)


def test_padding_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of("wan")
    forward = layers.TransformerBlock.forward

    def forgets(self: Any, x: Any, *, padding: Any, **more: Any) -> Any:
        return forward(self, x, padding=torch.zeros_like(padding), **more)

    monkeypatch.setattr(layers.TransformerBlock, "forward", forgets)
    assert pl.check_gradients(model, batch[:2], ranks=2, plans=1).worst > 1e-3


def test_what_a_made_model_freezes_is_not_said_again() -> None:
    model, batch = model_of("wan")
    with pytest.raises(pl.InputError, match="exists already"):
        pl.check_gradients(model, batch, freeze=("text",))
