"""Run a model on several sizes: one block of each kind, and what stands before and behind the blocks."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.integrations.tracing.build import quiet
from pipeloom.integrations.tracing.fitting import Features, TraceError
from pipeloom.integrations.tracing.fusion import Segment
from pipeloom.integrations.tracing.kernels import MaskShape, kernels
from pipeloom.integrations.tracing.recorder import Record, Recorder, Value, scopes
from pipeloom.integrations.transformers.smaller import signature

Call = Callable[[], Any]


@dataclass(eq=False)
class BlockRun:
    """One block at one size: what it ran forward, and the operations of its backward."""

    segment: Segment
    result: Value | None
    backward_flops: float | None
    """None: its backward did not run at this size."""


@dataclass(eq=False)
class TowerRun:
    """What a model ran at one size for one tower.

    Attributes
    ----------
    before : Segment
        What makes the state at the entry from inputs, and from what other towers and their adapters return.
    after : Segment
        What follows the last block; of several towers, what is computed from this one's result alone.
    between : dict of int to Segment
        What changes the state behind a block.
    sources : set of int
        Towers whose results ``before`` reads.
    """

    running: RunningTower
    before: Segment
    after: Segment
    between: dict[int, Segment]
    sources: set[int] = field(default_factory=set)

    @property
    def packed(self) -> tuple[int, ...]:
        """Lengths of the sequences in one packed row, of the attention with the fewest; empty: no attention has any."""
        rows = math.prod(self.running.shape[:-1])
        every = [
            record.about["lengths"]
            for block in self.running.blocks.values()
            for record in block.segment.records
            if record.name == "attention" and "lengths" in record.about and record.about["keys"] is None
        ]
        return min((each for each in every if sum(each) == rows), key=len, default=())

    @property
    def reads_numbers(self) -> bool:
        """Whether ``before`` reads floating-point numbers of the batch, such as pixels."""
        made = {value for record in self.before.records for value in record.writes}
        read = {use.value for record in self.before.records for use in record.reads} - made
        return any(not (value.differentiable or value.real or value.parameters) for value in read)


@dataclass(eq=False)
class Tower:
    """A list of blocks, the kind of each, and its runs.

    ``kinds`` has the place of the first block of the same kind. ``names`` has the path of each block; empty: its place
    behind ``path``. ``features`` has the workload of each run.
    """

    path: str
    blocks: list[nn.Module]
    kinds: list[int]
    runs: list[TowerRun] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def prefix(self, place: int) -> str:
        """Return what the names of a block's parameters begin with."""
        return f"{self.names[place] if self.names else f'{self.path}.{place}'}."

    def holds(self, name: str) -> bool:
        """Return whether a parameter belongs to the blocks, by its name."""
        return name.startswith(tuple(f"{each}." for each in self.names) or f"{self.path}.")


