"""Limits of numbers. `pipeloom.bounds` defines field types that enforce them."""

from __future__ import annotations

MAX_TOTAL = 2**62
"""Upper bound of times in nanoseconds or picoseconds and sizes in bytes, also of their sums, so that 64-bit sums never
overflow."""
MAX_PS = 2**60
"""Upper bound of emulated times in picoseconds, 13 days. The emulator's kernels use larger values for "never"."""
MAX_S = 4.6e9
"""Seconds, 146 years: just below `MAX_TOTAL` nanoseconds."""
MAX_COUNT = 2**31
"""Largest count of ranks, layers, widths, tokens and other things not measured in bytes."""
MAX_RANKS = 4096
"""Largest number of pipeline ranks. Arrays are allocated for every rank."""
MAX_DEVICES = 1_000_000
"""Largest number of devices of a cluster, and so the largest degree of parallelism."""
MAX_TASKS = 1_000_000
"""Largest number of tasks of one iteration that is built and searched. Its instance file has about 100 MB."""
MAX_LAYER_PASSES = 2**19
"""Largest number of passes of microbatches through layers in a co-optimization: 1,024 layers and 512 microbatches, for
which it needs up to 8 GiB."""
MAX_IN_MICROBATCH = 65_536
"""Largest number of sequences of a microbatch, or of images of a sample, for which memory is allocated."""
MAX_THREADS = 256
MAX_SEED = 2**63 - 1
MAX_WAIT_S = 1e7
"""Longest budget or timeout in seconds, 115 days."""
MAX_MICROBATCHES = 100_000
MAX_RATE = 1e30
"""Largest rate in operations or bytes per second."""
MAX_VALUE = 1e18
"""Largest magnitude of a number without a unit."""
NUM_OWN_FEATURES = 4
"""Number of features of a workload that follow from its lengths: one, instances, tokens, token pairs."""
MAX_FEATURES = 256
"""Largest number of features. Every module that feeds a workload adds two."""
