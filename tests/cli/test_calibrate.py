"""`pipeloom calibrate --base`: a table blended with files, and what the command says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeloom.cli.app import run
from pipeloom.emulator import Calibration, Measurement
from pipeloom.spec.catalog import load_device
from tests.calibration.documents import Trace, nccl_output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_evidence() -> list[str]:
    rng = np.random.default_rng(0)
    rows = ["kind,m,n,k,dtype,seconds"]
    for _ in range(30):
        m, n, k = (int(2 ** rng.uniform(11, 14)) for _ in range(3))
        rows.append(f"gemm,{m},{n},{k},bf16,{2 * m * n * k / 989.4e12 / 0.6:.4g}")
    rows.append("gemm,0,1,1,bf16,1")
    Path("gemm.csv").write_text("\n".join(rows) + "\n")
    sizes = [1 << k for k in range(20, 31)]
    Path("nccl.txt").write_text(nccl_output([(n, 20 + n / 2e5) for n in sizes], test="all_reduce"))
    trace = Trace()
    trace.operator("aten::native_layer_norm", [[8192, 4096], [], [4096], [4096], []], [("layer_norm", 60.0)])
    Path("trace.json").write_text(trace.text)
    return ["gemm.csv", "nccl.txt", "trace.json"]


def test_files_are_blended_into_a_table_that_other_commands_read(capsys: pytest.CaptureFixture[str]) -> None:
    files = write_evidence()
    assert run(["calibrate", "--base", "H100", "--out", "my.toml", *files]) == 0
    shown = capsys.readouterr().out
    assert "gemm.csv: table of kernels, 30 usable measurements" in shown
    assert "nccl.txt: output of nccl-tests, 11 usable measurements" in shown
    assert "trace.json: trace of torch.profiler, 1 usable measurements" in shown
    assert "1  gemm.csv: size that is not a whole number" in shown
    assert "with the base table" in shown
    base, device = load_device("h100"), load_device("my.toml")
    assert device.basis == "blended"
    assert "30 x matmul" in device.source
    assert base.efficiency["compute"]["matmul"] != device.efficiency["compute"]["matmul"]
    Path("one.toml").write_text(
        'name = "one"\nsource = "a test"\ndevice = "my.toml"\n'
        "devices_per_node = 8\nnum_nodes = 1\nnic_bytes_per_s = 5e10\n"
    )
    emulate = ["emulate", "llama3-8b", "--tp", "8", "--strategy", "recompute", "--json", "--cluster"]
    times = []
    for cluster in ("8xh100", "one.toml"):
        assert run([*emulate, cluster]) == 0
        times.append(json.loads(capsys.readouterr().out))
    assert times[1]["iteration_s"] > 1.05 * times[0]["iteration_s"]
    assert times[1]["device_basis"] == "blended"
    assert times[1]["interval_basis"].startswith(times[0]["interval_basis"].partition(";")[0])
    assert "before it was blended" in times[1]["interval_basis"]


def test_the_document_has_every_quantity_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--base", "h100", "--out", "my.toml", "--json", *write_evidence()]) == 0
    document = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in document["quantities"]}
    assert by_name["matmul, operations"]["num_observations"] == 30
    assert by_name["matmul, operations"]["evidence"] == pytest.approx(0.6, rel=0.01)
    assert by_name["matmul, operations"]["blended_error"] < by_name["matmul, operations"]["base_error"]
    assert by_name["latency of a message, nvlink"]["evidence"] is None
    assert document["files"]["nccl.txt"] == "output of nccl-tests"
    assert [row["count"] for row in document["unusable"]] == [1]
    assert document["median_blended_error"] < document["median_base_error"]


def test_the_network_that_counts_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [1 << k for k in range(20, 31)]
    Path("nodes.txt").write_text(nccl_output([(n, 200 + n / 3e4) for n in sizes], test="all_reduce", ranks=16, hosts=2))
    line = ["calibrate", "--base", "h100", "--out", "my.toml", "nodes.txt"]
    assert run(line) == 0
    assert "network between nodes: 400 Gbit/s a device, 5 us a message, assumed" in capsys.readouterr().out
    assert run([*line, "--cluster", "2x8xH100 ib200", "--json"]) == 0
    network = json.loads(capsys.readouterr().out)["network"]
    assert network == {"bytes_per_s": 25e9, "latency_s": 5e-6, "assumed": False}
    header = "id,device,gpus,arch,layers,hidden,ffn,heads,vocab,seq_len,mbs,gbs,iteration_s"
    Path("runs.csv").write_text(f"{header}\na,H100,16,dense,16,4096,14336,32,32000,4096,1,64,2.5\n")
    line[-1] = "runs.csv"
    assert run([*line, "--cluster", "2x8xH100 ib25"]) == 0
    assert "network between nodes: 25 Gbit/s a device, 5 us a message, from --cluster" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--device cpu --out x.toml --cluster 8xh100", "--cluster: is for evidence, but there is no --base"),
        ("--base h100 --out x.toml --cluster 8xb200 gemm.csv", "--cluster: has B200 SXM"),
        ("--out x.toml", "neither --device nor --base"),
        ("--base h100 --out x.toml", "--base: has no evidence to blend with"),
        ("--device cpu --out x.toml gemm.csv", "gemm.csv: is evidence, but there is no --base"),
        ("--base h9000 --out x.toml gemm.csv", "devices 'h9000': is unknown"),
        ("--base h100 --out x.toml --plot p.html gemm.csv", "--plot: draws what --device measures"),
        ("--base h100 --out gemm.csv gemm.csv", "does not end in .toml"),
        ("--base b200 --out x.toml other.csv", "30 x measured on another device (NVIDIA H100)"),
        ("--base h100 --out x.toml missing.csv", "missing.csv: cannot be read: no such file"),
        ("--device cpu --quick --base h100 --out x.toml", "is a table of H100 SXM5 80GB, but this device is a CPU"),
    ],
)
def test_wrong_lines_are_one_error(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_evidence()
    rows = Path("gemm.csv").read_text().splitlines()[1:-1]
    Path("other.csv").write_text("\n".join(["kind,m,n,k,dtype,seconds,gpu", *(f"{row},NVIDIA H100" for row in rows)]))
    assert run(["calibrate", *line.split()]) == 2
    assert message in capsys.readouterr().err
    assert not Path("x.toml").exists()


def test_measurements_of_this_machine_are_blended_with_a_base(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["calibrate", "--device", "cpu", "--quick", "--repeats", "1", "--no-links"]
    assert run([*quick, "--out", "cpu.toml", "--name", "this cpu"]) == 0
    assert run([*quick, "--base", "cpu.toml", "--out", "blended.toml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.partition("\n{")[2].join(("{", "")))
    assert {row["name"] for row in document["quantities"]} >= {"matmul, operations"}
    device = load_device("blended.toml")
    assert (device.name, device.basis) == ("this cpu", "blended")


def test_files_are_read_before_this_machine_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(device: str, **options: object) -> Calibration:
        measured.append(device)
        product = Measurement("matmul", "m", 1e-3, flops=0.6 * 989.4e12 * 1e-3, memory_bytes=1e8)
        return Calibration(load_device("h100"), (), (), measurements=(product,) * 3)

    monkeypatch.setattr("pipeloom.cli.calibrate._measured", measure)
    line = ["calibrate", "--device", "cuda", "--base", "h100", "--out", "my.toml"]
    assert run([*line, "missing.csv"]) == 2
    assert "missing.csv: cannot be read: no such file" in capsys.readouterr().err
    assert not measured
    Path("useless.csv").write_text("kind,m,n,k,seconds\ngemm,0,1,1,1\n")
    assert run([*line, "useless.csv"]) == 0
    shown = capsys.readouterr().out
    assert "this machine: timed now, 3 usable measurements" in shown
    assert "1  useless.csv: size that is not a whole number" in shown
    assert measured == ["cuda"]
    assert load_device("my.toml").basis == "blended"


def test_runs_are_predicted_with_a_blended_table(capsys: pytest.CaptureFixture[str]) -> None:
    write_evidence()
    assert run(["calibrate", "--base", "h100", "--out", "my.toml", "gemm.csv"]) == 0
    header = "id,device,gpus,model,arch,layers,hidden,ffn,heads,kv_heads,vocab,seq_len,tp,pp,mbs,gbs,gated,norm,pos"
    row = "mine,H100,8,x,dense,16,4096,14336,32,8,128256,8192,2,1,1,32,1,rms,rope"
    Path("runs.csv").write_text(f"{header}\n{row}\n")
    capsys.readouterr()
    seconds = []
    for more in ([], ["--device", "my.toml"]):
        assert run(["validate", "runs.csv", "--json", *more]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["runs"][0]["predicted_s"])
    assert seconds[1] > 1.05 * seconds[0]
    assert run(["validate", "runs.csv", "--device", "my.toml", "--leave-out", "device"]) == 2
    assert "--leave-out: fits the constants again" in capsys.readouterr().err
