"""Every way in has a page with a script that runs as it stands, and the files of examples are what pages show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipeloom.io.document import convert
from pipeloom.training.config import RunConfig
from pipeloom.training.folder_task import DataConfig, ModelConfig
from tests.examples.on_ranks import EXAMPLES

DOCS = EXAMPLES.parent / "docs"
SCRIPTS = {
    "from-transformers": "from_transformers.py",
    "from-diffusers": "from_diffusers.py",
    "bring-your-own-model": "own_model.py",
    "data": "own_data.py",
}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("page", SCRIPTS)
def test_the_page_has_one_script_which_is_the_example(page: str) -> None:
    (code,) = blocks(page, "python")
    assert (EXAMPLES / SCRIPTS[page]).read_text().endswith(code)
    assert len(code.splitlines()) <= 120


def test_the_page_on_training_shows_a_whole_run() -> None:
    (task,) = blocks("train", "python")
    assert task == (EXAMPLES / "own_task" / "task.py").read_text()
    assert blocks("train", "toml")[0] == (EXAMPLES / "own_task" / "train.toml").read_text()


@pytest.mark.parametrize("page", ["train", "train-config", "checkpoints", "evaluation", "memory"])
def test_what_a_page_shows_of_a_file_is_read(page: str) -> None:
    least = {"name": "x", "iterations": 1, "layout": {"ranks": 1}, "packing": {"token_budget": 1}, "task": "x.py"}
    shown = blocks(page, "toml")
    assert shown
    for text in shown:
        convert(least | tomllib.loads(text), RunConfig, f"{page}.md")


def test_the_file_alone_is_read() -> None:
    (text,) = blocks("data", "toml")
    config = convert(tomllib.loads(text), RunConfig, "data.md")
    convert(config.model, ModelConfig, "data.md: model")
    convert(config.data, DataConfig, "data.md: data")


# Of every change: the same models, each with a test of its own in this folder or in `tests/runtime/test_docs.py`.
@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("page", SCRIPTS)
def test_the_script_of_the_page_runs_and_learns(page: str, tmp_path: Path) -> None:
    (code,) = blocks(page, "python")
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"loss (\S+) to (\S+), weights in runs/", done.stdout)[0])
    assert last < first


@pytest.mark.full
@pytest.mark.ranks
def test_the_run_of_the_page_learns_and_goes_on(tmp_path: Path) -> None:
    for name, kind in (("task.py", "python"), ("train.toml", "toml")):
        (tmp_path / name).write_text(blocks("train", kind)[0])
    command = [sys.executable, "-m", "pipeloom", "train", "train.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "after 30 iterations: " in done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "own_task" / "summary.json").read_text())
    assert summary["loss_last"] < summary["loss_first"] / 3
    assert summary["evaluation"]["right"] > 0.5
    again = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    # Nothing is left to train, so the results of the run remain.
    assert (tmp_path / "runs" / "own_task" / "timeline.html").exists()
    after = json.loads((tmp_path / "runs" / "own_task" / "summary.json").read_text())
    assert after["comparison"] == summary["comparison"] != {}
    assert after["evaluation"] == summary["evaluation"]
