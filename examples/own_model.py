"""Train your own model on two ranks. docs/bring-your-own-model.md explains each part."""

from functools import partial

import torch
from torch import nn

import pipeloom as pl
from pipeloom.runtime import Model, Module, Part


class Merge(nn.Module):
    """Embeds the tokens and inserts the images. This is your code, not Pipeloom's."""

    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(100, 16)

    def forward(self, ids, places, images, **_):  # ignores `owner`
        return self.word(ids).index_add(0, places, images)


class Mixer(nn.Module):
    """Adds the mean of its document to each token."""

    def forward(self, x, *, owner):
        total = torch.zeros(int(owner.max()) + 1, x.shape[1]).index_add(0, owner, x)
        return x + total[owner] / torch.bincount(owner)[owner, None]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 100)

    def forward(self, x, **_):
        return self.out(x)


# A sample is whatever your data loader returns. Here it is a triple: token ids, images of 8 numbers each, and a name.
# Token id 0 is the placeholder of an image.
def pictures(part: Part):
    return torch.stack([part.samples[sample][1][index] for sample, index in part.instances])


def tokens(part: Part):
    ids = torch.cat([ids for ids, _, _ in part.samples])
    return ids, (ids == 0).nonzero()[:, 0]


def owner(part: Part):
    lengths = torch.tensor([len(ids) for ids, _, _ in part.samples])
    return {"owner": torch.repeat_interleave(torch.arange(len(lengths)), lengths)}


def loss(logits, part: Part):
    return nn.functional.cross_entropy(logits, tokens(part)[0], reduction="sum")


def build_model():
    vision = Module(
        "vision",
        [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)],
        reads="images",
        inputs=pictures,
        hidden=("instances", 16),
        output=("instances", 16),
    )
    language = Module(
        "lm",
        [Merge(), Mixer(), Mixer(), Head()],
        reads="sequence",
        after=("vision",),
        inputs=tokens,
        context=owner,
        hidden=("tokens", 16),
        output=("tokens", 100),
    )
    return Model([vision, language], loss, num_targets=lambda sample: len(sample[0]), name="own_model")


def describe(sample):
    """Return the sizes of a sample. The planner sees only these."""
    ids, images, name = sample
    return {"id": name, "text_tokens": len(ids) - len(images), "image_tokens": [1] * len(images)}


def batches():
    """Yield ten batches. Every process must produce the same ones."""
    draw = torch.Generator().manual_seed(0)
    for number in range(10):
        yield [sample(f"{number}.{place}", draw) for place in range(12)]


def sample(name, draw):
    count, words = (int(torch.randint(1, 5, (), generator=draw)) for _ in range(2))
    ids = torch.cat([torch.zeros(count, dtype=torch.long), torch.randint(1, 100, (3 * words,), generator=draw)])
    return ids, list(torch.randn(count, 8, generator=draw)), name


if __name__ == "__main__":
    adam = partial(torch.optim.AdamW, lr=1e-2)
    result = pl.fit(build_model, batches, ranks=2, describe=describe, optimizer=adam)
    print(f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}, weights in {result.checkpoint}")
