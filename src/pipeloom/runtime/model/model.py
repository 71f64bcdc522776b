"""Model, Module, Part: the user's own `torch.nn.Module` layers, described for training as a pipeline."""

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
"""A declared shape. A bare tuple of extents has the dtype of the module's parameters."""


@dataclass(frozen=True, slots=True)
class Part:
    """Input of a module for one microbatch or sub-microbatch.

    Attributes
    ----------
    samples : tuple
        The user's sample objects of the whole microbatch. Of a `Dataset`, only those in ``span`` are loaded.
    instances : tuple of (int, int)
        Instances of the part: position of the sample in ``samples``, and index of the instance within the sample
        (of its images, videos or recordings for a module that reads those, else 0).
    iteration : int
        Number of the batch. Together with a sample's id, it seeds random numbers such that they are the same under
        any plan.
    """

    samples: tuple[Any, ...]
    instances: tuple[tuple[int, int], ...]
    iteration: int = 0

    @property
    def span(self) -> range:
        """Positions of the samples from the first instance's to the last one's.

        From a module that reads another part of the samples, the part takes exactly the rows of these.
        """
        return range(self.instances[0][0], self.instances[-1][0] + 1) if self.instances else range(0)


@dataclass(frozen=True, slots=True, eq=False)
class Emit:
    """Result of a layer that returns more than its output.

    Attributes
    ----------
    output : Tensor
        Input of the next layer.
    streams : mapping
        Tensors by name, as declared for this layer in the module's ``emits``.
    loss : Tensor or None
        A scalar *sum* over the part's rows that is added to the model's losses, such as load balancing of experts
        or a z-loss. Like these, it is divided by the targets of the global batch, so that no packing changes it.
    """

    output: Tensor
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None


# Wrappers of layers, such as `fully_shard`, traverse their results.
register_pytree_node(
    Emit, lambda emit: ([emit.output, dict(emit.streams), emit.loss], None), lambda values, _: Emit(*values)
)


