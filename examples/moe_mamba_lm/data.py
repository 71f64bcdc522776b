"""Key-value recall: the model must remember random facts and answer questions about them.

A sample begins with facts, which are pairs of a key and a value separated by filler. Questions follow: each is ``?``,
a known key, and the value of that key::

    c = 3 . . a = 7 . f = 1 . ? a 7 ? c 3 ? a 7

Only the values in answers count in the loss. A model without memory has an accuracy of 0.1 at most. Samples have 2 to
12 facts, so the lengths of samples and batches vary widely.
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
# The mean number of facts is drawn for each batch, so that batches differ in length.
MEAN_FACTS = (3.0, 9.0)


@dataclass(frozen=True)
class Text:
    """One sample.

    Attributes
    ----------
    identifier : str
    tokens : tuple of int
        Token ids.
    answers : tuple of (int, int)
        Position of the key in each question, and the value that follows it.
    """

    identifier: str
    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def draw(identifier: str, rng: np.random.Generator, num_facts: int) -> Text:
    """Draw one sample with ``num_facts`` facts and ``num_facts + 1`` questions."""
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
    """Return the texts of one iteration. They depend only on seed and iteration."""
    rng = np.random.default_rng((seed, iteration))
    mean = rng.uniform(*MEAN_FACTS)
    facts = np.clip(rng.poisson(mean, texts_per_batch), MIN_FACTS, MAX_FACTS).tolist()
    return [draw(f"{iteration}-{number}", rng, count) for number, count in enumerate(facts)]


def batches(seed: int, num_iterations: int, texts_per_batch: int, start: int = 0) -> Iterator[list[Text]]:
    """Yield the batches of the iterations from ``start`` to ``num_iterations``."""
    for iteration in range(start, num_iterations):
        yield batch(seed, iteration, texts_per_batch)


def held_out(num_texts: int = 200, seed: int = 99) -> Sequence[Text]:
    """Return texts that are in no training batch."""
    rng = np.random.default_rng((seed, 10**6, 7))
    counts = rng.integers(MIN_FACTS, MAX_FACTS + 1, size=num_texts).tolist()
    return [draw(f"held-out-{number}", rng, count) for number, count in enumerate(counts)]


def describe(text: Text) -> dict[str, object]:
    """Return the sizes of a text for the planner."""
    return {"id": text.identifier, "text_tokens": len(text.tokens)}
