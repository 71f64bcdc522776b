"""One rank of a training run: builds its model and trains. Rank 0 also records and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.heartbeat import doing
from pipeloom.packing import cost_loads
from pipeloom.planner import Planner, PlanningProblem
from pipeloom.planner.forwards import forward_problem, plan_forwards
from pipeloom.runtime import (
    ExecutionOptions,
    Mesh,
    Model,
    Saving,
    StepReport,
    TcpPlanStore,
    Trainer,
    group_device,
    with_shapes,
)
from pipeloom.runtime.data.prefetch import close_reading
from pipeloom.runtime.launch.coordination import LongBarrier, broadcast_bytes, broadcast_int, long_group, together
from pipeloom.runtime.model.flops import known_peak
from pipeloom.runtime.model.model import torch_dtype
from pipeloom.runtime.train.evaluate import EvaluationResult, SeparateRandomness, preserve_random_state, seed_generators
from pipeloom.training.callbacks import Callbacks, TensorBoardLog
from pipeloom.training.config import UNTIL_THE_END
from pipeloom.training.display import display_heartbeat
from pipeloom.training.finish import finish
from pipeloom.training.job import AUTOCAST, Job
from pipeloom.training.optimizers import ConfiguredOptimizer, checked_scheduler, configured_scheduler
from pipeloom.training.record import EVALUATIONS, HISTORY, LAYOUTS, TENSORBOARD, Recorder, RunFacts, Summary
from pipeloom.training.relayout import Relayout
from pipeloom.training.waiting import run_waiting, take_part


def train_rank(
    job: Job, go_on: bool, displays: Callable[[str], None] | None = None, begins: Callable[[str], None] | None = None
) -> Summary | None:
    """Train as one rank of the default process group; return the summary of the run on rank 0, None on other ranks.

    The planning problem of a prepared ``job`` is in its folder. ``go_on`` tells whether to continue from the newest
    checkpoint. ``displays`` is called on rank 0 with the name of the work when it begins to display the run, and
    ``begins`` with `Trainer.run_id` before the first checkpoint is saved.
    """
    relayout = Relayout(job, job.shared_problem())
    catch_up = _catching_up(job)
    # Filled on rank 0 once the first iteration is known.
    handlers: list[EventHandler] = []
    with ExitStack() as shown:
        learned, mesh = None, None
        while True:
            problem = relayout.begin()
            model = with_shapes(job.build_model(), problem.model)
            trainer = _trainer(job, problem, relayout, model, handlers, go_on, mesh)
            first = trainer.resume(learned) if go_on else 0
            if begins is not None:
                begins(trainer.run_id)
            # Ranks may need unequal time to skip what is trained, longer than the timeout of a collective.
            skipped = LongBarrier() if first else None
            # Loaders may shuffle with these generators, whatever the layout and wherever the run resumes.
            seed_generators(job.config.seed)
            all_batches, count = job.task.batches_from(first, job.config.iterations, **job.config.data)
            batches = trainer.skip_trained(all_batches, count)
            if skipped is not None:
                skipped.wait("skipping the batches that are trained")
            if not handlers and trainer.rank == 0:
                if first:
                    job.display.say(f"Continuing from the checkpoint after {first} iterations.")
                show = shown.enter_context(job.display.iterations(job.config.iterations, first))
                if displays is not None:
                    displays("training")
                handlers.append(EventHandler(job, first, show))
            evaluator = _Evaluator(job, problem, trainer, next(iter(handlers), None), catch_up)
            done = _train(evaluator, batches, first, relayout)
            catch_up()
            if not relayout.changed:
                break
            # A layout has the degrees of the one before.
            learned, go_on, mesh = trainer.learned, True, trainer.membership.mesh
            # Free their memory before the next ones are built.
            del model, trainer, batches, evaluator
    return _finish_rank(job, problem, model, trainer, handlers, done)


def _finish_rank(
    job: Job, problem: PlanningProblem, model: Model, trainer: Trainer, handlers: list[EventHandler], done: int
) -> Summary | None:
    """Report and evaluate on rank 0 after the last of ``done`` iterations; return the summary there."""
    # Only if it is needed, since the whole model may exceed a rank's memory.
    if job.task.evaluate is not None:
        trainer.gather_model()
    waiting_s = job.config.log.waiting_s
    compared = LongBarrier() if waiting_s else None
    if not handlers:
        if compared is not None:
            take_part(compared)
        return None
    [handler] = handlers
    if done < job.config.iterations != UNTIL_THE_END:
        job.display.say(f"The batches ended after {done} of {job.config.iterations} iterations.", warning=True)
    # Write everything before the user's evaluation, which may fail.
    facts = _run_facts(job, problem, model)
    runs = None if compared is None else partial(run_waiting, seconds=waiting_s, compared=compared)
    with display_heartbeat(job.display, "comparing with 1F1B, and writing timelines"):
        summary = finish(handler.recorder, problem, facts, handler.elapsed_s, job.config.layout.kind, runs)
        doing("evaluating")
        scores = job.task.scores(model)
    if scores:
        summary = handler.recorder.write(msgspec.structs.replace(summary, evaluation=scores))
    handler.callbacks.call("on_end", summary)
    job.display.close(summary)
    return summary


def _train(evaluate: _Evaluator, batches: Iterable[Sequence[Any]], first: int, relayout: Relayout) -> int:
    """Train under one layout until the end or until the layout changes; return the number of finished iterations."""
    handler, done = evaluate.handler, first
    reports = evaluate.trainer.run(batches, first, end=evaluate.job.config.iterations, between=evaluate.between)
    try:
        evaluated_s = evaluate.begin(first)
        for report in reports:
            if done == first:
                relayout.started(evaluated_s + report.step_s)
            done = report.iteration + 1
            if handler is not None:
                handler.step(report)
            evaluate.catch_up()
            relayout.note(report)
    except (InputError, InfeasibleError):
        # The traceback refers to the generator, which would not complete a checkpoint before the process ends.
        reports.close()
        raise
    finally:
        # Batches of a task may be an iterator, which the trainer leaves open.
        close_reading(batches)
    if not relayout.changed:
        evaluate.after(done, is_last=True)
    elif handler is not None:
        handler.recorder.relaid()
    return done


def _catching_up(job: Job) -> Callable[[], None]:
    """Return a function that waits for the callbacks of rank 0, which may take longer than the timeout of collectives.

    All ranks call it together after a callback, for up to an hour. Rank 0 waits for no other rank in it, so that it
    still notices lost ranks soon.
    """
    # A script that torchrun starts may pass callbacks on rank 0 only.
    with together("comparing callbacks"):
        exist = broadcast_int(int(bool(job.task.callbacks)))
    if not exist:
        return lambda: None
    group = long_group()

    def catch_up() -> None:
        with together("waiting for the callbacks of rank 0"):
            broadcast_int(0, group)

    return catch_up


class EventHandler:
    """Handles the run's events on rank 0: records them, shows them, and calls the callbacks.

    ``first`` is the first iteration of this start. ``show`` shows the report of an iteration.
    """

    def __init__(self, job: Job, first: int, show: Callable[[StepReport], None]) -> None:
        self._begin, self._show = time.monotonic(), show
        peak = peak_flops(job)
        self._peak_flops = None if peak is None else peak * job.config.num_processes
        self.recorder, self._display = Recorder(job.folder, first, job.config.log.plans), job.display
        logs = [TensorBoardLog(job.folder / TENSORBOARD, first)] if job.config.log.tensorboard else []
        randomness = SeparateRandomness(group_device())
        with randomness.used():
            made = job.task.made_callbacks()
        self.callbacks = Callbacks([*logs, *made], randomness)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this start began to train."""
        return time.monotonic() - self._begin

    def step(self, report: StepReport) -> None:
        """Handle an iteration; its report receives the MFU if the peak of the devices is known."""
        if self._peak_flops is not None and report.flops and report.step_s:
            report = replace(report, mfu=report.flops / (report.step_s * self._peak_flops))
        self.callbacks.call("on_step", self.recorder.add(report))
        self._show(report)

    def evaluated(self, evaluated: EvaluationResult) -> None:
        """Handle an evaluation."""
        self.recorder.add_evaluation(evaluated)
        weights = ", averaged weights" if evaluated.weights == "ema" else ""
        self._display.say(
            f"Evaluation after {evaluated.iteration} iterations: loss {evaluated.loss:.4f} on {evaluated.num_batches} "
            f"batches, {evaluated.elapsed_s:.1f} s{weights}"
        )
        self.callbacks.call("on_evaluation", evaluated)

    def saved(self, iteration: int, path: Path) -> None:
        """Handle a checkpoint."""
        self.callbacks.call("on_checkpoint", iteration, path)


