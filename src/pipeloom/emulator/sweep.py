"""Emulate a model on a cluster by name, and sweep the grid of parallelism degrees (DIP Fig. 13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from pipeloom.emulator.build import Placement
from pipeloom.emulator.pipeline import PipelineModel, Work, work_of
from pipeloom.emulator.result import EmulatedStep
from pipeloom.emulator.sizes import image_sizes
from pipeloom.emulator.step import Step
from pipeloom.errors import InfeasibleError, InputError, check_count
from pipeloom.spec import ChunkStrategy, Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_architecture, load_cluster
from pipeloom.spec.datasets import clips_of_iterations, draw_samples, load_mixture, pack_documents
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.media_tokens import fitted_images
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.trainer import FUSED, TrainerSpec

GIB = 2**30
_RETRY_FACTOR = 1.2
"""Points within this factor of the best are also tried with larger sub-microbatches."""
DEFAULT_STRATEGIES = (
    ChunkStrategy("keep"),
    ChunkStrategy("selective"),
    *(ChunkStrategy("recompute", quarters / 4) for quarters in (1, 2, 3, 4)),
)


def default_data(architecture: Architecture) -> str:
    """Return the data set of the zoo for a model: the papers' mixture for what it reads."""
    reads = {module.reads for module in architecture.modules}
    return "dip-t2v" if "videos" in reads else "dip-vlm"


def drawn_samples(architecture: Architecture, data: str, count: int, seed: int) -> list[Sample]:
    """Draw samples of a data set as a model reads them, in random order.

    Models without images read only the texts, so there may be fewer than ``count``. Images of the zoo's data sets have
    as many tokens as the model makes of their patches. A data set in a file is used unchanged.
    """
    samples = draw_samples(data, count, seed)
    reads = {module.reads for module in architecture.modules}
    if "videos" in reads:
        return samples
    if "images" not in reads:
        return [Sample(s.id, s.text_tokens) for s in samples if s.text_tokens]
    return samples if data.endswith(".toml") else fitted_images(architecture, samples)


def draw_microbatches(architecture: Architecture, data: str, count: int, seed: int) -> list[list[Sample]]:
    """Draw ``count`` microbatches of samples, prepared as in the papers for what the model reads.

    Models without images read only the texts, packed the same way.
    """
    reads = {module.reads for module in architecture.modules}
    mixture, parts = load_mixture(data)
    videos = "videos" in reads
    if videos and not all(dataset.frames for dataset, _ in parts):
        raise InputError(
            f"data {data!r}", f"has samples without videos, which {architecture.name} reads", "use dip-t2v"
        )
    factor = 2 if videos else 24
    while True:
        samples = drawn_samples(architecture, data, count * factor, seed)
        if videos:
            groups = next(iter(clips_of_iterations(samples, count)), [])
        else:
            groups = pack_documents(samples, mixture.context_tokens, mixture.max_images)[:-1]
        if len(groups) >= count:
            return groups[:count]
        factor *= 2


Microbatches = Sequence[Sequence[Sample]]
"""Samples of every microbatch of an iteration."""


@dataclass(frozen=True)
class Draw:
    """Microbatches to draw from a data set of the zoo with a seed. No ``data``: the model's default."""

    num_microbatches: int
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_microbatches", self.num_microbatches)

    def of(self, architecture: Architecture) -> Microbatches:
        """Draw the microbatches for a model."""
        return draw_microbatches(
            architecture, self.data or default_data(architecture), self.num_microbatches, self.seed
        )


@dataclass(frozen=True)
class PipelineShape:
    """Chunks per rank by module, and microbatches in flight; None: as many as help and fit."""

    segments: Mapping[str, int] | None = None
    in_flight: int | None = None


@dataclass(frozen=True)
class Points:
    """Points of a sweep: degrees that use all devices, each with the fastest of several strategies that fits."""

    num_devices: int | None = None
    """Number of devices; None: all of the cluster."""
    max_tensor: int = 8
    strategies: Sequence[ChunkStrategy | str] = DEFAULT_STRATEGIES


