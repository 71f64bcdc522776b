"""Modules that process every token independently: the MLP, and a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.emulator import experts as expert_ops
from pipeloom.emulator import operators as ops
from pipeloom.emulator.tape import Tensor
from pipeloom.errors import InputError
from pipeloom.spec.architecture import ExpertsMixer, MLPMixer


class MLP(MLPMixer, frozen=True, kw_only=True):
    """Two linear layers with an activation between them, or three if gated."""

    hidden: int
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


class _Held(NamedTuple):
    """The experts in all and on this device, over how many devices each is divided, and whether they have biases."""

    experts: int
    local: int
    split: int
    bias: bool

    def linear(self, x: Tensor, in_width: int, out_width: int) -> Tensor:
        """Multiply rows by the weights of their expert."""
        return ops.grouped_linear(
            x, in_width, out_width, groups=self.experts, local_groups=self.local, split=self.split, bias=self.bias
        )


def _activate(x: Tensor, *, gated: bool, clamped: bool = False) -> Tensor:
    """Apply the activation of experts. Where one kernel computes quantized experts, the gate is part of it."""
    context = x.context
    if not gated:
        return ops.activation(x)
    if context.fused_experts and context.quantization is not None:
        return expert_ops.fused_gate(x)
    return ops.gated_activation(expert_ops.clamp(x) if clamped and not context.fused_experts else x)


class MixtureOfExperts(ExpertsMixer, frozen=True, kw_only=True):
    """Experts, gated or not, ``chosen`` of ``experts`` for each token, and shared ones for all.

    With expert parallelism, tokens move to their experts, each of which may be divided too. Without it, tensor
    parallelism divides the experts like a dense MLP. ``imbalance`` is the load of the fullest device relative to the
    mean. With ``latent``, tokens are projected to that width before the experts and back after them; every device holds
    these projections whole.
    """

    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        spread = x.context.expert > 1
        scores = expert_ops.route(ops.linear(x, self.hidden, self.experts, plain=True), self.experts, self.chosen)
        y = self.run(x if spread else ops.enter_tensor_parallel(x, plain=True), scores, biased=self.expert_bias)
        if not spread:
            y = ops.leave_tensor_parallel(y)
        return y + self._shared(x) if self.shared_inner else y

    def run(self, tokens: Tensor, scores: Tensor, *, biased: bool) -> Tensor:
        """Run the routed experts on tokens; without expert parallelism, on all tokens of tensor-parallel peers.

        ``biased`` is whether the biases of the last product are added.
        """
        context = tokens.context
        spread = context.expert > 1
        split = context.expert_tensor if spread else context.tensor
        inner, local = self.inner // split, self.experts // context.expert
        if local * context.expert != self.experts:
            raise InputError(
                "experts", f"{self.experts} is not a multiple of expert parallelism {context.expert}", "use a divisor"
            )
        if inner * split != self.inner:
            raise InputError("expert width", f"{self.inner} is not a multiple of {split} devices", "use a divisor")
        rows = tokens.rows * (self.chosen * self.imbalance)
        width, wide = self.latent or self.hidden, (2 if self.gated else 1) * inner
        narrow = tokens if self.latent is None else ops.linear(tokens, self.hidden, width, bias=self.bias)
        y = expert_ops.dispatch(narrow, rows, self.chosen, local, self.chosen_groups / self.groups)
        y = expert_ops.enter_expert_tensor(y) if spread else y
        held = _Held(self.experts, local, split, self.expert_bias)
        y = _activate(held.linear(y, width, wide), gated=self.gated, clamped=self.clamped)
        y = held.linear(y, inner, width)
        if biased:
            y = expert_ops.add_expert_bias(y, local)
        y = expert_ops.leave_expert_tensor(y) if spread else y
        y = expert_ops.combine(y, scores, tokens.rows, self.chosen, local, self.chosen_groups / self.groups)
        return y if self.latent is None else ops.linear(y, width, self.hidden, bias=self.bias)

    def _shared(self, x: Tensor) -> Tensor:
        y = MLP(self.shared_inner, gated=self.gated, bias=self.bias, hidden=self.hidden)(x)
        return ops.multiply(y, ops.linear(x, self.hidden, 1, plain=True)) if self.shared_gate else y
