"""The library's load-balancing loss of experts, computed per sequence across layers.

The library's loss is the number of experts times the sum, over experts, of the fraction of tokens routed to an expert
times its mean router probability. Both are means over all tokens of all layers with experts, so the loss is not a sum
of losses of layers. Each layer therefore adds its counts and probabilities to a stream with one row per sequence, and
the last layer computes the loss from the totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.transformers.layers import LibraryLayer
from pipeloom.integrations.transformers.packed import Calls
from pipeloom.runtime.model.model import Emit, Shape
from pipeloom.spec import TensorShape


@dataclass(frozen=True)
class Balancing:
    """Parameters of the load-balancing loss.

    ``routers`` maps the number of each block with experts to the path of its router and the index of the router output
    that holds the logits.
    """

    routers: dict[int, tuple[str, int]]
    num_experts: int
    top_k: int
    weight: float

    @property
    def width(self) -> int:
        """Numbers per sequence in the stream: a count and a probability for each expert."""
        return 2 * self.num_experts


def stream(place: int) -> str:
    """Return the name of the stream that a block emits."""
    return f"experts__{place}"


def find_balancing(trunk: Any, blocks: Sequence[nn.Module], config: Any) -> Balancing | None:
    """Return the parameters of the load-balancing loss, or None if the config does not enable it.

    Raise `InputError` if it does, but the routers or the weight are not found.
    """
    if not getattr(config, "output_router_logits", False):
        return None
    entity = "model.config.output_router_logits"
    recorder = (getattr(trunk, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type):
        raise InputError(entity, "is set, but the library's record of router logits is not found", "set it to False")
    routers = {}
    for place, block in enumerate(blocks):
        found = [path for path, module in block.named_modules() if isinstance(module, kind)]
        if len(found) > 1:
            raise InputError(entity, f"is set, and block {place} has {len(found)} routers", "set it to False")
        if found:
            routers[place] = (found[0], getattr(recorder, "index", 0))
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    weight, top_k = getattr(config, "router_aux_loss_coef", None), getattr(config, "num_experts_per_tok", None)
    if experts is None or weight is None or top_k is None:
        raise InputError(entity, "is set, but the weight of its loss is not found", "set it to False")
    return Balancing(routers, experts, top_k, weight) if routers else None


def check_balance(config: Any) -> None:
    """Raise `InputError` if a configuration asks for the loss, for models whose layers do not compute it."""
    if getattr(config, "output_router_logits", False):
        problem = "is set, but the balancing loss of this model is not supported"
        raise InputError("model.config.output_router_logits", problem, "set it to False")


class RoutedBlock(LibraryLayer):
    """A block with experts that also emits its routing counts and probabilities."""

    def __init__(self, inner: LibraryLayer, balancing: Balancing, place: int, before: int | None) -> None:
        super().__init__()
        self.inner, self.balancing, self.place, self.before = inner, balancing, place, before

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return self.inner.library_name(parameter.removeprefix("inner."))

    def forward(self, x: Tensor, *, calls: tuple[Calls, ...], **tensors: Tensor) -> Emit:
        """Return the hidden state and, as a stream, the sums over this block and the blocks before it."""
        sums = None if self.before is None else tensors.pop(stream(self.before))
        block: Any = self.inner
        with self._noted(block.inner) as logits:
            state = self.inner(x, calls=calls, **tensors)
        mine = torch.stack([self._sums(each) for each in torch.split(logits[0], calls[0].outer["lengths"])])
        return Emit(state, {stream(self.place): mine if sums is None else sums + mine})

    @contextmanager
    def _noted(self, block: nn.Module) -> Iterator[list[Tensor]]:
        """Record the router logits of the block in the list."""
        found: list[Tensor] = []
        path, index = self.balancing.routers[self.place]

        def note(_: nn.Module, __: Any, output: Any) -> None:
            found.append(output[index] if isinstance(output, tuple) else output)

        hook = block.get_submodule(path).register_forward_hook(note)
        try:
            yield found
        finally:
            hook.remove()

    def _sums(self, logits: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, dim=-1).float()
        chosen = torch.topk(probabilities, self.balancing.top_k, dim=-1).indices
        counts = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0).sum(0)
        return torch.cat([counts, probabilities.sum(0)])


class BalancingHead(LibraryLayer):
    """The last layer of a language model, which also computes the load-balancing loss."""

    def __init__(self, inner: LibraryLayer, balancing: Balancing) -> None:
        super().__init__()
        self.inner, self.balancing = inner, balancing

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return self.inner.library_name(parameter.removeprefix("inner."))

    def forward(self, x: Tensor, *, calls: tuple[Calls, ...], **tensors: Tensor) -> Emit:
        """Return logits, and the sum of the losses of sequences, each weighted by its number of targets."""
        balancing = self.balancing
        sums = tensors.pop(stream(max(balancing.routers)))
        targets = calls[0].forward(tensors)["targets"]
        tokens = sums.new_tensor(calls[0].outer["lengths"])[:, None] * len(balancing.routers)
        chosen, likely = torch.split(sums / tokens, balancing.num_experts, dim=1)
        losses = balancing.num_experts * (chosen * likely).sum(1)
        loss = balancing.weight * (losses * targets.to(losses.dtype)).sum()
        return Emit(self.inner(x, calls=calls, **tensors), loss=loss)


def balance(
    layers: list[LibraryLayer], balancing: Balancing, dtype: torch.dtype
) -> tuple[dict[int, dict[str, Shape | None]], dict[int, tuple[str, ...]]]:
    """Wrap layers so that they compute the load-balancing loss. Return the streams that each emits and takes."""
    shape = TensorShape(("instances", balancing.width), "float64" if dtype is torch.float64 else "float32")
    emits: dict[int, dict[str, Shape | None]] = {}
    takes: dict[int, tuple[str, ...]] = {}
    before: int | None = None
    for place in balancing.routers:
        layers[place + 1] = RoutedBlock(layers[place + 1], balancing, place, before)
        emits[place + 1] = {stream(place): shape}
        if before is not None:
            takes[place + 1] = (stream(before),)
        before = place
    layers[-1] = BalancingHead(layers[-1], balancing)
    takes[len(layers) - 1] = (stream(max(balancing.routers)),)
    return emits, takes
