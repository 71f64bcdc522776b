"""solve and plan from files: answers that pass the independent check, limits named, Ctrl-C kept."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeloom
import pipeloom.search
from pipeloom.cli.app import run
from pipeloom.cli.plan import read_parts
from pipeloom.cli.solve import Interrupt
from pipeloom.cost import LayerFit, Profile
from pipeloom.io import PackedBatches, write_instance, write_layout, write_samples
from pipeloom.packing import PackingSpec
from pipeloom.planner import PlannedBatch, PlanningProblem, plan_batch, read_problem, write_problem
from pipeloom.search import Budget
from pipeloom.spec import Batch, ModelSpec
from pipeloom.taskgraph import TaskGraph
from pipeloom_instances import family, generate
from tests.cases import random_batch, random_case
from tests.cli.test_cli_files import Invoke, invoke
from tests.io.documents import TINY
from tests.strategies import graphs

__all__ = ["invoke"]


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(graph=graphs(), seed=st.integers(0, 100))
def test_solve_writes_what_check_accepts(graph: TaskGraph, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        instance, answer = str(Path(folder, "i.json")), str(Path(folder, "s.json.gz"))
        write_instance(instance, graph)
        code = run(["solve", instance, "--budget", "0.02", "--seed", str(seed), "--threads", "1", "--out", answer])
        if code == 2:  # memory that nothing fits in
            assert graph.capacity_bytes is not None
            assert os.listdir(folder) == ["i.json"]
        else:
            assert code == 0
            assert run(["check", instance, answer]) == 0


def test_solve_states_its_answer(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "i.json").write_text(json.dumps(TINY))
    out = tmp_path / "s.json"
    done = invoke("solve", tmp_path / "i.json", "--budget", 0.05, "--seed", 7, "--out", out, "--json")
    assert done.code == 0
    document = json.loads(done.out)
    assert document["search"].pop("moves") == {}  # the first static order is optimal
    assert document["search"].pop("starts") == {"first in, first out": {"tried": 1, "improved": 1}}
    assert document == json.loads(out.read_text())
    assert document["order"] == [[0, 3], [1, 2]]
    assert (document["makespan_s"], document["lower_bound_s"]) == (6.02, 6.02)
    search = document["search"]
    assert (search["method"], search["seed"], search["budget_s"]) == ("default", 7, 0.05)
    assert search["evaluations"] >= 1
    assert invoke("solve", tmp_path / "i.json", "--budget", 0.05, "--out", out).out.endswith(f"wrote {out}\n")


def test_solve_refuses_in_one_line_and_writes_nothing(invoke: Invoke, tmp_path: Path) -> None:
    good, tight = tmp_path / "i.json", tmp_path / "tight.json"
    good.write_text(json.dumps(TINY))
    tight.write_text(json.dumps(TINY | {"memory_capacity_bytes": [49, 100]}))
    out = tmp_path / "s.json"
    for arguments, message in [
        ((good, "--budget", "nan", "--out", out), "--budget: nan is not between 0 and 1e+07 seconds"),
        ((good, "--budget", "-1", "--out", out), "--budget: -1 is not between"),
        ((good, "--budget", "x", "--out", out), "Invalid value for '--budget'"),
        ((good, "--budget", 1, "--out", out, "--method", "none"), "--method: 'none' is none of default"),
        ((good, "--budget", 1, "--out", out, "--threads", -1), "--threads: -1 is negative"),
        ((good, "--budget", 1, "--out", out, "--seed", -1), "--seed: -1 is not an integer of at least 0"),
        ((good, "--budget", 1, "--out", tmp_path / "no" / "s.json"), "its folder does not exist"),
        ((good, "--budget", 1, "--out", tmp_path), "is a directory"),
        ((good, "--budget", 1), "Missing option '--out'"),
        ((tmp_path / "none", "--budget", 1, "--out", out), "cannot be read: no such file"),
        ((tight, "--budget", 1, "--out", out), "infeasible: pair 0"),
    ]:
        done = invoke("solve", *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
        assert message in done.err
    assert "40 bytes" in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i.json", "tight.json"]


def _interrupted(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Make Ctrl-C come as soon as the search begins."""
    search = pipeloom.search.solve
    # Tests that run in the background of a shell have inherited that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return search(*arguments, **options)

    monkeypatch.setattr(pipeloom.search, "solve", interrupted)


