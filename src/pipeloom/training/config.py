"""Everything about a training run that can be written down: what train.toml holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeloom.bounds import Budget, Count, Number, Ranks, Seed, Threads, Wait
from pipeloom.cost import check_strategies
from pipeloom.errors import InputError, check_count, check_not_negative, check_positive, visible_line
from pipeloom.io import read_spec
from pipeloom.layout import ModulePlacement
from pipeloom.limits import MAX_WAIT_S
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
    """How the model is laid over the ranks."""

    ranks: Ranks
    kind: Literal["separate", "encoder_first", "chosen", "arranged", "file"] = "separate"
    """``separate``: every module over all ranks. ``encoder_first``: encoders whole on rank 0.
    ``chosen``: the fastest of those that are tried on the first batches, sizes and segments included. ``arranged``:
    partition and placement of all modules chosen together. ``file``: the one at ``path``."""
    modules: dict[str, ModulePlacement] = {}
    path: str = ""
    """A `pipeloom.layout/1`, relative to the file."""
    elastic: bool = False
    """Train on as many processes as torchrun starts, under a layout made for them; false: there must be as many as the
    file says."""
    adapt: bool | None = None
    """Move layers at a checkpoint where a rank stays slow and another layout is planned to pay; leave out: yes, but not
    where the layout is given."""

    def __post_init__(self) -> None:
        """Refuse layouts without ranks, and choices that are made already."""
        check_count("layout.ranks", self.ranks)
        if self.ranks > MOST_RANKS:
            raise InputError("layout.ranks", f"{self.ranks} is above {MOST_RANKS}")
        decided = {"chosen": "is to be chosen", "arranged": "is to be arranged", "file": "is in a file"}
        # Where layouts are chosen, a table that says nothing says that the module's instances are not dealt.
        stated = [name for name, place in self.modules.items() if self.kind != "chosen" or place != ModulePlacement()]
        if self.kind in decided and stated:
            raise InputError(
                "layout.modules",
                f"states {', '.join(stated)}, but the layout {decided[self.kind]}",
                f'leave [layout.modules] out, or kind = "{self.kind}"',
            )
        if self.kind == "file" and not self.path:
            raise InputError("layout.path", "is missing", "name a layout that `pipeloom arrange` wrote")
        if self.elastic and (self.modules or self.kind == "file"):
            named = ", ".join(self.modules) or self.path
            raise InputError(
                "layout.elastic", f"is true, but {named} is for {self.ranks} ranks", 'use kind = "chosen" or "separate"'
            )
        if self.path and self.kind != "file":
            raise InputError("layout.path", f"is given, kind is {self.kind!r}", 'use kind = "file"')


class ParallelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parallelism beside the pipeline."""

    dp: Ranks = 1
    """Replicas of the pipeline; they divide the samples of each batch among them."""
    tp: Ranks = 1
    """Ranks over which the layers of each pipeline rank are divided, as the model's ``parallelize`` says."""
    shard: Literal["fsdp"] | None = None
    """``fsdp``: replicas hold parameters, gradients and optimiser state in shards; leave out: each holds all."""

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
        """As a layout has them."""
        return Parallelism(tensor=self.tp, data=self.dp)

    def __post_init__(self) -> None:
        """Refuse none at all, and shards for one."""
        for name in ("dp", "tp"):
            check_count(f"parallel.{name}", getattr(self, name))
            if getattr(self, name) > MOST_RANKS:
                raise InputError(f"parallel.{name}", f"{getattr(self, name)} is above {MOST_RANKS}")
        if self.shard is not None and self.dp < 2:
            raise InputError(
                "parallel.shard",
                f"{self.shard!r} shards over replicas, and parallel.dp is {self.dp}",
                "let parallel.dp be 2 or more, or leave parallel.shard out",
            )


class PlannerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long plans are searched and waited for."""

    budget_s: Wait = 0.1
    deadline_s: Budget = DEADLINE_S
    method: str = "default"
    strategies: tuple[Strategy, ...] = ("keep",)
    """How pairs may hold their activations; the planner chooses for each. The first is the base."""
    split_backward: bool = False
    """Whether backwards may be split into input and weight gradients."""
    params: str = ""
    """File with parameters of the search, `pipeloom.search.SearchParams`, relative to the file; empty: the defaults."""
    threads: Threads = 1
    """Threads that search, beside those of the ranks; 0: half of the cores."""

    @property
    def offers_a_choice(self) -> bool:
        """Whether anything but keeping all activations and whole backwards may be planned."""
        return self.strategies != ("keep",) or self.split_backward

    def __post_init__(self) -> None:
        """Refuse budgets that never begin and deadlines that never come."""
        check_positive("planner.budget_s", self.budget_s)
        check_not_negative("planner.deadline_s", self.deadline_s)
        check_strategies("planner.strategies", self.strategies)
        check_not_negative("planner.threads", self.threads)


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ranks compute on."""

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """``cuda``: a GPU for each rank, messages by NCCL; ``auto``: so where there are enough, else the CPU."""
    transport: Literal["direct", "host"] = "direct"
    """``host``: messages by way of the host's memory, so that ranks may share a GPU."""
    autocast: Literal["bf16"] | None = None
    """Run layers and loss under autocast; the model must state the dtypes of shapes that come out of it."""
    compare_contents: Number = 0
    """Of so many batches from the start on, ranks compare what is in the samples too, not their ids and sizes alone."""
    workers: Threads = 2
    """Threads of every rank that load samples of a data set ahead; 0: none."""

    def __post_init__(self) -> None:
        """Refuse negative counts."""
        check_not_negative("runtime.workers", self.workers)
        check_not_negative("runtime.compare_contents", self.compare_contents)


class CheckpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often training is saved, and where."""

    every: Count = 100
    """Iterations from one checkpoint to the next; the end of the run is always saved."""
    path: str = ""
    """Folder, relative to the file; empty: ``checkpoints`` in the run's folder."""
    keep: Count = 2
    """How many of the newest are kept."""
    asynchronous: bool = True
    """Write while training goes on, from copies in host memory; false: training waits."""

    def __post_init__(self) -> None:
        """Refuse what never saves."""
        for name in ("every", "keep"):
            check_count(f"checkpoint.{name}", getattr(self, name))


