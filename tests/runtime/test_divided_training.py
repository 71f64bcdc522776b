from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeloom.runtime import launch
from tests.runtime.divided_training import Degrees, Found, train_divided
from tests.runtime.training import losses_undivided


def test_divided(tmp_path: Path) -> None:
    wanted = losses_undivided(6)
    degrees = [Degrees(2, 1, 2), Degrees(2, 2, 1, "fsdp")]
    ranks = launch(train_divided, 4, degrees, [3, 6], str(tmp_path))
    for rank in ranks:
        assert rank[0].losses + rank[1].losses == pytest.approx(wanted, abs=1e-8, rel=0)
        print([f.held for f in rank], [f.plans for f in rank])
