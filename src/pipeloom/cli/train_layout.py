"""Where the model lies in `pipeloom train`: read from a file, made by rule, or chosen for what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.errors import InputError
from pipeloom.io import read_layout, write_layers
from pipeloom.spec import Layout, Parallelism

if TYPE_CHECKING:
    from pipeloom.cli.train import FirstBatches, Run
    from pipeloom.cost import Profile
    from pipeloom.cost.layers import LayerTable
    from pipeloom.runtime import Model

_PLANNED_BATCHES = 2
"""Batches under which layouts are compared."""
_SHOWN_LAYOUTS = 5


def given_layout(run: Run, model: Model) -> Layout | None:
    """Read the layout that the run's file names; None where it names none.

    Raises
    ------
    InputError
        It cannot be read, is of another model, or for other ranks and replicas.
    """
    from pipeloom.arrange import layout_for

    settings = run.settings
    if settings.layout.kind != "file":
        return None
    path = run.config.parent / settings.layout.path
    layout = read_layout(path)
    if layout.num_ranks != settings.layout.ranks:
        raise InputError(
            f"{path}: num_ranks",
            f"{layout.num_ranks}, layout.ranks in {run.config} is {settings.layout.ranks}",
        )
    if layout.parallelism not in (Parallelism(), settings.parallel.degrees):
        degrees = layout.parallelism
        raise InputError(
            f"{path}: parallelism", f"has tensor {degrees.tensor} and data {degrees.data}, "
            f"the run has {settings.parallel.tp} and {settings.parallel.dp}",
        )  # fmt: skip
    try:
        return layout_for(layout, model.spec)
    except InputError as error:
        raise InputError(f"{path}: {error.entity}", error.problem, error.remedy) from error


def held_copies(run: Run, model: Model) -> dict[str, float]:
    """How many times its weights a process holds of every kind of layer that replicas hold in shards."""
    from pipeloom.cost import sharded_copies
    from pipeloom.runtime.divide import layers_with_tied

    parallel = run.settings.parallel
    if parallel.shard is None:
        return {}
    whole = {
        (name, model.module(name).spec.flat_layers[number].kind) for name, number in layers_with_tied(model)
    }
    kinds = {(module.name, layer.kind) for module in model.spec.modules for layer in module.layers}
    return dict.fromkeys(
        (f"{name}/{kind}" for name, kind in sorted(kinds - whole)), sharded_copies(parallel.dp)
    )


def lay_out(run: Run, model: Model, profile: Profile, first: FirstBatches) -> Layout:
    """Lay a model out as the run's file asks, by what was measured."""
    from pipeloom.arrange import encoder_first, separate

    settings = run.settings.layout
    if settings.kind == "chosen":
        return _chosen_layout(run, model, profile, first)
    if settings.kind == "arranged":
        return _arranged_layout(run, model, profile, first)
    if settings.kind == "encoder_first":
        return encoder_first(model.spec, settings.ranks, profile.load, placements=settings.modules)
    return separate(model.spec, settings.ranks, settings.modules, profile.load)


def measured_layers(run: Run, model: Model, profile: Profile, first: FirstBatches) -> LayerTable:
    """Write a profile as a layer table, on microbatches such as the first batches give."""
    from pipeloom.cost import ProfileCosts
    from pipeloom.planner.training_layout import training_layers

    settings = run.settings
    return training_layers(
        ProfileCosts(model.spec, profile, settings.cluster, held_copies=held_copies(run, model)),
        settings.packing, first()[1], settings.layout.ranks,
        num_replicas=settings.parallel.dp, capacity_bytes=settings.cluster.memory_capacity_bytes,
    )  # fmt: skip


def _arranged_layout(run: Run, model: Model, profile: Profile, first: FirstBatches) -> Layout:
    """Choose partition and placement together, and leave the layers that this was chosen for."""
    from pipeloom.planner.training_layout import arrange_training_layout

    table = measured_layers(run, model, profile, first)
    write_layers(run.folder / "layers.json", table)
    run.console.print("Arranging the layers ...")
    layout, found = arrange_training_layout(table, model.spec, seed=run.settings.seed)
    run.console.print(
        f"  {found.timeline.makespan_ns / 1e6:.1f} ms planned in {found.arrangement.num_chunks} chunks, at most "
        f"{max(found.gap, 0.0):.1%} above the best possible",
        highlight=False,
    )  # fmt: skip
    return layout


def _chosen_layout(run: Run, model: Model, profile: Profile, first: FirstBatches) -> Layout:
    """Plan the first batches under many layouts, and take the fastest."""
    from pipeloom.cost import ProfileCosts
    from pipeloom.planner.training_layout import choose_training_layout

    settings = run.settings
    _, metadata = first()
    run.console.print("Choosing a layout ...")
    trials = choose_training_layout(
        ProfileCosts(
            model.spec, profile, settings.cluster, settings.planner.strategies,
            split_backward=settings.planner.split_backward, held_copies=held_copies(run, model),
        ),
        settings.packing, metadata[:_PLANNED_BATCHES], settings.layout.ranks,
        capacity_bytes=settings.cluster.memory_capacity_bytes, seed=settings.seed,
    )  # fmt: skip
    for trial in [t for t in trials if not t.problem][:_SHOWN_LAYOUTS]:
        at_least = "at least " if trial.ruled_out else ""
        run.console.print(f"  {at_least}{trial.seconds * 1e3:.1f} ms planned: {trial.name}", highlight=False)
    run.console.print(f"The first of {len(trials)} layouts is taken.")
    return trials[0].layout
