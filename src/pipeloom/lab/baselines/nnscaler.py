"""nnScaler*: the best static stages for one representative microbatch, for 1F1B (`dip.txt` §7.1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.units import size_text

FloatArray = npt.NDArray[np.float64]


class StaticStages(NamedTuple):
    """Stages of a chain of layers: ``cuts`` has one more entry than stages, ``levels`` one strategy each."""

    cuts: tuple[int, ...]
    levels: tuple[int, ...]
    slowest_s: float


def best_stages(
    seconds: FloatArray, activation_bytes: FloatArray, static_bytes: FloatArray, num_stages: int, capacity_bytes: float
) -> StaticStages:
    """Cut a chain of layers for 1F1B so that the slowest stage is as fast as can be and every stage fits.

    Stage s of p holds p - s microbatches. Dynamic programming over (stages so far, layers so far), each stage with
    the fastest of its strategies that fits; exact for this model of time and memory.

    Parameters
    ----------
    seconds : array, shape (num_levels, num_layers)
        Forward and backward of every layer under every memory strategy, on the representative microbatch.
    activation_bytes : array, shape (num_levels, num_layers)
    static_bytes : array, shape (num_layers,)
    capacity_bytes : float
        Infinite: no limit.

    Raises
    ------
    InputError
        Fewer layers than stages, or arrays that do not belong together.
    InfeasibleError
        No cut fits.
    """
    num_layers = seconds.shape[1]
    if activation_bytes.shape != seconds.shape or static_bytes.shape != (num_layers,):
        raise InputError("layers", "times and bytes have not the same number of layers")
    if not 1 <= num_stages <= num_layers:
        raise InputError("num_stages", f"{num_stages} is not in 1..{num_layers}", "use fewer ranks")
    time = np.pad(np.cumsum(seconds, axis=1), ((0, 0), (1, 0)))
    held = np.pad(np.cumsum(activation_bytes, axis=1), ((0, 0), (1, 0)))
    fixed = np.pad(np.cumsum(static_bytes), (1, 0))
    slowest = np.full((num_stages + 1, num_layers + 1), np.inf)
    slowest[0, 0] = -np.inf
    cut = np.zeros((num_stages + 1, num_layers + 1), np.int64)
    picked = np.zeros((num_stages + 1, num_layers + 1), np.int64)
    for stage in range(1, num_stages + 1):
        in_flight = num_stages - stage + 1
        for end in range(stage, num_layers - (num_stages - stage) + 1):
            begin = np.arange(stage - 1, end)
            here = time[:, end, None] - time[:, begin]
            need = (held[:, end, None] - held[:, begin]) * in_flight + fixed[end] - fixed[begin]
            here = np.where(need <= capacity_bytes, here, np.inf)
            level = here.argmin(axis=0)
            worst = np.maximum(slowest[stage - 1, begin], here[level, np.arange(len(begin))])
            at = int(worst.argmin())
            slowest[stage, end], cut[stage, end], picked[stage, end] = worst[at], begin[at], level[at]
    if not np.isfinite(slowest[num_stages, num_layers]):
        raise InfeasibleError(
            f"no cut of {num_layers} layers into {num_stages} stages fits {size_text(int(capacity_bytes))}"
        )
    cuts, levels = [num_layers], []
    for stage in range(num_stages, 0, -1):
        levels.append(int(picked[stage, cuts[-1]]))
        cuts.append(int(cut[stage, cuts[-1]]))
    return StaticStages(tuple(reversed(cuts)), tuple(reversed(levels)), float(slowest[num_stages, num_layers]))
