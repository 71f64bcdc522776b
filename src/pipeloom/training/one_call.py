"""fit: train a model over ranks in one call, with replaceable parts."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from pipeloom.cost import Profile
from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement
from pipeloom.outputs import refused
from pipeloom.packing import PackingSpec, budget_tokens
from pipeloom.runtime import Batches as LoadedBatches
from pipeloom.runtime import Model, this_worker
from pipeloom.runtime.data.prefetch import Describe
from pipeloom.runtime.train.rates import MakeOptimizer, MakeScheduler
from pipeloom.spec import Layout, RankSpec
from pipeloom.training.callbacks import Callback
from pipeloom.training.config import (
    UNTIL_THE_END,
    CheckpointConfig,
    LayoutConfig,
    ParallelConfig,
    PlannerConfig,
    RuntimeConfig,
    TrainConfig,
)
from pipeloom.training.display import Display, Lines, display_heartbeat
from pipeloom.training.loop_config import EmaConfig, EvaluationConfig, LogConfig, OptimizerConfig, SchedulerConfig
from pipeloom.training.measure import typical_batches
from pipeloom.training.record import HISTORY, Row, Summary, read_history
from pipeloom.training.run import TrainingRun
from pipeloom.training.task import Task

Batches = Iterable[Sequence[Any]]
_MICROBATCHES_PER_RANK = 2
_EVALUATE_EVERY = 100
_SAME_FIELDS = ("parallel", "seed", "cluster", "planner", "runtime", "checkpoint", "timeout_s", "ema", "log")
"""Fields that `FitSettings` and `TrainConfig` share."""


class FitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `fit` beyond its arguments."""

    packing: PackingSpec | None = None
    """How samples are divided into microbatches. None: about two microbatches for each rank, from the first batches."""
    profile: Profile | None = None
    """Costs of the layers. None: they are measured before training."""
    planner: PlannerConfig = PlannerConfig()
    """Planner time, deadline, and the memory strategies that it may choose."""
    cluster: RankSpec = RankSpec()
    """Memory of the ranks, and links between them until messages have been measured."""
    parallel: ParallelConfig = ParallelConfig()
    """Data and tensor parallelism beside the pipeline, which need more processes than ``ranks``."""
    runtime: RuntimeConfig = RuntimeConfig()
    """CPU or GPUs, and precision."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    scheduler: SchedulerConfig | MakeScheduler | None = None
    """The learning-rate schedule for all rates: a config, or a function that makes the scheduler of a rank's optimizer,
    such as ``functools.partial(CosineAnnealingLR, T_max=1000)``. None: rates are constant."""
    evaluate_on: Batches | Callable[[], Batches] | None = None
    """Batches whose loss is measured during training, given like the training batches."""
    evaluation: EvaluationConfig | None = None
    """When to evaluate. None: every 100 iterations if there are batches to evaluate on."""
    ema: EmaConfig | None = None
    """Average of the weights. None: none."""
    callbacks: tuple[Callback, ...] = ()
    """Receive steps, evaluations and checkpoints on rank 0."""
    log: LogConfig = LogConfig()
    """TensorBoard, and the peak performance of the devices."""
    clip_norm: float | None = None
    """Largest norm of the gradient over all ranks. None: no limit."""
    iterations: int | None = None
    """Most batches to train on. None: all."""
    seed: int = 0
    timeout_s: float = 120.0
    """Seconds after which a rank that waits for another gives up, and training stops."""
    folder: Path | None = None
    """Folder of the run. None: a new folder under ``runs``, named after the model."""
    resume: bool | None = None
    """True: continue from the folder's newest checkpoint. False: remove earlier ones. None: there must be none."""
    display: Display = Lines()
    """Shows the progress: lines on standard error by default, nothing with ``Quiet()``."""


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes
    ----------
    folder : Path
        Folder with timelines, plans, history and summary of the run.
    checkpoint : Path
        The trained weights; `load_weights` reads them into a model.
    summary : Summary
    iterations : tuple of Row
        The numbers of every iteration.
    """

    folder: Path
    checkpoint: Path
    summary: Summary
    iterations: tuple[Row, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every iteration."""
        return tuple(row.loss for row in self.iterations)

    def save_pretrained(self, folder: Path | str, source: Path | str | None = None) -> None:
        """Write the trained weights to a folder that the model's own library reads; see `pipeloom.export`."""
        from pipeloom.integrations.export import export  # a library's reader, and seldom needed

        export(self.checkpoint, folder, source)

    @property
    def planned_s(self) -> tuple[float, ...]:
        """Seconds of every iteration, simulated from measured costs."""
        return tuple(row.planned_s for row in self.iterations)

    @property
    def measured_s(self) -> tuple[float, ...]:
        """Measured seconds of every iteration."""
        return tuple(row.measured_s for row in self.iterations)


