"""Models that are made up here, as users write them."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from tests.integrations.tracing.own_attention import attend

WORDS, WIDTH, HEADS = 50, 64, 4


class ByHand(nn.Module):
    """Attention by products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, places, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, places, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2) / math.sqrt(width // HEADS)
        later = torch.ones(places, places, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ parts[2]
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, places, width))
        return x + self.mlp(self.second(x))


class Library(nn.Module):
    """PyTorch's own attention, which returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(F.silu(self.attention(y, y, y)[0]))


class Layer(nn.TransformerEncoderLayer):
    """A whole block of PyTorch."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, 128, batch_first=True, norm_first=True)


class Fused(nn.Module):
    """A block with three products and the fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, places, _ = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(rows, places, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Importing(Fused):
    """The same, in another file."""

    def forward(self, x: Tensor) -> Tensor:
        rows, places, _ = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(rows, places, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.out(attend(q, k, v))


class Recomputing(Fused):
    """The same, computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class OneHead(Fused):
    """The fused attention of one head, which is imported by its name; ``dims`` is that of its tensors."""

    def __init__(self, dims: int = 3) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y) for f in (self.q, self.k, self.v))
        if self.dims == 3:
            return x + self.out(sdpa(q, k, v))
        return x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])


class FromFirst(Fused):
    """Attention from the first place alone, as that of a class token."""

    def attend(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(each).view(len(x), -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for f, each in ((self.q, y[:, :1]), (self.k, y), (self.v, y))
        )
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1] + self.attend(x), x[:, 1:]], 1)


class Windowed(Fused):
    """Attention within windows of 16 places."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.reshape(-1, 16, x.shape[-1])).reshape(x.shape)
        return out


class Experts(nn.Module):
    """Experts in a loop, each on the tokens that chose it."""

    number, chosen = 8, 2

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(WIDTH, self.number), nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(self.number)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, choice = self.router(flat).softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(choice == number)
            if row.numel():
                out.index_add_(0, row, expert(flat[row]) * weights[row, slot, None])
        return x + out.view_as(x)


class Masked(Experts):
    """The same with boolean masks."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        _, choice = self.router(flat).topk(self.chosen, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).any(-1)
            out[mine] = out[mine] + expert(flat[mine])
        return x + out.view_as(x)


class Choosy(Fused):
    """A block that runs some places only, depending on their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.sum(-1) > 0
        y = x.clone()
        y[chosen] = self.q(x[chosen])
        return y


class Branching(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) if x.sum() > 0 else x


class Cubic(Fused):
    """A block whose products grow with the third power of the length."""

    def forward(self, x: Tensor) -> Tensor:
        square = x @ x.transpose(1, 2)
        return x + self.q(square @ square @ x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.steps(x)[0]


class Square(nn.Module):
    """A layer of an encoder without attention."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, out)

    def forward(self, x: Tensor, **_: Tensor) -> Tensor:
        out: Tensor = self.out(x)
        return out * out


class Language(nn.Module):
    """A language model with learned positions, dropout between blocks, and a head that is the embedding."""

    def __init__(self, block: Callable[[], nn.Module] = ByHand, layers: int = 3, positions: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(positions, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)  # its own bias, and the weight of the embedding
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = self.drop(block(x))
        logits: Tensor = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Written(nn.Module):
    """Two products with weights, written as ``@``, as an einsum, or as an einsum of each head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        shapes = ((HEADS, 16, 32), (HEADS, 32, 16)) if how == "heads" else ((WIDTH, 128), (128, WIDTH))
        self.up, self.down = (nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.how == "heads":
            out: Tensor = torch.einsum("blhd,hdf->blhf", x.unflatten(-1, (HEADS, -1)), weight)
            return out.flatten(2)
        return torch.einsum("bld,df->blf", x, weight) if self.how == "einsum" else x @ weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(F.silu(self.product(x, self.up)), self.down)


class Begins(Language):
    """A language model with a module between the embedding and the first block, and no positions."""

    def __init__(self, begin: nn.Module) -> None:
        super().__init__(Fused)
        self.begin = begin
        del self.places

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.begin(self.words(ids))
        for block in self.blocks:
            x = self.drop(block(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


class Pooling(Language):
    """A head that attends from the first place."""

    def __init__(self, block: Callable[[], nn.Module] = ByHand) -> None:
        super().__init__(block)
        self.pool = FromFirst()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.pool.attend(x)[:, 0])
        return logits if labels is None else F.cross_entropy(logits, labels[:, 0])


class PlainNorm(nn.Module):
    """A norm without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,))


