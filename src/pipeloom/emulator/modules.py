"""Modules: models described as in PyTorch, composed of operators.

A module is called on symbolic tensors and records operators on their tape; it holds sizes, never numbers.
Write one's own by subclassing `Module` and composing others in ``forward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeloom.emulator import operators as ops
from pipeloom.emulator.size import CAUSAL_PAIRS, INSTANCES, TOKEN_PAIRS, Size
from pipeloom.emulator.tape import Tensor


class Module(Protocol):
    """Anything that maps one symbolic tensor to another."""

    def __call__(self, x: Tensor) -> Tensor:
        """Record the module's operators and return its output."""
        ...


@dataclass(frozen=True)
class Linear:
    """A whole linear layer on every device."""

    in_width: int
    out_width: int
    bias: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Rows times ``in_width`` to rows times ``out_width``."""
        return ops.linear(x, self.in_width, self.out_width, bias=self.bias)


@dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm."""

    kind: ops.NormKind = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        return ops.norm(x, self.kind)


@dataclass(frozen=True)
class Sequential:
    """Modules one after another."""

    parts: tuple[Module, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Feed each the result of the one before."""
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True)
class Residual:
    """``x + mixer(norm(x))``, the building block of transformers."""

    mixer: Module
    norm: ops.NormKind = "rms"

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        return x + self.mixer(ops.norm(x, self.norm))


@dataclass(frozen=True)
class Modulated:
    """``x + gate * mixer(modulate(norm(x)))`` of diffusion transformers (adaLN).

    Shift, scale and gate are one vector per instance each. ``projection`` says whether the block computes
    them from the condition with a linear layer of its own; otherwise it only holds a table that is added to
    one shared by all blocks, as in adaLN-single.
    """

    mixer: Module
    norm: ops.NormKind = "layer"
    projection: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        width = int(x.width)
        condition = x.tape.input(width, INSTANCES, needs_gradient=False)
        if self.projection:
            three = ops.linear(ops.activation(condition), width, 3 * width, bias=True)
        else:
            x.tape.parameter(3 * width)
            three = x.tape.input(3 * width, INSTANCES, needs_gradient=False)
        y = self.mixer(ops.modulate(ops.norm(x, self.norm), three))
        return x + ops.modulate(y, three)


@dataclass(frozen=True)
class Attention:
    """Self-attention with ``kv_heads`` groups (equal to ``heads``: multi-head), causal or not.

    Lengths come from the workload: each of its sequences attends within itself, so packed sequences of
    unequal length need nothing more.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    causal: bool = True
    bias: bool = False
    output_bias: bool = False
    rotary: bool = True
    norm_heads: bool = False
    fused: bool = True
    """Whether queries, keys and values come from one product."""

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        context = x.context
        heads = context.share("attention heads", self.heads)
        # With fewer key-value heads than devices each device holds a copy of one.
        kv_heads = max(1, self.kv_heads // context.tensor)
        x = ops.enter_tensor_parallel(x)
        widths = [heads * self.head_width, kv_heads * self.head_width, kv_heads * self.head_width]
        if self.fused:
            widths = [sum(widths)]
        inputs = [ops.linear(x, self.hidden, w, bias=self.bias, split=context.tensor) for w in widths]
        if self.norm_heads:
            x.tape.parameter(2 * self.head_width)
        if self.rotary:
            turned = (heads + kv_heads) * self.head_width
            parts = [turned] if self.fused else [widths[0], widths[1]]
            inputs = [ops.rotary(t, w) for t, w in zip(inputs, parts, strict=False)] + inputs[len(parts) :]
        last = inputs[-1]
        inputs = [*inputs[:-1], ops.share_keys(last, 2 * kv_heads * self.head_width)]
        pairs = (CAUSAL_PAIRS if self.causal else TOKEN_PAIRS) / context.context
        y = ops.attention(
            inputs,
            pairs,
            heads=heads,
            query_key_width=self.head_width,
            value_width=self.head_width,
            rows=x.rows,
            causal=self.causal,
        )
        y = ops.linear(y, heads * self.head_width, self.hidden, bias=self.output_bias, split=context.tensor)
        return ops.leave_tensor_parallel(y)


@dataclass(frozen=True)
class CrossAttention:
    """Attention of each token to a condition of ``length`` tokens per instance."""

    hidden: int
    heads: int
    head_width: int
    length: int
    condition_width: int
    bias: bool = False
    trains_condition: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        context = x.context
        heads = context.share("attention heads", self.heads)
        width = heads * self.head_width
        condition = x.tape.input(
            self.condition_width, INSTANCES * self.length, needs_gradient=self.trains_condition
        )
        x = ops.enter_tensor_parallel(x)
        query = ops.linear(x, self.hidden, width, bias=self.bias, split=context.tensor)
        keys = ops.linear(condition, self.condition_width, 2 * width, bias=self.bias, split=context.tensor)
        pairs: Size = x.rows * self.length
        y = ops.attention(
            [query, keys], pairs, heads=heads, query_key_width=self.head_width, value_width=self.head_width,
            rows=x.rows,
        )  # fmt: skip
        return ops.leave_tensor_parallel(
            ops.linear(y, width, self.hidden, bias=self.bias, split=context.tensor)
        )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values through a narrow latent vector."""

    hidden: int
    heads: int
    kv_rank: int
    query_rank: int | None
    nope_width: int
    rope_width: int
    value_width: int
    causal: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        context = x.context
        heads = context.share("attention heads", self.heads)
        query_key = self.nope_width + self.rope_width
        split = context.tensor
        if self.query_rank is None:
            x = ops.enter_tensor_parallel(x)
            query = ops.linear(x, self.hidden, heads * query_key, split=split)
        else:
            # The narrow projections are whole on every device, on its own tokens.
            narrow = ops.norm(ops.linear(x, self.hidden, self.query_rank), "rms")
            query = ops.linear(
                ops.enter_tensor_parallel(narrow), self.query_rank, heads * query_key, split=split
            )
        latent = ops.linear(x, self.hidden, self.kv_rank + self.rope_width)
        wide = latent if self.query_rank is None else ops.enter_tensor_parallel(latent)
        x.tape.parameter(self.kv_rank)  # the norm of the latent, fused with its projection
        keys = ops.linear(wide, self.kv_rank, heads * (self.nope_width + self.value_width), split=split)
        query = ops.rotary(query, heads * self.rope_width)
        keys = ops.share_keys(keys, keys.width)
        pairs = (CAUSAL_PAIRS if self.causal else TOKEN_PAIRS) / context.context
        y = ops.attention(
            [query, keys], pairs, heads=heads, query_key_width=query_key, value_width=self.value_width,
            rows=query.rows, causal=self.causal,
        )  # fmt: skip
        return ops.leave_tensor_parallel(ops.linear(y, heads * self.value_width, self.hidden, split=split))


@dataclass(frozen=True)
class MLP:
    """Two linear layers with an activation between them, or three where gated."""

    hidden: int
    inner: int
    gated: bool = True
    bias: bool = False
    fused: bool = True
    """Whether a gated activation is one kernel (saves its input alone) or two (saves their results too)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        context = x.context
        inner = context.share("mlp width", self.inner)
        x = ops.enter_tensor_parallel(x)
        split = context.tensor
        if not self.gated:
            y = ops.activation(ops.linear(x, self.hidden, inner, bias=self.bias, split=split))
        elif self.fused:
            y = ops.gated_activation(ops.linear(x, self.hidden, 2 * inner, bias=self.bias, split=split))
        else:
            gate = ops.linear(x, self.hidden, inner, bias=self.bias, split=split)
            up = ops.linear(x, self.hidden, inner, bias=self.bias, split=split)
            y = ops.multiply(ops.activation(gate), up)
        return ops.leave_tensor_parallel(ops.linear(y, inner, self.hidden, bias=self.bias, split=split))


@dataclass(frozen=True)
class MixtureOfExperts:
    """Gated experts, ``chosen`` of ``experts`` for each token, and shared ones for all.

    With expert parallelism tokens travel to their experts; without it the experts are divided over tensor
    parallelism like a dense MLP. ``imbalance`` is how many times the mean load the fullest device gets.
    """

    hidden: int
    inner: int
    experts: int
    chosen: int
    shared_inner: int = 0
    imbalance: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        context = x.context
        spread = context.expert > 1
        scores = ops.route(ops.linear(x, self.hidden, self.experts), self.experts, self.chosen)
        split = 1 if spread else context.tensor
        inner = self.inner // split
        local = max(1, self.experts // context.expert)
        tokens = x if spread else ops.enter_tensor_parallel(x)
        rows = tokens.rows * (self.chosen * self.imbalance)
        y = ops.exchange(ops.gather_rows(tokens, rows))
        up = ops.grouped_linear(
            y, self.hidden, 2 * inner, groups=self.experts, local_groups=local, split=split
        )
        y = ops.gated_activation(up)
        y = ops.grouped_linear(y, inner, self.hidden, groups=self.experts, local_groups=local, split=split)
        y = ops.weighted_sum(ops.exchange(y), scores, tokens.rows)
        if not spread:
            y = ops.leave_tensor_parallel(y)
        if self.shared_inner:
            y = y + MLP(self.hidden, self.shared_inner)(x)
        return y


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 mixer: projection, short convolution, chunked scan, gated norm, projection."""

    hidden: int
    heads: int
    head_width: int
    state: int
    groups: int = 1
    kernel: int = 4
    chunk: int = 256

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape."""
        context = x.context
        split = context.tensor
        heads = context.share("state-space heads", self.heads)
        groups = max(1, self.groups // split)
        inner = heads * self.head_width
        x = ops.enter_tensor_parallel(x)
        mixed = inner + 2 * groups * self.state
        y = ops.linear(x, self.hidden, inner + mixed + heads, split=split)
        y = ops.activation(ops.depthwise(y, mixed, self.kernel))
        y = ops.scan(
            y, heads=heads, head_width=self.head_width, groups=groups, state=self.state, chunk=self.chunk
        )
        y = ops.norm(y, "rms", split=split)
        return ops.leave_tensor_parallel(ops.linear(y, inner, self.hidden, split=split))


@dataclass(frozen=True)
class TokenEmbedding:
    """Table look-up divided over tensor parallelism by vocabulary, optionally with learned positions."""

    vocabulary: int
    hidden: int
    positions: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """From token numbers (8 bytes each) to activations; ``x`` gives tape and rows."""
        context = x.context
        rows = x.rows * context.row_split
        indices = Tensor(x.tape, rows, 1, ops.INDEX_BYTES, needs_gradient=False)
        if self.positions:
            x.tape.parameter(self.positions * self.hidden)
        return ops.leave_tensor_parallel(ops.embedding(indices, self.vocabulary, self.hidden))


@dataclass(frozen=True)
class PatchEmbedding:
    """Pixels of a patch to an activation, with ``positions`` learned position vectors."""

    patch_numbers: int
    hidden: int
    positions: int = 0
    bias: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` gives tape and rows; no gradient flows to pixels."""
        pixels = x.tape.input(self.patch_numbers, x.rows, needs_gradient=False)
        if self.positions:
            x.tape.parameter(self.positions * self.hidden)
        return ops.linear(pixels, self.patch_numbers, self.hidden, bias=self.bias)


@dataclass(frozen=True)
class PatchMerger:
    """Join ``factor`` neighbouring patches into one token by a two-layer MLP (Qwen2-VL)."""

    hidden: int
    factor: int
    out_width: int
    inner: int | None = None
    norm: ops.NormKind = "layer"

    def __call__(self, x: Tensor) -> Tensor:
        """Rows over ``factor``, width ``out_width``."""
        wide = self.hidden * self.factor
        context = x.context
        y = ops.regroup(ops.norm(x, self.norm), self.factor)
        inner = context.share("merger width", self.inner or wide)
        y = ops.enter_tensor_parallel(y)
        y = ops.activation(ops.linear(y, wide, inner, bias=True, split=context.tensor))
        return ops.leave_tensor_parallel(
            ops.linear(y, inner, self.out_width, bias=True, split=context.tensor)
        )


@dataclass(frozen=True)
class Projector:
    """Adapter between two modules: linear, activation, linear."""

    in_width: int
    out_width: int

    def __call__(self, x: Tensor) -> Tensor:
        """Same rows, width ``out_width``."""
        y = ops.activation(ops.linear(x, self.in_width, self.out_width, bias=True))
        return ops.linear(y, self.out_width, self.out_width, bias=True)


@dataclass(frozen=True)
class LanguageHead:
    """Final norm, product with the vocabulary, and the loss. ``tied``: the weights are the embedding's."""

    hidden: int
    vocabulary: int
    tied: bool = False
    norm: ops.NormKind = "rms"
    loss_bytes: int = 4

    def __call__(self, x: Tensor) -> Tensor:
        """The loss of every token."""
        context = x.context
        x = ops.enter_tensor_parallel(ops.norm(x, self.norm))
        local = context.share("vocabulary", self.vocabulary)
        logits = ops.linear(x, self.hidden, local, split=context.tensor)
        if self.tied:
            # The table is counted where it is first used; where that is another rank it holds a copy.
            x.tape.parameters.pop()
        targets = Tensor(x.tape, x.rows, 1, ops.INDEX_BYTES, needs_gradient=False)
        return ops.cross_entropy(logits, targets, self.loss_bytes)


@dataclass(frozen=True)
class DenoisingHead:
    """Final norm, linear layer to ``out_width`` numbers a token, and squared error."""

    hidden: int
    out_width: int

    def __call__(self, x: Tensor) -> Tensor:
        """The loss of every token."""
        return ops.squared_error(ops.linear(ops.norm(x, "layer"), self.hidden, self.out_width, bias=True))
