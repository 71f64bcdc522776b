"""Train a small language model with `pl.fit`. It learns the successor of each word."""

from functools import partial

import torch
from torch import nn

import pipeloom as pl


def build_model():
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    layers = [nn.Embedding(50, 32), *blocks, nn.Linear(32, 50)]
    module = pl.Module("lm", layers, reads="sequence", inputs=words_of, hidden=("tokens", 32), output=("tokens", 50))
    return pl.Model([module], loss, num_targets=lambda text: len(text[1]), name="fit")


def words_of(part):  # a text is a pair (name, words); a part holds the texts of one microbatch
    return torch.cat([words for _, words in part.samples])


def loss(output, part):  # summed over all words
    return nn.functional.cross_entropy(output, (words_of(part) + 1) % 50, reduction="sum")


def batches():  # every process must produce the same batches
    random = torch.Generator().manual_seed(0)
    for i in range(10):
        lengths = torch.randint(5, 60, (24,), generator=random).tolist()
        yield [(f"{i}.{j}", torch.randint(50, (n,), generator=random)) for j, n in enumerate(lengths)]


def describe(text):  # the planner sees only sample sizes
    return {"id": text[0], "text_tokens": len(text[1])}


if __name__ == "__main__":
    adam = partial(torch.optim.AdamW, lr=1e-2)
    result = pl.fit(build_model, batches, ranks=4, describe=describe, optimizer=adam)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, weights in {result.checkpoint}")
