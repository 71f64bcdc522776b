"""Layout: chunks of modules on pipeline ranks (`pipeloom.layout/1`, with streams `pipeloom.layout/2`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pipeloom.bounds import Count, Number, Ranks
from pipeloom.errors import InputError, check_count
from pipeloom.limits import MAX_RANKS
from pipeloom.spec.model import ModuleSpec, StreamEnd, check_after, check_streams, stream_sources
from pipeloom.spec.parallelism import Parallelism

_STREAM_FIELDS = ("emits", "takes")
OnTensorRanks = Literal["divided", "dealt"]
MOST_RANKS = MAX_RANKS
"""Largest number of pipeline ranks."""


def check_encoder_dp(where: str, *, is_last: bool, streams: bool) -> None:
    """Raise `InputError` if a module cannot use encoder data parallelism: it ends in the loss, or has streams."""
    if is_last:
        raise InputError(where, "is 'dealt', and its output goes into the loss", "leave it 'divided'")
    if streams:
        raise InputError(where, "is 'dealt', and its layers emit or take streams", "leave it 'divided'")


class ModuleLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one module is placed on ranks, and how its microbatches are split."""

    name: str
    after: tuple[str, ...] = ()
    frozen: bool = False
    sub_microbatch: Count | None = None
    """Most instances per sub-microbatch; None: the whole microbatch."""
    on_ranks: Literal["pipelined", "replicated"] = "pipelined"
    emits: tuple[StreamEnd, ...] = ()
    takes: tuple[StreamEnd, ...] = ()
    on_tensor_ranks: OnTensorRanks = "divided"
    """What the tensor-parallel ranks of a pipeline rank share: every layer (``divided``), or the instances of each
    sub-microbatch (``dealt``, encoder data parallelism). In the latter case each runs whole layers. Without tensor
    parallelism both are the same."""

    @staticmethod
    def of(module: ModuleSpec, sub_microbatch: int | None = None) -> ModuleLayout:
        """Return the entry of a module in a layout."""
        emits = tuple(StreamEnd(end.stream, end.layer) for end in module.emits)
        return ModuleLayout(module.name, module.after, module.frozen, sub_microbatch, emits=emits, takes=module.takes)

    def __post_init__(self) -> None:
        if self.sub_microbatch is not None:
            check_count(f"module {self.name!r}.sub_microbatch", self.sub_microbatch)


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive layers of one module on one rank. ``layers`` is first and last, inclusive."""

    module: str
    layers: tuple[Number, Number]
    rank: Number

    @property
    def num_layers(self) -> int:
        """Number of layers in the chunk."""
        return len(self.layer_numbers)

    @property
    def layer_numbers(self) -> range:
        """Numbers of the chunk's layers in their module."""
        return range(self.layers[0], self.layers[1] + 1)


