"""torchtitan: a pipelining function for its model specs, which splits models by cost and plans every step.

Set ``pipelining_fn=pipeline_planned`` in a model's spec, in place of ``pipeline_llm`` or ``pipeline_vlm``. torchtitan
still decides how a stage computes (FSDP2, tensor and expert parallelism, activation checkpointing, compilation). Models
are split by the costs of their layers. A vision encoder is split too, instead of being whole in the first stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.integrations.torchtitan.costs import estimated_costs, split_by_costs
    from pipeloom.integrations.torchtitan.pipelining import pipeline_planned

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = ["estimated_costs", "pipeline_planned", "split_by_costs"]
