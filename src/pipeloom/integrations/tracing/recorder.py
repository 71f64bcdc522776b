"""Record the operators that a model's own code runs on meta tensors, and what autograd keeps of them.

Values are numbered: an operator that writes in place gives its storage a new value. A view is the value it views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry


@dataclass(eq=False)
class Value:
    """Numbers that one operator wrote."""

    number: int
    num_bytes: int
    numel: int
    dtype_bytes: int
    width: int
    differentiable: bool = False
    parameters: frozenset[str] = frozenset()
    """Names of the parameters from which alone it is computed; a parameter itself has its own."""
    derived: bool = False
    """Whether it is computed from parameters and no parameter itself."""
    real: bool = False
    """Whether its numbers are known: indices, lengths, positions."""


@dataclass(eq=False)
class Use:
    """A value as an operator reads it."""

    value: Value
    num_bytes: int
    shape: tuple[int, ...]
    offset: int = 0


@dataclass(eq=False)
class Record:
    """One operator that ran: an ATen operator, or one that stands for a fused kernel."""

    name: str
    reads: list[Use]
    writes: list[Value]
    flops: float
    scope: tuple[str, ...]
    region: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    """What is known of a fused kernel, such as heads and windows of an attention."""
    shape: tuple[int, ...] = ()
    disabled: bool = False
    """Whether the model's code disables gradients here."""
    saved: list[Value] = field(default_factory=list)


