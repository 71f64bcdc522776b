"""Run a model with several towers, and divide what it runs among them: embeddings, blocks, adapters and a head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from pipeloom.integrations.tracing.fitting import TraceError
from pipeloom.integrations.tracing.fusion import Segment, needed
from pipeloom.integrations.tracing.recorder import Record, Value
from pipeloom.integrations.tracing.runs import (
    NoGradientError,
    RunningTower,
    Search,
    Tower,
    TowerRun,
    Tracer,
    with_gradients,
)

Call = Callable[[], Any]


def find_towers(tracer: Tracer, call: Call) -> list[Tower]:
    """Return the towers of a model in the order in which a call runs them.

    A tower is a run of modules in a list, a sequence, or of one class in one module, that are called one after the
    other, each on a state of the shape that it returns. Lists inside modules that are no blocks are searched too.
    """
    names = {module: path for path, module in tracer.model.named_modules()}
    for module, path in names.items():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            problem = f"is a {type(module).__name__}, whose steps run one after the other: their time is not emulated"
            raise TraceError(f"module {path!r}", problem, "replace it by blocks that run all places at once")
    lists = _outermost(tracer.model)
    found: dict[str, Tower] = {}
    search = Search(_strict_signature)
    while lists:
        search = Search(_strict_signature)
        tracer.search(call, {**lists, **{p: t.blocks for p, t in found.items()}}, search)
        inner: dict[str, list[nn.Module]] = {}
        for path, members in lists.items():
            tower = _longest(path, members, search.calls.get(path, ()), names)
            if tower is not None:
                found[path] = tower
            kept = set(tower.blocks) if tower is not None else set()
            for member in members:
                if member not in kept:
                    inner |= {p: m for p, m in _outermost(member, names[member]).items() if p not in lists}
        lists = inner
    towers = [found[path] for path in search.calls if path in found]
    if not towers:
        raise TraceError(
            "model",
            "has no repeated blocks that are called one after the other, each on the state that the last one returned",
            "keep the blocks in a torch.nn.ModuleList, and call them in their order",
        )
    return towers


def run_towers(
    tracer: Tracer, towers: Sequence[Tower], call: Call, *, backward: bool, differentiates: bool = False
) -> Segment:
    """Run a model once, each kind of block once, and divide what ran. Return what follows the last tower.

    ``differentiates`` is whether what disables gradients in the model's code, such as `torch.no_grad`, is only noted.
    Otherwise it is an error if blocks run under it, or no gradient reaches them.
    """
    running = [RunningTower(tracer.recorder, tower, backward=backward) for tower in towers]
    with tracer.recording(*running) as outer, ExitStack() as stack:
        cuts = stack.enter_context(with_gradients(tracer.recorder)) if differentiates else set[Any]()
        output = call()
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise TraceError("model", "returns no tensor with a gradient", "return logits, a loss or a state")
    reached = _with_gradient(running, leaves, set())
    if not differentiates and not all(each.results & reached for each in running):
        raise NoGradientError("model", "detaches the result of an encoder", "freeze its parameters instead")
    if cuts:
        lost = reached - _with_gradient(running, leaves, cuts)
        parameters = {name for name, p in tracer.model.named_parameters() if id(p) in lost}
        for tower in running:
            tower.disabled |= bool(tower.results & reached) and tower.results & reached <= lost
        for record in outer:
            read = {name for use in record.reads for name in use.value.parameters}
            record.disabled |= bool(read) and read <= parameters
    values = list(dict.fromkeys(map(tracer.recorder.value, leaves)))
    return _Division(tracer, running, outer, values).run()


def _with_gradient(running: Sequence[RunningTower], leaves: list[Tensor], stops: set[Any]) -> set[int]:
    """Return addresses of the parameters and results of blocks that a gradient reaches without passing ``stops``."""
    taken = {id(t): taken for each in running for taken, made in each.calls for t in made}
    stack, seen, found = [get_gradient_edge(t).node for t in leaves], set(stops), set[int]()
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
            stack += [get_gradient_edge(t).node for t in taken.get(id(node.variable), ())]
        stack += [each for each, _ in node.next_functions if each is not None]
    return found


# ------------------------------------------------------------------ towers


def _outermost(model: nn.Module, path: str = "") -> dict[str, list[nn.Module]]:
    """Return the outermost groups of modules that may be blocks, by path: lists, sequences, children of one class."""
    found: dict[str, list[nn.Module]] = {}
    children = list(model.children())
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        return {path: children} if children else {}
    for name, child in model.named_children():
        found |= _outermost(child, f"{path}.{name}".lstrip("."))
    held = {id(each) for members in found.values() for each in members}
    classes: dict[type, list[nn.Module]] = {}
    for child in children:
        if id(child) not in held and list(child.children()) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            classes.setdefault(type(child), []).append(child)
    for kind, members in classes.items():
        if len(members) > 1:
            found[f"{path}:{kind.__name__}"] = members
    return found


def _longest(path: str, members: Sequence[nn.Module], calls: Any, names: Mapping[nn.Module, str]) -> Tower | None:
    """Return the longest run of members of one class that are called in order and keep the state's shape."""
    best: list[tuple[int, Any]] = []
    run: list[tuple[int, Any]] = []
    for place, key in calls:
        follows = not run or (place == run[-1][0] + 1 and type(members[place]) is type(members[run[-1][0]]))
        run = ([*run, (place, key)] if follows else [(place, key)]) if place >= 0 else []
        best = max(best, run, key=len)
    listed = ":" not in path
    # One norm or activation in a sequence is no tower; one block in a list is.
    if not best or (len(best) == 1 and not (listed and len(members) == 1 and list(members[0].children()))):
        return None
    blocks = [members[place] for place, _ in best]
    keys = [key for _, key in best]
    return Tower(path, blocks, [keys.index(key) for key in keys], names=[names[block] for block in blocks])


