"""SEMU: the step emulator, from operators to clusters (PipeWeaver §4, DIP §6.1)."""

from pipeloom.emulator.build import Placement, count_parameters, layer_template, local_devices, module_parameters
from pipeloom.emulator.expand import expand
from pipeloom.emulator.fit import Calibration, CalibrationRow, Measurement, fit_device, mean_error
from pipeloom.emulator.graph import Emulation, GraphBuilder, MemoryCurve, OperatorGraph, emulate_graph
from pipeloom.emulator.pipeline import PipelineModel, Work, work_of
from pipeloom.emulator.result import EmulatedStep, RankTime, StageTask
from pipeloom.emulator.rules import Counts, Device, Efficiency
from pipeloom.emulator.session import Checkpoint, Session
from pipeloom.emulator.step import Step
from pipeloom.emulator.subgraph import Call, Composite, Leaf, Port
from pipeloom.emulator.sweep import Draw, PipelineShape, Points, SweepEntry, emulate, fastest_step, grid, sweep
from pipeloom.emulator.tape import Context, Cost, Tape, Tensor
from pipeloom.emulator.template import EvaluatedLayer, LayerTemplate

__all__ = [
    "Calibration",
    "CalibrationRow",
    "Call",
    "Checkpoint",
    "Composite",
    "Context",
    "Cost",
    "Counts",
    "Device",
    "Draw",
    "Efficiency",
    "EmulatedStep",
    "Emulation",
    "EvaluatedLayer",
    "GraphBuilder",
    "LayerTemplate",
    "Leaf",
    "Measurement",
    "MemoryCurve",
    "OperatorGraph",
    "PipelineModel",
    "PipelineShape",
    "Placement",
    "Points",
    "Port",
    "RankTime",
    "Session",
    "StageTask",
    "Step",
    "SweepEntry",
    "Tape",
    "Tensor",
    "Work",
    "count_parameters",
    "emulate",
    "emulate_graph",
    "expand",
    "fastest_step",
    "fit_device",
    "grid",
    "layer_template",
    "local_devices",
    "mean_error",
    "module_parameters",
    "sweep",
    "work_of",
]
