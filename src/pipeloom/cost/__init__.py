"""CostModel: seconds and bytes of a chunk, from a measured profile or the emulator."""

from pipeloom.cost.model import CostModel, StrategyCost

__all__ = ["CostModel", "StrategyCost"]
