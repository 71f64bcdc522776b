"""`pipeloom megatron`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.integrations.megatron import best_layout, read_megatron
from pipeloom.report import size_text, time_text
from pipeloom.search import Budget
from pipeloom.spec.catalog import load_cluster
from tests.integrations.megatron.cases import listed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "megatron.md").read_text()


def test_the_page_runs_as_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with a shorter search, and the lines of Python."""
    monkeypatch.chdir(ROOT)
    command, hybrid = (shlex.split(c)[1:] for c in re.findall(r"```sh\n(pipeloom .*)\n```", PAGE))
    assert run([*command, "--budget", "0.3"]) == 0
    out = capsys.readouterr().out
    for word in (
        "tp 4 pp 8 dp 2",
        "iteration",
        "MFU",
        "every layer",
        "now:  Et*10|",
        "faster by",
        "In place of --recompute",
    ):
        assert word in out
    assert "70,557,900,800 parameters, 64 microbatches a replica." in out
    assert "Change nothing here: --use-mcore-models" in out
    assert "Emulated, not measured" in out
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(script.replace("Budget(seconds=1.0)", "Budget(seconds=0.1)"), {})
    assert "--pipeline-model-parallel-layout" in capsys.readouterr().out
    assert run([*hybrid, "--budget", "0.3"]) == 0
    out = capsys.readouterr().out
    (now,) = re.findall(r"^now:  .*$", PAGE, re.MULTILINE)
    for word in (now, "tp 2 pp 4 dp 4", "In place of --hybrid-layer-pattern, write:", "8,100,852,736 parameters"):
        assert word in out


def test_as_json_and_what_it_says_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "arguments.txt", tmp_path / "pipeline.html"
    file.write_text(" ".join(listed(recompute_activations=True, position_embedding_type="rope")))
    command = ["megatron", str(file), "--cluster", "h100-8", "--budget", "0.3", "--json", "--html", str(page)]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind_of_time"] == "emulated"
    assert document["replaced"] == ["--recompute-activations"]
    assert document["now"]["recompute"] == ["--recompute-granularity selective", "--recompute-modules core_attn"]
    assert document["best"]["iteration_s"] <= document["now"]["iteration_s"]
    assert document["num_microbatches"] == 8
    assert document["trainer"] == "megatron"
    assert document["best"]["iteration_low_s"] < document["best"]["iteration_high_s"]
    assert "published runs" in document["interval_basis"]
    assert document["sign_probability"] > 0.5
    again = read_megatron([*listed(position_embedding_type="rope"), *shlex.split(" ".join(document["arguments"]))])
    assert again.now.layout == document["best"]["layout"]
    assert document["planned"]["import"] == "import pipeloom.integrations.megatron.auto"
    assert document["planned"]["static_iteration_s"] == document["best"]["iteration_s"]
    assert document["planned"]["gain"] >= 0
    # The page has the numbers that are printed.
    text = page.read_text()
    assert document["interval_basis"] in text
    for one in ("now", "best"):
        assert time_text(round(document[one]["iteration_s"] * 1e9)) in text
        assert size_text(max(document[one]["peak_memory_bytes"])) in text


def test_plans_for_packed_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, samples = tmp_path / "arguments.txt", tmp_path / "samples.jsonl"
    file.write_text(" ".join(listed(position_embedding_type="rope")))
    lengths = [4096 if number % 5 == 0 else 256 for number in range(400)]
    samples.write_text("".join(f'{{"id": "{i}", "text_tokens": {n}}}\n' for i, n in enumerate(lengths)))
    command = ["megatron", str(file), "--cluster", "h100-8", "--budget", "1", "--samples", str(samples)]
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "import pipeloom.integrations.megatron.auto" in out
    assert re.search(r"faster by [\d.]+ % \(8 steps of packed samples\); sign right: \d+ % of published pairs", out)
    samples.write_text('{"id": "0", "text_tokens": 4096}\n')
    assert run(command) == 2
    assert "samples: fill 1 microbatches of 4096 tokens, a step has 8; give more samples" in capsys.readouterr().err


_TOO_LARGE = {
    "num_layers": 24,
    "hidden_size": 6144,
    "num_attention_heads": 48,
    "tensor_model_parallel_size": 4,
    "micro_batch_size": 16,
    "global_batch_size": 512,
    "pipeline_model_parallel_layout": "Et*12|t*12L",
}


def _answer_to(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = tmp_path / "arguments.txt"
    file.write_text(shlex.join(words))
    assert run(["megatron", str(file), "--cluster", "h100-8", "--budget", "0.1"]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_answer_to_an_answer_is_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = listed(num_layers=2, pipeline_model_parallel_size=2, position_embedding_type="rope")
    best = best_layout(read_megatron(words), load_cluster("h100-8"), budget=Budget(evaluations=2000))
    lines = _answer_to([*words, *shlex.split(" ".join(best.arguments()))], tmp_path, capsys)
    assert "no faster setup was found; change nothing" in lines
    assert not any("rite:" in line for line in lines)


def test_a_setup_that_fits_is_offered_if_the_present_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = listed(_TOO_LARGE, pipeline_model_parallel_size=2, position_embedding_type="rope")
    lines = _answer_to(words, tmp_path, capsys)
    assert "the fastest setup that fits; yours is no slower, but does not fit" in lines
    assert any("rite:" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("--num-layer 3", [], "--num-layer: is not an argument of Megatron; did you mean --num-layers?"),
        (None, ["--gpus", "12"], "--global-batch-size: 16 is not a multiple of 1 sequences a microbatch on 3 replicas"),
        (None, ["--gpus", "6"], "degrees: tensor 1 x pipeline 4 x context 1 = 4 does not divide 6 devices"),
        (None, ["--budget", "-1"], "--budget: -1 is not between"),
        (None, ["--cluster", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(text, more, message, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "arguments.txt"
    file.write_text(" ".join(listed()) if text is None else text)
    assert run(["megatron", str(file), *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
