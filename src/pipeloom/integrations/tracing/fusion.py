"""Group what ran into the kernels of a fused trainer: a norm, an activation with its gate, a residual or a rotation is
one kernel each.

Elementwise operators join the kernel that alone reads their result. A norm is not joined with what another module
computes from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeloom.integrations.tracing.recorder import Record, Use, Value

REDUCTIONS = frozenset(
    """
    mean sum var var_mean std amax native_layer_norm _fused_rms_norm native_group_norm native_batch_norm
    _softmax _log_softmax linalg_vector_norm norm logsumexp
    """.split()  # noqa: SIM905  shorter
)
ACTIVATIONS = frozenset(
    """
    silu gelu relu tanh sigmoid softplus exp erf leaky_relu hardswish elu mish log_sigmoid_forward glu hardtanh
    threshold clamp clamp_min clamp_max relu6 square pow
    """.split()  # noqa: SIM905  shorter
)
COPIES = frozenset(
    """
    clone cat copy copy_ _to_copy index index_select gather scatter masked_scatter constant_pad_nd stack repeat
    split_with_sizes_copy index_add index_put roll tril slice_scatter select_scatter new_zeros zeros_like
    """.split()  # noqa: SIM905  shorter
)
_STATISTIC = 8
"""Numbers of which a norm makes at least one: heads are no narrower."""
_FUSED = ("attention", "scan", "experts", "embedding", "depthwise", "own_experts")
ROUTES = frozenset(("topk", "sort"))

Kind = Literal["product", "kernel", "attention", "scan", "experts", "embedding"]


@dataclass(eq=False)
class Draft:
    """One operator at one size of the workload.

    Attributes
    ----------
    reads, results : list of Value
        Differentiable tensors that it reads and writes.
    fixed : dict
        Fields that do not depend on the workload.
    counts : dict
        Fields that grow with it.
    parameters : list of str
        Weights that it reads.
    eager : list of Value
        What autograd keeps for it.
    """

    kind: Kind
    reads: list[Value]
    results: list[Value]
    fixed: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    eager: list[Value] = field(default_factory=list)
    saves: list[Value] = field(default_factory=list)
    operations: float = 0.0
    """Operations of products, attention and scans that the backward runs twice or 2.5 times."""
    forward_only: bool = False
    reduced: int = 0
    """Columns over which a norm reduces."""


@dataclass(eq=False)
class Segment:
    """What ran from one boundary to the next, the differentiable values at its entry and what leaves it."""

    records: list[Record]
    state: Value | None
    leaves: list[Value]
    regions: dict[int, dict[str, Any]]
    kept: list[Record] = field(default_factory=list)
    """What autograd's graph of what leaves the segment holds, after `draft`."""


def draft(segment: Segment) -> list[Draft]:
    """Return the operators of a segment in the order in which they ran."""
    every = _joined(segment)
    records = needed([r for r in every if any(w.differentiable for w in r.writes)], segment.leaves)
    segment.kept = records
    made = {w for r in segment.records for w in r.writes}
    drafts = []
    for group in _groups(records, segment.leaves):
        each = _draft(group, made)
        each.operations = sum(r.flops for r in group if r.name not in ("convolution", "depthwise"))
        drafts.append(each)
    kept = set(records)
    drafts += _selections([r for r in every if r.flops and r not in kept and not r.about.get("made")])
    seen: set[Value] = set()
    for each in drafts:  # a value that two operators keep is kept once
        each.eager = [v for v in each.eager if v in each.reads or v in each.results or v not in seen]
        inner = [v for v in each.eager if v not in each.reads and v not in each.results]
        seen |= set(inner)
        each.counts["eager_bytes"] = float(sum({v: v.num_bytes for v in inner}.values()))
    _undo_repetitions(drafts)
    _mark_transient(drafts)
    return drafts


def _mark_transient(drafts: Sequence[Draft]) -> None:
    """Mark kernels that the backward of a fused trainer runs again rather than keep their results.

    Transformer Engine and Megatron's router keep a tensor and not its copy in another precision. Mamba-2's combined
    kernel keeps what its convolution reads (`MambaSplitConv1dScanCombinedFn` of mamba_ssm).
    """
    for each in drafts:
        if each.kind == "kernel":
            readers = [d for d in drafts if d is not each and set(each.results) & set(d.reads)]
            cast = each.fixed.get("cast") and all(d.kind == "product" for d in readers)
            joined = each.fixed["kind"] == "depthwise" and all(d.fixed.get("convolves") for d in readers)
            each.fixed["transient"] = bool(readers and (cast or joined))


