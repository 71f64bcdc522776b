"""The public instance library: problems that are made from nothing but their name.

The files in ``benchmarks/instances`` are some of them written out, for those who use other tools.
"""

from __future__ import annotations

from pipeloom.errors import InputError
from pipeloom.taskgraph import TaskGraph
from pipeloom_instances.families import Family, family, generate

LIBRARY: dict[str, Family] = {
    "vlm-s": family("vlm-s"),
    "vlm-s-m1.5": family("vlm-s", memory=1.5),
    "vlm-s-m2": family("vlm-s", memory=2.0),
    "vlm-s-m4": family("vlm-s", memory=4.0),
    "vlm-s-ckpt-m1.5": family("vlm-s", memory=1.5, recompute=True),
    "vlm-s-ckpt-k3-m2.5": family("vlm-s", segments=3, memory=2.5, recompute=True),
    "vlm-s-k2": family("vlm-s", segments=2),
    "vlm-s-k3": family("vlm-s", segments=3),
    "vlm-s-k3-m2.5": family("vlm-s", segments=3, memory=2.5),
    "vlm-s-split": family("vlm-s", split=True),
    "vlm-s-split-m1.5": family("vlm-s", split=True, memory=1.5),
    "vlm-s-may-split": family("vlm-s", split=True, split_price=0.05),
    "vlm-s-ckpt-may-split-m2": family("vlm-s", split=True, split_price=0.05, recompute=True, memory=2.0),
    "vlm-s-jitter": family("vlm-s", jitter=0.05, delay_ns=500_000),
    "vlm-s-strategies-m1.5": family("vlm-s", strategies=True, memory=1.5),
    "vlm-s-strategies-m4": family("vlm-s", strategies=True, memory=4.0),
    "vlm-m": family("vlm-m"),
    "vlm-m-ckpt-m1.5": family("vlm-m", memory=1.5, recompute=True),
    "vlm-l-k2": family("vlm-l"),
    "vlm-l-k2-m1.5": family("vlm-l", memory=1.5),
    "vlm-l-ckpt-k2-m1.5": family("vlm-l", memory=1.5, recompute=True),
    "vlm-xl": family("vlm-xl"),
    "vlm-xl-ckpt-m1.5": family("vlm-xl", memory=1.5, recompute=True),
    "t2v-s": family("t2v-s"),
    "t2v-s-m1.5": family("t2v-s", memory=1.5),
    "t2v-s-m4": family("t2v-s", memory=4.0),
    "t2v-s-strategies-m1.5": family("t2v-s", strategies=True, memory=1.5),
    "t2v-l": family("t2v-l"),
    "t2v-l-m1.5": family("t2v-l", memory=1.5),
    "uniform-4x16": family("uniform"),
    "uniform-4x16-m1": family("uniform", memory=1.0),
    "uniform-4x16-split": family("uniform", split=True),
    "uniform-4x16-may-split": family("uniform", split=True, split_price=0.05),
    "uniform-8x32-k2": family("uniform", num_ranks=8, num_microbatches=32, segments=2),
    "small-vlm": family("vlm-s", num_microbatches=8),
    "small-vlm-m1.5": family("vlm-s", num_microbatches=8, memory=1.5),
    "tiny-vlm-m1": family("vlm-s", num_ranks=2, num_microbatches=3, memory=1.0),
}
"""Families by name; an instance is one of them with a seed, ``vlm-s/3``."""


def instance(name: str) -> TaskGraph:
    """Problem ``FAMILY/SEED`` of the library."""
    kind, _, seed = name.partition("/")
    if kind not in LIBRARY or not seed.isdigit():
        raise InputError("instance", f"{name!r} is not FAMILY/SEED", f"families: {', '.join(LIBRARY)}")
    return generate(LIBRARY[kind], int(seed), name)
