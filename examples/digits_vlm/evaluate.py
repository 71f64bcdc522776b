"""Greedy decoding of held-out documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import model
from .data import END, IMAGE, MAX_LINES, Document

DOCUMENTS_PER_GROUP = 12


@dataclass(frozen=True)
class Documents:
    """Documents with all of their images."""

    samples: tuple[Document, ...]

    @property
    def instances(self) -> tuple[tuple[int, int], ...]:
        """The images as pairs: index of the sample, index of the image in it."""
        return tuple(
            (sample, image) for sample, document in enumerate(self.samples) for image in range(len(document.images))
        )


def _encode(layers: Sequence[nn.Module], part: Documents) -> Tensor:
    """Return the image embeddings of a part."""
    x = model.vision_inputs(part, next(layers[0].parameters()).dtype)
    for layer in layers:
        x = layer(x)
    return x


def _logits(layers: Sequence[nn.Module], part: Documents, vision_out: Tensor) -> Tensor:
    """Return the logits of all tokens of a part."""
    context = model.lm_context(part)
    x: Tensor = layers[0](*model.lm_inputs(part), vision_out, **context)
    for layer in layers[1:]:
        x = layer(x, **context)
    return x


@torch.no_grad()
def decode(
    vision: Sequence[nn.Module], lm: Sequence[nn.Module], documents: Sequence[Document]
) -> list[tuple[int, ...]]:
    """Answer documents by greedy decoding, and return the tokens of each answer before ``END``.

    Parameters
    ----------
    vision, lm
        Layers of the two modules.
    documents
        The documents. Their answers are not used.
    """
    # Documents with answers of similar length are decoded together.
    order = sorted(range(len(documents)), key=lambda i: max(documents[i].prompt_lines))
    answers: dict[int, tuple[int, ...]] = {}
    for first in range(0, len(order), DOCUMENTS_PER_GROUP):
        active = order[first : first + DOCUMENTS_PER_GROUP]
        images = {i: _encode(vision, Documents((documents[i],))) for i in active}
        answers.update(dict.fromkeys(active, ()))
        for _ in range(MAX_LINES + 1):
            part = Documents(tuple(dataclasses.replace(documents[i], digits=answers[i]) for i in active))
            logits = _logits(lm, part, torch.cat([images[i] for i in active]))
            lengths = torch.tensor([len(document.inputs) for document in part.samples])
            scores = logits[lengths.cumsum(0) - 1]
            # An untrained model may prefer the placeholder, for which there is no image.
            scores[:, IMAGE] = -torch.inf
            likeliest = scores.argmax(dim=1).tolist()
            for i, token in zip(active, likeliest, strict=True):
                if token != END:
                    answers[i] = (*answers[i], token)
            active = [i for i, token in zip(active, likeliest, strict=True) if token != END]
            if not active:
                break
    return [answers[i] for i in range(len(documents))]


def evaluate(vision: Sequence[nn.Module], lm: Sequence[nn.Module], documents: Sequence[Document]) -> dict[str, float]:
    """Score the answers to documents.

    Returns
    -------
    dict[str, float]
        For documents with images: ``digit_accuracy`` (fraction of digits that are correct at their position),
        ``exact_match`` (fraction of documents without an error) and ``documents``. For text-only documents the same
        names with the prefix ``text_``.
    """
    answers = decode(vision, lm, documents)
    scores: dict[str, float] = {}
    for prefix, with_images in (("", True), ("text_", False)):
        pairs = [
            (answer, document.digits)
            for answer, document in zip(answers, documents, strict=True)
            if bool(document.images) == with_images
        ]
        right = sum(a == b for given, true in pairs for a, b in zip(given, true, strict=False))
        total = sum(len(true) for _, true in pairs)
        exact = sum(given == true for given, true in pairs)
        scores[f"{prefix}digit_accuracy"] = right / max(total, 1)
        scores[f"{prefix}exact_match"] = exact / max(len(pairs), 1)
        scores[f"{prefix}documents"] = len(pairs)
    return scores
