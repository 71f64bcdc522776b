"""A row of the covering set as a training run: its settings, as train.toml has them, and what its ranks do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from pipeloom.cost import LayerFit, Profile, StrategyFit
from pipeloom.errors import ExecutionError, PipeloomError
from pipeloom.io import write_layout
from pipeloom.layout import ModulePlacement, replicated, separate
from pipeloom.layout.layouts import with_encoder_dp
from pipeloom.training import RunConfig, Summary, Task, TrainingRun, finish
from pipeloom.training.job import Job
from pipeloom.training.rank import train_rank

from . import task
from .covering import Row

PROCESSES, TOKENS = 4, 110
CAPACITY_BYTES = {"tp": 1_600_000, "none": 1_300_000}
MOST_BYTES = 1_920_000
"""Of all pipeline ranks where strategies are chosen, by parallelism or of all others: too little to keep everything
where layouts are stated."""
_PARALLEL: Mapping[str, dict[str, Any]] = {
    "none": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "fsdp": {"dp": 2, "shard": "fsdp"},
}
_MODULES: Mapping[str, dict[str, Any]] = {
    # Dealt where there are tensor-parallel ranks, pipelined here, whole on every pipeline rank in the file.
    "separate": {"vision": {"sub_microbatch": 2, "on_tensor_ranks": "dealt"}, "lm": {"segments": 2}},
    "encoder_first": {"vision": {"sub_microbatch": 2}},
}
_LAYOUT_FILE = "layout.json"


def settings_of(row: Row) -> dict[str, Any]:
    """What train.toml says."""
    chosen = row["strategies"] == "chosen"
    capacity = CAPACITY_BYTES.get(row["parallel"], MOST_BYTES)
    layout = {"ranks": num_ranks(row), "kind": row["layout"], "modules": _MODULES.get(row["layout"], {})}
    if row["layout"] == "file":
        layout["path"] = _LAYOUT_FILE
    made = {
        "name": "-".join(row.values()),
        "iterations": task.ITERATIONS,
        "seed": task.SEED,
        "dtype": "float64",
        "model": model_of(row),
        "layout": layout,
        "packing": {"token_budget": TOKENS, "policy": row["policy"]},
        "parallel": _PARALLEL[row["parallel"]],
        # No plan is late: what is told of is what comes, not how fast this machine is.
        "planner": {
            # What may be split is found only once whole backwards have been searched, beside other work too.
            "budget_s": 1.0 if row["split"] == "split" else 0.05,
            "deadline_s": 120.0,
            "strategies": ["keep", "selective", "recompute", "offload"] if chosen else [row["strategies"]],
            "split_backward": row["split"] == "split",
        },
        "cluster": {"memory_capacity_bytes": capacity // num_ranks(row)} if chosen else {},
    }
    if row["early"] == "clusters":
        made["tuning"] = {"pack": row["policy"], "order": "clusters"}
    elif row["early"] != "default":
        made["tuning"] = {"pack": row["policy"], "precompute": row["early"]}
    return made


def num_ranks(row: Row) -> int:
    """Pipeline ranks: all processes, or half of them."""
    return PROCESSES if row["parallel"] == "none" else PROCESSES // 2


def model_of(row: Row) -> dict[str, Any]:
    """Arguments of ``build_model``."""
    return {"frozen": row["encoder"] == "frozen"}


def invented(row: Row) -> Profile:
    """Costs that take no time to measure, are the same wherever tests run, and make every choice worth while."""
    held = (0.0, 0.0, 400.0, 0.0)
    fit = LayerFit(
        forward_s=(1e-4, 0.0, 1e-6, 0.0),
        backward_s=(2e-4, 0.0, 2e-6, 0.0),
        activation_bytes=held,
        strategies=StrategyFit(
            # Less than the whole, so that whoever may split does, however short the search.
            input_gradient_s=(6e-5, 0.0, 6e-7, 0.0),
            weight_gradient_s=(6e-5, 0.0, 6e-7, 0.0),
            weight_gradient_bytes=held,
            selective_forward_s=(1.1e-4, 0.0, 1.1e-6, 0.0),
            selective_backward_s=(2.4e-4, 0.0, 2.4e-6, 0.0),
            selective_bytes=(0.0, 0.0, 200.0, 0.0),
            offload_s=(2e-5, 0.0, 2e-7, 0.0),
            load_s=(2e-5, 0.0, 2e-7, 0.0),
            given_bytes=(0.0, 0.0, 40.0, 0.0),
            unsaved_bytes=(0.0, 0.0, 0.0, 0.0),
            workspace_bytes=(0.0, 0.0, 80.0, 0.0),
        ),
    )
    modules = task.build_model(task.SEED, **model_of(row)).spec.modules
    kinds = [f"{module.name}/{layer.kind}" for module in modules for layer in module.flat_layers]
    return Profile("invented", dict.fromkeys(kinds, fit), dict.fromkeys(kinds, 1e-3))


def run_of(row: Row, folder: Path) -> TrainingRun:
    """A row's run, in a folder of its own."""
    config = msgspec.convert(settings_of(row), RunConfig)
    here = folder / config.name
    here.mkdir()
    if row["layout"] == "file":
        spec = task.build_model(task.SEED, **model_of(row)).spec
        places = {"vision": ModulePlacement(1, 2), "lm": ModulePlacement(2)}
        layout = with_encoder_dp(
            replicated(separate(spec, num_ranks(row), places, lambda *_: 1.0), ["vision"]), ["vision"]
        )
        write_layout(here / _LAYOUT_FILE, layout)
    given = Task(task.build_model, task.batches, task.describe, task.evaluate, task.optimizer)
    return TrainingRun(config, given, here / "run", here / "train.toml", profile=invented(row))


def prepare(run: TrainingRun) -> TrainingRun:
    """All that comes before the ranks start, as `TrainingRun.train` does it."""
    run.folder.mkdir()
    run.prepare().compile_kernels()
    return run


def train_rows(jobs: list[Job]) -> list[Summary | None]:
    """Train one run after the other as one rank: starting ranks takes longer than these runs, and so does drawing."""
    found = []
    with patch.multiple(finish, timeline_html=_undrawn, timeline_svg=_undrawn):
        for job in jobs:
            try:
                found.append(train_rank(job, go_on=False))
            except PipeloomError as error:
                raise ExecutionError(f"{job.config.name}: {error}") from error
    return found


def _undrawn(*_: Any, **__: Any) -> str:
    return ""
