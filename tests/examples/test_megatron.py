"""The Megatron example runs as it is written."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys

import pytest

from tests.examples.on_ranks import EXAMPLES


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_script_ends_in_megatrons_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "megatron" / "plan.py"))["main"](0.5)
    out = capsys.readouterr().out
    now, best = (float(re.search(rf"{name} +([\d.]+) s", out)[1]) for name in ("now", "best"))  # type: ignore[index]
    assert best < now
    assert "--recompute-granularity --recompute-method" in out
    assert "PP rank 0" in out


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed")
@pytest.mark.parametrize("script", ["train_text.py", "train_text.py --experts 4", "train_vision_language.py"])
def test_training_has_the_losses_of_megatrons_schedule(script: str) -> None:
    losses = []
    for more in ([], ["--theirs"]):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*torchrun, *f"megatron/{script}".split(), "--steps", "3", *more],
            cwd=EXAMPLES,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(re.findall(r"loss ([\d.]+)", done.stdout))
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