def _strict_signature(block: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes a user's block from other kinds: classes, plain attributes and parameters."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, repr(value)) for key, value in sorted(vars(module).items()) if _is_plain(key, value)),
            tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)),
        )
        for name, module in block.named_modules()
    )


def _is_plain(key: str, value: Any) -> bool:
    if key.startswith("_") or key in ("training", "forward"):
        return False
    if isinstance(value, (list, tuple)):
        return all(isinstance(each, (bool, int, float, str, type(None))) for each in value)
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.Size)) or callable(value)


# ------------------------------------------------------------------ division


class _Division:
    """Divides the operators outside of blocks among the towers."""

    def __init__(
        self, tracer: Tracer, running: Sequence[RunningTower], outer: list[Record], leaves: list[Value]
    ) -> None:
        self.regions, self.running, self.outer, self.leaves = tracer.recorder.regions, running, outer, leaves
        for each in running:
            tower = each.tower
            if len(each.marks) != len(tower.blocks):
                problem = f"calls {len(each.marks)} blocks of {len(tower.blocks)}"
                raise TraceError(f"tower {tower.path!r}", problem, "call each block once")
        self.results = {each.marks[-1][2]: number for number, each in enumerate(running)}
        self.last = max(range(len(running)), key=lambda number: running[number].marks[-1][0])
        self.reached, self.pure = self._reached()

    def _reached(self) -> tuple[dict[Value, frozenset[int]], dict[Value, int]]:
        """Return which towers each value depends on, and which values depend on one tower's result alone."""
        reached = {value: frozenset((number,)) for value, number in self.results.items()}
        pure = dict(self.results)
        for record in self.outer:
            reads = [use.value for use in record.reads]
            found = frozenset[int]().union(*(reached.get(value, frozenset()) for value in reads))
            if not found:
                continue
            states = [v for v in reads if v.differentiable]
            owners = {pure.get(value) for value in states}
            for value in record.writes:
                reached[value] = found
                if len(owners) == 1 and None not in owners:
                    pure[value] = next(each for each in owners if each is not None)
        return reached, pure

    def run(self) -> Segment:
        """Append to each tower what ran for it. Return what follows the last one."""
        taken: set[Record] = set()
        befores: list[tuple[list[Record], list[Value]]] = []
        for running in self.running:
            position, entry, _ = running.marks[0]
            ends = list(dict.fromkeys((entry, *running.others)))
            own = needed(self.outer[:position], ends)
            records = [r for r in own if r not in taken and self._owner(r) is None]
            taken |= set(records)
            befores.append((records, ends))
        between = [self._between(number, taken) for number in range(len(self.running))]
        self._check_skips(between)
        taken |= {r for each in between for segment in each.values() for r in segment.records}
        head = [r for r in needed(self.outer, self.leaves) if r not in taken and self._owner(r) is None]
        made = {value for records, _ in befores for r in records for value in r.writes}
        for number, running in enumerate(self.running):
            records, ends = befores[number]
            reads = {use.value for r in records for use in r.reads} | set(ends)
            sources = {self.pure[value] for value in reads if value in self.pure and value not in made}
            adapter = self._adapter(number, befores, head)
            before = Segment(records, None, ends if records else [], self.regions)
            running.tower.runs.append(TowerRun(running, before, adapter, between[number], sources - {number}))
        state = self.running[self.last].marks[-1][2]
        return Segment(head, state, self.leaves, self.regions)

    def _owner(self, record: Record) -> int | None:
        """Return the tower whose adapter an operator belongs to; None: an embedding, a join of towers, or the head."""
        owners = {self.pure.get(value) for value in record.writes}
        owner = next(iter(owners)) if len(owners) == 1 else None
        return None if owner == self.last else owner

    def _between(self, number: int, taken: set[Record]) -> dict[int, Segment]:
        """Return what changes the state between two blocks of a tower."""
        found = {}
        marks = self.running[number].marks
        for place, ((begin, _, result), (end, entry, _)) in enumerate(itertools.pairwise(marks)):
            if entry is result:
                continue
            records = [r for r in needed(self.outer[begin:end], [entry]) if r not in taken]
            found[place] = Segment(records, result, [entry], self.regions)
        return found

    def _check_skips(self, between: Sequence[dict[int, Segment]]) -> None:
        """Raise `TraceError` for results of inner blocks that others than the next block read."""
        for number, running in enumerate(self.running):
            inner = {result: place for place, (_, _, result) in enumerate(running.marks[:-1])}
            own = {(place, r) for place, segment in between[number].items() for r in segment.records}
            reads = [(inner[u.value], r) for r in self.outer for u in r.reads if u.value in inner]
            places = [place for place, r in reads if (place, r) not in own]
            places += [inner[value] for each in self.running for value in each.others if value in inner]
            if places:
                name = running.tower.prefix(places[0])[:-1]
                problem = "is read by more than the next block: a skip connection, which a pipeline would have to send"
                raise TraceError(f"result of {name}", problem, "describe the model in a .toml file, with streams")

    def _adapter(self, number: int, befores: Any, head: Sequence[Record]) -> Segment:
        """Return what a tower's result alone determines and others read."""
        state = self.running[number].marks[-1][2]
        if number == self.last:
            return Segment([], state, [], self.regions)
        mine = [r for r in self.outer if self._owner(r) == number]
        readers = [use.value for records, _ in befores for r in records for use in r.reads]
        readers += [end for _, ends in befores for end in ends]
        readers += [use.value for r in head for use in r.reads] + self.leaves
        made = {value for r in mine for value in r.writes}
        leaves = list(dict.fromkeys(value for value in readers if value in made and value.differentiable))
        return Segment(needed(mine, leaves), state, leaves, self.regions)
