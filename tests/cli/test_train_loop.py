"""The loop by a file: optimiser, rates, evaluation, averages, logs and callbacks in train.toml and its task file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeloom.cli.app import run

pytestmark = pytest.mark.ranks

TASK = """
import pipeloom as pl
from tests.examples import loop_fit
from tests.examples.loop_fit import describe

def build_model(seed):
    return loop_fit.build_model()

def batches(num_iterations, first):
    return loop_fit.batches(first, num_iterations)

def eval_batches(first, count):
    return loop_fit.batches(first + 100, count)

class Told(pl.Callback):
    def on_evaluation(self, evaluated):
        print("told", evaluated.iteration, flush=True)

def callbacks():
    return [Told()]
"""
CONFIG = """
name = "t"
task = "json.py"
iterations = 3
dtype = "bfloat16"
[data]
first = 7
[layout]
ranks = 1
[packing]
token_budget = 20
[optimizer]
name = "Adafactor"
learning_rate = 0.02
decay_vectors = false
[[optimizer.groups]]
match = ["lm.0.*"]
learning_rate = 0.1
[scheduler]
name = "StepLR"
options = { step_size = 1, gamma = 0.5 }
[evaluation]
every = 2
batches = 2
weights = "ema"
data = { count = 5 }
[ema]
decay = 0.5
[log]
peak_flops = 1e11
"""


@pytest.mark.full
def test_a_file_says_all_that_the_loop_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "json.py").write_text(TASK)
    path = tmp_path / "train.toml"
    path.write_text(CONFIG)
    assert run(["train", str(path), "--runs", str(tmp_path / "runs")]) == 0
    folder = tmp_path / "runs" / "t"
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(e["iteration"], e["num_batches"], e["weights"]) for e in lines] == [(2, 2, "ema"), (3, 2, "ema")]
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    # The first group is that of the embedding.
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.1, 0.05, 0.025])
    assert all(0 < row["mfu"] < 1 and row["tokens_per_s"] > 0 for row in rows)
    out = capfd.readouterr().out
    assert "told 2" in out
    assert "Evaluation after 2 iterations: loss" in out
    # The share of the peak, in its column before the plan's.
    assert re.search(r" \d+% fresh, ", out)
    assert json.loads((folder / "summary.json").read_text())["evaluations"] == [
        [e["iteration"], e["loss"]] for e in lines
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"Adafactor"', '"Adamfactor"', "train.toml: optimizer.name: 'Adamfactor' is unknown; use one of "),
        (
            '"lm.0.*"',
            '"ml.0.*"',
            "optimizer.groups[0].match: 'ml.0.*' matches no parameter; an example is 'lm.0.weight'",
        ),
        ('"StepLR"', '"StepLr"', "train.toml: scheduler.name: 'StepLr' is unknown"),
        ("[ema]\ndecay = 0.5", "", "evaluation.weights: is 'ema', but no average is kept; add [ema]"),
        ("decay = 0.5", "decay = 1.0", "ema.decay: 1.0 is not in [0, 1)"),
        ("every = 2", "every = 0", "evaluation.every: 0 is below 1"),
        ("count = 5", "cuont = 5", "json.py: eval_batches(first, cuont): raised TypeError"),
        ("batches = 2", "batches = 0", "evaluation.batches: 0 is below 1"),
    ],
)
def test_what_is_wrong_in_it_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    (tmp_path / "json.py").write_text(TASK)
    path = tmp_path / "train.toml"
    assert old in CONFIG
    path.write_text(CONFIG.replace(old, new))
    assert run(["train", str(path), "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