@dataclass(frozen=True, eq=False)
class Module:
    """One modality module: layers that are called one after the other.

    Layer 0 is called as ``layers[0](*inputs(part), *upstream, **context(part))``. ``upstream`` has one tensor for each
    name in ``after``: the rows of its output (dimension 0) that belong to the part, from any of its sub-microbatches.
    If that module reads the same part of a sample as this one, these are the rows of the part's own instances.
    Otherwise they are those of all samples in ``part.span``. There may be zero rows. Every later layer is called as
    ``layer(x, **context(part))`` with the output of the previous layer. A layer returns one tensor, or an `Emit` with
    more.

    Attributes
    ----------
    layers : sequence of torch.nn.Module
        The layers, unchanged. A rank trains those of its chunks.
    reads : "audio", "images", "sequence", "text" or "videos"
        The part of a sample that goes through the module: each of its images, for example, or the sample as a
        whole.
    hidden : shape, list of shapes, or None
        Output shape of every layer but the last, or of each of them. Extents are numbers, ``"instances"``,
        ``"tokens"`` or a fraction such as ``"tokens/4"``. None lets `find_shapes` find it.
    output : shape or None
        Output shape of the last layer.
    inputs : callable or None
        Returns a tensor or a tuple of tensors from a `Part`. With None, layer 0 gets only ``upstream``.
    context : callable or None
        Returns keyword arguments of every layer (masks, positions) from a `Part`. Called anew on every rank.
    after : tuple of str
        Names of the modules whose outputs layer 0 takes.
    frozen : bool
        Not trained: its parameters get no gradients, and there is no backward if nothing before it is trained.
    kinds : tuple of str or None
        Kind of every layer. Layers of one kind cost the same and are measured once. Default: class name and number
        of parameters.
    emits : mapping
        Streams that a layer emits, by number of the layer: name and shape. Dimension 0 must grow with the
        microbatch if another module takes the stream. Names are unique in a model.
    takes : mapping
        Names of streams with which a layer is called as keywords, by number of the layer. Any earlier layer of this
        module or of an earlier one may emit them. From another module it gets the rows that belong to its part, as
        for ``upstream``.
    parallelize : callable or None
        For tensor parallelism. `Trainer` calls it with each layer of a rank and the `DeviceMesh` of its
        tensor-parallel ranks. It divides the layer in place (`parallelize_module`). An unchanged layer stays whole
        on all of them. Layers still take and return whole tensors.
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
        """Derive the spec. Raises `InputError` for a module that could never be called."""
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
    """Modules in topological order. The loss takes the output of the last one.

    The loss of an iteration is the sum of its microbatches' losses over the sum of ``num_targets`` of all its samples,
    so that neither packing nor schedule changes it (PipeTune A.2).

    Attributes
    ----------
    loss : callable
        Returns a scalar from the last module's output and its `Part`: a *sum* over the part's targets.
    num_targets : callable
        Returns the number of targets of a sample in the loss. 1 for a mean over samples.
    targets : str
        Name of the targets for messages and reports: ``"target tokens"``, ``"samples"``.
    describe : callable or None
        Returns the metadata of a sample, unless training uses another function.
    examples : callable or None
        Returns a few example samples of several sizes for the name of a module that has work in them. The module is
        measured on them if the first batches have nothing for it. ``describe`` must return their sizes.
    pretrained : Pretrained or None
        Source of the weights of layers on ``meta``, and the format in which another library reads the trained
        weights.
    tied : tuple of tuple of str
        Parameters that several layers share, each as a tuple of names ``module.layer.parameter``.
    excluded : mapping
        Memory strategies with which its layers do not run, and the reason.
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
        """Derive the spec. Raises `InputError` for modules that feed nothing or cannot be concatenated."""
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
    def undeclared(self) -> str:
        """Name of the first module with undeclared shapes. Empty if all are declared."""
        for module in self.modules:
            shapes = [*(module.hidden if isinstance(module.hidden, list) else [module.hidden]), module.output]
            if len(module.layers) == 1:
                shapes = [module.output]
            if None in (*shapes, *(shape for streams in module.emits.values() for shape in streams.values())):
                return module.name
        return ""

    def check_declared(self) -> None:
        """Raise `InputError` for a model with undeclared shapes. The error names the module."""
        if self.undeclared:
            raise InputError(
                f"module {self.undeclared!r}",
                "has no declared shape",
                "give `hidden`, `output` and the shapes of `emits`, or call find_shapes(model, samples, metadata)",
            )

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers of all layers, named ``module.layer.parameter``."""
        tensors: dict[str, Tensor] = {}
        for module in self.modules:
            for number, layer in enumerate(module.layers):
                tensors |= saved_tensors(layer, f"{module.name}.{number}")
        return tensors

    def module(self, name: str) -> Module:
        """Return the module of that name."""
        return find_module(self.modules, name)

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter of a name ``module.layer.parameter``."""
        module, layer, path = name.split(".", 2)
        parameter: nn.Parameter = self.module(module).layers[int(layer)].get_parameter(path)
        return parameter

    def first_name(self, name: str) -> str:
        """Return the first name of a tied parameter, which is the same on all ranks. Other names stay unchanged."""
        return next((names[0] for names in self.tied if name in names), name)


