"""`pipeloom arrange`: files in, files out, broken ones refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeloom import load
from pipeloom.cli.app import run
from pipeloom.io import write_layers
from pipeloom.io.stage_names import megatron_stages
from pipeloom.search import OrderRule
from pipeloom.spec import Layout
from tests.layout.cooptimize.chains import table


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "m.layers.json"
    write_layers(path, table(7, 10, 2, 4))
    return path


def arguments(layers: Path, folder: Path, *more: str) -> list[str]:
    return [
        "arrange",
        str(layers),
        "--budget",
        "0.1",
        "--out",
        str(folder / "layout.json"),
        "--instance",
        str(folder / "instance.json"),
        "--schedule",
        str(folder / "schedule.json"),
        "--threads",
        "1",
        *more,
    ]


def test_writes_files_that_check_accepts(layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(arguments(layers, tmp_path, "--memory", "1.5x", "--page", str(tmp_path / "page.html"), "--json"))
    assert code == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["lower_bound_s"] <= answer["makespan_s"]
    assert run(["check", str(tmp_path / "instance.json"), str(tmp_path / "schedule.json")]) == 0
    layout = load(tmp_path / "layout.json")
    assert isinstance(layout, Layout)
    assert [chunk.rank for chunk in layout.chunks] == answer["ranks"]
    rule = load(tmp_path / "layout.rule.json")
    assert isinstance(rule, OrderRule)
    rule.check_layout(layout)
    assert str(tmp_path / "layout.rule.json") in answer["written"]
    assert load(tmp_path / "schedule.json").makespan_ns == round(answer["makespan_s"] * 1e9)
    assert "Joint annealing, from" in (tmp_path / "page.html").read_text()


def test_updates_are_part_of_the_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = table(7, 10, 2, 4)
    updated = tuple(msgspec.structs.replace(layer, update_s=0.5) for layer in plain.layers)
    write_layers(tmp_path / "m.layers.json", msgspec.structs.replace(plain, layers=updated))
    assert run(arguments(tmp_path / "m.layers.json", tmp_path, "--json")) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    # Ten layers on two ranks: one of them updates five layers.
    assert 2.5 < answer["lower_bound_s"] <= answer["makespan_s"] <= answer["one_f_one_b_s"]
    written = load(tmp_path / "schedule.json")
    assert written.makespan_ns / 1e9 <= answer["makespan_s"] - 2.5 + 1e-9
    assert written.lower_bound.ns <= written.makespan_ns


def test_the_papers_generator_by_name(layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(layers, tmp_path, "--method", "adaptis", "--page", str(tmp_path / "page.html"))) == 0
    assert run(["check", str(tmp_path / "instance.json"), str(tmp_path / "schedule.json")]) == 0
    assert "AdaPtis, phase by phase, from" in (tmp_path / "page.html").read_text()
    assert "AdaPtis" in json.loads((tmp_path / "schedule.json").read_text())["search"]["method"]


def test_tells_what_it_chose(layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(layers, tmp_path, "--no-split", "--memory", "none")) == 0
    said = capsys.readouterr().out
    assert "lower bound over all placements" in said
    assert "rank 1: layers" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["layers"][3].update(forward_s=-1.0), "layers[3].forward_s: -1 is negative"),
        (lambda d: d["layers"][2].pop("activation_bytes"), "layers[2].activation_bytes: is missing"),
        (lambda d: d.update(layers=[]), "layers: is empty"),
        (lambda d: d.update(num_ranks=0), "num_ranks: 0 is below 1"),
        (lambda d: d.update(color="red"), "color: is not a known field"),
        (lambda d: d["layers"][0].update(forward_s=1e12), "layers[0].forward_s: 1e+12 is not below 4.6e+09 s"),
        (lambda d: d.update(num_ranks=10**9), "num_ranks: 1000000000 is above 4096"),
        (
            lambda d: d.update(num_microbatches=100_000),
            "num_microbatches: 1000000 passes through layers are more than 524288",
        ),
        (lambda d: d.update(memory_capacity_bytes=[1, 1]), "infeasible"),
    ],
)
def test_broken_files_give_one_clear_line(
    layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, words: str
) -> None:
    document = json.loads(layers.read_text())
    change(document)
    layers.write_text(json.dumps(document))
    assert run(arguments(layers, tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
    assert str(layers) in said
    assert not (tmp_path / "layout.json").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--memory", "lots"), ("--memory", "0x"), ("--budget", "-1"), ("--threads", "99"), ("--method", "best")],
)
def test_wrong_options_are_named(
    layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert run(arguments(layers, tmp_path, option, value)) == 2
    assert option in capsys.readouterr().err


def test_a_model_of_the_zoo_within_its_devices_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "layout.json")
    words = ["arrange", "gemma-small", "--cluster", "adaptis-h800-128", "--tp", "2", "--budget", "0.2", "--out", out]
    assert run([*words, "--megatron", "--torchtitan", "--threads", "1", "--microbatches", "8"]) == 0
    said = capsys.readouterr()
    for other in ("Megatron", "torchtitan"):
        assert f"{other}: " in said.out or f"not supported by {other}" in said.err
    assert sum(chunk.num_layers for chunk in load(out).chunks) == 34
    assert run(["arrange", "gemma-tiny", "--budget", "0.1", "--out", out]) == 2
    assert "is unknown" in capsys.readouterr().err


def test_json_has_the_formats_of_other_frameworks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, params = tmp_path / "m.layers.json", tmp_path / "params.toml"
    params.write_text('tuned = ["partition", "schedule"]\n')
    words = arguments(path, tmp_path, "--params", str(params), "--megatron", "--torchtitan", "--json")
    write_layers(path, table(7, 10, 2, 4))
    assert run(words) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    cut = answer["first_layers"][1]
    stages = megatron_stages(answer["megatron"])
    assert [stage.count("t") for stage in stages] == [len(stage) - 1 for stage in stages] == [cut, 10 - cut]
    assert [name for stage in answer["torchtitan"] for name in stage if name.startswith("layers.")] == [
        f"layers.{i}" for i in range(10)
    ]
    write_layers(path, table(7, 1, 2, 4))  # one rank stays empty
    assert run(words) == 0
    said = capsys.readouterr()
    assert [json.loads(said.out)[name] for name in ("megatron", "torchtitan")] == [None, None]
    assert "not supported by Megatron: layout: has 1 stages" in said.err
    assert "not supported by torchtitan: layout: has its stages on ranks" in said.err


HUGGING_FACE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 9,
    "vocab_size": 32000,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
}


def test_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HUGGING_FACE))
    for source in (config, tmp_path):
        words = arguments(source, tmp_path, "--pp", "2", "--microbatches", "4", "--tokens", "512", "--json")
        assert run(words) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["lower_bound_s"] <= answer["makespan_s"] < answer["one_f_one_b_s"]
        # Embedding, nine layers, head.
        assert sum(chunk.num_layers for chunk in load(tmp_path / "layout.json").chunks) == 11
        assert run(["check", str(tmp_path / "instance.json"), str(tmp_path / "schedule.json")]) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": -4}, "negative dimension -4"),
        (
            {
                "model_type": "llava",
                "text_config": {"model_type": "llama"},
                "vision_config": {"model_type": "clip_vision_model"},
            },
            "hidden_size: is 512 in the file",
        ),
    ],
)
def test_what_is_no_chain_of_layers_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HUGGING_FACE | change))
    assert run(arguments(config, tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said


def test_parameters_from_a_file(layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = tmp_path / "params.toml"
    params.write_text('walks = 2\n[move_weights]\n"cut a chunk" = 0.5\n')
    page = tmp_path / "page.html"
    assert run(arguments(layers, tmp_path, "--params", str(params), "--page", str(page))) == 0
    assert "from 2 starts" in page.read_text()
    assert run(arguments(layers, tmp_path, "--params", str(params), "--method", "adaptis")) == 2
    params.write_text("walks = 0")
    capsys.readouterr()
    assert run(arguments(layers, tmp_path, "--params", str(params))) == 2
    assert f"{params}: walks: 0 is below 1" in capsys.readouterr().err


def test_a_layout_on_a_device_has_no_rule_beside_it(layers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["arrange", str(layers), "--budget", "0.05", "--out", "/dev/null", "--threads", "1"]) == 0
    assert "rule" not in capsys.readouterr().out
