"""A model's folder and shards are trained from a file alone, or in a few lines."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.runtime.data.batches import bound
from pipeloom.spec import Workload
from pipeloom.training import read_history
from pipeloom.training.measure import show_first_sample

from . import made

CONFIG = """
name = "talks"
iterations = 4
[model]
transformers = "model"
freeze = ["vision"]
[data]
webdataset = "shards/*.tar"
batch = 5
{data}
[layout]
ranks = 2
[packing]
token_budget = 130
[planner]
deadline_s = 30.0
[checkpoint]
every = 2
keep = 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    made.save_processor(path / "model")
    made.vlm(torch.float32).save_pretrained(path / "model")
    (path / "shards").mkdir()
    talks = made.talks(9)
    # Cut off: found by its end.
    talks[3]["0.png"] = talks[3]["0.png"][:-100]
    made.write_shard(path / "shards" / "0.tar", talks)
    return path


def config(folder: Path, data: str = "", **lines: str) -> Path:
    text = CONFIG.format(data=data)
    for old, new in lines.items():
        text = text.replace(old, new)
    file = folder / "train.toml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[pl.TrainingRun, pl.Summary]:
    """A run of a file alone, with evaluations."""
    made.write_shard(folder / "held_out.tar", made.talks(4, seed=1))
    held_out = '[evaluation]\nevery = 2\n[evaluation.data]\nwebdataset = "held_out.tar"\n[layout]'
    file = config(folder, "skip_corrupt = true", **{"[layout]": held_out})
    run = pl.TrainingRun.from_toml(file, runs=folder / "runs")
    summary = run.train()
    assert summary is not None
    return run, summary


@pytest.mark.ranks
def test_a_file_alone_trains(trained: tuple[pl.TrainingRun, pl.Summary]) -> None:
    _, summary = trained
    assert summary.iterations == 4
    assert [iteration for iteration, _ in summary.evaluations] == [2, 4]
    # Two passes of nine samples and two more: the damaged one comes at least twice.
    assert summary.samples_skipped >= 2


@pytest.mark.full
@pytest.mark.ranks
def test_a_file_alone_goes_on_where_it_was(folder: Path, trained: tuple[pl.TrainingRun, pl.Summary]) -> None:
    run, _ = trained
    history = folder / "runs" / "talks" / "history.jsonl"
    before = [row.loss for row in read_history(history)]
    saved = run.checkpoints
    assert saved is not None
    newest = saved.newest()
    assert newest is not None
    shutil.rmtree(newest)
    resumed = run.resume()
    assert resumed is not None
    assert resumed.resumed_at == (2,)
    assert [row.loss for row in read_history(history)] == pytest.approx(before, rel=1e-5)
    # As if the run had been killed in its last evaluation.
    evaluations = history.with_name("evaluations.jsonl")
    evaluations.write_text(evaluations.read_text().splitlines(keepends=True)[0])
    again = run.resume()
    assert again is not None
    assert again.evaluations == resumed.evaluations


@pytest.fixture(scope="module")
def texts(folder: Path) -> str:
    """Shards of conversations without images, as a config names them."""
    talks = [{"json": talk["json"]} for talk in made.talks(20) if "0.png" not in talk]
    made.write_shard(folder / "texts.tar", talks)
    return 'webdataset = "texts.tar"'


IMAGES = 'webdataset = "shards/*.tar"'


@pytest.mark.parametrize("kind", ["separate", "encoder_first", "chosen"])
def test_a_model_that_sees_is_prepared_for_texts_alone(folder: Path, texts: str, kind: str) -> None:
    layout = f'ranks = 2\nkind = "{kind}"'
    run = pl.TrainingRun.from_toml(
        config(folder, **{IMAGES: texts, 'freeze = ["vision"]': "", "ranks = 2": layout}), runs=folder / kind
    )
    run.folder.mkdir(parents=True)
    problem = run.prepare()
    # An image that comes in a later batch has a cost that grows with it.
    costs = problem.costs
    block = problem.layout.chunks[problem.layout.chunks_of("vision")[0]]
    small, large = (costs.chunk_costs(block, Workload((size,)))[0] for size in (64, 4096))
    assert 0 < small.forward_s <= large.forward_s
    assert 0 < 2 * small.activation_bytes < large.activation_bytes


