"""Trace a `pipeloom.Model`: its modules on the samples of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.architecture import trace_model
from pipeloom.integrations.tracing.build import dtype_as_default, prepare
from pipeloom.integrations.tracing.fitting import Features
from pipeloom.integrations.tracing.own import Assembly, OwnModel
from pipeloom.integrations.tracing.runs import Tower
from pipeloom.integrations.tracing.samples import SizedBatch, meta_copy, without_numbers
from pipeloom.integrations.transformers.weights import TransformersWeights
from pipeloom.runtime import Emit, Model, Module, Part
from pipeloom.runtime.model.model import user_arguments, user_code
from pipeloom.spec import Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.batch import batch_from_dicts
from pipeloom.spec.model import Reads, num_instances

_COPIES = (2, 3, 1)
"""How often the samples are repeated in each size. Counts are checked on the samples themselves."""


def trace_described(model: Model, samples: Any) -> OwnModel:
    """Trace a model as for `fit` on samples, which are one microbatch.

    A model of the transformers library is read as from its configuration. For any other model, counts hold for
    microbatches with these samples, a module without repeated layers counts with the one that reads it, and the loss is
    not counted.
    """
    if model.describe is None:
        raise InputError("model.describe", "is None", "give the model `describe`, which returns the sizes of a sample")
    if not isinstance(samples, Sequence) or not samples:
        raise InputError("batch", f"is a {type(samples).__name__}", "give a list of samples")
    with user_code("model.describe"):
        rows = [model.describe(sample) for sample in samples]
    known = batch_from_dicts([{"id": str(number)} | row for number, row in enumerate(rows)]).samples
    if isinstance(model.pretrained, TransformersWeights):
        return OwnModel(_trace_library(model, model.pretrained.model), (known,))
    sizes = [SizedBatch(_arguments(model, samples, known, n), n * len(samples), None, copies=n) for n in _COPIES]
    whole = _Undivided(model)
    frozen = {
        f"layers.{module.name}.{name}"
        for module in model.modules
        if module.frozen
        for name, _ in whole.layers[module.name].named_parameters()
    }
    with dtype_as_default(torch.bfloat16):
        made = _DescribedAssembly(meta_copy(whole), sizes, frozen, model, known)
        architecture = Architecture(model.name, "read from its own code", made.modules())
    return OwnModel(architecture, (known,))


def _trace_library(model: Model, library: Any) -> Architecture:
    """Trace the library's own model, whose blocks run once even if `model` runs them sample by sample."""
    source = f"read from its own code, class {type(library).__name__}"
    with dtype_as_default(torch.bfloat16):
        found = trace_model(prepare(meta_copy(library)), model.name, source)
    frozen = {module.name for module in model.modules if module.frozen}
    modules = tuple(msgspec.structs.replace(each, frozen=each.name in frozen) for each in found.modules)
    return msgspec.structs.replace(found, modules=modules)


class _Undivided(nn.Module):
    """All layers of a model, one after the other, on a whole microbatch."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({module.name: nn.ModuleList(module.layers) for module in model.modules})
        self._order = [(m.name, m.after, {k: tuple(names) for k, names in m.takes.items()}) for m in model.modules]

    def forward(self, arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]) -> Tensor:
        outputs: dict[str, Tensor] = {}
        streams: dict[str, Tensor] = {}
        for name, after, takes in self._order:
            inputs, context = arguments[name]
            state: tuple[Any, ...] = (*inputs, *(outputs[source] for source in after))
            layers: Any = self.layers[name]
            for number, layer in enumerate(layers):
                more = {stream: streams[stream] for stream in takes.get(number, ())}
                found = layer(*state, **context, **more)
                if isinstance(found, Emit):
                    streams |= found.streams
                    found = found.output
                state = (found,)
            outputs[name] = state[0]
        return outputs[self._order[-1][0]]


def _arguments(model: Model, samples: Sequence[Any], known: Sequence[Sample], copies: int) -> dict[str, Any]:
    """Return what the layers of each module are called with, on the samples repeated ``copies`` times."""
    every, sizes = tuple(samples) * copies, tuple(known) * copies
    out = {}
    for module in model.modules:
        counts = [num_instances(module.reads, sample) for sample in sizes]
        instances = tuple((place, index) for place, count in enumerate(counts) for index in range(count))
        out[module.name] = without_numbers(user_arguments(module, Part(every, instances)))
    return out


class _DescribedAssembly(Assembly):
    """An assembly whose modules have the names of the model's, and sequences of the lengths that it describes."""

    splits_adapters = False

    def __init__(
        self, model: nn.Module, sizes: Sequence[SizedBatch], frozen: set[str], described: Model, known: Sequence[Sample]
    ) -> None:
        self.described, self.known = described, known
        super().__init__(model, sizes, frozen)

    def _source(self, tower: Tower) -> Module:
        return self.described.module(tower.path.split(".")[1])

    def _features(self, tower: Tower) -> list[Features]:
        spec = self._source(tower).spec
        lengths = tuple(n for sample in self.known for n in spec.instance_lengths(sample))
        return [Features(lengths * size.copies) for size in self.sizes]

    def _names(self) -> list[str]:
        return [self._source(tower).name for tower in self.towers]

    def _reads(self) -> list[Reads]:
        return [self._source(tower).reads for tower in self.towers]
