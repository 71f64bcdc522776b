"""Blend a device table with measurements that users have: traces, benchmarks of kernels and links, iterations."""

from pipeloom.calibration.blend import Blend, blend
from pipeloom.calibration.evidence import Evidence, Observation, other_device
from pipeloom.calibration.model import QuantityRow
from pipeloom.calibration.read import read_evidence

__all__ = ["Blend", "Evidence", "Observation", "QuantityRow", "blend", "other_device", "read_evidence"]
