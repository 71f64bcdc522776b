"""Modules that process every token independently: the MLP, and a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.emulator import operators as ops
from pipeloom.emulator.tape import Tensor


@dataclass(frozen=True)
class MLP:
    """Two linear layers with an activation between them, or three if gated."""

    hidden: int
    inner: int
    gated: bool = True
    bias: bool = False
    fused: bool = True
    """Whether a gated activation is one kernel (saves only its input) or two (also save their results)."""

    def __call__(self, x: Tensor) -> Tensor:
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
        return ops.row_linear(y, inner, self.hidden, bias=self.bias)


@dataclass(frozen=True)
class MixtureOfExperts:
    """Experts, gated or not, ``chosen`` of ``experts`` for each token, and shared ones for all.

    With expert parallelism, tokens move to their experts, each of which may be divided too. Without it, tensor
    parallelism divides the experts like a dense MLP. ``imbalance`` is the load of the fullest device relative to the
    mean. With ``latent``, tokens are projected to that width before the experts and back after them; every device holds
    these projections whole.
    """

    hidden: int
    inner: int
    experts: int
    chosen: int
    shared_inner: int = 0
    imbalance: float = 1.0
    gated: bool = True
    latent: int | None = None
    shared_gate: bool = False
    bias: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        context = x.context
        spread = context.expert > 1
        scores = ops.route(ops.linear(x, self.hidden, self.experts, plain=True), self.experts, self.chosen)
        split = context.expert_tensor if spread else context.tensor
        inner = self.inner // split
        local = max(1, self.experts // context.expert)
        tokens = x if spread else ops.enter_tensor_parallel(x, plain=True)
        rows = tokens.rows * (self.chosen * self.imbalance)
        width, wide = self.latent or self.hidden, (2 if self.gated else 1) * inner
        narrow = tokens if self.latent is None else ops.linear(tokens, self.hidden, width, bias=self.bias)
        y = ops.exchange(ops.gather_rows(narrow, rows))
        y = ops.enter_expert_tensor(y) if spread else y
        up = ops.grouped_linear(y, width, wide, groups=self.experts, local_groups=local, split=split)
        y = ops.gated_activation(up) if self.gated else ops.activation(up)
        y = ops.grouped_linear(y, inner, width, groups=self.experts, local_groups=local, split=split)
        y = ops.leave_expert_tensor(y) if spread else y
        y = ops.weighted_sum(ops.exchange(y), scores, tokens.rows)
        if self.latent is not None:
            y = ops.linear(y, width, self.hidden, bias=self.bias)
        if not spread:
            y = ops.leave_tensor_parallel(y)
        return y + self._shared(x) if self.shared_inner else y

    def _shared(self, x: Tensor) -> Tensor:
        y = MLP(self.hidden, self.shared_inner, gated=self.gated, bias=self.bias)(x)
        return ops.multiply(y, ops.linear(x, self.hidden, 1, plain=True)) if self.shared_gate else y
