"""Modules that mix tokens: forms of attention, and state spaces."""

from __future__ import annotations

from pipeloom.emulator import operators as ops
from pipeloom.emulator.size import CAUSAL_PAIRS, INSTANCES, TOKEN_PAIRS, Size, window_pairs
from pipeloom.emulator.tape import Tensor
from pipeloom.spec.architecture import AttentionMixer, CrossAttentionMixer, LatentAttentionMixer, Mamba2Mixer


class Attention(AttentionMixer, frozen=True, kw_only=True):
    """Self-attention with ``kv_heads`` groups (equal to ``heads``: multi-head), causal or not.

    Lengths come from the workload. Each sequence attends to itself, so packed sequences of unequal length need nothing
    more.
    """

    hidden: int
    fused: bool = True
    """Whether one product computes queries, keys and values."""

    def __call__(self, x: Tensor) -> Tensor:
        context = x.context
        heads = context.share("attention heads", self.heads)
        # If there are fewer key-value heads than devices, each device holds a copy of one.
        kv_heads = max(1, self.kv_heads // context.tensor)
        x = ops.enter_tensor_parallel(x)
        widths = [heads * self.head_width, kv_heads * self.head_width, kv_heads * self.head_width]
        biases = [w * self.qkv_bias for w in widths]
        if not self.key_bias:
            biases[1] = 0
        if self.fused:
            widths, biases = [sum(widths)], [sum(biases)]
        inputs = [
            ops.linear(x, self.hidden, w, bias=b, split=context.tensor) for w, b in zip(widths, biases, strict=True)
        ]
        if self.norm_heads:
            inputs = self._norm_heads(inputs, heads, kv_heads)
        if self.norm_whole:
            x.tape.parameter((self.heads + self.kv_heads) * self.head_width, context.tensor)
        if self.rotary:
            turned = (heads + kv_heads) * self.head_width
            parts = [turned] if self.fused else [widths[0], widths[1]]
            turn = ops.scaled_rotary if self.rotary_scaled else ops.rotary
            inputs = [turn(t, w) for t, w in zip(inputs, parts, strict=False)] + inputs[len(parts) :]
        last = inputs[-1]
        inputs = [*inputs[:-1], ops.share_keys(last, 2 * kv_heads * self.head_width)]
        pairs = CAUSAL_PAIRS if self.causal else TOKEN_PAIRS
        if self.window is not None:
            pairs = window_pairs(self.window, causal=self.causal)
        y = ops.attention(
            inputs,
            pairs / context.context,
            heads=heads,
            query_key_width=self.head_width,
            value_width=self.head_width,
            rows=x.rows,
            causal=self.causal,
        )
        if self.output_gate:
            width = heads * self.head_width
            y = ops.multiply(y, ops.linear(x, self.hidden, width, bias=self.qkv_bias, split=context.tensor))
        return ops.row_linear(y, heads * self.head_width, self.hidden, bias=self.output_bias)

    def _norm_heads(self, inputs: list[Tensor], heads: int, kv_heads: int) -> list[Tensor]:
        """Normalize queries and keys, which have weights of their own."""
        width = self.head_width
        if self.fused:
            return [ops.norm_heads(inputs[0], heads + kv_heads, width, 2 * width)]
        query, key, value = inputs
        return [ops.norm_heads(query, heads, width, width), ops.norm_heads(key, kv_heads, width, width), value]


class CrossAttention(CrossAttentionMixer, frozen=True, kw_only=True):
    """Attention of each token to a condition of ``condition_tokens`` tokens per instance."""

    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        context = x.context
        heads = context.share("attention heads", self.heads)
        width = heads * self.head_width
        condition = x.tape.input(self.condition_width, INSTANCES * self.condition_tokens)
        x = ops.enter_tensor_parallel(x)
        query = ops.linear(x, self.hidden, width, bias=self.bias, split=context.tensor)
        keys = ops.linear(condition, self.condition_width, 2 * width, bias=self.bias, split=context.tensor)
        pairs: Size = x.rows * self.condition_tokens
        y = ops.attention(
            [query, keys], pairs, heads=heads, query_key_width=self.head_width, value_width=self.head_width, rows=x.rows
        )
        return ops.row_linear(y, width, self.hidden, bias=self.bias)


class LatentAttention(LatentAttentionMixer, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2): keys and values pass through a narrow latent vector."""

    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        context = x.context
        heads = context.share("attention heads", self.heads)
        query_key = self.nope_width + self.rope_width
        split = context.tensor
        if self.query_rank is None:
            x = ops.enter_tensor_parallel(x)
            query = ops.linear(x, self.hidden, heads * query_key, split=split)
        else:
            # Every device holds the narrow projections whole, for its own tokens.
            narrow = ops.norm(ops.linear(x, self.hidden, self.query_rank, bias=self.bias), "rms")
            query = ops.linear(ops.enter_tensor_parallel(narrow), self.query_rank, heads * query_key, split=split)
        latent = ops.linear(x, self.hidden, self.kv_rank + self.rope_width, bias=self.bias)
        wide = latent if self.query_rank is None else ops.enter_tensor_parallel(latent)
        x.tape.parameter(self.kv_rank)  # the norm of the latent, fused with its projection
        keys = ops.linear(wide, self.kv_rank, heads * (self.nope_width + self.value_width), split=split)
        query = ops.rotary(query, heads * self.rope_width)
        keys = ops.share_keys(keys, keys.width + heads * self.rope_width)
        pairs = CAUSAL_PAIRS / context.context
        y = ops.attention(
            [query, keys],
            pairs,
            heads=heads,
            query_key_width=query_key,
            value_width=self.value_width,
            rows=query.rows,
            causal=True,
        )
        return ops.row_linear(y, heads * self.value_width, self.hidden, bias=self.bias)


class Mamba2(Mamba2Mixer, frozen=True, kw_only=True):
    """Mamba-2 mixer: projection, short convolution, chunked scan, gated norm, projection."""

    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        context = x.context
        split = context.tensor
        heads = context.share("state-space heads", self.heads)
        groups = max(1, self.groups // split)
        inner = heads * self.head_width
        x = ops.enter_tensor_parallel(x)
        mixed = inner + 2 * groups * self.state
        y = ops.exchange_heads(ops.linear(x, self.hidden, inner + mixed + heads, bias=self.bias, split=split))
        y = ops.depthwise(y, mixed, self.kernel, bias=self.kernel_bias)
        if context.eager:  # otherwise the convolution's kernel has it
            y = ops.activation(y)
        y = ops.scan(y, heads=heads, head_width=self.head_width, groups=groups, state=self.state, chunk=self.chunk)
        y = ops.exchange_heads(y)
        y = ops.norm(y, "rms", split=split)
        return ops.row_linear(y, inner, self.hidden, bias=self.bias)
