"""Programs: forward and backward passes of a traced layer under a memory strategy.

The strategy (`pipeloom.spec.strategies`) decides which tensors are kept. All others are recomputed: their operator runs
again when the backward first needs them, once. Offloaded tensors move to the host and back over PCIe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, assert_never

from pipeloom.emulator.collectives import ring
from pipeloom.emulator.size import ONE, ZERO, Size
from pipeloom.emulator.tape import PCIE, Cost, Record, Tape, Tensor
from pipeloom.spec import TRAITS, Strategy

Part = Literal["F", "B", "I", "W"]

ENTRY, PREVIOUS = -1, -2
"""Input ports of a program: its activation or gradient is ready; the layer before it was entered."""

ALIVE = -1


@dataclass(eq=False)
class Buffer:
    """Memory of one tensor: operator ``made`` creates it (`ALIVE`: it exists at entry), and ``used`` read it."""

    num_bytes: Size
    made: int
    used: list[int] = field(default_factory=list)
    kept: bool = False


@dataclass(eq=False)
class Program:
    """Operators of one pass in issue order.

    ``before[i]`` are the operators (or ports) that operator i waits for. ``result`` is the operator whose end makes the
    pass's output ready.
    """

    costs: list[Cost] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    result: int = ENTRY


@dataclass(frozen=True)
class Passes:
    """All passes of one layer under one strategy, and the bytes held between them.

    ``activation_bytes`` are held from F to the backward, ``weight_gradient_bytes`` from I to W, ``host_bytes`` on the
    host. ``entering_bytes`` are those of the input if no operator saves it, and the executor holds it for the layer.
    ``num_recomputed`` is the number of the forward's operators that run again in the backward.
    """

    programs: dict[Part, Program]
    activation_bytes: Size
    weight_gradient_bytes: Size
    host_bytes: Size
    entering_bytes: Size
    num_recomputed: int


def kept_tensors(tape: Tape, strategy: Strategy) -> list[Tensor]:
    """Return the tensors that the forward keeps, each once, in the order in which they are first needed."""
    wanted: dict[Tensor, None] = {}
    seen: set[Tensor] = set()

    def recomputed(record: Record) -> bool:
        match TRAITS[strategy].recomputes:
            case "nothing":
                return False
            case "cheap":
                return not _is_product(record) if tape.context.in_blocks else record.cheap
            case "all":
                return True
            case unknown:
                assert_never(unknown)

    def want(tensor: Tensor) -> None:
        if tensor in seen:
            return
        seen.add(tensor)
        record = tensor.producer
        if record is None or not (record.transient or recomputed(record)):
            wanted[tensor] = None
            return
        for source in record.inputs:
            want(source)

    for record in tape.records:
        for tensor in _needed(record):
            want(tensor)
        if tape.context.in_blocks and TRAITS[strategy].recomputes == "cheap" and _is_product(record):
            # Also if only a sum reads them.
            want(record.outputs[0])
    return list(wanted)


def _is_product(record: Record) -> bool:
    """Return whether PyTorch's selective recomputation keeps the results of an operator.

    It keeps products, convolutions and attention, see `SelectiveRecompute`, and does not see into the kernels of scans.
    """
    kind = record.forward.kind
    return kind in ("matmul", "grouped_matmul", "depthwise", "scan") or kind.endswith("attention")


def _needed(record: Record) -> tuple[Tensor, ...]:
    """Return the forward's tensors that a record's backward reads."""
    flows = any(t.needs_gradient for t in record.inputs)
    inputs = record.saved if record.input_gradient is not None and flows else ()
    return (*inputs, *(record.saved_for_weight if record.weight_gradient is not None else ()))


def make_passes(tape: Tape, entry: Tensor, output: Tensor, strategy: Strategy) -> Passes:
    """Create the passes of a traced layer, whose call took ``entry`` and returned ``output``."""
    kept = kept_tensors(tape, strategy)
    held: dict[tuple[str, Tensor], None] = {}
    programs: dict[Part, Program] = {"F": _Writer(tape, kept, strategy).forward(output)}
    again = 0
    if any(record.weight_gradient or _backs(record) for record in tape.records):
        whole = _Writer(tape, kept, strategy)
        programs["B"] = whole.backward(output, "B", held)
        again = whole.num_recomputed
        held.clear()
        programs["I"] = _Writer(tape, kept, strategy).backward(output, "I", held)
        programs["W"] = _Writer(tape, kept, strategy).weights(list(held))
    total = _total(t.num_bytes for t in kept)
    offloaded = TRAITS[strategy].offloads
    enters = tape.context.in_blocks and entry.needs_gradient and (offloaded or entry not in kept)
    return Passes(
        programs,
        ZERO if offloaded else total,
        _total(t.num_bytes for _, t in held),
        total if offloaded else ZERO,
        entry.num_bytes if enters else ZERO,
        again,
    )


def _total(sizes: Iterable[Size]) -> Size:
    out = ZERO
    for size in sizes:
        out = out + size
    return out


def _backs(record: Record) -> bool:
    """Return whether a gradient flows back through a record."""
    return any(t.needs_gradient for t in record.inputs)


def _source(tensor: Tensor) -> Tensor:
    """Return the tensor that is held instead of a transient one."""
    while tensor.producer is not None and tensor.producer.transient:
        tensor = tensor.producer.inputs[0]
    return tensor


class _Writer:
    """Appends operators to one program and tracks their memory."""

    def __init__(self, tape: Tape, kept: list[Tensor], strategy: Strategy) -> None:
        self.tape, self.kept, self.offloads = tape, kept, TRAITS[strategy].offloads
        self.recomputes = TRAITS[strategy].recomputes != "nothing"
        self.program = Program()
        self.unsharded: list[int] = []
        self.num_recomputed = 0
        self.at: dict[tuple[str, Tensor], tuple[int, Buffer]] = {}
        """Operator after which a value ("x": activation, "g": its gradient) is ready, and its memory."""

    def _unshard(self) -> None:
        """Gather weights that are sharded over data parallelism, one layer ahead (ZeRO-3)."""
        self.unsharded = [self._run(cost, (), [PREVIOUS]) for cost in self._shard_costs("all_gather")]

    def _reduce(self, after: int) -> None:
        """Reduce the gradients of the weights and keep a shard of them (ZeRO-3)."""
        for cost in self._shard_costs("reduce_scatter"):
            self._run(cost, (), [after])

    def _shard_costs(self, kind: str) -> list[Cost]:
        """Return the messages for the sharded weights of a layer, dense ones and those of experts."""
        context, costs = self.tape.context, []
        for expert, (peers, group) in enumerate(zip(context.shards, context.shard_groups, strict=True)):
            total = 0.0
            for weight in self.tape.parameters if peers > 1 else ():
                sent: float = context.gradient_bytes
                if kind == "all_gather":
                    quantized = weight.quantized if context.quantized_weights else None
                    sent = context.dtype_bytes if quantized is None else quantized.num_bytes
                total += weight.local * sent * (weight.expert == bool(expert))
            if total:
                costs.append(ring(kind, ONE * total, peers, group))
        return costs

    def _have(self, role: str, tensor: Tensor, ready: int, *, kept: bool = False) -> Buffer:
        size = tensor.gradient_bytes if role == "g" else tensor.num_bytes
        buffer = Buffer(size, max(ready, ALIVE), kept=kept)
        self.program.buffers.append(buffer)
        self.at[role, tensor] = (ready, buffer)
        return buffer

    def _run(self, cost: Cost, reads: Iterable[tuple[str, Tensor]], after: Iterable[int] = ()) -> int:
        number = len(self.program.costs)
        before = set(after)
        before.update(self.unsharded)
        for value in reads:
            ready, buffer = self.at[value]
            buffer.used.append(number)
            before.add(ready)
        self.program.costs.append(cost)
        self.program.before.append(tuple(sorted(before)))
        return number

    def forward(self, output: Tensor) -> Program:
        """Create the forward pass. Kept tensors and the output outlive it."""
        kept = set(self.kept)
        self._unshard()
        for record in self.tape.records:
            for tensor in record.inputs:
                if ("x", tensor) not in self.at:
                    self._have("x", tensor, ENTRY, kept=tensor in kept and not self.offloads)
            number = self._run(record.forward, [("x", t) for t in record.inputs])
            for tensor in record.outputs:
                self._have("x", tensor, number, kept=tensor in kept and not self.offloads)
        if self.offloads:
            for tensor in self.kept:
                self._run(Cost("offload", network=tensor.num_bytes, device=PCIE, steps=1), [("x", tensor)])
        ready, buffer = self.at["x", output]
        buffer.kept = True
        self.program.result = ready
        return self.program

    def _enter(self) -> None:
        """Add the tensors that the forward kept: in memory, or loaded from the host one layer ahead."""
        for tensor in reversed(self.kept) if self.offloads else self.kept:
            if self.offloads:
                load = Cost("load", network=tensor.num_bytes, device=PCIE, steps=1)
                self._have("x", tensor, self._run(load, (), [PREVIOUS]))
            else:
                self._have("x", tensor, ENTRY)

    def _make(self, tensor: Tensor, after: int) -> None:
        """Add a tensor of the forward. If it was not kept, run its operator again."""
        if ("x", tensor) in self.at:
            return
        record = tensor.producer
        assert record is not None
        for source in record.inputs:
            self._make(source, after)
        number = self._run(record.forward, [("x", t) for t in record.inputs], [after])
        self.num_recomputed += not record.transient
        for made in record.outputs:
            if ("x", made) not in self.at:
                self._have("x", made, number)

    def _gradient(self, tensor: Tensor, ready: int, buffer: Buffer | None = None) -> None:
        """Add a gradient. A second one for the same tensor is added to the first."""
        if ("g", tensor) not in self.at:
            if buffer is None:
                self._have("g", tensor, ready)
            else:
                self.at["g", tensor] = (ready, buffer)
            return
        cost = Cost("add", flops=tensor.rows * tensor.width, memory=tensor.gradient_bytes * 3)
        old = self.at["g", tensor][1]
        number = self._run(cost, [("g", tensor)], [ready])
        if buffer is not None:
            buffer.used.append(number)
        self.at["g", tensor] = (number, old)

    def backward(self, output: Tensor, part: Part, held: dict[tuple[str, Tensor], None]) -> Program:
        """Create the backward: whole (``B``), or only gradients to inputs (``I``).

        ``held`` collects the tensors that W will read.
        """
        self._unshard()
        if part == "B" and any(record.weight_gradient for record in self.tape.records):
            # A link carries messages in the order in which they are issued. The next layer's weights are gathered
            # before this layer's gradients are reduced, so the next, usually equal layer issues the reduction.
            self._reduce(ENTRY)
        self._enter()
        self._have("g", output, ENTRY)
        program = self.program
        if self.tape.context.in_blocks and self.recomputes:
            # The forward of a layer runs again as a whole.
            for record in self.tape.records:
                for tensor in (*_needed(record), record.outputs[0]):
                    self._make(tensor, ENTRY)
        for record in reversed(self.tape.records):
            result = record.outputs[0]
            if ("g", result) not in self.at:
                continue
            ready, buffer = self.at["g", result]
            if record.passes_gradient:
                for tensor in record.inputs:
                    if tensor.needs_gradient:
                        self._gradient(tensor, ready, buffer)
                continue
            if record.weight_gradient is not None and part == "B":
                # Recompute before the input gradient, so that a gather overlaps with its computation.
                for tensor in record.saved_for_weight:
                    self._make(tensor, ready)
            made = self._input_gradient(record, ready) if _backs(record) else None
            if made is not None and record.weight_gradient is None and record.temporary != ZERO:
                program.buffers.append(Buffer(record.temporary, made))
            if record.weight_gradient is not None:
                if part == "B":
                    reads = [("x", t) for t in record.saved_for_weight]
                    program.result = self._run(record.weight_gradient, [*reads, ("g", result)])
                    if record.temporary != ZERO:
                        program.buffers.append(Buffer(record.temporary, program.result))
                else:
                    self._hold(record, held, ready)
            if made is not None:
                for number, tensor in enumerate(record.inputs):
                    if tensor.needs_gradient:
                        place = self.at["x", tensor][1] if record.in_place and not number else None
                        self._gradient(tensor, made, place)
                program.result = made
        entries = [t for t in self._entries() if ("g", t) in self.at]
        for tensor in entries:
            self.at["g", tensor][1].kept = True
        if entries:  # the first is the layer's input; a condition's gradient may come later
            program.result = self.at["g", entries[0]][0]
        return program

    def _entries(self) -> list[Tensor]:
        return list({t: None for r in self.tape.records for t in r.inputs if t.producer is None and t.needs_gradient})

    def _input_gradient(self, record: Record, ready: int) -> int | None:
        if record.input_gradient is None:
            return ready
        for tensor in record.saved:
            self._make(tensor, ready)
        return self._run(record.input_gradient, [*(("x", t) for t in record.saved), ("g", record.outputs[0])])

    def _hold(self, record: Record, held: dict[tuple[str, Tensor], None], ready: int) -> None:
        """Hold the tensors that the weight gradient reads: gradients unchanged, gathered shards as shards."""
        values = [("x", _source(t)) for t in record.saved_for_weight] + [("g", record.outputs[0])]
        for value in values:
            if value[0] == "x":
                self._make(value[1], ready)
            self.at[value][1].kept = True
            held[value] = None

    def weights(self, held: list[tuple[str, Tensor]]) -> Program:
        """Create the weight gradients from the tensors that I held. No other layer waits for them."""
        last = ALIVE
        for role, tensor in held:
            self._have(role, tensor, ENTRY)
        for record in reversed(self.tape.records):
            if record.weight_gradient is None or ("g", record.outputs[0]) not in self.at:
                continue
            for tensor in record.saved_for_weight:
                self._make(tensor, ENTRY)
            reads = [("x", t) for t in record.saved_for_weight]
            last = self._run(record.weight_gradient, [*reads, ("g", record.outputs[0])])
        if last != ALIVE:
            self._reduce(last)
        return self.program
