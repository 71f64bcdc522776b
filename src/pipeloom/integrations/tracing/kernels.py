"""Functions of libraries that a GPU runs as one kernel, and the fused operators that replace them while tracing.

A function is recognized by the name of the kernel it stands for, never by the model that calls it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.recorder import Recorder

ATTENTION = "pipeloom_traced"
"""Name under which the attention of traced models is registered with the library."""
LENGTHS = "pipeloom_traced_flash"
"""The same for encoders, which pass sequence lengths instead of a mask if the name contains ``flash``."""

_LIBRARIES = {"pipeloom", "torch", "transformers", "diffusers", *sys.stdlib_module_names}
"""Packages that call no kernels outside the files whose classes a model has."""

_RUNNING: list[Recorder] = []


def _running() -> Recorder:
    return _RUNNING[-1]


class _Kernel(torch.autograd.Function):
    """One fused kernel. Its backward reads inputs, outputs and a by-product of ``statistics`` numbers in float32.

    It takes 2.5 times the operations of the forward unless ``about`` has another factor.
    """

    @staticmethod
    def forward(ctx: Any, name: str, flops: float, about: Any, made: Any, statistics: int, *reads: Tensor) -> Tensor:
        shape, dtype = made
        out = reads[0].new_empty(shape, dtype=dtype)
        extra = reads[0].new_empty(statistics, dtype=torch.float32)
        _running().fused(name, flops, list(reads), [out, extra], {**about, "statistics": 4 * statistics})
        ctx.save_for_backward(*reads, *((out, extra) if about.get("keeps", True) else ()))
        ctx.call = name, flops * about.get("backward", 2.5), len(reads)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        name, flops, count = ctx.call
        reads = ctx.saved_tensors[:count]
        grads = [torch.empty_like(each) if each.is_floating_point() else None for each in reads]
        _running().fused(name, flops, list(reads), [g for g in grads if g is not None])
        return (None,) * 5 + tuple(grads)


def _call(name: str, flops: float, about: Any, made: Any, statistics: int, *reads: Tensor) -> Tensor:
    """Run a fused kernel that makes a tensor of this shape and type."""
    out: Tensor = _Kernel.apply(name, flops, about, made, statistics, *reads)  # type: ignore[no-untyped-call]
    return out


def _on_meta(*values: Any) -> list[Tensor]:
    """Return those of a kernel's arguments that are tensors on meta."""
    return [each for each in values if isinstance(each, Tensor) and each.is_meta]


# ------------------------------------------------------------------ attention


class MaskShape(dict[str, Any]):
    """What a mask allows. A model that reads it as a tensor gets one on meta."""

    def tensor(self) -> Tensor:
        """Return a mask on meta."""
        if "tensor" not in self:
            shape = (self["batch"], 1, self["queries"], self["keys"])
            self["tensor"] = _running().like.new_empty(shape, dtype=torch.bool)
        found: Tensor = self["tensor"]
        return found

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self, key) if isinstance(key, str) else self.tensor()[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)


def _mask(**options: Any) -> MaskShape:
    size = options.get("local_size")
    chunked = size is not None and size != getattr(options.get("config"), "sliding_window", None)
    causal = bool(options.get("allow_is_causal_skip")) or not options.get("allow_is_bidirectional_skip")
    return MaskShape(
        batch=int(options.get("batch_size", 1)),
        queries=int(options["q_length"]),
        keys=int(options["kv_length"]),
        causal=causal,
        window=None if chunked else size,
        chunk=size if chunked else None,
    )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    mask = attention_mask if isinstance(attention_mask, MaskShape) else {}
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    about: dict[str, Any] = {
        "causal": bool(mask.get("causal", causal)),
        "window": mask.get("window") or (options.get("sliding_window") if mask else None),
        "chunk": mask.get("chunk"),
        "lengths": (query.shape[2],) * query.shape[0],
        "keys": key.shape[2],
    }
    if options.get("cu_seq_lens_q") is not None:
        lengths = torch.diff(options["cu_seq_lens_q"])
        about |= {"lengths": tuple(lengths.tolist()), "causal": False, "keys": None}
    heads, length = query.shape[1:3]
    if heads % key.shape[1]:
        raise InputError("num_key_value_heads", f"{key.shape[1]} does not divide {heads} heads", "correct the config")
    about |= _selection(options.get("indices"), length, key.shape[2])
    return _fused_attention(query, key, value, about), None


class TooShort(Exception):
    """A sequence on which a sparse attention selects all keys, so that its number of selected keys is not known."""


