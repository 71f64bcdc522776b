"""What a search came to: now and best side by side, and the text to paste."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeloom.integrations.megatron.run import MegatronRun
from pipeloom.integrations.megatron.timing import Timed, Timing
from pipeloom.spec.hardware import ClusterSpec


@dataclass(frozen=True, eq=False)
class MegatronAnswer:
    """The pipeline as it is now, and the fastest that was found. All times are emulated.

    Attributes
    ----------
    run : MegatronRun
    cluster : ClusterSpec
    timing : Timing
    now, best : Timed
        ``now`` may not fit into memory; ``best`` does.
    evaluations : int
        Iterations that were simulated.
    """

    run: MegatronRun
    cluster: ClusterSpec
    timing: Timing
    now: Timed
    best: Timed
    evaluations: int

    @property
    def gain(self) -> float:
        """By how much the best is faster: time now over its time, less one."""
        return self.now.iteration_s / self.best.iteration_s - 1

    def arguments(self) -> tuple[str, ...]:
        """Lines to write in place of `MegatronRun.replaced`: arguments, or fields where the source is a recipe."""
        return self.best.setup.fields if self.run.is_recipe else self.best.setup.arguments

    def document(self) -> dict[str, Any]:
        """All of it for ``--json``."""
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