def _towers(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of modules, by path."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(path.startswith(f"{p}.") for p in found):
            found[path] = module
    return found


def _state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the state that a block is called with: its first floating-point tensor."""
    return next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()), None)


def _result(output: Any) -> Tensor | None:
    return next((t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()), None)


def _digest(value: Any) -> Any:
    """Return what tells an argument of one kind of block from that of another."""
    if isinstance(value, MaskShape):
        return value.get("causal"), value.get("window"), value.get("chunk")
    if isinstance(value, Tensor):
        known = not value.is_meta and value.numel() <= 1 << 16
        return tuple(value.shape), str(value.dtype), hash(_numbers(value)) if known else None
    if isinstance(value, dict):
        return tuple((key, _digest(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_digest, value))
    return value if isinstance(value, (bool, str, int, float, type(None))) else type(value).__name__


def _numbers(value: Tensor) -> bytes:
    return bytes(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy())


class Search:
    """The calls of lists of modules, of which only the first of each kind runs.

    ``calls`` has the place of each called module and its kind, by the path of the list. The place is -1 if its result
    has not the shape of its state.
    """

    def __init__(self, signature: Callable[[nn.Module], Any] = signature) -> None:
        self.signature = signature
        self.calls: dict[str, list[tuple[int, Any]]] = {}
        self._outputs: dict[Any, Any] = {}

    def call(self, block: nn.Module, path: str, place: int, *args: Any, **kwargs: Any) -> Any:
        """Run a module, or return what one of its kind returned."""
        key = path, self.signature(block), _sizes(block), _digest((args, kwargs))
        if key in self._outputs:
            output = tree_map(_fresh, self._outputs[key])
        else:
            output = self._outputs[key] = type(block).forward(block, *args, **kwargs)
        state, result = _state(args, kwargs), _result(output)
        same = state is not None and result is not None and state.shape == result.shape
        self.calls.setdefault(path, []).append((place if same else -1, key))
        return output


class Tracer:
    """Runs one model under one recorder."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.recorder = Recorder(dict(model.named_parameters()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace kernels and dispatch operators to the recorder."""
        with quiet(), kernels(self.recorder, self.model), scopes(self.recorder, self.model), self.recorder:
            yield

    def search(self, call: Call, lists: Mapping[str, Iterable[nn.Module]], search: Search) -> None:
        """Run a call, and note in a search which modules of the lists it calls."""
        self.recorder.searching = True
        try:
            for path, modules in lists.items():
                for place, module in enumerate(modules):
                    module.forward = partial(search.call, module, path, place)
            with self.running(), torch.no_grad():
                call()
        finally:
            self.recorder.searching = False
            for module in (each for modules in lists.values() for each in modules):
                module.__dict__.pop("forward", None)

    def find(self, call: Call) -> list[Tower]:
        """Return the towers that a call runs from end to end, and the kind of each of their blocks."""
        lists = _towers(self.model)
        search = Search()
        self.search(call, lists, search)
        found = []
        for path, calls in search.calls.items():
            places = [place for place, _ in calls]
            if places != list(range(len(places))) or len(places) < 1:
                continue
            keys = [key for _, key in calls]
            found.append(Tower(path, list(lists[path])[: len(places)], [keys.index(key) for key in keys]))
        if not found:
            raise TraceError("model", "has no list of blocks that its forward pass calls from end to end")
        return found

    @contextmanager
    def recording(self, *towers: RunningTower) -> Iterator[list[Record]]:
        """Record what a model runs outside of the towers, of which the first block of each kind runs."""
        with self.running(), torch.enable_grad(), ExitStack() as stack:
            for each in towers:
                stack.enter_context(each.replaced())
            yield stack.enter_context(self.recorder.recording())

    def run(self, tower: Tower, call: Call, *, backward: bool) -> None:
        """Run a tower at one size, and append what it ran. ``backward`` runs the blocks' backward too."""
        run = RunningTower(self.recorder, tower, backward=backward)
        with self.recording(run) as outer:
            output = call()
        tower.runs.append(run.finish(output, outer))

    def taken(self, tower: Tower, call: Call, taps: Sequence[set[str]]) -> dict[int, int]:
        """Return which blocks of a tower take which stream, by the number of the stream.

        ``taps`` has the parameters from which each stream is computed. A stream is taken where a value that depends on
        them enters the tower behind a block.
        """
        run = RunningTower(self.recorder, tower, backward=False)
        with self.recording(run) as outer:
            call()
        taints: dict[Value, frozenset[int]] = {}
        found: dict[int, int] = {}
        positions = [position for position, _, _ in run.marks]
        for number, record in enumerate(outer):
            taint = frozenset(i for u in record.reads for i, tap in enumerate(taps) if tap & u.value.parameters)
            taint = taint.union(*(taints.get(u.value, frozenset()) for u in record.reads))
            taints |= dict.fromkeys(record.writes, taint)
            place = bisect_right(positions, number) - 1
            if taint and 0 <= place < len(positions) - 1:
                for stream in taint:
                    found.setdefault(place, stream)
        return found


def _sizes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


class NoGradientError(TraceError):
    """Blocks run with gradients disabled."""


@contextmanager
def with_gradients(recorder: Recorder) -> Iterator[set[Any]]:
    """Let what disables gradients in a model's code only set ``recorder.disabled``.

    Yield a set, to which `Tensor.detach` outside of blocks adds the node of autograd's graph that it returns.
    """
    cuts, outer, detach = set[Any](), recorder.records, torch.Tensor.detach
    enter, restore = torch.enable_grad.__enter__, torch.enable_grad.__exit__

    def switch(disables: Callable[[Any], bool]) -> Callable[..., None]:
        def method(self: Any, mode: bool = True) -> None:
            self.mode, self.outside = getattr(self, "mode", mode), recorder.disabled
            recorder.disabled = disables(self)

        return method

    def enable(self: Any) -> None:
        enter(self)  # backwards disable gradients themselves, and checkpoints in them need some
        self.outside, recorder.disabled = recorder.disabled, False

    def leave(self: Any, *_: Any) -> None:
        recorder.disabled = getattr(self, "outside", False)

    def leave_enabled(self: Any, *arguments: Any) -> None:
        restore(self, *arguments)
        leave(self)

    def detached(self: Tensor) -> Tensor:
        if recorder.records is not outer or not self.requires_grad:
            return detach(self)
        out = self.view_as(self)
        cuts.add(out.grad_fn)
        return out

    methods: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.Tensor, "detach", detached),
        (torch.no_grad, "__enter__", switch(lambda _: True)),
        (torch.no_grad, "__exit__", leave),
        (torch.enable_grad, "__enter__", enable),
        (torch.enable_grad, "__exit__", leave_enabled),
        (torch.inference_mode, "__enter__", switch(lambda self: bool(self.mode))),
        (torch.inference_mode, "__exit__", leave),
        (torch.set_grad_enabled, "__init__", switch(lambda self: not self.mode)),  # it acts before it is entered
        (torch.set_grad_enabled, "__enter__", lambda _: None),
        (torch.set_grad_enabled, "__exit__", leave),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in methods]
    for owner, name, method in methods:
        setattr(owner, name, method)
    try:
        yield cuts
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)
        recorder.disabled = False


