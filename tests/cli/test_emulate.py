"""`pipeloom emulate`, `sweep` and `calibrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.spec.catalog import load_cluster
from tests.integrations.published import PUBLISHED, QWEN2_5_VL_7B
from tests.zoo import zoo_models


@pytest.mark.parametrize("model", zoo_models())
def test_every_model_of_the_zoo_is_emulated(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["emulate", model, "--pp", "2", "--microbatches", "2", "--strategy", "full", "--json"]
    assert run(line) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind_of_time"] == "emulated"
    assert document["iteration_s"] >= document["pipeline_s"] > 0
    assert 0 < document["mfu"] < 1
    assert 0 <= document["bubble_share"] < 1
    peaks, static = document["peak_memory_bytes"], document["static_memory_bytes"]
    assert len(peaks) == 2
    assert all(peak > held > 0 for peak, held in zip(peaks, static, strict=True))


def test_own_samples_are_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = tmp_path / "samples.jsonl"
    rows = [{"id": f"s{i}", "text_tokens": 9000, "image_tokens": [9] * 60} for i in range(2)]
    samples.write_text("\n".join(map(json.dumps, rows)))
    assert run(["emulate", "vlm-s", "--tp", "4", "--pp", "2", "--data", str(samples), "--microbatches", "2"]) == 0
    assert "2 microbatches of 2 samples: 18,000 tokens of text, 120 images" in capsys.readouterr().out


def _clips(path: Path, seconds: list[float]) -> str:
    """Write two samples with clips of these lengths; return the file's name."""
    sizes = {"video_seconds": seconds, "video_height": [480] * len(seconds), "video_width": [832] * len(seconds)}
    path.write_text("\n".join(json.dumps({"id": f"s{i}", "text_tokens": 100, **sizes}) for i in range(2)))
    return str(path)


_VIDEO = ["wan2.1-14b", "--cluster", "dip-h800-64", "--microbatches", "2", "--json", "--data"]


