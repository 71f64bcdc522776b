"""Compiled loops of the search: dual-queue list scheduling, and local search around it.

List scheduling (DIP §5.2) advances through time. Each step takes the rank that could start a task first and
chooses between its best ready forward and its best ready backward. If memory is limited, it skips tasks that do not fit
and tasks after which a started component could no longer finish (`banker`). The kernels allocate no memory; they write
to the arrays of `Scratch`.
"""
