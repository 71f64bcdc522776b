"""Every test begins with torch's own default dtype, whichever test ran before it in this process."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def default_dtype() -> None:
    """Training in double precision sets it for the whole process."""
    torch.set_default_dtype(torch.float32)