def fit(
    model: Model | Callable[[], Model],
    batches: Batches | Callable[[], Batches],
    *,
    ranks: int = 4,
    describe: Describe | None = None,
    optimizer: MakeOptimizer | OptimizerConfig = torch.optim.AdamW,
    layout: Layout | Mapping[str, ModulePlacement] | None = None,
    settings: FitSettings = FitSettings(),  # noqa: B008 - frozen
) -> FitResult:
    """Train a model over pipeline ranks, with a schedule for each batch.

    Measures the layers on this machine, chooses a layout by planning the first batches, and starts a process for
    every rank and one for the planner. Every rank builds the model and reads the batches itself. Pass them as
    functions that can be imported from a module or script, with the script's own call under ``if __name__ ==
    "__main__":``, or as objects that can be pickled.

    Parameters
    ----------
    model : Model or callable
        The model, or a function that builds it. All processes seed torch's generator alike before the call.
    batches : iterable or callable
        Batches, each a list of samples, or a function that returns them. They are the same in every process.
    ranks : int
        Number of pipeline ranks.
    describe : callable or None
        Maps a sample to its metadata: an ``id`` and its sizes. None: the model's own, or the batches are
        `Prefetched`.
    optimizer : callable or OptimizerConfig
        Makes the optimizer of a rank's parameters, such as ``functools.partial(torch.optim.AdamW, lr=1e-4)``; its
        groups keep their rates. If its parameter is named ``named_parameters``, it receives pairs of name and
        parameter. A config names an optimizer of torch.
    layout : Layout, mapping or None
        The layout; or segments and sub-microbatch size by module; None: chosen by planning.
    settings : FitSettings
        Packing, profile, planner, cluster, precision, checkpoints, seed and folder.

    Returns
    -------
    FitResult
        Losses, planned and measured times, and the path of the trained weights.

    Raises
    ------
    InputError
        If an argument is wrong, or cannot be sent to other processes.
    InfeasibleError
        If a batch or a layout does not fit into memory.
    ExecutionError
        If a rank fails or dies.
    """
    if this_worker() is not None:
        raise InputError("fit", "starts its own ranks, but torchrun started this process", "use a TrainingRun")
    if isinstance(layout, Layout) and layout.num_ranks != ranks:
        raise InputError("ranks", f"is {ranks}, but the layout has {layout.num_ranks}")
    task = _task(model, batches, describe, optimizer, settings)
    built = task.model(_dtype(), settings.seed)
    count = settings.iterations or (len(batches) if isinstance(batches, Sized) else UNTIL_THE_END)
    described = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig()
    config = _config(built, task, settings, _layout_config(ranks, layout), count, described)
    folder = settings.folder or _new_folder(built.name)
    run = TrainingRun(
        config,
        task,
        folder,
        file=folder / "fit",
        display=settings.display,
        layout=layout if isinstance(layout, Layout) else None,
        profile=settings.profile,
    )
    with display_heartbeat(settings.display, f"building {built.name}"):
        summary = run.train(resume=settings.resume)
    assert summary is not None
    assert run.checkpoints is not None
    checkpoint = run.checkpoints.newest()
    assert checkpoint is not None
    return FitResult(folder, checkpoint, summary, tuple(read_history(folder / HISTORY)))


def _task(
    model: Model | Callable[[], Model],
    batches: Batches | Callable[[], Batches],
    describe: Describe | None,
    optimizer: MakeOptimizer | OptimizerConfig,
    settings: FitSettings,
) -> Task:
    """Return the task in a form that can be sent to other processes."""
    held_out = settings.evaluate_on
    return Task(
        partial(_build, _portable(model, "model")),
        partial(_batches, _portable(batches, "batches"), settings.iterations),
        describe,
        optimizer=None if isinstance(optimizer, OptimizerConfig) else optimizer,
        scheduler=None if isinstance(settings.scheduler, SchedulerConfig) else settings.scheduler,
        eval_batches=None if held_out is None else partial(_held_out, _portable(held_out, "settings.evaluate_on")),
        callbacks=settings.callbacks,
    )


