"""The layout of a training run: read from a file, made by a rule, or chosen from measurements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pipeloom.cost import Profile, ProfileCosts, sharded_copies, usual_copies
from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InputError, located
from pipeloom.io import read_layout, read_rule
from pipeloom.layout import encoder_first, layout_for, separate
from pipeloom.layout.choose import LayoutEvaluation
from pipeloom.layout.training import Preview, arrange_training_layout, choose_training_layout, training_layers
from pipeloom.runtime import Model
from pipeloom.runtime.train.divide import layers_with_tied
from pipeloom.search import OrderRule
from pipeloom.spec import DTYPE_BYTES, Layout, Parallelism, Strategy
from pipeloom.training.config import RunConfig
from pipeloom.training.job import AUTOCAST, Job
from pipeloom.training.measure import FirstBatches


class LayoutChoice(NamedTuple):
    """A layout, the order rule that was found with it, and the costs of layers that `pipeloom arrange` can read."""

    layout: Layout
    rule: OrderRule | None = None
    layers: LayerTable | None = None


_SHOWN_LAYOUTS = 5


def given_layout(job: Job, model: Model) -> LayoutChoice | None:
    """Return the job's layout, or read the one that its config names; None if there is none.

    Raise `InputError` if it cannot be read, or is for another model or other numbers of ranks and replicas.
    """
    config = job.config
    rule = None
    if job.layout is not None:
        path, layout = "layout", job.layout
    elif config.layout.kind == "file":
        path = str(job.file.parent / config.layout.path)
        layout = read_layout(path)
        rule = read_rule(path, layout)
    else:
        return None
    if layout.num_ranks != config.layout.ranks:
        raise InputError(
            f"{path}: num_ranks", f"is {layout.num_ranks}, but layout.ranks in {job.file} is {config.layout.ranks}"
        )
    if layout.parallelism not in (Parallelism(), config.parallel.degrees):
        degrees = layout.parallelism
        raise InputError(
            f"{path}: parallelism",
            f"tensor {degrees.tensor} and data {degrees.data}, "
            f"but the run has {config.parallel.tp} and {config.parallel.dp}",
        )
    with located(str(path)):
        return LayoutChoice(layout_for(layout, model.spec), rule)


def held_copies(job: Job, model: Model) -> dict[str, float]:
    """Return the number of copies of a layer's weights that a process holds, where it differs from the usual number.

    Copies are counted in the dtype of the layer's output. Replicas may hold shards, and an average of the weights is
    held beside them. Under autocast, weights are wider than outputs, and their casts live for an iteration.
    """
    parallel, autocast = job.config.parallel, AUTOCAST[job.config.runtime.autocast]
    whole = {(name, model.module(name).spec.flat_layers[number].kind) for name, number in layers_with_tied(model)}
    found: dict[str, float] = {}
    for module in model.modules:
        usual = usual_copies(module.frozen)
        for layer, spec in zip(module.layers, module.spec.flat_layers, strict=True):
            declared_bytes = spec.num_parameters * DTYPE_BYTES[spec.output.dtype]
            sharded = parallel.shard is not None and (module.name, spec.kind) not in whole
            copies = sharded_copies(parallel.dp, module.frozen) if sharded else usual
            if job.config.ema is not None and not module.frozen:
                # The average has at least single precision. Under autocast weights have it too, and are the unit.
                wide = 1.0 if autocast is not None else max(1.0, 4 / DTYPE_BYTES[spec.output.dtype])
                copies += wide / (parallel.dp if sharded else 1)
            if autocast is not None and declared_bytes:
                weights = list(layer.parameters())
                # Only casts of trained parameters are kept.
                casts = 0 if module.frozen else sum(p.numel() for p in weights if p.dtype == torch.float32)
                copies = (copies * sum(p.nbytes for p in weights) + casts * autocast.itemsize) / declared_bytes
            if copies != usual:
                key = f"{module.name}/{spec.kind}"
                found[key] = max(copies, found.get(key, 0.0))
    return found


def lay_out(job: Job, model: Model, profile: Profile, first: FirstBatches) -> LayoutChoice:
    """Make the layout that the run's config describes, from measured costs."""
    config = job.config.layout
    if config.kind in ("chosen", "arranged"):
        return _search_layout(job, model, profile, first)
    if config.kind == "encoder_first":
        return LayoutChoice(encoder_first(model.spec, config.ranks, profile.load, placements=config.modules))
    return LayoutChoice(separate(model.spec, config.ranks, config.modules, profile.load))


def offered(config: RunConfig, model: Model) -> tuple[Strategy, ...]:
    """Return the run's memory strategies under which the model's layers run; raise `InputError` if there is none."""
    found = tuple(each for each in config.planner.strategies if each not in model.excluded)
    if not found:
        name, problem = next(iter(model.excluded.items()))
        raise InputError("planner.strategies", f"{model.name} fails under {name!r}: {problem}", "add 'keep'")
    return found


def preview(job: Job, model: Model, profile: Profile, first: FirstBatches) -> Preview:
    """Return a preview of the run from its first batches, with all choices that its planner will have."""
    config = job.config
    return Preview(
        ProfileCosts(
            model.spec,
            profile,
            job.cluster,
            offered(config, model),
            split_backward=config.planner.split_backward,
            held_copies=held_copies(job, model),
        ),
        first.packing,
        first.metadata,
        config.layout.ranks,
        num_replicas=config.parallel.dp,
        capacity_bytes=job.cluster.memory_capacity_bytes,
        iterations=config.iterations,
        num_tensor=config.parallel.tp,
        dealable=tuple(name for name in dealable(model) if name not in config.layout.modules),
    )


def dealable(model: Model) -> tuple[str, ...]:
    """Return the modules for which a layout may use encoder data parallelism over tensor ranks.

    These are modules that all tensor ranks would otherwise run alike. Layers that ``parallelize`` divides were
    measured whole, so their divided cost is unknown. Layers that emit a loss are only found when they run; then the
    user must exclude the module.
    """
    tied = {name for name, _ in layers_with_tied(model)}
    return tuple(
        module.name
        for module in model.modules[:-1]
        if module.parallelize is None
        and module.name not in tied
        and not (module.emits or module.takes)
        and all(layer.output.is_rows for layer in module.spec.layers)
    )


def _search_layout(job: Job, model: Model, profile: Profile, first: FirstBatches) -> LayoutChoice:
    """Plan the first batches under many layouts, and return the fastest."""
    coming = preview(job, model, profile, first)
    co_optimizes = job.config.layout.kind == "arranged"
    layers = training_layers(coming) if co_optimizes and len(model.spec.modules) == 1 else None
    title = "Choosing partition and placement" if co_optimizes else "Choosing a layout"
    search = arrange_training_layout if co_optimizes else choose_training_layout
    job.display.say(f"{title} ...")
    begin = time.monotonic()
    with job.display.working(title) as tell:
        trials = search(coming, seed=job.config.seed, tell=tell)
    _show(job, trials)
    job.display.say(f"Chose the fastest of {len(trials)} layouts after {time.monotonic() - begin:.1f} s.")
    return LayoutChoice(trials[0].layout, trials[0].rule, layers)


def _show(job: Job, trials: Sequence[LayoutEvaluation]) -> None:
    for trial in [t for t in trials if not t.problem][:_SHOWN_LAYOUTS]:
        at_least = "at least " if trial.ruled_out else ""
        job.display.say(f"  {at_least}{trial.seconds * 1e3:.1f} ms planned: {trial.name}")
