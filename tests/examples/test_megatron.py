"""The Megatron example runs as it is written."""

from __future__ import annotations

import importlib.util
import re
import runpy

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
