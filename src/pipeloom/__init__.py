"""Pipeloom: plans, emulates and runs pipeline-parallel training of unequal models on unequal data."""

__version__ = "0.1.0"