def _selection(indices: Any, queries: int, keys: int) -> dict[str, Any]:
    """Return how many keys a sparse attention attends to, if its module chose some by `topk` or takes ``indices``.

    A choice is one of the keys; a block of them; or one of the compressed entries that stand behind the keys.
    """
    recorder = _running()
    inside = [
        each for scope, each in recorder.selections.choices.items() if recorder.scope and recorder.scope[-1] in scope
    ]
    behind = max(0, keys - queries)
    found: dict[str, Any] = {}
    if behind:
        found = {"keys": queries, "behind": (queries // behind, None)}
    if inside:
        chosen, entries = inside[-1]
    elif isinstance(indices, Tensor):
        chosen, entries = int(indices.shape[-1]), queries
    else:
        return found
    if chosen >= entries and recorder.searching:
        raise TooShort
    if entries == behind:
        return {"keys": queries, "behind": (queries // behind, chosen)}
    return {"window": chosen * (keys // entries), "causal": True}


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, about: dict[str, Any]) -> Tensor:
    """Record one attention and return its result, whose dimensions are batch, rows, heads and width of values."""
    batch, heads, length, width = query.shape
    pairs = _count_pairs(about)
    about |= {
        "heads": heads,
        "query_key_width": width,
        "value_width": value.shape[-1],
        "key_value_width": key.shape[1] * (key.shape[-1] + value.shape[-1]),
        "pairs": pairs,
    }
    flops = float(pairs * 2 * heads * (width + value.shape[-1]))
    made = (batch, length, heads, value.shape[-1]), query.dtype
    return _call("attention", flops, about, made, batch * length * heads, query, key, value)


def _count_pairs(about: dict[str, Any]) -> int:
    """Return the query-key pairs of an attention."""
    total = 0
    for n in about["lengths"]:
        if about.get("behind"):
            # Every query reads the entries that stand for whole groups of tokens up to itself, or the chosen ones.
            ratio, chosen = about["behind"]
            total += sum(min(chosen or n, (i + 1) // ratio) for i in range(n))
        keys = n if about.get("keys") is None else about["keys"]
        window, chunk = about.get("window"), about.get("chunk")
        if chunk:
            total += sum(c * (c + 1) // 2 for c in [chunk] * (n // chunk) + [n % chunk])
        elif window and about["causal"]:
            inside = min(window, n)
            total += inside * (inside + 1) // 2 + (n - inside) * window
        elif window:
            inside = min(window + 1, n)
            total += 2 * (inside * (inside + 1) // 2 + (n - inside) * (window + 1)) - n
        elif about["causal"] and keys == n:
            total += n * (n + 1) // 2
        else:
            total += n * keys
    return total


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,  # noqa: ARG001  torch's signature
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    """Replace `torch.nn.functional.scaled_dot_product_attention`. A mask counts as if it left out nothing."""
    if query.dim() < 4:  # one head, which has no dimension
        query, key, value = (each.unsqueeze(-3) for each in (query, key, value))
        return _scaled_dot_product(query, key, value, attn_mask, is_causal=is_causal).squeeze(-3)
    causal = is_causal or isinstance(attn_mask, MaskShape)
    lead = query.shape[:-3]
    query, key, value = (each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
    about = {"causal": causal, "lengths": (query.shape[2],) * query.shape[0], "keys": key.shape[-2]}
    out = _fused_attention(query, key, value, about).transpose(1, 2)
    return out.reshape(*lead, *out.shape[1:])


# ------------------------------------------------------------------ scans


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> tuple[Tensor, None]:
    """Chunked delta rule of a linear attention: products inside chunks of 64, states of key x value between them.

    Operations follow Yang et al. 2024 ("Parallelizing Linear Transformers with the Delta Rule"), section 3: for each
    token and head, two products of chunk x key (scores, and the triangular system's matrix), two of chunk x (key +
    value) (the WY representation), chunk x value (half masked), and three of key x value (state out, update, correct).

    Its backward computes the states again, in bfloat16, from the triangular system's solution, which is kept in
    bfloat16 (`ChunkGatedDeltaRuleFunction` of flash-linear-attention).
    """
    chunk = int(options.get("chunk_size") or 64)
    batch, length, heads, wide = value.shape
    narrow = key.shape[-1]
    each = 2 * chunk * narrow + chunk * (narrow + wide) + chunk * wide + 6 * narrow * wide
    reads = _on_meta(query, key, value, *more, *options.values())
    rows = batch * length * heads
    about = {"recomputed": 2 * rows * narrow * wide // chunk}
    return _call("scan", float(rows * each), about, (value.shape, value.dtype), rows * chunk // 2, *reads), None


def _state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *more: Any, **options: Any) -> Any:
    """Mamba-2's chunked scan (Dao and Gu 2024): as `pipeloom.emulator.operators.scan` counts it."""
    chunk = int(options.get("chunk_size") or (more[0] if more else 256))
    batch, length, heads, wide = x.shape
    groups, state = b.shape[-2:]
    each = chunk * (2 * groups * state + 2 * heads * wide) / 2 + 4 * state * heads * wide
    reads = _on_meta(x, dt, a, b, c, *more, *options.values())
    # mamba_ssm computes the states again in the backward. They have four bytes, and are written and read.
    about = {"convolves": True, "recomputed": 4 * batch * length * heads * wide * state // chunk}
    out = _call("scan", float(batch * length * each), about, (x.shape, x.dtype), 0, *reads)
    return (out, None) if options.get("return_final_states") else out


def _selective_scan(u: Tensor, *more: Any, **options: Any) -> Any:
    """Mamba-1's scan: nine operations for each channel and state (Gu and Dao 2023, section 3.3.2)."""
    reads = _on_meta(u, *more, *options.values())
    batch, channels, length = u.shape
    state = next(t.shape[-1] for t in reads[2:] if t.dim() == 2)
    flops = float(9 * batch * channels * length * state)
    # One row for each token: the library has the channels before the tokens.
    rows = _call("scan", flops, {}, ((batch, length, channels), u.dtype), batch * channels * state, *reads)
    out = rows.transpose(1, 2)
    return (out, None) if options.get("return_last_state") else out


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Causal depthwise convolution with its activation, as one kernel that reads its input again in the backward."""
    reads = [x, weight] if bias is None else [x, weight, bias]
    flops = float(2 * x.numel() * weight.shape[-1])
    return _call("depthwise", flops, {"keeps": False}, (x.shape, x.dtype), 0, *reads)


KERNELS: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "mamba_chunk_scan_combined": _state_space,
    "mamba2_chunk_scan": _state_space,
    "selective_scan_fn": _selective_scan,
    "mamba_selective_scan": _selective_scan,
    "chunk_kimi_delta_attention": _delta_rule,
    "causal_conv1d_fn": _convolution,
}
"""Fused operator by the name of a kernel. The library's function may have a prefix before it."""


def kernel_of(function: Any) -> Callable[..., Any] | None:
    """Return the fused operator that replaces a function, by its name."""
    names = [getattr(function, "kernel_layer_name", ""), getattr(function, "__name__", "")]
    for name in names:
        for known, replacement in KERNELS.items():
            if isinstance(name, str) and f"_{name}".endswith(f"_{known}"):
                return replacement
    return None


# ------------------------------------------------------------------ experts


def _experts(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Run experts as grouped products, and mark what they run as one operator."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    up = module.gate_up_proj if module.has_gate else module.up_proj
    down = module.down_proj
    inner = down.shape[1] if module.is_transposed else down.shape[2]
    biases = [p for name, p in module.named_parameters(recurse=False) if name.endswith("bias")]
    about = {
        "name": "experts",
        "hidden": hidden.shape[-1],
        "inner": int(inner),
        "experts": int(up.shape[0]),
        "chosen": int(indices.shape[-1]),
        "gated": bool(module.has_gate),
        "biases": sum(p[0].numel() for p in biases),
        "state": _running().value(hidden),
        "weights": _running().value(weights),
    }
    with _running().inside(**about) as number:
        out: Tensor = grouped_mm_experts_forward(module, hidden, indices, weights)
    _running().regions[number]["result"] = _running().value(out)
    return out


def _own_experts(module: Any, hidden: Tensor, indices: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Run experts with code of their own for the chosen ones alone, as every trainer does.

    Some loop over the experts. Others get no indices, and multiply a copy of every token for every expert. Experts
    without weights return their tokens (LongCat-Flash), and take their share of the choices.
    """
    recorder, (count, inner, width) = _running(), module.down_proj.shape
    if indices is None:
        chosen = next((k for k, entries in reversed(recorder.selections.choices.values()) if entries == count), count)
        rows = hidden.numel() // width // count
    else:
        inner, width = (inner, width) if width == hidden.shape[-1] else (width, inner)
        real = count / len(module.gate_up_proj)
        chosen, rows = max(1, round(indices.shape[-1] * real)), hidden.numel() // width
    about = {"hidden": width, "inner": inner, "experts": count, "chosen": chosen, "gated": True, "biases": 0}
    about |= {"dense": indices is None, "unused": module.gate_up_proj[count:].numel()}
    flops = 2.0 * rows * chosen * inner * width * 3
    reads = (hidden, module.gate_up_proj, module.down_proj, *([] if weights is None else [weights]))
    about |= {"keeps": False, "rows": rows, "backward": 2.0}
    return _call("own_experts", flops, about, (hidden.shape, hidden.dtype), 0, *reads)


def _are_own_experts(module: nn.Module) -> bool:
    """Return whether a module has weights of several experts, and no choice of how they are run."""
    own = dict(module.named_parameters(recurse=False))
    stacked = all(name in own and own[name].dim() == 3 for name in ("gate_up_proj", "down_proj"))
    taken = len(inspect.signature(type(module).forward).parameters)
    return stacked and not hasattr(module, "has_gate") and taken in (2, 4)


# ------------------------------------------------------------------ while tracing


def _on_cpu(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a constructor that keeps its numbers, on whatever device they are wanted."""

    @functools.wraps(function)
    def made(*args: Any, **options: Any) -> Tensor:
        options.pop("device", None)
        return function(*args, **options)

    return made


def _padded(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, **_: Any) -> Tensor:
    """Pad sequences to one length. PyTorch's own function writes them into a constant."""
    longest = max(each.shape[0] for each in sequences)
    rest = (0, 0) * (sequences[0].dim() - 1)
    rows = [torch.nn.functional.pad(x, (*rest, 0, longest - x.shape[0]), value=padding_value) for x in sequences]
    return torch.stack(rows, 0 if batch_first else 1)


class _Checkpoint:
    """Replace reentrant checkpointing, which runs blocks without gradients, by a call."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _not_recomputed(*_: Any, **__: Any) -> Iterator[None]:
    """Replace what PyTorch's other checkpointing does around a call, so that the backward runs nothing again."""
    yield


def _files(model: nn.Module) -> list[ModuleType]:
    """Return the files of a model's classes, and those that they import, directly or through others.

    Imports of libraries and of installed packages that have no classes of the model are not followed. A file that was
    loaded by its path need not be in `sys.modules`.
    """
    found: dict[str, ModuleType] = {}
    left = {type(module).__module__ for module in model.modules()}
    own = {name.partition(".")[0] for name in left} - _LIBRARIES
    while left:
        name = left.pop()
        file = sys.modules.get(name)
        if file is None or name in found or name.startswith("torch."):
            continue
        found[name] = file
        if name.partition(".")[0] not in _LIBRARIES:
            every = list(vars(file).values())
            imported = {each.__name__ for each in every if isinstance(each, ModuleType)}
            imported |= {each.__module__ for each in every if isinstance(each, (FunctionType, type))}
            left |= {each for each in imported if each in sys.modules and _follows(each, own)}
    return [found[name] for name in sorted(found)]


def _follows(name: str, own: set[str]) -> bool:
    """Return whether a file belongs to one of a model's ``own`` packages, or to no installed package."""
    package = name.partition(".")[0]
    place = PurePath(getattr(sys.modules[name], "__file__", None) or "site-packages")
    installed = not {"site-packages", "dist-packages"}.isdisjoint(place.parts)
    return package in own or not (installed or package in _LIBRARIES)


@contextmanager
def kernels(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Replace kernels by fused operators, in the files of a model's code and in torch."""
    attention = torch.nn.functional.scaled_dot_product_attention
    fused = functools.wraps(attention)(_scaled_dot_product)
    kept: list[tuple[Any, str, Any]] = [(torch.nn.functional, "scaled_dot_product_attention", fused)]
    for file in _files(model):
        found = ((name, fused if each is attention else kernel_of(each)) for name, each in list(vars(file).items()))
        kept += [(file, name, new) for name, new in found if new]
    kept += [(torch, name, _on_cpu(getattr(torch, name))) for name in ("tensor", "as_tensor")]
    kept += [
        (torch.nn.utils.rnn, "pad_sequence", _padded),
        (torch.utils.checkpoint, "CheckpointFunction", _Checkpoint),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _not_recomputed),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in kept]
    dense = [module for module in model.modules() if _are_own_experts(module)]
    _RUNNING.append(recorder)
    try:
        for module in dense:
            module.forward = functools.partial(_own_experts, module)
        for owner, name, new in kept:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
        for module in dense:
            del module.forward
        _RUNNING.pop()


def register() -> None:
    """Register attention, masks and experts with the library. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name in (ATTENTION, LENGTHS):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION, _experts)
