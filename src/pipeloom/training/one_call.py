"""fit: train a model over ranks in one call, with replaceable parts."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipeloom.cost import Profile
from pipeloom.errors import InputError
from pipeloom.outputs import refused
from pipeloom.runtime import Batches as LoadedBatches
from pipeloom.runtime import Model, this_worker
from pipeloom.runtime.data.prefetch import Describe
from pipeloom.runtime.train.rates import MakeOptimizer, MakeScheduler
from pipeloom.spec import Layout
from pipeloom.training.callbacks import Callback
from pipeloom.training.config import CHOSEN_LAYOUT, UNTIL_THE_END, CheckpointConfig, Dtype, LayoutConfig, RunConfig
from pipeloom.training.display import Display, Lines, display_heartbeat
from pipeloom.training.loop_config import EvaluationConfig, SchedulerConfig
from pipeloom.training.record import HISTORY, Row, Summary, read_history
from pipeloom.training.run import TrainingRun, keep_default_dtype
from pipeloom.training.task import Task

Batches = Iterable[Sequence[Any]]
_EVALUATE_EVERY = 100


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
    ranks: int | None = None,
    describe: Describe | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    layout: Layout | None = None,
    evaluate_on: Batches | Callable[[], Batches] | None = None,
    callbacks: tuple[Callback, ...] = (),
    profile: Profile | None = None,
    folder: Path | None = None,
    resume: bool | None = None,
    display: Display = Lines(),  # noqa: B008 - frozen
    config: RunConfig = RunConfig(),  # noqa: B008 - frozen
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
    ranks : int or None
        Number of pipeline ranks. None: that of ``layout`` or ``config.layout``, which is 4 by default.
    describe : callable or None
        Maps a sample to its metadata: an ``id`` and its sizes. None: the model's own, or batches are `Prefetched`.
    optimizer : callable or None
        Makes the optimizer of a rank's parameters, or of pairs of name and parameter if its parameter is named
        ``named_parameters``; its groups keep their rates. None: ``config.optimizer``, by default AdamW.
    scheduler : callable or None
        Makes the scheduler of a rank's optimizer. None: ``config.scheduler``; without it, rates are constant.
    layout : Layout or None
        None: ``config.layout``, by default chosen by planning.
    evaluate_on : iterable, callable or None
        Batches whose loss is measured during training, passed like the training batches.
    callbacks : tuple of Callback
        Receive steps, evaluations and checkpoints on rank 0.
    profile : Profile or None
        Costs of the layers. None: they are measured before training.
    folder : Path or None
        Folder of the run. None: a new folder under ``runs``, named after the config or the model.
    resume : bool or None
        True: continue from the folder's newest checkpoint. False: remove earlier ones. None: there must be none.
    display : Display
        Shows the progress: lines on standard error by default, nothing with ``Quiet()``.
    config : RunConfig
        All other settings.

    Returns
    -------
    FitResult
        Losses, planned and measured times, and the path of the trained weights.

    Raises
    ------
    InputError
        If an argument is wrong, contradicts the config, or cannot be sent to other processes.
    InfeasibleError
        If a batch or a layout does not fit into memory.
    ExecutionError
        If a rank fails or dies.
    """
    if this_worker() is not None:
        raise InputError("fit", "starts its own ranks, but torchrun started this process", "use a TrainingRun")
    if resume and folder is None:
        raise InputError("folder", "is missing, so there is no run to resume", "name the folder of the earlier run")
    build = partial(_build, _portable(model, "model"))
    most = None if config.iterations == UNTIL_THE_END else config.iterations
    read = partial(_batches, _portable(batches, "batches"), most)
    held_out = None if evaluate_on is None else partial(_held_out, _portable(evaluate_on, "evaluate_on"))
    task = Task(
        build, read, describe, optimizer=optimizer, scheduler=scheduler, eval_batches=held_out, callbacks=callbacks
    )
    count = (_length(batches) if most is None else None) or config.iterations
    config = _completed(config, task, count, _layout_config(config, ranks, layout))
    name = config.name or _name(task, config, folder)
    config, folder = msgspec.structs.replace(config, name=name), folder or _new_folder(name)
    run = TrainingRun(config, task, folder, file=folder / "fit", display=display, layout=layout, profile=profile)
    with display_heartbeat(display, f"building {name}"):
        summary = run.train(resume=resume)
    assert summary is not None
    assert run.checkpoints is not None
    checkpoint = run.checkpoints.newest()
    assert checkpoint is not None
    return FitResult(folder, checkpoint, summary, tuple(read_history(folder / HISTORY)))


