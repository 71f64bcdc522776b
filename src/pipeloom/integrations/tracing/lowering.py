"""Turn the operators of several sizes into those of a `TracedLayer`, with fitted counts and tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeloom.integrations.tracing.fitting import Features, TraceError, fit
from pipeloom.integrations.tracing.fusion import Draft
from pipeloom.integrations.tracing.recorder import Value
from pipeloom.integrations.tracing.siblings import join_siblings, times, total
from pipeloom.spec.traced import (
    NOTHING,
    AttentionOperator,
    Counts,
    ExpertsOperator,
    KernelOperator,
    Operator,
    PairWindow,
    ProductOperator,
    ScanOperator,
    TracedInput,
    reads_of,
)

_PAIRS = 5e-3
"""Relative error of the pairs of compressed entries, of which a query reads only those of whole groups."""
_EDGES = 1.0
"""Pairs of full windows above those of windows cut by the edge of an image, whose sides are not known."""


@dataclass(eq=False)
class LoweredLayer:
    """Inputs and operators of a layer."""

    inputs: tuple[TracedInput, ...]
    operators: tuple[Operator, ...]
    result: int | None
    used: set[str] = field(default_factory=set)
    """Parameters that its operators read."""


class _Lowering:
    def __init__(
        self, where: str, features: Sequence[Features], sizes: Sequence[Sequence[Draft]], bounded: bool
    ) -> None:
        self.where, self.features, self.sizes, self.bounded = where, features, sizes, bounded
        self.inputs: list[TracedInput] = []
        self.places: dict[Value, int] = {}
        self.used: set[str] = set()

    def shape(self, number: int) -> tuple[Counts, int]:
        """Return rows and width of an operator's result. The width is the same at every size."""
        results = [drafts[number].results[0] for drafts in self.sizes]
        widths = {v.width for v in results}
        tokens = {v.numel / f.row[2] for v, f in zip(results, self.features, strict=True)}
        width = 1
        if len(widths) == 1:
            width = widths.pop()
        elif len(tokens) == 1 and min(tokens).is_integer():
            width = int(tokens.pop())  # the columns are not the last dimension
        return self._fit(f", operator {number}.rows", [v.numel / width for v in results]), width

    def fit(self, number: int, name: str) -> Counts:
        """Return the coefficients of one count of one operator."""
        values = [drafts[number].counts.get(name, 0.0) for drafts in self.sizes]
        first = self.sizes[0][number]
        return self._fit(f", operator {number} ({first.fixed.get('kind', first.kind)}).{name}", values)

    def _fit(self, what: str, values: Sequence[float]) -> Counts:
        try:
            return fit(f"{self.where}{what}", self.features, values)
        except TraceError:
            if not self.bounded:
                raise
            most = max(value / features.row[2] for value, features in zip(values, self.features, strict=True))
            return 0.0, 0.0, most, 0.0

    def enter(self, values: Sequence[Value], *, gradient: bool) -> None:
        """Add an input: the same tensor at every size."""
        first = values[0]
        width = first.width if len({v.width for v in values}) == 1 else 1  # such as pixels, in lines of any length
        rows = self._fit(".inputs", [v.numel / width for v in values])
        self.places[first] = len(self.inputs)
        self.inputs.append(TracedInput(rows, width, first.dtype_bytes, gradient))