def test_own_clips_are_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clips beyond the 16 s of the papers take longer, and several clips of a sample count together."""
    found = []
    for name, seconds in (("16", [16.0]), ("60", [60.0]), ("two", [30.0, 30.0])):
        samples = _clips(tmp_path / f"{name}.jsonl", seconds)
        assert run(["emulate", *_VIDEO, samples, "--tp", "8", "--dp", "8"]) == 0
        found.append(json.loads(capsys.readouterr().out)["iteration_s"])
    short, long, two = found
    assert long > 60 / 16 * short  # attention grows with the square
    assert 60 / 16 * short < two < long


def test_own_clips_are_not_cut_in_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = []
    for seconds in (16.0, 60.0):
        samples = _clips(tmp_path / f"{seconds}.jsonl", [seconds])
        assert run(["sweep", *_VIDEO, samples, "--gpus", "16"]) == 0
        best.append(json.loads(capsys.readouterr().out)["entries"][0]["iteration_s"])
    assert best[1] > 60 / 16 * best[0]


def test_a_sample_without_a_clip_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = _clips(tmp_path / "samples.jsonl", [])
    assert run(["emulate", *_VIDEO, samples]) == 2
    assert "sample 's0': has no video, but the model reads videos" in capsys.readouterr().err


def test_pictures_and_own_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = tmp_path / "samples.jsonl"
    rows = [
        {"id": f"s{i}", "text_tokens": 4000, "image_tokens": [169] * 5, "image_patches": [2704] * 5} for i in range(12)
    ]
    samples.write_text("\n".join(map(json.dumps, rows)))
    html, trace = tmp_path / "page.html", tmp_path / "trace.json"
    line = ["emulate", "vlm-s", "--tp", "2", "--pp", "4", "--data", str(samples), "--microbatches", "4"]
    assert run([*line, "--html", str(html), "--trace", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == [str(trace), str(html)]
    assert "emulated" in html.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert run([*line[:-1], "400"]) == 2
    assert "microbatches, but 400 are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("emulate nope", "model 'nope': is unknown"),
        ("emulate vlm-m --freeze audio", "module 'audio': is unknown; the model has vision, lm"),
        ("emulate vlm-m --tp 3 --pp 4", "heads: 16 is not a multiple of tensor parallelism 3"),
        ("emulate vlm-m --cluster x", "clusters 'x': is unknown"),
        ("emulate vlm-m --strategy wild", "strategy: 'wild' is not one of keep"),
        ("emulate vlm-m --strategy full:2", "strategy: '2' is not a share of the layers; give one from 0 to 1"),
        ("emulate vlm-m --strategy full:-1", "strategy: '-1' is not a share"),
        ("emulate vlm-m --strategy full:nan", "strategy: 'nan' is not a share"),
        ("emulate vlm-m", "GiB are usable; raise tensor or pipeline parallelism"),
        ("emulate t2v-s --data dip-vlm", "has samples without videos, which T2V-S reads; use dip-t2v"),
        ("emulate vlm-m --zero 2", "use 0, 1 or 3"),
        ("sweep vlm-m --gpus 1000000", "num_devices: 1000000 is not within 1..64"),
        ("calibrate --device tpu --out x.toml", "--device: 'tpu' is neither 'cpu' nor 'cuda'"),
        ("calibrate --device cpu --out x.json", "does not end in .toml"),
    ],
)
def test_wrong_values_are_named(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    assert message in capsys.readouterr().err


def test_sweep_ranks_what_runs_and_says_what_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", "vlm-s", "--gpus", "8", "--microbatches", "4", "--max-tp", "2", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    times = [entry["iteration_s"] for entry in entries if "iteration_s" in entry]
    assert times == sorted(times)
    assert len(times) >= 2
    assert any("microbatches for 8 replicas" in entry.get("problem", "") for entry in entries)


def test_every_time_has_an_interval_and_its_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for trainer in ("fused", "megatron", "pipeloom"):
        line = ["emulate", "llama2-7b", "--cluster", "8xH100", "--microbatches", "2", "--trainer", trainer]
        assert run([*line, "--zero", "3", "--dp", "8", "--strategy", "full", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["trainer"] == trainer
        assert document["iteration_low_s"] < document["iteration_high_s"]
        assert "published runs of dense models in 16 bits on H100" in document["interval_basis"]
        times.append(document["iteration_s"])
    assert times == sorted(set(times))
    assert run([*line, "--zero", "3", "--dp", "8", "--strategy", "full"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "80 % interval" in shown
    assert "trainer: pipeloom (no overlap)" in shown
    assert "none by the trainer pipeloom" in shown


def test_a_trainer_is_a_name_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nelementwise = 3.0\n')
    line = ["sweep", "llama2-7b", "--cluster", "8xH100", "--microbatches", "8", "--max-tp", "1", "--json", "--trainer"]
    assert run([*line, str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trainer"] == "mine"
    entries = [entry for entry in document["entries"] if "problem" not in entry]
    assert all(entry["iteration_low_s"] < entry["iteration_high_s"] for entry in entries)
    assert [entry["sign_probability"] > 0.5 for entry in entries] == [False] + [True] * (len(entries) - 1)
    assert run([*line, "megatorn"]) == 2
    assert "the zoo has fused, megatron, pipeloom, torchtitan" in capsys.readouterr().err


def test_sweep_prints_what_runs_and_lists_what_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", "vlm-s", "--gpus", "4", "--microbatches", "2", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 of " in shown
    assert "combinations cannot run:" in shown
    assert "dp 4 tp 1 pp 1: 2 microbatches for 4 replicas" in shown


@pytest.mark.full
@pytest.mark.ranks
def test_calibrate_writes_a_table_that_can_be_emulated_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, plot = tmp_path / "cpu.toml", tmp_path / "plot.html"
    line = [
        "calibrate",
        "--device",
        "cpu",
        "--quick",
        "--repeats",
        "1",
        "--out",
        str(table),
        "--plot",
        str(plot),
        "--json",
    ]
    assert run(line) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layers"]
    assert all(row["predicted_s"] > 0 for row in document["operators"])
    assert "Calibration" in plot.read_text()
    cluster = tmp_path / "one.toml"
    cluster.write_text(
        f'name = "one"\nsource = "a test"\ndevice = "{table}"\ndevices_per_node = 1\nnum_nodes = 1\n'
        "nic_bytes_per_s = 1e9\nnic_latency_s = 1e-5\n"
    )
    device = load_cluster(str(cluster)).device
    assert device.basis == "measured"
    # Two processes over loopback: the link inside a node, said so in the table.
    assert "gloo over loopback" in device.source
    assert device.source.endswith(document["links_note"])
    assert 1e6 < device.nvlink_bytes_per_s < 1e12
    assert 0 < device.nvlink_latency_s < 0.1
    assert set(device.efficiency["nvlink"]) == {"send", "all_reduce", "all_gather", "*"}
    assert {row["name"].split()[0] for row in document["links"]} == {"send", "all_reduce", "all_gather"}
    assert document["mean_link_error"] > 0


def test_links_are_left_out_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "cpu.toml"
    line = ["calibrate", "--device", "cpu", "--quick", "--repeats", "1", "--no-links", "--out", str(table)]
    assert run(line) == 0
    shown = capsys.readouterr()
    assert "Links were not measured, as asked." in shown.out
    assert "between 2 processes" not in shown.err
    assert "nvlink_bytes_per_s = 0.0" in table.read_text()


def test_a_config_is_swept_and_points_that_cannot_be_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN2_5_VL_7B))
    line = ["sweep", str(config), "--gpus", "8", "--microbatches", "2", "--freeze", "vision"]
    assert run([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(document["parameters"].values()) == PUBLISHED["Qwen2.5-VL-7B"][1]
    ran = [entry for entry in document["entries"] if "problem" not in entry]
    refused = {entry["tensor"]: entry["problem"] for entry in document["entries"] if "problem" in entry}
    assert all(entry["tokens_per_s_per_device"] > 0 for entry in ran)
    assert [span for chunks in ran[0]["layers"] for spans in chunks.values() for span in spans]
    assert refused[8].startswith("weight rows: 3420 is not a multiple of tensor parallelism 8")
    assert run(line) == 0
    out = capsys.readouterr().out
    assert "8,292,166,656 parameters (vision 676,550,144 frozen, lm 7,615,616,512)" in out
    assert "2 microbatches of " in out
    assert " tokens of text, " in out
    assert "tp 8 pp 1: weight rows: 3420 is not a multiple of tensor parallelism 8" in out


def test_layers_of_each_rank_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["emulate", "vlm-s", "--tp", "4", "--pp", "2", "--microbatches", "2", "--strategy", "full"]) == 0
    out = capsys.readouterr().out
    assert "vision 0-" in out
    assert "lm 0-" in out
    assert "tokens/s" in out


def test_what_the_host_does_not_hold_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["emulate", "llama2-7b", "--pp", "2", "--tp", "4", "--microbatches", "2", "--strategy", "offload"]
    assert run([*line, "--cluster", "h100-8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"]
    assert min(document["host_memory_bytes"]) > 0
    cluster = tmp_path / "cluster.toml"
    text = 'name = "own"\nsource = "made up"\ndevice = "h100"\n'
    cluster.write_text(text + "devices_per_node = 8\nnum_nodes = 1\nnic_bytes_per_s = 5e10\n")
    assert run([*line, "--cluster", str(cluster)]) == 0
    assert "per device to the host, the cluster does not declare host_memory_bytes" in capsys.readouterr().out
