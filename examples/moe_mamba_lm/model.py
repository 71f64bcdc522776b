"""Five kinds of layers: embedding, causal attention, selective state space, experts, head.

The texts of a microbatch are concatenated without padding, as ``(tokens, DIM)``. In addition, all layers get the text
that each token belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data import VOCABULARY, Text

DIM, HEADS, STATE, NUM_EXPERTS, EXPERT_DIM = 64, 4, 8, 4, 128
# Layers between embedding and head: m for state space, a for attention, e for experts.
PATTERN = "maememae"


class Part(Protocol):
    """One microbatch."""

    @property
    def samples(self) -> Sequence[Text]:
        """The texts."""


class Embedding(nn.Module):
    """Layer 0: embeds the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(len(VOCABULARY), DIM)
        nn.init.normal_(self.word.weight, std=0.5)

    def forward(self, ids: Tensor, *, owner: Tensor, mask: Tensor) -> Tensor:
        """Return ``(tokens, DIM)``."""
        del owner, mask
        out: Tensor = self.word(ids)
        return out


class Attention(nn.Module):
    """Causal attention within each text. It has no positions, because the state space layers encode the order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, owner: Tensor, mask: Tensor) -> Tensor:
        """Take and return ``(tokens, DIM)``."""
        del owner
        heads = self.qkv(self.norm(x)).view(len(x), 3, HEADS, DIM // HEADS).permute(1, 2, 0, 3)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = x + self.mix(mixed.transpose(0, 1).flatten(1))
        return out


class StateSpace(nn.Module):
    """A selective state space layer as in Mamba: a short convolution, then a scan whose decay depends on the input.

    The scan is computed as a product with the decays between all pairs of tokens of a text, which takes few operations
    of plain torch. A kernel would take linear time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.enter = nn.Linear(DIM, 2 * DIM)
        self.taps = nn.Parameter(torch.randn(3, DIM) * 0.5)
        self.choose = nn.Linear(DIM, 2 * STATE + HEADS)
        self.skip = nn.Parameter(torch.ones(DIM))
        self.leave = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, owner: Tensor, mask: Tensor) -> Tensor:
        """Take and return ``(tokens, DIM)``."""
        values, gate = self.enter(self.norm(x)).chunk(2, dim=1)
        values = functional.silu(self._convolve(values, owner))
        into, out_of, step = self.choose(values).split([STATE, STATE, HEADS], dim=1)
        # The decay between two tokens is exp(-sum of the steps between them), for each head.
        passed = functional.softplus(step).cumsum(0)
        decay = torch.exp((passed[None] - passed[:, None]).masked_fill(~mask[..., None], -torch.inf))
        weight = (out_of @ into.T)[..., None] * functional.softplus(step)[None]
        scanned = torch.einsum("qkh,khd->qhd", decay * weight, values.view(len(x), HEADS, DIM // HEADS))
        mixed = scanned.flatten(1) + values * self.skip
        out: Tensor = x + self.leave(mixed * functional.silu(gate))
        return out

    def _convolve(self, values: Tensor, owner: Tensor) -> Tensor:
        """Convolve each token with the two tokens before it in the same text."""
        total = values * self.taps[0]
        for back in (1, 2):
            same = functional.pad(owner[back:] == owner[:-back], (back, 0))[: len(owner), None]
            total = total + torch.roll(values, back, 0) * same * self.taps[back]
        return total


class Experts(nn.Module):
    """A mixture of experts: each token goes through the two experts with the highest router probability."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.widen = nn.ModuleList(nn.Linear(DIM, EXPERT_DIM) for _ in range(NUM_EXPERTS))
        self.narrow = nn.ModuleList(nn.Linear(EXPERT_DIM, DIM) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor, *, owner: Tensor, mask: Tensor) -> Tensor:
        """Take and return ``(tokens, DIM)``."""
        del owner, mask
        tokens = self.norm(x)
        best, chosen = self.router(tokens).topk(2, dim=1)
        weights = best.softmax(dim=1)
        for number, (widen, narrow) in enumerate(zip(self.widen, self.narrow, strict=True)):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out = narrow(functional.gelu(widen(tokens[rows])))
            x = x.index_add(0, rows, (out * weights[rows, place, None]).to(x.dtype))
        return x


class Head(nn.Module):
    """The last layer: logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.project = nn.Linear(DIM, len(VOCABULARY))

    def forward(self, x: Tensor, *, owner: Tensor, mask: Tensor) -> Tensor:
        """Return ``(tokens, len(VOCABULARY))``."""
        del owner, mask
        out: Tensor = self.project(self.norm(x))
        return out


def layers(seed: int) -> list[nn.Module]:
    """Build all layers, each from its own seed."""
    kinds: dict[str, Callable[[], nn.Module]] = {"m": StateSpace, "a": Attention, "e": Experts}
    built: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        for index, kind in enumerate((Embedding, *(kinds[letter] for letter in PATTERN), Head)):
            torch.manual_seed(seed * 1000 + index)
            built.append(kind())
    return built


def inputs(part: Part) -> Tensor:
    """Return the concatenated token ids of all texts."""
    return torch.tensor([token for text in part.samples for token in text.tokens])


def context(part: Part) -> dict[str, Any]:
    """Return ``owner``, the text of each token, and ``mask``, the causal mask within each text."""
    lengths = torch.tensor([len(text.tokens) for text in part.samples])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return {"owner": owner, "mask": (owner[:, None] == owner).tril_()}


def answers(samples: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Return the rows of the logits that predict an answer, and the answers."""
    rows: list[int] = []
    targets: list[int] = []
    begin = 0
    for text in samples:
        rows += [begin + place for place, _ in text.answers]
        targets += [value for _, value in text.answers]
        begin += len(text.tokens)
    return torch.tensor(rows), torch.tensor(targets)


def loss(logits: Tensor, part: Part) -> Tensor:
    """Return the cross entropy, summed over the answers."""
    rows, targets = (numbers.to(logits.device) for numbers in answers(part.samples))
    return functional.cross_entropy(logits[rows], targets, reduction="sum")


def num_targets(text: Text) -> int:
    """Return the number of tokens of a text that count in the loss."""
    return len(text.answers)
