"""Numbers that stand for choices and outcomes of list scheduling."""

from __future__ import annotations

NEVER = 1 << 62
DEADLOCK, ABORTED = -1, -2

# Choice of the kind when a forward and a backward are both ready.
ALTERNATE, BACKWARD_FIRST, FORWARD_FIRST = 0, 1, 2
# When a weight gradient runs: when nothing else is ready, or at once.
WEIGHT_LAST, WEIGHT_AT_ONCE = 0, 1
# Who may take memory: everyone, who fits (the papers' rule), or who leaves everyone able to finish.
UNLIMITED, FITS, BANKER = 0, 1, 2
# Of the backward groups, this many compete with forwards; those behind run when no forward is ready.
ALL_URGENT = 1 << 40

POLICY, WEIGHTS, RULE, LOOKAHEAD, URGENT = range(5)
"""Entries of a choice; the last may be left out."""
