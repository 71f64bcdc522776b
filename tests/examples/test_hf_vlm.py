"""A Qwen2.5-VL folder and shards train by a file alone, and the library reads what comes out."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

import pipeloom as pl
from pipeloom.cli.app import run
from tests.examples.on_ranks import EXAMPLES

pytestmark = pytest.mark.ranks


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hf_vlm_{name}", EXAMPLES / "hf_vlm" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(folder: Path, **changes: str) -> Path:
    """Run the example's file under a folder, with some lines of it changed, and export; the exported folder."""
    text = (EXAMPLES / "hf_vlm" / "train.toml").read_text()
    for name, value in changes.items():
        line = next(line for line in text.splitlines() if line.startswith(f"{name} = "))
        text = text.replace(line, f"{name} = {value}", 1)
    file = folder / "examples" / "hf_vlm" / "train.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert run(["train", str(file)]) == 0
    assert run(["export", "runs/hf_vlm", "--to", "runs/hf_vlm_trained"]) == 0
    return folder / "runs" / "hf_vlm_trained"


@pytest.mark.full
def test_the_library_reads_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script("make").main(num_shards=1, documents_per_shard=12, num_held_out=4)
    exported = trained(tmp_path, iterations="2", batch="6", every="1")
    summary = json.loads(Path("runs/hf_vlm/summary.json").read_text())
    assert (summary["iterations"], summary["plans_fresh"]) == (2, 2)
    # The library's own model, with the checkpoint read into it by Pipeloom, answers as the exported folder does.
    before = transformers.AutoModelForImageTextToText.from_pretrained("runs/hf_vlm_data/model").eval()
    pl.load_weights(sorted(Path("runs/hf_vlm/checkpoints").glob("step-*"))[-1], pl.from_transformers(before))
    after = transformers.AutoModelForImageTextToText.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    processor = transformers.AutoImageProcessor.from_pretrained(exported)
    read = script("read")
    for images, messages in read.documents(Path("runs/hf_vlm_data/held-out.tar")):
        given = read.encode(tokenizer, processor, images, messages)
        with torch.no_grad():
            assert torch.equal(before(**given).logits, after(**given).logits)


@pytest.mark.soak
def test_it_learns_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    script("make").main()
    exported = trained(tmp_path)
    summary = json.loads(Path("runs/hf_vlm/summary.json").read_text())
    assert summary["plans_fresh"] == summary["iterations"]
    capsys.readouterr()
    script("read").main(str(exported))
    shares = [float(line.split("(")[1].rstrip(")")) for line in capsys.readouterr().out.splitlines() if "right" in line]
    assert shares[0] >= 0.9
    assert shares[1] < 0.2
    shutil.rmtree(tmp_path / "runs")
