"""The settings of a training run in a file: what train.toml holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeloom.bounds import Budget, Count, Number, Ranks, Seed, Threads, Wait
from pipeloom.cost import check_strategies
from pipeloom.errors import InputError, check_count, check_not_negative, check_positive, check_seed, visible_line
from pipeloom.io import read_spec
from pipeloom.layout import ModulePlacement
from pipeloom.limits import MAX_SEED, MAX_WAIT_S
from pipeloom.packing import PackingSpec, check_always_packs
from pipeloom.planner.client import DEADLINE_S
from pipeloom.spec import Parallelism, RankSpec, Strategy
from pipeloom.spec.layout import MOST_RANKS
from pipeloom.training.loop_config import (
    EmaConfig,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    SchedulerConfig,
    check_loop,
)
from pipeloom.tuning import TuningSpec

_SHORTEST_TIMEOUT_S = 1.0
_MOST_COUNTED = 2**31 - 1


class LayoutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model is placed on the ranks."""

    ranks: Ranks
    kind: Literal["separate", "encoder_first", "chosen", "arranged", "file"] = "separate"
    """``separate``: every module over all ranks. ``encoder_first``: encoders whole on rank 0.
    ``chosen``: the fastest of many layouts, planned on the first batches, sizes and segments included. ``arranged``:
    partition and placement of all modules, co-optimized. ``file``: the layout at ``path``."""
    modules: dict[str, ModulePlacement] = {}
    path: str = ""
    """A `pipeloom.layout/1` file, relative to train.toml."""
    elastic: bool = False
    """Train on as many processes as torchrun starts, with a layout made for them. Then neither modules nor a file may
    declare the layout. False: the number of processes must match the configuration."""
    adapt: bool | None = None
    """Move layers at a checkpoint if a rank stays slow and another layout is planned to pay off. Omitted: true, unless
    the layout is declared."""

    def __post_init__(self) -> None:
        """Raise `InputError` for layouts without ranks, and for contradictory fields."""
        check_count("layout.ranks", self.ranks)
        if self.ranks > MOST_RANKS:
            raise InputError("layout.ranks", f"{self.ranks} is above {MOST_RANKS}")
        sources = {"chosen": "is chosen automatically", "arranged": "is co-optimized", "file": "is in a file"}
        # For chosen layouts, an empty table excludes the module from encoder data parallelism.
        declared = [name for name, place in self.modules.items() if self.kind != "chosen" or place != ModulePlacement()]
        if self.kind in sources and declared:
            raise InputError(
                "layout.modules",
                f"declares {', '.join(declared)}, but the layout {sources[self.kind]}",
                f'remove [layout.modules] or kind = "{self.kind}"',
            )
        if self.kind == "file" and not self.path:
            raise InputError("layout.path", "is missing", "name a layout that `pipeloom arrange` wrote")
        if self.elastic and (self.modules or self.kind == "file"):
            named = ", ".join(self.modules) or self.path
            remedy = "remove [layout.modules]" if self.modules else 'use kind = "chosen" or "separate"'
            raise InputError("layout.elastic", f"is true, but {named} is for {self.ranks} ranks", remedy)
        if self.path and self.kind != "file":
            raise InputError("layout.path", f"is set, but kind is {self.kind!r}", 'use kind = "file"')


class ParallelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parallelism beside the pipeline."""

    dp: Ranks = 1
    """Replicas of the pipeline, which share the samples of each batch."""
    tp: Ranks = 1
    """Ranks that share the layers of each pipeline rank, as the model's ``parallelize`` divides them."""
    shard: Literal["fsdp"] | None = None
    """``fsdp``: replicas hold shards of parameters, gradients and optimizer state. Omitted: each holds all."""

    @property
    def num_beside(self) -> int:
        """Processes of each pipeline rank."""
        return self.dp * self.tp

    @property
    def divides_nothing(self) -> bool:
        """Whether every process holds whole layers."""
        return self.tp == 1 and self.shard is None

    @property
    def degrees(self) -> Parallelism:
        """The same as the degrees of a layout."""
        return Parallelism(tensor=self.tp, data=self.dp)

    def __post_init__(self) -> None:
        """Raise `InputError` for degrees out of range, and for shards without replicas."""
        for name in ("dp", "tp"):
            check_count(f"parallel.{name}", getattr(self, name))
            if getattr(self, name) > MOST_RANKS:
                raise InputError(f"parallel.{name}", f"{getattr(self, name)} is above {MOST_RANKS}")
        if self.shard is not None and self.dp < 2:
            raise InputError(
                "parallel.shard",
                f"{self.shard!r} shards over replicas, but parallel.dp is {self.dp}",
                "set parallel.dp to 2 or more, or omit parallel.shard",
            )


class PlannerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Planner settings: time, deadline, and what it may choose."""

    budget_s: Wait = 0.1
    deadline_s: Budget = DEADLINE_S
    method: str = "default"
    strategies: tuple[Strategy, ...] = ("keep",)
    """Memory strategies from which the planner chooses for each pair; the first is the base."""
    split_backward: bool = False
    """Whether the planner may split backwards into input and weight gradients."""
    params: str = ""
    """File with search parameters, `pipeloom.search.SearchParams`, relative to train.toml. Empty: the defaults."""
    threads: Threads = 1
    """Search threads, beside those of the ranks. 0: half of the cores."""

    @property
    def offers_a_choice(self) -> bool:
        """Whether plans may differ from keeping all activations with whole backwards."""
        return self.strategies != ("keep",) or self.split_backward

    def __post_init__(self) -> None:
        check_positive("planner.budget_s", self.budget_s)
        check_not_negative("planner.deadline_s", self.deadline_s)
        check_strategies("planner.strategies", self.strategies)
        check_not_negative("planner.threads", self.threads)


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device, transport and precision of the ranks."""

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """``cuda``: one GPU for each rank, messages by NCCL. ``auto``: ``cuda`` if there are enough GPUs, else ``cpu``."""
    transport: Literal["direct", "host"] = "direct"
    """``host``: send messages through host memory, so that ranks can share a GPU."""
    autocast: Literal["bf16"] | None = None
    """Run layers and loss under autocast. The model must declare the dtypes of output shapes under autocast."""
    compare_contents: Number = 0
    """For this many first batches, ranks compare the samples' contents too, not only ids and sizes."""
    workers: Threads = 2
    """Threads of every rank that load samples of a data set ahead. 0: none."""

    def __post_init__(self) -> None:
        check_not_negative("runtime.workers", self.workers)
        check_not_negative("runtime.compare_contents", self.compare_contents)


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often training is saved, and where."""

    every: Count = 100
    """Iterations between checkpoints. The end of the run is always saved."""
    path: str = ""
    """Folder, relative to train.toml. Empty: ``checkpoints`` in the run's folder."""
    keep: Count = 2
    """Number of the newest checkpoints that are kept."""
    asynchronous: bool = True
    """Write from copies in host memory while training continues. False: training waits."""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            check_count(f"checkpoint.{name}", getattr(self, name))


