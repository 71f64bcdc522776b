"""`pipeloom explain`: traces and logs in, one page of answers out; what does not fit is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeloom import load
from pipeloom.cli.app import run
from pipeloom.cost import Profile
from pipeloom.cost.layers import LayerTable
from pipeloom.layout.cooptimize import chain_of_layers
from tests.explain.traces.made import documents, random_pipeline, write


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write(tmp_path / "traces", documents(random_pipeline(5)))


def test_console_page_and_document_have_one_iteration(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page, trace = (str(tmp_path / name) for name in ("made.layers.json", "page.html", "trace.json"))
    base = ["explain", str(traces), "--budget", "0.05"]
    assert run([*base, "--out", out, "--html", page, "--trace", trace, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["error"] for one in answer["iterations"]] == [0.0, 0.0]
    for one in answer["iterations"]:
        for compute, idle in zip(one["compute_s"], one["idle_s"], strict=True):
            assert compute + sum(idle.values()) == pytest.approx(one["measured_s"])
    assert answer["written"] == [out, trace, page]
    assert "best order, no limit" in Path(page).read_text()
    table = load(out)
    assert isinstance(table, LayerTable)
    assert len(table.layers) == len(answer["rank_of_stage"])
    assert run(base) == 0
    shown = capsys.readouterr().out
    assert "waiting for a backward" in shown
    assert max(map(len, shown.splitlines())) <= 130
    # What was written is what arrange reads.
    assert chain_of_layers(table).num_layers == len(table.layers)
    assert run(["explain", trace]) == 2
    assert "a trace that Pipeloom wrote" in capsys.readouterr().err


def test_folders_with_names_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write(tmp_path / "traces\udcff", documents(random_pipeline(5))), tmp_path / "layers.json"
    assert run(["explain", str(folder), "--budget", "0.05", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "traces\\udcff"
    table = load(out)
    assert isinstance(table, LayerTable)
    assert table.name == "traces\\udcff"


def test_a_profile_over_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.explain.traces.test_costs import sized

    small, large, target = tmp_path / "small", tmp_path / "large", tmp_path / "p.json"
    sized(small, 1)
    sized(large, 7)
    base = ["explain", str(small), "--budget", "0.05", "--json", "--also", str(large)]
    assert run([*base, "--profile", str(target)]) == 0
    capsys.readouterr()
    profile = load(target)
    assert isinstance(profile, Profile)
    assert list(profile.layers) == ["model/stage.0", "model/stage.1"]
    assert run(base) == 2
    assert "--also" in capsys.readouterr().err


def test_a_lacking_rank_is_named(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (traces / "rank0.json").unlink()
    assert run(["explain", str(traces)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "give the traces of all pipeline ranks" in said


def test_microbatches_are_for_logs(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(traces), "--microbatches", "4"]) == 2
    assert "--microbatches" in capsys.readouterr().err


def test_a_log_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.explain.traces.test_megatron_log import log

    path, out = tmp_path / "train.log", tmp_path / "layers.json"
    path.write_text(log())
    assert run(["explain", str(path), "--budget", "0.05", "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_microbatches"] == 8
    assert answer["orders"][0]["iteration_s"] == answer["simulated_s"]
    assert run(["explain", str(path), "--budget", "0.05"]) == 0
    assert "forward-backward measured" in capsys.readouterr().out
