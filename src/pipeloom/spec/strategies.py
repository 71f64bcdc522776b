"""Memory strategies: how activations are held between a forward and its backward, by layer and by chunk.

One vocabulary for measured and emulated costs, plans and the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

from pipeloom.errors import InputError

Strategy = Literal["keep", "selective", "recompute", "offload"]
"""How a layer holds what its backward reads:

- ``keep``: all of it;
- ``selective``: without what is cheap to make again (norms, activation functions), which the backward makes again;
- ``recompute``: the layer's input alone, from which the backward makes all again;
- ``offload``: all of it, but on the host between forward and backward.
"""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


class StrategyTraits(NamedTuple):
    """What a strategy is made of: plans, costs and the emulator ask for this, never for its name."""

    recomputes: Literal["nothing", "cheap", "all"] = "nothing"
    """What the backward makes again, of what the forward made."""
    offloads: bool = False
    """Whether what is held goes to the host and comes back."""


TRAITS: dict[Strategy, StrategyTraits] = {
    "keep": StrategyTraits(),
    "selective": StrategyTraits(recomputes="cheap"),
    "recompute": StrategyTraits(recomputes="all"),
    "offload": StrategyTraits(offloads=True),
}
_WORDS: dict[str, Strategy] = {strategy: strategy for strategy in STRATEGIES} | {"full": "recompute"}
"""What people may write; ``full`` is Megatron-LM's word."""


@dataclass(frozen=True, slots=True)
class ChunkStrategy:
    """How a chunk's layers hold their activations: the first ``share`` of them one way, the others another.

    Its text is ``first``, ``first:share`` or ``first:share+others``: ``recompute:0.5+selective`` recomputes the first
    half of the layers and holds the others selectively.
    """

    first: Strategy
    share: float = 1.0
    others: Strategy = "keep"

    def __post_init__(self) -> None:
        """Refuse shares that no layers are."""
        if not 0 <= self.share <= 1:
            raise InputError("strategy", f"'{self.share:g}' is not a share of the layers", "give one from 0 to 1")

    def layers(self, num_layers: int) -> tuple[Strategy, ...]:
        """Strategy of each of a chunk's layers; the share is rounded to whole layers."""
        chosen = round(self.share * num_layers)
        return (self.first,) * chosen + (self.others,) * (num_layers - chosen)

    def __str__(self) -> str:
        """Text form, which `chunk_strategy` reads."""
        share = "" if self.share == 1 else f":{self.share:g}"
        return f"{self.first}{share}" + ("" if self.others == "keep" else f"+{self.others}")


def chunk_strategy(given: ChunkStrategy | str) -> ChunkStrategy:
    """Read a chunk's strategy from its text; one that is read already stays.

    Raises
    ------
    InputError
        A word is no strategy, or what follows it no share from 0 to 1.
    """
    if isinstance(given, ChunkStrategy):
        return given
    first, _, others = given.partition("+")
    word, _, share = first.partition(":")
    chosen, rest = layer_strategy(word), layer_strategy(others or "keep")
    try:
        part = float(share or 1.0)
    except ValueError:
        raise InputError("strategy", f"{share!r} is not a share of the layers", "give one from 0 to 1") from None
    return ChunkStrategy(chosen, part, rest)


def layer_strategy(word: str) -> Strategy:
    """Read one layer's strategy.

    Raises
    ------
    InputError
        It is none.
    """
    if word not in _WORDS:
        raise InputError("strategy", f"{word!r} is not one of {', '.join(STRATEGIES)}")
    return _WORDS[word]


def strategy_word(strategy: str, layers: tuple[str, ...] = ()) -> str:
    """Strategy of a pair as plans write it: one word, or one per layer where they differ."""
    if not layers:
        return strategy
    return layers[0] if len(set(layers)) == 1 else ",".join(layers)


@cache
def word_strategies(word: str) -> tuple[Strategy, ...]:
    """Strategies in what `strategy_word` wrote, one for all layers or one each; no word at all is ``keep``.

    Raises
    ------
    InputError
        A part of it is no strategy.
    """
    return tuple(layer_strategy(part) for part in word.split(",")) if word else ("keep",)
