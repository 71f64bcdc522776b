"""bench: methods over the instance library."""

from __future__ import annotations

import json

import pytest

from pipeloom.timeline import lower_bound
from pipeloom_instances import instance
from tests.cli.test_cli_files import Invoke, invoke

__all__ = ["invoke"]


def test_every_run_is_reported_with_its_bound(invoke: Invoke) -> None:
    words = [
        "bench",
        "instances",
        "--family",
        "tiny-vlm-m1",
        "--family",
        "uniform-4x16",
        "--method",
        "portfolio",
        "--method",
        "random",
        "--budget",
        0,
        "--budget",
        0.02,
        "--seeds",
        2,
        "--json",
    ]
    done = invoke(*words)
    assert done.code == 0
    runs = json.loads(done.out)
    # One line a run; the first call after installing also says that it compiles.
    lines = [line for line in done.err.strip().splitlines() if "compiling" not in line.lower()]
    assert len(runs) == 2 * 2 * 2 * 2 == len(lines)
    for run in runs:
        bound = lower_bound(instance(run["instance"]))
        assert run["lower_bound_s"] == bound.ns / 1e9
        assert run["gap"] == pytest.approx(run["makespan_s"] / run["lower_bound_s"] - 1)
        assert run["gap"] >= 0


def test_the_table_has_a_row_for_each_family_and_a_column_for_each_method(invoke: Invoke) -> None:
    done = invoke("bench", "instances", "--family", "tiny-vlm-m1", "--budget", 0.01, "--seeds", 1)
    assert done.code == 0
    assert done.out.splitlines()[0] == "| family | s | default |"
    assert done.out.splitlines()[2].startswith("| tiny-vlm-m1 | 0.01 | ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("elsewhere",), "'elsewhere' cannot be run"),
        (("instances", "--family", "none"), "--family: 'none'"),
        (("instances", "--method", "none"), "--method: 'none'"),
        (("instances", "--seeds", 0), "'--seeds': Input should be greater than or equal to 1, not '0'; see"),
        (("instances", "--budget", -1), "--budget: -1"),
    ],
)
def test_wrong_words_are_named(invoke: Invoke, words: tuple[object, ...], named: str) -> None:
    done = invoke("bench", *words)
    assert done.code == 2
    assert named in done.err
