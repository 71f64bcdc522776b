"""`CostModel` from a measured profile, with all memory strategies and split backwards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, assert_never, cast

import numpy as np

from pipeloom.cost.correction import Correction, slowness_of
from pipeloom.cost.fits import Coefficients, FloatArray, aligned, sum_over, workload_features
from pipeloom.cost.mixtures import LayerOption, mix, ranges
from pipeloom.cost.model import PassBytes, StrategyCost
from pipeloom.cost.profile import LayerFit, Profile, StrategyFit
from pipeloom.errors import InputError
from pipeloom.spec import (
    DTYPE_BYTES,
    TRAITS,
    Chunk,
    LayerSpec,
    ModelSpec,
    RankSpec,
    Strategy,
    TensorShape,
    Workload,
    word_strategies,
)

# Weights, gradients and two moments of Adam, all of one size.
_STATIC_COPIES = 4.0
MOST_MIXTURES = 4
"""Most mixtures of strategies that a chunk is offered."""


def sharded_copies(num_replicas: int, frozen: bool = False) -> float:
    """Return the memory of a layer, in multiples of its weights, if replicas hold shards (FSDP2).

    Weights and gradients are whole during an iteration. In addition there is the process's shard of weights, gradients
    and Adam's moments. Frozen layers have only weights.
    """
    return 1.0 + 1.0 / num_replicas if frozen else 2.0 + _STATIC_COPIES / num_replicas


def usual_copies(frozen: bool) -> float:
    """Return the memory of a layer, in multiples of its weights, without shards."""
    return 1.0 if frozen else _STATIC_COPIES


def check_strategies(entity: str, strategies: Sequence[Strategy]) -> None:
    """Raise `InputError` if no strategies are chosen, or one twice."""
    if not strategies:
        raise InputError(entity, "is empty", "give at least keep")
    if len(set(strategies)) < len(strategies):
        raise InputError(entity, f"{list(strategies)} names one twice", "give each once")


@dataclass(frozen=True)
class ProfileCosts:
    """`CostModel` from a `Profile`.

    A chunk's bytes are those that the runtime holds between forward and backward. They are the arguments of its first
    layer, and in addition the tensors that autograd saves (keep), the arguments of the other layers (recompute) and the
    results of matrix products (selective), or nothing (offload, with the rest on the host). Peak bytes during a
    computation are separate, see `workspace_bytes`.

    Copies to the host add to the forward, copies back to the backward. If they run beside computation (see `Profile`),
    a pass takes as long as its computation or its copies, whichever is longer, as in `pipeloom.cost.mixtures`. The
    copies of one pass then overlap with a neighboring pass of the rank, which is assumed to be as long. This neglects
    the first copies back and the last copies to the host of a sequence, which have no computation beside them, and that
    copies in both directions at once are slower.
    """

    model: ModelSpec
    profile: Profile
    rank: RankSpec = field(default_factory=RankSpec)
    """Its links determine the seconds of messages."""
    strategies: tuple[Strategy, ...] = ("keep",)
    """Memory strategies of every pair, for all layers of its chunk or mixed over them. The first is the base."""
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Measured over predicted seconds of (forward, backward) by module, learned during training; 1 if absent."""
    slowness: tuple[float, ...] = ()
    """Compute time of each rank relative to most ranks, learned likewise. Ranks beyond its end have 1."""
    split_backward: bool = False
    """Whether split backwards are offered."""
    held_copies: dict[str, float] = field(default_factory=dict)
    """Memory of a layer in multiples of its weights, with gradients and optimizer state, by ``"module/kind"``. Default:
    4, and 1 if the module is frozen."""
    _layers: dict[str, tuple[LayerSpec, ...]] = field(init=False, repr=False)
    _streams: dict[str, TensorShape] = field(init=False, repr=False)
    _sums: dict[tuple[str, tuple[int, int]], _Sums] = field(init=False, repr=False, compare=False, default_factory=dict)
    _mixed: dict[tuple[str, tuple[int, int], int], tuple[tuple[Strategy, ...], ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Check that all required measurements exist, so that planning cannot fail on them later."""
        object.__setattr__(self, "_layers", {m.name: m.flat_layers for m in self.model.modules})
        streams = {end.stream: end.output for module in self.model.modules for end in module.emits}
        object.__setattr__(self, "_streams", streams)
        check_strategies("strategies", self.strategies)
        # Costs of keeping or recomputing everything follow from the plain passes. All others are measured.
        needed: list[str] = [
            s for s in self.strategies if TRAITS[s].offloads or TRAITS[s].recomputes not in ("nothing", "all")
        ]
        needed += ["split backward"] if self.split_backward else []
        for key in [f"{name}/{layer.kind}" for name, layers in self._layers.items() for layer in layers]:
            if key not in self.profile.layers:
                raise InputError(f"profile.layers[{key!r}]", "is missing", "measure this kind of layer")
            if needed and self.profile.layers[key].strategies is None:
                raise InputError(
                    f"profile.layers[{key!r}].strategies",
                    f"is missing, and {needed[0]!r} is offered",
                    "measure the model again, for all strategies",
                )

    def uncorrected(self) -> ProfileCosts:
        """Return the costs as measured before training."""
        return replace(self, factors={}, slowness=())

    def whole_backwards(self) -> ProfileCosts:
        """Return the same costs without split backwards."""
        return replace(self, split_backward=False) if self.split_backward else self

    def corrected(self, correction: Correction) -> ProfileCosts:
        """Return the same costs with a correction from training."""
        return replace(
            self, factors=correction.modules, slowness=correction.slowness, rank=correction.corrected(self.rank)
        )

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Return costs of a chunk under each offered strategy, then under mixtures of them over its layers."""
        here = self._on_rank(chunk, workload)
        found = [here.cost(strategy, self.split_backward) for strategy in self.strategies]
        return (*found, *(self._mixture(chunk, workload, layers) for layers in self._mixtures(chunk, workload)))

    def _mixtures(self, chunk: Chunk, workload: Workload) -> tuple[tuple[Strategy, ...], ...]:
        """Return the offered mixtures, the same for all workloads with about this many tokens."""
        length = 1 << max(0, round(math.log2(max(1, workload.num_tokens))))
        key = chunk.module, chunk.layers, length
        if key not in self._mixed:
            self._mixed[key] = self._mix(chunk, Workload((length,))) if len(self.strategies) > 1 else ()
        return self._mixed[key]

    def _mix(self, chunk: Chunk, workload: Workload) -> tuple[tuple[Strategy, ...], ...]:
        layers, known = [], dict[str, list[LayerOption]]()
        for number in chunk.layer_numbers:
            kind = self._layers[chunk.module][number].kind
            if kind not in known:
                alone = self._on(Chunk(chunk.module, (number, number), chunk.rank), workload)
                known[kind] = [alone.option(strategy) for strategy in self.strategies]
            layers.append(known[kind])
        found = mix(layers)
        # Include mixtures without offloading, for batches where these are faster.
        rows = dict.fromkeys(
            row
            for front in (found.front, found.front_without_offload)
            for row in ranges(found, front, MOST_MIXTURES + 2)
        )
        mixed = (cast(tuple[Strategy, ...], found.layers(row)) for row in rows)
        return tuple(each for each in mixed if len(set(each)) > 1)

    def _mixture(self, chunk: Chunk, workload: Workload, layers: tuple[Strategy, ...]) -> StrategyCost:
        """Return the cost of layers under different strategies.

        Adjacent layers under one strategy cost as much as a chunk.
        """
        parts, moves, begin = [], [], chunk.layers[0]
        for strategy, run in itertools.groupby(layers):
            end = begin + len(list(run))
            here = self._on_rank(Chunk(chunk.module, (begin, end - 1), chunk.rank), workload)
            parts.append(here.computation(strategy, self.split_backward))
            moves.append(here.copies(strategy))
            begin = end
        split = all(part.backward_input_s is not None for part in parts)
        whole = StrategyCost(
            "mixed",
            sum(part.forward_s for part in parts),
            sum(part.backward_s for part in parts),
            sum(part.activation_bytes for part in parts),
            sum(part.backward_input_s or 0.0 for part in parts) if split else None,
            sum(part.backward_weight_s or 0.0 for part in parts) if split else None,
            sum(part.weight_gradient_bytes or 0 for part in parts) if split else None,
            layers,
            sum(part.host_bytes for part in parts),
        )
        out_s, in_s = sum(out for out, _ in moves), sum(back for _, back in moves)
        return _with_copies(whole, out_s, in_s, self.profile.copies_overlap)

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the peak bytes of a pass beyond held tensors, over all offered strategies that do not offload.

        They include recomputed tensors in a backward.
        """
        return self._workspace_bytes(chunk, workload, self._without_offload or self.strategies)

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the additional peak bytes if pairs offload: tensors on their way to the host, and loaded ahead."""
        if not self._without_offload:
            return 0
        most = self._workspace_bytes(chunk, workload, self.strategies)
        return most - self.workspace_bytes(chunk, workload)

    @property
    def _without_offload(self) -> tuple[Strategy, ...]:
        """Strategies that do not offload."""
        return tuple(each for each in self.strategies if not TRAITS[each].offloads)

    def _workspace_bytes(self, chunk: Chunk, workload: Workload, strategies: Sequence[Strategy]) -> int:
        here = self._on(chunk, workload)
        used = max(
            here.workspace(strategy, self.split_backward, self._peaks(chunk, workload, (strategy,)))
            for strategy in strategies
        )
        if not any(set(mixed) <= set(strategies) for mixed in self._mixtures(chunk, workload)):
            return used
        # Gradients between blocks, even if the chunk itself ends with the loss.
        return used + max(layer.output.num_bytes(workload) for layer in self._chunk_layers(chunk))

    def pass_bytes(self, chunk: Chunk, workload: Workload, strategy: str) -> PassBytes:
        """Return the peak bytes of each pass beyond held tensors, under a strategy for all or for each layer."""
        chosen = word_strategies(strategy)
        return self._on(chunk, workload).passes(chosen, self._peaks(chunk, workload, chosen))

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the bytes of the chunk's output."""
        return self._chunk_layers(chunk)[-1].output.num_bytes(workload)

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        """Return the bytes of a stream whose emitting layer has this workload."""
        return self._streams[stream].num_bytes(workload)

    def link_between(self, first: int, second: int) -> int:
        """Return the number of the link between two ranks, which depends on their hosts."""
        return self.rank.link_between(first, second)

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Return the seconds of a message over a link."""
        return self.rank.transfer_s(num_bytes, link)

    def static_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of weights, and if trained of gradients and Adam's moments, in the dtype of the output."""
        total = 0
        usual = usual_copies(self.model.module(chunk.module).frozen)
        for layer in self._chunk_layers(chunk):
            copies = self.held_copies.get(f"{chunk.module}/{layer.kind}", usual)
            total += math.ceil(layer.num_parameters * DTYPE_BYTES[layer.output.dtype] * copies)
        return total

    def gradient_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of gradients, a part of the static bytes. The chunk's first backward allocates them."""
        if self.model.module(chunk.module).frozen:
            return 0
        return sum(map(_gradient_bytes, self._chunk_layers(chunk)))

    def _on_rank(self, chunk: Chunk, workload: Workload) -> _OnWorkload:
        here, slowness = self._on(chunk, workload), slowness_of(self, chunk.rank)
        return here if slowness == 1.0 else here.slowed(slowness)

    def _sums_of(self, chunk: Chunk) -> _Sums:
        key = chunk.module, chunk.layers
        if key not in self._sums:
            layers = self._chunk_layers(chunk)
            fits = [self.profile.layers[f"{chunk.module}/{layer.kind}"] for layer in layers]
            frozen = self.model.module(chunk.module).frozen
            self._sums[key] = _sum_layers(fits, [0 if frozen else _gradient_bytes(layer) for layer in layers])
        return self._sums[key]

    def _on(self, chunk: Chunk, workload: Workload) -> _OnWorkload:
        sums, features = self._sums_of(chunk), workload_features(workload)
        f_factor, b_factor = self.factors.get(chunk.module, (1.0, 1.0))
        forward_s, backward_s, kept, given, unsaved, *measured = sum_over(sums.rows, features).clip(0).tolist()
        forward_s, backward_s = forward_s * f_factor, backward_s * b_factor
        again_s = forward_s
        if sums.recompute is not None:
            again_s = float(sum_over(sums.recompute, features)[0].clip(0)) * b_factor
        entering, inner = self._entering_bytes(chunk, workload), self._inner_bytes(chunk, workload)
        if not measured:
            # A module's own input is part of the batch, which is in memory anyway.
            layers, first = self._layers[chunk.module], chunk.layers[0]
            given = (layers[first - 1].output.num_bytes(workload) if first else 0) + entering
            made = max(0, round(kept) - given)
            held, gradients = round(kept) + entering, self.gradient_bytes(chunk)
            return _OnWorkload(forward_s, backward_s, again_s, held, given, inner, made, gradient_bytes=gradients)
        of = dict(zip(_SUMMED, measured, strict=True))
        given, unsaved = round(given) + entering, round(unsaved) + entering
        # Saved arguments of all layers but the first, which are computed inside the chunk.
        inside = of["given_bytes"] - of["unsaved_bytes"] - (given - unsaved)
        held = round(kept) + unsaved
        # Measured copies of single layers do not include the tensors between them.
        alone = kept - (of["given_bytes"] - of["unsaved_bytes"])
        moved = max(0, held - given)
        more = moved / alone if alone > 0 else 1.0
        return _OnWorkload(
            forward_s,
            backward_s,
            again_s,
            held,
            given,
            inner,
            moved,
            halves_s=(of["input_gradient_s"] * b_factor, of["weight_gradient_s"] * b_factor),
            between_bytes=given + round(of["weight_gradient_bytes"] + inside) + self._seed_bytes(chunk, workload),
            unsaved_bytes=max(0, inner - round(inside)),
            selective_s=(of["selective_forward_s"] * f_factor, of["selective_backward_s"] * b_factor),
            selective_bytes=given + round(of["selective_bytes"]),
            move_s=(of["offload_s"] * more, of["load_s"] * more),
            copies_overlap=self.profile.copies_overlap,
        )

    def _peaks(self, chunk: Chunk, workload: Workload, strategies: tuple[Strategy, ...]) -> _PeakBytes | None:
        """Return the peaks of passes under a strategy for all layers or one for each; None: not measured."""
        rows = self._sums_of(chunk).peaks
        if rows is None:
            return None
        matrix, starts = rows.under(strategies)
        found = np.maximum.reduceat(sum_over(matrix, workload_features(workload)), starts).clip(0).tolist()
        return _PeakBytes._make((*map(round, found), self._seed_bytes(chunk, workload)))

    def _seed_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the bytes of the gradients of the output, unless it is the loss, and of emitted streams."""
        begin, end = chunk.layers
        emitted = [each for each in self.model.module(chunk.module).emits if begin <= each.layer <= end]
        streams = sum(each.output.num_bytes(workload) for each in emitted)
        return streams + (0 if self._ends(chunk) else self.boundary_bytes(chunk, workload))

    def _inner_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the bytes that layers of the chunk take from others of the chunk: outputs and streams."""
        module, (begin, end) = self.model.module(chunk.module), chunk.layers
        taken = {each.stream for each in module.takes if begin < each.layer <= end}
        emitted = [each for each in module.emits if each.stream in taken and begin <= each.layer <= end]
        outputs = [layer.output for layer in self._chunk_layers(chunk)[:-1]]
        return sum(shape.num_bytes(workload) for shape in (*outputs, *(each.output for each in emitted)))

    def _entering_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Return the bytes of streams from other chunks to layers after the first. They are held like its arguments."""
        module = self.model.module(chunk.module)
        begin, end = chunk.layers
        behind = {each.stream for each in module.takes if begin < each.layer <= end}
        if not behind:
            return 0
        behind -= {each.stream for each in module.takes if each.layer == begin}
        total = 0
        for source in self.model.modules:
            for each in source.emits:
                if each.stream not in behind or (source is module and begin <= each.layer <= end):
                    continue
                works = workload if source is module else self._source_workload(chunk.module, source.name, workload)
                total += each.output.num_bytes(works)
        return total

    def _source_workload(self, module: str, source: str, workload: Workload) -> Workload:
        """Return the approximate workload of another module for the rows that a part takes from it."""
        place = self.model.sources(module).index(source)
        if place >= len(workload.given):
            return Workload(())
        count, tokens = workload.given[place]
        return Workload(tuple(tokens // count + (i < tokens % count) for i in range(count)))

    def _ends(self, chunk: Chunk) -> bool:
        """Return whether the chunk ends with the loss."""
        last = self.model.modules[-1].name
        return chunk.module == last and chunk.layers[1] == len(self._layers[last]) - 1

    def _chunk_layers(self, chunk: Chunk) -> tuple[LayerSpec, ...]:
        return self._layers[chunk.module][chunk.layers[0] : chunk.layers[1] + 1]


_SUMMED = tuple(n for n in StrategyFit.__struct_fields__ if not n.endswith(("workspace_bytes", "_moments")))


@dataclass(frozen=True, slots=True)
class _Sums:
    """Coefficients of a chunk as one matrix, because a plan evaluates many chunks on many workloads."""

    rows: FloatArray
    """Sums over the layers: seconds forward and backward, bytes saved, bytes of the first layer's arguments, those of
    them that it does not save, and the fields of `StrategyFit` if every layer was measured."""
    recompute: FloatArray | None = None
    """Seconds that recomputation of everything adds, as one row; None: those of the forward."""
    peaks: _PeakRows | None = None
    """None: not measured."""


def _gradient_bytes(layer: LayerSpec) -> int:
    return layer.num_parameters * DTYPE_BYTES[layer.output.dtype]


def _sum_layers(layers: Sequence[LayerFit], gradient_bytes: Sequence[int]) -> _Sums:
    num = max(len(f.activation_bytes) for f in layers)

    def rows(coefficients: Sequence[Sequence[float]]) -> FloatArray:
        return aligned(coefficients, num)

    saved = rows([f.activation_bytes for f in layers])
    seconds = [rows([getattr(f, name) for f in layers]).sum(axis=0) for name in ("forward_s", "backward_s")]
    base = np.array([*seconds, saved.sum(axis=0)])
    again = None
    if any(f.recompute_s is not None for f in layers):
        again = rows([f.forward_s if f.recompute_s is None else f.recompute_s for f in layers]).sum(axis=0)[None]
    known = [f.strategies for f in layers if f.strategies is not None]
    if len(known) < len(layers):
        return _Sums(np.vstack([base, np.zeros((2, num))]), again)
    given, unsaved = (rows([getattr(f, name) for f in known]) for name in ("given_bytes", "unsaved_bytes"))
    measured = [rows([getattr(f, name) for f in known]).sum(axis=0) for name in _SUMMED]
    plain = np.array([*base, given[0], unsaved[0], *measured])
    selective = rows([f.selective_bytes for f in known])
    return _Sums(plain, again, _PeakRows(known, saved - given + unsaved, given, unsaved, selective, gradient_bytes))


@dataclass(frozen=True, slots=True)
class _PeakRows:
    """Coefficients of the peaks of a chunk's passes. All arrays have a row for each layer."""

    fits: Sequence[StrategyFit]
    own: FloatArray
    """Bytes that a layer makes and saves."""
    given: FloatArray
    unsaved: FloatArray
    """Bytes of its arguments, and those of them that it does not save."""
    selective: FloatArray
    """Bytes that it holds beside its arguments under selective recomputation."""
    gradient_bytes: Sequence[int]
    """Bytes of the gradients of its weights."""
    _known: dict[tuple[Strategy, ...], tuple[FloatArray, tuple[int, ...]]] = field(default_factory=dict)

    def under(self, strategies: tuple[Strategy, ...]) -> tuple[FloatArray, tuple[int, ...]]:
        """Return four groups of rows, of each of which the largest counts, and the first row of each group.

        There is one strategy for all layers, or one for each. The groups are the peak of the forward beyond the bytes
        that the chunk will hold in all, the peak of a whole backward beyond the bytes held when it starts, the peak of
        either half of a split backward, and the peak of the chunk's first backward, in which each layer allocates its
        gradients when the activations of later layers are free.
        """
        if strategies not in self._known:
            every = strategies * len(self.fits) if len(strategies) == 1 else strategies
            groups = self._groups(every)
            starts = np.cumsum([0, *map(len, groups[:-1])]).tolist()
            self._known[strategies] = np.vstack(groups), tuple(starts)
        return self._known[strategies]

    def _groups(self, strategies: Sequence[Strategy]) -> list[FloatArray]:
        count, num = self.own.shape
        # What a layer holds until its backward beside its arguments, and what its backward makes again.
        held, again, repeats = self.own.copy(), np.zeros((count, num)), [False] * count
        for number, strategy in enumerate(strategies):
            match TRAITS[strategy].recomputes:
                case "nothing":
                    continue
                case "cheap":
                    held[number] = self.selective[number]
                case "all":
                    held[number] = 0.0
                case unknown:
                    assert_never(unknown)
            again[number], repeats[number] = self.own[number] - held[number], True
        # Later layers hold nothing yet when this layer's forward runs, and no longer when its backward runs.
        beyond = again - (held[::-1].cumsum(axis=0)[::-1] - held)
        # Unsaved arguments of an inner layer live while it runs; those of the first layer are held.
        inside = self.unsaved * (np.arange(count) > 0)[:, None]
        # The gradient of its output, computed by the next layer.
        flowing = np.vstack([self.given[1:], np.zeros((1, num))])

        def most(found: Iterable[tuple[Coefficients, ...]], beside: FloatArray) -> FloatArray:
            return np.vstack([aligned(each, num) + more for each, more in zip(found, beside, strict=True)])

        def backwards(peaks: Iterable[tuple[Coefficients, ...]]) -> list[tuple[Coefficients, ...]]:
            # A layer that is recomputed runs its forward first.
            return [
                (*each, *fit.forward_peaks) if repeated else each
                for each, fit, repeated in zip(peaks, self.fits, repeats, strict=True)
            ]

        # Gradients of later layers are there. A layer's own are in what was measured.
        there = np.zeros((count, num))
        there[:, 0] = np.cumsum([0, *self.gradient_bytes[:0:-1]])[::-1]
        own_bytes = zip(self.fits, self.gradient_bytes, strict=True)
        there[:, 0] += [0 if fit.first_moments else each for fit, each in own_bytes]
        return [
            most((f.forward_peaks for f in self.fits), beyond + inside),
            most(backwards(f.backward_peaks for f in self.fits), beyond + flowing),
            most((f.half_peaks for f in self.fits), flowing),
            most(backwards(f.first_moments or f.backward_peaks for f in self.fits), beyond + flowing + there),
        ]


class _PeakBytes(NamedTuple):
    """Peak bytes of passes beyond held tensors. In a whole backward, recomputed tensors are included."""

    forward: int
    backward: int
    half: int
    first: int
    """Of the chunk's first backward, with the gradients of weights that it has allocated."""
    seed: int
    """The gradients of the output and of emitted streams, in any backward."""


@dataclass(frozen=True, slots=True)
class _OnWorkload:
    """A chunk on one workload: corrected seconds, and bytes."""

    forward_s: float
    backward_s: float
    recompute_s: float
    """Seconds that recomputation of everything adds to the backward."""
    kept_bytes: int
    given_bytes: int
    """Bytes held under every strategy."""
    inner_bytes: int
    """Arguments of inner layers, which are held if these are recomputed."""
    moved_bytes: int
    """Bytes that are computed and saved inside the chunk: recomputation computes them again, offloading moves them."""
    halves_s: tuple[float, float] | None = None
    between_bytes: int = 0
    """Bytes held between the halves of a split backward under ``keep``. All tensors are there by then."""
    unsaved_bytes: int = 0
    """Those of ``inner_bytes`` that no layer saves."""
    selective_s: tuple[float, float] = (0.0, 0.0)
    selective_bytes: int = 0
    move_s: tuple[float, float] = (0.0, 0.0)
    """Seconds to the host and back."""
    copies_overlap: bool = False
    """As in `Profile`."""
    gradient_bytes: int = 0
    """Bytes of the gradients of weights, if the peaks of passes were not measured."""

    def slowed(self, slowness: float) -> _OnWorkload:
        """Return the costs on a rank whose computation is ``slowness`` times longer. Copies take the same time."""
        forward_s, backward_s = self.selective_s
        return replace(
            self,
            forward_s=self.forward_s * slowness,
            backward_s=self.backward_s * slowness,
            recompute_s=self.recompute_s * slowness,
            halves_s=None if self.halves_s is None else (self.halves_s[0] * slowness, self.halves_s[1] * slowness),
            selective_s=(forward_s * slowness, backward_s * slowness),
        )

    def cost(self, strategy: Strategy, split: bool) -> StrategyCost:
        """Return the costs under one strategy."""
        return _with_copies(self.computation(strategy, split), *self.copies(strategy), self.copies_overlap)

    def option(self, strategy: Strategy) -> LayerOption:
        """Return the costs under one strategy for mixtures, with copies separate if they overlap with computation."""
        overlap = self.copies_overlap
        c = self.computation(strategy, False) if overlap else self.cost(strategy, False)
        beside = self.copies(strategy) if overlap else (0.0, 0.0)
        return LayerOption(c.strategy, c.forward_s, c.backward_s, c.activation_bytes, c.host_bytes, *beside)

    def copies(self, strategy: Strategy) -> tuple[float, float]:
        """Return the seconds of copies to the host and back."""
        return self.move_s if TRAITS[strategy].offloads else (0.0, 0.0)

    def computation(self, strategy: Strategy, split: bool) -> StrategyCost:
        """Return the costs under one strategy, without the time of copies."""
        traits = TRAITS[strategy]
        forward_s, more_s, held, host, inputs = self.forward_s, 0.0, self.kept_bytes, 0, self.unsaved_bytes
        match traits.recomputes:
            case "nothing":
                inputs = 0
            case "cheap":
                forward_s, held = self.selective_s[0], self.selective_bytes + self.inner_bytes
                more_s = max(0.0, self.selective_s[1] - self.backward_s)
            case "all":
                more_s, held = self.recompute_s, self.given_bytes + self.inner_bytes
            case unknown:
                assert_never(unknown)
        if traits.offloads:
            held, host = self.given_bytes, self.moved_bytes
        if not split or self.halves_s is None:
            return StrategyCost(strategy, forward_s, self.backward_s + more_s, held, host_bytes=host)
        inputs_s, weights_s = self.halves_s
        return StrategyCost(
            strategy,
            forward_s,
            self.backward_s + more_s,
            held,
            inputs_s + more_s,
            weights_s,
            self.between_bytes + inputs,
            host_bytes=host,
        )

    def workspace(self, strategy: Strategy, split: bool, peaks: _PeakBytes | None) -> int:
        """Return the peak bytes of a pass, with all tensors of offloading chunks that are on the device meanwhile.

        These are the tensors of the pass itself and of one chunk that is loaded ahead, and if copies overlap with
        computation, those of one chunk on its way to the host.
        """
        used = self.passes((strategy,), peaks)
        halves = (used.first_half_bytes, used.second_half_bytes) if split else ()
        return max(used.forward_bytes, used.backward_bytes, *halves) + 2 * used.moved_bytes + used.leaving_bytes

    def _recomputed_bytes(self, strategy: Strategy) -> int:
        """Return the bytes that the backward recomputes under a strategy."""
        match TRAITS[strategy].recomputes:
            case "nothing":
                return 0
            case "cheap":
                return max(0, self.kept_bytes - self.selective_bytes)
            case "all":
                return self.moved_bytes
            case unknown:
                assert_never(unknown)

    def passes(self, strategies: Sequence[Strategy], peaks: _PeakBytes | None) -> PassBytes:
        """Return the peak bytes of passes whose layers have these strategies.

        If peaks were not measured (None), everything that is recomputed counts at once.
        """
        again = max((self._recomputed_bytes(each) for each in strategies), default=0)
        # A split backward collects gradients. When its first half has ended, they count as held.
        caught = max(0, self.between_bytes - self.kept_bytes)
        moved = self.moved_bytes if any(TRAITS[each].offloads for each in strategies) else 0
        forward, backward, half, first, seed = peaks or (again, again, 0, again + self.gradient_bytes, 0)
        return PassBytes(
            forward_bytes=forward,
            backward_bytes=backward + seed,
            first_backward_bytes=first + seed,
            first_half_bytes=half + seed + again + caught,
            second_half_bytes=half,
            moved_bytes=moved,
            leaving_bytes=moved if self.copies_overlap else 0,
        )


def _with_copies(cost: StrategyCost, out_s: float, in_s: float, overlap: bool) -> StrategyCost:
    """Return costs with the seconds of copies to the host in the forward, and back in the backward or its first half.

    If copies ``overlap`` with computation, a pass takes the longer time of both.
    """

    def passing(compute_s: float, copy_s: float) -> float:
        return max(compute_s, copy_s) if overlap else compute_s + copy_s

    first = cost.backward_input_s
    return replace(
        cost,
        forward_s=passing(cost.forward_s, out_s),
        backward_s=passing(cost.backward_s, in_s),
        backward_input_s=None if first is None else passing(first, in_s),
    )
