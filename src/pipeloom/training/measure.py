"""Costs of the layers of a training run: measured on its first batches, or known from before an interruption."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch

from pipeloom.cost import Profile
from pipeloom.errors import InputError, PipeloomError
from pipeloom.packing import PackingSpec, budget_tokens
from pipeloom.packing.pack import MICROBATCHES_PER_RANK
from pipeloom.planner import PlanningProblem
from pipeloom.runtime import Batches, Model, ProfileOptions, find_shapes, profile_model, user_code
from pipeloom.runtime.data.batches import bound
from pipeloom.runtime.data.dataset import CorruptSampleError
from pipeloom.runtime.data.prefetch import Describe, batch_of, close_reading, example_samples, idle_modules
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.launch.device import DeviceType
from pipeloom.runtime.train.evaluate import preserve_random_state, seed_generators
from pipeloom.spec import Batch
from pipeloom.training.config import RunConfig
from pipeloom.training.job import AUTOCAST, Job

_LOG = logging.getLogger(__name__)
_PROFILED_BATCHES, _MOST_PROFILED_BATCHES = 4, 64


@dataclass(frozen=True)
class FirstBatches:
    """The first few batches of a job, read once and only if needed."""

    job: Job
    model: Model

    @cached_property
    def _read(self) -> tuple[list[list[Any]], list[Batch]]:
        task, config = self.job.task, self.job.config
        with _seeded(self.job):
            batches, _ = task.batches_from(0, config.iterations, **config.data)
            return typical_batches(self.model, task.describe, batches)

    @property
    def samples(self) -> list[list[Any]]:
        """The user's samples, batch by batch."""
        return self._read[0]

    @property
    def metadata(self) -> list[Batch]:
        """The metadata of each batch, as the planner receives it."""
        return self._read[1]

    @cached_property
    def packing(self) -> PackingSpec:
        """The configured packing, or one with about two microbatches per rank, for samples up to twice as long.

        Raise `InputError` if none is configured and there are no batches.
        """
        config = self.job.config
        if config.packing is not None:
            return config.packing
        if not self.metadata:
            raise InputError("batches", "has none", "give at least one batch")
        tokens = [budget_tokens(batch, self.model.spec) for batch in self.metadata]
        longest = max(int(each.max()) for each in tokens)
        mean = sum(int(each.sum()) for each in tokens) / len(tokens)
        return PackingSpec(max(2 * longest, round(mean / (MICROBATCHES_PER_RANK * config.layout.ranks)), 1))

    @cached_property
    def idle(self) -> list[str]:
        """Modules without work in any of these batches."""
        return idle_modules(self.model, self.metadata)

    @cached_property
    def shaped(self) -> Model:
        """The model with all shapes; undeclared shapes are found by running these batches."""
        if not self.model.undeclared:
            return self.model
        samples = [sample for batch in self.samples for sample in batch]
        sizes = [sample for batch in self.metadata for sample in batch.samples]
        for name in self.idle:
            more = example_samples(self.model, name)
            if more is not None:
                samples, sizes = [*samples, *more[0]], [*sizes, *more[1].samples]
        return find_shapes(self.model, samples, sizes, autocast=AUTOCAST[self.job.config.runtime.autocast])


@contextmanager
def _seeded(job: Job) -> Iterator[None]:
    """Seed the random generators as ranks do before they read the batches, and restore them afterwards."""
    with preserve_random_state(torch.device("cpu")):
        seed_generators(job.config.seed)
        yield