EVALUATION = "[evaluation]\nevery = 2\n"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", "evaluation.data: names no source; name held-out data there"),
        ("[evaluation.data]\nbatchh = 3\nwebdataset = '0.tar'\n", "evaluation.data: batchh: is not a known field"),
        ("[evaluation.data]\nwebdataset = 'no.tar'\n", "evaluation.data: webdataset = .*no such file"),
        ("[evaluation.data]\nparquet = 'no.parquet'\n", "evaluation.data: parquet = .*no such file"),
    ],
)
def test_what_is_wrong_with_the_held_out_data_is_said_before_training(folder: Path, lines: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        pl.TrainingRun.from_toml(config(folder, **{"[layout]": f"{EVALUATION}{lines}[layout]"}))


def test_a_run_that_trains_nothing_is_refused(folder: Path) -> None:
    frozen = config(folder, **{'freeze = ["vision"]': 'freeze = ["vision", "lm"]'})
    with pytest.raises(InputError, match=r"train.toml: model.freeze: leaves nothing to train: vision, lm are frozen"):
        pl.TrainingRun.from_toml(frozen, runs=folder / "nothing").train()


def test_what_is_wrong_with_the_model_is_said_of_the_file(folder: Path) -> None:
    def refused(**lines: str) -> str:
        with pytest.raises(InputError) as caught:
            pl.TrainingRun.from_toml(config(folder, **lines), runs=folder / "refused").train()
        return str(caught.value).partition("train.toml: ")[2]

    misspelt = refused(**{'freeze = ["vision"]': 'freeze = ["visoin"]'})
    assert misspelt == "model.freeze: 'visoin' is not a module; choose from vision, lm"
    placed = refused(**{"[packing]": "[layout.modules.visoin]\nsegments = 1\n[packing]"})
    assert placed == "layout.modules: module 'visoin': is unknown; the model has vision, lm"
    shutil.copytree(folder / "model", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.transformers: " in (cut := refused(**{'"model"': '"cut"'}))
    assert "model.safetensors" in cut


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("pictures = 3", "data: pictures: is not a known field"),
        ('parquet = "x.parquet"', "data: .*2 sources; give one of webdataset, parquet, datasets"),
        ('text = "txt"', r"data: text = 'txt': no sample of .* has it; there are 0.png, json, 1.png"),
        ('processor = "nowhere"', "data: processor = .*nowhere': is not a folder"),
        (
            'skip_corrupt = true\nexclude = ["0.tar/9"]',
            "data.exclude: '0.tar/9' is not a sample of the data; .*'0.tar/000'",
        ),
        ('messages = "json"\ntext = "json"', "data: text = 'json': is set together with messages = 'json'; set one"),
        ('train_on = "both"', "data: train_on: 'both' is not one of 'all', 'assistant'"),
        ('exclude = ["0.tar/003"]', "data: exclude: names samples, but skip_corrupt is false"),
        ('function = "nowhere.py:f"', "is not a file"),
        ("REPLICAS", "data.batch: 1 is below parallel.dp, 2 replicas; give every replica a sample"),
        ("BATCH", "data.batch: 10000000 is above the 9 samples of the data; give at most this many"),
        ("SHARDS = []", "webdataset: names no file"),
        ('SHARDS = "a-{000..001.tar"', "has invalid braces"),
    ],
)
def test_what_is_wrong_with_the_data_is_one_line(folder: Path, data: str, problem: str) -> None:
    shards = 'webdataset = "shards/*.tar"'
    lines = {} if "SHARDS" not in data else {shards: "", "SHARDS": "webdataset"}
    if data == "BATCH":
        data, lines = "", {"batch = 5": "batch = 10000000"}
    if data == "REPLICAS":
        data, lines = "", {"batch = 5": "batch = 1", "[packing]": "[parallel]\ndp = 2\n[packing]"}
    with pytest.raises(InputError, match=problem) as caught:
        pl.TrainingRun.from_toml(config(folder, data, **lines))
    assert "\n" not in str(caught.value)
    assert "train.toml" in str(caught.value)


