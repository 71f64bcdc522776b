"""What `pipeloom train` asks of a task file: a model, its batches, and what is told the planner of a sample."""

import torch
from torch import nn

import pipeloom as pl

WORDS = 50


def build_model(seed, width):  # alike in every process
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(4)]
    layers = [nn.Embedding(WORDS, width), *blocks, nn.Linear(width, WORDS)]
    module = pl.Module(
        "lm", layers, reads="sequence", inputs=words_of, hidden=("tokens", width), output=("tokens", WORDS)
    )
    return pl.Model([module], loss, num_targets=lambda text: len(text[1]), name="own_task")


def words_of(part):  # a text is a name and its words; a part, the texts that go through the model together
    return torch.cat([words for _, words in part.samples])


def loss(output, part):  # of guessing each word's successor, summed over all words
    return nn.functional.cross_entropy(output, (words_of(part) + 1) % WORDS, reduction="sum")


def batches(num_iterations, texts):  # the same in every process
    for number in range(num_iterations):
        yield batch(number, texts)


def eval_batches(texts):
    yield batch(1_000_000, texts)


def batch(number, texts):
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(5, 60, (texts,), generator=draw).tolist()
    return [(f"{number}.{i}", torch.randint(WORDS, (length,), generator=draw)) for i, length in enumerate(lengths)]


def describe(text):  # sizes, never words
    return {"id": text[0], "text_tokens": len(text[1])}


class Notify(pl.Callback):
    def on_evaluation(self, evaluated):
        print(f"after {evaluated.iteration} iterations: {evaluated.loss:.3f} on texts that are not trained on")


def callbacks():
    return [Notify()]


def evaluate(model):  # with the trained weights, at the end
    x = words = torch.arange(WORDS)
    with torch.no_grad():
        for layer in model.module("lm").layers:
            x = layer(x)
    return {"right": float((x.argmax(-1) == (words + 1) % WORDS).float().mean())}