class Checkpointed(Language):
    """Blocks are recomputed, by either of PyTorch's two ways."""

    reentrant = True

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Capped(Language):
    """A hyperbolic tangent caps the logits before the loss."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = 30 * torch.tanh(super().forward(ids) / 30)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Skipping(Language):
    """Later blocks read what earlier ones returned, as in a U-Net."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = first = self.blocks[0](self.words(ids))
        out: Tensor = self.head(self.blocks[2](self.blocks[1](x) + first))
        return out


class Summing(Language):
    """The head reads the results of all blocks."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        found = [self.words(ids)]
        for block in self.blocks:
            found.append(block(found[-1]))
        out: Tensor = self.head(torch.stack(found).sum(0))
        return out


class Vision(nn.Module):
    """Images of 64 x 64 pixels in patches of 16, behind a stem of convolutions, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.ReLU(), nn.Conv2d(32, WIDTH, 4, 4))
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers = nn.Sequential(Fused(), Fused())

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels).flatten(2).transpose(1, 2)
        out: Tensor = self.layers(torch.cat([self.first.expand(len(x), -1, -1), x], 1))
        return out


class PartlyFrozen(Vision):
    """The first block runs without gradients, the second is trained."""

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        for number, block in enumerate(self.layers):
            with torch.set_grad_enabled(number > 0):
                x = block(x)
        return x


class Seeing(nn.Module):
    """A language model with images before its text."""

    sees_under: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.adapter = Vision(), nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks, self.norm = nn.ModuleList(Fused() for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        with self.sees_under():
            seen = self.vision(pixels)
        images = self.adapter(seen[:, 1:]).view(len(ids), -1, WIDTH)
        x = torch.cat([images, self.words(ids)], 1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Hearing(Seeing):
    """The same with recordings behind the images."""

    def __init__(self) -> None:
        super().__init__()
        self.spectra, self.audio = nn.Linear(80, WIDTH), nn.ModuleList(Fused() for _ in range(2))

    def forward(self, ids: Tensor, pixels: Tensor, sounds: Tensor) -> Tensor:  # type: ignore[override]
        images = self.adapter(self.vision(pixels)[:, 1:]).view(len(ids), -1, WIDTH)
        heard = self.spectra(sounds)
        for block in self.audio:
            heard = block(heard)
        x = torch.cat([images, heard.view(len(ids), -1, WIDTH), self.words(ids)], 1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Translating(nn.Module):
    """PyTorch's encoder and decoder, with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.both = nn.Transformer(WIDTH, HEADS, 2, 2, 128, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.head(self.both(self.words(source), self.words(target)))
        return out


class Pairs(nn.Module):
    """Two encoders of texts, which only the loss outside of the model joins."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.queries, self.texts = (nn.ModuleList(Fused() for _ in range(2)) for _ in range(2))

    def forward(self, queries: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.words(queries), self.words(texts)
        for block in self.queries:
            x = block(x)
        for block in self.texts:
            y = block(y)
        return x[:, 0], y[:, 0]


class TimeFirst(nn.Module):
    """Sequences along dimension 0, PyTorch's default."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 128), 2, enable_nested_tensor=False
        )

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.words(ids)))
        return out


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x))
        return out


def ids(count: int = 2, length: int = 128) -> Tensor:
    return torch.zeros(count, length, dtype=torch.int64, device="cpu")


# ------------------------------------------------------------------ what the command line names


def language() -> tuple[nn.Module, object]:
    return Language(Fused), [{"ids": ids()}, {"ids": ids(3, 64)}]


def seeing() -> tuple[nn.Module, object]:
    return Seeing(), {"ids": ids(), "pixels": torch.zeros(4, 3, 64, 64)}


def recognizing() -> nn.Module:
    return Vision()


def needs(size: int) -> nn.Module:
    return Language(layers=size)


def number() -> int:
    return 3


def reads_numbers() -> nn.Module:
    model = Language()
    print(model.head.weight.detach().sum().item())
    return model


def branching() -> tuple[nn.Module, object]:
    return Language(Branching), ids()


A_CONSTANT = 4


def fixed() -> tuple[nn.Module, object]:
    return Fixed(), torch.zeros(2, 3, 64, 64)


class Fixed(nn.Module):
    """Classifies images of one size, the mean of whose patches it takes."""

    def __init__(self, block: type[nn.Module] = Fused) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, WIDTH, 16, 16), nn.Parameter(torch.zeros(16, WIDTH))
        self.blocks, self.head = nn.ModuleList(block() for _ in range(2)), nn.Linear(WIDTH, 10)

    def place(self, x: Tensor) -> Tensor:
        return x + self.places

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.place(self.patches(pixels).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class AnySize(Fixed):
    """The same for images of any size."""

    def place(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0, 1, x.shape[1], device=x.device, dtype=x.dtype)[:, None]
