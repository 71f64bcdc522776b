"""Human-readable times and sizes."""

from __future__ import annotations

_TIME = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_SIZE = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def time_unit(nanoseconds: int) -> tuple[int, str]:
    """Return the largest unit that is at most ``nanoseconds``: its nanoseconds and its name."""
    return next((unit for unit in _TIME if nanoseconds >= unit[0]), _TIME[-1])


def size_unit(num_bytes: int) -> tuple[int, str]:
    """Return the largest unit that is at most ``num_bytes``: its bytes and its name."""
    return next((unit for unit in _SIZE if num_bytes >= unit[0]), _SIZE[-1])


def time_text(nanoseconds: int) -> str:
    """Format a time with four significant digits and a unit: ``6.020 s``, ``12.34 ms``; nanoseconds are integers."""
    scale, name = time_unit(nanoseconds)
    value = nanoseconds / scale
    # Keep trailing zeros, so that the digits of a column of times are aligned.
    return f"{value:.0f} {name}" if scale == 1 or value >= 999.95 else f"{value:#.4g} {name}"


def seconds_text(seconds: float) -> str:
    """Format seconds like `time_text`."""
    return time_text(round(seconds * 1e9))


def to_four_digits(seconds: float) -> float:
    """Round a time to four significant digits. Setups with the same result count as equally fast."""
    return float(f"{seconds:.4g}")


def seconds_range_text(low: float, high: float) -> str:
    """Format a range of seconds with three significant digits and one unit: ``0.910 to 1.12 s``."""
    scale, name = time_unit(round(high * 1e9))
    values = (each * 1e9 / scale for each in (low, high))
    return " to ".join(f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}" for value in values) + f" {name}"


def size_text(num_bytes: int) -> str:
    """Format a size with up to four significant digits and a unit: ``1.5 GiB``."""
    scale, name = size_unit(num_bytes)
    value = num_bytes / scale
    return f"{value:.0f} {name}" if value >= 1000 else f"{value:.4g} {name}"


def exact_size_text(num_bytes: int, what: str = "bytes") -> str:
    """Format a size with its exact number of bytes: ``1.5 GiB (1610612737 bytes)``, ``40 bytes``."""
    exact = f"{num_bytes} {what}"
    return exact if num_bytes < 1024 else f"{size_text(num_bytes)} ({exact})"


def share_text(share: float) -> str:
    """Format a share in percent: ``12.3 %``, with three decimals if its magnitude is below 0.1 %."""
    return f"{100 * share:.1f} %" if abs(share) >= 0.001 or share == 0 else f"{100 * share:.3f} %"