def peak_flops(job: Job) -> float | None:
    """Return the peak operations per second of one process's device in the run's precision."""
    config = job.config
    computed = AUTOCAST[config.runtime.autocast] or torch_dtype(job.dtype)
    return config.log.peak_flops or known_peak(group_device(), computed)


class _Evaluator:
    """Evaluates during a run; all ranks use it alike. ``catch_up`` is that of `_catching_up`."""

    def __init__(
        self,
        job: Job,
        problem: PlanningProblem,
        trainer: Trainer,
        handler: EventHandler | None,
        catch_up: Callable[[], None],
    ) -> None:
        self.config, self.job, self.trainer, self.handler = job.config.evaluation, job, trainer, handler
        self.catch_up, self._last, self._problem = catch_up, 0, problem
        if self.config is not None:
            averaged = self.config.weights == "ema"
            self._plan = partial(plan_forwards, forward_problem(problem, averaged=averaged))

    def begin(self, first: int) -> float:
        """Prepare to evaluate from an iteration on, and make the evaluation that is due there if there is none yet.

        Return the seconds of that evaluation. A checkpoint is begun before the evaluation after the same iteration, so
        that it exists even if that fails. The rates may depend on this evaluation, which the checkpoint lacks.
        """
        # Rank 0 may have made its callbacks just now.
        self.catch_up()
        if self.config is None:
            return 0.0
        known = None if self.handler is None else msgspec.msgpack.encode(self.handler.recorder.last_evaluated)
        self._last, loss = msgspec.msgpack.decode(broadcast_bytes(known, at_once=64), type=tuple[int, float])
        if first and first % self.config.every == 0:
            if self._last == first:
                self.trainer.note_evaluation(first, loss)
            else:
                # Training has not started yet, and compiling can take longer than the timeout of a collective.
                compiled = LongBarrier()
                if self.trainer.membership.is_planner_rank:
                    self._problem.compile_kernels()
                compiled.wait("compiling the planner's kernels")
                began = time.monotonic()
                self.after(first)
                return time.monotonic() - began
        return 0.0

    def between(self, done: int) -> None:
        """Evaluate between two iterations if an evaluation is due."""
        # Rank 0 may have been told of a checkpoint.
        self.catch_up()
        self.after(done)

    def after(self, done: int, *, is_last: bool = False) -> None:
        """Evaluate after this many iterations if an evaluation is due."""
        config = self.config
        if config is None or done == self._last or (done % config.every and not is_last):
            return
        self._last = done
        with preserve_random_state(group_device()):
            batches = self.job.task.evaluation_batches(self.job.config.data, config.data)
        averaged = config.weights == "ema"
        try:
            found = self.trainer.evaluate(batches, self._plan, done, most=config.batches, averaged=averaged)
        finally:
            close_reading(batches)
        if self.handler is not None:
            self.handler.evaluated(found)
        self.catch_up()


