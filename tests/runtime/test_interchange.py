from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.runtime.launch.processes import launch

from .interchange import exchange

pytestmark = pytest.mark.ranks


@pytest.mark.newer_torch("ScheduleDualPipeV is missing")
def test_each_runtime_runs_the_others_schedules_exactly(tmp_path: Path) -> None:
    assert launch(exchange, 2, str(tmp_path), timeout_s=30.0) == [12, 12]
