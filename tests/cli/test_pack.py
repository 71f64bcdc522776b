"""pipeloom pack from files: every policy, replicas, oversized samples, one line for whatever is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cli.app import run
from pipeloom.cost import LayerFit, Profile
from pipeloom.io import read_batches, write_samples
from pipeloom.layout import encoder_first
from pipeloom.packing import POLICIES, PackingSpec
from pipeloom.planner import PlanningProblem, write_problem
from pipeloom.spec import Sample
from pipeloom.tuning import TuningSpec, tune
from tests.cases import vlm_spec


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    write_samples(path, [Sample(f"s{i}", 1 + i % 7, (4,) * (i % 3)) for i in range(20)])
    return path


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_packs_every_sample(samples: Path, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = samples.with_name("batches.json")
    arguments = ["pack", str(samples), "--tokens", "30", "--policy", policy, "--out", str(out), "--json"]
    assert run([*arguments, "--batch", "10", "--attention-tokens", "20"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [batch["iteration"] for batch in document["batches"]] == [0, 1]
    assert all(row["num_tokens"] <= 30 for row in document["microbatches"])
    written = read_batches(out)
    assert written.policy == policy
    names = [name for batch in written.batches for m in batch.microbatches for name in m.samples]
    assert sorted(names) == sorted(f"s{i}" for i in range(20))


def test_replicas_get_a_file_each(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = samples.with_name("batches.json")
    assert run(["pack", str(samples), "--tokens", "30", "--replicas", "3", "--out", str(out)]) == 0
    assert "replica 2" in capsys.readouterr().out
    names = []
    for replica in range(3):
        packed = read_batches(out.with_name(f"batches.{replica}.json"))
        names += [name for m in packed.batches[0].microbatches for name in m.samples]
    assert sorted(names) == sorted(f"s{i}" for i in range(20))


@pytest.fixture
def tuned_setup(tmp_path: Path) -> Path:
    """Of a model with its encoder on the first rank, as `pipeloom train` leaves it."""
    model = vlm_spec(2, 4)
    layout = encoder_first(model, 2, lambda *_: 1.0)
    fit = LayerFit((1e-4, 0, 1e-5, 1e-8), (2e-4, 0, 2e-5, 2e-8), (0, 0, 8, 0))
    profile = Profile("made", {f"{m.name}/{layer.kind}": fit for m in model.modules for layer in m.flat_layers})
    path = tmp_path / "setup.json"
    write_problem(path, PlanningProblem.from_profile(model, layout, profile, PackingSpec(40), tuning=TuningSpec()))
    return path


@pytest.mark.full
def test_replicas_are_tuned_by_simulated_time(
    samples: Path, tuned_setup: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = samples.with_name("batches.json")
    command = ["pack", str(samples), "--policy", "tuned", "--setup", str(tuned_setup), "--out", str(out)]
    assert run([*command, "--replicas", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(row["num_tokens"] <= 40 for row in document["microbatches"])
    first, second = (batch["planned_s"] for batch in document["batches"])
    assert max(first, second) < 1.1 * min(first, second)
    names = []
    for replica in range(2):
        packed = read_batches(out.with_name(f"batches.{replica}.json"))
        assert packed.policy == "tuned"
        names += [name for m in packed.batches[0].microbatches for name in m.samples]
    assert sorted(names) == sorted(f"s{i}" for i in range(20))
    assert run(command) == 0
    assert "Planned: " in capsys.readouterr().out


def test_what_is_planned_from_a_tuned_setup_is_tuned(
    samples: Path, tuned_setup: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = []

    def listening(*positional: Any, **named: Any) -> Any:
        tuned.append(tune(*positional, **named))
        return tuned[-1]

    monkeypatch.setattr(sys.modules["pipeloom.planner.joint"], "tune", listening)
    by_name = tuned_setup.read_text().replace('"order": "search"', '"order": "clusters"')
    tuned_setup.write_text(by_name)
    out = samples.with_name("planned")
    command = ["plan", str(samples), "--setup", str(tuned_setup), "--budget", "0.1", "--out", str(out)]
    assert run(command) == 0
    capsys.readouterr()
    planned = read_batches(out / "batches.json").batches[0]
    assert [len(m.samples) for m in planned.microbatches] == [len(group) for group in tuned[0].groups]


def test_tuned_wants_costs_and_no_number(samples: Path, tuned_setup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pack", str(samples), "--tokens", "30", "--policy", "tuned", "--out", "b.json"]
    assert run(command) == 2
    assert "'tuned' needs --setup; give the setup.json" in capsys.readouterr().err
    assert run([*command, "--setup", str(tuned_setup), "--microbatches", "4"]) == 2
    assert "is set, but the policy 'tuned' chooses their number" in capsys.readouterr().err
    assert run(["pack", str(samples), "--out", "b.json"]) == 2
    assert "--tokens: 0 is below 1" in capsys.readouterr().err


def test_oversized_samples_are_refused_or_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "samples.jsonl", tmp_path / "batches.json"
    write_samples(path, [Sample("a", 3), Sample("b", 25, (4,))])
    command = ["pack", str(path), "--tokens", "10", "--out", str(out)]
    assert run(command) == 2
    assert "'b'): 29 tokens exceed the token budget of 10" in capsys.readouterr().err
    assert not out.exists()
    assert run([*command, "--oversized", "split"]) == 0
    packed = read_batches(out).batches[0]
    assert sorted(n for m in packed.microbatches for n in m.samples) == ["a", "b#0", "b#1", "b#2"]
    assert sum(m.text_tokens for m in packed.microbatches) == 28
    assert run([*command, "--policy", "best"]) == 2
    assert "'best' is none of first_fit" in capsys.readouterr().err
