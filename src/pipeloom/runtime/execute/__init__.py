"""Execution of a rank's actions of a plan."""
