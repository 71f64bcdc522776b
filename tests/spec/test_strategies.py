"""Memory strategies of layers and chunks, and their text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.spec import STRATEGIES, TRAITS, ChunkStrategy, chunk_strategy, strategy_word
from pipeloom.spec.strategies import word_strategies

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


def test_every_strategy_has_traits_and_a_row_on_the_page() -> None:
    assert tuple(TRAITS) == STRATEGIES
    listed = re.findall(r"^\| `(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(STRATEGIES)


@pytest.mark.parametrize("text", [*STRATEGIES, "recompute:0.5", "recompute:0.17+selective", "offload+recompute"])
def test_text_of_a_chunks_strategy_round_trips(text: str) -> None:
    assert str(chunk_strategy(text)) == text


def test_a_share_of_the_layers_in_front() -> None:
    assert ChunkStrategy("recompute", 0.5).layers(4) == ("recompute", "recompute", "keep", "keep")
    assert ChunkStrategy("recompute", 0.34, "selective").layers(3) == ("recompute", "selective", "selective")
    assert ChunkStrategy("offload").layers(2) == ("offload", "offload")


def test_the_word_full_is_read_as_recompute() -> None:
    assert chunk_strategy("full:0.5+selective") == ChunkStrategy("recompute", 0.5, "selective")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "'none' is not one of keep"),
        ("recompute:half", "'half' is not a share"),
        ("recompute:1.5", "'1.5' is not a share"),
        ("recompute:nan", "'nan' is not a share"),
        ("keep+some", "'some' is not one of"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        chunk_strategy(text)


def test_the_word_of_a_pair() -> None:
    assert strategy_word("recompute:0.5", ("recompute", "keep")) == "recompute,keep"
    assert strategy_word("recompute", ("recompute",) * 3) == "recompute"
    assert word_strategies("recompute,keep") == ("recompute", "keep")
    assert word_strategies("") == ("keep",)
    with pytest.raises(InputError, match="'sometimes' is not one of"):
        word_strategies("keep,sometimes")
