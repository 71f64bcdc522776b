"""What DIP and PipeWeaver claim. Pages of PipeWeaver repeat DIP's figures; its own are named so."""

from __future__ import annotations

from pipeloom.lab.reproduce.claims import Claim
from pipeloom.lab.reproduce.dip.claims.ablation import ABLATION
from pipeloom.lab.reproduce.dip.claims.character import CHARACTER
from pipeloom.lab.reproduce.dip.claims.end_to_end import END_TO_END
from pipeloom.lab.reproduce.dip.claims.own import OWN
from pipeloom.lab.reproduce.dip.claims.planner import PLANNER

CLAIMS: tuple[Claim, ...] = (*CHARACTER, *END_TO_END, *ABLATION, *PLANNER)

__all__ = ["CLAIMS", "OWN"]
