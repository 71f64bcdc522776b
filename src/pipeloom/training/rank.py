"""One rank of a training run: builds its model and trains; rank 0 records, and reports at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec
import torch

from pipeloom.packing import cost_loads
from pipeloom.planner import Planner, Setup
from pipeloom.runtime import Model, TcpPlanStore, Trainer, TrainerOptions, group_device, with_shapes
from pipeloom.training.config import OptimizerConfig
from pipeloom.training.finish import finish
from pipeloom.training.job import AUTOCAST, Job
from pipeloom.training.record import Recorder, RunFacts, Summary


def train_rank(job: Job, go_on: bool) -> Summary | None:
    """Train as one rank of the default process group.

    Parameters
    ----------
    job : Job
        Prepared: its setup is in its folder.
    go_on : bool
        Go on from the newest checkpoint.

    Returns
    -------
    Summary or None
        On rank 0 what the run came to.
    """
    setup = job.read_setup()
    model = with_shapes(job.build_model(), setup.model)
    trainer = _trainer(job, setup, model)
    first = trainer.resume() if go_on else 0
    given, count = job.task.batches_from(first, job.config.iterations, **job.config.data)
    batches = trainer.skip_trained(given, count)
    if trainer.rank != 0:
        for _ in trainer.run(batches, first):
            pass
        trainer.gather_model()
        return None
    recorder = Recorder(job.folder, first)
    if first:
        job.display.say(f"Going on from the checkpoint after {first} iterations.")
    begin = time.monotonic()
    with job.display.iterations(job.config.iterations, first) as show:
        for report in trainer.run(batches, first):
            show(report)
            recorder.add(report)
    elapsed_s = time.monotonic() - begin
    trainer.gather_model()
    # Everything is on disk before the user's evaluation, in which anything may happen.
    summary = finish(recorder, setup, _facts(job, setup, model), elapsed_s)
    scores = job.task.scores(model)
    if scores:
        summary = recorder.write(msgspec.structs.replace(summary, evaluation=scores))
    job.display.close(summary)
    return summary


def _trainer(job: Job, setup: Setup, model: Model) -> Trainer:
    config, costs = job.config, setup.costs
    optimizer = config.optimizer
    return Trainer(
        model,
        setup.layout,
        Planner(setup, TcpPlanStore.host, deadline_s=config.planner.deadline_s),
        describe=job.task.describe,
        optimizer=job.task.optimizer or _adamw(optimizer, config.parallel.divides_nothing),
        options=TrainerOptions(
            learning_rate=None if job.task.optimizer else learning_rates(optimizer, config.iterations),
            clip_norm=optimizer.clip_norm,
            checkpoints=job.checkpoints,
            timeout_s=config.timeout_s,
            loads=lambda batch: cost_loads(batch, setup.model, setup.layout, costs),
            device=group_device(),
            autocast=AUTOCAST[config.runtime.autocast],
            random_seed=config.seed,
            shard=config.parallel.shard,
        ),
    )


def _adamw(config: OptimizerConfig, divides_nothing: bool) -> Callable[[list[torch.nn.Parameter]], torch.optim.AdamW]:
    return lambda parameters: torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=config.betas,
        # Divided and whole parameters do not go through one call together.
        foreach=None if divides_nothing else False,
    )


def learning_rates(config: OptimizerConfig, iterations: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine to zero."""

    def rate(iteration: int) -> float:
        if iteration < config.warmup_iterations:
            return config.learning_rate * (iteration + 1) / config.warmup_iterations
        done = (iteration - config.warmup_iterations) / max(1, iterations - config.warmup_iterations)
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    return rate


def _facts(job: Job, setup: Setup, model: Model) -> RunFacts:
    num_parameters = sum(p.numel() for module in model.modules for x in module.layers for p in x.parameters())
    return RunFacts(job.config.name, setup.layout.num_ranks, num_parameters, job.config.seed, setup.layout.digest)