def saved_tensors(layer: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of a layer, named ``prefix.name``."""
    return {f"{prefix}.{name}": each for name, each in layer.state_dict().items() if isinstance(each, Tensor)}


def _tied_names(modules: Sequence[Module]) -> tuple[tuple[str, ...], ...]:
    holders: dict[int, list[str]] = {}
    for module in modules:
        for number, layer in enumerate(module.layers):
            for name, parameter in layer.named_parameters():
                holders.setdefault(id(parameter), []).append(f"{module.name}.{number}.{name}")
    return tuple(tuple(names) for names in holders.values() if len(names) > 1)


def make_part(module: ModuleSpec, packing: Packing, samples: Sequence[Any], microbatch: int, sub: int) -> Part:
    """Return a module's part of one sub-microbatch. Samples of a `Dataset` are not loaded yet.

    ``packing.batch`` has the metadata of ``samples``, those of the whole batch, in the same order.
    """
    chosen = packing.microbatches[microbatch].samples
    cut = packing.parts_of(microbatch, module.name)[sub]
    end = cut.first + cut.count
    described = packing.batch.samples
    counts = [num_instances(module.reads, described[number]) for number in chosen]
    if end > sum(counts):
        raise InputError(
            f"microbatch {microbatch}.{module.name}[{sub}]",
            f"needs instances {cut.first}..{end - 1}, there are {sum(counts)}",
            "pack the batch that is trained on",
        )
    if cut.count == 1 == len(chosen):
        instances: tuple[tuple[int, int], ...] = ((0, cut.first),)
    else:
        every = [(position, index) for position, count in enumerate(counts) for index in range(count)]
        instances = tuple(every[cut.first : end])
    return Part(tuple([samples[number] for number in chosen]), instances, packing.batch.iteration)


def check_emitted(module: Module, layer: int, found: Collection[str]) -> None:
    """Raise `InputError` for streams of a layer that its module does not declare."""
    wanted = module.emits.get(layer, {})
    if set(found) != set(wanted):
        raise InputError(
            f"module {module.name!r}.emits[{layer}]",
            f"declares {', '.join(sorted(wanted)) or 'none'}, the layer emitted {', '.join(sorted(found)) or 'none'}",
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
    """Return first row and number of rows of the output or stream of ``source`` that a part of another module takes.

    ``samples`` are those of the microbatch. ``first`` and ``count`` are the part's instances, counted within it.
    ``shape`` is that of the stream. None is that of the output.
    """
    begin, number = reach(samples, source.reads, module.reads, first, count)
    lengths = tuple(n for sample in samples for n in source.instance_lengths(sample))
    shape = shape or source.layers[-1].output
    before, inside = (Workload(lengths[:begin]), Workload(lengths[begin : begin + number]))
    return shape.resolve(before)[0], shape.resolve(inside)[0]


def empty_output(shape: TensorShape, device: torch.device) -> Tensor:
    """Return zero rows in the shape of an output or stream, for a microbatch without work for a module."""
    return torch.zeros(shape.resolve(Workload(())), dtype=torch_dtype(shape.dtype), device=device)


@contextmanager
def user_code(where: str) -> Iterator[None]:
    """Run a user's function, and report its errors in one line as errors of user code.

    Raises
    ------
    InputError
        Names ``where`` and the error. With ``PIPELOOM_TRACEBACK`` set, the error itself is raised.
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


def user_arguments(module: Module, part: Part) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a module's ``inputs`` and ``context``, and return their arguments for its first layer and all layers."""
    with user_code(f"module {module.name!r}.context"):
        context = {} if module.context is None else module.context(part)
    with user_code(f"module {module.name!r}.inputs"):
        inputs: Any = () if module.inputs is None else module.inputs(part)
    return inputs if isinstance(inputs, tuple) else (inputs,), context


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name, e.g. ``"bfloat16"``."""
    dtype = getattr(torch, name, None)
    if name not in DTYPE_BYTES or not isinstance(dtype, torch.dtype):
        raise InputError("dtype", f"{name!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in specs and plans."""
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
    """Return the kind of a layer with its streams, because layers with other streams have other costs."""
    # A number follows two underscores. Layers whose streams differ only in it cost the same.
    inputs = [end.stream.partition("__")[0] for end in takes if end.layer == layer]
    outputs = [end.stream.partition("__")[0] for end in emits if end.layer == layer]
    return kind + (f"({','.join(inputs)})" if inputs else "") + (f"->{','.join(outputs)}" if outputs else "")


def _as_shape(shape: Shape | None, dtype: str) -> TensorShape:
    if shape is None:
        # A placeholder until the shape is found. It can be concatenated and split.
        return TensorShape(("tokens",), dtype)
    return shape if isinstance(shape, TensorShape) else TensorShape(dims=tuple(shape), dtype=dtype)
