"""What a run knows of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement
from pipeloom.packing import PackingSpec
from pipeloom.spec import RankSpec
from pipeloom.training.config import CheckpointConfig, LayoutConfig, RunConfig, read_config
from pipeloom.training.job import Job
from pipeloom.training.lock import LOCK
from pipeloom.training.task import Task


@pytest.mark.parametrize(("device", "left"), [("cpu", 1600), ("cuda", 1500)])
def test_on_a_gpu_tensors_do_not_have_all_memory(device: str, left: int) -> None:
    config = RunConfig(
        name="run",
        task="task.py",
        iterations=9,
        layout=LayoutConfig(2),
        packing=PackingSpec(9),
        cluster=RankSpec(memory_capacity_bytes=1600),
    )
    job = Job(config, Task(pl.Model, list), Path("run"))
    job.__dict__["device"] = device
    assert job.cluster.memory_capacity_bytes == left
    assert job.config.cluster.memory_capacity_bytes == 1600


def test_a_chosen_layout_may_exclude_modules_from_encoder_dp() -> None:
    assert LayoutConfig(2, kind="chosen", modules={"vision": ModulePlacement()}).modules
    with pytest.raises(InputError, match="declares vision, but the layout is chosen automatically"):
        LayoutConfig(2, kind="chosen", modules={"vision": ModulePlacement(2)})
    with pytest.raises(InputError, match="declares vision, but the layout is co-optimized"):
        LayoutConfig(2, kind="arranged", modules={"vision": ModulePlacement()})


def test_an_elastic_layout_is_not_declared() -> None:
    for declared, remedy in (
        ({"modules": {"lm": ModulePlacement(2)}}, r"remove \[layout.modules\]"),
        ({"kind": "file", "path": "layout.json"}, 'use kind = "chosen"'),
    ):
        with pytest.raises(InputError, match=f"layout.elastic: is true, but .* is for 2 ranks; {remedy}"):
            LayoutConfig(2, elastic=True, **declared)  # type: ignore[arg-type]


def test_a_file_names_its_run_and_the_length_layout_and_packing_of_it(tmp_path: Path) -> None:
    lines = {
        "name": 'name = "run"',
        "task": 'task = "task.py"',
        "iterations": "iterations = 9",
        "layout": "layout.ranks = 2",
        "packing": "packing.token_budget = 9",
    }
    file = tmp_path / "train.toml"
    for field in lines:
        file.write_text("\n".join(line for name, line in lines.items() if name != field))
        with pytest.raises(InputError, match=rf"train.toml: {field}: is missing"):
            read_config(file)
    file.write_text("\n".join(lines.values()))
    config = read_config(file)
    assert (config.name, config.iterations, config.layout, config.packing) == (
        "run",
        9,
        LayoutConfig(2),
        PackingSpec(9),
    )


def test_a_config_in_python_may_declare_nothing() -> None:
    job = Job(RunConfig(), Task(pl.Model, list), Path("runs/fit-2"))
    assert (job.name, job.dtype, job.config.num_processes) == ("fit-2", "float32", 4)
    assert job.config.plans_packing


@pytest.mark.parametrize(("path", "num_locks"), [("", 1), (".", 1), ("saved", 1), ("../saved", 2)])
def test_a_run_locks_each_of_its_folders_once(tmp_path: Path, path: str, num_locks: int) -> None:
    folder = tmp_path / "run"
    config = RunConfig(checkpoint=CheckpointConfig(path=path))
    with Job(config, Task(pl.Model, list), folder, file=folder / "train.toml").alone():
        assert len([*tmp_path.rglob(LOCK)]) == num_locks
