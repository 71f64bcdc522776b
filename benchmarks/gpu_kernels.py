"""Kernels of training on this GPU: rows for `pipeloom calibrate --base` and ``scripts/fit_efficiencies.py``.

``python -m benchmarks.gpu_kernels [--dry] [--out kernels.csv]``. Times are of the device alone: calls are captured in a
CUDA graph and replayed, so no launch of the host counts. On the CPU (``--dry``) they are wall-clock times, to try it
out. Inputs of small kernels stay in the cache, as the output of the operator before does in training.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Row = dict[str, Any]
Call = Callable[[], object]
LONG_S = 0.004
"""Seconds of a timed replay, of which there are `REPLAYS`."""
REPLAYS = 5
MOST_CALLS = 200
DTYPE = torch.bfloat16
BACKENDS = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

PRODUCTS = tuple(
    (m, n, k)
    for m in (1024, 4096, 16384)
    for n, k in (
        (4096, 4096),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
        (10240, 8192),
        (8192, 8192),
        (8192, 28672),
        (4304, 1152),
        (1152, 4304),
        (3456, 1152),
        (5120, 1280),
        (128256, 4096),
    )
    if m * n < 1 << 31
)
ATTENTIONS = (
    # samples, length, heads, heads of keys, width, causal
    *((1, n, 32, 8, 128, True) for n in (1024, 2048, 4096, 8192, 16384, 32768)),
    *((4, n, 32, 8, 128, True) for n in (1024, 4096)),
    *((1, n, 64, 8, 128, True) for n in (4096, 8192)),
    *((1, n, 32, 32, 128, True) for n in (2048, 8192)),
    *((1, n, 24, 24, 128, False) for n in (1024, 4096, 16384)),
    *((1, n, 16, 16, 80, False) for n in (1024, 4096, 16384)),
    *((1, n, 16, 16, 72, False) for n in (1024, 4096, 16384)),
    *((1, n, 16, 16, 64, False) for n in (1024, 4096, 16384)),
    *((16, n, 16, 16, 80, False) for n in (64, 256, 1024)),
    *((1, n, 32, 32, 64, True) for n in (2048, 8192)),
    *((1, n, 16, 8, 256, True) for n in (2048, 8192)),
)
EXPERTS = tuple(
    # experts, rows of each, in, out
    (experts, rows, width, inner)
    for experts, width, inner in (
        (8, 4096, 14336),
        (16, 2048, 768),
        (64, 2048, 768),
        (128, 2048, 1536),
        (32, 7168, 2048),
    )
    for rows in (128, 512, 2048)
    if experts * rows <= 1 << 16
)
MOVED = tuple((rows, width) for rows in (512, 4096, 16384) for width in (1152, 4096, 8192))
COPIED = tuple(1 << power for power in range(16, 31, 2))


class Timer:
    """Times calls on one device."""

    def __init__(self, device: str, *, quick: bool = False) -> None:
        self.device, self.quick = device, quick

    def tensor(self, *shape: int, grad: bool = False, dtype: torch.dtype = DTYPE) -> Tensor:
        """Return random numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=dtype, requires_grad=grad)

    def seconds(self, call: Call) -> float:
        """Return the median seconds of one call."""
        if self.device != "cuda":
            return self.once(call)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            call()
            first = self.once(call)
        torch.cuda.current_stream().wait_stream(aside)
        calls = max(1, min(MOST_CALLS, int(LONG_S / max(first, 1e-7))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        found = statistics.median(self.once(graph.replay) for _ in range(REPLAYS)) / calls
        graph.reset()
        return found

    def eager_seconds(self, call: Call) -> float:
        """Return the median seconds of one call that is not captured."""
        call()
        return statistics.median(self.once(call) for _ in range(REPLAYS))

    def once(self, call: Call) -> float:
        """Return the seconds of one call, launches included."""
        if self.device != "cuda":
            begin_s = time.perf_counter()
            call()
            return time.perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _products(timer: Timer) -> Iterator[Row]:
    for m, n, k in PRODUCTS[:1] if timer.quick else PRODUCTS:
        x, w, g = timer.tensor(m, k), timer.tensor(n, k), timer.tensor(m, n)
        row = {"kind": "gemm", "dtype": "bfloat16"}
        forward, inputs, weights = (
            partial(functional.linear, x, w),
            partial(torch.mm, g, w),
            partial(torch.mm, g.t(), x),
        )
        yield row | {"pass": "forward", "m": m, "n": n, "k": k, "seconds": timer.seconds(forward)}
        yield row | {"pass": "backward input", "m": m, "n": k, "k": n, "seconds": timer.seconds(inputs)}
        yield row | {"pass": "backward weight", "m": n, "n": k, "k": m, "seconds": timer.seconds(weights)}


def _attentions(timer: Timer) -> Iterator[Row]:
    backends = BACKENDS if timer.device == "cuda" else {"math": SDPBackend.MATH}
    for samples, length, heads, kv_heads, width, causal in ATTENTIONS[:1] if timer.quick else ATTENTIONS:
        # Memory as models have it: one row for each token, heads beside each other.
        q = timer.tensor(samples, length, heads, width).transpose(1, 2).requires_grad_()
        k, v = (timer.tensor(samples, length, kv_heads, width).transpose(1, 2).requires_grad_() for _ in range(2))
        sizes = {"batch": samples, "seq": length, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
        row = {"kind": "attention", "dtype": "bfloat16", **sizes, "causal": int(causal)}
        for backend, kernel in backends.items():
            with sdpa_kernel(kernel):
                attend = partial(
                    functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=heads != kv_heads
                )
                call = partial(attend, q, k, v)
                try:
                    out = call()
                    g = torch.randn_like(out)
                    both = timer.seconds(partial(_with_backward, attend, (q, k, v), g))
                    seconds = timer.seconds(call)
                except RuntimeError as error:
                    yield row | {"backend": backend, "reason": str(error).splitlines()[0][:200]}
                    continue
            yield row | {"backend": backend, "pass": "forward", "seconds": seconds}
            yield row | {"backend": backend, "pass": "backward", "seconds": both - seconds}


def _with_backward(call: Callable[..., Tensor], leaves: tuple[Tensor, ...], gradient: Tensor) -> object:
    # Leaves that are made while a graph is captured belong to its stream.
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    return torch.autograd.grad(call(*leaves), leaves, gradient)


def _experts(timer: Timer) -> Iterator[Row]:
    for experts, rows, width, inner in EXPERTS[:1] if timer.quick else EXPERTS:
        rows = 16 if timer.quick else rows
        x, w = timer.tensor(experts * rows, width), timer.tensor(experts, width, inner)
        g = timer.tensor(experts * rows, inner)
        ends = torch.arange(rows, (experts + 1) * rows, rows, device=timer.device, dtype=torch.int32)[:experts]
        row = {"dtype": "bfloat16", "groups": experts}
        sizes = {
            "forward": {"m": rows, "n": inner, "k": width},
            "backward input": {"m": rows, "n": width, "k": inner},
            "backward weight": {"m": width, "n": inner, "k": rows},
        }
        together: dict[str, Call] = {
            "forward": partial(torch._grouped_mm, x, w, offs=ends),
            "backward input": partial(torch._grouped_mm, g, w.transpose(1, 2), offs=ends),
            "backward weight": partial(torch._grouped_mm, x.t(), g, offs=ends),
        }
        for name, call in together.items():
            try:
                seconds = timer.seconds(call)
            except RuntimeError as error:
                yield row | {"kind": "grouped_gemm", "pass": name, **sizes[name], "reason": str(error)[:200]}
                continue
            yield row | {"kind": "grouped_gemm", "backend": "torch", "pass": name, **sizes[name], "seconds": seconds}
        # One product after the other, as Transformer Engine's GroupedLinear on one stream.
        xs, gs = x.view(experts, rows, width), g.view(experts, rows, inner)
        one_by_one: dict[str, Call] = {
            "forward": partial(_each, xs, w),
            "backward input": partial(_each, gs, w.transpose(1, 2)),
            "backward weight": partial(_each, xs.transpose(1, 2), gs),
        }
        for name, call in one_by_one.items():
            seconds = timer.seconds(call)
            yield row | {
                "kind": "grouped_gemm",
                "backend": "one by one",
                "pass": name,
                **sizes[name],
                "seconds": seconds,
            }


def _each(left: Tensor, right: Tensor) -> list[Tensor]:
    return [torch.mm(a, b) for a, b in zip(left, right, strict=True)]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The norm as libraries write it, without a fused kernel."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _moved(timer: Timer) -> Iterator[Row]:
    for rows, width in MOVED[:1] if timer.quick else MOVED:
        x, y = timer.tensor(rows, width, grad=True), timer.tensor(rows, width, grad=True)
        weight, bias = timer.tensor(width, grad=True), timer.tensor(width, grad=True)
        cos, sin = timer.tensor(rows, 1, 128), timer.tensor(rows, 1, 128)
        heads = timer.tensor(rows, width // 128, 128, grad=True)
        cases: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "layer_norm": (lambda x, w, b, width=width: functional.layer_norm(x, (width,), w, b), (x, weight, bias)),
            "rms_norm": (lambda x, w, width=width: functional.rms_norm(x, (width,), w), (x, weight)),
            "rms_norm, unfused": (_rms_norm, (x, weight)),
            "gelu": (partial(functional.gelu, approximate="tanh"), (x,)),
            "silu": (functional.silu, (x,)),
            "swiglu, unfused": (lambda x, y: functional.silu(x) * y, (x, y)),
            "multiply": (torch.mul, (x, y)),
            "add": (torch.add, (x, y)),
            "rotary, unfused": (lambda x, cos=cos, sin=sin: _rotated(x, cos, sin), (heads,)),
            "cast": (torch.Tensor.float, (x,)),
        }
        for name, (function, leaves) in cases.items():
            out = function(*leaves)
            both = timer.seconds(partial(_with_backward, function, leaves, torch.randn_like(out)))
            with torch.no_grad():
                seconds = timer.seconds(partial(function, *leaves))
            row = {"kind": name, "dtype": "bfloat16", "rows": rows, "width": width}
            yield row | {"pass": "forward", "seconds": seconds}
            yield row | {"pass": "backward", "seconds": both - seconds}
        order = torch.randperm(rows, device=timer.device)
        yield {
            "kind": "permute",
            "rows": rows,
            "width": width,
            "seconds": timer.seconds(partial(torch.index_select, x.detach(), 0, order)),
        }
        into = torch.zeros_like(x)
        added = timer.seconds(partial(into.index_add_, 0, order, x.detach()))
        yield {"kind": "index_add", "rows": rows, "width": width, "seconds": added}
        copied = timer.seconds(partial(into.copy_, x.detach()))
        yield {"kind": "copy", "rows": rows, "width": width, "seconds": copied}


def _losses(timer: Timer) -> Iterator[Row]:
    for rows, words in ((64, 512),) if timer.quick else ((4096, 32000), (4096, 128256), (8192, 151936)):
        for dtype in (torch.bfloat16, torch.float32):
            logits = timer.tensor(rows, words, grad=True, dtype=dtype)
            targets = torch.randint(words, (rows,), device=timer.device)
            function = partial(functional.cross_entropy, target=targets)
            one = torch.ones((), device=timer.device, dtype=dtype)
            both = timer.eager_seconds(partial(_with_backward, function, (logits,), one))
            seconds = timer.eager_seconds(partial(function, logits))
            row = {"kind": "cross_entropy", "dtype": str(dtype).removeprefix("torch."), "rows": rows, "width": words}
            yield row | {"pass": "forward", "seconds": seconds}
            yield row | {"pass": "backward", "seconds": both - seconds}
            del logits
        table, ids = (
            timer.tensor(words, 512 if timer.quick else 4096, grad=True),
            torch.randint(words, (rows,), device=timer.device),
        )
        look_up = partial(functional.embedding, ids)
        both = timer.eager_seconds(partial(_with_backward, look_up, (table,), torch.randn_like(look_up(table))))
        seconds = timer.eager_seconds(partial(look_up, table))
        row = {"kind": "embedding", "dtype": "bfloat16", "rows": rows, "width": table.shape[1], "groups": words}
        yield row | {"pass": "forward", "seconds": seconds}
        yield row | {"pass": "backward", "seconds": both - seconds}


def _updates(timer: Timer) -> Iterator[Row]:
    """One step of AdamW in float32, of matrices as a layer has them."""
    for number, width in ((2, 64),) if timer.quick else ((7, 4096), (64, 4096)):
        weights = [torch.nn.Parameter(timer.tensor(width, width, dtype=torch.float32)) for _ in range(number)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        for name, flags in {"fused": {"fused": True}, "foreach": {"foreach": True}}.items():
            optimizer = torch.optim.AdamW(weights, **flags)  # type: ignore[arg-type]
            optimizer.step()
            seconds = timer.eager_seconds(optimizer.step)
            yield {
                "kind": f"adamw, {name}",
                "dtype": "float32",
                "rows": number * width,
                "width": width,
                "seconds": seconds,
            }
        del optimizer


def _copies(timer: Timer) -> Iterator[Row]:
    if timer.device != "cuda":
        return
    for size in COPIED:
        here = torch.empty(size, dtype=torch.uint8, device="cuda")
        back = torch.empty(size, dtype=torch.uint8, device="cuda")
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        other = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        offload, load = partial(host.copy_, here, non_blocking=True), partial(back.copy_, other, non_blocking=True)
        first, second = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]

        def both(
            first: torch.cuda.Stream = first, second: torch.cuda.Stream = second, a: Call = offload, b: Call = load
        ) -> None:
            now = torch.cuda.current_stream()
            for stream, call in ((first, a), (second, b)):
                stream.wait_stream(now)
                with torch.cuda.stream(stream):
                    call()
            now.wait_stream(first)
            now.wait_stream(second)

        calls: dict[str, Call] = {"offload": offload, "load": load, "offload and load": both}
        for name, call in calls.items():
            yield {"kind": name, "bytes": size, "seconds": timer.eager_seconds(call)}


def host(timer: Timer) -> Iterator[Row]:
    """Yield what the host takes for one operator, forward and backward: the device has nothing to do."""
    x, w = timer.tensor(8, 8, grad=True), timer.tensor(8, 8, grad=True)
    layer = torch.nn.Linear(8, 8, device=timer.device, dtype=DTYPE)
    norm = torch.nn.LayerNorm(8, device=timer.device, dtype=DTYPE)
    q = timer.tensor(1, 2, 16, 64, grad=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "add": partial(torch.add, x, w),
        "linear": partial(layer, x),
        "layer_norm": partial(norm, x),
        "attention": partial(functional.scaled_dot_product_attention, q, q, q, is_causal=True),
    }
    for name, call in calls.items():
        for backward in (False, True):
            times = []
            for _ in range(5):
                if timer.device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(200):
                    out = call()
                    if backward:
                        torch.autograd.backward(out, out.detach())
                times.append((time.perf_counter() - begin) / 200)
            yield {
                "kind": f"host, {name}",
                "pass": "both" if backward else "forward",
                "seconds": statistics.median(times),
            }


def sustained(timer: Timer) -> Iterator[Row]:
    """Yield the rate of large products over time, while the card grows warm."""
    seconds = 0.001 if timer.quick else 10.0
    n = 8192 if timer.device == "cuda" else 64
    x, y = timer.tensor(n, n), timer.tensor(n, n)
    begin = time.perf_counter()
    call = partial(torch.mm, x, y)
    calls = 100 if timer.device == "cuda" else 1

    def many() -> None:
        for _ in range(calls):
            call()

    while time.perf_counter() - begin < seconds:
        elapsed = timer.once(many) / calls
        row = {"kind": "gemm", "dtype": "bfloat16", "m": n, "n": n, "k": n, "sustained": 1, "pass": "forward"}
        yield row | {"seconds": elapsed, "at_s": round(time.perf_counter() - begin, 2)}


PARTS: dict[str, Callable[[Timer], Iterator[Row]]] = {
    "host": host,
    "products": _products,
    "attention": _attentions,
    "experts": _experts,
    "moved": _moved,
    "losses": _losses,
    "updates": _updates,
    "copies": _copies,
    "sustained": sustained,
}
COLUMNS = (
    *("device", "kind", "pass", "dtype", "m", "n", "k", "groups", "batch", "seq", "heads", "kv_heads", "head_dim"),
    *("causal", "backend", "rows", "width", "bytes", "sustained", "seconds", "at_s", "reason"),
)


def main(arguments: list[str] | None = None) -> int:
    """Write the table, and print how many rows it has by kind.

    Each part is a process, since nothing runs after a graph whose capture failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kernels", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="rehearse on the CPU, with little of everything")
    parser.add_argument("--out", type=Path, default=Path("kernels.csv"))
    parser.add_argument("--parts", default=",".join(PARTS), help="only these, separated by commas")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    if not given.worker:
        begin, failed = time.perf_counter(), 0
        with given.out.open("w", newline="") as file:
            csv.DictWriter(file, COLUMNS).writeheader()
        for part in parts:
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu_kernels",
                "--worker",
                "--parts",
                part,
                "--out",
                str(given.out),
            ]
            failed += subprocess.run([*command, *(["--dry"] if given.dry else [])], check=False).returncode != 0
        print(f"{time.perf_counter() - begin:.0f} s, written to {given.out}")
        return failed
    timer = Timer("cpu" if given.dry else "cuda", quick=given.dry)
    device = "cpu" if given.dry else torch.cuda.get_device_name()
    counts: dict[str, int] = {}
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        for part in parts:
            try:
                for row in PARTS[part](timer):
                    writer.writerow({"device": device} | row)
                    kind = "not measured" if "reason" in row else str(row["kind"])
                    counts[kind] = counts.get(kind, 0) + 1
                    file.flush()
            finally:
                print(f"{part}: " + ", ".join(f"{kind} {number}" for kind, number in counts.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