UNTIL_THE_END = 2**31 - 1
"""Number of iterations of a run over all batches, if their number is unknown."""
Dtype = Literal["float32", "float64", "bfloat16"]
CHOSEN_LAYOUT = LayoutConfig(4, "chosen")
"""The layout of a run that declares none."""


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of a run, in a train.toml or in Python.

    Paths are relative to the file, or to the run's folder in `fit`.
    """

    name: str | None = None
    """Omitted: the name of the run's folder."""
    task: str = ""
    """Python file with ``build_model``, ``batches``, ``describe`` and optional functions. A file needs this field or
    ``model.transformers``."""
    iterations: Count = UNTIL_THE_END
    """Most batches to train on. Omitted: all."""
    layout: LayoutConfig = CHOSEN_LAYOUT
    packing: PackingSpec | None = None
    """Omitted: about two microbatches for each rank, from the first batches."""
    parallel: ParallelConfig = ParallelConfig()
    seed: Seed = 0
    dtype: Dtype | None = None
    """Omitted: float32, or torch's default dtype in `fit`."""
    model: dict[str, Any] = {}
    """Keyword arguments of ``build_model``."""
    data: dict[str, Any] = {}
    """Keyword arguments of ``batches``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    """Omitted: a cosine for ``optimizer``, and constant rates in `fit` or for the task's own optimizer."""
    evaluation: EvaluationConfig | None = None
    """Omitted: no evaluation during training; in `fit` with ``evaluate_on``, every 100 iterations."""
    ema: EmaConfig | None = None
    """Omitted: no average of the weights."""
    log: LogConfig = LogConfig()
    cluster: RankSpec = RankSpec()
    planner: PlannerConfig = PlannerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig | None = None
    """Omitted: nothing is saved; in `fit`, the defaults of `CheckpointConfig`."""
    timeout_s: Wait = 120.0
    """Seconds after which a rank that waits for another gives up, and training stops."""
    tuning: TuningSpec | None = None
    """PipeTune's techniques, chosen one by one. Omitted: the best of all."""

    @property
    def plans_packing(self) -> bool:
        """Whether the search chooses the size of microbatches."""
        return self.packing is None or self.packing.policy == "planned" or self.tuning is not None

    @property
    def num_processes(self) -> int:
        """Number of processes: pipeline ranks of all replicas, and all tensor-parallel ranks of each."""
        return self.layout.ranks * self.parallel.num_beside

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations)
        if not self.timeout_s >= _SHORTEST_TIMEOUT_S:
            problem = f"{self.timeout_s:g} is below {_SHORTEST_TIMEOUT_S:g}"
            raise InputError("timeout_s", problem, "ranks need that long to connect")
        self._check_bounds()
        self._check_hosts()
        if self.log.waiting_s and self.num_processes != self.layout.ranks:
            problem = f"{self.log.waiting_s:g}, but there are replicas or divided layers, whose collectives do not wait"
            raise InputError("log.waiting_s", problem, "omit it, or train without [parallel]")
        if self.name is not None:
            _check_name(self.name)
        if self.packing is not None:
            check_always_packs("packing.policy", self.packing.policy)
        if self.tuning is not None:
            if not self.tuning.searches and self.layout.kind not in ("encoder_first", "file"):
                raise InputError(
                    "layout.kind",
                    f"{self.layout.kind!r}, but tuning.order = {self.tuning.order!r} needs encoders on the first rank",
                    "use 'encoder_first', or let tuning.order be 'search'",
                )
            self.tuning.check_choices(self.planner.strategies, self.planner.split_backward)

    def _check_hosts(self) -> None:
        """Check that there is one host for each rank, and that every link joins hosts of ranks."""
        hosts, ranks = self.cluster.hosts, self.layout.ranks
        if hosts and len(hosts) != ranks and not self.layout.elastic:
            problem = f"has {len(hosts)} entries, but layout.ranks is {ranks}"
            raise InputError("cluster.hosts", problem, "give one for each pipeline rank, or omit it")
        for i, link in enumerate(self.cluster.links):
            if hosts and not set(link.hosts) <= set(hosts):
                problem = f"{list(link.hosts)}, but the ranks are on hosts {sorted(set(hosts))}"
                raise InputError(f"cluster.links[{i}].hosts", problem, "remove the link")

    def _check_bounds(self) -> None:
        """Check upper bounds here, so that errors name the field."""
        check_seed("seed", self.seed, MAX_SEED)
        most: dict[str, tuple[float | None, float]] = {
            "iterations": (self.iterations, _MOST_COUNTED),
            "timeout_s": (self.timeout_s, MAX_WAIT_S),
            "planner.budget_s": (self.planner.budget_s, MAX_WAIT_S),
            "planner.deadline_s": (self.planner.deadline_s, MAX_WAIT_S),
            "packing.token_budget": (None if self.packing is None else self.packing.token_budget, _MOST_COUNTED),
        }
        for name, placement in self.layout.modules.items():
            most[f"layout.modules.{name}.segments"] = (placement.segments, _MOST_COUNTED)
            most[f"layout.modules.{name}.sub_microbatch"] = (placement.sub_microbatch, _MOST_COUNTED)
            if placement.sub_microbatch is not None:
                check_count(f"layout.modules.{name}.sub_microbatch", placement.sub_microbatch)
        for field, (value, bound) in most.items():
            if value is not None and value > bound:
                raise InputError(field, f"{value:g} is above {bound:g}")


TrainConfig = RunConfig
"""Deprecated name of `RunConfig`."""


class RunFile(RunConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A config with the fields that a file must state."""

    name: str
    iterations: Count
    layout: LayoutConfig
    packing: PackingSpec

    def __post_init__(self) -> None:
        """Raise `InputError` for a table that needs another one, before the model is built."""
        super().__post_init__()
        check_loop(self.optimizer, self.scheduler, self.evaluation, self.ema)


def _check_name(name: str) -> None:
    if not name or visible_line(name) != name or any(c in name for c in "/\\") or name in (".", ".."):
        raise InputError("name", f"{name!r} is not a folder name", "use letters, digits, '-' and '_'")


def read_config(path: Path) -> RunFile:
    """Read a train.toml.

    Raises
    ------
    InputError
        If a field is wrong; the message names the file and the field.
    """
    config = read_spec(path, RunFile)
    if not config.task and "transformers" not in config.model:
        remedy = "name a Python file, or a model's folder in [model] transformers; see docs/train-config.md"
        raise InputError(f"{path}: task", "is missing", remedy)
    _check_null_characters(msgspec.to_builtins(config), str(path))
    return config


def _check_null_characters(value: Any, entity: str) -> None:
    """Raise `InputError` for a text with a null character, which no file name can have."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_null_characters(inner, f"{entity}: {name}" if ": " not in entity else f"{entity}.{name}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_null_characters(inner, f"{entity}[{number}]")
    elif isinstance(value, str) and "\0" in value:
        raise InputError(entity, f"{value!r} contains a null character", "remove it")
