"""pipeloom pack from files: every policy, replicas, oversized samples, one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.io import read_batches, write_samples
from pipeloom.packing import POLICIES
from pipeloom.spec import Sample


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    write_samples(path, [Sample(f"s{i}", 1 + i % 7, (4,) * (i % 3)) for i in range(20)])
    return path


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_packs_every_sample(
    samples: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
