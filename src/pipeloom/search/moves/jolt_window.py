"""All tasks within a stretch of time move a little."""

from __future__ import annotations

import numpy as np

from pipeloom.compiled import callee
from pipeloom.compiled.random import draw
from pipeloom.search.moves.move import Move
from pipeloom.search.moves.start_times import StartTimes


class JoltWindow(Move):
    """Shift every start within a window of up to four spans, each by another amount."""

    name = "jolt a window"
    weight = 6

    @staticmethod
    @callee
    def propose(now: StartTimes) -> None:
        """Add a small shift to each start in the window."""
        random = now.random
        begin = now.start[draw(random) % len(now.start)]
        end = begin + 4 * now.span * (draw(random) % 1024) / 1024
        amplitude = now.span * (draw(random) % 1024) / 1024
        for task in range(len(now.shifted)):
            if begin <= now.start[task] and now.start[task] < end:
                now.shifted[task] += np.int64(amplitude * ((draw(random) % 1024) / 1024 - 0.5))