def test_other_paths_that_are_not_there_are_one_line(folder: Path) -> None:
    for old, new, problem in (
        ("shards/*.tar", "nowhere/*.tar", r"webdataset.* = .*: no such file: .*nowhere/\*.tar"),
        ('"model"', '"nowhere"', "model.transformers: .*nowhere' is not a folder"),
        ("freeze", "thaw", "model: thaw: is not a known field"),
    ):
        with pytest.raises(InputError, match=problem):
            pl.TrainingRun.from_toml(config(folder, **{old: new}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "frobnicate"}, "config.json: is not a configuration .*frobnicate"),
        (
            {"num_hidden_layers": 3},
            "config.json: is not a configuration .*must be equal to the number of `layer_types`",
        ),
        (
            {"num_attention_heads": 0},
            "config.json: does not describe a Qwen2_5_VLForConditionalGeneration .*ZeroDivisionError",
        ),
    ],
)
def test_a_configuration_that_makes_no_model_is_said_of_it_and_not_of_the_processor(
    folder: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    for name in ("model", "shards"):
        shutil.copytree(folder / name, tmp_path / name)
    file = tmp_path / "model" / "config.json"
    config_of = json.loads(file.read_text())
    (config_of if "model_type" in changes else config_of["text_config"]).update(changes)
    file.write_text(json.dumps(config_of))
    with pytest.raises(InputError, match=f"train.toml: model.transformers: .*{problem}") as caught:
        pl.TrainingRun.from_toml(config(tmp_path)).build_model()
    assert "\n" not in str(caught.value)


class Heard:
    """A display that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, *, warning: bool = False) -> None:
        del warning
        self.lines.append(text)


def test_a_sample_is_shown_with_its_targets_before_anything_is_measured(folder: Path, caplog: Any) -> None:
    heard: Any = Heard()
    run = pl.TrainingRun.from_toml(config(folder, "skip_corrupt = true"), runs=folder / "shown", display=heard)
    caplog.set_level("INFO", logger="pipeloom")
    show_first_sample(run)
    [line] = heard.lines
    assert re.search(r"First sample, .*: <turn>user.*what\?<stop>\\n<turn>assistant\\n>>>\d+<stop>\\n<<<$", line)
    assert line in caplog.messages


def test_a_processor_that_differs_ends_training_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: Any) -> str:
        raise InputError("x: input_ids", "differs")

    monkeypatch.setattr(pl.WebDataset, "preview", differs)
    monkeypatch.setattr(pl.TrainingRun, "_measured_problem", lambda *_: pytest.fail("measured"))
    with pytest.raises(InputError, match="x: input_ids: differs"):
        pl.TrainingRun.from_toml(config(folder, "skip_corrupt = true"), runs=folder / "differs").prepare()


def test_a_damaged_sample_ends_training_in_one_line(folder: Path) -> None:
    run = pl.TrainingRun.from_toml(config(folder), runs=folder / "other")
    batches: Any
    batches, _ = run.task.batches_from(0, 4)
    with pytest.raises(InputError, match=r"0.tar/003.0.png: cannot be read as an image \(.*truncated"):
        list(bound(batches, run.build_model()))


def test_a_sample_longer_than_the_token_budget_is_named(folder: Path) -> None:
    file = config(folder, "skip_corrupt = true", **{"token_budget = 130": "token_budget = 20"})
    run = pl.TrainingRun.from_toml(file, runs=folder / "longer")
    with pytest.raises(InputError, match=r"'0.tar/00\d'\): \d+ tokens exceed the token budget of 20; raise"):
        run.prepare()


def test_evaluation_reads_other_data_in_order(folder: Path) -> None:
    made.write_shard(folder / "held_out.tar", made.talks(4, seed=1))
    own = '[evaluation]\nevery = 2\n[evaluation.data]\nwebdataset = "held_out.tar"\nbatch = 3\n[layout]'
    run = pl.TrainingRun.from_toml(config(folder, "skip_corrupt = true", **{"[layout]": own}))
    assert run.config.evaluation is not None
    batches: Any = run.task.evaluation_batches(run.config.data, run.config.evaluation.data)
    found = list(bound(batches, run.build_model()))
    names = [[sample.id for sample in batch.metadata] for batch in found]
    assert names == [[f"held_out.tar/{i:03d}" for i in range(3)], ["held_out.tar/003"]]


def test_a_resumed_run_begins_with_the_batch_before(folder: Path) -> None:
    run = pl.TrainingRun.from_toml(config(folder))
    batches: Any
    batches, count = run.task.batches_from(3, 4)
    assert (batches.first, count, len(batches)) == (2, 1, 4)
