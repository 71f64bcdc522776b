"""Memory strategies of a step's microbatches: which the planner may choose, and which it chose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipeloom.errors import InputError
from pipeloom.limits import MAX_TOTAL
from pipeloom.plan import Action, ExecutionPlan, Verb
from pipeloom.spec import STRATEGIES, TRAITS, Layout, Strategy, strategy_word, word_strategies

StepStrategies = tuple[tuple[str, ...], ...]
"""Strategy of every stage as in plans, by microbatch of the step: one word, or one for each layer if they differ.
Empty: the planner chooses none."""
OFFERED: tuple[Strategy, ...] = ("keep", "selective", "recompute")


@dataclass(frozen=True)
class StepMemory:
    """Memory of every rank, and the strategies by which plans stay within it.

    Attributes
    ----------
    activation_bytes : int
        Memory of a rank for what it holds between forwards and backwards, for messages and for recomputation.
    strategies : tuple of Strategy
        Strategies that the planner may choose for each microbatch and layer.
    num_layers : tuple of int
        Number of layers of every stage that may have strategies of their own; 1 where all layers have the same. Empty:
        1 for all stages.
    """

    activation_bytes: int
    strategies: tuple[Strategy, ...] = OFFERED
    num_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the values."""
        limit, given = self.activation_bytes, self.strategies
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_TOTAL:
            raise InputError("activation_bytes", f"{str(limit)[:60]!r} is not a number of bytes from 1 to {MAX_TOTAL}")
        for strategy in given:
            if strategy not in OFFERED:
                raise InputError("strategies", f"{str(strategy)[:60]!r} is not one of {', '.join(OFFERED)}")
        if given[:1] != ("keep",) or len(set(given)) < len(given):
            raise InputError("strategies", f"is {', '.join(given)}", "give keep first, and each once")

    def check_encoder(self, num_encoder: int) -> None:
        """Raise `InputError` if stages are an encoder's, whose memory is not planned."""
        if num_encoder:
            raise InputError(
                "activation_bytes",
                "is given for a model with an encoder of images, whose memory is not planned",
                "leave it out, and set recompute_granularity in Megatron's configuration if memory is scarce",
            )

    def to_measure(self, count: int, num_stages: int, step: int) -> StepStrategies:
        """Return the strategies of a step that measures them, with ``count`` microbatches.

        Few microbatches hold more than the minimum at a time, and other ones in the next step.
        """
        least = max(self.strategies, key=STRATEGIES.index)
        others = itertools.cycle([each for each in self.strategies if each != least] or [least])
        # About as many microbatches as stages are in flight on a rank.
        every = min(count, num_stages)
        for _ in range(step):
            next(others)
        chosen = [next(others) if (number + step) % every == 0 else least for number in range(count)]
        return tuple((each,) * num_stages for each in chosen)


def take_strategies(
    plan: ExecutionPlan, layout: Layout, samples: Sequence[int]
) -> tuple[ExecutionPlan, StepStrategies]:
    """Take the strategies out of a plan, for layers that apply them themselves.

    Return the plan for this layout, of the stages as one layer each, under which the executor recomputes nothing, and
    the strategies. Of a stage's layers, the first ones recompute the most. ``samples`` has the number of the step's
    microbatch, by microbatch of the plan.
    """
    number_of = {name: number for number, name in enumerate(layout.chunk_names)}
    chosen: list[list[str]] = [["keep"] * len(number_of) for _ in samples]
    ranks = []
    for actions in plan.ranks:
        left: list[Action] = []
        for action in actions:
            if action.verb is Verb.F and action.strategy not in ("", "keep"):
                stage = number_of[action.chunk]
                chosen[samples[action.microbatch]][stage] = layer_word(action.strategy)
                action = msgspec.structs.replace(action, strategy="keep")
            if action.verb is not Verb.RECOMPUTE:
                left.append(action)
        ranks.append(tuple(left))
    assert not any(TRAITS[each].offloads for each in OFFERED)
    taken = msgspec.structs.replace(plan, layout=layout.digest, ranks=tuple(ranks))
    return taken, tuple(map(tuple, chosen))


def layer_word(word: str) -> str:
    """Return a plan's word for a stage with its equal layers in an order in which the first ones recompute the most."""
    return strategy_word("", tuple(sorted(word_strategies(word), key=STRATEGIES.index, reverse=True)))
