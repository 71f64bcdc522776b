"""Memory strategies: how layers and chunks hold activations between a forward and its backward.

Measured and emulated costs, plans and the runtime all use these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

from pipeloom.errors import InputError

Strategy = Literal["keep", "selective", "recompute", "offload"]
"""How a layer holds the tensors that its backward reads:

- ``keep``: holds all of them.
- ``selective``: drops those that are cheap to recompute (norms, activation functions). The backward recomputes them.
- ``recompute``: holds only the layer's input. The backward recomputes all others.
- ``offload``: moves all of them to the host between forward and backward.
"""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


class StrategyTraits(NamedTuple):
    """Properties of a strategy. Plans, costs and the emulator depend on these, never on the name."""

    recomputes: Literal["nothing", "cheap", "all"] = "nothing"
    """Which results of the forward the backward recomputes."""
    offloads: bool = False
    """Whether held tensors move to the host and back."""


TRAITS: dict[Strategy, StrategyTraits] = {
    "keep": StrategyTraits(),
    "selective": StrategyTraits(recomputes="cheap"),
    "recompute": StrategyTraits(recomputes="all"),
    "offload": StrategyTraits(offloads=True),
}
_WORDS: dict[str, Strategy] = {strategy: strategy for strategy in STRATEGIES} | {"full": "recompute"}
"""Accepted words. Megatron-LM says ``full``."""


@dataclass(frozen=True, slots=True)
class ChunkStrategy:
    """How a chunk's layers hold their activations: the first ``share`` of them one way, the others another.

    The text form is ``first``, ``first:share`` or ``first:share+others``. For example, ``recompute:0.5+selective``
    recomputes the first half of the layers and holds the others selectively.
    """

    first: Strategy
    share: float = 1.0
    others: Strategy = "keep"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError("strategy", f"'{self.share:g}' is not a share of the layers", "give one from 0 to 1")

    def layers(self, num_layers: int) -> tuple[Strategy, ...]:
        """Return the strategy of each of a chunk's layers. The share is rounded to whole layers."""
        chosen = round(self.share * num_layers)
        return (self.first,) * chosen + (self.others,) * (num_layers - chosen)

    def __str__(self) -> str:
        """Return the text form, which `chunk_strategy` reads."""
        share = "" if self.share == 1 else f":{self.share:g}"
        return f"{self.first}{share}" + ("" if self.others == "keep" else f"+{self.others}")


def chunk_strategy(strategy: ChunkStrategy | str) -> ChunkStrategy:
    """Read a chunk's strategy from its text. A `ChunkStrategy` is returned unchanged.

    Raise `InputError` if a word is not a strategy, or a share is not a number from 0 to 1.
    """
    if isinstance(strategy, ChunkStrategy):
        return strategy
    first, _, others = strategy.partition("+")
    word, _, share = first.partition(":")
    chosen, rest = layer_strategy(word), layer_strategy(others or "keep")
    try:
        part = float(share or 1.0)
    except ValueError:
        raise InputError("strategy", f"{share!r} is not a share of the layers", "give one from 0 to 1") from None
    return ChunkStrategy(chosen, part, rest)


def layer_strategy(word: str) -> Strategy:
    """Read one layer's strategy. Raise `InputError` if the word is not a strategy."""
    if word not in _WORDS:
        raise InputError("strategy", f"{word!r} is not one of {', '.join(STRATEGIES)}")
    return _WORDS[word]


def strategy_word(strategy: str, layers: tuple[str, ...] = ()) -> str:
    """Return the strategy of a pair as in plans: one word, or one word per layer if they differ."""
    if not layers:
        return strategy
    return layers[0] if len(set(layers)) == 1 else ",".join(layers)


@cache
def word_strategies(word: str) -> tuple[Strategy, ...]:
    """Return the strategies in a word of `strategy_word`: one for all layers, or one each. Empty: ``keep``.

    Raise `InputError` for a word that is no strategy.
    """
    return tuple(layer_strategy(part) for part in word.split(",")) if word else ("keep",)