def _selections(records: Sequence[Record]) -> list[Draft]:
    """Return what chooses the keys of a sparse attention as one kernel without a backward.

    It multiplies by its own weights and reads the results, which are queries and keys. Scores stay in the kernel.
    """
    if not records:
        return []
    moved = 0
    for record in records:
        if any(u.value.parameters for u in record.reads):
            moved += sum({u.value: u.num_bytes for u in record.reads if not u.value.parameters}.values())
            moved += 2 * sum(w.num_bytes for w in record.writes)
    flops = float(sum(r.flops for r in records))
    fixed = {"kind": "matmul", "dtype_bytes": 2}
    counts = {"flops": flops, "forward_bytes": float(moved)}
    result = records[-1].writes[0]
    return [Draft("kernel", [], [result], fixed, counts, _parameters(records), forward_only=True)]


def needed(records: Sequence[Record], leaves: Iterable[Value]) -> list[Record]:
    """Return the operators on which these values depend."""
    wanted, kept = set(leaves), []
    for record in reversed(records):
        if wanted & set(record.writes):
            kept.append(record)
            wanted |= {use.value for use in record.reads}
    return kept[::-1]


def _joined(segment: Segment) -> list[Record]:
    """Return the records, with each region that one fused operator replaces as one record."""
    found: list[Record] = []
    whole: dict[int, Record] = {}
    for record in segment.records:
        if record.region == 0:
            found.append(record)
            continue
        about = segment.regions[record.region]
        if record.region not in whole:
            reads = [Use(about[name], about[name].num_bytes, ()) for name in ("state", "weights")]
            whole[record.region] = one = Record(about["name"], reads, [about["result"]], 0.0, record.scope, 0)
            one.about = about | {"made": set(), "parameters": {}}
            found.append(one)
        one = whole[record.region]
        one.flops += record.flops
        one.saved += record.saved
        one.about["made"] |= set(record.writes)
        for use in record.reads:
            one.about["parameters"] |= dict.fromkeys(use.value.parameters)
    for one in whole.values():
        inside = one.about["made"]
        one.saved = [v for v in one.saved if v in inside or v in (one.reads[0].value, one.reads[1].value)]
    return found


def _special(record: Record) -> bool:
    return record.name in _FUSED or bool(record.flops)


def _parameters(records: Iterable[Record]) -> list[str]:
    """Return the names of the parameters that operators read."""
    return sorted({name for record in records for use in record.reads for name in use.value.parameters})


def _groups(records: list[Record], leaves: Iterable[Value]) -> list[list[Record]]:
    """Return which operators become one kernel, in the order of the kernels' last operators."""
    readers: dict[Value, list[Record]] = defaultdict(list)
    for record in records:
        for use in record.reads:
            if record not in readers[use.value]:
                readers[use.value].append(record)
    outside = set(leaves)
    normed: dict[Record, bool] = {}
    keeps: dict[Record, bool] = {}
    producer = {w: r for r in records for w in r.writes}
    for record in records:
        before = [producer[u.value] for u in record.reads if u.value in producer]
        own = [p for p in before if not _special(p) and p.scope == record.scope]
        alone = [p for p in before if not _special(p) and all(readers[w] == [record] for w in p.writes if readers[w])]
        keeps[record] = bool(record.saved) or any(keeps[p] for p in alone)
        normed[record] = not _special(record) and (record.name in REDUCTIONS or any(normed[p] for p in own))
    group: dict[Record, list[Record]] = {}
    for record in reversed(records):
        joined: list[Record] | None = None
        if not _special(record):
            ends = [r for w in record.writes for r in readers[w]]
            targets = [group[r] for r in ends if not _special(r)]
            single = bool(targets) and len(targets) == len(ends) and all(t is targets[0] for t in targets)
            if single and not outside & set(record.writes):
                apart = normed[record] and any(r.scope != record.scope for r in ends)
                # A trainer's residual addition is a kernel of its own behind what must keep what it reads.
                apart = apart or (keeps[record] and any(_residual(r, record, readers) for r in ends))
                joined = None if apart else targets[0]
        if joined is None:
            group[record] = [record]
        else:
            joined.append(record)
            group[record] = joined
    unique = {id(each): each[::-1] for each in group.values()}
    return list(unique.values())[::-1]


