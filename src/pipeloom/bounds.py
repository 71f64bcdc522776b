"""Bounds of numbers in files and options, as type aliases for fields of structs.

`pipeloom.io.document.convert` raises on other numbers and names their path. Sums are checked where they are computed;
see `pipeloom.totals`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pipeloom.limits import (
    MAX_COUNT,
    MAX_FEATURES,
    MAX_MICROBATCHES,
    MAX_RANKS,
    MAX_RATE,
    MAX_S,
    MAX_SEED,
    MAX_THREADS,
    MAX_TOTAL,
    MAX_VALUE,
    MAX_WAIT_S,
    NUM_OWN_FEATURES,
)

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A count that may be 0, or an index."""
Signed = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
"""Degree of pipeline parallelism or of another parallelism."""
Threads = Annotated[int, Meta(ge=0, le=MAX_THREADS)]
Microbatches = Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
NumBytes = Annotated[int, Meta(ge=0, le=MAX_TOTAL - 1)]
Nanoseconds = Annotated[int, Meta(ge=-MAX_TOTAL, le=MAX_TOTAL)]
"""A time on some clock."""
WideNumber = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An identifier, such as one in another program's file."""

Seconds = Annotated[float, Meta(ge=0.0, lt=MAX_S)]
Latency = Annotated[float, Meta(ge=0.0, le=1e3)]
"""Seconds of an empty message, or of launching an operator."""
SignedSeconds = Annotated[float, Meta(gt=-MAX_S, lt=MAX_S)]
Duration = Annotated[float, Meta(gt=0.0, le=1e7)]
"""Seconds of a recording or video."""
Microseconds = Annotated[float, Meta(gt=-MAX_S * 1e6, lt=MAX_S * 1e6)]
Budget = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
Wait = Annotated[float, Meta(gt=0.0, le=MAX_WAIT_S)]
Rate = Annotated[float, Meta(gt=0.0, le=MAX_RATE)]
RateOrNone = Annotated[float, Meta(ge=0.0, le=MAX_RATE)]
"""Bytes or operations per second of an optional part; 0 if it is missing."""
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Ratio = Annotated[float, Meta(ge=1.0, le=MAX_VALUE)]
Factor = Annotated[float, Meta(gt=0.0, le=MAX_VALUE)]
Magnitude = Annotated[float, Meta(ge=0.0, le=MAX_VALUE)]
Value = Annotated[float, Meta(ge=-MAX_VALUE, le=MAX_VALUE)]
Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]
"""Any finite number, such as a loss, that is shown but not used in computations."""

SecondsCoefficients = Annotated[tuple[Seconds, ...], Meta(min_length=1, max_length=NUM_OWN_FEATURES)]
ByteCoefficients = Annotated[tuple[Value, ...], Meta(min_length=1, max_length=MAX_FEATURES)]
