"""Models: a DAG of modality modules, each a sequence of layers with declared shapes."""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from pipeloom.bounds import Count, Number, NumBytes
from pipeloom.conversion import check_fields
from pipeloom.errors import InputError
from pipeloom.spec.batch import Sample, Workload, audio_frames, video_tokens

Dimension = Count | str
"""One extent of a tensor: a number, ``"instances"`` or ``"tokens"`` of the (sub-)microbatch, or a part of them such as
``"tokens/4"``, which is rounded up for each instance."""

Reads = Literal["audio", "images", "sequence", "text", "videos"]
"""What a module reads of a sample: each of its recordings (with the lengths of `audio_frames`), each of its images, its
whole sequence, its text alone, or each of its videos (with the lengths of `video_tokens`)."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class TensorShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of an activation. Extents may depend on the (sub-)microbatch."""

    dims: tuple[Dimension, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError("dtype", f"{self.dtype!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
        for i, dim in enumerate(self.dims):
            if isinstance(dim, int):
                if dim < 1:
                    raise InputError(f"dims[{i}]", f"{dim} is below 1")
            elif _divisor(dim) is None and dim != "instances":
                known = 'use a number, "instances", "tokens" or "tokens/4"'
                raise InputError(f"dims[{i}]", f"{dim!r} is not an extent", known)

    @property
    def grows(self) -> bool:
        """Whether dimension 0 grows with the microbatch, so that parts can be concatenated and split there."""
        return bool(self.dims) and not isinstance(self.dims[0], int)

    @property
    def is_rows(self) -> bool:
        """Whether dimension 0 has rows of instances, and all other extents are fixed."""
        return self.grows and all(isinstance(dim, int) for dim in self.dims[1:])

    @property
    def is_simple(self) -> bool:
        """Whether extents depend only on the numbers of instances and tokens, not on single lengths."""
        return all(isinstance(dim, int) or dim in ("instances", "tokens") for dim in self.dims)

    def resolve(self, workload: Workload) -> tuple[int, ...]:
        """Return the extents for one workload."""
        return tuple(dim if isinstance(dim, int) else _extent(dim, workload) for dim in self.dims)

    def num_bytes(self, workload: Workload) -> int:
        """Return the size of the tensor in bytes for one workload."""
        return math.prod(self.resolve(workload)) * DTYPE_BYTES[self.dtype]


def _extent(dim: str, workload: Workload) -> int:
    if dim == "instances":
        return workload.num_instances
    divisor = _divisor(dim)
    assert divisor is not None
    return workload.num_tokens if divisor == 1 else sum(-(-length // divisor) for length in workload.lengths)


@functools.cache
def _divisor(dim: str) -> int | None:
    """Return the divisor of an extent of tokens; None for other extents."""
    found = re.fullmatch(r"tokens(?:/([1-9][0-9]{0,8}))?", dim)
    return None if found is None else int(found[1] or 1)


MOST_LAYERS = 100_000
"""Largest number of layers of a module."""


MOST_LETTERS = 190
"""Largest number of letters in the name of a module or stream."""
_SHOWN = 40
"""Letters of a name that an error shows if the name is too long."""
_NOT_IN_NAMES = re.compile(r"[\s.=\ud800-\udfff]")
"""Characters that no name in a plan can contain."""


def _check_letters(entity: str, name: str) -> None:
    """Raise `InputError` for a name that is too long for plans."""
    if len(name) > MOST_LETTERS:
        raise InputError(entity, f"has {len(name)} letters, more than {MOST_LETTERS}", "use a shorter name")


def check_layers(entity: str, count: int) -> None:
    """Raise `InputError` for too many layers, before they are allocated."""
    if count > MOST_LAYERS:
        raise InputError(entity, f"{count} layers are more than {MOST_LAYERS}", "give fewer")


class LayerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``count`` equal layers in a row."""

    kind: str
    """Layers of one kind have equal costs. A profile measures each kind once."""
    output: TensorShape
    count: Count = 1
    num_parameters: NumBytes = 0

    def __post_init__(self) -> None:
        check_fields(self, f"layer {self.kind!r}")


class StreamEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One end of a stream: a layer of a module that emits it or takes it."""

    stream: str
    """Name of the stream, unique within the model, and the keyword of the layers that take it."""
    layer: Number


class EmittedStream(StreamEnd, frozen=True, forbid_unknown_fields=True):
    """A tensor that a layer emits beside its output for later layers."""

    output: TensorShape


class ModuleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One modality module: its layers in order, what it reads, and which modules feed it."""

    name: str
    reads: Reads
    layers: tuple[LayerSpec, ...]
    after: tuple[str, ...] = ()
    frozen: bool = False
    emits: tuple[EmittedStream, ...] = ()
    takes: tuple[StreamEnd, ...] = ()

    def __post_init__(self) -> None:
        """Raise `InputError` for a name that plan files cannot contain, and for a module without layers."""
        if not self.name or _NOT_IN_NAMES.search(self.name):
            problem = "is empty or contains '.', '=', white space or a lone surrogate"
            raise InputError(f"module {self.name!r}.name", problem, "use letters, digits, '_' and '-'")
        _check_letters(f"module {self.name[:_SHOWN]!r}.name", self.name)
        if not self.layers:
            raise InputError(f"module {self.name!r}.layers", "is empty", "give at least one layer")
        num_layers = sum(layer.count for layer in self.layers)
        check_layers(f"module {self.name!r}.layers", num_layers)
        for what, ends in (("emits", self.emits), ("takes", self.takes)):
            for end in ends:
                if not 0 <= end.layer < num_layers:
                    raise InputError(
                        f"module {self.name!r}.{what}",
                        f"{end.stream!r} is at layer {end.layer}, the module has layers 0..{num_layers - 1}",
                    )
                if ends.count(end) > 1:
                    raise InputError(f"module {self.name!r}.{what}[{end.layer}]", f"{end.stream!r} occurs twice")

    @property
    def flat_layers(self) -> tuple[LayerSpec, ...]:
        """Layers with counts expanded, one entry per layer."""
        return tuple(layer for layer in self.layers for _ in range(layer.count))

    def instance_lengths(self, sample: Sample) -> tuple[int, ...]:
        """Return the sequence lengths of one sample in this module (possibly none)."""
        return lengths_in(self.name, self.reads, sample)


def declared_lengths(name: str, sample: Sample) -> tuple[int, ...] | None:
    """Return the sequence lengths that a sample declares for a module; None if it declares none."""
    return None if sample.lengths is msgspec.UNSET else sample.lengths.get(name)


def lengths_in(name: str, reads: Reads, sample: Sample) -> tuple[int, ...]:
    """Return the sequence lengths of a sample in a module, declared or from what the module reads.

    Raise `InputError` if the declared lengths are not as many as the sample has of what the module reads.
    """
    found, count = declared_lengths(name, sample), num_instances(reads, sample)
    if found is None:
        return instance_lengths(reads, sample)
    if len(found) != count:
        raise InputError(
            f"sample {sample.id!r}.lengths[{name!r}]", f"has {len(found)} entries, the sample {count} of {reads}"
        )
    return found


def instance_lengths(reads: Reads, sample: Sample) -> tuple[int, ...]:
    """Return the sequence lengths of a sample for what a module reads (possibly none)."""
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
    """Return the number of these sequences without computing their lengths."""
    if reads == "images":
        return len(sample.image_tokens)
    if reads == "videos":
        return len(sample.video_seconds)
    return len(sample.audio_seconds) if reads == "audio" else 1


class NamedModule(Protocol):
    """Protocol of all descriptions of a module."""

    @property
    def name(self) -> str:
        """Name, unique within the model."""

    @property
    def after(self) -> tuple[str, ...]:
        """Names of the modules that feed it."""


class StreamingModule(NamedModule, Protocol):
    """Protocol of all descriptions of a module with streams."""

    @property
    def emits(self) -> Sequence[StreamEnd]:
        """Streams that its layers emit."""

    @property
    def takes(self) -> Sequence[StreamEnd]:
        """Streams that its layers take."""


M = TypeVar("M", bound=NamedModule)


def check_streams(modules: Sequence[StreamingModule]) -> None:
    """Check that streams have valid names, one emitter, at least one taker, and run forward.

    An `InputError` names module, stream and layer.
    """
    emitted: dict[str, tuple[int, int]] = {}
    for place, module in enumerate(modules):
        for end in module.emits:
            where = f"module {module.name!r}.emits[{end.layer}]"
            if not end.stream.isidentifier() or keyword.iskeyword(end.stream):
                raise InputError(
                    where, f"{end.stream!r} is not a valid keyword argument", "layers receive it by this name"
                )
            _check_letters(f"{where}: stream {end.stream[:_SHOWN]!r}", end.stream)
            if end.stream in emitted:
                raise InputError(where, f"a stream {end.stream!r} is emitted twice", "names are unique in a model")
            emitted[end.stream] = (place, end.layer)
    taken: set[str] = set()
    for place, module in enumerate(modules):
        for end in module.takes:
            where = f"module {module.name!r}.takes[{end.layer}]"
            if end.stream not in emitted:
                known = ", ".join(emitted) or "none"
                raise InputError(where, f"no layer emits {end.stream!r}", f"emitted are: {known}")
            if emitted[end.stream] >= (place, end.layer):
                source, layer = emitted[end.stream]
                raise InputError(
                    where,
                    f"{end.stream!r} is emitted by layer {layer} of {modules[source].name!r}, which comes no earlier",
                    "a stream goes to later layers",
                )
            taken.add(end.stream)
    for name, (place, layer) in emitted.items():
        if name not in taken:
            raise InputError(
                f"module {modules[place].name!r}.emits[{layer}]", f"no layer takes {name!r}", "name it in a `takes`"
            )


def stream_sources(modules: Sequence[StreamingModule]) -> dict[str, tuple[str, ...]]:
    """Return, per module, the other modules whose streams it takes, in model order."""
    source = {end.stream: module.name for module in modules for end in module.emits}
    found = {}
    for module in modules:
        sources = {source[end.stream] for end in module.takes} - {module.name}
        found[module.name] = tuple(other.name for other in modules if other.name in sources)
    return found


def check_modules(modules: Sequence[NamedModule], entity: str) -> None:
    """Check that there are modules with unique names, and that each reads only earlier ones.

    An `InputError` names the module, or ``entity`` if there is none.
    """
    seen: set[str] = set()
    for module in modules:
        if module.name in seen:
            raise InputError(f"module {module.name!r}", "occurs twice", "module names must be unique")
        check_after(f"module {module.name!r}.after", module.after)
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


def check_after(entity: str, after: Sequence[str]) -> None:
    """Raise `InputError` if a module reads another one twice."""
    for source in after:
        if after.count(source) > 1:
            raise InputError(entity, f"names {source!r} twice", "name each module once")


def find_module(modules: Sequence[M], name: str) -> M:
    """Return the module with this name. An `InputError` lists the known ones."""
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
        """Raise `InputError` for repeated names, modules that read later ones, and streams that run backward."""
        check_modules(self.modules, "model.modules")
        check_streams(self.modules)
        for module in self.modules:
            elsewhere = {end.stream for other in self.modules if other is not module for end in other.takes}
            for end in module.emits:
                if end.stream in elsewhere and not end.output.grows:
                    raise InputError(
                        f"module {module.name!r}.emits[{end.layer}]",
                        f"dimension 0 of {end.stream!r} does not grow with the microbatch",
                        'make it "instances" or "tokens": other modules take the rows of their own parts',
                    )

    def module(self, name: str) -> ModuleSpec:
        """Return the module with this name. An `InputError` lists the known ones."""
        return find_module(self.modules, name)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the modules that feed a module: first by outputs, then those by streams alone."""
        after = self.module(name).after
        return (*after, *(source for source in stream_sources(self.modules)[name] if source not in after))
