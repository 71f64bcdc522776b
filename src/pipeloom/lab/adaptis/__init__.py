"""AdaPtis' own generator and the systems it is compared with, on a chain of layers."""

from pipeloom.lab.adaptis.phase_by_phase import tune_phases

__all__ = ["tune_phases"]
