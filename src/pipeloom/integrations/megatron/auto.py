"""Import this module at the top of a training script: Megatron's ``get_forward_backward_func`` then plans every step.

    import pipeloom.integrations.megatron.auto

Megatron-LM's and Megatron Bridge's training loops ask ``get_forward_backward_func`` once for the function that runs a
step. The script needs no other change.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron.core.pipeline_parallel import schedules

from pipeloom.integrations.megatron.core.call import check_interface
from pipeloom.integrations.megatron.core.forward_backward import planned_forward_backward

_NAME = "get_forward_backward_func"
_original = schedules.get_forward_backward_func


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> Any:
    """Return `planned_forward_backward`; for a model of several modules on grids of their own, Megatron's function."""
    if schedule_pg_collection is not None and getattr(schedule_pg_collection, "pp", None) is None:
        return _original(pp_size, vp_size, schedule_pg_collection)
    return planned_forward_backward


check_interface()
# Megatron Core's module, and those of Megatron that have imported the function already.
for _name, _module in list(sys.modules.items()):
    if _name.startswith("megatron.") and _module.__dict__.get(_NAME) is _original:
        setattr(_module, _NAME, get_forward_backward_func)
