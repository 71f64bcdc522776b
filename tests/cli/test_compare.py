"""`pipeloom compare`: one answer on the console, the page and in --json; its page's commands run as written."""

from __future__ import annotations

import functools
import html
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pipeloom.cli.app import run
from pipeloom.cli.compare import _trainer
from pipeloom.cli.compare_answer import _pipeloom_lines, _recompute, _token_budget, _trainer_lines
from pipeloom.cli.compare_answer import answer as answer_line
from pipeloom.compare import answer, registry
from pipeloom.compare.answer import Question
from pipeloom.compare.chosen_layout import choose_layout
from pipeloom.compare.comparison import Comparison
from pipeloom.compare.iterations import Grouping, Iterations, sampled_iterations
from pipeloom.compare.model_on_cluster import put_on_cluster
from pipeloom.compare.now import TUNED, now_system
from pipeloom.compare.outcome import Outcome
from pipeloom.compare.registry import OURS
from pipeloom.errors import InputError
from pipeloom.integrations.current_runs import load_run
from pipeloom.integrations.megatron import read_megatron
from pipeloom.io import read_layout
from pipeloom.io.stage_names import megatron_stages
from pipeloom.search import Budget
from pipeloom.spec import RankSpec, Sample
from pipeloom.spec.catalog import load_architecture, load_trainer
from pipeloom.spec.current_run import CurrentRun
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.strategies import ChunkStrategy
from pipeloom.training.config import LayoutConfig, ParallelConfig, PlannerConfig
from tests.compare.cases import shallow, vlm_on_h800

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "compare"
SMALL = ["config.json", "--data", "samples.jsonl", "--cluster", "2xH100", "--microbatches", "3", "--processes", "1"]
NOW = "pp=2 layout=2,4 recompute=full"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example's files where the commands run, with a model of a few layers so that this is fast."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    config = json.loads((EXAMPLE / "config.json").read_text())
    config["num_hidden_layers"], config["vision_config"]["depth"] = 6, 6
    (tmp_path / "config.json").write_text(json.dumps(config))
    now = (tmp_path / "now.toml").read_text()
    (tmp_path / "now.toml").write_text(now.replace("[4, 8, 8, 8]", "[0, 2, 2, 2]"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are chosen by few evaluations."""
    monkeypatch.setattr(
        registry, "choose_layout", functools.partial(choose_layout, trial=Budget(evaluations=3), rounds=1)
    )
    monkeypatch.setattr(registry, "FINAL", Budget(evaluations=3))
    monkeypatch.setattr(answer, "PACKING_TIMES", 1)


def test_the_worked_page_runs_as_written(folder: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands, with fewer systems and a shorter search; the first with a smaller model."""
    page = (ROOT / "docs" / "compare.md").read_text()
    commands = [shlex.split(c)[1:] for c in re.findall(r"```sh\n(pipeloom .*)\n```", page)]
    assert {command[0] for command in commands} == {"emulate", "sweep", "compare"}
    for command in commands:
        if command[0] == "compare":
            command += ["--systems", "1f1b,optimus", "--budget", "0.05", "--processes", "1"]
        assert run([word.replace("Qwen2.5-VL-7B", "config.json") for word in command]) == 0, command
    out = capsys.readouterr().out
    for word in ("iteration", "dp ", "now-tuned", "optimus", "wrote answer/comparison.html"):
        assert word in out


def _shown(page: Path) -> str:
    """What a browser shows of a page: its body, scripts left out, which hold tags as text."""
    body = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    return html.unescape(body[body.index("<body>") :])


@pytest.mark.full
def test_any_number_on_the_console_is_on_the_page_and_in_json(
    folder: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", *SMALL, "--now", NOW, "--systems", "1f1b,zero-bubble,fsdp,pipeloom", "--out", "answer"]
    assert run([*command, "--budget", "0.02"]) == 0
    shown = capsys.readouterr()
    page = _shown(folder / "answer" / "comparison.html")
    assert "has run on one GPU, not on a cluster" in shown.out
    lines = [line for line in shown.out.splitlines() if not line.startswith("wrote ")]
    numbers = [word for line in lines for word in line.split() if re.search(r"\d", word)]
    # How many depends on the layout that is found in so short a time.
    assert len(numbers) > 120
    assert [word for word in numbers if word not in page] == []
    # What was told on the way, row by row, is in the answer.
    assert [word for word in shown.err.split() if re.search(r"\d", word) and word not in shown.out] == []

    assert run([*command, "--budget", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    page = _shown(folder / "answer" / "comparison.html")
    assert document["answer"] in page
    cells = [cell for section in document["sections"] for row in section.get("rows", []) for cell in row]
    assert [cell for cell in cells if f"<td>{cell}</td>" not in page] == []
    rows = {row["system"]: row for row in document["systems"]}
    assert {"now", "now-tuned", "1f1b", "pipeloom", "pipeloom-packed"} <= set(rows)
    times = [row["iteration_s"] for row in document["systems"] if "problem" not in row]
    assert times == sorted(times)
    assert rows["now"]["gain"] == 0
    assert rows["1f1b"]["gain"] == pytest.approx(rows["now"]["iteration_s"] / rows["1f1b"]["iteration_s"] - 1)
    assert rows["now"]["sign_probability"] == 0.5
    assert all(0 < row["iteration_low_s"] < row["iteration_high_s"] for row in rows.values() if "problem" not in row)
    assert (document["trainer"], "published runs" in document["interval_basis"]) == ("fused", True)
    # The steps lead from what is run now to the faster of Pipeloom's rows, and their parts are the whole.
    steps = document["steps"]
    best = min(rows[name]["iteration_s"] for name in ("pipeloom", "pipeloom-packed"))
    assert steps[-1]["iteration_s"] == pytest.approx(best)
    assert sum(step["share"] for step in steps) == pytest.approx(1)
    assert all(0 < step["sign_probability"] <= 1 for step in steps)
    assert sum(step["saved_s"] for step in steps) == pytest.approx(rows["now"]["iteration_s"] - best)


ARGUMENTS = """
--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 1 --vocab-size 4096 --bf16
--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2
"""


@pytest.mark.parametrize(
    "more",
    [
        "--mtp-num-layers 2 --global-batch-size 8",
        "--mtp-num-layers 1 --global-batch-size 8 --pipeline-model-parallel-layout Et*5|tmL",
        "--global-batch-size 5 --num-layers 12",
        "--global-batch-size 7 --num-layers 12 --mtp-num-layers 1",
    ],
)
def test_megatron_reads_what_is_to_be_pasted(more: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prediction layers are kept, and groups of microbatches are named where Megatron's own size does not suit."""
    text = ARGUMENTS.replace("--num-layers 6 ", "") if "--num-layers" in more else ARGUMENTS
    file = folder / "arguments.txt"
    file.write_text(f"{text} {more}")
    command = ["compare", str(file), "--cluster", "2xH100", "--systems", "interleaved", "--budget", "0", "--json"]
    assert run([*command, "--processes", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    lines = {section["heading"]: section.get("lines") for section in document["sections"]}
    _, _, words, *arguments = lines["What to change in your trainer"]
    kept = more.split("--pipeline-model-parallel-layout")[0]
    file.write_text(f"{text} {kept} {' '.join(arguments)}")
    found = read_megatron(file, num_devices=2)
    assert document["trainer"] == "megatron"
    assert len(found.model.predictors) == "".join(found.now.stages).count("m")
    again = load_run(words)
    assert again.microbatches == found.num_microbatches
    assert (again.group or 2) == found.now.group_size
    assert again.layout == load_run(str(file), 2).layout


def test_groups_of_microbatches_that_megatron_rejects(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", *SMALL[:-4], "--processes", "1", "--systems", "1f1b", "--budget", "0"]
    for words, said in (
        ("pp=2 chunks=2 group=3 microbatches=4", "group: 3 does not suit 4 microbatches on 2 ranks; use 2 or 4"),
        ("pp=2 chunks=2 microbatches=5", "group: 2 does not suit 5 microbatches on 2 ranks; use 3 or 5"),
    ):
        assert run([*command, "--now", words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.full
def test_what_is_to_be_pasted_does_what_it_says(folder: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", *SMALL, "--systems", "pipeloom", "--budget", "0.02", "--out", "answer", "--json"]
    assert run([*command, "--now", NOW]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["system"]: row for row in document["systems"]}
    lines = {section["heading"]: section.get("lines") for section in document["sections"]}
    said, words, megatron, *recompute = lines["What to change in your trainer"]
    recomputes = "recompute=none" not in words
    assert bool(recompute) == recomputes
    assert not recomputes or recompute[0].startswith("--recompute-granularity ")
    assert said.startswith("# your trainer with other settings")
    assert load_run(words).layout
    _, string = shlex.split(megatron)
    assert "".join(megatron_stages(string)).count("t") == 6
    assert run([*command, "--now", words]) == 0
    document = json.loads(capsys.readouterr().out)
    again = {row["system"]: row for row in document["systems"]}
    assert again["now"]["iteration_s"] == pytest.approx(rows["now-tuned"]["iteration_s"])
    # With these settings, no others are faster.
    [advice] = [each["lines"] for each in document["sections"] if each["heading"] == "What to change in your trainer"]
    assert advice == ["# nothing: no faster settings were found"]
    assert "(now-tuned)" not in document["answer"]
    # The rest is of a train.toml.
    tables = tomllib.loads("\n".join(lines["The same run as a train.toml"]))
    layout = msgspec.convert(tables["layout"], LayoutConfig)
    assert read_layout(folder / "answer" / str(layout.path)).num_ranks == layout.ranks == 2
    msgspec.convert(tables["parallel"], ParallelConfig)
    msgspec.convert(tables["cluster"], RankSpec)
    assert "offload" in msgspec.convert(tables["planner"], PlannerConfig).strategies
    packed = rows["pipeloom-packed"]["iteration_s"] < rows["pipeloom"]["iteration_s"]
    assert tables["packing"] == {"token_budget": 8 * 8192 if packed else 8192}


def test_the_budget_of_tokens_is_that_of_the_fastest_row() -> None:
    """Never below a sample, which `pipeloom train` would reject."""
    setting = vlm_on_h800(Degrees(tensor=2, pipeline=2), vision=4, lm=4)
    short, long = Sample("short", 100), Sample("long", 90_000)
    for grouping, given, packed in (
        (Grouping(), 8192, 65536),
        (Grouping(tokens=4096), 4096, 32768),
        (Grouping(samples=2), 200, 65536),
    ):
        question = Question(setting, Iterations([], [[short, short], [short]]), grouping, ("pipeloom",))
        assert [_token_budget(question, name) for name in ("pipeloom", "pipeloom-packed")] == [given, packed]
    question = Question(setting, Iterations([], [[short, long]]), Grouping(samples=2), ("pipeloom",))
    assert _token_budget(question, "pipeloom") == 90_100
    assert _token_budget(question, "pipeloom-packed") == 90_000


def outcome_of(run: CurrentRun, *names: str) -> Outcome:
    """An outcome in which systems of these names do what is run now."""
    setting = put_on_cluster(shallow("llama3-8b", lm=4), "8xH100", run.degrees(8))
    iterations = sampled_iterations(setting, None, Grouping(4), 0)
    result = now_system(setting, run).run(iterations.groups, Budget(evaluations=1), 0)
    systems = tuple(Comparison(name, name, result.layout, result) for name in names)
    return Outcome(Question(setting, iterations, Grouping(4), (), run), systems)


def _train_toml(run: CurrentRun) -> list[str]:
    outcome = outcome_of(run, OURS)
    return _pipeloom_lines(outcome, {one.name: one for one in outcome.systems}, None)


@pytest.mark.parametrize(
    ("zero", "shard", "says"), [(0, None, ""), (1, None, "holds the whole optimizer state"), (3, "fsdp", "ZeRO 3")]
)
def test_a_train_toml_shards_as_the_run_or_says_what_differs(zero: int, shard: str | None, says: str) -> None:
    lines = _train_toml(CurrentRun(tp=2, pp=2, zero=zero))  # type: ignore[arg-type]
    parallel = msgspec.convert(tomllib.loads("\n".join(lines))["parallel"], ParallelConfig)
    assert parallel == ParallelConfig(dp=2, tp=2, shard=shard)  # type: ignore[arg-type]
    assert any(line.startswith("#") and says in line for line in lines[1:]) == bool(says)
    # Without replicas there is nothing to shard over.
    alone = "\n".join(_train_toml(CurrentRun(tp=4, pp=2, zero=zero))[1:])  # type: ignore[arg-type]
    assert "shard" not in alone
    assert "#" not in alone


def test_there_is_no_train_toml_for_context_parallelism() -> None:
    [line] = _train_toml(CurrentRun(tp=2, pp=2, cp=2))
    assert line.startswith("# none: pipeloom train has no context or expert parallelism")
    assert "cp = 2" in line


def _now_words(text: str) -> CurrentRun:
    """The run of a printed ``--now``."""
    return load_run(re.search(r"--now '([^']*)'", text)[1])  # type: ignore[index]


def test_the_degrees_that_fit_are_printed_whole() -> None:
    run = CurrentRun(tp=2, pp=2, cp=2, zero=3, microbatch_samples=2, microbatches=4)
    outcome = replace(outcome_of(run, OURS), would_fit=run.degrees(32))
    found = _now_words(answer_line(outcome))
    assert found.degrees(32) == outcome.would_fit
    assert (found.microbatch_samples, found.microbatches) == (2, 4)
    experts = Degrees(tensor=2, pipeline=2, data=4, expert=2, expert_tensor=4)
    assert _now_words(answer_line(replace(outcome, would_fit=experts))).degrees(32) == experts


@pytest.mark.parametrize("run", [CurrentRun(pp=2, dp=1, schedule="gpipe", chunks=2), CurrentRun(pp=2, dp=1, chunks=2)])
def test_other_settings_keep_the_schedule(run: CurrentRun) -> None:
    """With several stages per rank, too."""
    outcome = outcome_of(run, TUNED)
    _, words, *_ = _trainer_lines(outcome, outcome.systems[0])
    found = load_run(words)
    assert (found.order, found.num_chunks) == (run.order, 2)
    assert found.degrees(2) == run.degrees(2)


def test_without_what_is_run_now(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", *SMALL, "--systems", "1f1b,interleaved,fsdp", "--seed", "5"]
    assert run([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["system"] for row in document["systems"]} == {"1f1b", "interleaved", "fsdp"}
    assert all(0 < row["mfu"] < 1 and row["iteration_s"] > 0 for row in document["systems"])
    assert (document["seed"], document["gain_over"], document["steps"]) == (5, "interleaved", [])
    assert (document["device"], document["device_basis"]) == ("H100 SXM5 80GB", "datasheet")
    assert run([*command, "--freeze", "vision", "--json"]) == 0
    frozen = json.loads(capsys.readouterr().out)
    slow, fast = (next(r["iteration_s"] for r in d["systems"] if r["system"] == "1f1b") for d in (document, frozen))
    assert fast < slow


def test_flags_beside_megatrons_file_name_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "arguments.txt").write_text(
        "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
        "--vocab-size 1000 --pipeline-model-parallel-size 2 --bf16 --micro-batch-size 1 --global-batch-size 16"
    )
    for flags, words in (
        (["--microbatches", "8"], "--microbatches: is set, but arguments.txt sets their number"),
        (["--tokens", "8"], "--tokens: is set, but arguments.txt sets"),
        (["--pp", "4"], "--pp: is 4, but arguments.txt has 2; omit it"),
    ):
        assert run(["compare", "arguments.txt", "--cluster", "2xH100", *flags]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.full
def test_text_alone_is_ranked_under_every_system(folder: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Data without images are valid for a model that sees: no system is left out."""
    lines = [json.dumps({"id": f"s{i}", "text_tokens": 100 + 37 * (i % 20)}) for i in range(120)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    command = ["compare", *SMALL, "--data", "texts.jsonl", "--budget", "0.02", "--json"]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["system"] for row in document["systems"]} >= set(registry.BASELINES)
    assert all(row["iteration_s"] > 0 for row in document["systems"])


def test_a_system_that_cannot_run_gets_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object) -> None:
        raise InputError("module 'vision'", "is not for this system", "use another")

    entry = registry.Baseline("Never", refuses)  # type: ignore[arg-type]
    monkeypatch.setitem(registry.BASELINES, "never", entry)
    # Wide enough for the table, whatever the lengths of the times.
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["compare", *SMALL, "--systems", "never,1f1b,fsdp"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^never +cannot run *$", shown, re.MULTILINE)
    assert "What does not fit or cannot run" in shown
    assert "never: module 'vision': is not for this system; use another" in shown
    assert re.search(r"^1f1b +\d", shown, re.MULTILINE)
    assert run(["compare", *SMALL, "--systems", "never"]) == 2
    assert "--systems: none of them can run: module 'vision'" in capsys.readouterr().err
    monkeypatch.setitem(registry.BASELINES, "never", replace(entry, suits=lambda _: False))
    assert run(["compare", *SMALL, "--systems", "never"]) == 2
    assert "--systems: names no system that can train this model; add pipeloom" in capsys.readouterr().err


def test_what_does_not_fit_is_reported_where_it_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The degrees that are named fit: with them the same command ranks the system."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["hidden_size"], text["intermediate_size"] = 16 * text["hidden_size"], 16 * text["intermediate_size"]
    text["num_attention_heads"], text["num_key_value_heads"] = (
        16 * text["num_attention_heads"],
        16 * text["num_key_value_heads"],
    )
    config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    command = ["compare", *SMALL, "--systems", "1f1b", "--json"]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    degrees = document["would_fit"]
    count = degrees["tensor"] * degrees["pipeline"] * degrees["data"]
    assert f"on {count} devices" in document["answer"]
    flags = ["--tp", str(degrees["tensor"]), "--pp", str(degrees["pipeline"]), "--cluster", f"{count // 2}x2xH100"]
    assert run([*command, *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["systems"][0]["fits"]
    assert document["would_fit"] is None


@pytest.mark.parametrize(("tokens", "says"), [(392, ""), (1568, "joins 4"), (98, "joins 4")])
def test_images_of_another_model_are_reported(
    folder: Path, tokens: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = {"text_tokens": 500, "image_tokens": [tokens], "image_patches": [1568]}
    (folder / "own.jsonl").write_text("\n".join(json.dumps({"id": f"s{i}"} | sample) for i in range(40)))
    assert run(["compare", *SMALL, "--data", "own.jsonl", "--systems", "1f1b"]) == 0
    shown = capsys.readouterr().out
    assert ("Of the data, images" in shown) == bool(says)
    assert says in shown
    assert run(["emulate", "config.json", "--data", "own.jsonl", "--cluster", "2xH100", "--microbatches", "2"]) == 0
    assert ("note: images of the data" in capsys.readouterr().err) == bool(says)


def test_samples_in_several_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "parts").mkdir()
    for number, part in enumerate((lines[:40], lines[40:])):
        (folder / "parts" / f"{number}.jsonl").write_text("".join(part))
    found = []
    for data in ("samples.jsonl", "parts", "parts/*.jsonl"):
        assert (
            run(["compare", "config.json", "--data", data, "--cluster", "2xH100", "--systems", "1f1b", "--json"]) == 0
        )
        found.append(json.loads(capsys.readouterr().out)["systems"])
    assert found[0] == found[1] == found[2]
    (folder / "none").mkdir()
    assert run(["compare", "config.json", "--data", "none"]) == 2
    assert "none: has no file of samples; they end in .jsonl" in capsys.readouterr().err


@pytest.mark.full
def test_two_processes_find_what_one_finds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", *SMALL[:-2], "--now", NOW, "--systems", "1f1b,pipeloom", "--budget", "0.02", "--json"]
    found = []
    for processes in ("1", "2"):
        assert run([*command, "--processes", processes]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, two = ({row["system"]: row for row in each["systems"]} for each in found)
    assert set(one) == set(two)
    for name in ("now", "now-tuned", "1f1b"):
        assert one[name] == two[name]
    assert two["pipeloom"]["iteration_s"] < two["now"]["iteration_s"]
    assert [step["step"] for step in found[1]["steps"] if step["step"] != "packing"] == ["layout", "order", "memory"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--systems", "nobody"], "'nobody' is none of"),
        (["--data", "samples.jsonl", "--microbatches", "999"], "999 are needed"),
        (["--data", "samples.jsonl", "--tokens", "50"], "a microbatch 50"),
        (["--tp", "64", "--pp", "4"], "need 256 devices"),
        (["--cluster", "8xZ9"], "device 'z9' is unknown; known are a100"),
        (["--now", "pp=4 layout=1,2"], "--now: layout: has 2 stages, not a multiple of pp = 4"),
        (["--now", "pp=2 layout=1,2"], "layout: has 3 blocks of lm, the model 6"),
        (["--now", "pp=4 chunks=3"], "chunks: 12 stages, lm has 8 layers"),
        (["--now", "pp=2", "--pp", "4"], "--pp: is 4, but --now has 2; omit it"),
        (["--now", "pp=2 microbatches=3", "--microbatches", "4"], "--microbatches: is set, but --now"),
        (["--now", "pp=2 microbatch_samples=3", "--tokens", "4"], "--tokens: is set, but --now"),
        (["--now", "pp=2 pad_to=64", "--data", "samples.jsonl"], "samples are padded to 64"),
        (["--now", "nothing.toml"], "is neither a file nor words"),
        (["--out", "config.json"], "config.json"),
        (["--now", "pp=2 ep=2"], "has no experts; give a divisor, or leave it out"),
        (["--cluster", "4x4090"], "device '4090' is unknown; known are a100"),
        (
            ["--now", "config.json"],
            "--now config.json: is a Hugging Face configuration, which describes a model and no run",
        ),
        (["--freeze", "vision", "--freeze", "lm"], "has no trainable module"),
    ],
)
def test_wrong_input_is_one_line(
    folder: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", "config.json", "--systems", "1f1b", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "modules"), [("qwen3-8b", ("layernorm",)), ("qwen3-30b-a3b", ("layernorm", "moe_act"))]
)
def test_selective_recomputation_names_the_modules_that_megatron_has(name, modules):
    layers = load_architecture(name).modules[-1].layers
    assert _recompute(ChunkStrategy("selective"), [4, 4], layers).modules == modules


def test_another_trainer_keeps_the_precision_of_the_run() -> None:
    own = msgspec.structs.replace(load_trainer("megatron"), precision="fp8_block", dropout=True)
    run = CurrentRun(pp=2, trainer=own)
    assert _trainer(run, None) == own
    assert _trainer(run, "fused") == msgspec.structs.replace(load_trainer("fused"), precision="fp8_block", dropout=True)
    assert _trainer(run, "fused mxfp8") == msgspec.structs.replace(load_trainer("fused mxfp8"), dropout=True)
    assert _trainer(None, None) == load_trainer("fused")