def emulate(
    model: str | Architecture,
    cluster: str | ClusterSpec,
    degrees: Degrees,
    *,
    batch: Draw | Microbatches = Draw(16),
    strategy: ChunkStrategy | str | None = None,
    sub_microbatch: Mapping[str, int] | None = None,
    shape: PipelineShape = PipelineShape(),
    trainer: TrainerSpec = FUSED,
) -> EmulatedStep:
    """Emulate one iteration of one pipeline replica.

    Parameters
    ----------
    model, cluster : zoo name, path of a TOML file, or the spec itself
    batch : samples per microbatch, or how to draw them
    strategy : ChunkStrategy, its text, or None
        Strategy of every chunk; None: the fastest that fits.
    sub_microbatch : instances per sub-microbatch by module; default: images by DIP's rule (`image_sizes`)
    shape : chunks per rank by module, and microbatches in flight
    trainer : framework that runs the model

    Raises
    ------
    InputError
        If the degrees do not fit the model or the cluster.
    InfeasibleError
        If ``strategy`` is None and no strategy fits in memory.
    """
    architecture = load_architecture(model) if isinstance(model, str) else model
    hardware = load_cluster(cluster) if isinstance(cluster, str) else cluster
    microbatches = batch.of(architecture) if isinstance(batch, Draw) else batch
    placement = Placement(hardware, degrees, trainer)
    if sub_microbatch is None:
        sub_microbatch = image_sizes(architecture, placement, microbatches)
    works = [work_of(architecture, samples, sub_microbatch) for samples in microbatches]
    pipeline = PipelineModel(architecture, placement, _typical(works), shape.segments)
    if strategy is None:
        return fastest_step(pipeline, works, DEFAULT_STRATEGIES)
    return Step(pipeline, works, strategy, shape.in_flight).run()


def fastest_step(
    model: PipelineModel,
    microbatches: Sequence[Work],
    strategies: Sequence[ChunkStrategy | str] = ("keep", "selective", "recompute:0.5", "recompute"),
) -> EmulatedStep:
    """Emulate the fastest of several strategies that fits in memory.

    Parameters
    ----------
    strategies : sequence of ChunkStrategy or their texts
        From the fastest to the one with the least memory.

    Raises
    ------
    InfeasibleError
        If none fits. The message has the lowest peak and the limit.
    """
    best: Step | None = None
    smallest: Step | None = None
    step: Step | None = None
    for strategy in strategies:
        step = Step(model, microbatches, strategy, like=step)
        if step.plan.fits:
            if best is None or step.plan.duration_ps < best.plan.duration_ps:
                best = step
            if step.plan.unconstrained:
                break  # memory is no constraint, so more recomputation only takes time
        elif best is None:
            smallest = step
    if best is None:
        assert smallest is not None
        peak, limit = max(smallest.run().peak_bytes), smallest.capacity
        raise InfeasibleError(
            f"needs {peak / GIB:.1f} GiB on a device at best, {limit / GIB:.1f} GiB are usable; "
            "raise tensor or pipeline parallelism"
        )
    return best.run()


