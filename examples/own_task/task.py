"""A task file for `pipeloom train`: the model, its batches, and the sizes of samples for the planner."""

import torch
from torch import nn

import pipeloom as pl

WORDS = 50


def build_model(seed, width):  # every process must build the same model
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(4)]
    layers = [nn.Embedding(WORDS, width), *blocks, nn.Linear(width, WORDS)]
    module = pl.Module(
        "lm", layers, reads="sequence", inputs=words_of, hidden=("tokens", width), output=("tokens", WORDS)
    )
    return pl.Model([module], loss, num_targets=lambda text: len(text[1]), name="own_task")


def words_of(part):  # a text is a pair (name, words); a part holds the texts of one microbatch
    return torch.cat([words for _, words in part.samples])


def loss(output, part):  # cross entropy of each word's successor, summed over all words
    return nn.functional.cross_entropy(output, (words_of(part) + 1) % WORDS, reduction="sum")


def batches(num_iterations, texts):  # every process must produce the same batches
    for number in range(num_iterations):
        yield batch(number, texts)


def eval_batches(texts):
    yield batch(1_000_000, texts)


def batch(number, texts):
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(5, 60, (texts,), generator=draw).tolist()
    return [(f"{number}.{i}", torch.randint(WORDS, (length,), generator=draw)) for i, length in enumerate(lengths)]


def describe(text):  # the planner sees only sample sizes
    return {"id": text[0], "text_tokens": len(text[1])}


class Notify(pl.Callback):
    def on_evaluation(self, evaluated):
        print(f"after {evaluated.iteration} iterations: validation loss {evaluated.loss:.3f}")


def callbacks():
    return [Notify()]


def evaluate(model):  # called with the trained weights after training
    x = words = torch.arange(WORDS)
    with torch.no_grad():
        for layer in model.module("lm").layers:
            x = layer(x)
    return {"right": float((x.argmax(-1) == (words + 1) % WORDS).float().mean())}
