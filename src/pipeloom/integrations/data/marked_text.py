"""Show a sample as text with its targets marked."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

_BEGIN, _END = ">>>", "<<<"
_LONGEST = 400
"""Maximum of characters shown of a run of tokens."""
_REPEATED = 4
"""From this number on, equal consecutive tokens are shown once, with their count."""


def marked_text(tokenizer: Any, ids: Tensor, is_target: Tensor) -> str:
    """Decode a sample into one line, with ``>>>`` before and ``<<<`` after each run of targets."""
    pairs = zip(ids.tolist(), is_target.tolist(), strict=True)
    runs = [(target, [token for token, _ in run]) for target, run in itertools.groupby(pairs, lambda pair: pair[1])]
    texts = [(target, _shortened(_decoded(tokenizer, run))) for target, run in runs]
    return "".join(f"{_BEGIN}{text}{_END}" if target else text for target, text in texts)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    """Decode tokens. Long repetitions, such as image placeholders, are decoded once."""
    pieces, plain = [], list[int]()
    for token, run in itertools.groupby(ids):
        count = len(list(run))
        if count < _REPEATED:
            plain += [token] * count
            continue
        pieces += [tokenizer.decode(plain), f"{tokenizer.decode([token])} x {count} "]
        plain = []
    text = "".join([*pieces, tokenizer.decode(plain)])
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _shortened(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"
