"""Trace a user's own model on his own batch, without memory for its weights."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_is_leaf, tree_leaves

from pipeloom.emulator import module_parameters
from pipeloom.errors import InputError
from pipeloom.integrations.tracing.architecture import Part, head_of, split_embedding, trace_model
from pipeloom.integrations.tracing.build import dtype_as_default, prepare
from pipeloom.integrations.tracing.checks import check_parameters
from pipeloom.integrations.tracing.fitting import Features, TraceError, error_line
from pipeloom.integrations.tracing.fusion import Draft, Segment, draft
from pipeloom.integrations.tracing.library_batches import library_samples
from pipeloom.integrations.tracing.recorder import UnknownNumbersError
from pipeloom.integrations.tracing.runs import Call, NoGradientError, Tower, Tracer
from pipeloom.integrations.tracing.samples import SizedBatch, call_of, forms, meta_copy, sized
from pipeloom.integrations.tracing.several import find_towers, run_towers
from pipeloom.spec.architecture import Architecture, Layer, ModuleArchitecture, TracedLayer
from pipeloom.spec.batch import AUDIO_FRAMES_PER_SECOND, Sample
from pipeloom.spec.model import Reads
from pipeloom.spec.traced import KernelOperator, ProductOperator, TracedInput

_PROTOCOL = "return a torch.nn.Module, or a pair of it and a sample batch"
_LONG = 1024
"""Tokens of a sequence for a model that comes without a batch."""


_INSTANCES: tuple[Reads, ...] = ("images", "audio")
"""What encoders read, by their numbers of sequences in the order in which these occur."""

_PLAIN = ("model", "module", "layers", "layer", "blocks", "block")
"""Parts of a path that say nothing about a module."""


@dataclass(frozen=True)
class OwnModel:
    """A user's model, and the sizes of his batches.

    Attributes
    ----------
    batches : tuple of tuple of Sample
        Samples of each batch, in the user's order. Empty: the model came without a batch.
    """

    architecture: Architecture
    batches: tuple[tuple[Sample, ...], ...] = ()


def build_own(module: str, function: str) -> OwnModel:
    """Call a function of a module on the meta device, and trace the model that it returns on the batch beside it."""
    entity = f"{module}:{function}"
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(entity, f"cannot be imported: {error}", "name a module and a function of it") from error
    except (Exception, SystemExit) as error:
        raise InputError(entity, f"fails while it is imported: {error_line(error)}", "correct the module") from error
    if isinstance(make, nn.Module) or not callable(make):
        raise InputError(entity, f"is of type {type(make).__name__}, not a function", f"name a function; {_PROTOCOL}")
    try:
        with torch.device("meta"):
            made = make()
    except TypeError as error:
        if "argument" not in str(error) or error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise InputError(entity, f"fails on the meta device: {error_line(error)}", _ON_META) from error
        raise InputError(entity, f"needs arguments: {error}", "name a function without arguments") from error
    except (Exception, SystemExit) as error:
        raise InputError(entity, f"fails on the meta device: {error_line(error)}", _ON_META) from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(entity, f"returns an object of type {type(model).__name__}", _PROTOCOL)
    return trace_own(model, batch, function)


_ON_META = "build it without reading numbers of tensors; load weights and data elsewhere"


def trace_own(model: nn.Module, batch: Any = None, name: str = "") -> OwnModel:
    """Trace a model on a batch, or on a list of batches of different sizes. The model is not changed.

    A batch is what the model is called with: a tensor, tuple or dict. None: the model takes token ids, as ``input_ids``
    or as its first argument.
    """
    name = name or type(model).__name__
    source = f"read from its own code, class {type(model).__name__}"
    copied = meta_copy(model)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    if batch is None and getattr(model, "config", None) is not None:
        return OwnModel(trace_model(prepare(copied), name, source, frozen=frozen))
    given = list(batch) if isinstance(batch, list) else [batch if batch is not None else torch.full((1, _LONG), 5)]
    # PyTorch does not look into what a tokenizer returns.
    given = [dict(each) if isinstance(each, Mapping) and tree_is_leaf(each) else each for each in given]
    if not given:
        raise InputError("batch", "is an empty list", "give a batch, or several of different sizes")
    libraries = _libraries(copied)
    for library in libraries:
        prepare(library)
        for config in {id(c): c for m in library.modules() if (c := getattr(m, "config", None)) is not None}.values():
            if getattr(config, "use_cache", False):
                config.use_cache = False  # training keeps no keys for later tokens
    if copied in libraries and (found := _library(copied, name, source, frozen, given)) is not None:
        return found
    problems: list[tuple[bool, InputError]] = []
    varied = False
    orders = (
        [replace(sized(each, first=first), number=number) for number, each in enumerate(given)]
        for first in (True, False)
    )
    for sizes in itertools.chain.from_iterable(map(forms, orders)):
        one_length = len({size.length for size in sizes}) == 1
        if one_length and varied:
            continue  # it runs at other lengths, but its counts do not grow as they should
        made = None
        with dtype_as_default(torch.bfloat16):
            try:
                made = Assembly(copied, sizes, frozen)
                varied |= not one_length
                architecture = Architecture(name, source, made.modules())
                check_parameters(architecture, copied, 0.0)
            except InputError as error:
                problems.append((made is None, error))
                continue
        own = [] if batch is None else sorted(sizes[-len(given) :], key=lambda size: size.number)
        return OwnModel(architecture, tuple(map(made.samples, own)))
    # What does not run at other sizes says less than what runs and cannot be described.
    raise min(problems, key=lambda each: each[0])[1]


def _libraries(model: nn.Module) -> list[nn.Module]:
    """Return the outermost models of the transformers library in a model, or the model itself."""
    found: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        is_library = getattr(module, "config", None) is not None and hasattr(module, "get_input_embeddings")
        if is_library and module not in inner:
            found.append(module)
            inner |= set(module.modules())
    return found


def _library(model: Any, name: str, source: str, frozen: set[str], batches: Sequence[Any]) -> OwnModel | None:
    """Return a library's model, read as from its configuration, with the sizes of the user's batches.

    None if it is not one of text and images, or the batches have other contents. It is then read as any other module.
    """
    try:
        with dtype_as_default(torch.bfloat16):
            architecture = trace_model(model, name, source, frozen=frozen)
        check_parameters(architecture, model, 0.0)
    except InputError:
        return None
    samples = [library_samples(model, architecture, batch, number) for number, batch in enumerate(batches)]
    known = tuple(each for each in samples if each is not None)
    return OwnModel(architecture, known) if len(known) == len(samples) else None


def _explained(error: Exception) -> InputError:
    """Return an error of a model's code on tensors without numbers as one line with its cause."""
    is_unknown = isinstance(error, UnknownNumbersError)
    text = str(error) if is_unknown else error_line(error)
    if is_unknown or any(each in text for each in ("meta tensor", "Meta", "data-dependent")):
        remedy = "write it without reading numbers of tensors, such as `.item()` or `if x.sum() > 0`"
        return TraceError("model", f"runs code that depends on numbers of tensors: {text}", remedy)
    remedy = "call the model on this batch to see whether it runs in bfloat16"
    return TraceError("model", f"fails on the batch: {text}", remedy)


