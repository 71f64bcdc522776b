"""Where the model lies: chunks of modules on pipeline ranks (`pipeloom.layout/1`)."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from pipeloom.errors import InputError, check_count
from pipeloom.spec.parallelism import Parallelism


class ModuleLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one module lies on the ranks, and how its microbatches are split."""

    name: str
    after: tuple[str, ...] = ()
    frozen: bool = False
    sub_microbatch: int | None = None
    """Instances per sub-microbatch at most; None: the whole microbatch."""
    on_ranks: Literal["pipelined", "replicated"] = "pipelined"

    def __post_init__(self) -> None:
        """Refuse empty sub-microbatches."""
        if self.sub_microbatch is not None:
            check_count(f"module {self.name!r}.sub_microbatch", self.sub_microbatch)


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive layers of one module on one rank; ``layers`` is first and last, inclusive."""

    module: str
    layers: tuple[int, int]
    rank: int

    @property
    def num_layers(self) -> int:
        """Number of layers in the chunk."""
        return self.layers[1] - self.layers[0] + 1


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model over the pipeline ranks, decided once before training. Chunks are in model order."""

    num_ranks: int
    modules: tuple[ModuleLayout, ...]
    chunks: tuple[Chunk, ...]
    parallelism: Parallelism = Parallelism()
    format: Literal["pipeloom.layout/1"] = "pipeloom.layout/1"

    def __post_init__(self) -> None:
        """Check that every layer of a pipelined module is in exactly one chunk, and modules form a DAG."""
        check_count("num_ranks", self.num_ranks)
        known: dict[str, ModuleLayout] = {}
        for i, module in enumerate(self.modules):
            if module.name in known:
                raise InputError(f"modules[{i}].name", f"{module.name!r} occurs twice")
            for source in module.after:
                if source not in known:
                    raise InputError(f"modules[{i}].after", f"{source!r} is not an earlier module")
            known[module.name] = module
        next_layer = dict.fromkeys(known, 0)
        replicas: dict[str, list[int]] = {name: [] for name in known}
        for i, chunk in enumerate(self.chunks):
            if chunk.module not in known:
                raise InputError(f"chunks[{i}].module", f"{chunk.module!r} is not in modules")
            if not 0 <= chunk.rank < self.num_ranks:
                raise InputError(f"chunks[{i}].rank", f"{chunk.rank} is not in 0..{self.num_ranks - 1}")
            if chunk.layers[1] < chunk.layers[0]:
                raise InputError(f"chunks[{i}].layers", f"{list(chunk.layers)} ends before it begins")
            if known[chunk.module].on_ranks == "replicated":
                replicas[chunk.module].append(chunk.rank)
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
                here = replicas[name]
                if len(here) != self.num_ranks or sorted(here) != list(range(self.num_ranks)):
                    raise InputError(f"module {name!r}", "is replicated but has not one chunk on every rank")
            elif next_layer[name] == 0:
                raise InputError(f"module {name!r}", "has no chunk", "give every module at least one chunk")

    def module(self, name: str) -> ModuleLayout:
        """Return the module of that name."""
        for module in self.modules:
            if module.name == name:
                return module
        raise InputError(f"module {name!r}", "is not in the layout")

    def chunks_of(self, module: str) -> tuple[int, ...]:
        """Chunk numbers of one module, in model order."""
        return tuple(i for i, chunk in enumerate(self.chunks) if chunk.module == module)

    def chunk_name(self, chunk: int) -> str:
        """Name of a chunk in plans: module and index within it, e.g. ``vision.0``."""
        return self.chunk_names[chunk]

    @property
    def chunk_names(self) -> tuple[str, ...]:
        """Names of all chunks, in chunk order."""
        seen: dict[str, int] = {}
        names = []
        for chunk in self.chunks:
            index = seen.get(chunk.module, 0)
            names.append(f"{chunk.module}.{index}")
            seen[chunk.module] = index + 1
        return tuple(names)

    def has_backward(self, module: str) -> bool:
        """Whether gradients flow through a module: it is trained, or something before it is."""
        here = self.module(module)
        return not here.frozen or any(self.has_backward(source) for source in here.after)

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that name this layout in plans."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:8]
