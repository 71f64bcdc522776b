"""The text encoder before a transformer: T5 or UMT5 of the `transformers` library, called prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.samples import Sample
from pipeloom.integrations.transformers.hollow import HollowRun, hollow, probes, run_with
from pipeloom.integrations.transformers.layers import record, run_to_block, stop
from pipeloom.runtime.model.model import Module, Part, Shape
from pipeloom.spec import TensorShape

_BIAS = 2
"""Index of the position bias among the arguments of T5's blocks. The first block computes it for all others."""
_T5, _UMT5 = "T5EncoderModel", "UMT5EncoderModel"


class TextFirst(nn.Module):
    """The embedding of tokens."""

    def __init__(self, shell: nn.Module) -> None:
        super().__init__()
        self.shell = shell

    def forward(self, ids: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
        """Embed the concatenated ids of all prompts."""
        del lengths
        return run_to_block(partial(self.shell, input_ids=ids[None]), HollowRun(stop))[0]


class TextBlock(nn.Module):
    """A block of the encoder, called once per prompt, because it computes positions from its input."""

    def __init__(self, inner: nn.Module, outline: nn.Module, bias: Any = None) -> None:
        super().__init__()
        self.inner, self.outline, self.bias = inner, outline, bias

    def forward(self, x: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
        """Map the concatenated hidden states of all prompts."""
        return torch.cat([self._one(each[None])[0] for each in torch.split(x, list(lengths))])

    def _one(self, x: Tensor) -> Tensor:
        # Those of the first block, in the library's own forward pass.
        ((args, kwargs),) = record(self.outline, lambda shell: shell(inputs_embeds=x), 1)
        if self.bias is not None:
            length = x.shape[1]
            bias = self.bias.compute_bias(length, length, device=x.device)
            args = (*args[: _BIAS - 1], bias, *args[_BIAS:])
        output = self.inner(x, *args, **kwargs)
        out: Tensor = output[0] if isinstance(output, tuple) else output
        return out


class TextLast(nn.Module):
    """The norm after the blocks."""

    def __init__(self, shell: nn.Module) -> None:
        super().__init__()
        self.shell = shell

    def forward(self, x: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
        """Return the embeddings of all prompts."""
        del lengths
        state = x[None]
        with run_with(HollowRun(lambda *_: state)):
            found: Tensor = self.shell(inputs_embeds=state.detach()).last_hidden_state
        return found[0]


def prompts_in(prompt: Callable[[Sample], Tensor], part: Part) -> Tensor:
    """Return the concatenated prompts of a part."""
    return torch.cat([prompt(part.samples[place]) for place, _ in part.instances])


def _lengths(prompt: Callable[[Sample], Tensor], part: Part) -> dict[str, Any]:
    return {"lengths": tuple(len(prompt(part.samples[place])) for place, _ in part.instances)}


def is_t5(encoder: Any) -> bool:
    """Return whether an encoder is one of the supported T5 classes."""
    return type(encoder).__name__ in (_T5, _UMT5)


def check_kind(kind: type) -> None:
    """Raise `InputError` for an unsupported encoder class."""
    if kind.__name__ not in (_T5, _UMT5):
        remedy = f"use {_T5} or {_UMT5}, or give samples prompt_embeds"
        raise InputError("text_encoder", f"is a {kind.__name__}", remedy)


def check_encoder(encoder: nn.Module, width: int) -> None:
    """Raise `InputError` for an encoder that is unsupported or does not match the transformer."""
    check_kind(type(encoder))
    config: Any = encoder.config
    if config.d_model != width:
        raise InputError("text_encoder", f"gives {config.d_model} numbers a token, the transformer takes {width}")
    if getattr(encoder, "is_activation_checkpointing", False):
        raise InputError("text_encoder", "recomputes its blocks itself", "turn it off; plans choose what is recomputed")


def layer_kinds(layers: Sequence[Any]) -> tuple[str, ...]:
    """Return the kinds of layers: those between the first and the last one by class of their block and size."""
    sizes = (sum(p.numel() for p in layer.parameters()) for layer in layers[1:-1])
    blocks = (f"{type(layer.inner).__name__}[{size}]" for layer, size in zip(layers[1:-1], sizes, strict=True))
    return ("first", *blocks, "last")


def text_module(encoder: Any, prompt: Callable[[Sample], Tensor], frozen: bool) -> Module:
    """Return the encoder as the module ``text``. ``prompt`` returns the ids of a sample's prompt."""
    stack, is_t5 = encoder.encoder, type(encoder).__name__ == _T5
    blocks = stack.block

    def shell(*keep: str) -> nn.Module:
        return hollow(stack, keep, {"block": probes("text", blocks, 2 if is_t5 else 0)})

    outline = shell().eval()
    layers: list[nn.Module] = [TextFirst(shell("embed_tokens"))]
    for place, block in enumerate(blocks):
        bias = None
        if is_t5 and place:
            # Only the table of the first block.
            bias = hollow(blocks[0].layer[0].SelfAttention, ("relative_attention_bias",), {})
        layers.append(TextBlock(block, outline, bias))
    layers.append(TextLast(shell("final_layer_norm")))
    shape: Shape = TensorShape(("tokens", encoder.config.d_model), str(stack.embed_tokens.weight.dtype)[6:])
    return Module(
        "text",
        layers,
        reads="text",
        hidden=shape,
        output=shape,
        inputs=partial(prompts_in, prompt),
        context=partial(_lengths, prompt),
        frozen=frozen,
        kinds=layer_kinds(layers),
    )
