"""torchtitan: a pipelining function for its model specs, which splits by cost and runs every step by a plan of its own.

In a model's spec, ``pipelining_fn=pipeline_planned`` stands in the place of ``pipeline_llm`` or ``pipeline_vlm``. How a
stage computes (FSDP2, tensor and expert parallelism, activation checkpointing, compilation) stays torchtitan's. Where
stages are cut follows from what layers cost; a vision encoder is cut like the rest, into stages of its own where it is
worth that, instead of lying in the first stage whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.integrations.torchtitan.costs import reckoned_costs, split_by_costs
    from pipeloom.integrations.torchtitan.pipelining import pipeline_planned

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = ["pipeline_planned", "reckoned_costs", "split_by_costs"]
