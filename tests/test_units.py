"""Times and sizes for people."""

from __future__ import annotations

import pytest

from pipeloom.units import exact_size_text, share_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1610612737, "1.5 GiB (1610612737 bytes)"), (1 << 10, "1 KiB (1024 bytes)")],
)
def test_an_exact_size_is_readable_and_keeps_its_bytes(num_bytes: int, text: str) -> None:
    assert exact_size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.452, "45.2 %"),
        (-0.08065, "-8.1 %"),
        (-1.0, "-100.0 %"),
        (0.0, "0.0 %"),
        (0.00042, "0.042 %"),
        (-0.0005, "-0.050 %"),
    ],
)
def test_shares_of_both_signs_have_the_same_digits(share: float, text: str) -> None:
    assert share_text(share) == text
