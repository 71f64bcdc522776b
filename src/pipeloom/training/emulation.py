"""emulate: the time and memory of training a user's own module on a cluster, without a GPU or a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from pipeloom.emulator import module_parameters
from pipeloom.errors import InfeasibleError, InputError, check_count
from pipeloom.iteration import EmulatedStep
from pipeloom.iteration import emulate as emulate_degrees
from pipeloom.iteration.microbatches import Microbatches, repeated
from pipeloom.iteration.sweep import Points, sweep
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_cluster, load_trainer
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.strategies import ChunkStrategy, chunk_strategy
from pipeloom.spec.trainer import TrainerSpec
from pipeloom.units import size_text
from pipeloom.validation import INTERVAL, Interval, interval_for

if TYPE_CHECKING:
    from torch import nn

    from pipeloom.runtime import Model

_DEGREES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "zero": "zero",
}
"""Fields of `Degrees` by the names of `GivenDegrees`."""
_CHOSEN = ("tp", "pp", "dp", "cp")
"""Degrees of which the fastest combination is chosen if none is given."""
MICROBATCHES = 16
"""Microbatches of one replica, as of `pipeloom emulate`."""
_BATCHES_OF_A_DEVICE = 2
"""Microbatches of each device when degrees are chosen: with data parallelism alone, a device has this many."""


@dataclass(frozen=True)
class Emulation:
    """An emulated iteration of a model on a cluster. Printing it gives the same as text.

    Attributes
    ----------
    model : Architecture
        The model as its code ran: modules, layers and their operators.
    degrees : Degrees
        Parallelism, given or chosen.
    step : EmulatedStep
        The iteration of one replica: schedule, timeline, layout.
    interval : Interval
        80 % interval, relative to the time.
    chosen_of : int
        Number of combinations of degrees of which these are the fastest; 0: they were given.
    """

    model: Architecture
    cluster: ClusterSpec
    trainer: TrainerSpec
    degrees: Degrees
    step: EmulatedStep
    interval: Interval
    chosen_of: int = 0

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration."""
        return self.step.iteration_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """Bounds of the 80 % interval of ``iteration_s``."""
        return self.interval.of(self.step.iteration_s)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of a device of each pipeline rank."""
        return tuple(self.step.peak_bytes.tolist())

    @property
    def fits(self) -> bool:
        """Whether every rank fits into memory."""
        return self.step.fits

    def __str__(self) -> str:
        step, degrees = self.step, self.degrees
        counts = module_parameters(self.model)
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        names = ("tensor", "pipeline", "data", "context", "expert")
        used = {name: getattr(degrees, name) for name in names}
        shown = ", ".join(f"{n} {v}" for n, v in used.items() if v > 1 or n in names[:3])
        chosen = f" (fastest of {self.chosen_of})" if self.chosen_of else ""
        lines = [
            f"{self.model.name}: {sum(counts.values()):,} parameters ({parts})",
            f"on {self.cluster.name}, trainer {self.trainer.name}; {shown}{chosen}",
            f"iteration {step.iteration_s:.4g} s, {INTERVAL} {self.interval.text(step.iteration_s)}",
            f"MFU {step.mfu:.3f}, {step.tokens_per_s:,.0f} tokens/s per device, bubbles {100 * step.bubble:.1f} %, "
            f"memory strategy {step.strategy}",
        ]
        ranks = zip(step.peak_bytes.tolist(), step.static_bytes.tolist(), step.layers, strict=True)
        for rank, (peak, static, layers) in enumerate(ranks):
            spans = ", ".join(f"{name} {a}-{b}" for name, chunks in layers.items() for a, b in chunks)
            lines.append(f"rank {rank}: {size_text(peak)}, of it static {size_text(static)}; layers {spans}")
        if not step.fits:
            usable = f"{size_text(step.capacity_bytes)} of a device are usable"
            lines.append(f"does not fit: {step.host_excess or usable}")
        lines.append(f"Emulated, not measured; {self.interval.note}.")
        return "\n".join(lines)


class GivenDegrees(TypedDict, total=False):
    """Degrees of parallelism, by the names of the command line."""

    tp: int | None
    pp: int | None
    dp: int | None
    cp: int | None
    ep: int
    etp: int
    zero: Literal[0, 1, 3]


def emulate(
    model: nn.Module | Model,
    batch: Any,
    *,
    cluster: str | ClusterSpec = "8xH100",
    freeze: Sequence[str] = (),
    microbatches: int | None = None,
    strategy: ChunkStrategy | str | None = None,
    trainer: str | TrainerSpec = "fused",
    **parallelism: Unpack[GivenDegrees],
) -> Emulation:
    """Emulate an iteration of your own model on your own batch, without a GPU, a profile or memory for its weights.

    The model's code runs on tensors without numbers. The model is not changed, and may itself be on the meta device.

    Parameters
    ----------
    model : torch.nn.Module or pipeloom.Model
        A module with repeated blocks, or a model as for `fit` that has ``describe``.
    batch
        What the module is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments; or a list
        of batches of different sizes. Each is one microbatch. Of a `pipeloom.Model`: a list of samples.
    cluster : str or ClusterSpec
        A description such as ``"64xH100"``, a name of the zoo, or a TOML file.
    freeze : sequence of str
        Modules that are not trained, beside those of which no parameter requires a gradient.
    microbatches : int or None
        Microbatches of one replica; default: 16. If degrees are chosen, those of all replicas together; default: two
        for each device; at least as many as batches. Your batches are repeated in turn.
    strategy : ChunkStrategy, its text, or None
        Memory strategy of every chunk; None: the fastest that fits.
    trainer : str or TrainerSpec
        Framework whose costs are used, with a precision of products if it is not bfloat16: ``"megatron mxfp8"``.
    **parallelism : int
        Degrees of parallelism, by the names below.

    Other Parameters
    ----------------
    tp, pp, dp, cp : int
        Tensor parallelism, pipeline ranks, replicas and context parallelism. If none is given, the fastest combination
        that fits is chosen. Otherwise they default to 1, and ``dp`` to as many as there are devices for.
    ep, etp, zero : int
        Expert parallelism, tensor parallelism of experts, and ZeRO stage (default: 1). They require one of the other
        degrees.

    Raises
    ------
    InputError
        The batch does not suit the model, what its code runs cannot be described, or an argument has no effect. One
        line names the reason.
    InfeasibleError
        No combination of degrees fits into memory.
    """
    hardware = load_cluster(cluster) if isinstance(cluster, str) else cluster
    runs_it = load_trainer(trainer) if isinstance(trainer, str) else trainer
    given = _given(parallelism)
    if microbatches is not None:
        check_count("microbatches", microbatches)
    architecture, batches = _traced(model, batch, freeze)
    trust = interval_for(hardware.device, architecture, runs_it)
    if given.keys().isdisjoint(_CHOSEN):
        points = Points() if strategy is None else Points(strategies=(chunk_strategy(strategy),))
        groups = _microbatches(batches, microbatches, _BATCHES_OF_A_DEVICE * hardware.num_devices)
        entries = sweep(architecture, hardware, batch=groups, points=points, trainer=runs_it)
        best = entries[0]
        if best.result is None:
            raise InfeasibleError(f"{architecture.name}: no combination of degrees runs; {best.problem}")
        number = sum(entry.result is not None for entry in entries)
        return Emulation(architecture, hardware, runs_it, best.degrees, best.result, trust, number)
    one_replica = math.prod(given.get(name, 1) for name in ("tp", "pp", "cp"))
    given.setdefault("dp", max(1, hardware.num_devices // one_replica))
    degrees = Degrees(**{_DEGREES[name]: value for name, value in given.items()})
    groups = _microbatches(batches, microbatches, MICROBATCHES)
    step = emulate_degrees(architecture, hardware, degrees, batch=groups, strategy=strategy, trainer=runs_it)
    return Emulation(architecture, hardware, runs_it, degrees, step, trust)


def _microbatches(batches: Microbatches, count: int | None, default: int) -> Microbatches:
    """Return the user's batches as microbatches, in turn. Every batch is at least one."""
    if count is not None and count < len(batches):
        remedy = f"use at least {len(batches)}, or give fewer batches"
        raise InputError("microbatches", f"{count} cannot hold {len(batches)} batches, one in each", remedy)
    return repeated(batches, count or max(default, len(batches)))


