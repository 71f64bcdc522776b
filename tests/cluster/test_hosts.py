"""Training over several hosts that share no folder, and whose clocks disagree."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from tests.cli.test_train_resume import CONFIG, ITERATIONS, config, losses

from .hosts import Host, cut, hosts, join, runs_ranks, stop, why_not

pytestmark = [pytest.mark.ranks, pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TIMEOUT_S = 600


def train(machines: list[Host], path: Path, folder: Path, *more: str, per_host: int = 1, expect: int = 0) -> None:
    """Run a config with as many ranks on each host, each in a folder of its own."""
    started = []
    for host in machines:
        own = folder / f"host-{host.number}"
        own.mkdir(exist_ok=True, parents=True)
        begin = host.torchrun(str(len(machines)), per_host)
        command = [*begin, "-m", "pipeloom", "train", str(path), "--runs", str(own)]
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


def test_links_are_measured_and_planned_with(tmp_path: Path) -> None:
    path = config(tmp_path / "task", crash=False)
    task = (tmp_path / "task" / "task.py").read_text()
    (tmp_path / "task" / "task.py").write_text(task.replace("nn.Tanh(), ", "nn.Tanh(), nn.Tanh(), nn.Tanh(), "))
    path.write_text(CONFIG.replace("ranks = 2", 'ranks = 4\nkind = "chosen"'))
    assert run(["train", str(path), "--runs", str(tmp_path / "alone")]) == 0
    with hosts(2) as machines:
        train(machines, path, tmp_path, per_host=2)
    assert losses(tmp_path / "host-0") == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    summary = json.loads((tmp_path / "host-0" / "t" / "summary.json").read_text())
    assert (summary["plans_fresh"], summary["plans_fallback"]) == (ITERATIONS, 0)
    cluster = json.loads((tmp_path / "host-0" / "t" / "setup.json").read_text())["cluster"]
    assert cluster["hosts"] == [0, 0, 1, 1]
    speed = {tuple(link["hosts"]): link["bytes_per_s"] for link in cluster["links"]}
    assert sorted(speed) == [(0, 0), (0, 1), (1, 1)]
    assert speed[0, 1] < min(speed[0, 0], speed[1, 1])
    alone = json.loads((tmp_path / "alone" / "t" / "setup.json").read_text())["cluster"]
    assert (alone["hosts"], alone["links"]) == ([], [])


@pytest.mark.parametrize(("how", "comes_back"), [(stop, False), (cut, False), (cut, True)])
def test_a_host_is_lost_and_training_goes_on_on_the_others(
    how: Callable[[Host], None], comes_back: bool, tmp_path: Path
) -> None:
    path = config(tmp_path / "task", crash=False)
    task = (tmp_path / "task" / "task.py").read_text()
    task = task.replace("nn.Linear(4, 4)", "nn.Linear(4, 4), nn.Linear(4, 4)")
    (tmp_path / "task" / "task.py").write_text(task.replace("return 0.0", "import time; time.sleep(0.2); return 0.0"))
    text = CONFIG.replace("iterations = 7", "iterations = 30").replace("ranks = 2", "ranks = 3\nelastic = true")
    path.write_text(text)
    assert run(["train", str(path), "--runs", str(tmp_path / "alone")]) == 0
    with hosts(3) as machines:
        command = ["-m", "pipeloom", "train", str(path), "--runs"]
        conf = "join_timeout=120,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
        started = []
        for host in machines:
            own = tmp_path / f"host-{host.number}"
            own.mkdir()
            begin = host.torchrun("2:3", 1, "--max-restarts", "3", conf=conf)
            started.append(host.start([*begin, *command, str(own)], tmp_path))
        history = tmp_path / "host-0" / "t" / "history.jsonl"
        wait_for(lambda: history.exists() and len(history.read_text().splitlines()) > 8)
        how(machines[2])
        lost_at = time.monotonic()
        said = tmp_path / "host-0.txt"
        wait_for(lambda: "rank 2 is lost" in said.read_text() + (tmp_path / "host-1.txt").read_text())
        assert time.monotonic() - lost_at < TIMEOUT_S
        # Those of the lost host end too: nobody can tell them, but they miss rank 0.
        wait_for(lambda: not runs_ranks(machines[2]))
        if comes_back:
            join(machines[2])
        for process in started if comes_back else started[:2]:
            assert process.wait(TIMEOUT_S) == 0, said.read_text()[-3000:]
        stop(machines[2])
        started[2].wait()
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(30))
    alone = [json.loads(line) for line in (tmp_path / "alone" / "t" / "history.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-9)
    assert comes_back or "2 processes in place of 3: 2 pipeline ranks, 1 replicas" in said.read_text()


def wait_for(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.1)