def test_interrupted_solve_writes_its_best(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, out = tmp_path / "i.json", tmp_path / "s.json"
    write_instance(instance, generate(family("uniform", num_ranks=4, num_microbatches=12, memory=1.2), 0))
    _interrupted(monkeypatch, 1)
    done = invoke("solve", instance, "--budget", 100_000, "--threads", 1, "--out", out, "--json")
    assert done.code == 0, done.err
    assert done.err == f"interrupted: {out} has the best schedule so far\n"
    document = json.loads(done.out)
    counts = document["search"].pop("moves") | document["search"].pop("starts")
    assert all(count["improved"] <= count["tried"] for count in counts.values())
    assert document == json.loads(out.read_text())
    assert 0 <= document["search"]["elapsed_s"] < 10_000
    assert invoke("check", instance, out).code == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_ends_the_program(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "i.json").write_text(json.dumps(TINY))
    _interrupted(monkeypatch, 2)
    done = invoke("solve", tmp_path / "i.json", "--budget", 100_000, "--out", tmp_path / "s.json")
    assert (done.code, done.out, done.err) == (130, "", "pipeloom: interrupted\n")
    assert [p.name for p in tmp_path.iterdir()] == ["i.json"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_runs_the_clock_out() -> None:
    interrupt = Interrupt(100_000)
    meter = interrupt.budget.start()
    assert meter.left(5) == 5
    interrupt.stopped = True
    assert meter.left(5) == 0
    assert meter.spent == 1.0
    assert interrupt.budget.start().left(5) == meter.rest().start().left(5) == 0


def _toml(model: ModelSpec) -> str:
    """A model as people write it."""
    lines = [f"name = {json.dumps(model.name)}"]
    for module in model.modules:
        lines += [
            "[[modules]]",
            f"name = {json.dumps(module.name)}",
            f"reads = {json.dumps(module.reads)}",
            f"after = {json.dumps(module.after)}",
            f"frozen = {json.dumps(module.frozen)}",
        ]
        for layer in module.layers:
            shape = f"{{dims = {json.dumps(layer.output.dims)}, dtype = {json.dumps(layer.output.dtype)}}}"
            lines += [
                "[[modules.layers]]",
                f"kind = {json.dumps(layer.kind)}",
                f"count = {layer.count}",
                f"num_parameters = {layer.num_parameters}",
                f"output = {shape}",
            ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    """Files of a small vision-language problem, in a folder."""
    model, layout, _ = random_case(3)
    layers = {
        f"{m.name}/{layer.kind}": LayerFit((1e-4, 0, 1e-6, 0), (2e-4, 0, 2e-6, 0), (0, 0, 64, 0))
        for m in model.modules
        for layer in m.flat_layers
    }
    profile = Profile("test", layers)
    (tmp_path / "model.json").write_bytes(msgspec.json.encode(model))
    (tmp_path / "model.toml").write_text(_toml(model))
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile))
    write_layout(tmp_path / "layout.json", layout)
    write_samples(tmp_path / "samples.jsonl", random_batch(5).samples)
    write_problem(tmp_path / "setup.json", PlanningProblem.from_profile(model, layout, profile, PackingSpec(4096)))
    return tmp_path


@pytest.mark.parametrize("source", ["setup", "json", "toml"])
def test_plan_leaves_everything_and_each_step_accepts_it(source: str, invoke: Invoke, problem: Path) -> None:
    given_files: dict[str, list[Any]] = {
        "setup": ["--setup", problem / "setup.json"],
        "json": ["--model", problem / "model.json", "--tokens", 4096],
        "toml": ["--model", problem / "model.toml", "--tokens", 4096],
    }
    options = given_files[source]
    if source != "setup":
        options += ["--layout", problem / "layout.json", "--profile", problem / "profile.json"]
    out = problem / "a" / "planned"
    done = invoke(
        "plan", problem / "samples.jsonl", *options, "--budget", 0.05, "--out", out, "--json", "--iteration", 17
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["written"] == [
        str(out / n) for n in ("batches.json", "instance.json", "schedule.json", "batch.plan")
    ]
    assert document["num_samples"] == len(pipeloom.read_samples(problem / "samples.jsonl"))
    assert invoke("check", out / "instance.json", out / "schedule.json").code == 0
    assert invoke("verify", out / "batch.plan", "--layout", problem / "layout.json").code == 0
    assert (out / "batch.plan").read_text().startswith("pipeloom.plan/2 ranks=")
    assert " iteration=17 " in (out / "batch.plan").read_text()
    batches = pipeloom.load(out / "batches.json")
    assert isinstance(batches, PackedBatches)
    assert sum(m.num_samples for m in batches.batches[0].microbatches) == document["num_samples"]
    assert batches.batches[0].iteration == 17


def test_a_setup_keeps_all_that_no_option_gives(problem: Path) -> None:
    """It once lost what sharded replicas hold, the backend and the parameters of the search."""
    path = problem / "setup.json"
    document = json.loads(path.read_text()) | {"backend": "nccl", "held_copies": {"lm/block": 0.5}}
    document["search"] = {"orders": {"heat": 0.2}}
    document["packing"] |= {"num_microbatches": 9, "seed": 7}
    path.write_text(json.dumps(document))
    written = read_problem(path)
    assert read_parts(path, None, None, None, None, 0) == written
    tokens = msgspec.structs.replace(written.packing, token_budget=77)
    assert read_parts(path, None, None, None, None, 77) == replace(written, packing=tokens)


def test_method_seed_and_budget_are_those_of_the_setup_unless_options_give_them(
    invoke: Invoke, problem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method, seed and budget of the setup were ignored."""
    setup, out, asked = problem / "setup.json", problem / "planned", []

    def plan_as_asked(given: PlanningProblem, batch: Batch, budget: Budget) -> PlannedBatch:
        asked.append((given.method, given.seed, budget.seconds))
        return plan_batch(given, batch, budget=budget)

    monkeypatch.setattr("pipeloom.planner.plan_batch", plan_as_asked)
    document = json.loads(setup.read_text()) | {"method": "annealing", "seed": 7, "budget_s": 0.06}
    setup.write_text(json.dumps(document))
    for options, expected in [
        ([], ("annealing", 7, 0.06)),
        (["--method", "portfolio", "--seed", 0, "--budget", 0.05], ("portfolio", 0, 0.05)),
    ]:
        done = invoke("plan", problem / "samples.jsonl", "--setup", setup, *options, "--out", out)
        assert done.code == 0, done.err
        search = json.loads((out / "schedule.json").read_text())["search"]
        assert (search["method"], search["seed"], search["budget_s"]) == asked.pop() == expected
    setup.write_text(json.dumps(document | {"method": "x"}))
    done = invoke("plan", problem / "samples.jsonl", "--setup", setup, "--out", out)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{setup}: method: 'x' is none of" in done.err


def test_plan_refuses_in_one_line(invoke: Invoke, problem: Path) -> None:
    out, samples, setup = problem / "out", problem / "samples.jsonl", problem / "setup.json"
    for arguments, message in [
        ((samples,), "--model: is missing; give --setup, or --model, --layout and --profile"),
        ((samples, "--setup", setup, "--model", setup), "--model: is set, but --setup contains it"),
        ((samples, "--setup", samples), f"{samples}"),
        ((samples, "--setup", setup, "--tokens", 1), f"{samples}: batch.samples["),
        ((samples, "--setup", setup, "--method", "x"), "--method: 'x' is none of"),
        ((samples, "--setup", setup, "--budget", "inf"), "--budget: inf is not between"),
        ((problem / "none", "--setup", setup), "cannot be read"),
        (
            (samples, "--model", problem / "layout.json", "--layout", setup, "--profile", setup, "--tokens", 9),
            "layout.json: ",
        ),
        ((samples, "--setup", setup, "--html", problem / "no" / "x"), "its folder does not exist"),
    ]:
        done = invoke("plan", *arguments, "--out", out)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
        assert message in done.err
    assert not out.exists()
    done = invoke("plan", samples, "--setup", setup, "--out", samples)
    assert (done.code, done.err) == (2, f"pipeloom: {samples}: is a file; give the name of a folder\n")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layout.modules.1.after", [], "modules[1].after: is [], but the model says ['vision']"),
        ("model.modules.1.name", "text", "modules: 'text' of the model is not in the layout"),
        ("model.modules.1.layers.0.count", 3, "chunks: chunks of 'lm' have 4 layers, the model 3"),
        (
            "model.modules.1.layers.0.count",
            2**60,
            "model.modules[1].layers[0].count: 1152921504606846976 is above 2147483648",
        ),
        ("layout.chunks.0.layers", [-1, 1], "layout.chunks[0].layers[0]: -1 is negative"),
        ("strategies", [], "strategies: is empty"),
        ("profile.layers.lm/block.forward_s", [-1, 0, 0, 0], "layers.lm/block.forward_s[0]: -1 is negative"),
        ("profile.layers.lm/block.forward_s", [1e9, 0, 1e9, 0], "forward_s: 3.2e+10 s is not below 4.6e+09 s"),
        ("profile.layers.lm/block.forward_s", [2e9, 0, 0, 0], "the sum must stay below 4.6e+09 s"),
        ("cluster.link_latency_s", 5e8, "edges.delay_s: sums to"),
        ("cluster.link_bytes_per_s", 1e-8, "is not below 4.6e+09 s; give smaller times"),
        ("profile.layers", {}, "'vision/block'"),
        ("packing.token_budget", 0, "packing.token_budget: 0 is below 1"),
        ("cluster.link_bytes_per_s", 0, "cluster.link_bytes_per_s: 0 is not positive"),
    ],
)
def test_plan_refuses_parts_that_do_not_belong_together(
    path: str, value: Any, message: str, invoke: Invoke, problem: Path
) -> None:
    setup = json.loads((problem / "setup.json").read_text())
    node: Any = setup
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    for parent in parents:
        node = node[parent]
    node[last] = value
    (problem / "setup.json").write_text(json.dumps(setup))
    out = problem / "out"
    done = invoke("plan", problem / "samples.jsonl", "--setup", problem / "setup.json", "--budget", 0.01, "--out", out)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert message in done.err
    assert not out.exists()


def test_toml_errors_name_the_line(invoke: Invoke, problem: Path) -> None:
    (problem / "bad.toml").write_text('name = "a"\nname = "b"\n')
    options = ["--layout", problem / "layout.json", "--profile", problem / "profile.json", "--tokens", 9]
    done = invoke("plan", problem / "samples.jsonl", "--model", problem / "bad.toml", *options, "--out", problem / "o")
    assert done.code == 2
    assert "bad.toml: is not valid TOML: cannot overwrite a value (at line 2" in done.err
    (problem / "bad.toml").write_text('name = "a"\nmodules = []\ncolour = 3\n')
    done = invoke("plan", problem / "samples.jsonl", "--model", problem / "bad.toml", *options, "--out", problem / "o")
    assert "bad.toml: colour: is not a known field" in done.err
