"""Training over several hosts that share no folder, and whose clocks disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from tests.cli.test_train_resume import CONFIG, ITERATIONS, config, losses

from .hosts import Host, hosts, why_not

pytestmark = [pytest.mark.ranks, pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TIMEOUT_S = 600


def train(machines: list[Host], path: Path, folder: Path, *more: str, expect: int = 0) -> None:
    """Run a config with a rank on each host, each in a folder of its own."""
    started = []
    for host in machines:
        own = folder / f"host-{host.number}"
        own.mkdir(exist_ok=True, parents=True)
        command = [*host.torchrun(str(len(machines)), 1), "-m", "pipeloom", "train", str(path), "--runs", str(own)]
        started.append(host.start([*command, *more], folder))
    for process in started:
        assert process.wait(TIMEOUT_S) == expect, (folder / "host-0.txt").read_text()[-3000:]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_that_share_nothing_train_as_one(count: int, tmp_path: Path) -> None:
    path = config(tmp_path / "task", crash=False)
    task = (tmp_path / "task" / "task.py").read_text()
    (tmp_path / "task" / "task.py").write_text(task.replace("nn.Linear(4, 4)", "nn.Linear(4, 4), nn.Linear(4, 4)"))
    path.write_text(CONFIG.replace("ranks = 2", f"ranks = {count}"))
    assert run(["train", str(path), "--runs", str(tmp_path / "alone")]) == 0
    with hosts(count) as machines:
        train(machines, path, tmp_path)
        assert losses(tmp_path / "host-0") == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
        summary = json.loads((tmp_path / "host-0" / "t" / "summary.json").read_text())
        assert (summary["plans_fresh"], summary["plans_fallback"]) == (ITERATIONS, 0)
        # Every host has the whole of every checkpoint.
        saved = [contents(tmp_path / f"host-{host.number}" / "t" / "checkpoints") for host in machines]
        assert all(".metadata" in " ".join(each) for each in saved)
        names = [name for name in saved[0] if "step-" in name]
        assert all({name: each[name] for name in names} == {name: saved[0][name] for name in names} for each in saved)
