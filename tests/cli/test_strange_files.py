"""Pipes, devices, links and folders in place of a run's files: a run does its work or names what is in the way."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .test_damaged_folders import ITERATIONS, Campaign

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")]

PLACES = (
    "t",
    "t/.lock",
    "t/setup.json",
    "t/history.jsonl",
    "t/summary.json",
    "t/evaluations.jsonl",
    "t/layouts.jsonl",
    "t/timeline.html",
    "t/trace.json",
    "t/difference.html",
    "t/comparison.html",
    "t/plans",
    "t/plans/00005.plan",
    "t/tensorboard",
    "t/checkpoints",
    "t/checkpoints/step-00000007",
    "t/checkpoints/step-00000007.partial",
    "t/checkpoints/step-00000007.replaced",
    "t/checkpoints/step-00000007/.metadata",
    "t/checkpoints/step-00000007/__0_0.distcp",
    "t/checkpoints/step-00000007/trainer.json",
    "t/checkpoints/step-00000007/digests-0.json",
)


def _outside(path: Path) -> Path:
    return next(each for each in path.parents if (each / "outside").exists()) / "outside"


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "own.txt").write_text("own")


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: os.mknod(path, 0o020666, os.makedev(1, 5)),
    "dangling link": lambda path: path.symlink_to("nowhere/at/all"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a file": lambda path: path.symlink_to(_outside(path) / "kept.txt"),
    "link to a folder": lambda path: path.symlink_to(_outside(path)),
    "folder": _folder,
    "empty file": Path.touch,
}


# What once lost or changed something, or ended in an internal error.
FOUND = [
    ("t/.lock", "link to a file"),
    ("t/history.jsonl", "link to a file"),
    ("t/history.jsonl", "folder"),
    ("t/checkpoints", "link to itself"),
    ("t/plans", "pipe"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    code, said = Campaign(folder, random.Random(0), 0.0).train(fault="none", resume=False)
    assert code == 0, said
    return folder


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(place, kind, marks=pytest.mark.full if (place, kind) in FOUND else pytest.mark.soak)
        for place in PLACES
        for kind in KINDS
    ],
)
def test_what_is_no_file_of_the_run_is_replaced_or_named(
    place: str, kind: str, resume: bool, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "t", tmp_path / "t")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept.txt").write_text("kept")
    path = tmp_path / place
    if path.exists():
        path.rename(tmp_path / "away")
    KINDS[kind](path)
    campaign = Campaign(tmp_path, random.Random(0), 0.0)
    before = campaign.good()
    code, said = campaign.train(fault="none", resume=resume)
    assert code in (0, 2), said
    assert "Traceback" not in said
    assert (outside / "kept.txt").read_text() == "kept"
    if code == 0:
        assert ITERATIONS in campaign.good(), said
        return
    [line] = [line for line in said.splitlines() if line.startswith("pipeloom: ")]
    assert str(path) in line
    # Nothing is removed before what is in the way is found.
    assert campaign.good() == before
