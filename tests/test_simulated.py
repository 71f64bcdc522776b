"""The tests on the simulated accelerator, in a process that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.newer_torch("devices cannot be written in Python")


def test_the_runtime_on_the_simulated_accelerator(request):
    profile = request.config.getoption("--hypothesis-profile", None)
    run_there("not full and not soak", *([f"--hypothesis-profile={profile}"] if profile else []))


@pytest.mark.full
def test_ranks_on_simulated_accelerators():
    run_there("full")


@pytest.mark.soak
def test_five_hundred_plans_on_the_simulated_accelerator():
    run_there("soak")


def run_there(marked: str, *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked]
    done = subprocess.run(
        [*command, *options, "tests/simulated"],
        env={**os.environ, "PIPELOOM_SIMULATED": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout + done.stderr or "[100%]" in done.stdout