def lower(
    where: str,
    features: Sequence[Features],
    sizes: Sequence[Sequence[Draft]],
    states: Sequence[Value | None],
    results: Sequence[Value | None],
    own: Mapping[str, int],
    *,
    bounded: bool = False,
) -> LoweredLayer:
    """Return the operators of a layer. Raise `TraceError` if the sizes ran other operators, or counts are not linear.

    Counts are checked on the last size. ``states`` and ``results`` have the state at the entry, and what the layer
    returns, at each size; ``own`` has the sizes of the layer's parameters. If ``bounded``, counts that are not linear
    are bounded by the largest for each token: those of tensors from other towers, of which the lengths of this one say
    nothing.
    """
    if len({len(drafts) for drafts in sizes}) > 1:
        sizes, results = _without_copies(sizes, results)
    made = _Lowering(where, features, sizes, bounded)
    lengths = {len(drafts) for drafts in sizes}
    if len(lengths) > 1:
        raise TraceError(where, f"runs {sorted(lengths)} operators, depending on the size of its input")
    for number, drafts in enumerate(zip(*sizes, strict=True)):
        kinds = {(d.kind, d.fixed.get("kind")) for d in drafts}
        if len(kinds) > 1:
            raise TraceError(f"{where}, operator {number}", f"is of the kinds {sorted(map(str, kinds))}")
    if states[0] is not None:
        made.enter([v for v in states if v is not None], gradient=states[0].differentiable)
    _enter_others(made)
    for number, each in enumerate(made.sizes[0]):
        for value in each.results:
            made.places[value] = len(made.inputs) + number
    operators = [_operator(made, number, own) for number in range(len(made.sizes[0]))]
    result = None if results[0] is None else made.places.get(results[0])
    operators = _split(len(made.inputs), operators, [d.reduced for d in made.sizes[0]])
    operators, result = join_siblings(len(made.inputs), operators, result)
    if result == len(made.inputs) + len(operators) - 1:
        result = None
    return LoweredLayer(tuple(made.inputs), tuple(operators), result, made.used)


def _without_copies(
    sizes: Sequence[Sequence[Draft]], results: Sequence[Value | None]
) -> tuple[list[list[Draft]], list[Value | None]]:
    """Return the operators without those that only change a layout or cut, which some sizes do not need."""
    kept, ends = [], []
    for drafts, result in zip(sizes, results, strict=True):
        same: dict[Value, Value] = {}
        left = []
        for each in drafts:
            each.reads, each.saves, each.eager = (
                [same.get(v, v) for v in values] for values in (each.reads, each.saves, each.eager)
            )
            alone = each.kind == "kernel" and each.fixed["kind"] == "copy" and len(each.reads) == 1
            if alone and each.reads[0].numel >= each.results[0].numel:
                same[each.results[0]] = each.reads[0]
            else:
                left.append(each)
        kept.append(left)
        ends.append(None if result is None else same.get(result, result))
    return kept, ends


def _enter_others(made: _Lowering) -> None:
    """Add the differentiable tensors that operators read and none of them makes."""
    first = made.sizes[0]
    results = {v for d in first for v in d.results}
    for number, each in enumerate(first):
        for i, value in enumerate(each.reads):
            if value not in results and value not in made.places:
                made.enter([drafts[number].reads[i] for drafts in made.sizes], gradient=value.differentiable)


def _operator(made: _Lowering, number: int, own: Mapping[str, int]) -> Operator:
    each = made.sizes[0][number]
    reads = tuple(dict.fromkeys(made.places[v] for v in each.reads))
    fixed = each.fixed
    rows = made.fit(number, "rows") if each.kind != "kernel" else NOTHING
    fresh = [name for name in each.parameters if name in own and name not in made.used]
    made.used |= set(fresh)
    match each.kind:
        case "product":
            return ProductOperator(
                reads=reads[0],
                rows=rows,
                eager_bytes=made.fit(number, "eager_bytes"),
                owned=not fixed["matrix"].isdisjoint(fresh) or not each.parameters,  # a tied one may have its own bias
                **_only(fixed, ProductOperator),
            )
        case "attention":
            return _attention(made, number, reads, rows)
        case "scan":
            counts = {name: made.fit(number, name) for name in ("flops", "bytes", "states")}
            return ScanOperator(
                reads=reads, rows=rows, width=fixed["width"], parameters=sum(own[name] for name in fresh), **counts
            )
        case "experts":
            return ExpertsOperator(
                reads=reads, rows=rows, eager_bytes=_experts_bytes(made, number), **_only(fixed, ExpertsOperator)
            )
        case "embedding":
            moved = times(rows, 4.0 * fixed["width"])  # read and written, in bfloat16
            size = sum(own[name] for name in fresh)
            return KernelOperator("embedding", (), rows, fixed["width"], NOTHING, moved, moved, parameters=size)
        case _:
            return _kernel(made, number, reads, sum(own[name] for name in fresh))


