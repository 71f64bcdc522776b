"""A small vision transformer and a small causal language model, as lists of layers.

Each layer is initialized from its own seed. So a process can build only the layers of its chunks, with the same weights
as in all other processes.

The hidden state of ``vision`` has shape ``(instances, 16, 64)``, and its output ``(instances, 1, 64)``. The hidden
state of ``lm`` has shape ``(tokens, 64)``: the documents of a microbatch are concatenated without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from . import data
from .data import PATCHES_PER_IMAGE, PIXELS_PER_PATCH, TOKENS_PER_IMAGE, Document

VISION_DIM = 64
VISION_HEADS = 4
VISION_BLOCKS = 4
LM_DIM = 64
LM_HEADS = 4
LM_BLOCKS = 8
MLP_RATIO = 4
WORD_STD = 0.5
LINE_STD = 1.0


class Part(Protocol):
    """One microbatch, or a sub-microbatch of its images."""

    @property
    def samples(self) -> Sequence[Document]:
        """The documents."""

    @property
    def instances(self) -> Sequence[tuple[int, int]]:
        """The images as pairs: index of the sample, index of the image in it."""


class Block(nn.Module):
    """A pre-norm transformer block over ``(batch, tokens, dim)``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, MLP_RATIO * dim)
        self.narrow = nn.Linear(MLP_RATIO * dim, dim)

    def transform(self, x: Tensor, mask: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        """Apply attention and MLP.

        Parameters
        ----------
        x
            Hidden state, ``(batch, tokens, dim)``.
        mask
            True where the token of the row may attend to that of the column. None for all.
        extra
            Added to the queries, keys and values, ``(tokens, 3 * dim)``.
        """
        batch, tokens, dim = x.shape
        heads = self.qkv(self.attention_norm(x))
        if extra is not None:
            heads = heads + extra
        heads = heads.view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        out: Tensor = x + self.narrow(functional.gelu(self.widen(self.mlp_norm(x))))
        return out


def divide(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the MLP of a block over tensor-parallel ranks. Attention and all other layers are replicated."""
    # Slow to import, and only needed with tensor parallelism.
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if isinstance(layer, Block):
        parallelize_module(layer, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})


class PatchEmbedding(nn.Module):
    """Layer 0 of vision: projects patches and adds learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(PIXELS_PER_PATCH, VISION_DIM)
        self.position = nn.Parameter(torch.randn(PATCHES_PER_IMAGE, VISION_DIM) * 0.1)

    def forward(self, patches: Tensor) -> Tensor:
        """Take ``(instances, PATCHES_PER_IMAGE, PIXELS_PER_PATCH)``."""
        out: Tensor = self.project(patches) + self.position
        return out


class VisionBlock(Block):
    """A middle layer of vision: each patch attends to all patches of its image."""

    def __init__(self) -> None:
        super().__init__(VISION_DIM, VISION_HEADS)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``(instances, PATCHES_PER_IMAGE, VISION_DIM)``."""
        return self.transform(x)


class PatchMerger(nn.Module):
    """The last layer of vision: merges patches into the tokens of the image."""

    def __init__(self) -> None:
        super().__init__()
        merged = PATCHES_PER_IMAGE // TOKENS_PER_IMAGE * VISION_DIM
        self.norm = nn.LayerNorm(VISION_DIM)
        self.project = nn.Linear(merged, LM_DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(instances, TOKENS_PER_IMAGE, LM_DIM)``."""
        merged = self.norm(x).view(len(x), TOKENS_PER_IMAGE, self.project.in_features)
        out: Tensor = self.project(merged)
        return out


class TokenEmbedding(nn.Module):
    """Layer 0 of lm: embeds the tokens and inserts the images."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Parameter(torch.randn(len(data.VOCABULARY), LM_DIM) * WORD_STD)

    def forward(self, ids: Tensor, image_places: Tensor, vision_out: Tensor, *, lines: Tensor, mask: Tensor) -> Tensor:
        """Return ``(tokens, LM_DIM)``.

        ``vision_out`` has the images in the order of their placeholders.
        """
        del lines, mask  # used by the blocks only
        x = functional.embedding(ids, self.word)
        # Without images this adds nothing, and vision_out gets an empty gradient.
        return x.index_add(0, image_places, vision_out.flatten(0, 1).to(x.dtype))


class CausalBlock(Block):
    """A middle layer of lm: each token attends to itself and the earlier tokens of its document."""

    def __init__(self) -> None:
        super().__init__(LM_DIM, LM_HEADS)
        # Added to query, key and value of a token, depending on its line: 0 is the title, and END is one after the last
        # line. Initially, query and key get the same vector, so that tokens attend to their own line. Otherwise,
        # learning which image an answer is about takes far longer than learning to read the image.
        line = torch.randn(data.MAX_LINES + 2, LM_DIM) * LINE_STD
        self.line = nn.Parameter(torch.cat([line, line, torch.zeros_like(line)], dim=1))

    def forward(self, x: Tensor, *, lines: Tensor, mask: Tensor) -> Tensor:
        """Take and return ``(tokens, LM_DIM)``."""
        return self.transform(x[None], mask, functional.embedding(lines, self.line))[0]


class Head(nn.Module):
    """The last layer of lm: logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(LM_DIM)
        self.project = nn.Linear(LM_DIM, len(data.VOCABULARY))

    def forward(self, x: Tensor, *, lines: Tensor, mask: Tensor) -> Tensor:
        """Return ``(tokens, len(VOCABULARY))``."""
        del lines, mask
        out: Tensor = self.project(self.norm(x))
        return out


def _build(seed: int, module: int, kinds: Sequence[Callable[[], nn.Module]]) -> list[nn.Module]:
    """Build layers, each from its own seed."""
    layers = []
    with torch.random.fork_rng(devices=[]):
        for index, kind in enumerate(kinds):
            # Seeds only the CPU's generator. `torch.manual_seed` is much slower.
            torch.default_generator.manual_seed((seed * 2 + module) * 1000 + index)
            layers.append(kind())
    return layers


def vision_layers(seed: int) -> list[nn.Module]:
    """Build the vision encoder."""
    return _build(seed, 0, [PatchEmbedding, *[VisionBlock] * VISION_BLOCKS, PatchMerger])


def lm_layers(seed: int) -> list[nn.Module]:
    """Build the language model."""
    return _build(seed, 1, [TokenEmbedding, *[CausalBlock] * LM_BLOCKS, Head])


def vision_inputs(part: Part, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the patches of the images of a part."""
    images = [part.samples[sample].images[image] for sample, image in part.instances]
    return data.patches(images, dtype)


def lm_inputs(part: Part) -> tuple[Tensor, Tensor]:
    """Return the token ids of a part and the positions of its images."""
    ids = torch.tensor([token for document in part.samples for token in document.inputs])
    return ids, (ids == data.IMAGE).nonzero()[:, 0]


def lm_context(part: Part) -> dict[str, Tensor]:
    """Return the keyword arguments of all layers of lm.

    Returns
    -------
    dict[str, torch.Tensor]
        ``lines``, the line of each token, and ``mask``, ``(tokens, tokens)``, which is true where the token of the row
        may attend to that of the column: in the same document, and not later.
    """
    lengths = torch.tensor([len(document.inputs) for document in part.samples])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    lines = torch.tensor([line for document in part.samples for line in document.lines])
    return {"lines": lines, "mask": (owner[:, None] == owner).tril_()}


def loss(logits: Tensor, part: Part) -> Tensor:
    """Return the cross entropy, summed over the tokens of all answers."""
    rows: list[int] = []
    targets: list[int] = []
    end = 0
    for document in part.samples:
        end += len(document.inputs)
        rows.extend(range(end - len(document.targets), end))
        targets.extend(document.targets)
    chosen = logits[torch.tensor(rows, device=logits.device)]
    return functional.cross_entropy(chosen, torch.tensor(targets, device=logits.device), reduction="sum")


def num_targets(document: Document) -> int:
    """Return the number of tokens of a document that count in the loss."""
    return len(document.targets)
