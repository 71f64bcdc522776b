"""Operators and stages of SEMU, the step emulator (PipeWeaver §4, DIP §6.1); iterations: `pipeloom.iteration`."""

from pipeloom.emulator.build import Placement, count_parameters, layer_template, module_parameters
from pipeloom.emulator.fit import Calibration, CalibrationRow, Measurement, mean_error

__all__ = [
    "Calibration",
    "CalibrationRow",
    "Measurement",
    "Placement",
    "count_parameters",
    "layer_template",
    "mean_error",
    "module_parameters",
]
