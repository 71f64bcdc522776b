"""Kernels of traces of torch.profiler, with the shapes of the operators that launched them.

The operator is the one that was running when the host launched the kernel, or has the kernel's ``External id``. It has
``Input Dims`` if shapes were recorded (``record_shapes=True``). Kernels of NCCL have the size of their message
themselves, or the operator ``record_param_comms`` has it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import msgspec

from pipeloom.calibration.evidence import AttentionShape, Direction, Evidence, newer_kernels, other_device
from pipeloom.io.kineto import RawEvent, TraceArguments, TraceFile, read_trace_file

_LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})
_BESIDE = 0.05
"""Share of a kernel's time beside a collective from which it is not used: both are then slower than alone."""
_BYTES = {
    **dict.fromkeys(("c10::BFloat16", "BFloat16", "c10::Half", "Half", "bfloat16"), 2),
    **dict.fromkeys(("float", "Float", "int", "Int", "c10::Float", "float32"), 4),
    **dict.fromkeys(("double", "Double", "long int", "long", "Long"), 8),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
"""Bytes of an element, by the profiler's names of types."""
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Position of the left matrix; the right one follows."""
_ATTENTIONS: dict[str, tuple[int, int, Direction]] = {
    "aten::_scaled_dot_product_flash_attention": (0, 4, "forward"),
    "aten::_scaled_dot_product_cudnn_attention": (0, 6, "forward"),
    "aten::_scaled_dot_product_flash_attention_backward": (1, 11, "backward"),
    "aten::_scaled_dot_product_cudnn_attention_backward": (1, 14, "backward"),
}
"""Position of the queries (keys and values follow), position of ``is_causal``, and direction."""
_BIAS = {"aten::_scaled_dot_product_cudnn_attention": 3, "aten::_scaled_dot_product_cudnn_attention_backward": 8}
"""Position of a mask."""
_MEMORY_BOUND = {
    "aten::native_layer_norm": ("norm", 2),
    "aten::_fused_rms_norm": ("norm", 2),
    "aten::native_layer_norm_backward": ("norm", 3),
    "aten::_fused_rms_norm_backward": ("norm", 3),
    "aten::gelu": ("activation", 2),
    "aten::silu": ("activation", 2),
    "aten::gelu_backward": ("activation", 3),
    "aten::silu_backward": ("activation", 3),
    "aten::add": ("add", 3),
    "aten::add_": ("add", 3),
    "aten::mul": ("multiply", 3),
    "aten::mul_": ("multiply", 3),
}
"""Kind of operator, and tensors of the first input's size that it reads and writes. A sum or product reads and writes
tensors of its result's size; an input counts only if it has this size."""
_COMMUNICATION = "record_param_comms"
_KNOWN = frozenset({*_PRODUCTS, *_ATTENTIONS, *_MEMORY_BOUND, _COMMUNICATION})


class _Operator(NamedTuple):
    """An operator of the host, and the index of the operator around it (-1: none)."""

    start: float
    end: float
    event: RawEvent
    parent: int


def read_trace(evidence: Evidence, path: str) -> None:
    """Add the kernels of one trace."""
    file = read_trace_file(path)
    kernels = [e for e in file.events if e.ph == "X" and e.cat == "kernel" and e.args is not None]
    if not kernels:
        return evidence.reject("trace without kernels: of a CPU, or recorded without ProfilerActivity.CUDA")
    stated = next((name for name in _device_names(file) if other_device(name, evidence.base)), "")
    if stated:
        return evidence.reject(f"measured on another device ({stated[:60]})", len(kernels))
    if newer := newer_kernels([kernel.name for kernel in kernels], evidence.base):
        return evidence.reject(f"measured on a newer device (kernel {newer[:60]})", len(kernels))
    _add_operators(evidence, _Operators(file), kernels)
    return None


def _device_names(file: TraceFile) -> Iterator[str]:
    for each in file.devices if isinstance(file.devices, list) else ():
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            yield each["name"]


class _Operators:
    """Operators of the host by their ids, and by thread and time."""

    def __init__(self, file: TraceFile) -> None:
        self.all: list[_Operator] = []
        self.by_id: dict[Any, int] = {}
        self.by_thread: dict[Any, tuple[list[float], list[int]]] = {}
        self.launches: dict[Any, tuple[Any, float]] = {}
        threads: dict[Any, list[RawEvent]] = defaultdict(list)
        for event in file.events:
            if event.ph == "X" and event.cat == "cpu_op":
                threads[str(event.tid)].append(event)
            elif event.cat in _LAUNCH and event.args is not None:
                self.launches[event.args.correlation] = (str(event.tid), event.ts)
        for thread, events in threads.items():
            self._nest(thread, sorted(events, key=lambda e: (e.ts, -e.dur)))

    def _nest(self, thread: Any, events: Sequence[RawEvent]) -> None:
        open_: list[int] = []
        starts, numbers = [], []
        for event in events:
            while open_ and self.all[open_[-1]].end <= event.ts:
                open_.pop()
            number = len(self.all)
            self.all.append(_Operator(event.ts, event.ts + event.dur, event, open_[-1] if open_ else -1))
            if event.args is not None and isinstance(event.args.external, int):
                self.by_id[event.args.external] = number
            open_.append(number)
            starts.append(event.ts)
            numbers.append(number)
        self.by_thread[thread] = (starts, numbers)

    def around(self, kernel: RawEvent) -> Iterator[int]:
        """Yield the operators around the launch of a kernel, from the innermost outwards."""
        assert kernel.args is not None
        number = -1
        if kernel.args.correlation in self.launches:
            thread, at = self.launches[kernel.args.correlation]
            starts, numbers = self.by_thread.get(thread, ([], []))
            index = bisect_right(starts, at) - 1
            number = numbers[index] if index >= 0 else -1
            while number >= 0 and self.all[number].end < at:
                number = self.all[number].parent
        # Some versions write the correlation there if a kernel has no operator, so the launch counts first.
        elif isinstance(kernel.args.external, int):
            number = self.by_id.get(kernel.args.external, -1)
        while number >= 0:
            yield number
            number = self.all[number].parent


def _add_operators(evidence: Evidence, operators: _Operators, kernels: Sequence[RawEvent]) -> None:
    """Add operators, with the sum of their kernels' times, and collectives."""
    messages = [kernel for kernel in kernels if "nccl" in kernel.name.lower()]
    busy = _merged([(kernel.ts, kernel.ts + kernel.dur) for kernel in messages])
    seconds: dict[int, float] = defaultdict(float)
    names: dict[int, list[str]] = defaultdict(list)
    beside = set()
    for kernel in kernels:
        found = next((n for n in operators.around(kernel) if operators.all[n].event.name in _KNOWN), -1)
        if "nccl" in kernel.name.lower():
            own = kernel.args if kernel.args is not None and kernel.args.collective else None
            of_operator = operators.all[found].event.args if found >= 0 else None
            _add_collective(evidence, own or of_operator, kernel.dur * 1e-6)
        elif found < 0:
            evidence.reject("kernel of an operator that calibrate does not read")
        else:
            seconds[found] += kernel.dur * 1e-6
            names[found].append(kernel.name)
            if _overlap(busy, kernel.ts, kernel.ts + kernel.dur) > _BESIDE * kernel.dur:
                beside.add(found)
    for number, total in seconds.items():
        if number in beside:
            evidence.reject("kernel that ran beside a collective, which slows both", len(names[number]))
        else:
            _add_operator(evidence, operators.all[number].event, total, names[number])


def _merged(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def _overlap(busy: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    at = max(0, bisect_right(busy, (begin, float("inf"))) - 1)
    total = 0.0
    while at < len(busy) and busy[at][0] < end:
        total += max(0.0, min(end, busy[at][1]) - max(begin, busy[at][0]))
        at += 1
    return total


def _add_collective(evidence: Evidence, args: TraceArguments | None, seconds: float) -> None:
    if args is None or not isinstance(args.collective, str):
        return evidence.reject("collective without its size in the trace")
    if args.collective == "all_to_allv":
        return evidence.reject("all-to-all of uneven parts")
    width, size = _BYTES.get(str(args.dtype)), args.group_size
    gathers = "gather" in args.collective or args.collective == "recv"
    elements = args.output_elements if gathers else args.input_elements
    if width is None or not isinstance(elements, int) or not isinstance(size, int) or elements < 1:
        return evidence.reject("collective without its size in the trace")
    if args.collective in ("send", "recv") and size > 2:
        return evidence.reject("message between two of more devices, whose nodes the trace does not say")
    nodes = 0
    ranks = [int(text) for text in re.findall(r"\d+", str(args.group_ranks or ""))]
    if len(ranks) == size:
        nodes = len({rank // evidence.per_node for rank in ranks})
    return evidence.collective(args.collective, elements * width, seconds, size, nodes=nodes, hot=True)


def _add_operator(evidence: Evidence, event: RawEvent, seconds: float, kernels: Sequence[str]) -> None:
    args = event.args or TraceArguments()
    dims, types, values = _list(args.dims), _list(args.types), _list(args.values)
    if not dims or not types:
        return evidence.reject("kernel without shapes; record with record_shapes=True", len(kernels))
    try:
        if event.name in _PRODUCTS:
            if event.name == "aten::_scaled_mm" and prod(dims[2] or [1]) > max(1, dims[0][0]):
                return evidence.reject("product of FP8 with scales of blocks, whose precision the trace does not name")
            _product(evidence, dims, types, _PRODUCTS[event.name], seconds)
        elif event.name in _ATTENTIONS:
            _attention(evidence, event.name, (dims, types, values), seconds, kernels)
        elif event.name in _MEMORY_BOUND:
            _moved(evidence, event.name, dims, types, seconds)
        else:
            evidence.reject("kernel of an operator that calibrate does not read", len(kernels))
    except (LookupError, TypeError, ValueError):
        evidence.reject("operator whose recorded shapes do not have the expected form", len(kernels))
    return None


def _list(raw: msgspec.Raw) -> list[Any]:
    if not len(raw):
        return []
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return []
    return found if isinstance(found, list) else []


def _product(evidence: Evidence, dims: Sequence[Any], types: Sequence[str], first: int, seconds: float) -> None:
    left, right = dims[first], dims[first + 1]
    *batch, m, k = left
    n = right[-1]
    evidence.product((m, n, k), seconds, _dtype(types[first]), batch=prod(batch), hot=True)


def _dtype(name: str) -> str:
    """Return the precision by the profiler's name; products of FP8 have one scale a tensor, or many."""
    return "fp8" if "Float8" in name else name


def _attention(
    evidence: Evidence,
    name: str,
    recorded: tuple[Sequence[Any], Sequence[str], Sequence[str]],
    seconds: float,
    kernels: Sequence[str],
) -> None:
    dims, types, values = recorded
    at, causal, direction = _ATTENTIONS[name]
    if name in _BIAS and dims[_BIAS[name]]:
        return evidence.reject("attention with a mask of its own", len(kernels))
    batch, heads, queries, width = dims[at]
    _, kv_heads, keys, _ = dims[at + 1]
    shape = AttentionShape(batch, queries, keys, heads, kv_heads, width, dims[at + 2][-1], values[causal] == "True")
    # Kernels of version 3 name Hopper's architecture.
    flash2 = "flash" in name and not any(re.search(r"sm_?(9|1)\d", kernel) for kernel in kernels)
    return evidence.attention(shape, seconds, types[at], direction=direction, hot=True, flash2=flash2)


def _moved(evidence: Evidence, name: str, dims: Sequence[Any], types: Sequence[str], seconds: float) -> None:
    kind, tensors = _MEMORY_BOUND[name]
    size, dtype = prod(dims[0]), types[0]
    if kind in ("add", "multiply"):
        inputs = [prod(shape) for shape in dims[:2]]
        # Either input may be broadcast. Smaller ones are not counted.
        size = prod(map(max, zip_longest(reversed(dims[0]), reversed(dims[1]), fillvalue=1)))
        dtype = types[0] if inputs[0] >= inputs[1] else types[1]
        tensors = 1 + inputs.count(size)
    evidence.moved(kind, size * _BYTES[dtype] * tensors, seconds, hot=True)
