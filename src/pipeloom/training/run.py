"""TrainingRun: a training run from measuring layers to its report, from a file or from Python."""

from __future__ import annotations

import itertools
import os
import time
import traceback
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
from pipeloom.planner import PlanningProblem
from pipeloom.printing import print_error
from pipeloom.runtime import Model, Worker, choose_device, join_workers, this_worker
from pipeloom.runtime.launch.coordination import LongBarrier, broadcast_int
from pipeloom.runtime.launch.host_links import find_hosts, measure_links
from pipeloom.runtime.launch.processes import JoinedGroup, launch, report
from pipeloom.runtime.train.divide import check_divisible
from pipeloom.search import SearchParams, find_method
from pipeloom.spec import HostLink, RankSpec
from pipeloom.spec.layout import check_encoder_dp
from pipeloom.training.callbacks import check_tensorboard
from pipeloom.training.config import read_config
from pipeloom.training.display import Display, Quiet
from pipeloom.training.folder_task import folder_task
from pipeloom.training.job import Job
from pipeloom.training.layouts import given_layout, held_copies, lay_out, offered, preview
from pipeloom.training.loop_config import check_loop
from pipeloom.training.measure import FirstBatches, known_links, known_profile, measured_profile, show_first_sample
from pipeloom.training.optimizers import check_optimizer, check_scheduler
from pipeloom.training.rank import train_rank
from pipeloom.training.record import Summary, check_folder, fresh_folder, read_summary
from pipeloom.training.relayout import newest_change, write_shared_files
from pipeloom.training.task import Task
from pipeloom.training.warm import begin_warm


