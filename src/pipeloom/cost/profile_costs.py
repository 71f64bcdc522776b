"""CostModel from a measured profile: what chunks take under every memory strategy, and split backwards."""

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

# Weights, gradients and two moments of Adam, each as large as the weights.
_STATIC_COPIES = 4.0
MOST_MIXTURES = 4
"""Beside the strategies themselves."""


def sharded_copies(num_replicas: int, frozen: bool = False) -> float:
    """How many times a layer's weights a process holds whose replicas hold shards (FSDP2).

    Weights and gradients are whole while an iteration runs; beside them lie the process's part of weights, gradients
    and Adam's moments. Of frozen layers there are only weights.
    """
    return 1.0 + 1.0 / num_replicas if frozen else 2.0 + _STATIC_COPIES / num_replicas


def usual_copies(frozen: bool) -> float:
    """The same without shards."""
    return 1.0 if frozen else _STATIC_COPIES


def check_strategies(entity: str, strategies: Sequence[Strategy]) -> None:
    """Refuse an empty choice of memory strategies, and one that names a strategy twice."""
    if not strategies:
        raise InputError(entity, "is empty", "give at least keep")
    if len(set(strategies)) < len(strategies):
        raise InputError(entity, f"{list(strategies)} names one twice", "give each once")


@dataclass(frozen=True)
class ProfileCosts:
    """CostModel from a `Profile`.

    A chunk's bytes are what the runtime holds for it between forward and backward: the arguments of its first layer
    whatever the strategy, and what autograd saves (keep), what matrix products gave (selective), or nothing more
    (recompute; offload, of which the host has the rest). What one computation needs while it runs is apart, in
    `workspace_bytes`.

    Attributes
    ----------
    model : ModelSpec
    profile : Profile
    rank : RankSpec
        Its links give the seconds of messages.
    strategies : tuple of Strategy
        Memory strategies offered for every pair, for all layers of its chunk or mixed over them; the first is the base.
    factors : dict
        Per module, measured over predicted seconds of (forward, backward): what calibration learned while
        training ran. Absent means 1.
    slowness : tuple of float
        Per rank, how many times longer it computes than most, learned likewise; beyond its end 1.
    split_backward : bool
        Whether the halves of a split backward are offered too.
    held_copies : dict
        Of ``"module/kind"``: how many times a layer's weights a process holds, gradients and optimiser state included.
        Absent means 4, and 1 where the module is frozen.
    """

    model: ModelSpec
    profile: Profile
    rank: RankSpec = field(default_factory=RankSpec)
    strategies: tuple[Strategy, ...] = ("keep",)
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    slowness: tuple[float, ...] = ()
    split_backward: bool = False
    held_copies: dict[str, float] = field(default_factory=dict)
    _layers: dict[str, tuple[LayerSpec, ...]] = field(init=False, repr=False)
    _streams: dict[str, TensorShape] = field(init=False, repr=False)
    _sums: dict[tuple[str, tuple[int, int]], _Sums] = field(init=False, repr=False, default_factory=dict)
    _mixed: dict[tuple[str, tuple[int, int], int], tuple[tuple[Strategy, ...], ...]] = field(
        init=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Check once that all was measured that will be asked for, so that planning cannot fail on it later."""
        object.__setattr__(self, "_layers", {m.name: m.flat_layers for m in self.model.modules})
        streams = {end.stream: end.output for module in self.model.modules for end in module.emits}
        object.__setattr__(self, "_streams", streams)
        check_strategies("strategies", self.strategies)
        # What keeps or recomputes all is known from the plain passes.
        needed: list[str] = [s for s in self.strategies if TRAITS[s].offloads or TRAITS[s].recomputes == "cheap"]
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
        """Return the same costs without the halves of backwards."""
        return replace(self, split_backward=False) if self.split_backward else self

    def corrected(self, correction: Correction) -> ProfileCosts:
        """Return the same costs corrected by what was measured while training ran."""
        return replace(
            self, factors=correction.modules, slowness=correction.slowness, rank=correction.corrected(self.rank)
        )

    def chunk_costs(self, chunk: Chunk, workload: Workload) -> tuple[StrategyCost, ...]:
        """Costs of a chunk under each offered strategy, then under mixtures of them over its layers."""
        here = self._on_rank(chunk, workload)
        found = [here.cost(strategy, self.split_backward) for strategy in self.strategies]
        return (*found, *(self._mixture(chunk, workload, layers) for layers in self._mixtures(chunk, workload)))

    def _mixtures(self, chunk: Chunk, workload: Workload) -> tuple[tuple[Strategy, ...], ...]:
        """Mixtures that are worth offering, the same for all workloads of about so many tokens."""
        length = 1 << max(0, round(math.log2(max(1, workload.num_tokens))))
        key = chunk.module, chunk.layers, length
        if key not in self._mixed:
            self._mixed[key] = self._mix(chunk, Workload((length,))) if len(self.strategies) > 1 else ()
        return self._mixed[key]

    def _mix(self, chunk: Chunk, workload: Workload) -> tuple[tuple[Strategy, ...], ...]:
        layers, known = [], dict[str, list[LayerOption]]()
        for number in range(chunk.layers[0], chunk.layers[1] + 1):
            kind = self._layers[chunk.module][number].kind
            if kind not in known:
                alone = self._on(Chunk(chunk.module, (number, number), chunk.rank), workload)
                costs = [alone.cost(strategy, False) for strategy in self.strategies]
                known[kind] = [
                    LayerOption(c.strategy, c.forward_s, c.backward_s, c.activation_bytes, c.host_bytes) for c in costs
                ]
            layers.append(known[kind])
        found = mix(layers)
        # Those that keep off the host, too, for batches that do better without offloading.
        rows = dict.fromkeys(
            row for front in (found.front, found.free_front) for row in ranges(found, front, MOST_MIXTURES + 2)
        )
        mixed = (cast(tuple[Strategy, ...], found.layers(row)) for row in rows)
        return tuple(each for each in mixed if len(set(each)) > 1)

    def _mixture(self, chunk: Chunk, workload: Workload, layers: tuple[Strategy, ...]) -> StrategyCost:
        """Cost of layers under strategies of their own: neighbours under one are a block, and blocks are as chunks."""
        parts, begin = [], chunk.layers[0]
        for strategy, run in itertools.groupby(layers):
            end = begin + len(list(run))
            here = self._on_rank(Chunk(chunk.module, (begin, end - 1), chunk.rank), workload)
            parts.append(here.cost(strategy, self.split_backward))
            begin = end
        split = all(part.backward_input_s is not None for part in parts)
        return StrategyCost(
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

    def workspace_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Most that a pass uses beyond what is held, under any of the offered strategies that do not offload.

        Recomputation makes again, inside the backward, what was not held.
        """
        return self._workspace_bytes(chunk, workload, self._staying or self.strategies)

    def staging_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """What it uses more where pairs offload: that is there until it was moved, and again one computation early."""
        if not self._staying:
            return 0
        most = self._workspace_bytes(chunk, workload, self.strategies)
        return most - self.workspace_bytes(chunk, workload)

    @property
    def _staying(self) -> tuple[Strategy, ...]:
        """Strategies that do not offload."""
        return tuple(each for each in self.strategies if not TRAITS[each].offloads)

    def _workspace_bytes(self, chunk: Chunk, workload: Workload, strategies: Sequence[Strategy]) -> int:
        here = self._on(chunk, workload)
        used = max(here.workspace(strategy, self.split_backward) for strategy in strategies)
        if not any(set(mixed) <= set(strategies) for mixed in self._mixtures(chunk, workload)):
            return used
        # Gradients between blocks, where the chunk itself may end with the loss.
        return used + max(layer.output.num_bytes(workload) for layer in self._chunk_layers(chunk))

    def pass_bytes(self, chunk: Chunk, workload: Workload, strategy: str) -> PassBytes:
        """What a pass of the chunk uses beyond what is held, under one strategy, or one for every layer."""
        here = self._on(chunk, workload)
        return here.passes(word_strategies(strategy))

    def boundary_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Bytes of the chunk's output."""
        return self._chunk_layers(chunk)[-1].output.num_bytes(workload)

    def stream_bytes(self, stream: str, workload: Workload) -> int:
        """Bytes of a stream whose emitting layer has this workload."""
        return self._streams[stream].num_bytes(workload)

    def link_between(self, first: int, second: int) -> int:
        """Number of the link between two ranks; by their hosts."""
        return self.rank.link_between(first, second)

    def transfer_s(self, num_bytes: int, link: int = 0) -> float:
        """Seconds of a message over a link."""
        return self.rank.transfer_s(num_bytes, link)

    def static_bytes(self, chunk: Chunk) -> int:
        """Weights, of what is trained also gradients and Adam's moments, in the dtype of the layer's output."""
        total = 0
        usual = usual_copies(self.model.module(chunk.module).frozen)
        for layer in self._chunk_layers(chunk):
            copies = self.held_copies.get(f"{chunk.module}/{layer.kind}", usual)
            total += math.ceil(layer.num_parameters * DTYPE_BYTES[layer.output.dtype] * copies)
        return total

    def gradient_bytes(self, chunk: Chunk) -> int:
        """Of the static bytes, those of gradients, which are made by the chunk's first backward."""
        if self.model.module(chunk.module).frozen:
            return 0
        return sum(layer.num_parameters * DTYPE_BYTES[layer.output.dtype] for layer in self._chunk_layers(chunk))

    def _on_rank(self, chunk: Chunk, workload: Workload) -> _OnWorkload:
        here, slowness = self._on(chunk, workload), slowness_of(self, chunk.rank)
        return here if slowness == 1.0 else here.slowed(slowness)

    def _on(self, chunk: Chunk, workload: Workload) -> _OnWorkload:
        key = chunk.module, chunk.layers
        if key not in self._sums:
            kinds = [f"{chunk.module}/{layer.kind}" for layer in self._chunk_layers(chunk)]
            self._sums[key] = _sum_layers([self.profile.layers[kind] for kind in kinds])
        sums, features = self._sums[key], workload_features(workload)
        f_factor, b_factor = self.factors.get(chunk.module, (1.0, 1.0))
        values = sum_over(sums.rows, features)
        forward_bytes, backward_bytes, half_bytes = np.maximum.reduceat(values, sums.starts).clip(0).tolist()
        forward_s, backward_s, kept, given, unsaved, *measured = values[: sums.starts[0]].clip(0).tolist()
        forward_s, backward_s = forward_s * f_factor, backward_s * b_factor
        entering = self._entering_bytes(chunk, workload)
        if not measured:
            # A module's own input is data, and lives anyway.
            layers, first = self._layers[chunk.module], chunk.layers[0]
            given = (layers[first - 1].output.num_bytes(workload) if first else 0) + entering
            return _OnWorkload(forward_s, backward_s, round(kept) + entering, given, max(0, round(kept) - given))
        of = dict(zip(_SUMMED, measured, strict=True))
        given, unsaved = round(given) + entering, round(unsaved) + entering
        # Arguments of the layers behind the first, where they are saved: those are made inside the chunk.
        inside = of["given_bytes"] - of["unsaved_bytes"] - (given - unsaved)
        held = round(kept) + unsaved
        # The gradient of the output; that of the loss is a number.
        seed = 0 if self._ends(chunk) else self.boundary_bytes(chunk, workload)
        # What single layers were seen to move lacks the tensors between them.
        alone = kept - (of["given_bytes"] - of["unsaved_bytes"])
        moved = max(0, held - given)
        more = moved / alone if alone > 0 else 1.0
        return _OnWorkload(
            forward_s,
            backward_s,
            held,
            given,
            moved,
            halves_s=(of["input_gradient_s"] * b_factor, of["weight_gradient_s"] * b_factor),
            between_bytes=given + round(of["weight_gradient_bytes"] + inside) + seed,
            selective_s=(of["selective_forward_s"] * f_factor, of["selective_backward_s"] * b_factor),
            selective_bytes=given + round(of["selective_bytes"]),
            move_s=(of["offload_s"] * more, of["load_s"] * more),
            uses=_Uses(round(forward_bytes), round(backward_bytes), round(half_bytes), seed),
        )

    def _entering_bytes(self, chunk: Chunk, workload: Workload) -> int:
        """Bytes of streams from other chunks that layers behind the first take: held like what the first is given."""
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
                works = workload if source is module else self._given_workload(chunk.module, source.name, workload)
                total += each.output.num_bytes(works)
        return total

    def _given_workload(self, module: str, source: str, workload: Workload) -> Workload:
        """What a part takes of another module, as near as it is known."""
        place = self.model.sources(module).index(source)
        if place >= len(workload.given):
            return Workload(())
        count, tokens = workload.given[place]
        return Workload(tuple(tokens // count + (i < tokens % count) for i in range(count)))

    def _ends(self, chunk: Chunk) -> bool:
        """Whether the loss comes behind it."""
        last = self.model.modules[-1].name
        return chunk.module == last and chunk.layers[1] == len(self._layers[last]) - 1

    def _chunk_layers(self, chunk: Chunk) -> tuple[LayerSpec, ...]:
        return self._layers[chunk.module][chunk.layers[0] : chunk.layers[1] + 1]


_SUMMED = tuple(n for n in StrategyFit.__struct_fields__ if not n.endswith(("workspace_bytes", "_moments")))


@dataclass(frozen=True, slots=True)
class _Sums:
    """Coefficients of a chunk, one matrix of them: a plan asks for very many chunks on very many workloads."""

    rows: FloatArray
    """First sums over the layers: seconds forward and backward, bytes saved, bytes given to the first layer and those
    of them that it does not save, and as `StrategyFit` where every layer was measured. Then sums of which the largest
    counts, for every layer: what its forward uses beyond what the whole chunk will hold, negative where much is to
    come; what a whole backward uses beyond what the chunk held, when it comes to the layer; what either half of a
    split one uses."""
    starts: tuple[int, int, int]
    """Where the last three begin."""


def _sum_layers(layers: Sequence[LayerFit]) -> _Sums:
    num = max(len(f.activation_bytes) for f in layers)

    def rows(coefficients: Sequence[Sequence[float]]) -> FloatArray:
        return aligned(coefficients, num)

    saved = rows([f.activation_bytes for f in layers])
    seconds = [rows([getattr(f, name) for f in layers]).sum(axis=0) for name in ("forward_s", "backward_s")]
    base = np.array([*seconds, saved.sum(axis=0)])
    known = [f.strategies for f in layers if f.strategies is not None]
    if len(known) < len(layers):
        return _Sums(np.vstack([base, np.zeros((5, num))]), (5, 6, 7))
    given, unsaved = (rows([getattr(f, name) for f in known]) for name in ("given_bytes", "unsaved_bytes"))
    own = saved - given + unsaved
    # Of the layers behind one: nothing is held yet when its forward runs, nor any more when its backward does.
    behind = own[::-1].cumsum(axis=0)[::-1] - own
    # What a layer inside the chunk is given and nobody saves lives while it runs; the first one's is held.
    inside = unsaved * (np.arange(len(known)) > 0)[:, None]
    # The gradient of its output, made by the layer behind it.
    flowing = np.vstack([given[1:], np.zeros((1, num))])

    def most(found: Iterable[tuple[Coefficients, ...]], beside: FloatArray) -> FloatArray:
        return np.vstack([rows(each) + more for each, more in zip(found, beside, strict=True)])

    measured = [rows([getattr(f, name) for f in known]).sum(axis=0) for name in _SUMMED]
    plain = np.array([*base, given[0], unsaved[0], *measured])
    forward = most((f.forward_most for f in known), inside - behind)
    backward = most((f.backward_most for f in known), flowing - behind)
    half = most((f.half_most for f in known), flowing)
    first = len(plain)
    starts = (first, first + len(forward), first + len(forward) + len(backward))
    return _Sums(np.vstack([plain, forward, backward, half]), starts)


class _Uses(NamedTuple):
    """Bytes of passes under ``keep``."""

    forward: int = 0
    backward: int = 0
    half: int = 0
    seed: int = 0
    """The gradient of the output, in any backward."""


_NO_USES = _Uses()


@dataclass(frozen=True, slots=True)
class _OnWorkload:
    """A chunk on one workload: seconds with calibration in them, and bytes."""

    forward_s: float
    backward_s: float
    kept_bytes: int
    given_bytes: int
    """Held under every strategy."""
    moved_bytes: int
    """Made inside the chunk and saved: what recomputation makes again, and offloading moves."""
    halves_s: tuple[float, float] | None = None
    between_bytes: int = 0
    """Held between the halves of a split backward, under every strategy: by then all is there again."""
    selective_s: tuple[float, float] = (0.0, 0.0)
    selective_bytes: int = 0
    move_s: tuple[float, float] = (0.0, 0.0)
    """To the host and back."""
    uses: _Uses = _NO_USES

    def slowed(self, slowness: float) -> _OnWorkload:
        """On a rank that computes so many times longer; what moves to the host and back takes as long."""
        forward_s, backward_s = self.selective_s
        return replace(
            self,
            forward_s=self.forward_s * slowness,
            backward_s=self.backward_s * slowness,
            halves_s=None if self.halves_s is None else (self.halves_s[0] * slowness, self.halves_s[1] * slowness),
            selective_s=(forward_s * slowness, backward_s * slowness),
        )

    def cost(self, strategy: Strategy, split: bool) -> StrategyCost:
        """Under one strategy."""
        forward_s, more_s, held, host = self.forward_s, 0.0, self.kept_bytes, 0
        match strategy:
            case "keep":
                pass
            case "recompute":
                more_s, held = self.forward_s, self.given_bytes
            case "selective":
                forward_s, held = self.selective_s[0], self.selective_bytes
                more_s = max(0.0, self.selective_s[1] - self.backward_s)
            case "offload":
                forward_s, more_s, held = self.forward_s + self.move_s[0], self.move_s[1], self.given_bytes
                host = self.moved_bytes
            case _:
                assert_never(strategy)
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
            self.between_bytes,
            host_bytes=host,
        )

    def workspace(self, strategy: Strategy, split: bool) -> int:
        """Most that a pass uses, and beside it one such chunk on its way to the host and one on its way back."""
        used = self.passes((strategy,))
        halves = (used.first_half_bytes, used.second_half_bytes) if split else ()
        return max(used.forward_bytes, used.backward_bytes, *halves) + 2 * used.moved_bytes

    def _recomputed_bytes(self, strategy: Strategy) -> int:
        """What the backward makes again of a layer with this strategy."""
        match TRAITS[strategy].recomputes:
            case "nothing":
                return 0
            case "cheap":
                return max(0, self.kept_bytes - self.selective_bytes)
            case "all":
                return self.moved_bytes
            case unknown:
                assert_never(unknown)

    def passes(self, strategies: Sequence[Strategy]) -> PassBytes:
        """What passes use, where layers have these strategies."""
        again = max((self._recomputed_bytes(each) for each in strategies), default=0)
        # A split backward catches gradients; when its first half has ended, they count as held.
        caught = max(0, self.between_bytes - self.kept_bytes)
        moves = any(TRAITS[each].offloads for each in strategies)
        forward, backward, half, seed = self.uses
        return PassBytes(
            forward_bytes=forward + again,
            backward_bytes=backward + seed + again,
            first_half_bytes=half + seed + again + caught,
            second_half_bytes=half,
            moved_bytes=moves * self.moved_bytes,
        )
