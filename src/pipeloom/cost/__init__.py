"""`CostModel`: seconds and bytes of chunks, from a measured profile or the emulator."""

from pipeloom.cost.correction import Correction, fit_link, host_link, slowness_of
from pipeloom.cost.model import (
    CostModel,
    PassBytes,
    PlannedCosts,
    StrategyCost,
    between_s,
    link_table,
    rank_static_bytes,
)
from pipeloom.cost.profile import LayerFit, LayerMeasurement, Profile, StrategyFit, StrategyMeasurement, fit_profile
from pipeloom.cost.profile_costs import ProfileCosts, check_strategies, sharded_copies, usual_copies

__all__ = [
    "Correction",
    "CostModel",
    "LayerFit",
    "LayerMeasurement",
    "PassBytes",
    "PlannedCosts",
    "Profile",
    "ProfileCosts",
    "StrategyCost",
    "StrategyFit",
    "StrategyMeasurement",
    "between_s",
    "check_strategies",
    "fit_link",
    "fit_profile",
    "host_link",
    "link_table",
    "rank_static_bytes",
    "sharded_copies",
    "slowness_of",
    "usual_copies",
]
