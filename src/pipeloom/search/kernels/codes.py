"""Codes of the choices and results of list scheduling."""

from __future__ import annotations

NEVER = 1 << 62
DEADLOCK, ABORTED = -1, -2

# Which kind runs first when a forward and a backward are ready.
ALTERNATE, BACKWARD_FIRST, FORWARD_FIRST = 0, 1, 2
# When a weight gradient runs: if no other task is ready, or at once.
WEIGHT_LAST, WEIGHT_AT_ONCE = 0, 1
# Which tasks may take memory: all, those that fit (DIP's rule), or those after which all components can finish.
UNLIMITED, FITS, BANKER = 0, 1, 2
# Number of backward groups that compete with forwards; the others run when no forward is ready.
ALL_URGENT = 1 << 40

POLICY, WEIGHTS, RULE, LOOKAHEAD, URGENT = range(5)
"""Entries of a choice; the last may be left out."""