def _residual(record: Record, before: Record, readers: Mapping[Value, list[Record]]) -> bool:
    """Return whether an operator adds what others read too."""
    others = [u.value for u in record.reads if u.value not in before.writes and u.value.differentiable]
    size = max(w.numel for w in record.writes)
    return record.name in ("add", "add_") and any(v.numel == size and len(readers[v]) > 1 for v in others)


def _draft(group: list[Record], made: set[Value]) -> Draft:
    record = group[0]
    if record.name == "experts":
        return _experts(record)
    if record.name == "own_experts":
        return _own_experts(record)
    if record.name == "depthwise":
        return _depthwise(record)
    if record.name in ("attention", "scan"):
        return _fused(record, made)
    if record.name == "embedding":
        table = next(u for u in record.reads if u.value.parameters)
        fixed, result = {"vocabulary": table.shape[0], "width": table.shape[1]}, record.writes[0]
        counts = {"rows": result.numel / result.width}
        return Draft("embedding", [], [result], fixed, counts, sorted(table.value.parameters))
    if record.flops:
        product = _product(record)
        if product is not None:
            return product
    return _kernel(group, made)


def _active(record: Record) -> list[Use]:
    """Return what a record reads that gradients reach."""
    return [u for u in record.reads if u.value.differentiable]


def _product(record: Record) -> Draft | None:
    """Return a product with a weight matrix, or None if both factors are activations or channels are apart.

    A convolution is the product of what lies under its kernel at each place.
    """
    weights = [u for u in record.reads if u.value.parameters]
    others = [u for u in record.reads if not u.value.parameters]
    matrix = next((u for u in weights if len(u.shape) >= 2), None)
    if matrix is None or not others:
        return None
    x = others[0]
    if record.name == "convolution":
        if record.about["groups"] != 1:
            return None
        out_width, in_width = matrix.shape[0], matrix.value.numel // matrix.shape[0]
    elif record.name in ("mm", "addmm") or (record.name == "bmm" and matrix.shape[0] == 1):
        # The weight is the right factor, or the left one of a product of columns.
        in_width, out_width = matrix.shape[-2:] if matrix is record.reads[-1] else matrix.shape[:-3:-1]
    else:
        return None
    # Beside its input, autograd keeps a weight that is computed from the parameter, such as one in float32.
    eager = [v for v in record.saved if v is x.value or (v.parameters and v.derived)]
    fixed = {
        "in_width": in_width,
        "out_width": out_width,
        "biases": sum(u.value.numel for u in weights if u is not matrix),
        "matrix": matrix.value.parameters,
        "eager": x.value in eager,
    }
    counts = {"rows": record.flops / (2 * in_width * out_width), "flops": record.flops}
    return Draft("product", [x.value], record.writes[:1], fixed, counts, _parameters([record]), eager)


def _fused(record: Record, made: set[Value]) -> Draft:
    about, result, statistics = record.about, record.writes[0], float(record.about["statistics"])
    kind: Kind = "attention" if record.name == "attention" else "scan"
    if kind == "attention":
        fixed = {n: about[n] for n in ("heads", "query_key_width", "value_width", "key_value_width", "causal")}
        fixed["about"] = {n: about.get(n) for n in ("window", "chunk", "lengths", "keys", "behind")}
        fixed["columns"] = _columns_read(record)
        counts = {"rows": result.numel / (about["heads"] * about["value_width"]), "pairs": float(about["pairs"])}
    else:
        width = result.numel // (record.shape[0] * record.shape[1]) if len(record.shape) == 4 else record.shape[-1]
        moved = sum({u.value: u.num_bytes for u in record.reads}.values()) + result.num_bytes
        moved += 2 * int(statistics + about.get("recomputed", 0))
        fixed = {"width": width, "convolves": about.get("convolves", False)}
        counts = {"rows": result.numel / width, "bytes": float(moved), "states": statistics}
    counts["flops"] = record.flops
    reads = list(dict.fromkeys(u.value for u in _active(record)))
    eager = [v for v in record.saved if v in made or v.differentiable]
    return Draft(kind, reads, [result], fixed, counts, _parameters([record]), eager)


