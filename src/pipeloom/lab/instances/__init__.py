"""Instances of the search problem: families generated from seeds, and the public library of them."""

from pipeloom.lab.instances.families import FAMILIES, Family, family, generate
from pipeloom.lab.instances.library import LIBRARY, Run, gap_table, instance, run_library

__all__ = ["FAMILIES", "LIBRARY", "Family", "Run", "family", "gap_table", "generate", "instance", "run_library"]
