"""Megatron: read a run from its arguments, and find the fastest pipeline that Megatron supports.

`read_megatron` reads an argument list, a shell script, Megatron-LM's YAML or a saved recipe of Megatron Bridge;
`best_layout` searches layout, virtual stages, group size and recomputation for Megatron's schedule.
`MegatronAnswer.arguments` is the text to paste. `plan_gain` predicts what plans for every step add to it. Neither
PyTorch nor Megatron is needed for these.

`planned_forward_backward` runs the steps of Megatron Core's own training loop by plans, and needs both. Importing
`pipeloom.integrations.megatron.auto` puts it in place of Megatron's schedules. `vision_language_chunks` cuts Megatron's
vision-language models for it, so that layers of the encoder are stages of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.integrations.megatron.planned import PlanGain, plan_gain
from pipeloom.integrations.megatron.run import MegatronRun, read_megatron
from pipeloom.integrations.megatron.search import MegatronAnswer, best_layout
from pipeloom.integrations.megatron.setup import PipelineSettings, Recompute
from pipeloom.integrations.megatron.timing import TimedSetup, Timing
from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.integrations.megatron.core.forward_backward import configure, planned_forward_backward, step_counts
    from pipeloom.integrations.megatron.core.session import StepOptions
    from pipeloom.integrations.megatron.core.vision_language import VisionLanguageProvider, vision_language_chunks

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "MegatronAnswer",
    "MegatronRun",
    "PipelineSettings",
    "PlanGain",
    "Recompute",
    "StepOptions",
    "TimedSetup",
    "Timing",
    "VisionLanguageProvider",
    "best_layout",
    "configure",
    "plan_gain",
    "planned_forward_backward",
    "read_megatron",
    "step_counts",
    "vision_language_chunks",
]
