"""What DIP and PipeWeaver claim. Pages of PipeWeaver repeat DIP's figures; its own are named so."""

from __future__ import annotations

from pipeloom_lab.reproduce.claims import Claim
from pipeloom_lab.reproduce.dip.claims.ablation import ABLATION
from pipeloom_lab.reproduce.dip.claims.character import CHARACTER
from pipeloom_lab.reproduce.dip.claims.end_to_end import END_TO_END
from pipeloom_lab.reproduce.dip.claims.own import OWN
from pipeloom_lab.reproduce.dip.claims.planner import PLANNER

CLAIMS: tuple[Claim, ...] = (*CHARACTER, *END_TO_END, *ABLATION, *PLANNER)

__all__ = ["CLAIMS", "OWN"]
