"""Megatron: a run read from its arguments, and the fastest pipeline that Megatron can be told.

`read_megatron` reads an argument list, a shell script, Megatron-LM's YAML or a saved recipe of Megatron Bridge;
`best_layout` searches layout, virtual stages, group size and recomputation under Megatron's own order, and
`MegatronAnswer.arguments` is the text to paste. Neither torch nor Megatron is needed.
"""

from pipeloom.integrations.megatron.answer import MegatronAnswer
from pipeloom.integrations.megatron.run import MegatronRun, read_megatron
from pipeloom.integrations.megatron.search import best_layout
from pipeloom.integrations.megatron.setup import Recompute, Setup
from pipeloom.integrations.megatron.timing import Timed, Timing

__all__ = ["MegatronAnswer", "MegatronRun", "Recompute", "Setup", "Timed", "Timing", "best_layout", "read_megatron"]
