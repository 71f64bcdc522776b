"""Model, Module, Part: a user's own `torch.nn.Module` layers, said to be trained as a pipeline."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import register_pytree_node

from pipeloom.errors import InputError, PipeloomError
from pipeloom.packing import Packing, reach
from pipeloom.spec import (
    DTYPE_BYTES,
    EmittedStream,
    LayerSpec,
    ModelSpec,
    ModuleSpec,
    Sample,
    Strategy,
    StreamEnd,
    TensorShape,
    Workload,
)
from pipeloom.spec.model import Dimension, Reads, find_module, num_instances, stream_sources

if TYPE_CHECKING:
    from pipeloom.runtime.model.pretrained import Pretrained

Shape = TensorShape | tuple[Dimension, ...]
"""A stated shape; a bare tuple of extents takes the dtype of the module's parameters."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one microbatch, or one sub-microbatch of it, gives a module.

    Attributes
    ----------
    samples : tuple
        The user's own sample objects: all samples of the microbatch. Of a `Dataset`, those in ``span`` are loaded,
        others are not.
    instances : tuple of (int, int)
        The instances that this part covers: position of the sample in ``samples``, and index of the instance
        within that sample (of its images, videos or recordings for a module that reads those, else 0).
    iteration : int
        Number of the batch: with it and a sample's id, what is drawn anew every time is the same under any plan.
    """

    samples: tuple[Any, ...]
    instances: tuple[tuple[int, int], ...]
    iteration: int = 0

    @property
    def span(self) -> range:
        """Positions of the samples from the first instance's to the last one's.

        Of a module that reads another part of the samples, the part takes the rows of exactly these.
        """
        return range(self.instances[0][0], self.instances[-1][0] + 1) if self.instances else range(0)


@dataclass(frozen=True, slots=True, eq=False)
class Emit:
    """What a layer returns that gives more than its output.

    Attributes
    ----------
    output : Tensor
        What the next layer takes.
    streams : mapping
        Tensors by name, as the module's ``emits`` states for this layer.
    loss : Tensor or None
        A scalar, a *sum* over the part's rows, that is added to the sum of the model's losses: balancing of experts, a
        z-loss. It is divided by the targets of the global batch like these, so that no packing changes it.
    """

    output: Tensor
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None


# What wraps layers, as `fully_shard` does, looks into what they return.
register_pytree_node(
    Emit, lambda emit: ([emit.output, dict(emit.streams), emit.loss], None), lambda values, _: Emit(*values)
)


@dataclass(frozen=True, eq=False)
class Module:
    """One modality module: layers that are called one after the other.

    Layer 0 is called as ``layers[0](*inputs(part), *upstream, **context(part))``, where ``upstream`` has one
    tensor for each name in ``after``: the rows of its output (dimension 0) that belong to the part, whichever
    sub-microbatches they come from. If that module reads what this one reads, these are the rows of the part's own
    instances, else those of all samples in ``part.span``; zero rows where there are none. Every later layer
    is called as ``layer(x, **context(part))`` with the output of the layer before. A layer returns one tensor, or an
    `Emit` with more.

    Attributes
    ----------
    layers : sequence of torch.nn.Module
        Unchanged; a rank trains those of its chunks.
    reads : "audio", "images", "sequence", "text" or "videos"
        Which part of a sample goes through the module: each of its images, or it as a whole.
    hidden : shape, list of shapes, or None
        Output of every layer but the last, or of each of them: extents are numbers, ``"instances"``, ``"tokens"`` or a
        part of these, ``"tokens/4"``. None: `find_shapes` finds it.
    output : shape or None
        Output of the last layer.
    inputs : callable or None
        From a `Part` to a tensor or a tuple of tensors; None: layer 0 gets nothing but ``upstream``.
    context : callable or None
        From a `Part` to keyword arguments of every layer (masks, positions), made anew on every rank.
    after : tuple of str
        Names of the modules whose outputs layer 0 takes.
    frozen : bool
        Not trained: no gradients for its parameters, and no backward at all where nothing before it is trained.
    kinds : tuple of str or None
        Kind of every layer; layers of one kind cost the same and are measured once. Default: class name and
        number of parameters.
    emits : mapping
        Per number of a layer, the streams that it emits: name and shape, whose dimension 0 grows with the microbatch
        where another module takes the stream. Names are unique in a model.
    takes : mapping
        Per number of a layer, names of the streams that it is called with as keywords: emitted by any layer before it,
        of this module or of one before. Of another module it gets the rows that belong to its part, as with
        ``upstream``.
    parallelize : callable or None
        For tensor parallelism: called by `Trainer` with each layer of a rank and the `DeviceMesh` of its
        tensor-parallel ranks, divides the layer in place (`parallelize_module`). A layer that it leaves alone stays
        whole on all of them. Layers go on taking and returning whole tensors.
    """

    name: str
    layers: Sequence[nn.Module]
    _: KW_ONLY
    reads: Reads
    hidden: Shape | Sequence[Shape] | None = None
    output: Shape | None = None
    inputs: Callable[[Part], Tensor | tuple[Tensor, ...]] | None = None
    context: Callable[[Part], dict[str, Any]] | None = None
    after: tuple[str, ...] = ()
    frozen: bool = False
    kinds: tuple[str, ...] | None = None
    emits: Mapping[int, Mapping[str, Shape | None]] = field(default_factory=dict)
    takes: Mapping[int, Sequence[str]] = field(default_factory=dict)
    parallelize: Callable[[nn.Module, DeviceMesh], object] | None = None
    spec: ModuleSpec = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Derive the spec; refuse what could never be called."""
        if not self.layers:
            raise InputError(f"module {self.name!r}.layers", "is empty", "give at least one layer")
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, nn.Module):
                raise InputError(
                    f"module {self.name!r}.layers[{i}]", f"is a {type(layer).__name__}", "give a torch.nn.Module"
                )
        if self.inputs is None and not self.after and not self.takes.get(0):
            raise InputError(
                f"module {self.name!r}.inputs", "is None, and no module comes before", "give a function of a Part"
            )
        if self.kinds is not None and len(self.kinds) != len(self.layers):
            raise InputError(
                f"module {self.name!r}.kinds", f"has {len(self.kinds)} entries, layers has {len(self.layers)}"
            )
        object.__setattr__(self, "spec", self._derive_spec())

    def _derive_spec(self) -> ModuleSpec:
        dtype = _dtype_of(self.layers)
        last = len(self.layers) - 1
        hidden = self.hidden if isinstance(self.hidden, list) else [self.hidden] * last
        if len(hidden) != last:
            raise InputError(f"module {self.name!r}.hidden", f"has {len(hidden)} shapes for {last} layers and the last")
        outputs = [_as_shape(shape, dtype) for shape in (*hidden, self.output)]
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in self.layers]
        kinds = self.kinds or tuple(
            f"{type(layer).__name__}[{size}]" for layer, size in zip(self.layers, sizes, strict=True)
        )
        emits = tuple(
            EmittedStream(name, layer, _as_shape(shape, dtype))
            for layer, streams in sorted(self.emits.items())
            for name, shape in streams.items()
        )
        takes = tuple(StreamEnd(name, layer) for layer, names in sorted(self.takes.items()) for name in _names(names))
        single = [
            (_streaming(kind, i, emits, takes), outputs[i], size)
            for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
        ]
        layers = tuple(
            LayerSpec(kind=kind, output=shape, count=len(list(run)), num_parameters=size)
            for (kind, shape, size), run in itertools.groupby(single)
        )
        return ModuleSpec(self.name, self.reads, layers, self.after, self.frozen, emits, takes)