class Selections:
    """What is known of the places that a model's code selects.

    Attributes
    ----------
    choices : dict
        By scope, how many of how many entries the last `topk` chose: of experts, or of keys.
    densities : dict of Value to float
        Share of the elements of an integer or boolean value that select one expert, if they come from a router.
    given : set of int or None
        Storages of known numbers that come from the batch. A table that is read at other places, such as positions, is
        then a weight. None: unknown.
    strict : bool
        Whether selections by numbers that are not known are errors. Otherwise they select everything but padding.
    """

    def __init__(self) -> None:
        self.choices: dict[tuple[str, ...], tuple[int, int]] = {}
        self.densities: dict[Value, float] = {}
        self.given: set[int] | None = None
        self.strict = False

    def selected(self, name: str, args: Any, value: Callable[[Tensor], Value]) -> Any:
        """Return the arguments with masks that are not known replaced by as many positions as they select.

        Those that a router made select their average, so that experts are balanced. Others select everything: what
        they leave out is padding, and there is none.
        """
        if name == "nonzero":
            return args[0], self._number(args[0], value)
        indices: list[Any] = []
        for each in args[1]:
            is_mask = isinstance(each, Tensor) and each.dtype is torch.bool and each.is_meta
            rows = each.new_empty(self._number(each, value), dtype=torch.int64) if is_mask else None
            indices += [each] if rows is None else [rows] * each.dim()
        return (args[0], indices, *args[2:])

    def _number(self, mask: Tensor, value: Callable[[Tensor], Value]) -> int:
        density = self.densities.get(value(mask))
        if density is not None:
            return max(1, round(mask.numel() * density))
        if self.strict:
            raise UnknownNumbersError("selects by a mask that it computes from numbers of tensors")
        return mask.numel()

    def note(self, name: str, flat: list[Tensor], uses: list[Use], made: list[tuple[Tensor, Value]]) -> None:
        """Note the densities of what a router's choice makes."""
        if name in ("topk", "argmax", "max") and flat:
            entries = flat[0].shape[-1] if flat[0].dim() else 1
            for tensor, value in made:
                if tensor.dtype is torch.int64 and tensor.numel() and flat[0].numel() > tensor.numel():
                    self.densities[value] = 1.0 / entries
            return
        known = [(t, self.densities[u.value]) for t, u in zip(flat, uses, strict=True) if u.value in self.densities]
        if not known:
            return
        source, density = known[0]
        for tensor, value in made:
            if name.startswith("scatter"):
                self.densities[value] = source.numel() / tensor.numel()
            elif not tensor.is_floating_point():
                shrinks = name in ("any", "sum", "amax") and tensor.numel() < source.numel()
                self.densities[value] = density * (source.numel() / tensor.numel() if shrinks else 1.0)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run operators on known numbers for real and all others on meta, and record those of the model while `active`.

    ``parameters`` has the model's parameters by name.
    """

    disabled = False
    """Whether the model's code has disabled gradients, which are computed nevertheless."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] | None = None
        self.values: dict[int, Value] = {}
        """Current value of each storage."""
        self._held: list[Tensor] = []
        """Tensors whose storages' addresses must not be used again."""
        self._pending: list[Value] = []
        self._count = 0
        self.scope: tuple[str, ...] = ()
        self.region = 0
        self.regions: dict[int, dict[str, Any]] = {}
        self.searching = False
        self.selections = Selections()
        self._parameters = {_key(p): name for name, p in parameters.items()}
        self._held += list(parameters.values())
        self.like = next(iter(parameters.values())).detach()
        """A tensor on meta, from which others are made."""

    # -------------------------------------------------------------- values

    def value(self, tensor: Tensor) -> Value:
        """Return the current value of a tensor."""
        key = _key(tensor)
        if key not in self.values:
            name = self._parameters.get(key)
            differentiable = tensor.requires_grad and name is None
            self.values[key] = self._new(tensor, differentiable, frozenset((name,)) if name else frozenset())
        return self.values[key]

    def _new(self, tensor: Tensor, differentiable: bool, parameters: frozenset[str]) -> Value:
        self._count += 1
        self._held.append(tensor)
        size = tensor.untyped_storage().nbytes()
        each = tensor.element_size()
        width = tensor.shape[-1] if tensor.dim() else 1
        real = not tensor.is_meta
        numel = max(tensor.numel(), 1) if size == 0 else min(tensor.numel(), size // each)
        return Value(self._count, size, numel, each, max(width, 1), differentiable, parameters, real=real)

    def write(self, tensor: Tensor, differentiable: bool, parameters: frozenset[str] = frozenset()) -> Value:
        """Give the storage of a tensor a new value."""
        before = self.values.get(_key(tensor))
        value = self.values[_key(tensor)] = self._new(tensor, differentiable, parameters)
        value.derived = bool(parameters)
        if before is not None and before.numel > value.numel:  # a part of it was written
            value.numel, value.width = before.numel, before.width
        return value

    def use(self, tensor: Tensor) -> Use:
        """Return a tensor as an operator reads it."""
        value = self.value(tensor)
        num_bytes = min(tensor.numel() * tensor.element_size(), value.num_bytes)
        return Use(value, num_bytes, tuple(tensor.shape), int(tensor.storage_offset()))

    def follow(self, tensors: list[Tensor]) -> None:
        """Note tensors with known numbers that come from the batch."""
        small = [t for t in tensors if t.numel() <= _LARGE]
        self._held += small
        self.selections.given = (self.selections.given or set()) | {_key(t) for t in small}

    # -------------------------------------------------------------- recording

    @contextmanager
    def recording(self) -> Iterator[list[Record]]:
        """Record operators into a new list."""
        outer, self.records = self.records, []
        records = self.records
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield records
        finally:
            self.settle(None)
            self.records = outer

    def _pack(self, tensor: Tensor) -> Tensor:
        if self.records is not None:
            self._pending.append(self.value(tensor))
        return tensor

    def settle(self, record: Record | None) -> None:
        """Assign what autograd saved to the operator that saved it: one about to run, or the last one."""
        if not self._pending:
            return
        mine = [use.value for use in record.reads] if record is not None else []
        last = self.records[-1] if self.records else None
        for value in self._pending:
            target = record if record is not None and value in mine else last
            if target is not None:
                target.saved.append(value)
        self._pending.clear()

    def add(self, record: Record) -> None:
        """Append an operator."""
        if self.records is None:
            return
        self.settle(record)
        self.records.append(record)

    def fused(
        self, name: str, flops: float, reads: list[Tensor], writes: list[Tensor], about: dict[str, Any] | None = None
    ) -> None:
        """Append an operator that stands for a fused kernel."""
        uses = [self.use(t) for t in reads]
        differentiable = any(t.requires_grad for t in reads)
        outs = [self.write(t, differentiable and _is_continuous(t)) for t in writes]
        shape = tuple(writes[0].shape) if writes else ()
        self.add(Record(name, uses, outs, flops, self.scope, self.region, about or {}, shape, self.disabled))

    @contextmanager
    def inside(self, **about: Any) -> Iterator[int]:
        """Mark the operators of one library function as a region that one fused operator replaces."""
        outer = self.region
        self.region = number = len(self.regions) + 1
        self.regions[number] = about
        try:
            yield number
        finally:
            self.region = outer

    # -------------------------------------------------------------- dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        metas = any(t.is_meta for t in flat)
        if kwargs.get("device") is not None:
            # Indices and masks are made for real, on whatever device they are wanted.
            kwargs["device"] = torch.device("meta" if metas else "cpu")
        name = func._overloadpacket.__name__
        before = flat
        if self.selections.strict and name == "embedding":
            _check_index(args[0], args[1])
        if metas and not all(t.is_meta for t in flat):
            args, kwargs = _moved(name, args, kwargs)
        if metas and name in _SELECTIONS:
            args = self.selections.selected(name, args, self.value)
        if not metas and _is_large(name, args, kwargs):
            kwargs["device"] = torch.device("meta")
        out = _FALLBACKS[name](func, args, kwargs) if name in _FALLBACKS and metas else func(*args, **kwargs)
        self._note(func, name, before, args, kwargs, out)
        return out

    def _note(self, func: Any, name: str, flat: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        outs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if name == "topk":
            self.selections.choices[self.scope] = int(outs[0].shape[-1]), int(flat[0].shape[-1])
        keys = {_key(t) for t in flat}
        fresh = [t for t in outs if _key(t) not in keys]
        given = self.selections.given
        from_batch = given is None or not keys.isdisjoint(given)
        if given is not None and from_batch:
            self.follow([t for t in fresh if not t.is_meta])
        writes_in_place = func._schema.is_mutable
        if not fresh and not writes_in_place:
            return  # a view
        if not any(t.is_meta for t in (*outs, *flat)):
            return
        uses = [self.use(t) for t in flat]
        parameters = frozenset[str]().union(*(use.value.parameters for use in uses))
        activations = [use for use in uses if not use.value.parameters and not use.value.real]
        derived = parameters if not activations and not (name == "embedding" and from_batch) else frozenset[str]()
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in flat) and not derived
        written = fresh or [t for t in outs if _key(t) in keys] or flat[:1]
        distinct = {_key(t): t for t in written}
        flops = 0.0
        if func._overloadpacket in flop_registry:
            flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        elif name == "_grouped_mm":
            flops = _grouped_flops(flat, outs)
        values = [self.write(t, differentiable and _is_continuous(t), derived) for t in distinct.values()]
        self.selections.note(name, flat, uses, list(zip(distinct.values(), values, strict=True)))
        about = {"groups": args[8]} if name == "convolution" else {}
        shape = tuple(written[0].shape)
        self.add(Record(name, uses, values, flops, self.scope, self.region, about, shape, self.disabled))


def _check_index(table: Tensor, index: Tensor) -> None:
    """Raise `IndexError` for a known place outside of a table, such as a position behind the longest sequence."""
    most = -1 if index.is_meta or not index.numel() else int(index.max())
    if most >= table.shape[0]:
        raise IndexError(f"index {most} of a table of {table.shape[0]} rows")


class UnknownNumbersError(Exception):
    """What a model's code runs depends on numbers that tensors without numbers do not have."""


_SELECTIONS = ("nonzero", "index", "index_put", "index_put_", "_unsafe_index")
_LARGE = 1 << 20
"""Floating-point tensors with more numbers have no memory: only positions, masks and tables need theirs."""


def _is_large(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an operator makes a large tensor from nothing."""
    if name not in ("zeros", "ones", "full", "empty", "randn", "rand", "normal") or not args:
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    size = args[0] if isinstance(args[0], (list, tuple, torch.Size)) else ()
    return bool(dtype.is_floating_point) and math.prod(size) > _LARGE


def _is_continuous(tensor: Tensor) -> bool:
    """Return whether a tensor may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _moved(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with real tensors on meta. A real mask as an index becomes as many positions."""

    def move(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.is_meta or not each.dim():
            return each
        return torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="meta")

    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        indices: list[Any] = []
        for each in args[1]:
            masks = isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) and not each.is_meta
            indices += list(each.nonzero(as_tuple=True)) if masks else [each]
        args = (args[0], indices, *args[2:])
    found: tuple[Any, Any] = tree_map(move, (args, kwargs))
    return found


def _grouped_flops(flat: list[Tensor], outs: list[Tensor]) -> float:
    first, second = flat[0], flat[1]
    if first.dim() == 2 and second.dim() == 3:
        return 2.0 * first.shape[-1] * outs[0].numel()
    return 2.0 * first.shape[-1] * first.shape[-2] * second.shape[-1]


def _bins(_: Any, args: Any, kwargs: Any) -> Tensor:
    """Return counts of bins, which have no meta kernel."""
    bins = kwargs.get("bins", args[1] if len(args) > 1 else 1)
    return torch.empty(int(bins), dtype=args[0].dtype, device="meta")


def _positions(_: Any, args: Any, __: Any) -> Tensor:
    """Return the positions of a mask, of which `Selections.selected` has said how many there are."""
    mask, rows = args
    return torch.empty(rows, mask.dim(), dtype=torch.int64, device="meta")


def _grouped(_: Any, args: Any, kwargs: Any) -> Tensor:
    """Multiply groups of rows. The meta kernel wants widths that are multiples of 16 bytes, as kernels of GPUs do."""
    first, second = args[:2]
    if second.dim() == 3:
        return first.new_empty(*first.shape[:-1], second.shape[-1])  # type: ignore[no-any-return]
    groups = kwargs.get("offs", args[2] if len(args) > 2 else None)
    return first.new_empty(groups.numel(), first.shape[0], second.shape[1])  # type: ignore[no-any-return]


_FALLBACKS: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "histc": _bins,
    "bincount": _bins,
    "nonzero": _positions,
    "_grouped_mm": _grouped,
}


@contextmanager
def scopes(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Let the recorder know the module that runs."""
    names = {module: path for path, module in model.named_modules()}
    stack: list[tuple[str, ...]] = []

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            stack.append(recorder.scope)
            recorder.scope = (*recorder.scope, names[module])

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if module in names and stack:
            recorder.scope = stack.pop()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        recorder.scope = ()
