"""What a run checks before its ranks start, and what it reads of an earlier start."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.spec import HostLink, RankSpec
from pipeloom.training import CheckpointConfig, LayoutConfig, ParallelConfig, Task
from pipeloom.training.display import Display
from pipeloom.training.loop_config import LogConfig
from pipeloom.training.record import Recorder, RunFacts
from tests.cli.test_record import Reports

RUN = sys.modules[pl.TrainingRun.__module__]
"""The module; `pipeloom.training.run` may not be an attribute of its package."""


def test_fewer_iterations_than_are_trained_are_refused(tmp_path: Path) -> None:
    config = pl.RunConfig(iterations=10, checkpoint=CheckpointConfig())
    run = pl.TrainingRun(config, Task(pl.Model, list), tmp_path, tmp_path / "train.toml")
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert run._resolve_resume(resume=True)
    (tmp_path / "checkpoints" / "step-00000030").mkdir()
    message = "^iterations: is 10, but the checkpoint has 30; raise it to at least 30, or use --from-scratch$"
    with pytest.raises(InputError, match=message):
        run._resolve_resume(resume=True)
    assert not run._resolve_resume(resume=False)
    (tmp_path / "train.toml").touch()
    with pytest.raises(InputError, match=r"train.toml: iterations: is 10, but"):
        run._resolve_resume(resume=True)


def test_the_summary_of_any_evaluation_can_be_read(tmp_path: Path) -> None:
    def evaluate(_: pl.Model) -> dict[str, float]:
        return {"is_good": True, "score": 0.5, "perplexity": math.inf, "broken": math.nan}

    scores = Task(pl.Model, list, evaluate=evaluate).scores(None)  # type: ignore[arg-type]
    recorder = Recorder(tmp_path)
    recorder.add(Reports()(0, fresh=False, reason="late"))
    written = recorder.write(
        msgspec.structs.replace(recorder.summarize(RunFacts("n", 1, 1, 0, ""), 1.0), evaluation=scores)
    )
    run = pl.TrainingRun(pl.RunConfig(), Task(pl.Model, list), tmp_path)
    found = run.summary()
    assert found.evaluation == pytest.approx(
        {"is_good": 1.0, "score": 0.5, "perplexity": math.nan, "broken": math.nan}, nan_ok=True
    )
    assert msgspec.structs.replace(found, evaluation={}) == msgspec.structs.replace(written, evaluation={})
    earlier = (tmp_path / "summary.json").read_text().replace('"is_good": 1.0', '"is_good": true')
    (tmp_path / "summary.json").write_text(earlier)
    assert run.summary().evaluation["is_good"] == 1.0
    (tmp_path / "summary.json").write_text('{"name": "n"}')
    with pytest.raises(InputError, match=r"summary.json: cannot be read \(.*; train the run to its end first"):
        run.summary()


class Heard(Display):
    """A display that keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def say(self, text: str, *, warning: bool = False) -> None:
        if warning:
            self.warnings.append(text)


def elastic_run(folder: Path) -> pl.TrainingRun:
    """A run over three declared hosts, with a link between any two."""
    links = tuple(HostLink(pair, 1e9 * sum(pair), 1e-5) for pair in ((0, 1), (0, 2), (1, 2)))
    config = pl.RunConfig(
        layout=LayoutConfig(3, elastic=True),
        cluster=RankSpec(hosts=(0, 1, 2), links=links),
        log=LogConfig(waiting_s=2.0),
    )
    return pl.TrainingRun(config, Task(pl.Model, list), folder, display=Heard())


MEASURED = HostLink((0, 1), 7e9, 1e-5)


@pytest.mark.parametrize("names_hosts", [True, False])
@pytest.mark.parametrize(
    ("hosts", "stages", "links"), [((0, 1), (0, 1), (MEASURED,)), ((0, 0), (), ()), ((0,), (), ())]
)
def test_an_elastic_run_goes_on_without_a_declared_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[int, ...],
    stages: tuple[int, ...],
    links: tuple[HostLink, ...],
    names_hosts: bool,
) -> None:
    """Hosts are then numbered anew, so a declared link may be one between other hosts."""
    monkeypatch.setattr(RUN, "find_hosts", lambda: hosts)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(RUN, "measure_links", lambda *_: (MEASURED,))
    run = elastic_run(tmp_path)
    if not names_hosts:
        config = msgspec.structs.replace(run.config, cluster=RankSpec(links=run.config.cluster.links))
        run = replace(run, config=config)
    cluster = run._with_num_processes(len(hosts))._with_measured_links().config.cluster
    assert (cluster.hosts, cluster.links) == (stages, links)


@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 0, 0)])
def test_an_elastic_run_with_all_ranks_keeps_its_declared_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(RUN, "find_hosts", lambda: hosts)
    run = elastic_run(tmp_path)
    assert run._with_measured_links().config.cluster == run.config.cluster


@pytest.mark.parametrize("is_declared", [True, False])
def test_links_to_hosts_of_other_replicas_are_not_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_declared: bool
) -> None:
    run = elastic_run(tmp_path)
    config = msgspec.structs.replace(
        run.config,
        cluster=RankSpec(links=run.config.cluster.links[:1] if is_declared else ()),
        layout=LayoutConfig(1),
        parallel=ParallelConfig(dp=2),
        log=LogConfig(),
    )
    monkeypatch.setattr(RUN, "find_hosts", lambda: (0, 1))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(RUN, "measure_links", lambda *_: run.config.cluster.links[:1])
    cluster = replace(run, config=config)._with_measured_links().config.cluster
    assert (cluster.hosts, cluster.links) == ((0,), ())


def test_a_run_with_new_replicas_does_not_wait(tmp_path: Path) -> None:
    run = elastic_run(tmp_path)
    fewer = run._with_num_processes(2)
    assert fewer.config.log.waiting_s == 2.0
    more = run._with_num_processes(6)
    assert (more.config.parallel.dp, more.config.log.waiting_s) == (2, 0.0)
    assert isinstance(run.display, Heard)
    assert "log.waiting_s: 2 is ignored, because the collectives of 2 replicas do not wait." in run.display.warnings
