"""Megatron: read a run from its arguments, and find the fastest pipeline that Megatron supports.

`read_megatron` reads an argument list, a shell script, Megatron-LM's YAML or a saved recipe of Megatron Bridge;
`best_layout` searches layout, virtual stages, group size and recomputation for Megatron's schedule.
`MegatronAnswer.arguments` is the text to paste. Neither PyTorch nor Megatron is needed.
"""

from pipeloom.integrations.megatron.run import MegatronRun, read_megatron
from pipeloom.integrations.megatron.search import MegatronAnswer, best_layout
from pipeloom.integrations.megatron.setup import PipelineSettings, Recompute
from pipeloom.integrations.megatron.timing import Timed, Timing

__all__ = [
    "MegatronAnswer",
    "MegatronRun",
    "PipelineSettings",
    "Recompute",
    "Timed",
    "Timing",
    "best_layout",
    "read_megatron",
]