@dataclass(frozen=True)
class TrainingRun(Job):
    """A training run: measure the layers, place them on ranks, train with a plan for every batch, report.

    ``TrainingRun.from_toml(path).train()`` does the same as ``pipeloom train path``. All output is in ``folder``:
    ``summary.json``, ``history.jsonl``, ``timeline.html``, plans, and checkpoints if the config enables them.

    Parameters
    ----------
    config : RunConfig
    task : Task
        The user's functions; every process imports them.
    folder : Path
        Folder of all output, on rank 0's host.
    file : Path
        File of the config, to which its paths are relative. It need not exist.
    display : Display
        Shows the progress; nothing by default.
    layout : Layout or None
        Layout of the model. It overrides ``config.layout`` except for the number of ranks.
    profile : Profile or None
        Costs of the layers. None: they are measured.

    Examples
    --------
    >>> run = TrainingRun.from_toml(Path("examples/digits_vlm/train.toml"))  # doctest: +SKIP
    >>> run.train().loss_last  # doctest: +SKIP
    0.05
    """

    @classmethod
    def from_toml(cls, path: Path | str, *, runs: Path | str = "runs", display: Display | None = None) -> TrainingRun:
        """Read a train.toml, and import its task file or load the model folder and data that it names.

        Parameters
        ----------
        runs : path
            Parent of the run's folder, which has the name in the file.
        display : Display or None
            None: nothing is shown.

        Raises
        ------
        InputError
            If a field is wrong or the task file lacks a function; the message names it.
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

    def prepare(self) -> PlanningProblem:
        """Measure the layers, choose the layout, and write the planning problem, which all ranks read.

        A resumed run reuses the measurements from before the interruption, so that it has the same layout. A changed
        layout also remains.

        Raises
        ------
        InputError
            If config, task and model do not match, or the task's functions fail.
        InfeasibleError
            If no layout fits into memory.
        """
        problem, layers = self._planning_problem(reuse=True)
        write_shared_files(self, problem, layers)
        return problem

    def _planning_problem(self, *, reuse: bool) -> tuple[PlanningProblem, LayerTable | None]:
        """Check the run, and make its planning problem; ``reuse`` allows measurements in the run's folder.

        Also return the costs of layers, if the layout was co-optimized from them.
        """
        config = self.config
        find_method(config.planner.method, f"{self.file}: planner.method")
        with keep_default_dtype():
            model = self._checked_model()
            with self._in_file():
                check_divisible(model, config.parallel.degrees, config.parallel.shard)
                self._check_encoder_dp(model)
                self._check_loop(model)
            show_first_sample(self)
            return self._measured_problem(model, reuse)

    def measure_layers(self) -> LayerTable:
        """Measure the cost of each layer on a typical microbatch, on this process's device.

        Raises
        ------
        InputError
            If the model has several modules, or the task's functions fail.
        """
        with keep_default_dtype():
            first = FirstBatches(self, self._checked_model())
            profile = measured_profile(self, first, choose_device(self.config.runtime.device, 1))
            return training_layers(preview(self, first.shaped, profile, first))

    def train(self, *, resume: bool | None = None, restarts: int = 0) -> Summary | None:
        """Prepare, then train over ranks: processes of this machine, or those that torchrun started.

        Parameters
        ----------
        resume : bool or None
            True: continue from the newest checkpoint, or start from the beginning if there is none. False: remove
            the checkpoints of an earlier run. None: there must be none.
        restarts : int
            Most restarts of all ranks after one dies or fails, from the newest good checkpoint or the beginning. An
            invalid input causes no restart. torchrun counts its own restarts.

        Returns
        -------
        Summary or None
            The content of ``summary.json``; None in a torchrun process of a rank other than 0.

        Raises
        ------
        InputError
            If an input is wrong, or there is a checkpoint and ``resume`` is None.
        ExecutionError
            If a rank fails or dies, and no restart is left or would help.
        """
        worker = this_worker()
        if worker is not None:
            return self._train_as_worker(worker, resume)
        begin_warm()
        with self.alone():
            return self._train_here(resume, restarts)

    def resume(self, *, restarts: int = 0) -> Summary | None:
        """Continue from the newest checkpoint, or start from the beginning if there is none; see `train`."""
        return self.train(resume=True, restarts=restarts)

    def summary(self) -> Summary:
        """Read the summary of a finished run.

        Raises
        ------
        InputError
            If the run has not ended, or its ``summary.json`` cannot be read.
        """
        return read_summary(self.folder / "summary.json")

    def _checked_model(self) -> Model:
        self.display.say(f"Building {self.name} ...")
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
        """Prefix errors with the run's file and field; a run of `fit` has no file."""
        try:
            yield
        except InputError as error:
            if not self.file.is_file():
                raise
            raise InputError(f"{self.file}: {field}{error.entity}", error.problem, error.remedy) from error

    def _check_encoder_dp(self, model: Model) -> None:
        """Check before measuring that modules can use encoder data parallelism over tensor ranks."""
        for name, place in self.config.layout.modules.items():
            if place.on_tensor_ranks != "dealt" or name not in {module.name for module in model.modules}:
                continue
            module = model.module(name)
            check_encoder_dp(
                f"layout.modules.{name}.on_tensor_ranks",
                is_last=module is model.modules[-1],
                streams=bool(module.emits or module.takes),
            )

    def _check_loop(self, model: Model) -> None:
        """Check before ranks start that they can run the training loop."""
        config, task = self.config, self.task
        check_loop(config.optimizer, self.scheduler, config.evaluation, config.ema)
        if task.scheduler is not None and config.optimizer.warmup_iterations:
            raise InputError(
                "optimizer.warmup_iterations",
                f"is {config.optimizer.warmup_iterations}, but the task makes its own scheduler, without this warm-up",
                "omit it, and add the warm-up to that scheduler",
            )
        if all(module.frozen for module in model.modules):
            frozen = ", ".join(module.name for module in model.modules)
            raise InputError("model.freeze", f"leaves nothing to train: {frozen} are frozen", "unfreeze one of them")
        if task.optimizer is None:
            names = [
                f"{module.name}.{i}.{name}"
                for module in model.modules
                for i, layer in enumerate(module.layers)
                for name, _ in layer.named_parameters()
            ]
            check_optimizer(config.optimizer, {name: model.first_name(name) for name in names})
        if task.scheduler is None:
            check_scheduler(self.scheduler, config.optimizer if task.optimizer is None else None, config.iterations)
        if config.evaluation is not None:
            task.check_evaluation(config.data, config.evaluation.data)
        if config.log.tensorboard:
            check_tensorboard()

    def _measured_problem(self, model: Model, reuse: bool) -> tuple[PlanningProblem, LayerTable | None]:
        config = self.config
        first = FirstBatches(self, model)
        model = first.shaped
        declared = given_layout(self, model)
        known = known_profile(self, model) if reuse else self.profile
        profile = known or measured_profile(self, first, self.device)
        choice = declared or lay_out(self, model, profile, first)
        params = config.planner.params
        search = read_spec(self.file.parent / params, SearchParams) if params else SearchParams()
        if choice.rule is not None:
            search = msgspec.structs.replace(search, rules=(*search.rules, choice.rule))
        problem = PlanningProblem.from_profile(
            model.spec,
            msgspec.structs.replace(choice.layout, parallelism=config.parallel.degrees),
            profile,
            first.packing,
            self.cluster,
            strategies=offered(config, model),
            split_backward=config.planner.split_backward,
            held_copies=held_copies(self, model),
            budget_s=config.planner.budget_s,
            seed=config.seed,
            method=config.planner.method,
            tuning=config.tuning,
            backend=backend_of(self.place.of_messages),
            threads=config.planner.threads,
            search=search,
        )
        # A layout change by an earlier start remains if the run began with this layout.
        change = newest_change(self, problem.layout.digest) if reuse else None
        return problem if change is None else change.applied(problem), choice.layers

    def _prepare_folder(self, go_on: bool) -> None:
        """Create the folder, and prepare everything that the ranks read."""
        check_folder(self.folder, go_on=go_on)
        run = replace(self, config=known_links(self)) if go_on else self
        problem, layers = run._planning_problem(reuse=go_on)
        # Only now: an error in the new config must not cost what the old run has recorded.
        fresh_folder(self.folder, go_on=go_on)
        write_shared_files(run, problem, layers)
        # Compile once here, so that neither the planner nor rank 0 compiles while others wait.
        self.display.say("Loading the planner's kernels ...")
        problem.compile_kernels()

    def _resolve_resume(self, resume: bool | None, steps: Sequence[int] | None = None) -> bool:
        """Return whether to continue from a checkpoint.

        Raise `InputError` if there is one and ``resume`` is None, or it has more iterations than the config; or if
        ``resume`` is True and the run saves no checkpoints.
        """
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
                "use --resume to continue from it, or --from-scratch to remove it",
            )
        if steps and resume and steps[-1] > self.config.iterations:
            with self._in_file():
                raise InputError(
                    "iterations",
                    f"is {self.config.iterations}, but the checkpoint has {steps[-1]}",
                    f"raise it to at least {steps[-1]}, or use --from-scratch",
                )
        return bool(resume and steps)

    def _train_here(self, resume: bool | None, restarts: int) -> Summary:
        """Start the ranks as processes of this machine, and restart them from a checkpoint while restarts are left."""
        config = self.config
        go_on = self._resolve_resume(resume)
        self._prepare_folder(go_on)
        # Only now: an error in the new config must not cost the old run's checkpoints.
        if self.checkpoints is not None and not go_on:
            self.checkpoints.clear()
        for restart in itertools.count(1):
            planners = "the planner" if config.parallel.dp == 1 else f"{config.parallel.dp} planners"
            self.display.say(f"Starting {config.num_processes} ranks and {planners} ...")
            try:
                # This process shows the progress until rank 0 does.
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
                if restart > restarts or error.is_permanent:
                    raise
                saved = self.checkpoints
                if saved is not None:
                    saved.make()
                go_on = saved is not None and bool(saved.steps())
                where = "the newest checkpoint" if go_on else "the beginning"
                again = f"{error}; restarting from {where}, {restart} of {restarts}"
                self.display.say(again, warning=True)
            else:
                summary = found[0]
                assert isinstance(summary, Summary)
                return summary
        raise AssertionError("restarts are counted")

    def _train_as_worker(self, worker: Worker, resume: bool | None) -> Summary | None:
        """Train as one of the processes that torchrun started."""
        run = self._with_num_processes(worker.num_ranks)
        joined: JoinedGroup | None = None
        try:
            # One process locks the folder for all processes.
            with run.alone() if worker.rank == 0 else nullcontext():
                joined = join_workers(worker, run.config.timeout_s, run.place)
                run = run._with_measured_links()
                # After a restart it continues, because this run itself saved the checkpoint. Before it has begun, a
                # checkpoint in the folder is that of an earlier run.
                again = bool(broadcast_int(int(joined.again))) and run.config.checkpoint is not None
                go_on = run._prepare_as_worker(True if again else resume, joined.run if again else None)
                summary = train_rank(run, go_on, begins=joined.begin if worker.rank == 0 else None)
                joined.watch.end()
                # The group's threads would outlive the interpreter.
                dist.destroy_process_group()
                return summary
        except Exception as raised:
            error = raised
            if not isinstance(error, PipeloomError):
                if os.environ.get("PIPELOOM_TRACEBACK"):
                    traceback.print_exc()
                hint = "PIPELOOM_TRACEBACK=1 shows where"
                error = ExecutionError(f"rank {worker.rank}: {type(error).__name__}: {error} ({hint})")
            message = str(error) if joined is None else joined.watch.fail(error)
            if message:
                message = message if message.startswith("rank ") else f"rank {worker.rank}: {message}"
                print_error(message)
            # The group's threads may wait for a dead peer, so exit without cleanup.
            os._exit(2)

    def _with_measured_links(self) -> TrainingRun:
        """Return the run with its hosts and the links between them; all ranks call it together.

        Declared links are not measured, unless an elastic run has lost hosts. The others are then numbered from 0, so
        the config's numbers no longer name them.
        """
        config, hosts = self.config, find_hosts()
        # Hosts of the first replica; the others have their own.
        stages, links = hosts[:: config.parallel.num_beside], config.cluster.links
        has_all = not config.layout.elastic or _has_declared_hosts(config.cluster, stages, hosts)
        if max(hosts):
            links = _among((has_all and links) or self._measured_links(hosts), stages)
        elif not has_all:
            stages, links = (), ()
        else:
            return self
        cluster = msgspec.structs.replace(config.cluster, hosts=stages, links=links)
        return replace(self, config=msgspec.structs.replace(config, cluster=cluster))

    def _measured_links(self, hosts: tuple[int, ...]) -> tuple[HostLink, ...]:
        """Measure the links between hosts and show them; all ranks call it together."""
        begin = time.monotonic()
        links = measure_links(hosts, self.place.of_messages)
        if dist.get_rank() == 0:
            self.display.say(f"Links of {max(hosts) + 1} hosts, measured in {time.monotonic() - begin:.1f} s:")
            for link in links:
                first, second = link.hosts
                where = f"inside host {first}" if first == second else f"between hosts {first} and {second}"
                took = f"{link.bytes_per_s / 1e6:.0f} MB/s, {link.latency_s * 1e6:.0f} us"
                self.display.say(f"  {where}: {took}")
        return links

    def _with_num_processes(self, num_processes: int) -> TrainingRun:
        """Return the run for this number of processes, if its config allows that.

        The tensor-parallel degree stays, because layers are divided by it. The number of pipeline ranks stays if
        some number of replicas fills all processes. Otherwise the number of replicas stays, or becomes the largest
        that leaves none idle.
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
        log = config.log
        if log.waiting_s and dp > 1:
            self.display.say(
                f"log.waiting_s: {log.waiting_s:g} is ignored, because the collectives of {dp} replicas do not wait.",
                warning=True,
            )
            log = msgspec.structs.replace(log, waiting_s=0.0)
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
                log=log,
            ),
        )

    def _prepare_as_worker(self, resume: bool | None, begun: str | None) -> bool:
        """Prepare on rank 0 while the others wait; return whether to continue from a checkpoint.

        ``begun`` is the id of the run that ranks before a restart have begun, if it is known.
        """
        prepared, checkpoints = LongBarrier(), self.checkpoints
        if checkpoints is not None and begun is not None:
            # A host that joins later may have the checkpoints of another run.
            checkpoints.set_aside(begun)
        steps = None if checkpoints is None else checkpoints.all_steps()
        go_on = self._resolve_resume(resume, steps)
        failure: PipeloomError | None = None
        if dist.get_rank() == 0:
            try:
                self._prepare_folder(go_on)
            except PipeloomError as error:
                failure = error
        failed = prepared.hear("waiting for rank 0 to prepare the run", int(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            # Rank 0 reports the reason.
            os._exit(2)
        if checkpoints is not None and not go_on and checkpoints.replicas.is_first:
            checkpoints.clear()
        return go_on


def _has_declared_hosts(cluster: RankSpec, stages: tuple[int, ...], hosts: tuple[int, ...]) -> bool:
    """Return whether there are as many ranks or hosts as a cluster declares."""
    if cluster.hosts:
        return len(cluster.hosts) == len(stages)
    return all(max(link.hosts) <= max(hosts) for link in cluster.links)


def _among(links: tuple[HostLink, ...], hosts: tuple[int, ...]) -> tuple[HostLink, ...]:
    """Return the links that join two of these hosts."""
    return tuple(link for link in links if set(link.hosts) <= set(hosts))


@contextmanager
def keep_default_dtype() -> Iterator[None]:
    """Restore torch's default dtype, which building a model sets."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