def _only(fixed: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: value for name, value in fixed.items() if name in kind.__struct_fields__}


def _experts_bytes(made: _Lowering, number: int) -> Counts:
    """Return what autograd keeps of experts beside inputs and results of products, activations and the weighted sum."""
    values: list[float] = []
    if made.sizes[0][number].fixed.get("own"):
        return NOTHING
    for sizes in made.sizes:
        each = sizes[number]
        fixed, chosen = each.fixed, each.counts["rows"] * each.fixed["chosen"]
        wide = fixed["inner"] * (4 if fixed["gated"] else 2)  # up, gate and activation; the product of both
        known = chosen * (2 * fixed["hidden"] + wide) * each.results[0].dtype_bytes
        if each.reads[-1] not in each.eager:
            known += each.reads[-1].num_bytes  # the library keeps the weights in the order of the experts alone
        values.append(sum(v.num_bytes for v in each.eager if v not in each.reads) - known)
    return fit(f"{made.where}, operator {number} (experts).eager_bytes", made.features, values)


def _kernel(made: _Lowering, number: int, reads: tuple[int, ...], parameters: int) -> KernelOperator:
    each = made.sizes[0][number]
    rows, width = ((0.0, 0.0, 1.0, 0.0), 1) if each.forward_only else made.shape(number)
    names = ("flops", "forward_bytes", "backward_bytes", "backward_flops", "statistics", "eager_bytes")
    counts: dict[str, Any] = {name: made.fit(number, name) for name in names}
    saves = tuple(dict.fromkeys(made.places[v] for v in each.saves))
    eager = tuple(dict.fromkeys(made.places[v] for v in each.eager if v in each.reads))
    return KernelOperator(
        reads=reads,
        rows=rows,
        width=width,
        saves=saves,
        eager_saves=eager,
        parameters=parameters,
        forward_only=each.forward_only,
        **counts,
        **_only(each.fixed, KernelOperator),
    )


def _attention(made: _Lowering, number: int, reads: tuple[int, ...], rows: Counts) -> AttentionOperator:
    """Return an attention with its pairs in words: of whole sequences, within windows or chunks, or to fixed keys."""
    drafts = [sizes[number] for sizes in made.sizes]
    abouts = [d.fixed["about"] for d in drafts]
    fixed, about = drafts[0].fixed, abouts[-1]
    causal = bool(fixed["causal"])
    pairs = NOTHING
    windows: tuple[PairWindow, ...] = ()
    above = _PAIRS
    if about["chunk"]:
        windows = (PairWindow(int(about["chunk"]), False, 0.5),)
        pairs = times(rows, 0.5)
    elif about["window"] and causal:
        windows = (PairWindow(int(about["window"]), True),)
    elif about["window"]:
        windows = (PairWindow(int(about["window"]) + 1, True, 2.0),)
        pairs = times(rows, -1.0)
    elif any(about["lengths"] != f.lengths for about, f in zip(abouts, made.features, strict=True)):
        more = len(about["lengths"]) > len(made.features[-1].lengths)
        # Windows are those of the sample's units, of which a convolution before the blocks may have joined several.
        length = max(about["lengths"]) / rows[2] if rows[2] else 0.5
        if more and length.is_integer() and len({max(about["lengths"]) for about in abouts}) == 1:
            windows, above = (PairWindow(int(length), False, rows[2] ** 2),), _EDGES
        else:
            pairs = made.fit(number, "pairs")
    elif all(about["keys"] in (None, *about["lengths"][:1]) for about in abouts):
        pairs = (0.0, 0.0, 0.5, 0.5) if causal else (0.0, 0.0, 0.0, 1.0)
    else:
        pairs = made.fit(number, "pairs")
    if about["behind"]:
        ratio, chosen = about["behind"]
        inside: Counts = (0.0, 0.0, 0.5 / ratio, 0.5 / ratio)
        if chosen is not None:
            windows, inside = (*windows, PairWindow(chosen * ratio, True, 1 / ratio)), NOTHING
        pairs = total([pairs, inside])
    names = ("heads", "query_key_width", "value_width", "key_value_width")
    operator = AttentionOperator(
        reads=reads,
        rows=rows,
        pairs=pairs,
        windows=windows,
        causal=causal,
        columns=fixed["columns"] if len(fixed["columns"]) == len(reads) else (),
        **{n: fixed[n] for n in names},
    )
    for draft, features in zip(drafts, made.features, strict=True):
        wanted, found = draft.counts["pairs"], _pairs_of(operator, features)
        if not -_PAIRS * wanted <= found - wanted <= above * wanted:
            text = f"computes {wanted:,.0f} pairs for lengths {features.text}, but {found:,.0f} are predicted"
            raise TraceError(f"{made.where}, operator {number} (attention)", text)
    return operator


