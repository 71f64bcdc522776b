"""Operations of a model's forward and backward: counted in one iteration, estimated in all others.

Torch's counter knows matrix products, convolutions and attention. In the first iteration in which a chunk runs, the
operations of its forwards are counted per microbatch. Later they are estimated from tokens and token pairs. The
backward of a trained module counts twice its forward, a backward through a frozen one once. Recomputation is no work of
the model and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeloom.packing import Packing
from pipeloom.plan import Action, Verb
from pipeloom.runtime.launch import accelerator
from pipeloom.spec import Layout, Workload
from pipeloom.spec.catalog import load_device, names


class FlopCounts:
    """Counts and estimates one rank's operations."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._names = {name: number for number, name in enumerate(layout.chunk_names)}
        self._columns = {module.name: column for column, module in enumerate(layout.modules)}
        self._seen: dict[int, list[tuple[Workload, float]]] = {}
        self._rates: dict[int, np.ndarray] = {}

    def wants(self, chunk: int) -> bool:
        """Return whether a chunk must be counted in this iteration."""
        return chunk not in self._rates

    @contextmanager
    def counted(self, chunk: int, workload: Workload) -> Iterator[None]:
        """Count a forward of a chunk within this context."""
        with FlopCounterMode(display=False) as counter:
            yield
        self._seen.setdefault(chunk, []).append((workload, float(counter.get_total_flops())))

    def of(self, actions: Sequence[Action], packing: Packing) -> float:
        """Return the operations of this rank's actions in a finished iteration."""
        for chunk, seen in self._seen.items():
            features = np.array([_features(workload) for workload, _ in seen])
            scale = features.max(axis=0).clip(1.0)
            solution = np.linalg.lstsq(features / scale, np.array([flops for _, flops in seen]), rcond=None)[0]
            self._rates[chunk] = solution / scale
        self._seen = {}
        total = 0.0
        for action in actions:
            chunk = self._names.get(action.chunk, -1)
            if action.verb is Verb.F and chunk in self._rates:
                module = self._layout.chunks[chunk].module
                parts = packing.microbatches[action.microbatch].parts[self._columns[module]]
                forward = float(self._rates[chunk] @ _features(parts[action.sub_microbatch].workload))
                total += max(0.0, forward) * self._passes(module)
        return total

    def _passes(self, module: str) -> float:
        if not self._layout.has_backward(module):
            return 1.0
        return 2.0 if self._layout.module(module).frozen else 3.0


def _features(workload: Workload) -> np.ndarray:
    return np.array([workload.num_tokens, workload.num_token_pairs], float)


def known_peak(device: torch.device, precision: torch.dtype) -> float | None:
    """Return a device's peak operations per second in a precision from its data sheet, or None if unknown."""
    if not accelerator.on_accelerator(device) or precision != torch.bfloat16:
        return None
    words = accelerator.module_of(device).get_device_name(device).upper().replace("-", " ").split()
    if "PCIE" in words:
        # Slower devices of the same name.
        return None
    device_name = next((name for name in names("devices") if name.upper() in words), None)
    return None if device_name is None else load_device(device_name).flops_per_s