class RunningTower:
    """State of one run of a tower."""

    def __init__(self, recorder: Recorder, tower: Tower, *, backward: bool) -> None:
        self.recorder, self.tower = recorder, tower
        self.marks: list[tuple[int, Value, Value]] = []
        """For each block, the number of operators recorded outside of blocks at its call, its state and its result."""
        self.blocks: dict[int, BlockRun] = {}
        """Runs of one block of each kind, by place."""
        self.outputs: dict[int, Any] = {}
        self.shape: tuple[int, ...] = ()
        """Shape of the state at the entry."""
        self.others: list[Value] = []
        """What blocks read beside their states."""
        self.calls: list[tuple[list[Tensor], list[Tensor]]] = []
        """Tensors that each block takes and returns, with their gradients."""
        self.backward = backward
        self.disabled = False
        """Whether the model's code disables gradients in the last block or detaches its result. All gradients of the
        others pass it."""

    @property
    def results(self) -> set[int]:
        """Addresses of the tensors that the last block returned."""
        return {id(tensor) for _, made in self.calls[-1:] for tensor in made}

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Run the first block of each kind, and skip the others."""
        every = self.tower.blocks
        for place, block in enumerate(every):

            def forward(*args: Any, _block: nn.Module = block, _place: int = place, **kwargs: Any) -> Any:
                return self._call(_block, _place, args, kwargs)

            block.forward = forward
        try:
            yield
        finally:
            for block in every:
                del block.forward

    def _call(self, block: nn.Module, place: int, args: Any, kwargs: Any) -> Any:
        recorder, kind = self.recorder, self.tower.kinds[place]
        state = _state(args, kwargs)
        assert state is not None
        assert recorder.records is not None
        position = len(recorder.records)
        if not torch.is_grad_enabled():
            remedy = "freeze its parameters by `requires_grad_(False)` instead"
            raise NoGradientError(f"tower {self.tower.path!r}", "runs without gradients", remedy)
        recorder.settle(None)
        self.disabled = recorder.disabled
        if not place:
            self.shape = tuple(state.shape)
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        self.others += [recorder.value(t) for t in taken if t.is_meta and t is not state]
        if kind == place:
            args, shared, inside = _detached(args, kwargs)
            known = recorder.value(inside)
            known.differentiable = True
            if known.numel == inside.numel():  # such as a view of a convolution's result
                known.width = inside.shape[-1]
            with recorder.recording() as records:
                output = type(block).forward(block, *args, **shared)
            for name, each in kwargs.items():
                if isinstance(each, UserDict):
                    # What the block shares with later ones, such as keys and values.
                    each.update({key: value for key, value in shared[name].items() if key not in each})
            leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            result = _result(output)
            assert result is not None
            segment = Segment(records, known, [recorder.value(t) for t in leaves], recorder.regions)
            backward = self._backward(result) if self.backward else None
            self.blocks[place] = BlockRun(segment, recorder.value(result), backward)
            self.outputs[place] = output
            for parameter in block.parameters():
                parameter.grad = None
        outer, recorder.records = recorder.records, None
        new = tree_map(_fresh, self.outputs[kind])
        recorder.records = outer
        self.calls.append((taken, [t for t in tree_leaves(new) if isinstance(t, Tensor) and t.requires_grad]))
        result = _result(new)
        assert result is not None
        self.marks.append((position, recorder.value(state), recorder.value(result)))
        return new

    def _backward(self, result: Tensor) -> float:
        before = self.recorder.values.copy()
        with self.recorder.recording() as records:
            torch.autograd.backward(result, torch.empty_like(result))
        self.recorder.values |= before
        # torch counts the backward of grouped convolutions as if they were dense.
        return sum(record.flops for record in records if not record.name.startswith(("convolution", "depthwise")))

    def finish(self, output: Any, outer: list[Record]) -> TowerRun:
        """Return the run, with what ran outside of blocks divided into what ran before, between and behind them."""
        recorder, marks = self.recorder, self.marks
        if len(marks) != len(self.tower.blocks):
            raise TraceError(f"tower {self.tower.path!r}", f"calls {len(marks)} of {len(self.tower.blocks)} blocks")
        tensors = [t for t in tree_leaves(_values(output)) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [recorder.value(t) for t in tensors]
        first, last = marks[0][0], marks[-1][0]
        made = {value for record in outer[:first] for value in record.writes}
        others = [value for value in self.others if value in made]
        before = Segment(outer[:first], None, list(dict.fromkeys([marks[0][1], *others])), recorder.regions)
        after = Segment(outer[last:], marks[-1][2], leaves, recorder.regions)
        between = {}
        for place, ((begin, _, result), (end, entry, _)) in enumerate(itertools.pairwise(marks)):
            records = outer[begin:end]
            used = {u.value for r in outer[end:] for u in r.reads} | set(leaves)
            ends = [w for r in records for w in r.writes if w.differentiable and w in used]
            if entry is not result:
                ends.append(entry)
            if ends:
                between[place] = Segment(records, result, list(dict.fromkeys(ends)), recorder.regions)
        return TowerRun(self, before, after, between)


def _values(output: Any) -> Any:
    """Return the tensors of an output that a model's next part reads: logits or features, not what it read."""
    if isinstance(output, dict):
        for name in ("logits", "pooler_output", "last_hidden_state"):
            if output.get(name) is not None:
                return [output[name], *(v for k, v in output.items() if "deepstack" in k)]
        return list(output.values())
    return output


def _detached(args: Any, kwargs: Any) -> tuple[Any, Any, Tensor]:
    """Return the arguments with the state as a leaf that has a gradient; others keep theirs."""
    found: list[Tensor] = []

    def change(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.is_floating_point() or not each.is_meta:
            return each
        if not found or each.requires_grad:
            new = each.data.requires_grad_()
            if not found:
                found.append(new)
            return new
        return each

    args = tuple(change(each) if isinstance(each, Tensor) else each for each in args)
    kwargs = {name: change(each) if isinstance(each, Tensor) else each for name, each in kwargs.items()}
    # After the state, which is the first one
    kwargs |= {
        name: type(each)(tree_map(change, each.data)) for name, each in kwargs.items() if isinstance(each, UserDict)
    }
    return args, kwargs, found[0]


def _fresh(each: Any) -> Any:
    if isinstance(each, Tensor) and each.is_floating_point():
        return torch.empty_like(each, device="meta").requires_grad_()
    return each