def _pairs_of(operator: AttentionOperator, features: Features) -> float:
    total = sum(a * b for a, b in zip(operator.pairs, features.row, strict=True))
    for each in operator.windows:
        for n in features.lengths:
            width, inside = each.length, min(n, each.length)
            slid = inside * (inside + 1) // 2 + (n - inside) * width
            total += each.factor * (slid if each.slides else n // width * width**2 + (n % width) ** 2)
    return total


# ------------------------------------------------------------------ tensor parallelism


def _split(num_inputs: int, operators: Sequence[Operator], reduced: Sequence[int]) -> list[Operator]:
    """Choose which weights tensor parallelism divides by columns, and which by rows.

    A product from the state is divided by columns if all that reads its result ends in other products, which are then
    divided by rows, as Megatron does. A latent, that is a product whose result is only normalized before the next
    product, stays whole.
    """
    readers: dict[int, list[int]] = {}
    for i, operator in enumerate(operators):
        for read in reads_of(operator):
            readers.setdefault(read, []).append(i)
    out, divided = list(operators), set[int]()
    for i, operator in enumerate(operators):
        tensor = num_inputs + i
        if isinstance(operator, ProductOperator):
            if operator.reads in divided:
                out[i] = msgspec.structs.replace(operator, split="rows")
            elif _routes(operator, [operators[r] for r in readers.get(tensor, ())]):
                out[i] = msgspec.structs.replace(operator, plain=True)
            elif _ends_in_products(num_inputs, operators, readers, i, reduced):
                out[i] = msgspec.structs.replace(operator, split="columns")
                divided.add(tensor)
        elif not isinstance(operator, ExpertsOperator) and any(read in divided for read in operator.reads):
            divided.add(tensor)
    return out


def _routes(product: ProductOperator, readers: Sequence[Operator]) -> bool:
    """Return whether a product stays in bfloat16: a router, or one narrower than the 16 columns of a tile."""
    return product.out_width < 16 or any(isinstance(r, KernelOperator) and r.kind == "route" for r in readers)


def _ends_in_products(
    num_inputs: int, operators: Sequence[Operator], readers: dict[int, list[int]], start: int, reduced: Sequence[int]
) -> bool:
    """Return whether every path from a product's result ends in another product, and none is only a norm."""
    product = operators[start]
    assert isinstance(product, ProductOperator)
    stack, seen = [(num_inputs + start, False, False)], set()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        number, normed, mixed = at
        if not readers.get(number):
            return False
        for i in readers[number]:
            operator = operators[i]
            if isinstance(operator, ProductOperator):
                if normed and not mixed:
                    return False
                continue
            if isinstance(operator, ExpertsOperator):
                return False
            mixes = isinstance(operator, (AttentionOperator, ScanOperator))
            norm = isinstance(operator, KernelOperator) and operator.kind == "norm"
            norm = norm and 2 * reduced[i] > product.out_width
            if isinstance(operator, KernelOperator) and operator.passes:
                return False
            stack.append((num_inputs + i, normed or norm, mixed or mixes))
    return True
