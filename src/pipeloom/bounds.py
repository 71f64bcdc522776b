"""Bounds of the numbers that files and options may hold, each written once.

Fields of structs take the aliases as their types. `pipeloom.io.document.convert` then refuses any other number and
names its path. Sums of such numbers are checked where they are made, see `pipeloom.totals`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_TOTAL = 2**62
"""Times in nanoseconds or picoseconds and sizes in bytes stay below it, summed too, so that 64-bit sums never wrap."""
MAX_S = 4.6e9
"""Seconds, 146 years: just below `MAX_TOTAL` nanoseconds."""
MAX_COUNT = 2**31
"""Of ranks, layers, widths, tokens: anything that is counted and not stored in bytes."""
MAX_RANKS = 4096
"""Of a pipeline: room is made for every rank."""
MAX_DEVICES = 1_000_000
"""Of a cluster, and so of any one degree of parallelism."""
MAX_TASKS = 1_000_000
"""Tasks of one iteration that are built and searched; its instance file has about 100 MB."""
MAX_PASSES = 300_000
"""Passes of microbatches through layers or stages that are emulated or co-optimized, so that it takes seconds."""
MAX_IN_MICROBATCH = 65_536
"""Sequences of a microbatch, or images of a sample, where a number makes room for them."""
MAX_THREADS = 256
MAX_WAIT_S = 1e7
"""Seconds, 115 days: the longest budget or timeout."""
MAX_MICROBATCHES = 100_000
MAX_RATE = 1e24
"""Operations or bytes per second."""
MAX_VALUE = 1e18
"""Magnitude of a number without a unit of its own."""
NUM_OWN_FEATURES = 4
"""Features of a workload that its lengths give: one, instances, tokens, token pairs."""
MAX_FEATURES = 256
"""The same with two more for every module that feeds it."""

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A count that may be 0, or an index."""
Signed = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
"""Of a pipeline, or beside one."""
Threads = Annotated[int, Meta(ge=0, le=MAX_THREADS)]
Microbatches = Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumBytes = Annotated[int, Meta(ge=0, le=MAX_TOTAL - 1)]
Nanoseconds = Annotated[int, Meta(ge=-MAX_TOTAL, le=MAX_TOTAL)]
"""A time on some clock."""
WideNumber = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that names something, as in another program's file."""

Seconds = Annotated[float, Meta(ge=0.0, lt=MAX_S)]
Latency = Annotated[float, Meta(ge=0.0, le=1e3)]
"""Seconds of an empty message or of issuing an operator."""
SignedSeconds = Annotated[float, Meta(gt=-MAX_S, lt=MAX_S)]
Duration = Annotated[float, Meta(gt=0.0, le=1e7)]
"""Seconds of a recording or video."""
Microseconds = Annotated[float, Meta(gt=-MAX_S * 1e6, lt=MAX_S * 1e6)]
Budget = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
Wait = Annotated[float, Meta(gt=0.0, le=MAX_WAIT_S)]
Rate = Annotated[float, Meta(gt=0.0, le=MAX_RATE)]
RateOrNone = Annotated[float, Meta(ge=0.0, le=MAX_RATE)]
"""Bytes or operations per second of a part that may be missing."""
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Ratio = Annotated[float, Meta(ge=1.0, le=MAX_VALUE)]
Factor = Annotated[float, Meta(gt=0.0, le=MAX_VALUE)]
Magnitude = Annotated[float, Meta(ge=0.0, le=MAX_VALUE)]
Value = Annotated[float, Meta(ge=-MAX_VALUE, le=MAX_VALUE)]
Finite = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]
"""Any finite number, as a loss: it is shown and enters no computation."""

SecondsCoefficients = Annotated[tuple[Seconds, ...], Meta(min_length=1, max_length=NUM_OWN_FEATURES)]
ByteCoefficients = Annotated[tuple[Value, ...], Meta(min_length=1, max_length=MAX_FEATURES)]
