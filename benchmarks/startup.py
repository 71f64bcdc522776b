"""How long `pipeloom train` takes until it trains, and where the seconds go."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeloom.report import markdown_table

TITLE = "Start of a training run"
_ROOT = Path(__file__).parents[1]
_STEPS = {
    "Importing PyTorch": "start the interpreter",
    "Building": "import PyTorch, the kernel compiler and the task",
    "Measuring": "build the model, check the optimizer, read the first batches",
    "Loading": "measure the layers",
    "Starting": "load the planner's kernels",
    " step": "wait for imports, fork the ranks",
    "    0 ": "first plan and first iteration",
}
"""By the beginning of a line that is printed, what came before it."""


def run(example: str = "examples/digits_vlm/train.toml") -> str:
    """Measure, and return the section as Markdown; kernels are compiled by a first start."""
    with tempfile.TemporaryDirectory() as folder:
        _start(example, folder)
        moments = _start(example, folder)
    before, rows = 0.0, []
    for what, moment in moments:
        rows.append([what, f"{moment - before:.1f}", f"{moment:.1f}"])
        before = moment
    text = (
        f"`pipeloom train {example} --iterations 1` with compiled kernels and piped output. Seconds of "
        "wall time until each line is printed. One process imports everything; the command, the ranks "
        "and the planner are forked from it. The goal is to run the first iteration within 10 s. Before "
        "2026-11-24, when the command did its own imports, this took 13.0 s."
    )
    return f"{text}\n\n{markdown_table(['step', 's', 'total, s'], rows)}"


def _start(example: str, folder: str) -> list[tuple[str, float]]:
    command = [sys.executable, "-u", "-m", "pipeloom", "train", example, "--runs", folder, "--iterations", "1"]
    begin, left = time.monotonic(), dict(_STEPS)
    found: list[tuple[str, float]] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name = next((name for name in left if line.startswith(name)), None)
            if name is not None:
                found.append((left.pop(name), time.monotonic() - begin))
    return found
