"""Operators and stages of SEMU, the step emulator (PipeWeaver §4, DIP §6.1); iterations: `pipeloom.iteration`."""

from pipeloom.emulator.build import Placement, count_parameters, layer_template, local_devices, module_parameters
from pipeloom.emulator.fit import Calibration, CalibrationRow, Measurement, fit_device, mean_error
from pipeloom.emulator.rules import Counts, Device
from pipeloom.emulator.subgraph import Leaf
from pipeloom.emulator.tape import Context, Cost, Tape, Tensor
from pipeloom.emulator.template import EvaluatedLayer, LayerTemplate

__all__ = [
    "Calibration",
    "CalibrationRow",
    "Context",
    "Cost",
    "Counts",
    "Device",
    "EvaluatedLayer",
    "LayerTemplate",
    "Leaf",
    "Measurement",
    "Placement",
    "Tape",
    "Tensor",
    "count_parameters",
    "fit_device",
    "layer_template",
    "local_devices",
    "mean_error",
    "module_parameters",
]
