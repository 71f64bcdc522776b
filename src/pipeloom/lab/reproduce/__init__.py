"""The papers' evaluations as programs: every table and figure again, from seeds, with our own numbers.

One package per paper; each has a tuple ``PARTS`` of what can be run by name. No published number enters a
computation; it may stand beside ours in a column that says so.
"""

from pipeloom.lab.reproduce.part import PAPERS, Figure, Options, Outcome, Part, Table, full_of, parts_of
from pipeloom.lab.reproduce.write import Progress, reproduce

__all__ = ["PAPERS", "Figure", "Options", "Outcome", "Part", "Progress", "Table", "full_of", "parts_of", "reproduce"]
