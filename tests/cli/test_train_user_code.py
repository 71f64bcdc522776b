"""What `pipeloom train` says when the user's own code is at fault: one line, exit code 2, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeloom import heartbeat
from pipeloom.cli.app import run

pytestmark = pytest.mark.ranks

TASK = """
import torch
from torch import nn
import pipeloom as pl

class Token(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(9, 4)
    def forward(self, ids, images):
        return torch.cat([self.word(ids), images])[: len(ids)]

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 9)
    def forward(self, x):
        return HEAD

def build_model(seed):
    torch.manual_seed(seed)
    vision = pl.Module("vision", [nn.Linear(3, 4)], reads="images", hidden=("instances", 4), output=("instances", 4),
                       inputs=lambda part: torch.ones(len(part.instances), 3))
    lm = pl.Module("lm", [Token(), nn.Tanh(), Head()], reads="sequence", after=("vision",), hidden=("tokens", 4),
                   output=("tokens", 9), inputs=lambda part: torch.cat([sample[0] for sample in part.samples]))
    return pl.Model([vision, lm], lambda out, part: LOSS, lambda sample: len(sample[0]))

def batches(num_iterations):
    for i in range(num_iterations):
        yield [(torch.tensor([1, 2, 3]), IMAGES, f"{i}.{j}") for j in range(3)]

def describe(sample):
    return {"id": sample[2], "text_tokens": len(sample[0]) - sample[1], "image_tokens": [1] * sample[1]}

def evaluate(model):
    return EVALUATE
"""
CONFIG = """
name = "t"
task = "json.py"
iterations = 3
[layout]
ranks = 1
[packing]
token_budget = 6
"""
SLOW_CHECKPOINTS = """
import time
from pipeloom.runtime.checkpoint.resume import PendingCheckpoint
write = PendingCheckpoint._run
PendingCheckpoint._run = lambda *given: (time.sleep(4), write(*given))
"""
NO_TARGETS = """
from dataclasses import replace
build = build_model

def build_model(seed):
    return replace(build(seed), num_targets=lambda sample: 0 if sample[2][0] == "2" else 3, targets="target tokens")
"""
FAILING_CALLBACK = """
class Failing(pl.Callback):
    def on_step(self, row):
        if row.iteration == 2:
            raise KeyError("step")

def callbacks():
    return [Failing()]
"""
GOOD = {"HEAD": "self.out(x)", "LOSS": "out.logsumexp(1).sum()", "IMAGES": "1", "EVALUATE": "{'score': 1.0}"}


def config(folder: Path, **changes: str) -> Path:
    """A task file, named like a library, with some of its expressions replaced."""
    text = TASK
    for name, code in (GOOD | changes).items():
        text = text.replace(name, code)
    (folder / "json.py").write_text(text)
    path = folder / "train.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HEAD": "None"}, "module 'lm'.layers[2]: returned a NoneType; return one tensor"),
        ({"HEAD": "self.out(x)[0] + nonsense"}, "module 'lm'.layers[2]: raised NameError"),
        ({"LOSS": "3.0"}, "model.loss: returned a float"),
        ({"LOSS": "out"}, "model.loss: has shape (6, 9); return the sum over all targets, a scalar"),
        ({"LOSS": "out.detach().sum()"}, "model.loss: depends on no trained parameter"),
        ({"IMAGES": "0"}, "module 'vision': had no work in the 3 measured batches"),
    ],
)
def test_faults_found_while_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    assert run(["train", str(config(tmp_path, **changes)), "--runs", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_does_not_say_how_layers_are_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    path.write_text(path.read_text() + "[parallel]\ntp = 2\n")
    assert run(["train", str(path), "--runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "has no `parallelize` for 2 tensor-parallel ranks; give at least one" in error
    assert error.count("\n") == 1


def test_a_loss_that_is_no_number_stops_training_and_leaves_nothing_old(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "summary.json").write_text("of an earlier run")
    path = config(tmp_path, LOSS="out.sum() * float('nan')")
    assert run(["train", str(path), "--runs", str(tmp_path)]) == 2
    assert "iteration 0: the loss is nan; lower the learning rate" in capfd.readouterr().err
    assert not (tmp_path / "t" / "summary.json").exists()


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        (
            {"LOSS": "out.sum() * (float('nan') if part.samples[0][2][0] == '2' else 1.0)"},
            "",
            "iteration 2: the loss is nan",
        ),
        (
            {},
            NO_TARGETS,
            "iteration 2: has 0 target tokens in samples '2.0', '2.1', '2.2'; leave them out, or use larger",
        ),
        ({}, FAILING_CALLBACK, "callback Failing.on_step: raised KeyError"),
    ],
)
def test_an_error_does_not_cost_the_checkpoint_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, str], more: str, message: str
) -> None:
    path = config(tmp_path, **changes)
    path.write_text(path.read_text() + "[checkpoint]\nevery = 1\n")
    with (tmp_path / "json.py").open("a") as task:
        task.write(SLOW_CHECKPOINTS + more)
    restarts = "0" if changes else "1"  # rejected input is not tried again
    assert run(["train", str(path), "--runs", str(tmp_path), "--restarts", restarts]) == 2
    said = capfd.readouterr()
    assert message in said.err
    assert "restarting from" not in said.out
    assert (tmp_path / "t" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.full
def test_a_failing_evaluation_loses_no_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, EVALUATE="1 / 0")
    assert run(["train", str(path), "--runs", str(tmp_path)]) == 2
    assert "evaluate(): raised ZeroDivisionError" in capfd.readouterr().err
    assert json.loads((tmp_path / "t" / "summary.json").read_text())["iterations"] == 3
    assert (tmp_path / "t" / "timeline.html").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(["train", str(config(tmp_path)), "--runs", str(tmp_path / "file")]) == 2
    assert "cannot be written: not a directory; remove the file" in capsys.readouterr().err


@pytest.mark.full
def test_a_long_evaluation_after_training_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.VARIABLE, "1")
    path = config(tmp_path, EVALUATE=f"__import__('time').sleep({heartbeat.EVERY_S + 1}) or {{}}")
    assert run(["train", str(path), "--runs", str(tmp_path)]) == 0
    assert "pipeloom: evaluating" in capfd.readouterr().err