UNTIL_THE_END = 2**31 - 1
"""Number of iterations of a run that trains on all batches, where nothing says how many there are."""


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about a run. Paths are relative to the file."""

    name: str
    task: str = ""
    """Python file with ``build_model``, ``batches``, ``describe`` and, if wanted, others; a file needs it, or
    ``model.transformers``."""
    iterations: Count
    layout: LayoutConfig
    packing: PackingSpec
    parallel: ParallelConfig = ParallelConfig()
    seed: Seed = 0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    model: dict[str, Any] = {}
    """Keyword arguments of ``build_model``."""
    data: dict[str, Any] = {}
    """Keyword arguments of ``batches``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    """Leave out: a cosine for the optimiser of this file, and none for the task's own."""
    evaluation: EvaluationConfig | None = None
    """Leave out: no evaluation while training runs."""
    ema: EmaConfig | None = None
    """Leave out: no average of the weights."""
    log: LogConfig = LogConfig()
    cluster: RankSpec = RankSpec()
    planner: PlannerConfig = PlannerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    checkpoint: CheckpointConfig | None = None
    """Leave out: nothing is saved."""
    timeout_s: Wait = 120.0
    """After which a rank that waits for another gives up, and training stops."""
    tuning: TuningSpec | None = None
    """PipeTune's techniques, chosen one by one; leave out: the best of all."""

    @property
    def plans_packing(self) -> bool:
        """Whether the size of microbatches is a part of the search."""
        return self.packing.policy == "planned" or self.tuning is not None

    @property
    def num_processes(self) -> int:
        """Pipeline ranks of all replicas, and all tensor-parallel ranks of each."""
        return self.layout.ranks * self.parallel.num_beside

    def __post_init__(self) -> None:
        """Refuse runs of no length and names that are no folder."""
        check_count("iterations", self.iterations)
        if not self.timeout_s >= _SHORTEST_TIMEOUT_S:
            problem = f"{self.timeout_s:g} is below {_SHORTEST_TIMEOUT_S:g}"
            raise InputError("timeout_s", problem, "ranks take that long to find each other")
        self._check_bounds()
        self._check_hosts()
        unseen = visible_line(self.name) != self.name
        if not self.name or unseen or any(c in self.name for c in "/\\") or self.name in (".", ".."):
            raise InputError("name", f"{self.name!r} is no folder name", "use letters, digits, '-' and '_'")
        check_always_packs("packing.policy", self.packing.policy)
        check_loop(self.optimizer, self.scheduler, self.evaluation, self.ema)
        if self.tuning is not None:
            if not self.tuning.searches and self.layout.kind not in ("encoder_first", "file"):
                raise InputError(
                    "layout.kind",
                    f"{self.layout.kind!r}, tuning.order = {self.tuning.order!r} is for encoders on the first rank",
                    "use 'encoder_first', or let tuning.order be 'search'",
                )
            self.tuning.check_choices(self.planner.strategies, self.planner.split_backward)

    def _check_hosts(self) -> None:
        """Refuse hosts of other ranks, and links between hosts that no rank is on."""
        hosts, ranks = self.cluster.hosts, self.layout.ranks
        if hosts and len(hosts) != ranks and not self.layout.elastic:
            problem = f"has {len(hosts)} entries, layout.ranks is {ranks}"
            raise InputError("cluster.hosts", problem, "give one for each pipeline rank, or leave it out")
        for i, link in enumerate(self.cluster.links):
            if hosts and not set(link.hosts) <= set(hosts):
                problem = f"{list(link.hosts)}, and the ranks are on hosts {sorted(set(hosts))}"
                raise InputError(f"cluster.links[{i}].hosts", problem, "leave the link out")

    def _check_bounds(self) -> None:
        """Refuse values that would fail late, where nobody knows any more whose they are."""
        if not 0 <= self.seed < 2**63:
            raise InputError("seed", f"{self.seed} is not between 0 and 2**63-1")
        most: dict[str, tuple[float | None, float]] = {
            "iterations": (self.iterations, _MOST_COUNTED),
            "timeout_s": (self.timeout_s, MAX_WAIT_S),
            "planner.budget_s": (self.planner.budget_s, MAX_WAIT_S),
            "planner.deadline_s": (self.planner.deadline_s, MAX_WAIT_S),
            "packing.token_budget": (self.packing.token_budget, _MOST_COUNTED),
        }
        for name, placement in self.layout.modules.items():
            most[f"layout.modules.{name}.segments"] = (placement.segments, _MOST_COUNTED)
            most[f"layout.modules.{name}.sub_microbatch"] = (placement.sub_microbatch, _MOST_COUNTED)
            if placement.sub_microbatch is not None:
                check_count(f"layout.modules.{name}.sub_microbatch", placement.sub_microbatch)
        for field, (value, bound) in most.items():
            if value is not None and value > bound:
                raise InputError(field, f"{value:g} is above {bound:g}")


def read_config(path: Path) -> TrainConfig:
    """Read a train.toml.

    Raises
    ------
    InputError
        Naming the file and the field.
    """
    config = read_spec(path, TrainConfig)
    if not config.task and "transformers" not in config.model:
        remedy = "name a Python file, or a model's folder in [model] transformers; see docs/train.md"
        raise InputError(f"{path}: task", "is missing", remedy)
    _refuse_zeros(msgspec.to_builtins(config), str(path))
    return config


def _refuse_zeros(value: Any, entity: str) -> None:
    """Refuse a text with a character of number 0: no name of a file may have one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_zeros(inner, f"{entity}: {name}" if ": " not in entity else f"{entity}.{name}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _refuse_zeros(inner, f"{entity}[{number}]")
    elif isinstance(value, str) and "\0" in value:
        raise InputError(entity, f"{value!r} has a character of number 0", "leave it out")