def _check_whole(where: str, chunk: Chunk, replicas: Sequence[Chunk]) -> None:
    """Raise `InputError` if a chunk of a replicated module is not the whole module, as all of its ``replicas`` are."""
    remedy = "a replicated module has all its layers on each rank"
    if chunk.layers[0] != 0:
        raise InputError(where, f"begins at {chunk.layers[0]}, not at layer 0 of {chunk.module!r}", remedy)
    if replicas and chunk.layers != replicas[0].layers:
        other = f"the chunk on rank {replicas[0].rank} has {list(replicas[0].layers)}"
        raise InputError(where, f"{list(chunk.layers)} of {chunk.module!r}, but {other}", remedy)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model on the pipeline ranks, chosen once before training. Chunks are in model order."""

    num_ranks: Ranks
    modules: tuple[ModuleLayout, ...]
    chunks: tuple[Chunk, ...]
    parallelism: Parallelism = Parallelism()
    format: Literal["pipeloom.layout/1", "pipeloom.layout/2"] = "pipeloom.layout/1"
    """Version 2 if there are streams."""

    def __post_init__(self) -> None:
        """Check that modules form a DAG, and that chunks hold every layer once, or on every rank if replicated."""
        check_count("num_ranks", self.num_ranks)
        if self.num_ranks > MOST_RANKS:
            raise InputError("num_ranks", f"{self.num_ranks} is above {MOST_RANKS}")
        known: dict[str, ModuleLayout] = {}
        for i, module in enumerate(self.modules):
            if module.name in known:
                raise InputError(f"modules[{i}].name", f"{module.name!r} occurs twice")
            check_after(f"modules[{i}].after", module.after)
            for source in module.after:
                if source not in known:
                    raise InputError(f"modules[{i}].after", f"{source!r} is not an earlier module")
            known[module.name] = module
        check_streams(self.modules)
        self._check_encoder_dp()
        version: Literal[1, 2] = 2 if self.has_streams else 1
        msgspec.structs.force_setattr(self, "format", f"pipeloom.layout/{version}")
        next_layer = dict.fromkeys(known, 0)
        replicas: dict[str, list[Chunk]] = {name: [] for name in known}
        for i, chunk in enumerate(self.chunks):
            if chunk.module not in known:
                raise InputError(f"chunks[{i}].module", f"{chunk.module!r} is not in modules")
            if not 0 <= chunk.rank < self.num_ranks:
                raise InputError(f"chunks[{i}].rank", f"{chunk.rank} is not in 0..{self.num_ranks - 1}")
            if chunk.layers[1] < chunk.layers[0]:
                raise InputError(f"chunks[{i}].layers", f"{list(chunk.layers)} ends before it begins")
            if known[chunk.module].on_ranks == "replicated":
                _check_whole(f"chunks[{i}].layers", chunk, replicas[chunk.module])
                replicas[chunk.module].append(chunk)
                continue
            if chunk.layers[0] != next_layer[chunk.module]:
                raise InputError(
                    f"chunks[{i}].layers",
                    f"begins at {chunk.layers[0]}, layer {next_layer[chunk.module]} of {chunk.module!r} comes next",
                    "every layer belongs to exactly one chunk, in model order",
                )
            next_layer[chunk.module] = chunk.layers[1] + 1
        for name, module in known.items():
            if module.on_ranks == "replicated":
                # The length first: the number of ranks may be any number that a file can hold.
                here = [chunk.rank for chunk in replicas[name]]
                if len(here) != self.num_ranks or sorted(here) != list(range(self.num_ranks)):
                    raise InputError(f"module {name!r}", "is replicated but has not one chunk on every rank")
            elif next_layer[name] == 0:
                raise InputError(f"module {name!r}", "has no chunk", "give every module at least one chunk")
            last = max(chunk.layers[1] for chunk in self.chunks if chunk.module == name)
            for end in (*module.emits, *module.takes):
                if not 0 <= end.layer <= last:
                    raise InputError(
                        f"module {name!r}", f"has {end.stream!r} at layer {end.layer}, its chunks have layers 0..{last}"
                    )

    def _check_encoder_dp(self) -> None:
        """Raise `InputError` if a module does not support encoder data parallelism."""
        for module in self.modules:
            if module.on_tensor_ranks == "dealt":
                check_encoder_dp(
                    f"module {module.name!r}.on_tensor_ranks",
                    is_last=module is self.modules[-1],
                    streams=bool(module.emits or module.takes),
                )

    @property
    def encoder_dp_modules(self) -> frozenset[str]:
        """Names of the modules with encoder data parallelism over tensor ranks (value ``dealt`` in files)."""
        return frozenset(module.name for module in self.modules if module.on_tensor_ranks == "dealt")

    def uses_encoder_dp(self, module: str) -> bool:
        """Return whether instances of a module are divided among several tensor-parallel ranks."""
        return self.parallelism.tensor > 1 and self.module(module).on_tensor_ranks == "dealt"

    def module(self, name: str) -> ModuleLayout:
        """Return the module with this name."""
        for module in self.modules:
            if module.name == name:
                return module
        raise InputError(f"module {name!r}", "is not in the layout")

    def chunks_of(self, module: str) -> tuple[int, ...]:
        """Return the chunk numbers of one module, in model order."""
        return tuple(i for i, chunk in enumerate(self.chunks) if chunk.module == module)

    @property
    def chunk_names(self) -> tuple[str, ...]:
        """Names of all chunks in plans: module and index within it, for example ``vision.0``."""
        seen: dict[str, int] = {}
        names = []
        for chunk in self.chunks:
            index = seen.get(chunk.module, 0)
            names.append(f"{chunk.module}.{index}")
            seen[chunk.module] = index + 1
        return tuple(names)

    def has_backward(self, module: str) -> bool:
        """Return whether gradients pass through a module: it or a module before it is trained."""
        here = self.module(module)
        sources = (*here.after, *(stream_sources(self.modules)[module] if here.takes else ()))
        return not here.frozen or any(self.has_backward(source) for source in sources)

    def forward_only(self) -> Layout:
        """Return the layout with all modules frozen, so that there are no gradients."""
        modules = tuple(msgspec.structs.replace(module, frozen=True) for module in self.modules)
        return msgspec.structs.replace(self, modules=modules)

    @property
    def has_streams(self) -> bool:
        """Whether any layer takes a stream."""
        return any(module.takes for module in self.modules)

    @property
    def document(self) -> dict[str, Any]:
        """Fields as in JSON, without those of unused streams and a default `on_tensor_ranks`."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        for module in fields["modules"]:
            if module["on_tensor_ranks"] == "divided":
                del module["on_tensor_ranks"]
        if not self.has_streams:
            for module in fields["modules"]:
                for name in _STREAM_FIELDS:
                    del module[name]
        return fields

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that identify this layout in plans."""
        return hashlib.sha256(msgspec.json.encode(self.document)).hexdigest()[:8]