# ------------------------------------------------------------------ modules


class Assembly:
    """Runs a model on several sizes, and makes a module of each tower."""

    splits_adapters = True
    """Whether the trained adapter of a frozen encoder becomes a separate module."""

    def __init__(self, model: nn.Module, sizes: Sequence[SizedBatch], frozen: set[str]) -> None:
        self.model, self.sizes, self.frozen = model, sizes, frozen
        calls = [call_of(model, size.batch) for size in sizes]
        tracer = Tracer(model)
        known = [t for size in sizes for t in tree_leaves(size.batch) if isinstance(t, torch.Tensor) and not t.is_meta]
        tracer.recorder.follow(known)
        tracer.recorder.selections.strict = True
        try:
            self.towers = find_towers(tracer, calls[-1])
            try:
                self.heads = self._run(tracer, calls)
            except NoGradientError:  # such as a frozen encoder, whose operators are counted like those of others
                self.heads = self._run(tracer, calls, differentiates=True)
        except InputError:
            raise
        except Exception as error:
            raise _explained(error) from error
        for tower in self.towers:
            tower.features = self._features(tower)
        self.reads = self._reads()
        self.names = self._names()
        self.ends = list(self.names)
        """Module that returns each tower's result: its own, or that of its adapter."""

    def _run(self, tracer: Tracer, calls: Sequence[Call], *, differentiates: bool = False) -> list[Segment]:
        """Run the towers at all sizes, with the backward at the first and at the last, on which counts are checked.

        Return what follows the last tower at each size.
        """
        for tower in self.towers:
            tower.runs.clear()
        return [
            run_towers(tracer, self.towers, call, backward=number in (0, len(calls) - 1), differentiates=differentiates)
            for number, call in enumerate(calls)
        ]

    def _features(self, tower: Tower) -> list[Features]:
        """Return the lengths of a tower's sequences at each size.

        If its attention takes the boundaries of sequences in one packed row, such as images, they are the instances.
        Otherwise the dimension that grows with the number of samples counts them, and rows of all samples in one
        dimension are divided evenly.
        """
        packed = [run.packed for run in tower.runs]
        if all(packed):
            return [Features(lengths) for lengths in packed]
        shapes = [run.running.shape[:-1] for run in tower.runs]
        counts = [size.count for size in self.sizes]
        for axis in range(len(shapes[0])):
            if len({shape[axis] / count for shape, count in zip(shapes, counts, strict=True)}) == 1:
                if len(shapes[0]) == 1:
                    break
                return [Features((math.prod(shape) // shape[axis],) * shape[axis]) for shape in shapes]
        where = f"tower {tower.path!r}"
        rows = [math.prod(shape) for shape in shapes]
        if any(row % count for row, count in zip(rows, counts, strict=True)):
            raise TraceError(where, f"has {rows[-1]} rows for {counts[-1]} samples", "give samples of one size")
        return [Features((row // count,) * count) for row, count in zip(rows, counts, strict=True)]

    def modules(self) -> tuple[ModuleArchitecture, ...]:
        """Return a module for each tower, in the order in which the model runs them."""
        used: set[str] = set()
        made = [each for number in range(len(self.towers)) for each in self._module(number, used)]
        read = {name for module in made for name in module.after}
        alone = tuple(m.name for m in made[:-1] if m.name not in read)
        last = msgspec.structs.replace(made[-1], after=(*made[-1].after, *alone))
        counted = module_parameters(Architecture("", "", (*made[:-1], last)))
        # Such as a part that does not run, or the bias of a language model's head.
        rest = sum(p.numel() for p in self.model.parameters()) - sum(counted.values())
        unused = Part(self.model, self.towers[-1], used).unused(max(0, rest))
        return (*made[:-1], msgspec.structs.replace(last, unused=unused))

    def _module(self, number: int, used: set[str]) -> tuple[ModuleArchitecture, ...]:
        """Return a tower's module, and behind it that of its adapter if nothing else of it is trained."""
        tower, is_last = self.towers[number], number == len(self.towers) - 1
        part, first = Part(self.model, tower, set(used)), tower.runs[0]
        layers: list[Layer] = []
        words: set[str] = set()
        mine = set(part.held)
        if first.before.records:
            before, words = self._before(part, number)
            layers += before
            mine |= words
        layers += self._with_between(part, part.blocks({})[0], mine)
        inner = set(mine)
        frozen_names = self.frozen | (inner if first.running.disabled else set())
        if first.after.records:
            adapter = part.lower(f"what follows {tower.path!r}", [run.after for run in tower.runs])
            layers.append(part.around(f"{self.names[number]} adapter", adapter, adapter.used))
            mine |= adapter.used
            # Operators without parameters, such as casts, train nothing wherever they run.
            trains = [r for r in first.after.records if any(use.value.parameters for use in r.reads)]
            frozen_names |= mine if all(r.disabled for r in trains or first.after.records) else set()
        if is_last:
            head, names = self._head(part, words)
            layers += head
            mine |= names
        used |= mine
        frozen = bool(mine) and mine <= frozen_names
        after = tuple(self.ends[source] for source in sorted(first.sources))
        rows = part.fixed_rows
        module = ModuleArchitecture(
            self.names[number],
            self.reads[number],
            tuple(layers),
            after,
            frozen,
            fixed_rows=rows,
            fixed_outputs=None if rows is None or is_last else self._tokens(number, 0, rows),
        )
        has_adapter = bool(first.after.records) and not is_last
        if not (self.splits_adapters and has_adapter and inner and inner <= frozen_names and not frozen):
            return (module,)
        name = f"{module.name}_adapter"
        while name in (*self.names, *self.ends):
            name += "_2"
        self.ends[number] = name
        behind = msgspec.structs.replace(module, name=name, layers=(layers.pop(),), after=(module.name,))
        return msgspec.structs.replace(module, layers=tuple(layers), frozen=True), behind

    def _before(self, part: Part, number: int) -> tuple[list[Layer], set[str]]:
        """Return what makes the state of the first block, and the parameters that it has."""
        where, joins = f"what precedes {part.tower.path!r}", bool(part.tower.runs[0].sources)
        segments = [run.before for run in part.tower.runs]
        if self.reads[number] == "sequence" and (tables := _words(part, segments)):
            embedding, behind, names = split_embedding(part, where, segments, tables, bounded=joins)
            return [embedding, *([behind] if behind.operators else [])], names
        names = {name for each in draft(segments[0]) for name in each.parameters if name in part.own}
        lowered = part.lower(where, segments, bounded=joins)
        if not lowered.inputs:  # it reads ids alone
            ids = TracedInput((0.0, 0.0, 1.0, 0.0), 1, 8, gradient=False)
            lowered = replace(lowered, inputs=(ids,), **_shifted(lowered.operators, lowered.result))
        return [part.around(f"{type(self.model).__name__} embedding", lowered, names)], names

    def _with_between(self, part: Part, blocks: Sequence[TracedLayer], mine: set[str]) -> list[TracedLayer]:
        """Return the blocks with what changes the state between them, and add its parameters to ``mine``."""
        between = [run.between for run in part.tower.runs]
        places = sorted(between[0])
        if any(sorted(each) != places for each in between):
            raise TraceError(f"tower {part.tower.path!r}", "computes between blocks at some sizes only")
        if not places:
            return list(blocks)
        flat = [msgspec.structs.replace(block, count=1) for block in blocks for _ in range(block.count)]
        out: list[TracedLayer] = []
        for place, layer in enumerate(flat):
            out.append(layer)
            if place in places:
                where = f"what follows block {place} of {part.tower.path!r}"
                made = part.lower(where, [each[place] for each in between])
                if made.operators:
                    out.append(part.around(f"after block {place}", made, made.used))
                mine |= made.used
        return out

    def _head(self, part: Part, words: set[str]) -> tuple[list[Layer], set[str]]:
        """Return what follows the last tower, and the parameters that it has."""
        if not self.heads[0].records:
            return [], set()
        part.own = {name: size for name, size in part.own.items() if name not in words}
        last = part.lower(f"what follows {part.tower.path!r}", self.heads)
        tables = (each.fixed for each in draft(part.tower.runs[0].before) if each.kind == "embedding")
        words_held = next(tables, {}).get("vocabulary", -1)
        products = [e for e in last.operators if isinstance(e, ProductOperator) and e.out_width == words_held]
        norms = [e for e in last.operators if isinstance(e, KernelOperator) and e.kind == "norm"]
        if norms and len(products) == 1 and products[0].rows == (0.0, 0.0, 1.0, 0.0):
            head, others = head_of(last, part.width, tied=not products[0].owned)
            # The head's norm has weights, and biases if it is a layer norm.
            counts_norm = norms[-1].parameters == part.width * (2 if head.norm == "layer" else 1)
            if head.hidden == part.width and counts_norm and not others:
                return [head], last.used
        return [part.around("head", last, last.used)], last.used

    def _names(self) -> list[str]:
        """Return a name for each module: ``lm`` for the last, ``vision`` for encoders, and parts of others' paths."""
        found: list[str] = []
        for number, tower in enumerate(self.towers[:-1]):
            parts = [p for p in re.split(r"[.:]", tower.path) if p not in _PLAIN and not p.isdigit()]
            is_vision = self.reads[number] == "images" and not self._looks_up(number)
            name = base = "vision" if is_vision else (parts or ["encoder"])[-1]
            while name in (*found, "lm"):
                name = f"{base}_{len(found) + 1}"
            found.append(name)
        return [*found, "lm"]

    def _reads(self) -> list[Reads]:
        """Return what each tower reads.

        The last tower reads sequences, and so do those that look up words of as many sequences. Of the others, those
        with as many sequences as the first read images, and those with a second number read recordings. A third number
        is an `InputError`.
        """
        counts = [tuple(len(each.lengths) for each in tower.features) for tower in self.towers]
        last, kinds, found = len(counts) - 1, dict[tuple[int, ...], Reads](), list[Reads]()
        for number, count in enumerate(counts):
            if number == last or (count == counts[last] and self._looks_up(number)):
                found.append("sequence")
                continue
            if count not in kinds and len(kinds) == len(_INSTANCES):
                numbers = ", ".join(str(each[-1] // self.sizes[-1].copies) for each in (*kinds, count))
                raise InputError("batch", f"has encoders with {numbers} sequences", "give them two numbers at most")
            found.append(kinds.setdefault(count, _INSTANCES[min(len(kinds), len(_INSTANCES) - 1)]))
        return found

    def _looks_up(self, number: int) -> bool:
        """Return whether a tower reads words. An encoder of the batch's numbers, such as pixels, may look up places."""
        run = self.towers[number].runs[0]
        return not run.reads_numbers and any(each.kind == "embedding" for each in draft(run.before))

    # -------------------------------------------------------------- samples

    def samples(self, size: SizedBatch) -> tuple[Sample, ...]:
        """Return the sizes of a batch's samples in every module."""
        place = next(i for i, each in enumerate(self.sizes) if each is size)
        every = [tower.features[place].lengths for tower in self.towers]
        lengths = [each[: len(each) // size.copies] for each in every]
        out, count = [], len(lengths[-1])
        for number in range(count):
            # Each sample has as many instances.
            own = [each[number * len(each) // count : (number + 1) * len(each) // count] for each in lengths]
            kept: dict[str, tuple[int, ...]] = {}
            rows: dict[Reads, tuple[int, ...]] = {}
            tokens: dict[Reads, tuple[int, ...]] = {}
            for at, (name, kind, each) in enumerate(zip(self.names, self.reads, own, strict=True)):
                if kind == "sequence" or kind in rows:  # the first module of a kind gives the sizes of instances
                    kept |= {name: each, self.ends[at]: each}
                if kind != "sequence":
                    rows.setdefault(kind, each)
                    made = tuple(self._tokens(at, place, n) for n in each)
                    tokens[kind] = tuple(map(sum, zip(made, tokens.get(kind, (0,) * len(made)), strict=True)))
            sample = Sample(
                f"{size.number}.{number}",
                max(0, lengths[-1][number] - sum(map(sum, tokens.values()))),
                tokens.get("images", ()),
                rows.get("images") or None,
                audio_seconds=tuple(n / AUDIO_FRAMES_PER_SECOND for n in rows.get("audio", ())),
                audio_tokens=tokens.get("audio") or None,
                lengths=kept,
            )
            out.append(sample)
        return tuple(out)

    def _tokens(self, number: int, place: int, rows: int) -> int:
        """Return the rows that an encoder makes of an instance of ``rows`` rows, at least one."""
        tower = self.towers[number]
        run = tower.runs[place]
        results = run.after.leaves or [run.running.marks[-1][2]]
        made = results[0].numel // results[0].width
        return max(1, rows * made // sum(tower.features[place].lengths))


def _words(part: Part, segments: Sequence[Segment]) -> Sequence[Draft]:
    """Return the look-ups, at every size, in the largest table of a tower that has a row for each of its tokens."""
    found = zip(*([each for each in draft(s) if each.kind == "embedding"] for s in segments), strict=False)
    tokens = [sum(features.lengths) for features in part.features]
    every = [
        each
        for each in found
        if [one.counts["rows"] for one in each] == tokens and part.own.keys() >= set(each[0].parameters)
    ]
    return max(every, key=lambda each: int(each[0].fixed["vocabulary"]), default=())


def _shifted(operators: Sequence[Any], result: int | None) -> dict[str, Any]:
    """Return operators with the numbers of tensors behind one more input."""
    out = []
    for each in operators:
        fields = ("reads", "saves", "eager_saves")
        changed = {
            name: value + 1 if isinstance(value, int) else tuple(n + 1 for n in value)
            for name in fields
            if (value := getattr(each, name, None)) is not None
        }
        out.append(msgspec.structs.replace(each, **changed))
    return {"operators": tuple(out), "result": None if result is None else result + 1}
