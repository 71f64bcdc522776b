"""Measure layers on real inputs (seconds forward and backward, saved bytes), and fit a model's profile."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.cost import LayerMeasurement, Profile, ProfileCosts, fit_profile
from pipeloom.errors import InputError, check_count
from pipeloom.layout import ModulePlacement, single_rank, typical_seconds
from pipeloom.packing import Packing, PackingSpec, budget_tokens, check_budget, pack, packing_of
from pipeloom.runtime.data.dataset import load_part
from pipeloom.runtime.data.prefetch import Describe, batch_of, example_samples, idle_modules
from pipeloom.runtime.execute.blocks import kept_casts
from pipeloom.runtime.launch.accelerator import on_accelerator
from pipeloom.runtime.launch.device import moved
from pipeloom.runtime.measure.workbench import WARM_UP, Workbench, measure_forward, measure_strategies
from pipeloom.runtime.model.model import (
    Emit,
    Model,
    Module,
    Part,
    check_emitted,
    empty_output,
    make_part,
    torch_dtype,
    upstream_rows,
    user_arguments,
    user_code,
)
from pipeloom.spec import Batch, Layout, TensorShape, Workload


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Options for timing layers."""

    repeats: int = 5
    """Number of timed runs of each layer on each part after a warm-up, of which the median counts."""
    threads: int = 1
    """Number of torch threads while measuring: as many as a rank will have."""
    strategies: bool = False
    """Also measure every memory strategy, a split backward, and the bytes that a layer uses while it runs, so that
    plans may choose among strategies. Takes about four times as long."""
    device: torch.device | str = "cpu"
    """Device on which layers run, one at a time."""
    autocast: torch.dtype | None = None
    """Run layers and loss under autocast with this dtype, as in training. Weights are cast before the timed runs,
    because training casts them once an iteration."""

    def __post_init__(self) -> None:
        check_count("options.repeats", self.repeats)
        check_count("options.threads", self.threads)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(MeasureOptions):
    """Options for measuring a profile."""

    machine: str = ""
    """Name of the machine in the profile. Empty uses the system's name."""
    all_sizes: bool = False
    """Pack each further batch into microbatches half as large as the previous ones, down to an eighth, then start
    again. Tuning chooses sizes, so it needs the costs of small ones (PipeTune A.4 sweeps sizes)."""


def measure_layers(
    model: Model,
    packing: Packing,
    samples: Sequence[Any],
    *,
    known: Sequence[LayerMeasurement] = (),
    options: MeasureOptions = MeasureOptions(),
) -> list[LayerMeasurement]:
    """Time one layer of every kind on every part of a packed batch.

    Layers run on the same data as in training: the user's inputs, and the outputs of earlier layers. The last layer of
    the last module includes the loss if it is the first of its kind. Layers without gradients have a ``backward_s`` of
    0 and save nothing.

    Parameters
    ----------
    model : Model
        The model. Each layer is on ``options.device`` while it is measured, and then again where it was. Layers
        that are on that device from the start are never copied. Gradients stay unchanged.
    packing : Packing
        Packing with the sub-microbatches of the layout to plan.
    samples : sequence
        The user's samples in the order of ``packing.batch``.
    known : sequence of LayerMeasurement
        Earlier measurements, whose kinds and workloads are skipped.

    Returns
    -------
    list of LayerMeasurement
        One per kind and distinct workload. ``activation_bytes`` are the storages saved by autograd, without weights
        and without the module's context.

    Raises
    ------
    InputError
        A layer returns another shape than declared. The error names module, layer and both shapes.
    """
    model.check_declared()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        bench = Workbench(torch.device(options.device), options.autocast, tuple(model.excluded))
        # Casts of weights are kept between runs, as in an iteration.
        with kept_casts(bench.device, bench.autocast):
            return _Measuring(model, packing, samples, known, options, bench).run()
    finally:
        torch.set_num_threads(threads_before)


