"""The tests on the simulated accelerator, in a process that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_runtime_on_the_simulated_accelerator(request):
    profile = request.config.getoption("--hypothesis-profile", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/simulated"]
    done = subprocess.run(
        command + ([f"--hypothesis-profile={profile}"] if profile else []),
        env={**os.environ, "PIPELOOM_SIMULATED": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout + done.stderr or "[100%]" in done.stdout
