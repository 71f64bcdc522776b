"""Key-value recall: text of which every word but the last of each question is noise to be remembered.

A sample begins with facts, pairs of a key and a value in random order with filler in between, and goes on with
questions, each a known key after ``?``; what follows is the value of that key::

    c = 3 . . a = 7 . f = 1 . ? a 7 ? c 3 ? a 7

Only the answers count. Without looking back a model can do no better than one in ten; samples have between 2 and
12 facts, so that their lengths differ widely, and so do those of batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

KEYS, VALUES = "abcdefghijklmnop", "0123456789"
VOCABULARY = (*KEYS, *VALUES, "=", "?", ".")
TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}
IS, ASK, FILLER = (TOKEN_IDS[word] for word in ("=", "?", "."))
FIRST_VALUE = TOKEN_IDS["0"]
MIN_FACTS, MAX_FACTS = 2, 12
# The mean number of facts is itself drawn for every batch: easy batches are short, hard ones long.
MEAN_FACTS = (3.0, 9.0)


@dataclass(frozen=True)
class Text:
    """One sample.

    Attributes
    ----------
    identifier : str
    tokens : tuple of int
        What the model reads.
    answers : tuple of (int, int)
        Position of a question's key, and the value that is to follow it.
    """

    identifier: str
    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def draw(identifier: str, rng: np.random.Generator, num_facts: int) -> Text:
    """Draw one sample with so many facts, and as many questions and one more."""
    keys = rng.permutation(len(KEYS))[:num_facts]
    values = FIRST_VALUE + rng.integers(len(VALUES), size=num_facts)
    tokens: list[int] = []
    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
        tokens += [key, IS, value] + [FILLER] * int(rng.integers(3))
    answers = []
    for fact in rng.integers(num_facts, size=num_facts + 1).tolist():
        tokens += [ASK, int(keys[fact])]
        answers.append((len(tokens) - 1, int(values[fact])))
        tokens.append(int(values[fact]))
    return Text(identifier, tuple(tokens), tuple(answers))


def batch(seed: int, iteration: int, texts_per_batch: int) -> list[Text]:
    """The texts of one iteration: a function of seed and iteration alone."""
    rng = np.random.default_rng((seed, iteration))
    mean = rng.uniform(*MEAN_FACTS)
    facts = np.clip(rng.poisson(mean, texts_per_batch), MIN_FACTS, MAX_FACTS).tolist()
    return [draw(f"{iteration}-{number}", rng, count) for number, count in enumerate(facts)]


def batches(seed: int, num_iterations: int, texts_per_batch: int, start: int = 0) -> Iterator[list[Text]]:
    """Yield the batches of the iterations from ``start`` to ``num_iterations``."""
    for iteration in range(start, num_iterations):
        yield batch(seed, iteration, texts_per_batch)


def held_out(num_texts: int = 200, seed: int = 99) -> Sequence[Text]:
    """Texts that are in no batch of training."""
    rng = np.random.default_rng((seed, 10**6, 7))
    counts = rng.integers(MIN_FACTS, MAX_FACTS + 1, size=num_texts).tolist()
    return [draw(f"held-out-{number}", rng, count) for number, count in enumerate(counts)]


def describe(text: Text) -> dict[str, object]:
    """Sizes of a text, as the planner wants them."""
    return {"id": text.identifier, "text_tokens": len(text.tokens)}