def _config(
    model: Model, task: Task, settings: FitSettings, layout: LayoutConfig, iterations: int, optimizer: OptimizerConfig
) -> TrainConfig:
    """Return the settings as a file would hold them."""
    scheduler = settings.scheduler if isinstance(settings.scheduler, SchedulerConfig) else SchedulerConfig("constant")
    if scheduler.name in ("cosine", "linear") and iterations == UNTIL_THE_END:
        problem = f"{scheduler.name!r} needs the length of the run, which is unknown"
        raise InputError("settings.scheduler", problem, "give settings.iterations")
    evaluation = settings.evaluation
    if evaluation is None and settings.evaluate_on is not None:
        evaluation = EvaluationConfig(_EVALUATE_EVERY)
    clip_norm = optimizer.clip_norm if settings.clip_norm is None else settings.clip_norm
    return TrainConfig(
        name=model.name if settings.folder is None else settings.folder.name,
        iterations=iterations,
        layout=layout,
        packing=settings.packing or _packing(model, task, layout.ranks),
        dtype=_dtype(),
        optimizer=msgspec.structs.replace(optimizer, clip_norm=clip_norm),
        scheduler=scheduler,
        evaluation=evaluation,
        **{name: getattr(settings, name) for name in _SAME_FIELDS},
    )


def _layout_config(ranks: int, layout: Layout | Mapping[str, ModulePlacement] | None) -> LayoutConfig:
    if layout is None:
        return LayoutConfig(ranks, "chosen")
    return LayoutConfig(ranks, modules=dict(layout) if isinstance(layout, Mapping) else {})


def _dtype() -> Literal["float32", "float64", "bfloat16"]:
    """Return torch's default dtype, which the ranks use too."""
    known: dict[torch.dtype, Literal["float64", "bfloat16"]] = {torch.float64: "float64", torch.bfloat16: "bfloat16"}
    return known.get(torch.get_default_dtype(), "float32")


def _portable(value: Any, what: str) -> Any:
    """Return a form that can be sent to other processes: a function itself, or the bytes of an object.

    Raises
    ------
    InputError
        If it cannot be pickled, or is defined in an interactive session.
    """
    try:
        data = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        remedy = "pass a function of a module or of the script that makes it"
        raise InputError(what, f"cannot be sent to other processes ({error})", remedy) from error
    main = sys.modules["__main__"]
    if getattr(value, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise InputError(what, "is defined in an interactive session", "move it to a file that can be imported")
    return value if callable(value) else data


def _build(model: Callable[[], Model] | bytes, *, seed: int) -> Any:
    if isinstance(model, bytes):
        return pickle.loads(model)
    torch.manual_seed(seed)
    return model()


def _batches(batches: Callable[[], Batches] | bytes, most: int | None, *, num_iterations: int) -> Batches:  # noqa: ARG001
    """Return at most ``most`` batches; `num_iterations` never exceeds it."""
    made = pickle.loads(batches) if isinstance(batches, bytes) else batches()
    if isinstance(made, LoadedBatches):
        return made if most is None else replace(made, limit=min(most, len(made)))
    return made if most is None else itertools.islice(made, most)


def _held_out(batches: Callable[[], Batches] | bytes) -> Batches:
    """Return the evaluation batches."""
    found: Batches = pickle.loads(batches) if isinstance(batches, bytes) else batches()
    return found


def _packing(model: Model, task: Task, ranks: int) -> PackingSpec:
    """Return a packing with about two microbatches per rank on the first batches, which fits samples twice as long."""
    batches, _ = task.batches_from(0, 1)
    _, metadata = typical_batches(model, task.describe, batches)
    if not metadata:
        raise InputError("batches", "has none", "give at least one batch")
    tokens = [budget_tokens(batch, model.spec) for batch in metadata]
    longest = max(int(each.max()) for each in tokens)
    mean = sum(int(each.sum()) for each in tokens) / len(tokens)
    return PackingSpec(max(2 * longest, round(mean / (_MICROBATCHES_PER_RANK * ranks)), 1))


def _new_folder(name: str) -> Path:
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise refused(folder, error, "set settings.folder") from error
        return folder
    raise AssertionError("numbers do not end")
