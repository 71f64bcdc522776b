"""Traced models on disk and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.errors import InputError
from pipeloom.integrations.models import load_model
from pipeloom.integrations.tracing import cached
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import architecture_toml, load_architecture
from tests.integrations.published import PUBLISHED
from tests.integrations.tracing import models


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "odd" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(models.HYBRID))
    return file


def test_a_model_that_the_zoo_lacks_is_traced_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(str(config.parent))
    assert "read from its own code" in first.source

    def refuse(*_: object) -> Architecture:
        raise AssertionError("traced twice")

    monkeypatch.setattr("pipeloom.integrations.tracing.architecture.trace_config", refuse)
    assert load_model(str(config)) == first


def test_the_second_run_imports_no_torch(config: Path, cache: Path) -> None:
    load_model(str(config))
    code = f"""
import sys
from pipeloom.integrations.models import load_model
load_model({str(config)!r})
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"XDG_CACHE_HOME": str(cache), "PATH": "/usr/bin"})


def test_a_damaged_entry_is_traced_again(config: Path, cache: Path) -> None:
    first = load_model(str(config))
    (entry,) = (cache / "pipeloom" / "traced").iterdir()
    entry.write_text("{")
    assert load_model(str(config)) == first


def test_another_configuration_is_another_entry(cache: Path) -> None:
    files = {cached.entry_of(c, "5") for c in (models.LLAMA, models.HYBRID)} | {cached.entry_of(models.LLAMA, "6")}
    assert len(files) == 3


def test_a_traced_model_is_written_as_toml(tmp_path: Path, config: Path) -> None:
    traced = load_model(str(config))
    file = tmp_path / "model.toml"
    file.write_text(architecture_toml(traced))
    assert load_architecture(str(file)) == traced


def test_blocks_of_ten_billion_parameters_are_kept(cache: Path, tmp_path: Path) -> None:
    config = PUBLISHED["DeepSeek-V3"][0] | {"num_hidden_layers": 4, "_name_or_path": "large"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    traced = load_model(str(file))
    assert max(layer.parameters for layer in traced.modules[0].layers[1:-1]) > 2**31
    (entry,) = (cache / "pipeloom" / "traced").iterdir()
    assert cached._load(entry) == traced
    toml = tmp_path / "model.toml"
    toml.write_text(architecture_toml(traced))
    assert load_architecture(str(toml)) == traced


def test_describe_prints_kinds_of_layers(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "model.toml"
    assert run(["describe", str(config), "--json", "--toml", str(toml), "--length", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    (module,) = found["modules"]
    kinds = {kind["name"]: kind for kind in module["kinds"]}
    assert kinds["Qwen3NextDecoderLayer"]["count"] == 3
    assert found["parameters"] == module["parameters"] == sum(k["count"] * k["parameters"] for k in kinds.values())
    count = kinds["Qwen3NextDecoderLayer"]["saved_bytes"]["fused"]
    assert count["total"] == count["each_row"] * 1000 + count["constant"]
    assert run(["describe", str(toml), "--length", "1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"] == found["modules"]


def test_describe_reads_models_of_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "qwen3-vl-8b"]) == 0
    text = capsys.readouterr().out
    assert "8.77B parameters" in text
    assert "takes deepstack_0" in text


def test_describe_traces_your_own_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "tests.integrations.tracing.models:build"]) == 0
    assert "class Language" in capsys.readouterr().out
    with pytest.raises(InputError, match="cannot be imported"):
        load_model("tests.integrations.tracing.models:missing")
