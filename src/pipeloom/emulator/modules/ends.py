"""Modules at the ends of a model: embeddings, heads, and adapters between two models."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.emulator import operators as ops
from pipeloom.emulator.modules.plain import Module
from pipeloom.emulator.tape import Tensor
from pipeloom.spec.architecture import (
    AudioEmbeddingLayer,
    DenoisingHeadLayer,
    LanguageHeadLayer,
    PatchEmbeddingLayer,
    PatchMergerLayer,
    ProjectorLayer,
    TokenEmbeddingLayer,
)


class TokenEmbedding(TokenEmbeddingLayer, frozen=True):
    """Table look-up with the vocabulary divided over tensor parallelism, optionally with learned positions."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map token ids (8 bytes each) to activations. ``x`` provides tape and rows."""
        context = x.context
        rows = x.rows * context.row_split
        indices = Tensor(x.tape, rows, 1, ops.INDEX_BYTES, needs_gradient=False)
        if self.positions:
            x.tape.parameter(self.positions * self.hidden)
        y = ops.leave_tensor_parallel(ops.embedding(indices, self.vocabulary, self.hidden))
        return ops.dropout(y) if context.dropout else y


class PatchEmbedding(PatchEmbeddingLayer, frozen=True):
    """Map the pixels of a patch to an activation, with ``positions`` learned position vectors."""

    def __call__(self, x: Tensor) -> Tensor:
        """Record the operators. ``x`` provides tape and rows. Pixels have no gradient."""
        pixels = x.tape.input(self.patch_numbers, x.rows, needs_gradient=False)
        if self.positions:
            x.tape.parameter(self.positions * self.hidden)
        y = ops.linear(pixels, self.patch_numbers, self.hidden, bias=self.bias)
        return y if self.norm is None else ops.norm(y, self.norm)


class AudioEmbedding(AudioEmbeddingLayer, frozen=True):
    """Two convolutions of kernel size 3 over a spectrum. The second halves the number of steps (Whisper)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Record the operators. ``x`` provides tape and rows of the halved spectrum, which has no gradient."""
        spectrum = x.tape.input(self.bins, x.rows * 2, needs_gradient=False)
        y = ops.activation(ops.linear(spectrum, 3 * self.bins, self.hidden, bias=True))
        return ops.activation(ops.linear(ops.regroup(y, 2), 3 * self.hidden, self.hidden, bias=True))


class PatchMerger(PatchMergerLayer, frozen=True):
    """Join ``factor`` neighboring patches into one token by a two-layer MLP (Qwen2-VL)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return rows over ``factor`` of width ``out_width``."""
        wide = self.hidden * self.factor
        context = x.context
        y = ops.regroup(ops.norm(x, self.norm), self.factor)
        inner = context.share("merger width", self.inner or wide)
        y = ops.enter_tensor_parallel(y)
        y = ops.activation(ops.linear(y, wide, inner, bias=True, split=context.tensor))
        return ops.row_linear(y, inner, self.out_width, bias=True)


class Projector(ProjectorLayer, frozen=True):
    """Adapter between two modules: linear, activation, linear."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same rows of width ``out_width``."""
        y = ops.activation(ops.linear(x, self.in_width, self.out_width, bias=True))
        return ops.linear(y, self.out_width, self.out_width, bias=True)


class LanguageHead(LanguageHeadLayer, frozen=True):
    """Final norm, vocabulary projection and loss. ``tied``: the weights are those of the embedding."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the loss of every token, with those of its predictions."""
        loss = self._loss(x)
        for _ in range(self.predictions):
            state = x.tape.input(self.hidden, x.rows, needs_gradient=x.needs_gradient)
            before = len(x.tape.parameters)
            loss = loss + self._loss(state)
            del x.tape.parameters[before:]  # the same weights
        return loss

    def _loss(self, x: Tensor) -> Tensor:
        context = x.context
        x = ops.enter_tensor_parallel(ops.norm(x, self.norm))
        local = context.share("vocabulary", self.vocabulary)
        logits = ops.linear(x, self.hidden, local, split=context.tensor)
        if self.tied:
            # The embedding counts the table. If it is on another rank, this rank holds a copy.
            x.tape.parameters.pop()
        if self.capped:
            logits = ops.cap(logits)
        targets = Tensor(x.tape, x.rows, 1, ops.INDEX_BYTES, needs_gradient=False)
        return ops.cross_entropy(logits, targets)


@dataclass(frozen=True)
class Prediction:
    """Multi-token prediction layers: each adds the embedding and runs ``body`` on the states of the one before."""

    vocabulary: int
    hidden: int
    body: Module
    depth: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return the input and the states of all layers, concatenated."""
        states = [x]
        for i in range(self.depth):
            words = TokenEmbedding(self.vocabulary, self.hidden)(x)
            table = x.tape.parameters.pop()
            if i == 0:
                # The device holds a copy of the table, which belongs to the model's first layer.
                x.tape.parameters.append(table._replace(total=0.0))
            states.append(self.body(states[-1] + words))
        return ops.concatenate(states)


class DenoisingHead(DenoisingHeadLayer, frozen=True):
    """Final norm, linear layer to ``out_width`` numbers per token, and squared error."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the loss of every token."""
        return ops.squared_error(ops.linear(ops.norm(x, "layer"), self.hidden, self.out_width, bias=True))
