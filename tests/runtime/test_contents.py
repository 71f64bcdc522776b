"""Ranks whose samples have the same ids and sizes, but not the same contents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pipeloom.runtime.data.read_ahead import UpcomingBatch, contents_digest


@dataclass
class Document:
    ids: torch.Tensor
    more: dict[str, Any]


def document(token: int = 3, pixel: float = 0.5, label: int = 1, word: str = "a") -> Document:
    images = [torch.full((1, 2), pixel, dtype=torch.bfloat16), np.array([1, label])]
    return Document(
        torch.tensor([1, 2, token]), {"images": images, "name": (word, b"x", None), "empty": torch.zeros(0)}
    )


def test_equal_contents_have_one_digest() -> None:
    assert contents_digest([document(), document()]) == contents_digest([document(), document()])
    around = document()
    around.more["self"] = around
    assert contents_digest([around])


@pytest.mark.parametrize("other", [{"token": 4}, {"pixel": 0.25}, {"label": 2}, {"word": "b"}])
def test_whatever_differs_is_seen(other: dict[str, Any]) -> None:
    assert contents_digest([document(**other)]) != contents_digest([document()])
    assert contents_digest([document(), document(**other)]) != contents_digest([document(**other), document()])


def test_ranks_see_other_contents_only_where_they_are_to_compare_them() -> None:
    def coming(token: int) -> UpcomingBatch:
        return UpcomingBatch([document(token)], 0, lambda sample: {"id": "a", "text_tokens": len(sample.ids)})

    assert coming(3).compared(False) == coming(4).compared(False) == coming(4).digest
    assert coming(3).compared(True) == coming(3).compared(True) != coming(4).compared(True)
    assert len(coming(3).compared(True)) == len(coming(3).digest)
