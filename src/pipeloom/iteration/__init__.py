"""One emulated iteration: costs, layout, task graph, order and simulation. `emulate` and `sweep` do it for a model."""

from pipeloom.iteration.emulation import EmulatedStep, emulate, even_pipeline, fastest_step
from pipeloom.iteration.microbatches import Draw, Microbatches, batch_of, draw_microbatches, pack_microbatches
from pipeloom.iteration.sweep import Points, SweepEntry, grid, sweep
from pipeloom.iteration.timed import TimedIteration

__all__ = [
    "Draw",
    "EmulatedStep",
    "Microbatches",
    "Points",
    "SweepEntry",
    "TimedIteration",
    "batch_of",
    "draw_microbatches",
    "emulate",
    "even_pipeline",
    "fastest_step",
    "grid",
    "pack_microbatches",
    "sweep",
]