def _length(batches: Any) -> int | None:
    """Return the number of batches to train on, or None if it is unknown."""
    if not isinstance(batches, Sized):
        return None
    try:
        length = len(batches)
    except TypeError:  # PyTorch's DataLoader of an IterableDataset has no length, but its class has
        return None
    # At least one, so that the error for no batches is that of reading them.
    return max(1, length - (batches.first if isinstance(batches, LoadedBatches) else 0))


def _completed(config: RunConfig, task: Task, iterations: int, layout: LayoutConfig) -> RunConfig:
    """Return the config with the defaults of `fit` where those of a file differ.

    Raise `InputError` if it repeats an argument, or lacks the number of iterations that its scheduler needs.
    """
    for field in ("task", "model", "data"):
        if getattr(config, field):
            raise InputError(f"config.{field}", "is set, but fit has arguments for model and batches", "omit it")
    if task.scheduler is not None and config.scheduler is not None:
        raise InputError("scheduler", "is an argument, but config.scheduler is set too", "omit one of them")
    scheduler = config.scheduler or SchedulerConfig("constant")
    if scheduler.name in ("cosine", "linear") and iterations == UNTIL_THE_END:
        problem = f"{scheduler.name!r} needs the length of the run, which is unknown"
        raise InputError("config.scheduler", problem, "set config.iterations")
    usual = None if task.eval_batches is None else EvaluationConfig(_EVALUATE_EVERY)
    return msgspec.structs.replace(
        config,
        iterations=iterations,
        layout=layout,
        dtype=_dtype(config),
        scheduler=scheduler,
        evaluation=config.evaluation or usual,
        checkpoint=config.checkpoint or CheckpointConfig(),
    )


def _name(task: Task, config: RunConfig, folder: Path | None) -> str:
    """Return the name of the folder, or of the model if there is no folder."""
    if folder is not None:
        return folder.name
    with keep_default_dtype():
        return task.model(_dtype(config), config.seed).name


def _layout_config(config: RunConfig, ranks: int | None, layout: Layout | None) -> LayoutConfig:
    """Return the config of the layout, for this number of ranks or for the layout itself."""
    # By identity, since a config that declares the same layout as the default still declares one.
    is_declared = config.layout is not CHOSEN_LAYOUT
    if layout is not None:
        if is_declared:
            raise InputError("layout", "is an argument, but config.layout is set too", "omit one of them")
        if ranks is not None and ranks != layout.num_ranks:
            raise InputError("ranks", f"is {ranks}, but the layout has {layout.num_ranks}", "omit ranks")
        return LayoutConfig(layout.num_ranks)
    if ranks is None or ranks == config.layout.ranks:
        return config.layout
    if is_declared:
        raise InputError("ranks", f"is {ranks}, but config.layout.ranks is {config.layout.ranks}", "omit ranks")
    return msgspec.structs.replace(config.layout, ranks=ranks)


def _dtype(config: RunConfig) -> Dtype:
    """Return the dtype of the config, or torch's default dtype."""
    known: dict[torch.dtype, Dtype] = {torch.float64: "float64", torch.bfloat16: "bfloat16"}
    return config.dtype or known.get(torch.get_default_dtype(), "float32")


def _portable(value: Any, what: str) -> Any:
    """Return a form that can be sent to other processes: a function itself, or the bytes of an object.

    Raise `InputError` if it cannot be pickled, or is defined in an interactive session.
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
        return made if most is None else replace(made, limit=min(made.first + most, len(made)))
    return made if most is None else itertools.islice(made, most)


def _held_out(batches: Callable[[], Batches] | bytes) -> Batches:
    """Return the evaluation batches."""
    found: Batches = pickle.loads(batches) if isinstance(batches, bytes) else batches()
    return found


def _new_folder(name: str) -> Path:
    for number in itertools.count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise refused(folder, error, "set folder") from error
        return folder
    raise AssertionError("numbers do not end")
