"""Blend a device table with measurements that users have: traces, benchmarks of kernels and links, iterations."""

from pipeloom.calibration.blend import blend
from pipeloom.calibration.evidence import Evidence, other_device
from pipeloom.calibration.model import Blend
from pipeloom.calibration.read import read_evidence

__all__ = ["Blend", "Evidence", "blend", "other_device", "read_evidence"]
