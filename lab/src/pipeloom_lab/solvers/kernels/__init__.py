"""Compiled loops of the searches kept for comparison."""
