"""The example language model under a co-optimized layout: exact gradients, and `pipeloom train` from its file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.cli.train import with_chosen_layout
from pipeloom.cost import LayerFit, Profile, ProfileCosts
from pipeloom.io import load, read_layers, read_layout, read_rule
from pipeloom.layout.training import Preview, arrange_training_layout
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import from_text, verify
from pipeloom.planner import read_problem
from pipeloom.search import Budget, solve
from pipeloom.spec import Layout, batch_from_dicts
from pipeloom.taskgraph import build_graph
from pipeloom.training import TrainingRun, read_config
from pipeloom.training.layouts import given_layout
from tests.examples.on_ranks import EXAMPLES, in_double, task_of
from tests.plan.cases import Case
from tests.runtime.cases import Run as Iteration
from tests.runtime.cases import assert_equal_gradients, expected, run_threads, take_gradients, total_loss

pytestmark = pytest.mark.ranks

NAME = "moe_mamba_lm"
EXAMPLE = EXAMPLES / NAME


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_the_undivided_model(seed: int) -> None:
    rng = random.Random(seed)
    task, model = task_of(NAME), in_double(NAME)
    kinds = {f"lm/{layer.kind}" for layer in model.spec.modules[0].flat_layers}
    fits = {}
    for kind in sorted(kinds):
        cost = rng.uniform(1e-6, 1e-5)
        fits[kind] = LayerFit((1e-4, 0, cost, 0), (2e-4, 0, 2 * cost, 0), (0, 0, 64, 0))
    costs, packing = ProfileCosts(model.spec, Profile("invented", fits)), PackingSpec(100)
    texts = next(iter(task.batches(1, texts_per_batch=6, seed=seed)))
    batch = batch_from_dicts([task.describe(text) for text in texts])
    preview = Preview(costs, packing, [batch], 3)
    layout = arrange_training_layout(preview, evaluations=500, trial=Budget(evaluations=5), seed=seed)[0].layout
    assert len(layout.chunks) >= 3
    packed = pack(batch, model.spec, layout, packing)
    graph = build_graph(layout, packed, costs)
    found = solve(graph, budget=Budget(evaluations=50), seed=seed)
    case = Case(model.spec, layout, packed, graph, found.schedule, found.timeline)
    verify(case.plan, layout, packed)
    one = Iteration(case, model, list(texts))
    loss, wanted = expected(one)
    assert any(gradient is not None and gradient.any() for gradient in wanted.values())
    results = run_threads(one, order="in order")
    assert abs(total_loss(results) - loss) < 1e-10 * (1 + abs(loss))
    assert_equal_gradients(take_gradients(one.model), wanted)


def config(folder: Path, layout: str, name: str = "train.toml") -> Path:
    """The example's file for two ranks and small batches, under another [layout]."""
    text = (EXAMPLE / "train.toml").read_text()
    begin, end = text.index("[layout]"), text.index("[packing]")
    text = f"{text[:begin]}[layout]\nranks = 2\n{layout}\n\n{text[end:]}"
    for old, new in (
        ('"task.py"', f'"{EXAMPLE / "task.py"}"'),
        ("texts_per_batch = 24", "texts_per_batch = 6"),
        ("token_budget = 320", "token_budget = 120"),
        ("deadline_s = 0.5", "deadline_s = 60.0"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text)
    return path


def trained(path: Path, runs: Path) -> Layout:
    """Train two iterations with fresh plans that verify; give the layout."""
    assert run(["train", str(path), "--runs", str(runs), "--iterations", "2", "--from-scratch"]) == 0
    folder = runs / NAME
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["plans_fresh"] == summary["iterations"] == 2
    for plan in sorted((folder / "plans").iterdir()):
        verify(from_text(plan.read_text()))
    return read_layout(folder / "layout.json")


@pytest.mark.full
def test_training_arranges_its_layers_and_takes_layouts_from_files(tmp_path: Path) -> None:
    cooptimized = trained(config(tmp_path, 'kind = "arranged"'), tmp_path / "runs")
    table = read_layers(tmp_path / "runs" / NAME / "layers.json")
    assert len(table.layers) == 10
    assert table.num_ranks == cooptimized.num_ranks == 2
    # The rule that was found goes with the layout: into every search, and into a file beside it.
    folder = tmp_path / "runs" / NAME
    (rule,) = read_problem(folder / "setup.json").search.rules
    assert rule == read_rule(folder / "layout.json", cooptimized)
    # What training left is what `pipeloom arrange` takes, and what that writes is what training takes.
    layers, layout = tmp_path / "runs" / NAME / "layers.json", tmp_path / "layout.json"
    assert run(["arrange", str(layers), "--budget", "0.2", "--out", str(layout), "--threads", "1"]) == 0
    path = config(tmp_path, 'kind = "file"\npath = "layout.json"')
    given = given_layout(TrainingRun.from_toml(path), in_double(NAME))
    assert given is not None
    assert given.layout == read_layout(layout)
    assert given.rule == load(tmp_path / "layout.rule.json")
    chosen = with_chosen_layout(read_config(path)).layout
    assert (chosen.kind, chosen.path, chosen.ranks) == ("chosen", "", 2)


def test_profile_writes_what_arrange_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, layers = config(tmp_path, ""), tmp_path / "layers.json"
    assert run(["profile", str(path), "--out", str(layers)]) == 0
    assert "10 layers, 2 ranks" in capsys.readouterr().out
    table = load(layers)
    assert table == read_layers(layers)
    assert all(layer.forward_s > 0 and layer.total_backward_s > 0 for layer in table.layers)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ('kind = "file"', "layout.path: is missing; name a layout that `pipeloom arrange` wrote"),
        ('path = "layout.json"', "layout.path: is set, but kind is 'separate'"),
        ('kind = "file"\npath = "layout.json"', "layout.json"),
        ('kind = "file"\npath = "three.json"', "three.json: num_ranks: is 3, but layout.ranks in"),
        ('kind = "file"\npath = "short.json"', "short.json: module 'lm': has 8 layers, in the model it has 10"),
        ('kind = "file"\npath = "wide.json"', "wide.json: parallelism: tensor 2 and data 1, but the run has 1 and 1"),
        (
            'kind = "arranged"\n[layout.modules.lm]\nsegments = 2',
            "layout.modules: declares lm, but the layout is co-optimized",
        ),
    ],
)
def test_layouts_that_cannot_be_taken_end_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, message: str
) -> None:
    chunks = [{"module": "lm", "layers": [0, 4], "rank": 0}, {"module": "lm", "layers": [5, 7], "rank": 1}]
    module = {"name": "lm", "after": [], "frozen": False, "sub_microbatch": None, "on_ranks": "pipelined"}
    short = {"format": "pipeloom.layout/1", "num_ranks": 2, "modules": [module], "chunks": chunks}
    short["parallelism"] = {"tensor": 1, "data": 1}
    (tmp_path / "short.json").write_text(json.dumps(short))
    (tmp_path / "three.json").write_text(json.dumps(short | {"num_ranks": 3}))
    (tmp_path / "wide.json").write_text(json.dumps(short | {"parallelism": {"tensor": 2, "data": 1}}))
    path = config(tmp_path, layout)
    assert run(["train", str(path), "--runs", str(tmp_path / "runs"), "--iterations", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
