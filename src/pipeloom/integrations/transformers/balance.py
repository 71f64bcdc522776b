"""The loss that balances experts: of each sequence the library's own, in sums that pass from layer to layer.

The library's is the number of experts times the sum, over experts, of the share of choices times the mean probability,
both over all tokens of all layers with experts: no sum of what single layers could reckon. So each layer adds its
choices and probabilities to a stream with a row for each sequence, and the last layer makes losses of it.
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
from pipeloom.runtime.model.model import Emit


@dataclass(frozen=True)
class Balancing:
    """What the library's loss depends on.

    ``routers`` has of every block that chooses experts the path of what gives logits for it, and which of its outputs.
    """

    routers: dict[int, tuple[str, int]]
    num_experts: int
    top_k: int
    weight: float

    @property
    def width(self) -> int:
        """Numbers of a sequence: of each expert, choices and probability."""
        return 2 * self.num_experts


def stream(place: int) -> str:
    """Return the name of what the block of that place adds to; blocks are of one kind whatever their place."""
    return f"experts__{place}"


def find_balancing(trunk: Any, blocks: Sequence[nn.Module], config: Any) -> Balancing | None:
    """Return what balances experts; None: nothing does.

    Raises
    ------
    InputError
        It is asked for, and cannot be found.
    """
    if not getattr(config, "output_router_logits", False):
        return None
    entity = "model.config.output_router_logits"
    recorder = (getattr(trunk, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type):
        raise InputError(entity, "is set, and what the library takes for it is not found", "set it to False")
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
        raise InputError(entity, "is set, and the weight of its loss is not found", "set it to False")
    return Balancing(routers, experts, top_k, weight) if routers else None


class Choosing(LibraryLayer):
    """A block with experts, which tells what was chosen."""

    def __init__(self, inner: LibraryLayer, balancing: Balancing, place: int, before: int | None) -> None:
        super().__init__()
        self.inner, self.balancing, self.place, self.before = inner, balancing, place, before

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return self.inner.library_name(parameter.removeprefix("inner."))

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Emit:
        """Give the state, and as a stream the sums of this block and of those before."""
        sums = None if self.before is None else tensors.pop(stream(self.before))
        block: Any = self.inner
        with self._noted(block.inner) as logits:
            state = self.inner(x, calls=calls, **tensors)
        mine = torch.stack([self._sums(each) for each in torch.split(logits[0], calls.outer["lengths"])])
        return Emit(state, {stream(self.place): mine if sums is None else sums + mine})

    @contextmanager
    def _noted(self, block: nn.Module) -> Iterator[list[Tensor]]:
        """Inside the block the list gets what the router gives."""
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


class Balanced(LibraryLayer):
    """The last layer of a language model, which makes a loss of all choices."""

    def __init__(self, inner: LibraryLayer, balancing: Balancing) -> None:
        super().__init__()
        self.inner, self.balancing = inner, balancing

    def library_name(self, parameter: str) -> str:
        """As `LibraryLayer`."""
        return self.inner.library_name(parameter.removeprefix("inner."))

    def forward(self, x: Tensor, *, calls: Calls, **tensors: Tensor) -> Emit:
        """Give logits, and the sum of the sequences' losses, each as often as it has targets."""
        balancing = self.balancing
        sums = tensors.pop(stream(max(balancing.routers)))
        targets = calls.forward(tensors)["targets"]
        tokens = sums.new_tensor(calls.outer["lengths"])[:, None] * len(balancing.routers)
        chosen, likely = torch.split(sums / tokens, balancing.num_experts, dim=1)
        losses = balancing.num_experts * (chosen * likely).sum(1)
        loss = balancing.weight * (losses * targets.to(losses.dtype)).sum()
        return Emit(self.inner(x, calls=calls, **tensors), loss=loss)
