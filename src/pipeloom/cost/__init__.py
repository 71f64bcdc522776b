"""CostModel: seconds and bytes of a chunk, from a measured profile or the emulator."""

from pipeloom.cost.correction import Correction, fit_link
from pipeloom.cost.model import CostModel, StrategyCost
from pipeloom.cost.profile import (
    LayerFit,
    LayerMeasurement,
    Profile,
    ProfileCosts,
    Strategy,
    fit_profile,
)

__all__ = [
    "Correction",
    "CostModel",
    "LayerFit",
    "LayerMeasurement",
    "Profile",
    "ProfileCosts",
    "Strategy",
    "StrategyCost",
    "fit_link",
    "fit_profile",
]