def _columns_read(record: Record) -> tuple[int, ...]:
    """Return the columns that an attention reads of each tensor if some are another's; empty if it reads all."""
    read: dict[Value, int] = {}
    for use in _active(record):
        read[use.value] = read.get(use.value, 0) + use.num_bytes
    columns = tuple(min(v.width, size * v.width // v.num_bytes) for v, size in read.items())
    return columns if any(c < v.width for c, v in zip(columns, read, strict=True)) else ()


def _depthwise(record: Record) -> Draft:
    """Return a causal convolution with its activation."""
    x, result = record.reads[0], record.writes[0]
    fixed = {"kind": "depthwise", "dtype_bytes": result.dtype_bytes}
    moved = float(x.num_bytes + result.num_bytes)
    counts = {"flops": record.flops, "forward_bytes": moved, "backward_bytes": moved + x.num_bytes}
    counts["backward_flops"] = record.flops
    return Draft("kernel", [x.value], [result], fixed, counts, _parameters([record]), [x.value], [x.value])


def _experts(record: Record) -> Draft:
    about = record.about
    fixed = {n: about[n] for n in ("hidden", "inner", "experts", "chosen", "gated", "biases")}
    reads = [u.value for u in record.reads]
    counts = {"rows": reads[0].numel / about["hidden"], "flops": record.flops}
    eager = list(dict.fromkeys(record.saved))
    return Draft("experts", reads, [about["result"]], fixed, counts, list(about["parameters"]), eager)


def _own_experts(record: Record) -> Draft:
    about = record.about
    fixed = {n: about[n] for n in ("hidden", "inner", "experts", "chosen", "gated", "biases", "dense", "unused")}
    fixed["own"] = True
    counts = {"rows": float(about["rows"]), "flops": record.flops}
    reads = [use.value for use in record.reads if not use.value.parameters]
    return Draft("experts", reads, record.writes[:1], fixed, counts, _parameters([record]))


def _undo_repetitions(drafts: Sequence[Draft]) -> None:
    """Let experts whose code repeats every token for every expert read the tokens, and return their sum.

    What repeats and scales the tokens becomes the router's kernel, whose result has a number for each token and expert.
    """
    for each in drafts:
        if not each.fixed.get("dense"):
            continue
        count, rows, width = (int(n) for n in (each.fixed["experts"], each.counts["rows"], each.fixed["hidden"]))
        before = next(d for d in drafts if each.reads[0] in d.results)
        state = next(v for v in before.reads if v.numel == rows * width)
        before.reads = [v for v in before.reads if v is not state]
        scores = before.results[0]
        scores.numel, scores.width, scores.num_bytes = rows * count, count, rows * count * scores.dtype_bytes
        moved = float(sum(v.num_bytes for v in before.reads) + scores.num_bytes)
        before.eager = before.saves = list(before.reads)
        before.fixed |= {"kind": "route", "cheap": False}
        elements = float(rows * count)
        before.counts |= {"flops": 8 * elements, "backward_flops": 16 * elements, "statistics": 4 * elements}
        before.counts |= {"forward_bytes": moved, "backward_bytes": 2 * moved, "eager_bytes": 4 * elements}
        each.reads = [state, scores]
        result = each.results[0]
        after = next(d for d in drafts if result in d.reads)
        extra = float(result.num_bytes - result.num_bytes // count)
        after.counts["forward_bytes"] -= extra
        after.counts["backward_bytes"] -= extra
        result.numel, result.num_bytes = rows * width, result.num_bytes // count


def _kernel(group: list[Record], made: set[Value]) -> Draft:
    inner = {w for r in group for w in r.writes}
    sink = group[-1]
    result = max(sink.writes, key=lambda v: (v.differentiable, v.num_bytes))
    uses: dict[Value, dict[tuple[int, tuple[int, ...]], int]] = {}
    for record in group:
        for use in record.reads:
            # Tables of positions belong to all blocks, and are small beside what they are applied to.
            if use.value not in inner and use.value.differentiable:
                uses.setdefault(use.value, {})[use.offset, use.shape] = use.num_bytes
    moved = {value: min(sum(parts.values()), value.num_bytes) for value, parts in uses.items()}
    reads = list(uses)
    saved = list(dict.fromkeys(v for r in group for v in r.saved if v in made or v.differentiable))
    names = {r.name.rstrip("_") for r in group}
    saves = _recomputable(group, inner, reads, [v for v in saved if v.differentiable])
    kind = _kind(group, names, bool(saves), reads)
    only_result = saved == [result]
    reductions = [r for r in group if _narrows(r)]
    statistics = sum(min(w.numel for w in r.writes) * 4 * max(1, len(r.writes) - 1) for r in reductions[:1])
    if not saves:
        statistics = 0
    if only_result:
        saves, statistics = [], 0
    if kind == "route":
        statistics = sum(v.num_bytes for v in saved if v in inner)
    passes = kind == "add" and len(group) == 1 and len(reads) == 2 and not saves
    flops = float(sum(r.flops or max(w.numel for w in r.writes) for r in group))
    grads = sum(moved[v] for v in reads)
    parameters = _parameters(group)
    fixed = {
        "kind": kind,
        "dtype_bytes": result.dtype_bytes,
        "saves_result": only_result,
        "eager_saves_result": result in saved,
        "passes": passes,
        "cheap": bool(saves or only_result) and kind not in ("matmul", "route", "depthwise"),
        "cast": names == {"_to_copy"},
    }
    counts = {
        "flops": flops,
        "forward_bytes": float(sum(moved.values()) + result.num_bytes),
        "backward_bytes": float(sum(moved[v] for v in saves) + result.num_bytes * (1 + only_result) + grads),
        # A product with weights has as many operations for their gradient, which the emulator adds.
        "backward_flops": flops if group[0].flops and parameters else 2 * flops,
        "statistics": float(statistics),
    }
    # Statistics of a norm are by-products.
    others = [v for v in sink.writes if v.differentiable and v is not result and v.numel * _STATISTIC > result.numel]
    reduced = max(map(_reduced, reductions), default=0)
    return Draft("kernel", reads, [result, *others], fixed, counts, parameters, saved, saves, reduced=reduced)


def _narrows(record: Record) -> bool:
    """Return whether an operator reduces rows to statistics, as a norm does."""
    return record.name in REDUCTIONS and _reduced(record) >= _STATISTIC


def _reduced(record: Record) -> int:
    """Return how many numbers a reduction makes one of."""
    largest = max(u.value.numel for u in record.reads)
    return max(1, largest // max(1, min(w.numel for w in record.writes)))


def _recomputable(
    group: Sequence[Record], inner: set[Value], reads: Sequence[Value], saved: Sequence[Value]
) -> list[Value]:
    """Return what a kernel must read again to recompute what autograd saved in it."""
    producer = {w: r for r in group for w in r.writes}
    wanted: dict[Value, None] = {}
    stack = list(saved)
    seen: set[Value] = set()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in inner:
            stack += [u.value for u in producer[value].reads]
        elif value in reads:
            wanted[value] = None
    return [v for v in reads if v in wanted]


def _kind(group: Sequence[Record], names: set[str], saves: bool, reads: Sequence[Value]) -> str:
    if any(r.name == "convolution" for r in group):
        return "depthwise" if group[0].about.get("groups", 1) > 1 else "matmul"
    if any(r.flops for r in group):
        return "matmul"
    if names & ROUTES:
        return "route"
    if any(map(_narrows, group)) or "_softmax" in names:
        return "norm"
    if names <= COPIES:
        return "copy"
    if saves:
        return "activation" if names & ACTIVATIONS else "multiply"
    if "neg" in names or len(reads) < 2:
        return "rotary"
    return "add"


def backward_operations(each: Draft) -> float:
    """Return the operations of an operator's backward that torch counts, without those of convolutions."""
    if each.forward_only:
        return 0.0
    return each.operations * (2.5 if each.kind in ("attention", "scan") else 2.0)
