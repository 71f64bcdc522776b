"""TrainingRun: a training run from measuring layers to its report, from a file or from Python."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from pipeloom.cost.layers import LayerTable
from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.heartbeat import paused
from pipeloom.io import read_spec
from pipeloom.layout.training import training_layers
from pipeloom.outputs import check_input
from pipeloom.plan import backend_of
from pipeloom.planner import Setup
from pipeloom.printing import print_error
from pipeloom.runtime import Model, Worker, choose_device, join_workers, this_worker
from pipeloom.runtime.launch.coordination import Patience, first_says
from pipeloom.runtime.launch.host_links import find_hosts, measure_links
from pipeloom.runtime.launch.processes import Joined, launch, report
from pipeloom.runtime.train.divide import check_divisible
from pipeloom.search import SearchParams, find_method
from pipeloom.spec.layout import check_dealt
from pipeloom.training.config import read_config
from pipeloom.training.display import Display, Quiet
from pipeloom.training.first_sample import show_first_sample
from pipeloom.training.folder_task import folder_task
from pipeloom.training.job import Job
from pipeloom.training.layouts import given_layout, held_copies, lay_out, offered, preview
from pipeloom.training.measure import FirstBatches, known_links, known_profile, measured_profile
from pipeloom.training.optimizers import check_optimizer, check_scheduler
from pipeloom.training.rank import train_rank
from pipeloom.training.record import Summary, fresh_folder
from pipeloom.training.relayout import newest_change, write_setup
from pipeloom.training.task import Task
from pipeloom.training.tensorboard import check_tensorboard
from pipeloom.training.warm import begin_warm


@dataclass(frozen=True)
class TrainingRun(Job):
    """A training run: measure the layers, lay them over ranks, train with a plan for every batch, report.

    ``TrainingRun.from_toml(path).train()`` is what ``pipeloom train path`` does. Everything that is left lies in
    ``folder``: ``summary.json``, ``history.jsonl``, ``timeline.html``, plans, and checkpoints where the config
    asks for them.

    Parameters
    ----------
    config : TrainConfig
    task : Task
        The user's functions; every process imports them.
    folder : Path
        Everything that the run leaves, on rank 0's host.
    file : Path
        The config's file, to which paths in it are relative; need not be there.
    display : Display
        Told what is being done; nothing is shown by default.
    layout : Layout or None
        Where the model lies, whatever ``config.layout`` says beside the number of ranks.
    profile : Profile or None
        What layers cost; None: they are measured.

    Examples
    --------
    >>> run = TrainingRun.from_toml(Path("examples/digits_vlm/train.toml"))  # doctest: +SKIP
    >>> run.train().loss_last  # doctest: +SKIP
    0.05
    """

    @classmethod
    def from_toml(cls, path: Path | str, *, runs: Path | str = "runs", display: Display | None = None) -> TrainingRun:
        """Read a train.toml and import its task file, or the folder of a model and the data that it names.

        Parameters
        ----------
        path : path
        runs : path
            Folder under which the run's own folder is made, named as the file says.
        display : Display or None
            None: nothing is shown.

        Raises
        ------
        InputError
            Naming file and field, or what the task file lacks.
        """
        file = Path(path)
        config = read_config(file)
        if not config.task:
            return cls(config, folder_task(config, file), Path(runs) / config.name, file, display or Quiet())
        source = Path(os.path.realpath(file.parent / config.task))
        if not source.is_file():
            raise InputError(f"{file}: task", f"{str(source)!r} is not a file", "give a Python file beside train.toml")
        check_input(source)
        return cls(config, Task.from_file(source), Path(runs) / config.name, file, display or Quiet())

    def prepare(self) -> Setup:
        """Measure the layers, choose the layout, and write what all ranks read: the planner's setup.

        What was measured before the run was interrupted is taken again, so that a resumed run has the same layout; one
        that was changed meanwhile holds.

        Raises
        ------
        InputError
            When config, task and model do not belong together, or the task's functions fail.
        InfeasibleError
            When no layout fits into memory.
        """
        config = self.config
        find_method(config.planner.method, f"{self.file}: planner.method")
        with _default_dtype_kept():
            model = self._checked_model()
            with self._in_file():
                check_divisible(model, config.parallel.degrees, config.parallel.shard)
                self._check_dealt(model)
                self._check_loop(model)
            show_first_sample(self)
            setup = self._measured_setup(model)
        write_setup(self, setup)
        return setup

    def measure_layers(self) -> LayerTable:
        """Measure the layers on this process's device: what each costs on a typical microbatch.

        Raises
        ------
        InputError
            When the model has several modules, or the task's functions fail.
        """
        with _default_dtype_kept():
            first = FirstBatches(self, self._checked_model())
            profile = measured_profile(self, first, choose_device(self.config.runtime.device, 1))
            return training_layers(preview(self, first.shaped, profile, first))

    def train(self, *, resume: bool | None = None, restarts: int = 0) -> Summary | None:
        """Prepare, then train over ranks: processes of this machine, or those that torchrun started.

        Parameters
        ----------
        resume : bool or None
            Go on from the newest checkpoint (from the beginning where there is none), or remove what an earlier run
            saved. None: there must be none.
        restarts : int
            So often all ranks are started again from the newest good checkpoint, or the beginning where there is none,
            when one of them dies or fails; but not where one refuses what it was given. torchrun counts its own.

        Returns
        -------
        Summary or None
            What ``summary.json`` has; None in a process that torchrun started for another rank than 0.

        Raises
        ------
        InputError
            When something given is wrong, or there is a checkpoint and ``resume`` does not say what to do about it.
        ExecutionError
            When a rank fails or dies, and no restart is left or would help.
        """
        worker = this_worker()
        if worker is not None:
            return self._train_as_worker(worker, resume)
        begin_warm()
        with self.alone():
            return self._train_here(resume, restarts)

    def resume(self, *, restarts: int = 0) -> Summary | None:
        """Go on from the newest checkpoint, or begin where there is none; see `train`."""
        return self.train(resume=True, restarts=restarts)

    def summary(self) -> Summary:
        """Read what a finished run came to.

        Raises
        ------
        InputError
            When it has not ended, or its ``summary.json`` cannot be read.
        """
        path = self.folder / "summary.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Summary)
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(str(path), f"cannot be read ({error})", "train the run to its end first") from error

    def _checked_model(self) -> Model:
        self.display.say(f"Building {self.config.name} ...")
        model = self.build_model()
        with self._in_file("layout.modules: "):
            for name in self.config.layout.modules:
                model.spec.module(name)
        with self._in_file():
            offered(self.config, model)
        for strategy, problem in model.excluded.items():
            if strategy in self.config.planner.strategies:
                self.display.say(f"Without the memory strategy {strategy!r}, under which {model.name} fails: {problem}")
        return model

    @contextmanager
    def _in_file(self, field: str = "") -> Iterator[None]:
        """What is wrong with a field of the run's file is said to be in it; a run of `fit` has none."""
        try:
            yield
        except InputError as error:
            if not self.file.is_file():
                raise
            raise InputError(f"{self.file}: {field}{error.entity}", error.problem, error.remedy) from error

    def _check_dealt(self, model: Model) -> None:
        """Refuse what a layout would refuse to deal, before anything is measured."""
        for name, place in self.config.layout.modules.items():
            if place.on_tensor_ranks != "dealt" or name not in {module.name for module in model.modules}:
                continue
            module = model.module(name)
            check_dealt(
                f"layout.modules.{name}.on_tensor_ranks",
                is_last=module is model.modules[-1],
                streams=bool(module.emits or module.takes),
            )

    def _check_loop(self, model: Model) -> None:
        """Refuse, before any rank is started, what the ranks could not do beside plans."""
        config, task = self.config, self.task
        if all(module.frozen for module in model.modules):
            frozen = ", ".join(module.name for module in model.modules)
            raise InputError("model.freeze", f"leaves nothing to train: {frozen} are frozen", "train one of them")
        if task.optimizer is None:
            names = (
                f"{module.name}.{i}.{name}"
                for module in model.modules
                for i, layer in enumerate(module.layers)
                for name, _ in layer.named_parameters()
            )
            check_optimizer(config.optimizer, names)
        if task.scheduler is None:
            check_scheduler(self.scheduler, config.optimizer if task.optimizer is None else None, config.iterations)
        if config.evaluation is not None:
            task.check_evaluation(config.data, config.evaluation.data)
        if config.log.tensorboard:
            check_tensorboard()

    def _measured_setup(self, model: Model) -> Setup:
        config = self.config
        first = FirstBatches(self, model)
        model = first.shaped
        given = given_layout(self, model)
        profile = known_profile(self, model) or measured_profile(self, first, self.device)
        laid = given or lay_out(self, model, profile, first)
        params = config.planner.params
        search = read_spec(self.file.parent / params, SearchParams) if params else SearchParams()
        if laid.rule is not None:
            search = msgspec.structs.replace(search, rules=(*search.rules, laid.rule))
        setup = Setup(
            model=model.spec,
            layout=msgspec.structs.replace(laid.layout, parallelism=config.parallel.degrees),
            profile=profile,
            packing=config.packing,
            cluster=self.cluster,
            budget_s=config.planner.budget_s,
            seed=config.seed,
            method=config.planner.method,
            strategies=offered(config, model),
            tuning=config.tuning,
            backend=backend_of(self.device if config.runtime.transport == "direct" else "cpu"),
            split_backward=config.planner.split_backward,
            held_copies=held_copies(self, model),
            threads=config.planner.threads,
            search=search,
        )
        # What an earlier start of this run has changed holds, where it began with this layout.
        change = newest_change(self, setup.layout.digest)
        return setup if change is None else change.applied(setup)

    def _begin(self, go_on: bool) -> None:
        """Make the folder, and prepare all that the ranks read."""
        fresh_folder(self.folder, go_on=go_on)
        setup = (replace(self, config=known_links(self)) if go_on else self).prepare()
        # Here, once, so that neither the planner nor rank 0 compiles while the others wait.
        self.display.say("Loading the planner's kernels ...")
        setup.problem().warm_up()

    def _goes_on(self, resume: bool | None, steps: Sequence[int] | None = None) -> bool:
        """Whether to go on from a checkpoint; where there is one, somebody must have said what becomes of it."""
        if self.checkpoints is None:
            if resume:
                raise InputError(f"{self.file}: checkpoint", "is missing", "add [checkpoint] to save and resume")
            return False
        if steps is None:
            steps = self.checkpoints.steps()
        if steps and resume is None:
            raise InputError(
                str(self.checkpoints.folder),
                f"has a checkpoint after {steps[-1]} iterations",
                "--resume goes on from it, --from-scratch removes it",
            )
        return bool(resume and steps)

    def _train_here(self, resume: bool | None, restarts: int) -> Summary:
        """Start the ranks as processes of this machine; again from a checkpoint while restarts are left."""
        config = self.config
        go_on = self._goes_on(resume)
        self._begin(go_on)
        # Not before: a mistake in the new config would cost the old run's checkpoints.
        if self.checkpoints is not None and not go_on:
            self.checkpoints.clear()
        for restart in itertools.count(1):
            planners = "the planner" if config.parallel.dp == 1 else f"{config.parallel.dp} planners"
            self.display.say(f"Starting {config.num_processes} ranks and {planners} ...")
            try:
                # This process says what is done until rank 0 does.
                with ExitStack() as silent:
                    found = launch(
                        train_rank,
                        config.num_processes,
                        self,
                        go_on,
                        report,
                        timeout_s=config.timeout_s,
                        device=self.place,
                        on_report=lambda _rank, _what: silent.enter_context(paused()),
                    )
            except ExecutionError as error:
                if restart > restarts or error.comes_again:
                    raise
                saved = self.checkpoints
                if saved is not None:
                    saved.make()
                go_on = saved is not None and bool(saved.steps())
                where = "the newest checkpoint" if go_on else "the beginning"
                again = f"{error}; starting again from {where}, {restart} of {restarts}"
                self.display.say(again, warning=True)
            else:
                summary = found[0]
                assert isinstance(summary, Summary)
                return summary
        raise AssertionError("restarts are counted")

    def _train_as_worker(self, worker: Worker, resume: bool | None) -> Summary | None:
        """Train as one of the processes that torchrun started."""
        run = self._fitted(worker.num_ranks)
        joined: Joined | None = None
        try:
            # One process locks the folder for all of them.
            with run.alone() if worker.rank == 0 else nullcontext():
                joined = join_workers(worker, run.config.timeout_s, run.place)
                run = run._linked()
                # Started again, it goes on; what is there was saved by this very run.
                again = bool(first_says(int(joined.again))) and run.config.checkpoint is not None
                go_on = run._prepare_as_worker(True if again else resume)
                summary = train_rank(run, go_on)
                joined.watch.end()
                # Its threads would outlive the interpreter.
                dist.destroy_process_group()
                return summary
        except PipeloomError as error:
            message = str(error) if joined is None else joined.watch.fail(error)
            if message:
                message = message if message.startswith("rank ") else f"rank {worker.rank}: {message}"
                print_error(message)
            # The group's threads may hang on a dead peer; nothing here is worth waiting for.
            os._exit(2)

    def _linked(self) -> TrainingRun:
        """Return the run with what messages take between its hosts; all ranks call it together."""
        config, hosts = self.config, find_hosts()
        if not max(hosts):
            return self
        begin = time.monotonic()
        links = config.cluster.links or measure_links(hosts, self.device)
        if dist.get_rank() == 0:
            self.display.say(f"Links of {max(hosts) + 1} hosts, measured in {time.monotonic() - begin:.1f} s:")
            for link in links:
                first, second = link.hosts
                where = f"inside host {first}" if first == second else f"between hosts {first} and {second}"
                took = f"{link.bytes_per_s / 1e6:.0f} MB/s, {link.latency_s * 1e6:.0f} us"
                self.display.say(f"  {where}: {took}")
        # Of the first replica; the others have hosts of their own.
        stages = hosts[:: config.parallel.num_beside]
        cluster = msgspec.structs.replace(config.cluster, hosts=stages, links=links)
        return replace(self, config=msgspec.structs.replace(config, cluster=cluster))

    def _fitted(self, num_processes: int) -> TrainingRun:
        """Return the run over as many processes as there are, where its config lets that be.

        Of the degrees the tensor-parallel one stays, for layers are divided by it; then the number of pipeline ranks
        where more or fewer replicas of them fill all processes; else that of replicas, or as many as leave none idle.
        """
        config = self.config
        layout, parallel = config.layout, config.parallel
        if num_processes == config.num_processes:
            return self
        what = "layout.ranks" + " x parallel.dp" * (parallel.dp > 1) + " x parallel.tp" * (parallel.tp > 1)
        if not layout.elastic or num_processes % parallel.tp:
            remedy = f"use torchrun --nproc-per-node {config.num_processes}"
            if not layout.elastic:
                remedy += ", or layout.elastic = true"
            raise InputError(
                f"{self.file}: {what}",
                f"{config.num_processes}, but torchrun started {num_processes} processes",
                remedy,
            )
        whole = num_processes // parallel.tp
        dp = whole // layout.ranks
        if whole % layout.ranks:
            dp = next(each for each in range(parallel.dp, 0, -1) if whole % each == 0)
        ranks = whole // dp
        shard = parallel.shard if dp > 1 else None
        self.display.say(
            f"{num_processes} processes in place of {config.num_processes}: {ranks} pipeline ranks, {dp} replicas.",
            warning=True,
        )
        return replace(
            self,
            config=msgspec.structs.replace(
                config,
                layout=msgspec.structs.replace(layout, ranks=ranks),
                parallel=msgspec.structs.replace(parallel, dp=dp, shard=shard),
            ),
        )

    def _prepare_as_worker(self, resume: bool | None) -> bool:
        """Have rank 0 prepare while the others wait; return whether to go on from a checkpoint."""
        prepared, checkpoints = Patience(), self.checkpoints
        steps = None if checkpoints is None else checkpoints.all_steps()
        go_on = self._goes_on(resume, steps)
        failure: PipeloomError | None = None
        if dist.get_rank() == 0:
            try:
                self._begin(go_on)
            except PipeloomError as error:
                failure = error
        failed = prepared.hear("waiting for rank 0 to prepare the run", int(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            # Rank 0 says why.
            os._exit(2)
        if checkpoints is not None and not go_on and checkpoints.copies.is_first:
            checkpoints.clear()
        return go_on


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    """Building a model sets torch's default dtype, which is the caller's."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
