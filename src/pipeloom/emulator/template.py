"""`LayerTemplate`: a traced layer as arrays, evaluated for workloads.

A layer is traced once per structure, parallelism and devices. For a new workload, all operators of all passes and
strategies take one matrix product and one kernel call. Results are cached by the features of the workload.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeloom.emulator.modules import Module
from pipeloom.emulator.program import ALIVE, Part, Passes, Program, make_passes
from pipeloom.emulator.rules import PRODUCTS, Device, IntArray, RuleTable
from pipeloom.emulator.size import ZERO, FloatArray, Size, Window, feature_row
from pipeloom.emulator.subgraph import Leaf
from pipeloom.emulator.tape import DEVICE_NAMES, NUM_DEVICES, PCIE, Context, Cost, Parameters, Tape
from pipeloom.errors import InputError
from pipeloom.lazy import lazy_module
from pipeloom.spec import STRATEGIES, TRAITS, Strategy, Workload
from pipeloom.totals import summable

if TYPE_CHECKING:
    from pipeloom.emulator import kernels
else:
    kernels = lazy_module("pipeloom.emulator.kernels")

CACHE_SIZE = 4096
"""Cached workloads per layer; the oldest are dropped first."""


class PassMemory(NamedTuple):
    """Bytes in use during one pass that runs alone: at entry, at peak, and at exit."""

    entry: int
    peak: int
    exit: int


@dataclass(frozen=True, eq=False)
class EvaluatedLayer:
    """A layer on one workload: a reusable subgraph per strategy and part, and the bytes held between parts."""

    leaves: dict[tuple[Strategy, Part], Leaf]
    activation_bytes: dict[Strategy, int]
    weight_gradient_bytes: dict[Strategy, int]
    host_bytes: dict[Strategy, int]
    entering_bytes: dict[Strategy, int]
    """Bytes of the input, if the executor holds it although no operator saves it."""
    output_bytes: int
    model_flops: float
    """Operations of the forward's products (matrices, attention, scans) on one device."""
    memory: dict[tuple[Strategy, Part], PassMemory] = field(default_factory=dict, repr=False)
    """Cached memory of passes."""


class _Operators:
    """The operators of all passes under all strategies as arrays, evaluated for workloads.

    Counts are linear in the features of a workload, so each row here is a vector of coefficients.
    """

    def __init__(self, tape: Tape, devices: tuple[Device, ...], passes: dict[Strategy, Passes], output: Size) -> None:
        self._slices: dict[tuple[Strategy, Part], tuple[int, int]] = {}
        self._shapes: dict[tuple[Strategy, Part], tuple[IntArray, IntArray, IntArray, IntArray]] = {}
        costs: list[Cost] = []
        sizes = [output]
        for strategy, each in passes.items():
            for part, program in each.programs.items():
                begin = len(costs)
                costs += program.costs
                self._slices[strategy, part] = (begin, len(costs))
                self._shapes[strategy, part] = _shape(program)
            sizes += [each.activation_bytes, each.weight_gradient_bytes, each.host_bytes, each.entering_bytes]
        self._strategies = tuple(passes)
        products = [r.forward.flops for r in tape.records if r.forward.kind in PRODUCTS]
        extra = [devices[cost.device].efficiency_of(cost.rule).extra_keys for cost in costs]
        rows = [(c.flops + c.flops_per_key * more, c.memory, c.network) for c, more in zip(costs, extra, strict=True)]
        known = dict.fromkeys(window for row in rows for size in row for window, _ in size.windowed)
        self.windows: tuple[Window, ...] = tuple(known)
        """The windows of which an evaluation needs features."""
        zero = ZERO.row(self.windows)
        self._amounts = np.array([[size.row(self.windows) for size in row] for row in rows]).reshape(-1, 3, len(zero))
        self._table = RuleTable(
            devices,
            tuple(cost.rule for cost in costs),
            np.array([cost.device for cost in costs], np.int64),
            np.array([cost.steps for cost in costs], np.float64),
            np.array([cost.pieces for cost in costs], np.float64),
        )
        self._sizes = np.array([size.row(self.windows) for size in sizes])
        self._flops = np.sum([zero, *(size.row(self.windows) for size in products)], axis=0)

    def amounts(self, feature: FloatArray) -> FloatArray:
        """Return operations, memory bytes and network bytes of every operator, shape (num_operators, 3)."""
        out: FloatArray = self._amounts @ feature
        return out

    def evaluate(self, feature: FloatArray) -> EvaluatedLayer:
        """Return the layer on the workload with these features."""
        durations = self._table.durations_ps(self.amounts(feature))
        leaves = {}
        for key, (begin, end) in self._slices.items():
            device, start, before, outputs = self._shapes[key]
            leaves[key] = Leaf(device, durations[begin:end], start, before, outputs)
        sizes = summable("tensors of a layer", np.rint(self._sizes @ feature)).tolist()
        every = {s: sizes[1 + 4 * i : 5 + 4 * i] for i, s in enumerate(self._strategies)}
        held, weights, host, entering = ({s: found[i] for s, found in every.items()} for i in range(4))
        return EvaluatedLayer(leaves, held, weights, host, entering, sizes[0], float(self._flops @ feature))


