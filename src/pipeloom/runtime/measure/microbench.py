"""Microbenchmarks: operators and layers timed on this device, for `emulator.fit`.

Counts are the emulator's own: every shape is traced with the emulator's modules, and the torch layer of the same shape
runs. On the CPU, the processor time of one thread is read, so that other processes do not count. On a GPU, events are
used, and the device has other work while the host enqueues what is timed, so that the host's time does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn import functional

from pipeloom.emulator import modules
from pipeloom.emulator.build import local_devices
from pipeloom.emulator.fit import Calibration, CalibrationRow, Measurement, compare, fit_device, mean_error
from pipeloom.emulator.rules import Device
from pipeloom.emulator.stage import Stage, runs_of
from pipeloom.emulator.tape import DEVICE_NAMES, Context
from pipeloom.emulator.template import LayerTemplate
from pipeloom.errors import InputError
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.measure import linkbench
from pipeloom.spec import Workload
from pipeloom.spec.hardware import DeviceSpec
from pipeloom.totals import PS_PER_S

DeviceKind = Literal["cpu", "cuda"]
Progress = Callable[[str], None]
Run = Callable[[], object]


REFERENCE_WIDTH = 192
_WAIT_WIDTH, _MOST_WAITS = 4096, 400
"""Size of the products that keep a device busy until the host has enqueued what is timed, and their largest number."""
SHORTEST_S = 3e-4
MOST_LOOPS = 64


class Bench:
    """Times functions on one device.

    The speed of a shared CPU varies, even in processor time, because hyper-threads and caches are shared. There, a
    reference product is timed before and after every run, and times are scaled to the first speed of the reference. Of
    ``repeats`` timed runs of each function, the lower quartile counts, which excludes disturbed runs.
    """

    def __init__(self, device: DeviceKind, repeats: int = 9) -> None:
        if device == "cuda" and not accelerator.count():
            raise InputError("device", "'cuda' is not available here", "use --device cpu")
        self.device, self.repeats = device, repeats
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        x = self.tensor(REFERENCE_WIDTH, REFERENCE_WIDTH)
        self._reference = partial(torch.matmul, x, x)
        # Not the minimum, because clocks sometimes report far too little.
        times = sorted(self._once(self._reference) for _ in range(8 * repeats)) if device == "cpu" else [1.0]
        self._usual = times[len(times) // 4]
        if device != "cpu":
            y = self.tensor(_WAIT_WIDTH, _WAIT_WIDTH)
            self._wait = partial(torch.matmul, y, y)
            self._wait_s = min(self._once(self._wait) for _ in range(3 + repeats))

    def tensor(self, *shape: int, grad: bool = False) -> torch.Tensor:
        """Return random numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=grad)

    def seconds(self, run: Run, setup: Callable[[], None] | None = None) -> float:
        """Return the lower quartile of the time of one run after two warm-up runs. Short functions run in a loop."""
        for _ in range(2):
            if setup is not None:
                setup()
            first = self._once(run)
        loops = 1 if setup is not None else max(1, min(MOST_LOOPS, int(SHORTEST_S / max(first, 1e-9))))
        behind_s = 0.0 if self.device == "cpu" else self._enqueuing_s(run, setup) * loops

        def many() -> None:
            for _ in range(loops):
                run()

        times = []
        for _ in range(self.repeats):
            if setup is not None:
                setup()
            before = self._slowness()
            elapsed = self._once(many, behind_s) / loops
            times.append(elapsed * 2 / (before + self._slowness()))
        return max(1e-9, sorted(times)[len(times) // 4])

    def _slowness(self) -> float:
        """Return the current time of the reference relative to its first time."""
        if self.device != "cpu":
            return 1.0
        self._reference()  # the caches are someone else's before this
        return self._once(self._reference) / self._usual

    def _enqueuing_s(self, run: Run, setup: Callable[[], None] | None) -> float:
        """Return the time of the host for one run on a device, when it does not wait for the device."""
        if setup is not None:
            setup()
        accelerator.synchronize(torch.device(self.device))
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def _once(self, run: Run, behind_s: float = 0.0) -> float:
        """Time one run. On a device, it begins about ``behind_s`` after the host has begun to enqueue it."""
        if self.device == "cpu":
            begin = time.process_time()
            run()
            return time.process_time() - begin
        here = torch.device(self.device)
        start, end = (accelerator.new_event(here, timing=True) for _ in range(2))
        accelerator.synchronize(here)
        if behind_s:
            # Half as long again, because the host's time varies.
            for _ in range(min(_MOST_WAITS, 1 + int(1.5 * behind_s / self._wait_s))):
                self._wait()
        start.record()
        run()
        end.record()
        accelerator.synchronize(here)
        return float(start.elapsed_time(end)) / 1e3


def _traced(bench: Bench, module: modules.Module, width: int) -> LayerTemplate:
    """A layer as the emulator counts it, on devices whose rates do not matter."""
    plain = Device("compute", flops_per_s=1.0, memory_bytes_per_s=1.0)
    links = tuple(Device(name, network_bytes_per_s=1.0) for name in DEVICE_NAMES[1:])
    context = Context(dtype_bytes=bench.dtype.itemsize, gradient_bytes=bench.dtype.itemsize)
    return LayerTemplate(module, width, context, (plain, *links))


def _counts(
    template: LayerTemplate, work: Workload, part: Literal["F", "I", "W"], name: str, seconds: float, kind: str = ""
) -> Measurement:
    """A measurement of the only (or the named) operator of a pass."""
    costs = [c for c in template.passes["keep"].programs[part].costs if not kind or c.kind == kind]
    flops = sum(c.flops.of(work) for c in costs)
    memory = sum(c.memory.of(work) for c in costs)
    per_key = sum(c.flops_per_key.of(work) for c in costs)
    variant = str(costs[0].variant or "")
    return Measurement(costs[0].kind, name, seconds, flops, memory, variant=variant, flops_per_key=per_key)


def _products(bench: Bench, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Measurement]:
    for rows, inner, outer in shapes:
        template, work = _traced(bench, modules.Linear(inner, outer, bias=False), inner), Workload((rows,))
        x, w, g = bench.tensor(rows, inner), bench.tensor(outer, inner), bench.tensor(rows, outer)
        name = f"matmul {rows} x {inner} x {outer}"
        yield _counts(template, work, "F", name, bench.seconds(partial(functional.linear, x, w)))
        yield _counts(template, work, "I", f"{name}, input gradient", bench.seconds(partial(torch.matmul, g, w)))
        yield _counts(template, work, "W", f"{name}, weight gradient", bench.seconds(partial(torch.matmul, g.t(), x)))


def _attentions(bench: Bench, shapes: Sequence[tuple[int, int, int, bool]]) -> Iterator[Measurement]:
    for length, heads, width, causal in shapes:
        module = modules.Attention(heads, heads, width, causal=causal, rotary=False, fused=False, hidden=heads * width)
        template, work = _traced(bench, module, heads * width), Workload((length,))
        kind = "causal_attention" if causal else "attention"
        q, k, v = (bench.tensor(1, heads, length, width, grad=True) for _ in range(3))
        name = f"attention {length} x {heads} x {width}{' causal' if causal else ''}"

        forward = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=causal)
        yield _counts(template, work, "F", name, bench.seconds(forward), kind)
        seconds = _backward_seconds(bench, forward, (q, k, v))
        yield _counts(template, work, "I", f"{name}, backward", seconds, f"{kind}_backward")


def _backward_seconds(bench: Bench, forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> float:
    """Time of the backward alone."""
    held: list[torch.Tensor] = []

    def setup() -> None:
        held.clear()
        for leaf in leaves:
            leaf.grad = None
        held.append(forward())
        held.append(torch.ones_like(held[0]))

    return bench.seconds(lambda: held[0].backward(held[1]), setup)  # type: ignore[no-untyped-call]


def _elementwise(bench: Bench, shapes: Sequence[tuple[int, int]]) -> Iterator[Measurement]:
    for rows, width in shapes:
        work = Workload((rows,))
        x = bench.tensor(rows, width, grad=True)
        layer = nn.LayerNorm(width, device=bench.device, dtype=bench.dtype)
        template = _traced(bench, modules.Norm("layer"), width)
        label = f"{rows} x {width}"
        yield _counts(template, work, "F", f"norm {label}", bench.seconds(partial(layer, x)))
        # One kernel makes both gradients; its bytes are those of the two operators together.
        both = [_counts(template, work, part, "", 1.0) for part in ("I", "W")]
        seconds = _backward_seconds(bench, partial(layer, x), [x, *layer.parameters()])
        share = both[0].memory_bytes / (both[0].memory_bytes + both[1].memory_bytes)
        for m, part in zip(both, (share, 1 - share), strict=True):
            yield Measurement("norm", f"norm {label}, gradients", seconds * part, m.flops, m.memory_bytes)
        inner = modules.MLP(width, gated=False, hidden=8)
        template = _traced(bench, inner, 8)
        yield _counts(template, work, "F", f"gelu {label}", bench.seconds(partial(functional.gelu, x)), "activation")
        seconds = _backward_seconds(bench, partial(functional.gelu, x), [x])
        yield _counts(template, work, "I", f"gelu {label}, gradient", seconds, "activation")
        template = _traced(bench, modules.MLP(width, fused=False, hidden=8), 8)
        y = bench.tensor(rows, width)
        yield _counts(template, work, "F", f"multiply {label}", bench.seconds(partial(torch.mul, x, y)), "multiply")
        template = _traced(bench, modules.Residual(modules.Linear(width, width)), width)
        with torch.no_grad():
            yield _counts(template, work, "F", f"add {label}", bench.seconds(partial(torch.add, x, y)), "add")


def _copies(bench: Bench, sizes: Sequence[int]) -> Iterator[Measurement]:
    """Measure copies to and from the host, if the device has its own memory."""
    if bench.device == "cpu":
        return
    for size in sizes:
        here = torch.empty(size, dtype=torch.uint8, device=bench.device)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for kind, run in (
            ("offload", partial(host.copy_, here, non_blocking=True)),
            ("load", partial(here.copy_, host, non_blocking=True)),
        ):
            seconds = bench.seconds(run)
            yield Measurement(kind, f"{kind} {size}", seconds, network_bytes=float(size), part="pcie")


class _Block(nn.Module):
    """Pre-norm transformer layer with the same operators as the emulator's."""

    def __init__(self, hidden: int, heads: int, inner: int, causal: bool, gated: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate = nn.Linear(hidden, inner, bias=False) if gated else None
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).view(1, len(x), self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        if self.gate is None:
            out: torch.Tensor = x + self.down(functional.gelu(self.up(y)))
        else:
            out = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


BlockShape = tuple[int, int, int, int, bool, bool]
"""Tokens, hidden width, heads, inner width, causal, gated."""


def measure_layers(bench: Bench, device: DeviceSpec, shapes: Sequence[BlockShape]) -> Iterator[CalibrationRow]:
    """Measure whole layers, forward and backward, and compare with the table's predictions."""
    devices = local_devices(device, 1.0, 0.0)
    context = Context(dtype_bytes=bench.dtype.itemsize, gradient_bytes=bench.dtype.itemsize)
    for tokens, hidden, heads, inner, causal, gated in shapes:
        attention = modules.Attention(
            heads, heads, hidden // heads, causal=causal, rotary=False, fused=False, hidden=hidden
        )
        mlp = modules.MLP(inner, gated=gated, fused=False, hidden=hidden)
        module = modules.Sequential((modules.Residual(attention, "layer"), modules.Residual(mlp, "layer")))
        cost = Stage(runs_of([LayerTemplate(module, hidden, context, devices)])).cost(Workload((tokens,)), ("F", "B"))
        block = _Block(hidden, heads, inner, causal, gated).to(device=bench.device, dtype=bench.dtype)
        x = bench.tensor(tokens, hidden, grad=True)
        forward = bench.seconds(partial(block, x))
        backward = _backward_seconds(bench, partial(block, x), [x, *block.parameters()])
        name = f"{'gated' if gated else 'plain'} layer {tokens} x {hidden}, {heads} heads, {inner}"
        yield CalibrationRow(f"{name}, forward", cost.duration_ps["F"] / PS_PER_S, forward)
        yield CalibrationRow(f"{name}, backward", cost.duration_ps["B"] / PS_PER_S, backward)


class Shapes(NamedTuple):
    """Shapes to measure.

    Products (rows, in, out), attentions (length, heads, head width, causal), rows and widths of elementwise operators,
    whole layers, and bytes of copies.
    """

    products: list[tuple[int, int, int]]
    attentions: list[tuple[int, int, int, bool]]
    rows: list[tuple[int, int]]
    layers: list[BlockShape]
    copies: list[int]

    @property
    def between(self) -> Shapes:
        """Shapes between some of these, to check the fit."""

        def up(n: int) -> int:
            return n * 5 // 4 // 8 * 8

        return Shapes(
            [(up(r), up(a), up(b)) for r, a, b in self.products[1::3]],
            [(up(n), h, w, c) for n, h, w, c in self.attentions[1::3]],
            [(up(r), up(w)) for r, w in self.rows[1::3]],
            [],
            [],
        )


def _shapes(device: DeviceKind, small: bool) -> Shapes:
    """Return the shapes to measure: the papers' sizes on GPUs, sizes that take seconds on a CPU."""
    if device == "cuda":
        tokens, widths = (1024, 4096, 8192), (1792, 4096, 5120, 8192)
        return Shapes(
            [(t, a, b) for t in tokens for a in widths for b in (a, 2 * a, 27648 // 8)],
            [(n, h, 128, c) for n in (1024, 2704, 8192) for h in (8, 16, 32) for c in (False, True)],
            [(t, w) for t in tokens for w in widths],
            [
                (8192, 4096, 32, 14336, True, True),
                (2704, 1792, 16, 15360, False, False),
                (4096, 5120, 40, 13824, True, True),
            ],
            [1 << k for k in range(16, 29, 3)],
        )
    layers: list[BlockShape] = [
        (128, 256, 8, 1024, False, False),
        (256, 320, 10, 896, True, True),
        (384, 512, 16, 1408, True, True),
        (320, 448, 14, 1792, False, False),
    ]
    lengths = (32, 96) if small else (64, 192, 512)
    sizes = (64, 128) if small else (96, 192, 384, 768)
    return Shapes(
        [(t, a, b) for t in lengths for a in sizes for b in (a, 3 * a)],
        [(n, h, 32, c) for n in lengths for h in (2, 8) for c in (False, True)],
        [(t, w) for t in lengths for w in sizes],
        [(48, 96, 4, 256, True, True)] if small else layers,
        [],
    )


def _all(bench: Bench, shapes: Shapes) -> Iterator[Measurement]:
    yield from _products(bench, shapes.products)
    yield from _attentions(bench, shapes.attentions)
    yield from _elementwise(bench, shapes.rows)
    yield from _copies(bench, shapes.copies)


def calibrate(
    device: DeviceKind,
    *,
    name: str = "",
    repeats: int = 9,
    small: bool = False,
    links: bool = True,
    progress: Progress | None = None,
) -> Calibration:
    """Measure and fit, then check against other operators and layers. The CPU is measured on one thread.

    ``small`` uses a few small shapes only (for tests). ``links`` also measures messages and collectives between two new
    processes. A script that calls this needs ``if __name__ == "__main__"``. Links are skipped for ``"cuda"`` with fewer
    than two GPUs.
    """
    say: Progress = progress if progress is not None else lambda _: None
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        bench = Bench(device, repeats)
        shapes = _shapes(device, small)
        between = shapes.between
        say(f"measuring {len(shapes.products)} products, {len(shapes.attentions)} attentions, {len(shapes.rows)} rows")
        fitted = list(_all(bench, shapes))
        say(f"measuring {len(between.products) + len(between.attentions) + len(between.rows)} shapes to check")
        checked = list(_all(bench, between))
        note = _links_note(device, links)
        sizes, between_sizes = linkbench.SIZES, linkbench.BETWEEN
        if small:
            sizes, between_sizes = sizes[::4], between_sizes[1:2]
        over_links: list[Measurement] = []
        if not note:
            say(f"measuring {', '.join(linkbench.KINDS)} between {linkbench.NUM_RANKS} processes")
            over_links = linkbench.measure_links(device, sizes + between_sizes, 1 if small else repeats)
            via = "gloo over loopback" if device == "cpu" else "NCCL"
            note = f"nvlink (the link inside a node) is {via}, {linkbench.NUM_RANKS} processes of this machine"
        fitted_links = over_links[: len(linkbench.KINDS) * len(sizes)]
        table = fit_device(
            fitted + fitted_links,
            name=name or _device_name(device),
            source=f"pipeloom calibrate, torch {torch.__version__}; {note}",
            memory_bytes=_memory_bytes(device),
        )
        say(f"checking {len(shapes.layers)} layers")
        layers = tuple(measure_layers(bench, table, shapes.layers))
        error = f"{mean_error(layers):.1%} on average over {len(layers)} passes of layers, none of them fitted"
        return Calibration(
            msgspec.structs.replace(table, error=error),
            compare(table, checked),
            layers,
            compare(table, over_links[len(fitted_links) :]),
            note,
            (*fitted, *checked, *over_links),
        )
    finally:
        torch.set_num_threads(threads)


def _links_note(device: DeviceKind, wanted: bool) -> str:
    """Return why links are not measured. Empty if they are."""
    if not wanted:
        return "links were not measured, as asked"
    if device == "cuda" and accelerator.count() < linkbench.NUM_RANKS:
        return "links between devices were not measured: there is one GPU"
    return ""


def _device_name(device: DeviceKind) -> str:
    return "one CPU thread" if device == "cpu" else str(accelerator.module_of(device).get_device_name())


def _memory_bytes(device: DeviceKind) -> int:
    if device != "cpu":
        return int(accelerator.module_of(device).get_device_properties(0).total_memory)
    with open("/proc/meminfo") as lines:
        return int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