def _given(parallelism: GivenDegrees) -> dict[str, Any]:
    """Return the degrees that are given, checked."""
    given: dict[str, Any] = {name: value for name, value in parallelism.items() if value is not None}
    for name, value in given.items():
        if name not in _DEGREES:
            raise InputError(name, "is no argument of emulate", f"degrees are {', '.join(_DEGREES)}")
        if name != "zero":
            check_count(name, value)
        elif value not in (0, 1, 3):
            raise InputError("zero", f"{value!r} is no stage of ZeRO", "use 0, 1 or 3")
        if name not in _CHOSEN and value != 1 and given.keys().isdisjoint(_CHOSEN):
            raise InputError(name, "counts only with degrees", f"give {', '.join(_CHOSEN[:-1])} or {_CHOSEN[-1]}")
    return given


def _traced(model: Any, batch: Any, freeze: Sequence[str]) -> tuple[Architecture, Microbatches]:
    """Return a model as its code ran, and the sizes of its batches."""
    from pipeloom.integrations.models import frozen_modules
    from pipeloom.integrations.tracing.described import trace_described
    from pipeloom.integrations.tracing.own import trace_own
    from pipeloom.runtime import Model

    if batch is None:
        raise InputError("batch", "is None", "give what you pass to the model")
    found = trace_described(model, batch) if isinstance(model, Model) else trace_own(model, batch)
    return frozen_modules(found.architecture, freeze), found.batches
