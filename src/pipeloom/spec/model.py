"""What is trained: a DAG of modality modules, each a sequence of layers with stated shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from pipeloom.errors import InputError, check_count
from pipeloom.spec.batch import Sample, Workload, audio_frames, video_tokens

Dimension = int | Literal["instances", "tokens"]
"""One extent of a tensor: a number, or what the (sub-)microbatch at hand gives."""

Reads = Literal["audio", "images", "sequence", "text", "videos"]
"""Which part of a sample goes through a module: each of its recordings (as `audio_frames` reckons their lengths), each
of its images, its whole sequence, its text alone, or each of its videos (as `video_tokens` reckons theirs)."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class TensorShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of an activation with extents that may depend on the (sub-)microbatch."""

    dims: tuple[Dimension, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse dtypes and extents that no activation has."""
        if self.dtype not in DTYPE_BYTES:
            raise InputError("dtype", f"{self.dtype!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
        for i, dim in enumerate(self.dims):
            if isinstance(dim, int) and dim < 1:
                raise InputError(f"dims[{i}]", f"{dim} is below 1")

    def resolve(self, workload: Workload) -> tuple[int, ...]:
        """Extents as numbers for one workload."""
        known = {"instances": workload.num_instances, "tokens": workload.num_tokens}
        return tuple(dim if isinstance(dim, int) else known[dim] for dim in self.dims)

    def num_bytes(self, workload: Workload) -> int:
        """Size of the tensor in bytes for one workload."""
        return math.prod(self.resolve(workload)) * DTYPE_BYTES[self.dtype]


class LayerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``count`` equal layers in a row."""

    kind: str
    """Layers of one kind cost the same; a profile is measured once per kind."""
    output: TensorShape
    count: int = 1
    num_parameters: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible counts."""
        check_count(f"layer {self.kind!r}.count", self.count)
        if self.num_parameters < 0:
            raise InputError(f"layer {self.kind!r}.num_parameters", f"{self.num_parameters} is negative")


class ModuleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One modality module: its layers in order, what it reads, and which modules feed it."""

    name: str
    reads: Reads
    layers: tuple[LayerSpec, ...]
    after: tuple[str, ...] = ()
    frozen: bool = False

    def __post_init__(self) -> None:
        """Refuse names that plan files could not carry and modules without layers."""
        if not self.name or any(c in self.name for c in ". \t\n="):
            raise InputError(f"module {self.name!r}.name", "is empty or contains '.', '=' or white space")
        if not self.layers:
            raise InputError(f"module {self.name!r}.layers", "is empty", "give at least one layer")

    @property
    def flat_layers(self) -> tuple[LayerSpec, ...]:
        """One entry per layer, counts expanded."""
        return tuple(layer for layer in self.layers for _ in range(layer.count))

    def instance_lengths(self, sample: Sample) -> tuple[int, ...]:
        """Lengths of the sequences that one sample sends through this module (maybe none)."""
        return instance_lengths(self.reads, sample)


def instance_lengths(reads: Reads, sample: Sample) -> tuple[int, ...]:
    """Lengths of the sequences that a sample has of what a module reads (maybe none)."""
    if reads == "images":
        return sample.patches
    if reads == "text":
        return (sample.text_tokens,)
    if reads == "videos":
        return video_tokens(sample)
    if reads == "audio":
        return audio_frames(sample)
    return (sample.sequence_tokens,)


def num_instances(reads: Reads, sample: Sample) -> int:
    """How many sequences those are, without measuring them."""
    if reads == "images":
        return len(sample.image_tokens)
    if reads == "videos":
        return len(sample.video_seconds)
    return len(sample.audio_seconds) if reads == "audio" else 1


class NamedModule(Protocol):
    """What every description of a module has, whatever else it says."""

    @property
    def name(self) -> str:
        """Unique within the model."""
        ...

    @property
    def after(self) -> tuple[str, ...]:
        """Names of the modules that feed it."""
        ...


M = TypeVar("M", bound=NamedModule)


def check_modules(modules: Sequence[NamedModule], entity: str) -> None:
    """Refuse models without modules, doubled names and modules that read what comes later.

    Raises
    ------
    InputError
        Naming the module, or ``entity`` where there is none.
    """
    seen: set[str] = set()
    for module in modules:
        if module.name in seen:
            raise InputError(f"module {module.name!r}", "occurs twice", "module names must be unique")
        for source in module.after:
            if source not in seen:
                raise InputError(
                    f"module {module.name!r}.after",
                    f"{source!r} is not an earlier module",
                    "list modules so that each comes after those that feed it",
                )
        seen.add(module.name)
    if not modules:
        raise InputError(entity, "is empty", "give at least one module")


def find_module(modules: Sequence[M], name: str) -> M:
    """Return the module of that name; an `InputError` lists the known ones."""
    for module in modules:
        if module.name == name:
            return module
    known = ", ".join(module.name for module in modules)
    raise InputError(f"module {name!r}", "is unknown", f"the model has {known}")


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A DAG of modules in topological order; the last one ends in the loss."""

    name: str
    modules: tuple[ModuleSpec, ...]

    def __post_init__(self) -> None:
        """Refuse doubled names and modules that read what comes later."""
        check_modules(self.modules, "model.modules")

    def module(self, name: str) -> ModuleSpec:
        """Return the module of that name; an `InputError` lists the known ones."""
        return find_module(self.modules, name)