class _Measuring:
    def __init__(
        self,
        model: Model,
        packing: Packing,
        samples: Sequence[Any],
        known: Sequence[LayerMeasurement],
        options: MeasureOptions,
        bench: Workbench,
    ) -> None:
        self.model, self.packing, self.samples = model, packing, samples
        self.repeats, self.strategies, self.bench = options.repeats, options.strategies, bench
        self.seen = {(row.module, row.kind, row.workload) for row in known}
        self.found: list[LayerMeasurement] = []
        self.flows: dict[str, bool] = {}
        self.ends = {end.stream: (module, end) for module in model.modules for end in module.spec.emits}
        for module in model.modules:
            sources = model.spec.sources(module.name)
            self.flows[module.name] = not module.frozen or any(self.flows[name] for name in sources)

    def run(self) -> list[LayerMeasurement]:
        for microbatch in range(len(self.packing.microbatches)):
            outputs: dict[str, Tensor] = {}
            streams: dict[str, Tensor] = {}
            """Those of whole modules that others take."""
            for module in self.model.modules:
                parts = range(len(self.packing.parts_of(microbatch, module.name)))
                upstream = tuple(outputs[name] for name in module.after)
                pieces, emitted = [], []
                for sub in parts:
                    here = dict[str, Tensor]()
                    pieces.append(self._part(module, microbatch, sub, upstream, streams, here))
                    emitted.append(here)
                empty = empty_output(module.spec.layers[-1].output, self.bench.device)
                outputs[module.name] = torch.cat(pieces) if pieces else empty
                others = [end.stream for other in self.model.modules if other is not module for end in other.spec.takes]
                for end in module.spec.emits:
                    if end.stream not in others:
                        continue
                    rows = [here[end.stream] for here in emitted]
                    streams[end.stream] = torch.cat(rows) if rows else empty_output(end.output, self.bench.device)
        return self.found

    def _part(
        self,
        module: Module,
        microbatch: int,
        sub: int,
        upstream: tuple[Tensor, ...],
        streams: Mapping[str, Tensor],
        here: dict[str, Tensor],
    ) -> Tensor:
        """Run one part through its module and measure new layers. Returns the module's output.

        ``streams`` has the streams of earlier modules. Those of this part are added to ``here``.
        """
        part = load_part(make_part(module.spec, self.packing, self.samples, microbatch, sub), module.name)
        workload = self.packing.parts_of(microbatch, module.name)[sub].workload
        inputs, context = user_arguments(module, part)
        inputs, context = moved((inputs, {**context}), self.bench.device)
        upstream = tuple(
            self._rows(tensor, module, self.model.module(name), microbatch, sub)
            for tensor, name in zip(upstream, module.after, strict=True)
        )
        arguments: tuple[Any, ...] = (*inputs, *upstream)
        needs_gradient = [False] * len(inputs) + [self.flows[name] for name in module.after]
        last = len(module.layers) - 1
        # The first layer takes data without gradients. Other layers of its kind are more representative.
        recurs = module.spec.flat_layers[0].kind in {layer.kind for layer in module.spec.flat_layers[1:]}
        output: Tensor | None = None
        for number, spec in enumerate(module.spec.flat_layers):
            taken = tuple(end.stream for end in module.spec.takes if end.layer == number)
            for name in taken:
                source, end = self.ends[name]
                given_rows = here[name] if source is module else streams[name]
                if source is not module:
                    given_rows = self._rows(given_rows, module, source, microbatch, sub, end.output)
                arguments = (*arguments, given_rows)
                needs_gradient = [*needs_gradient, self.flows[source.name]]
            home = self.bench.home(module.layers[number])
            real = self.bench.real(module.layers[number])
            once = _AsOne(real, taken, here)
            layer = self.bench.mount(once)
            with torch.no_grad(), user_code(f"module {module.name!r}.layers[{number}]"):
                output = layer(*arguments, **context)
            if not isinstance(output, Tensor):
                raise InputError(
                    f"module {module.name!r}.layers[{number}]",
                    f"returned a {type(output).__name__}",
                    "return one tensor, or an Emit with more",
                )
            self._check(module, number, output, spec.output.resolve(workload), torch_dtype(spec.output.dtype))
            self._check_streams(module, number, here, workload)
            key = (module.name, spec.kind, workload)
            if key not in self.seen and not (number == 0 and recurs):
                self.seen.add(key)
                # Most layers have no streams, so measure them without the wrapper.
                alone: torch.nn.Module = real
                if taken or once.emits:
                    alone = _AsOne(alone, taken, None)
                if number == last and module is self.model.modules[-1]:
                    alone = _WithLoss(alone, self.model, part)
                self._measure(key, self.bench.mount(alone), arguments, needs_gradient, context)
            self.bench.unmount(module.layers[number], home)
            arguments, needs_gradient = (output,), [self.flows[module.name]]
        assert output is not None
        return output

    def _rows(
        self,
        tensor: Tensor,
        module: Module,
        source: Module,
        microbatch: int,
        sub: int,
        shape: TensorShape | None = None,
    ) -> Tensor:
        """Return the rows of an upstream output, or of a stream, that belong to one part."""
        part = self.packing.parts_of(microbatch, module.name)[sub]
        samples = [self.packing.batch.samples[n] for n in self.packing.microbatches[microbatch].samples]
        return tensor.narrow(0, *upstream_rows(source.spec, module.spec, samples, part.first, part.count, shape))

    def _check_streams(self, module: Module, number: int, here: Mapping[str, Tensor], workload: Workload) -> None:
        wanted = {end.stream: end.output for end in module.spec.emits if end.layer == number}
        before = {end.stream for end in module.spec.emits if end.layer < number}
        where = f"module {module.name!r}.emits[{number}]"
        check_emitted(module, number, here.keys() - before)
        for name, shape in wanted.items():
            declared, emitted = (shape.resolve(workload), torch_dtype(shape.dtype)), tuple(here[name].shape)
            if (emitted, here[name].dtype) != declared:
                raise InputError(
                    where,
                    f"declares {name!r} as {declared[0]} {declared[1]}, the layer emitted {emitted} {here[name].dtype}",
                    "correct the declared shape, or the sizes in the samples' metadata",
                )

    def _check(self, module: Module, number: int, output: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        last_of_all = module is self.model.modules[-1] and number == len(module.layers) - 1
        if not last_of_all and (output.shape != shape or output.dtype != dtype):
            which = "output" if number == len(module.layers) - 1 else "hidden"
            raise InputError(
                f"module {module.name!r}.{which}",
                f"declares {shape} {dtype}, layer {number} returned {tuple(output.shape)} {output.dtype}",
                "correct the declared shape, or the sizes in the samples' metadata",
            )

    def _measure(
        self,
        key: tuple[str, str, Workload],
        layer: torch.nn.Module,
        arguments: tuple[Any, ...],
        needs_gradient: list[bool],
        context: dict[str, Any],
    ) -> None:
        trained = self.flows[key[0]]
        leaves: list[Any] = [
            x.detach().requires_grad_(needs) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x, needs in zip(arguments, needs_gradient, strict=True)
        ]
        parameters = list(layer.parameters())
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        forward_s, backward_s, saved, saved_arguments = [], [], 0, 0
        for run in range(WARM_UP + self.repeats):
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    leaf.grad = None
            storages: dict[int, int] = {}
            # Counting takes time, so only the warm-up counts.
            counts = run == 0 and trained
            counting = saved_tensors_hooks(_counting(storages, self.bench), lambda tensor: tensor)
            with counting if counts else nullcontext():
                begin = self.bench.now_s()
                with torch.set_grad_enabled(trained):
                    output = layer(*leaves, **context)
                middle = self.bench.now_s()
            if counts:
                saved, saved_arguments = _num_bytes(storages, leaves, [*parameters, *context.values()])
            gradient = torch.ones_like(output)
            start = self.bench.now_s()
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
            end = self.bench.now_s()
            if run >= WARM_UP:
                forward_s.append(middle - begin)
                backward_s.append(end - start)
        more = None
        if self.strategies and trained:
            more = measure_strategies(layer, leaves, context, parameters, saved_arguments, self.repeats, self.bench)
        elif self.strategies:
            more = measure_forward(layer, leaves, context)
        for parameter, gradient_before in zip(parameters, before, strict=True):
            parameter.grad = gradient_before
        self.found.append(
            LayerMeasurement(
                module=key[0],
                kind=key[1],
                lengths=key[2].lengths,
                given=key[2].given,
                forward_s=statistics.median(forward_s),
                backward_s=statistics.median(backward_s) if trained else 0.0,
                activation_bytes=saved,
                strategies=more,
            )
        )


class _WithLoss(torch.nn.Module):
    def __init__(self, layer: Callable[..., Tensor], model: Model, part: Part) -> None:
        super().__init__()
        self.layer, self.loss, self.part = layer, model.loss, part

    def forward(self, *args: Any, **context: Any) -> Tensor:
        with user_code("model.loss"):
            loss = self.loss(self.layer(*args, **context), self.part)
        if not isinstance(loss, Tensor):
            raise InputError(
                "model.loss", f"returned a {type(loss).__name__}", "return a tensor, the sum over all targets"
            )
        if loss.dim() != 0:
            raise InputError(
                "model.loss", f"has shape {tuple(loss.shape)}", "return the sum over all targets, a scalar"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InputError(
                "model.loss", "depends on no trained parameter", "compute it from the output, not detached"
            )
        return loss


class _AsOne(torch.nn.Module):
    """A layer that takes streams after its other arguments. Its single output represents everything that it emits."""

    def __init__(self, layer: torch.nn.Module, taken: tuple[str, ...], emitted: dict[str, Tensor] | None) -> None:
        super().__init__()
        self.layer, self.taken, self.emitted = layer, taken, emitted
        self.emits = False
        """Whether it has returned more than its output."""

    def forward(self, *args: Any, **context: Any) -> Any:
        at = len(args) - len(self.taken)
        result = self.layer(*args[:at], **context, **dict(zip(self.taken, args[at:], strict=True)))
        if not isinstance(result, Emit):
            return result
        self.emits = True
        if self.emitted is not None:
            self.emitted.update((name, tensor.detach()) for name, tensor in result.streams.items())
        more = [*result.streams.values(), *([] if result.loss is None else [result.loss])]
        joined: Tensor = _Join.apply(result.output, *more)  # type: ignore[no-untyped-call]
        return joined


class _Join(torch.autograd.Function):
    """Returns the first of several tensors. In the backward all of them get a gradient, as from their consumers."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *more: Tensor) -> Tensor:
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in more]
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ones = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes]
        return gradient, *ones


def _counting(storages: dict[int, int], bench: Workbench) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        if bench.keeps(tensor):
            return tensor
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    return pack


def _num_bytes(storages: dict[int, int], arguments: list[Any], held_anyway: list[Any]) -> tuple[int, int]:
    """Return the saved bytes without tensors that are held anyway, and how many of them are the layer's arguments."""
    for value in held_anyway:
        if isinstance(value, Tensor):
            storages.pop(value.untyped_storage().data_ptr(), None)
    argument_bytes = 0
    for value in arguments:
        # An argument may be a view of something larger.
        if isinstance(value, Tensor) and storages.pop(value.untyped_storage().data_ptr(), None) is not None:
            argument_bytes += value.nbytes
    return sum(storages.values()) + argument_bytes, argument_bytes


_NUM_SIZES = 4


def _extremes(batch: Batch, model: Model, token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Return microbatches with the largest memory use of layers that run sequence by sequence.

    The use depends on the order of sequences, most for those whose lengths differ most. A short sequence is therefore
    placed before and after a long one.
    """
    tokens = budget_tokens(batch, model.spec)
    shortest, *others = np.argsort(tokens, kind="stable").tolist()
    fitting = [other for other in others if tokens[shortest] + tokens[other] <= token_budget]
    return ((shortest, fitting[-1]), (fitting[-1], shortest)) if fitting else ()


def profile_model(
    model: Model,
    batches: Sequence[Sequence[Any]],
    *,
    describe: Describe | None = None,
    packing: PackingSpec,
    placements: Mapping[str, ModulePlacement],
    metadata: Sequence[Batch] | None = None,
    options: ProfileOptions = ProfileOptions(),
) -> Profile:
    """Time every kind of layer on the microbatches of some batches, and fit its cost.

    Parameters
    ----------
    model : Model
        The model. Layers on ``meta`` get random weights, one at a time.
    batches : sequence of sequence of samples
        A few training batches. The more they differ, the better the fit.
    describe : callable or None
        Returns the metadata of a sample. None uses the model's own, the metadata of `Prefetched` batches, or
        ``metadata``.
    packing : PackingSpec
        The packing of training, by whose token budget batches are packed.
    placements : dict
        Sub-microbatch sizes, so that layers are timed on the parts of training.
    metadata : sequence of Batch or None
        Metadata of the batches, if known already.
    options : ProfileOptions
        Repeats, device, precision, and whether memory strategies and small sizes are measured too.

    Raises
    ------
    InputError
        A layer returns another shape than declared, a batch cannot be packed, or no batch has work for a module
        without example samples.
    """
    layout = single_rank(model.spec, placements)
    if metadata is None:
        metadata = [batch_of(samples, describe or model.describe, i) for i, samples in enumerate(batches)]
    measured: list[LayerMeasurement] = []
    for number, (batch, samples) in enumerate(zip(metadata, batches, strict=True)):
        size = packing
        if options.all_sizes:
            longest = int(budget_tokens(batch, model.spec).max())
            smaller = packing.token_budget >> number % _NUM_SIZES
            size = msgspec.structs.replace(packing, token_budget=max(smaller, longest))
            check_budget(batch, model.spec, packing.token_budget)
        packings = [pack(batch, model.spec, layout, size)]
        if options.strategies:
            packings.append(packing_of(batch, model.spec, layout, _extremes(batch, model, packing.token_budget)))
        for packed in packings:
            measured += measure_layers(model, packed, samples, known=measured, options=options)
    idle: dict[str, Packing] = {}
    for name in idle_modules(model, metadata):
        examples = example_samples(model, name)
        if examples is None:
            raise InputError(
                f"module {name!r}",
                f"had no work in the {len(batches)} measured batches",
                "shuffle the data, start with a batch that has work for it, or give the model `examples`",
            )
        idle[name] = _one_by_one(model, layout, examples[1], packing.token_budget)
        measured += measure_layers(model, idle[name], examples[0], known=measured, options=options)
    profile = fit_profile(measured, options.machine or f"{platform.machine()} {platform.processor()}".strip())
    costs = ProfileCosts(model.spec, profile)
    typical = typical_seconds(model.spec, costs, [pack(batch, model.spec, layout, packing) for batch in metadata])
    for name, packed in idle.items():
        # As if a batch had one such sample. The layers of such a module are similar to each other and have little
        # weight.
        typical_of_module = typical_seconds(model.spec, costs, [packed])
        typical |= {
            key: seconds / len(packed.microbatches)
            for key, seconds in typical_of_module.items()
            if key.startswith(f"{name}/")
        }
    return msgspec.structs.replace(profile, typical_s=typical, copies_overlap=on_accelerator(options.device))


def _one_by_one(model: Model, layout: Layout, batch: Batch, token_budget: int) -> Packing:
    """Return a packing with one sample per microbatch. Samples above the budget are left out, except the first."""
    tokens = budget_tokens(batch, model.spec)
    fitting = [i for i, count in enumerate(tokens) if count <= token_budget] or [0]
    return packing_of(batch, model.spec, layout, tuple((i,) for i in fitting))
