"""Times and sizes for people."""

from __future__ import annotations

_TIME = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_SIZE = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def time_unit(nanoseconds: int) -> tuple[int, str]:
    """Largest unit of which ``nanoseconds`` hold at least one: its nanoseconds and its name."""
    return next((unit for unit in _TIME if nanoseconds >= unit[0]), _TIME[-1])


def size_unit(num_bytes: int) -> tuple[int, str]:
    """Largest unit of which ``num_bytes`` hold at least one: its bytes and its name."""
    return next((unit for unit in _SIZE if num_bytes >= unit[0]), _SIZE[-1])


def time_text(nanoseconds: int) -> str:
    """Four significant digits and a unit: ``6.020 s``, ``12.34 ms``; nanoseconds are whole."""
    scale, name = time_unit(nanoseconds)
    value = nanoseconds / scale
    # With its zeros, so that a column of times can be compared digit by digit.
    return f"{value:.0f} {name}" if scale == 1 or value >= 999.95 else f"{value:#.4g} {name}"


def seconds_text(seconds: float) -> str:
    """Seconds as `time_text` writes them."""
    return time_text(round(seconds * 1e9))


def size_text(num_bytes: int) -> str:
    """Three to four significant digits and a unit: ``1.5 GiB``."""
    scale, name = size_unit(num_bytes)
    return f"{_four(num_bytes / scale)} {name}"


def exact_size_text(num_bytes: int, what: str = "bytes") -> str:
    """A size with its number of bytes, where two may differ by a few: ``1.5 GiB (1610612737 bytes)``, ``40 bytes``."""
    exact = f"{num_bytes} {what}"
    return exact if num_bytes < 1024 else f"{size_text(num_bytes)} ({exact})"


def share_text(share: float) -> str:
    """A share as percent: ``12.3 %``."""
    return f"{100 * share:.1f} %" if share >= 0.001 or share == 0 else f"{100 * share:.3f} %"


def _four(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