@dataclass(frozen=True, eq=False)
class Model:
    """Modules in topological order; the last one's output goes into the loss.

    The loss of an iteration is the sum of its microbatches' losses over the sum of ``num_targets`` of all its
    samples, so that neither packing nor schedule changes it (PipeTune A.2).

    Attributes
    ----------
    loss : callable
        From the last module's output and its `Part` to a scalar: a *sum* over the part's targets.
    num_targets : callable
        From one sample to how many targets it counts in the loss; 1 for a mean over samples.
    targets : str
        What the targets are, for messages and reports: ``"target tokens"``, ``"samples"``.
    describe : callable or None
        From a sample to its metadata, where training is given no other.
    examples : callable or None
        From a module's name to a few samples, made up, of several sizes, in which it has something to do: where the
        first batches have nothing for it, it is measured on these, as ``describe`` tells their sizes.
    pretrained : Pretrained or None
        Where the weights of layers lie that are on ``meta``, and how another library reads them when they are trained.
    tied : tuple of tuple of str
        Parameters that several layers share, as ``module.layer.parameter`` each.
    excluded : mapping
        Memory strategies under which its layers do not run, with what fails.
    """

    modules: Sequence[Module]
    loss: Callable[[Tensor, Part], Tensor]
    num_targets: Callable[[Any], float]
    name: str = "model"
    targets: str = "targets"
    describe: Callable[[Any], dict[str, Any]] | None = None
    examples: Callable[[str], Sequence[Any]] | None = None
    pretrained: Pretrained | None = field(default=None, repr=False)
    excluded: Mapping[Strategy, str] = field(default_factory=dict, repr=False)
    spec: ModelSpec = field(init=False, repr=False)
    tied: tuple[tuple[str, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Derive the spec; refuse modules that feed nothing or cannot be concatenated."""
        object.__setattr__(self, "tied", _tied_names(self.modules))
        object.__setattr__(self, "spec", ModelSpec(self.name, tuple(module.spec for module in self.modules)))
        feeding = {source for module in self.modules for source in module.after}
        streaming = {source for sources in stream_sources(self.spec.modules).values() for source in sources}
        for module in self.modules[:-1]:
            if module.name not in feeding | streaming:
                raise InputError(
                    f"module {module.name!r}", "feeds no module and is not the last", "name it in an `after`"
                )
        for module in self.modules:
            if module.name in feeding and not module.spec.layers[-1].output.grows:
                raise InputError(
                    f"module {module.name!r}.output",
                    "dimension 0 does not grow with the microbatch",
                    'make it "instances" or "tokens": sub-microbatches are concatenated there',
                )

    @property
    def unstated(self) -> str:
        """The first module whose shapes are not all stated; empty: all are."""
        for module in self.modules:
            shapes = [*(module.hidden if isinstance(module.hidden, list) else [module.hidden]), module.output]
            if len(module.layers) == 1:
                shapes = [module.output]
            if None in (*shapes, *(shape for streams in module.emits.values() for shape in streams.values())):
                return module.name
        return ""

    def check_stated(self) -> None:
        """Refuse a model whose shapes are not known.

        Raises
        ------
        InputError
            Naming the module.
        """
        if self.unstated:
            raise InputError(
                f"module {self.unstated!r}",
                "states no shape",
                "give `hidden`, `output` and the shapes of `emits`, or call find_shapes(model, samples, metadata)",
            )

    def saved_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of all layers that are saved, named ``module.layer.parameter``."""
        found: dict[str, Tensor] = {}
        for module in self.modules:
            for number, layer in enumerate(module.layers):
                found |= saved_tensors(layer, f"{module.name}.{number}")
        return found

    def module(self, name: str) -> Module:
        """Return the module of that name."""
        return find_module(self.modules, name)


def saved_tensors(layer: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Parameters and buffers of a layer that are saved, ``prefix.name`` each."""
    return {f"{prefix}.{name}": each for name, each in layer.state_dict().items() if isinstance(each, Tensor)}


def _tied_names(modules: Sequence[Module]) -> tuple[tuple[str, ...], ...]:
    holders: dict[int, list[str]] = {}
    for module in modules:
        for number, layer in enumerate(module.layers):
            for name, parameter in layer.named_parameters():
                holders.setdefault(id(parameter), []).append(f"{module.name}.{number}.{name}")
    return tuple(tuple(names) for names in holders.values() if len(names) > 1)


def make_part(module: ModuleSpec, packing: Packing, samples: Sequence[Any], microbatch: int, sub: int) -> Part:
    """Cut from the samples what one sub-microbatch gives a module; those of a `Dataset` are not loaded yet.

    Parameters
    ----------
    packing : Packing
        Whose ``batch`` has the metadata of ``samples``, in the same order.
    samples : sequence
        The user's samples of the whole batch.
    """
    chosen = packing.microbatches[microbatch].samples
    cut = packing.parts_of(microbatch, module.name)[sub]
    end = cut.first + cut.count
    described = packing.batch.samples
    counts = [num_instances(module.reads, described[number]) for number in chosen]
    if end > sum(counts):
        raise InputError(
            f"microbatch {microbatch}.{module.name}[{sub}]",
            f"wants instances {cut.first}..{end - 1}, there are {sum(counts)}",
            "pack the same batch that is trained on",
        )
    if cut.count == 1 == len(chosen):
        instances: tuple[tuple[int, int], ...] = ((0, cut.first),)
    else:
        every = [(position, index) for position, count in enumerate(counts) for index in range(count)]
        instances = tuple(every[cut.first : end])
    return Part(tuple([samples[number] for number in chosen]), instances, packing.batch.iteration)


def check_emitted(module: Module, layer: int, found: Collection[str]) -> None:
    """Refuse other streams of a layer than those that its module states.

    Raises
    ------
    InputError
    """
    wanted = module.emits.get(layer, {})
    if set(found) != set(wanted):
        raise InputError(
            f"module {module.name!r}.emits[{layer}]",
            f"states {', '.join(sorted(wanted)) or 'none'}, the layer emitted {', '.join(sorted(found)) or 'none'}",
            "return Emit(output, streams)",
        )


def upstream_rows(
    source: ModuleSpec,
    module: ModuleSpec,
    samples: Sequence[Sample],
    first: int,
    count: int,
    shape: TensorShape | None = None,
) -> tuple[int, int]:
    """Rows of a module's output, or of a stream, that a part of another one takes: the first, and how many.

    Parameters
    ----------
    source, module : ModuleSpec
        The module that gives and the one that takes.
    samples : sequence of Sample
        Metadata of the microbatch whose output it is.
    first, count : int
        The part's instances, counted within the microbatch.
    shape : TensorShape or None
        Of the stream; None: that of the output.
    """
    begin, number = reach(samples, source.reads, module.reads, first, count)
    lengths = tuple(n for sample in samples for n in source.instance_lengths(sample))
    shape = shape or source.layers[-1].output
    before, inside = (Workload(lengths[:begin]), Workload(lengths[begin : begin + number]))
    return shape.resolve(before)[0], shape.resolve(inside)[0]


def empty_output(shape: TensorShape, device: torch.device) -> Tensor:
    """Return what is handed on for a microbatch with nothing for it: zero rows of an output's or stream's shape."""
    return torch.zeros(shape.resolve(Workload(())), dtype=torch_dtype(shape.dtype), device=device)


@contextmanager
def user_code(where: str) -> Iterator[None]:
    """Run a user's function: what goes wrong in it is said to be the user's, in one line.

    Raises
    ------
    InputError
        Naming ``where`` and the error; with ``PIPELOOM_TRACEBACK`` set, the error itself.
    """
    try:
        yield
    except PipeloomError:
        raise
    except Exception as error:
        if os.environ.get("PIPELOOM_TRACEBACK"):
            raise
        raise InputError(
            where, f"raised {type(error).__name__}: {error}", "PIPELOOM_TRACEBACK=1 shows where"
        ) from error


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of that name, e.g. ``"bfloat16"``."""
    dtype = getattr(torch, name, None)
    if name not in DTYPE_BYTES or not isinstance(dtype, torch.dtype):
        raise InputError("dtype", f"{name!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype as specs and plans write it."""
    return str(dtype).removeprefix("torch.")


def _dtype_of(layers: Sequence[nn.Module]) -> str:
    for layer in layers:
        for parameter in layer.parameters():
            if dtype_name(parameter.dtype) in DTYPE_BYTES:
                return dtype_name(parameter.dtype)
    return dtype_name(torch.get_default_dtype())


def _names(names: Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def _streaming(kind: str, layer: int, emits: Sequence[StreamEnd], takes: Sequence[StreamEnd]) -> str:
    """The kind of a layer with its streams: layers that take others cost otherwise."""
    # What stands behind two underscores is a number: layers whose streams differ in it alone cost alike.
    taken = [end.stream.partition("__")[0] for end in takes if end.layer == layer]
    given = [end.stream.partition("__")[0] for end in emits if end.layer == layer]
    return kind + (f"({','.join(taken)})" if taken else "") + (f"->{','.join(given)}" if given else "")


def _as_shape(shape: Shape | None, dtype: str) -> TensorShape:
    if shape is None:
        # Nobody asks before it was found; it can be joined and cut.
        return TensorShape(("tokens",), dtype)
    return shape if isinstance(shape, TensorShape) else TensorShape(dims=tuple(shape), dtype=dtype)