def typical_batches(
    model: Model, describe: Describe | None, source_batches: Iterable[Any]
) -> tuple[list[list[Any]], list[Batch]]:
    """Return the first few batches with their metadata, and later ones with work for modules that had none."""
    batches: list[list[Any]] = []
    described: list[Batch] = []
    idle = [module.name for module in model.spec.modules]
    with user_code("batches"):
        source = iter(bound(source_batches, model))
        for number, samples in enumerate(itertools.islice(source, _MOST_PROFILED_BATCHES)):
            batch = batch_of(samples, describe or model.describe, number)
            still_idle = [name for name in idle if name in idle_modules(model, [batch])]
            if number < _PROFILED_BATCHES or still_idle != idle:
                batches.append(list(samples))
                described.append(batch)
            idle = still_idle
            if number + 1 >= _PROFILED_BATCHES and not idle:
                break
        close_reading(source)
    return batches, described


def show_first_sample(job: Job) -> None:
    """Check a sample of the first batch against its source, and print and log it with its targets marked.

    Raise `InputError` if the sample differs from its source.
    """
    with _seeded(job):
        batches, _ = job.task.batches_from(0, job.config.iterations, **job.config.data)
    if not isinstance(batches, Batches):
        return
    for _, index in batches.members(batches.first):
        try:
            with user_code(f"dataset.preview({index})"):
                text = batches.dataset.preview(index)
        except CorruptSampleError:
            # Reading the batch reports it.
            continue
        if text:
            shown = f"First sample, with its targets between >>> and <<<: {text}"
            job.display.say(shown)
            _LOG.info(shown)
        return


def measured_profile(job: Job, first: FirstBatches, device: DeviceType) -> Profile:
    """Time every kind of layer on the first batches."""
    config, model = job.config, first.shaped
    # Read the user's data first, so that their errors are reported before anything else.
    samples, metadata = first.samples, first.metadata
    job.display.say(f"Measuring the layers of {model.name} on this machine ...")
    if first.idle:
        job.display.say(f"The first batches have no data for {', '.join(first.idle)}: measured on synthetic samples.")
    profile = profile_model(
        model,
        samples,
        describe=job.task.describe,
        packing=first.packing,
        placements=config.layout.modules,
        metadata=metadata,
        options=ProfileOptions(
            all_sizes=config.plans_packing or config.layout.kind in ("chosen", "arranged"),
            strategies=_needs_strategies(job),
            device=device,
            autocast=AUTOCAST[config.runtime.autocast],
        ),
    )
    # This process may live as long as the ranks, one of which has this device.
    accelerator.free_cached(device)
    job.display.say(f"{len(profile.layers)} kinds of layers; mean error of the fit {profile.mean_error:.1%}.")
    return profile


def known_profile(job: Job, model: Model) -> Profile | None:
    """Return the job's profile, or that of the run that is resumed; None if there is none, or it lacks strategies."""
    if job.profile is not None:
        return job.profile
    problem = _known_problem(job)
    if problem is None:
        return None
    profile = problem.profile_costs.profile
    lacks = any(fit.strategies is None for fit in profile.layers.values())
    return profile if problem.model == model.spec and not (lacks and _needs_strategies(job)) else None


def known_links(job: Job) -> RunConfig:
    """Return the config with the links of the resumed run if its ranks are on the same hosts.

    This gives the run the same layout.
    """
    problem, config = _known_problem(job), job.config
    if problem is None or not config.cluster.hosts or problem.profile_costs.rank.hosts != config.cluster.hosts:
        return config
    cluster = msgspec.structs.replace(config.cluster, links=problem.profile_costs.rank.links)
    return msgspec.structs.replace(config, cluster=cluster)


def _known_problem(job: Job) -> PlanningProblem | None:
    """Return the problem of the run that is resumed; None if there is none, or it is for another kind of device."""
    try:
        problem = job.read_problem()
    except PipeloomError:
        return None
    on_accelerator = problem.profile_costs.profile.copies_overlap
    return problem if on_accelerator == accelerator.on_accelerator(job.device) else None


def _needs_strategies(job: Job) -> bool:
    """Return whether to measure the memory strategies: they can be chosen, or memory is limited."""
    return job.config.planner.offers_a_choice or job.config.cluster.memory_capacity_bytes is not None
