"""The result of a search: the current and the best setup, and the text to paste."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeloom.integrations.megatron.run import MegatronRun
from pipeloom.integrations.megatron.timing import Timed, Timing
from pipeloom.spec.hardware import ClusterSpec


@dataclass(frozen=True, eq=False)
class MegatronAnswer:
    """The current setup of a pipeline, and the fastest that was found. All times are emulated.

    Attributes
    ----------
    now, best : Timed
        ``best`` fits into memory; ``now`` may not.
    evaluations : int
        Number of simulated iterations.
    """

    run: MegatronRun
    cluster: ClusterSpec
    timing: Timing
    now: Timed
    best: Timed
    evaluations: int

    @property
    def gain(self) -> float:
        """Speedup of the best setup: the current time over its time, minus one."""
        return self.now.iteration_s / self.best.iteration_s - 1

    def arguments(self) -> tuple[str, ...]:
        """Return the lines that replace `MegatronRun.replaced`: arguments, or fields if the source is a recipe."""
        return self.best.setup.fields if self.run.is_recipe else self.best.setup.arguments

    def document(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {
            "source": self.run.source,
            "cluster": self.cluster.name,
            "device_basis": self.cluster.device.basis,
            "kind_of_time": "emulated",
            "parameters": self.timing.costs.num_parameters,
            "num_microbatches": self.run.num_microbatches,
            "now": self._row(self.now),
            "best": self._row(self.best),
            "gain": self.gain,
            "arguments": list(self.arguments()),
            "replaced": list(self.run.replaced),
            "read": list(self.run.read),
            "ignored": list(self.run.ignored),
            "notes": list(self.run.notes),
            "evaluations": self.evaluations,
        }

    def _row(self, one: Timed) -> dict[str, Any]:
        setup = one.setup
        return {
            "layout": setup.layout,
            "virtual_stages": setup.virtual,
            "microbatch_group_size": setup.group_size if setup.virtual > 1 else None,
            "recompute": list(setup.recompute.arguments),
            "iteration_s": one.iteration_s,
            "tokens_per_s": self.timing.tokens_per_s(one),
            "mfu": self.timing.mfu(one),
            "bubble_share": one.bubble_share,
            "peak_memory_bytes": one.peak_bytes.tolist(),
            "memory_bytes": one.capacity_bytes,
            "fits": one.fits,
        }
