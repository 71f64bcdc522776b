"""The papers' evaluations as programs: every table and figure again, from seeds, with our own numbers.

One package per paper. Each has a tuple ``PARTS`` of what can be run by name, and a file ``claims.toml`` with the
paper's claims. A part is recorded as data (`record`). Pages (`page`) and the index of all claims (`index`) are written
from the records. No published number enters a computation; a column that says so may quote it beside ours.
"""

from pipeloom_lab.reproduce.part import PAPERS, Figure, Options, Outcome, Part, Settings, Table, full_of, parts_of
from pipeloom_lab.reproduce.record import Record
from pipeloom_lab.reproduce.run import Progress, reproduce, write_pages

__all__ = [
    "PAPERS",
    "Figure",
    "Options",
    "Outcome",
    "Part",
    "Progress",
    "Record",
    "Settings",
    "Table",
    "full_of",
    "parts_of",
    "reproduce",
    "write_pages",
]
