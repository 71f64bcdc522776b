"""What is to be run on a GPU is rehearsed here: a part that was never rehearsed does not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import on_gpu

pytestmark = pytest.mark.ranks
CHEAP = ("overhead",)


@pytest.mark.parametrize(
    "name", [each if each in CHEAP else pytest.param(each, marks=pytest.mark.full) for each in on_gpu.PARTS]
)
def test_a_part_runs_on_the_cpu_and_leaves_its_results(name: str, tmp_path: Path) -> None:
    assert on_gpu.main(["--dry", "--part", name, "--out", str(tmp_path)]) == 0, (tmp_path / "results.md").read_text()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["parts"][name]["exit"] == 0
    assert f"## {name}: {on_gpu.PARTS[name].question}" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "device.toml").exists() == (name == "calibrate")


@pytest.mark.full
def test_where_a_part_fails_or_hangs_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(code: str) -> on_gpu.Part:
        return on_gpu.Part("?", (), (("-c", "print('first')"), ("-c", code)))

    parts = {"fails": part("1 / 0"), "hangs": part("import time; time.sleep(600)"), "works": part("print('done')")}
    monkeypatch.setattr(on_gpu, "PARTS", parts)
    assert on_gpu.main(["--dry", "--seconds", "5", "--out", str(tmp_path)]) == 2
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: each["exit"] for name, each in found.items()} == {"fails": 1, "hangs": -9, "works": 0}
    text = (tmp_path / "results.md").read_text()
    assert "ZeroDivisionError" in text
    assert "first\ndone" in text


def test_parts_that_are_done_or_need_more_gpus_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (("-c", "print('ran')"),)
    one, two = on_gpu.Part("?", command, command), on_gpu.Part("?", command, command, num_gpus=2)
    monkeypatch.setattr(on_gpu, "PARTS", {"one": one})
    assert on_gpu.main(["--dry", "--out", str(tmp_path)]) == 0
    monkeypatch.setattr(on_gpu, "PARTS", {"one": one, "two": two})
    monkeypatch.setattr(on_gpu, "_machine", lambda: {"gpu": "some", "gpus": 1})
    assert on_gpu.main(["--out", str(tmp_path / "fresh")]) == 0
    assert "two: needs 2 GPUs, here is 1" in capsys.readouterr().out
    assert on_gpu.main(["--dry", "--resume", "--out", str(tmp_path)]) == 0
    assert "one: " not in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: each["exit"] for name, each in found.items()} == {"one": 0, "two": 0}
    assert (tmp_path / "results.md").read_text().count("ran") == 2
