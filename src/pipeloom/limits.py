"""Limits of numbers, each written once: `pipeloom.bounds` has the types of fields that keep to them."""

from __future__ import annotations

MAX_TOTAL = 2**62
"""Times in nanoseconds or picoseconds and sizes in bytes stay below it, summed too, so that 64-bit sums never wrap."""
MAX_PS = 2**60
"""Picoseconds, 13 days: emulated times stay below it, since the emulator's kernels take more for "never"."""
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
MAX_SEED = 2**63 - 1
MAX_WAIT_S = 1e7
"""Seconds, 115 days: the longest budget or timeout."""
MAX_MICROBATCHES = 100_000
MAX_RATE = 1e30
"""Operations or bytes per second."""
MAX_VALUE = 1e18
"""Magnitude of a number without a unit of its own."""
NUM_OWN_FEATURES = 4
"""Features of a workload that its lengths give: one, instances, tokens, token pairs."""
MAX_FEATURES = 256
"""The same with two more for every module that feeds it."""