class LayerTemplate:
    """A traced layer.

    Parameters
    ----------
    module : Module
        Called on a tensor of ``in_width``.
    devices : tuple of Device
        Compute, NVLink, NIC and PCIe, in the order of `DEVICE_NAMES`.
    trainable : bool
        Whether gradients to its weights are needed.
    input_gradient : bool
        Whether the gradient of its input is needed.
    joined : int
        Rows of a workload's sequences that earlier layers joined into one row of the input.
    """

    def __init__(
        self,
        module: Module,
        in_width: int,
        context: Context,
        devices: tuple[Device, ...],
        *,
        trainable: bool = True,
        input_gradient: bool = True,
        joined: int = 1,
    ) -> None:
        if len(devices) != NUM_DEVICES:
            raise InputError("devices", f"has {len(devices)} entries", f"give {', '.join(DEVICE_NAMES)}")
        tape = Tape(context)
        entry = tape.input(in_width, needs_gradient=input_gradient)
        output = module(entry)
        if not trainable:
            _freeze(tape, input_gradient)
        self.context, self.devices, self.tape = context, devices, tape
        self.output_width, self.output_rows = output.width, output.rows
        self.parameters: tuple[Parameters, ...] = tuple(tape.parameters)
        self.products = frozenset(tape.products)
        self.trainable, self.joined = trainable, joined
        # Without a link to the host, offloading is impossible.
        usable = [s for s in STRATEGIES if not TRAITS[s].offloads or devices[PCIE].network_bytes_per_s]
        self.passes: dict[Strategy, Passes] = {s: make_passes(tape, entry, output, s) for s in usable}
        self._operators = _Operators(tape, devices, self.passes, output.num_bytes)
        self._known: OrderedDict[tuple[float, ...], EvaluatedLayer] = OrderedDict()

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole layer."""
        return round(sum(p.total for p in self.parameters))

    @functools.cached_property
    def local_parameters(self) -> tuple[int, int]:
        """Parameters on one device: dense ones, and those of experts."""
        dense, experts = self._local_parameters(lambda _: 1.0)
        return round(dense), round(experts)

    @functools.cached_property
    def weight_bytes(self) -> tuple[float, float]:
        """Bytes of the weights on one device, without copies that are made for products: dense ones, experts."""
        plain, alone = self.context.dtype_bytes, self.context.quantized_weights
        return self._local_parameters(lambda p: p.quantized.num_bytes if p.quantized and alone else plain)

    @functools.cached_property
    def copied_bytes(self) -> tuple[float, float]:
        """Bytes of quantized copies of the weights on one device, beside `weight_bytes`: dense ones, experts."""
        kept = 1 if self.context.quantized_weights else 0
        return self._local_parameters(
            lambda p: p.quantized.num_bytes * (p.quantized.copies - kept) if p.quantized else 0
        )

    @functools.cached_property
    def cast_bytes(self) -> tuple[float, float]:
        """Bytes that are read and written to quantize the weights on one device: dense ones, experts."""
        plain = self.context.dtype_bytes
        return self._local_parameters(lambda p: p.quantized.cast_bytes(plain) if p.quantized else 0)

    def _local_parameters(self, each: Callable[[Parameters], float]) -> tuple[float, float]:
        """Return sums over the parameters on one device: dense ones, and those of experts."""
        dense = sum(p.local * each(p) for p in self.parameters if not p.expert)
        return dense, sum(p.local * each(p) for p in self.parameters if p.expert)

    def on(self, workload: Workload) -> EvaluatedLayer:
        """Return the layer on one workload, cached."""
        row = feature_row(self._own(workload), self._operators.windows)
        known = self._known.get(row)
        if known is not None:
            self._known.move_to_end(row)
            return known
        known = self._known[row] = self._operators.evaluate(np.array(row))
        if len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)
        return known

    def amounts(self, workload: Workload) -> FloatArray:
        """Return operations, memory bytes and network bytes of every operator, shape (num_operators, 3)."""
        return self._operators.amounts(np.array(feature_row(self._own(workload), self._operators.windows)))

    def _own(self, workload: Workload) -> Workload:
        """Return the workload in rows of the input."""
        if self.joined == 1:
            return workload
        return Workload(tuple(-(-length // self.joined) for length in workload.lengths))

    def memory(self, workload: Workload, strategy: Strategy, part: Part) -> PassMemory:
        """Return the bytes of one pass that runs alone, from the lifetimes of its tensors."""
        known = self.on(workload).memory
        if (strategy, part) not in known:
            known[strategy, part] = self._memory(workload, strategy, part)
        return known[strategy, part]

    def _memory(self, workload: Workload, strategy: Strategy, part: Part) -> PassMemory:
        leaf, buffers = self.on(workload).leaves[strategy, part], self.passes[strategy].programs[part].buffers
        free, ready = np.zeros(NUM_DEVICES, np.int64), np.zeros(2, np.int64)
        ends: IntArray = kernels.issue(
            leaf.device, leaf.predecessor_start, leaf.predecessor, leaf.duration_ps, free, ready
        )
        begin, end = (ends - leaf.duration_ps).tolist(), ends.tolist()
        workload = self._own(workload)
        entry = left = 0
        changes: list[tuple[int, int]] = []
        for buffer in buffers:
            size = round(buffer.num_bytes.of(workload))
            changes.append((0 if buffer.made == ALIVE else begin[buffer.made], size))
            if buffer.made == ALIVE:
                entry += size
            if buffer.kept:
                left += size
            else:
                gone = max((end[i] for i in (buffer.made, *buffer.used) if i != ALIVE), default=0)
                changes.append((gone, -size))
        # Memory that ends at a time is free at this time.
        peak = max(itertools.accumulate((change for _, change in sorted(changes)), initial=0))
        return PassMemory(entry, max(entry, left, peak), left)


def _freeze(tape: Tape, input_gradient: bool) -> None:
    """Drop gradients to the weights. Without an input gradient, there are no gradients at all."""
    for record in tape.records:
        record.weight_gradient = None
        if not input_gradient:
            for tensor in record.outputs:
                tensor.needs_gradient = False
    for record in tape.records:
        if not any(t.needs_gradient for t in record.inputs):
            for tensor in record.outputs:
                tensor.needs_gradient = False


def _shape(program: Program) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the arrays of a program that do not depend on the workload."""
    start = np.zeros(len(program.costs) + 1, np.int64)
    np.cumsum([len(b) for b in program.before], out=start[1:])
    return (
        np.array([c.device for c in program.costs], np.int64),
        start,
        np.array([b for before in program.before for b in before], np.int64),
        # Result of the pass, and its entry, which is "the layer before" for the next layer.
        np.array([program.result, -1], np.int64),
    )
