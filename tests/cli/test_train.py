"""`pipeloom train` from its file to what it leaves behind, and what it says of files that are wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import pipeloom
from pipeloom.cli.app import run
from pipeloom.cli.train import with_chosen_layout
from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement
from pipeloom.plan import from_text, verify
from pipeloom.training import read_config
from pipeloom.tuning import TuningSpec

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_vlm"


def config(folder: Path, *edits: tuple[str, str]) -> Path:
    """The example's train.toml, made small, with some of its lines replaced."""
    text = (EXAMPLE / "train.toml").read_text()
    small = (('"task.py"', f'"{EXAMPLE / "task.py"}"'), ("ranks = 4", "ranks = 2"), ("_batch = 48", "_batch = 6"))
    for old, new in (*small, *edits):
        assert old in text
        text = text.replace(old, new)
    path = folder / "train.toml"
    path.write_text(text)
    return path


def test_a_short_run_leaves_everything_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    choice = 'strategies = ["recompute", "offload"]\nsplit_backward = true\n'
    path = config(tmp_path, ("budget_s", choice + "budget_s"))
    assert run(["train", str(path), "--runs", str(tmp_path / "runs"), "--iterations", "3", "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    folder = tmp_path / "runs" / "digits_vlm"
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["iterations"] == summary["plans_fresh"] + summary["plans_fallback"] == 3
    for field in ("loss_first", "loss_last", "mean_gap", "mean_planned_s", "mean_measured_s"):
        assert summary[field] >= 0
    # What the example's `evaluate` returns, by its own names.
    assert set(summary["evaluation"]) >= {"digit_accuracy", "exact_match"}
    assert set(summary["comparison"]) == {"1f1b", "interleaved", "per-batch plan"}
    plans = sorted((folder / "plans").iterdir())
    assert [plan.name for plan in plans] == ["00000.plan", "00001.plan", "00002.plan"]
    for plan in plans:
        verify(from_text(plan.read_text()))
        words = {a.strategy for actions in from_text(plan.read_text()).ranks for a in actions if a.verb == "F"}
        assert {each for word in words for each in word.split(",")} <= {"recompute", "offload"}
    setup = json.loads((folder / "setup.json").read_text())
    assert (setup["layout"]["num_ranks"], setup["layout"]["parallelism"]) == (2, {"tensor": 1, "data": 1})
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"planned", "measured"} <= {str(e.get("args", {}).get("name")) for e in events if e["ph"] == "M"}
    page = (folder / "timeline.html").read_text()
    assert "planned" in page
    assert "measured" in page
    assert "<script src=" not in page, "the page works offline"
    assert "<svg" in (folder / "comparison.svg").read_text()
    assert pipeloom.__version__


@pytest.mark.soak
def test_losses_do_not_depend_on_degrees_of_parallelism(tmp_path: Path) -> None:
    """Undivided, then sharded, then all kinds together from its checkpoint."""
    found = []
    for parallel, iterations in (("", 4), ('dp = 2\nshard = "fsdp"', 2), ('dp = 2\ntp = 2\nshard = "fsdp"', 4)):
        path = config(
            tmp_path,
            ("[layout]\n", f"[parallel]\n{parallel}\n[checkpoint]\n[layout]\n"),
            ("seed = 0", 'seed = 0\ndtype = "float64"'),
            ("waiting_s = 20", "waiting_s = 0"),
        )
        runs = tmp_path / ("divided" if parallel else "whole")
        go_on = ["--resume"] if "tp" in parallel else []
        # All are in the warm-up, where rates do not depend on the number of iterations.
        assert run(["train", str(path), "--runs", str(runs), "--iterations", str(iterations), *go_on]) == 0
        rows = (runs / "digits_vlm" / "history.jsonl").read_text().splitlines()
        found.append([json.loads(row)["loss"] for row in rows])
    assert found[1] == pytest.approx(found[0][:2], rel=1e-9)
    assert found[2] == pytest.approx(found[0], rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks = 2", "ranks = 0", "layout.ranks: 0 is below 1"),
        ("[layout]\n", "[parallel]\ndp = 0\n[layout]\n", "parallel.dp: 0 is below 1"),
        ("[layout]\n", "[parallel]\ntp = 0\n[layout]\n", "parallel.tp: 0 is below 1"),
        (
            "[layout]\n",
            '[parallel]\nshard = "fsdp"\n[layout]\n',
            "parallel.shard: 'fsdp' shards over replicas, but parallel.dp is 1; set parallel.dp to 2 or more",
        ),
        ("ranks = 2", "ranks = 50", "has 10 layers for 50 ranks"),
        ("iterations = 250", 'iterations = "x"', "iterations: 'x' is not an integer"),
        ("seed = 0", "seed = 0\nsede = 1", "sede: is not a known field; did you mean seed?"),
        ("modules.vision]", "modules.visoin]", "module 'visoin': is unknown; the model has vision, lm"),
        ("token_budget = 200", "token_budget = 20", "tokens exceed the token budget of 20; raise packing.token_budget"),
        ("documents_per", "documentz_per", "task.py: batches(num_iterations, documentz_per_batch): raised TypeError"),
        ("budget_s", "strategies = []\nbudget_s", "planner.strategies: is empty; give at least keep"),
        ("budget_s", 'strategies = ["kepe"]\nbudget_s', "planner.strategies[0]: 'kepe'"),
        ("budget_s = 0.05", "budget_s = -1", "planner.budget_s: -1 is not positive"),
        ("deadline_s", 'method = "magic"\ndeadline_s', "planner.method: 'magic' is none of default"),
        ('name = "digits_vlm"', 'name = "../x"', "name: '../x' is not a folder name"),
        ("learning_rate = 3e-3", "learning_rate = nan", "optimizer.learning_rate: nan is not"),
        ("task.py", "tusk.py", "tusk.py' is not a file"),
        ("seed = 0", "seed = -1", "seed: -1 is negative"),
        ("seed = 0", "seed = 0\ntimeout_s = 1e300", "timeout_s: 1e+300 is above 1e+07"),
        ("seed = 0", "seed = 0\ntimeout_s = 0.001", "timeout_s: 0.001 is below 1"),
        ("budget_s = 0.05", "budget_s = 1e300", "planner.budget_s: 1e+300 is above 1e+07"),
        (
            "token_budget = 200",
            f"token_budget = {10**23}",
            "packing.token_budget: an integer of more than 20 digits is above 2147483648",
        ),
        (
            "sub_microbatch = 24",
            f"sub_microbatch = {10**23}",
            "layout.modules.vision.sub_microbatch: an integer of more than 20 digits is above",
        ),
    ],
)
def test_wrong_files_end_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    path = config(tmp_path, (old, new))
    assert run(["train", str(path), "--runs", str(tmp_path / "runs"), "--iterations", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_each_technique_of_tuning_is_one_line(tmp_path: Path) -> None:
    text = (EXAMPLE / "tuned.toml").read_text()
    path = tmp_path / "tuned.toml"
    path.write_text(text)
    assert read_config(path).tuning == TuningSpec()
    for line, field, value in (
        ('pack = "balanced"', "pack", "first_fit"),
        ('micro_batch = "any"', "micro_batch", "fixed"),
        ('order = "search"', "order", "given"),
        ('precompute = "all"', "precompute", "off"),
    ):
        assert line in text
        path.write_text(text.replace(line, f'{field} = "{value}"'))
        assert getattr(read_config(path).tuning, field) == value
    path.write_text(text.replace('pack = "balanced"', 'pack = "exact"'))
    with pytest.raises(InputError, match=r"tuning\.pack: 'exact' may not prove a batch"):
        read_config(path)
    path.write_text(text.replace("token_budget = 200", 'token_budget = 200\npolicy = "exact"'))
    with pytest.raises(InputError, match=r"packing\.policy: 'exact' may not prove a batch"):
        read_config(path)
    # The recurrence alone wants encoders on the first rank; where orders are searched, any layout will do.
    path.write_text(text.replace('kind = "encoder_first"', "").replace('order = "search"', 'order = "clusters"'))
    with pytest.raises(InputError, match=r"layout\.kind: 'separate', but tuning.order = 'clusters' needs encoders on"):
        read_config(path)
    path.write_text(text.replace('kind = "encoder_first"', ""))
    assert read_config(path).layout.kind == "separate"


def test_a_layout_to_be_chosen_leaves_nothing_stated(tmp_path: Path) -> None:
    text = (EXAMPLE / "train.toml").read_text()
    path = tmp_path / "train.toml"
    path.write_text(text)
    chosen = with_chosen_layout(read_config(path)).layout
    assert (chosen.kind, chosen.ranks, chosen.modules) == ("chosen", 4, {})
    path.write_text(re.sub(r"(?m)^(segments|sub_microbatch) = .*$", "", text))
    excluded = with_chosen_layout(read_config(path)).layout.modules
    assert set(excluded.values()) == {ModulePlacement()}
    path.write_text(text.replace("ranks = 4", 'ranks = 4\nkind = "chosen"'))
    problem = r"layout\.modules: declares vision, lm, but the layout is chosen automatically"
    with pytest.raises(InputError, match=problem):
        read_config(path)
    assert with_chosen_layout(read_config(EXAMPLE / "tuned.toml")).layout.kind == "chosen"
    tuned = (EXAMPLE / "tuned.toml").read_text()
    path.write_text(tuned.replace('order = "search"', 'order = "given"'))
    by_name = read_config(path)
    with pytest.raises(InputError, match=r"--choose-layout: given for a run with tuning.order = 'given'"):
        with_chosen_layout(by_name)


def test_what_ranks_compute_on_is_read(tmp_path: Path) -> None:
    path = config(tmp_path)
    assert read_config(path).runtime.device == "cpu"
    text = path.read_text()
    path.write_text(text + '\n[runtime]\ndevice = "auto"\nautocast = "bf16"\n')
    assert (read_config(path).runtime.device, read_config(path).runtime.autocast) == ("auto", "bf16")
    path.write_text(text + '\n[runtime]\nautocast = "fp8"\n')
    with pytest.raises(InputError, match="fp8"):
        read_config(path)
