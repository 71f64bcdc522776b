"""AdaPtis' own generator and the systems it is compared with, on a chain of layers."""

from pipeloom_lab.adaptis.phase_by_phase import tune_phases

METHODS = {"adaptis": tune_phases}
"""What the laboratory adds to ``pipeloom arrange --method``."""

__all__ = ["METHODS", "tune_phases"]
