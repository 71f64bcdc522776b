"""Argument lists for tests."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pipeloom.spec.catalog import load_trainer
from pipeloom.spec.trainer import Overlap

KERNELS = msgspec.structs.replace(
    load_trainer("megatron").with_graphs().overlapping(Overlap()), elementwise=1.0, cross_entropy=1.0
)
"""Megatron's memory with the times of fused kernels alone, which no launches hide."""
SMALL = {
    "num-layers": 12,
    "hidden-size": 2048,
    "num-attention-heads": 16,
    "seq-length": 4096,
    "max-position-embeddings": 4096,
    "vocab-size": 50257,
    "micro-batch-size": 1,
    "global-batch-size": 16,
    "pipeline-model-parallel-size": 4,
    "bf16": True,
}
"""A GPT of 12 layers on four pipeline ranks."""


def listed(changes: dict | None = None, **more: object) -> list[str]:
    """`SMALL` with changes as a list of arguments; None leaves one out, True is a flag. Underscores are dashes."""
    changed = {name.replace("_", "-"): value for name, value in ((changes or {}) | more).items()}
    wanted = SMALL | changed
    words = []
    for name, value in wanted.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += str(value).split(" ")
    return words


def beside_defaults(notes: Iterable[str]) -> tuple[str, ...]:
    """Notes without those on arguments that are absent."""
    return tuple(note for note in notes if not note.startswith("without --") or ": " not in note)