def _trainer(
    job: Job,
    problem: PlanningProblem,
    relayout: Relayout,
    model: Model,
    handlers: list[EventHandler],
    go_on: bool,
    mesh: Mesh | None,
) -> Trainer:
    config, costs, task = job.config, problem.costs, job.task

    def saved(iteration: int, path: Path) -> None:
        for handler in handlers:
            handler.saved(iteration, path)

    return Trainer(
        model,
        problem.layout,
        Planner(problem, TcpPlanStore.host, deadline_s=config.planner.deadline_s),
        describe=task.describe,
        optimizer=task.optimizer or ConfiguredOptimizer(config.optimizer, not config.parallel.divides_nothing),
        scheduler=configured_scheduler(job.scheduler, config.optimizer, config.iterations)
        if task.scheduler is None
        else checked_scheduler(task.scheduler, config.evaluation is not None),
        loads=lambda batch: cost_loads(batch, problem.model, problem.layout, costs),
        options=ExecutionOptions(
            count_flops=peak_flops(job) is not None,
            ema_decay=None if config.ema is None else config.ema.decay,
            clip_norm=config.optimizer.clip_norm,
            timeout_s=config.timeout_s,
            device=group_device(),
            transport=config.runtime.transport,
            compare_contents=config.runtime.compare_contents,
            autocast=AUTOCAST[config.runtime.autocast],
            random_seed=config.seed,
            workers=config.runtime.workers,
            shard=config.parallel.shard,
        ),
        saving=Saving(
            checkpoints=job.checkpoints,
            on_checkpoint=saved,
            ends_after=relayout.ends_after,
            record=(*(job.folder / name for name in (HISTORY, EVALUATIONS, LAYOUTS)), job.setup_path),
            resumes=go_on,
        ),
        mesh=mesh,
    )


def _run_facts(job: Job, problem: PlanningProblem, model: Model) -> RunFacts:
    num_parameters = sum(p.numel() for module in model.modules for x in module.layers for p in x.parameters())
    return RunFacts(job.name, problem.layout.num_ranks, num_parameters, job.config.seed, problem.layout.digest)