def _typical(works: Sequence[Work]) -> Work:
    """Return the microbatch of median size, by which layers are divided over the ranks."""
    return sorted(works, key=lambda work: sum(w.num_tokens for parts in work.values() for w in parts))[len(works) // 2]


@dataclass(frozen=True)
class SweepEntry:
    """One point of a sweep: the degrees, and their result or the reason why there is none."""

    degrees: Degrees
    result: EmulatedStep | None
    problem: str = ""

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration of the whole global batch; infinite if it cannot run."""
        return self.result.iteration_s if self.result is not None else float("inf")


def grid(num_devices: int, max_tensor: int, **fixed: int) -> list[Degrees]:
    """Return all degrees (tensor, pipeline, data) that are powers of two and use all devices."""
    powers = [1 << k for k in range(num_devices.bit_length()) if 1 << k <= num_devices]
    return [
        Degrees(tensor=t, pipeline=p, data=num_devices // (t * p), **fixed)  # type: ignore[arg-type]
        for t, p in itertools.product(powers, powers)
        if t <= max_tensor and num_devices % (t * p) == 0
    ]


def sweep(
    model: str | Architecture,
    cluster: str | ClusterSpec,
    *,
    batch: Draw | Microbatches = Draw(128),
    points: Points = Points(),
    sub_microbatch: Mapping[str, int] | None = None,
    progress: Callable[[SweepEntry], None] | None = None,
    trainer: TrainerSpec = FUSED,
) -> list[SweepEntry]:
    """Emulate every combination of degrees on the same global batch. Return the results, fastest first.

    The global batch is divided among the data-parallel replicas. The replica with the most work is emulated, because
    all wait for it to reduce gradients. Without ``sub_microbatch``, DIP's rule groups images (`image_sizes`). Points
    near the best also try twice as many, because the rule considers layers, not pipelines.
    """
    architecture = load_architecture(model) if isinstance(model, str) else model
    hardware = load_cluster(cluster) if isinstance(cluster, str) else cluster
    devices = hardware.num_devices if points.num_devices is None else points.num_devices
    if not 1 <= devices <= hardware.num_devices:
        raise InputError("num_devices", f"{devices} is not within 1..{hardware.num_devices}")
    drawn = batch.of(architecture) if isinstance(batch, Draw) else batch

    @cache
    def sizes(tensor: int) -> Mapping[str, int]:
        # Efficient sizes depend only on tensor parallelism.
        return image_sizes(architecture, Placement(hardware, Degrees(tensor=tensor), trainer), drawn)

    @cache
    def works(tensor: int, times: int) -> list[Work]:
        parts = sub_microbatch
        if parts is None:
            parts = {name: times * size for name, size in sizes(tensor).items()}
        return [work_of(architecture, samples, parts) for samples in drawn]

    entries = []
    for degrees in grid(devices, min(points.max_tensor, hardware.devices_per_node)):
        parts = partial(works, degrees.tensor, 1)
        entry = _entry(architecture, Placement(hardware, degrees, trainer), parts, points.strategies)
        entries.append(entry)
        if progress is not None:
            progress(entry)
    if sub_microbatch is None and any(module.reads == "images" for module in architecture.modules):
        threshold = _RETRY_FACTOR * min(entry.iteration_s for entry in entries)
        for i, entry in enumerate(entries):
            if entry.result is not None and entry.iteration_s <= threshold:
                parts = partial(works, entry.degrees.tensor, 2)
                placement = Placement(hardware, entry.degrees, trainer)
                larger = _entry(architecture, placement, parts, (entry.result.strategy,))
                entries[i] = min(entry, larger, key=lambda e: e.iteration_s)
    return sorted(entries, key=lambda e: e.iteration_s)


def _entry(
    architecture: Architecture,
    placement: Placement,
    find_works: Callable[[], Sequence[Work]],
    strategies: Sequence[ChunkStrategy | str],
) -> SweepEntry:
    degrees = placement.degrees
    try:
        works = find_works()
        if degrees.data > len(works):
            return SweepEntry(degrees, None, f"{len(works)} microbatches for {degrees.data} replicas")
        replicas = [works[r :: degrees.data] for r in range(degrees.data)]
        largest = max(replicas, key=lambda r: sum(w.num_tokens for work in r for parts in work.values() for w in parts))
        pipeline = PipelineModel(architecture, placement, _typical(works))
        return SweepEntry(degrees, fastest_step(pipeline, largest, strategies))
    except (InputError, InfeasibleError) as error:
        return SweepEntry(degrees, None, str(error))
