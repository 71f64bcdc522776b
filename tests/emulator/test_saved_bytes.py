"""Bytes kept for the backward equal what torch's autograd saves for the same layers, under every strategy."""

from __future__ import annotations

import pytest
from torch import nn

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pipeloom.emulator import modules as m  # noqa: E402
from pipeloom.emulator.rules import Device  # noqa: E402
from pipeloom.emulator.tape import Context  # noqa: E402
from pipeloom.emulator.template import LayerTemplate  # noqa: E402
from pipeloom.spec import Workload  # noqa: E402

DEVICES = (
    Device("cpu", flops_per_s=1e12, memory_bytes_per_s=1e11),
    *(Device(name, network_bytes_per_s=1e10) for name in ("nvlink", "nic", "pcie")),
)


def run(recompute, function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=True) if recompute else function(*inputs)


class Dropped:
    """Results of cheap functions: not held, but made again from their inputs when the backward asks."""

    def __init__(self):
        self.made = {}

    def __call__(self, function, *inputs):
        out = run(True, function, *inputs)
        self.made[out.untyped_storage().data_ptr()] = (out, lambda: function(*inputs))
        return out


def plainly(function, *inputs):
    return function(*inputs)


class TorchAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, causal):
        super().__init__()
        width = hidden // heads
        self.heads, self.kv_heads, self.width, self.causal = heads, kv_heads, width, causal
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * width, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):
        q, k, v = (
            f(x).view(1, -1, h, self.width).transpose(1, 2)
            for f, h in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class TorchBlock(nn.Module):
    """Pre-norm transformer layer; ``selective`` recomputes norms and activation functions."""

    def __init__(self, hidden, heads, kv_heads, inner, causal, gated, norm):
        super().__init__()
        make = nn.LayerNorm if norm == "layer" else nn.RMSNorm
        self.norm1, self.norm2 = make(hidden), make(hidden)
        self.attention = TorchAttention(hidden, heads, kv_heads, causal)
        self.gate = nn.Linear(hidden, inner, bias=False) if gated else None
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.cheaply = plainly

    def forward(self, x):
        x = x + self.attention(self.cheaply(self.norm1, x))
        y = self.cheaply(self.norm2, x)
        if self.gate is None:
            y = self.cheaply(F.gelu, self.up(y))
        else:
            y = self.cheaply(lambda g, u: F.silu(g) * u, self.gate(y), self.up(y))
        return x + self.down(y)


def gradients(y, x, layer):
    leaves = [x, *layer.parameters()]
    for leaf in leaves:
        leaf.grad = None
    y.square().sum().backward()
    return [leaf.grad for leaf in leaves]


def saved_bytes(layer, x, strategy):
    """Bytes of all storages that autograd holds, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    held = {}
    dropped = Dropped()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in dropped.made:
            return tensor.shape, dropped.made[storage.data_ptr()][1]
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding it keeps the address its own
        return tensor

    def unpack(packed):
        return packed[1]().detach().view(packed[0]) if isinstance(packed, tuple) else packed

    if hasattr(layer, "cheaply"):
        layer.cheaply = dropped if strategy == "selective" else plainly
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = run(strategy == "recompute", layer, x)
    size = sum(size for size, _ in held.values())
    if strategy == "selective":  # what is held suffices: the gradients are those of keeping everything
        got = gradients(y, x, layer)
        layer.cheaply = plainly
        for a, b in zip(got, gradients(layer(x), x, layer), strict=True):
            torch.testing.assert_close(a, b)
    return size


def emulated_bytes(module, width, workload, strategy):
    context = Context(dtype_bytes=4)
    layer = LayerTemplate(module, width, context, DEVICES).on(workload)
    return layer.host_bytes[strategy] if strategy == "offload" else layer.activation_bytes[strategy]


@pytest.mark.parametrize("strategy", ["keep", "selective", "recompute", "offload"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "causal", "gated", "norm"),
    [(4, 4, False, False, "layer"), (4, 4, True, True, "layer"), (4, 2, True, True, "layer")],
)
def test_transformer_layers(strategy, heads, kv_heads, causal, gated, norm):
    hidden, inner, tokens = 64, 160, 96
    layer = TorchBlock(hidden, heads, kv_heads, inner, causal, gated, norm)
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    attention = m.Attention(heads, kv_heads, hidden // heads, causal=causal, rotary=False, fused=False, hidden=hidden)
    mlp = m.MLP(inner, gated=gated, fused=False, hidden=hidden)
    module = m.Sequential((m.Residual(attention, norm), m.Residual(mlp, norm)))
    expected = saved_bytes(layer, x, strategy)
    assert emulated_bytes(module, hidden, Workload((tokens,)), strategy) == pytest.approx(expected, rel=0.01)


class LibraryNorm(nn.Module):
    """RMSNorm as the transformers library writes it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


def test_eager_layers_of_a_library():
    hidden, inner, tokens = 64, 160, 96

    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = LibraryNorm(hidden)
            self.gate, self.up = (nn.Linear(hidden, inner, bias=False, dtype=torch.bfloat16) for _ in range(2))
            self.down = nn.Linear(inner, hidden, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            y = self.norm(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    module = m.Residual(m.MLP(inner, hidden=hidden), "rms")
    layer = LayerTemplate(module, hidden, Context(eager=True), DEVICES).on(Workload((tokens,)))
    assert layer.activation_bytes["keep"] == pytest.approx(saved_bytes(Perceptron(), x, "keep"), rel=0.001)
    fused = LayerTemplate(module, hidden, Context(), DEVICES).on(Workload((tokens,)))
    assert layer.activation_bytes["keep"] > 1.35 * fused.activation_bytes["keep"]


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("strategy", ["keep", "recompute"])
def test_language_head(strategy, capped):
    hidden, vocabulary, tokens = 32, 1000, 50

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
            self.register_buffer("target", torch.randint(vocabulary, (tokens,)))

        def forward(self, x):
            logits = self.out(self.norm(x))
            return F.cross_entropy(torch.tanh(logits) if capped else logits, self.target, reduction="none")

    x = torch.randn(tokens, hidden, requires_grad=True)
    module = m.LanguageHead(hidden, vocabulary, norm="layer", capped=capped)
    got = emulated_bytes(module, hidden, Workload((tokens,)), strategy)
    expected = saved_bytes(Head(), x, strategy)
    # Recomputing the head keeps its input; torch's checkpoint keeps nothing of the targets, a buffer.
    extra = 8 * tokens if strategy == "recompute" else 0
    assert got - extra == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("strategy", ["keep", "recompute"])
def test_patch_merger(strategy):
    hidden, factor, out, patches = 24, 4, 40, 64

    class Merger(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(hidden)
            self.a, self.b = nn.Linear(hidden * factor, hidden * factor), nn.Linear(hidden * factor, out)

        def forward(self, x):
            return self.b(F.gelu(self.a(self.norm(x).view(-1, hidden * factor))))

    x = torch.randn(patches, hidden, requires_grad=True)
    got = emulated_bytes(m.PatchMerger(hidden, factor, out), hidden, Workload((patches,)), strategy)
    assert got == pytest.approx(saved_bytes(Merger(), x, strategy), rel=0.01)


def test_embedding_and_linear():
    x = torch.randn(10, 16, requires_grad=True)
    assert emulated_bytes(m.Linear(16, 8), 16, Workload((10,)), "keep") == saved_bytes(nn.Linear(16, 8), x, "keep")
    table = nn.Embedding(100, 16)
    got = emulated_bytes(m.TokenEmbedding(100, 16), 16, Workload((10,)), "keep")
    assert got == saved_bytes(table, torch.arange(10), "keep")
