"""Instances of the search problem, for tests and benchmarks: families generated from seeds, and a library of them."""

from pipeloom_instances.families import FAMILIES, Family, family, generate
from pipeloom_instances.library import LIBRARY, instance

__all__ = ["FAMILIES", "LIBRARY", "Family", "family", "generate", "instance"]
