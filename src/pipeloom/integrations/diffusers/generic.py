"""Support for transformers without an entry in `FAMILIES`.

Their parts are found on a small model of the same configuration, and its layers are tested against the library.
"""

from __future__ import annotations

import copy
import inspect
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pipeloom.errors import InputError
from pipeloom.integrations.diffusers.flow import FlowMatching, NoiseSampler, NoisySample, loss_of, noising
from pipeloom.integrations.diffusers.inputs import (
    REVERSED,
    THOUSANDTHS,
    UNBATCHED,
    WORDS,
    Form,
    GenericReader,
    Item,
    arguments,
    latents_in,
    predicted,
)
from pipeloom.integrations.diffusers.library import mean_gradients
from pipeloom.integrations.diffusers.prompts import Prompts, take
from pipeloom.integrations.diffusers.replay import (
    PROMPT,
    Division,
    Key,
    Part,
    Parts,
    Recording,
    Replay,
    divide,
    from_rows,
    real_shape,
    record,
    replay,
    to_rows,
)
from pipeloom.integrations.diffusers.samples import one
from pipeloom.integrations.diffusers.smaller import (
    SIZES,
    channels_of,
    corrected,
    guesses,
    invent,
    line,
    make,
    shapes_only,
    smaller,
    width_of,
)
from pipeloom.integrations.transformers.generic import try_strategies
from pipeloom.integrations.transformers.hollow import hollow
from pipeloom.integrations.transformers.packed import Calls, as_context
from pipeloom.integrations.transformers.reference import Gradients, double, doubled
from pipeloom.integrations.transformers.trace import Trace
from pipeloom.runtime.model.model import Emit, Model, Module
from pipeloom.runtime.model.model import Part as BatchPart
from pipeloom.spec import Strategy, TensorShape

_REMEDY = "pass examples=[...] with two or more samples of different sizes, or write its layers yourself"


# ------------------------------------------------------------------ parts


class _Watch:
    """The calls of a forward pass: modules in order, the calling modules of each, and shapes of inputs and outputs."""

    def __init__(self, model: nn.Module, run: Callable[[nn.Module], Any]) -> None:
        trace = Trace(model, partial(run, model))
        self.called: list[tuple[str, tuple[str, ...]]] = []
        stack: list[str] = []
        for path, enters in trace.moments:
            if enters:
                self.called.append((path, tuple(stack)))
                stack.append(path)
            else:
                stack.pop()
        self.inputs = {path: list(map(real_shape, tree_flatten(each)[0])) for path, each in trace.taken.items()}
        flat = {path: tree_flatten(each) for path, each in trace.given.items()}
        self.outputs = {path: (list(map(real_shape, each)), spec) for path, (each, spec) in flat.items()}

    def sources(self, path: str) -> list[set[int]] | None:
        """Return, for each output of a module, the inputs of the same shape. None if an output has no such input."""
        found = [
            {number for number, given in enumerate(self.inputs[path]) if given == shape} if shape else {-1}
            for shape in self.outputs[path][0]
        ]
        return found if all(found) else None


def find_parts(model: nn.Module, runs: Sequence[Callable[[nn.Module], Any]]) -> Parts:
    """Find the blocks, which return tensors of the shapes of their inputs, and the other parts with parameters.

    Raise `InputError` if no list of blocks is called.
    """
    watches = [_Watch(model, run) for run in runs]
    first = watches[0]
    times = Counter(path for path, _ in first.called)
    callers = dict(first.called)
    lists: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            children = [f"{path}.{name}" for name, child in module.named_children() if _size(child)]
            called = [child for child in children if child in times]
            if called and all(times[each] == 1 and first.sources(each) is not None for each in called):
                lists[path] = called
    lists = {path: each for path, each in lists.items() if not _inside(path, lists)}
    if not lists:
        raise InputError("model", "calls no list of blocks whose outputs have the shapes of their inputs")
    depth = min(len(callers[each[0]]) for each in lists.values())
    lists = {path: each for path, each in lists.items() if len(callers[each[0]]) == depth}
    sizes = {path: _size(model.get_submodule(each[0])) for path, each in lists.items()}
    lists = {path: each for path, each in lists.items() if 10 * sizes[path] >= max(sizes.values())}
    members = {block for each in lists.values() for block in each}
    blocks = tuple(path for path, _ in first.called if path in members)
    holders = {caller for block in blocks for caller in callers[block]}
    others = dict.fromkeys(
        path
        for path, above in first.called
        if path not in holders | members and set(above) <= holders and _size(model.get_submodule(path))
    )
    return Parts(blocks, tuple(others), {block: _rule(watches, block) for block in blocks})


def _inside(path: str, lists: Mapping[str, Any]) -> bool:
    return any(path.startswith(f"{other}.") for other in lists)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _rule(watches: Sequence[_Watch], block: str) -> tuple[Any, tuple[int | None, ...]]:
    found: list[set[int]] | None = None
    for watch in watches:
        sources = watch.sources(block) if block in watch.outputs else None
        if sources is None or (found is not None and len(sources) != len(found)):
            raise InputError("model", f"has a block {block!r} whose outputs differ from its inputs in shape")
        found = sources if found is None else [a & b for a, b in zip(found, sources, strict=True)]
    assert found is not None
    if not all(found):
        raise InputError("model", f"has a block {block!r} whose outputs differ from its inputs in shape")
    return watches[0].outputs[block][1], tuple(None if -1 in each else min(each) for each in found)


def _deeper(parts: Parts, few: nn.Module, model: nn.Module) -> Parts:
    """Return the parts of a model with more blocks. Blocks between the first and the last one have the same form."""
    paths, rules = [], {}
    for path in dict.fromkeys(block.rpartition(".")[0] for block in parts.blocks):
        have, count = len(few.get_submodule(path)), len(model.get_submodule(path))  # type: ignore[arg-type]
        for place in range(count):
            at = have - 1 if place == count - 1 else min(place, max(0, have - 2) if count > have else place)
            if f"{path}.{at}" in parts.rules:
                paths.append(f"{path}.{place}")
                rules[paths[-1]] = parts.rules[f"{path}.{at}"]
    blocks = parts.blocks if len(paths) == len(parts.blocks) else tuple(paths)
    return Parts(blocks, parts.others, rules)


# ------------------------------------------------------------------ layers


Values = dict[Key, Tensor]


class ReplayLayer(nn.Module):
    """A layer: the library's forward pass, in which only the parts of this layer run."""

    def __init__(self, shell: nn.Module, number: int, block: nn.Module | None, reader: GenericReader) -> None:
        super().__init__()
        self.shell, self.number, self.block, self.reader = shell, number, block, reader

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayLayer:
        """Copy the modules. Copies share the reader."""
        shell, block = copy.deepcopy((self.shell, self.block), memo)
        return ReplayLayer(shell, self.number, block, self.reader).train(self.training)

    def forward(self, *inputs: Tensor, calls: Calls, **tensors: Tensor) -> Tensor | Emit:
        """Run the layer for each sample of a part."""
        division, layer = self.reader.division, self.number
        streams = {key: tensors.pop(division.streams[key]) for key in division.takes[layer]}
        outer = calls.forward(tensors)
        samples = outer["samples"]
        given = self._later(inputs[0], samples, streams) if layer else self._first(inputs, samples)
        is_last = layer == len(division.rows) - 1
        made = [key for key in division.streams if division.makes[key] == layer]
        emitted: dict[str, list[Tensor]] = {division.streams[key]: [] for key in made}
        results = []
        for (call, taken), (time, latents, values) in zip(samples, given, strict=True):
            if self.reader.prompts is not None:
                zeros = latents.new_zeros(()).expand(self.reader.prompt_shape(call.item))
                taken[WORDS] = values.get(PROMPT, zeros).to(latents.dtype)
            # Only the last layer has a target. The others stop before the end of the forward pass.
            noised = outer["noising"].of(call.item.latents, call.item.name, outer["iteration"]) if is_last else None
            target = latents if noised is None else noised.target
            running = Replay(call.calls, layer, self.block, values, latents)
            found = replay(
                self.shell, running, partial(predicted, latents=latents, time=time, given=taken, target=target)
            )
            if noised is not None:
                results.append(loss_of(found, noised).reshape(1, 1).to(latents.dtype))
                continue
            kept = [values[key] for key in division.rows[layer]]
            results.append(to_rows(kept, self.reader.width, call.count, latents))
            for key in made:
                emitted[division.streams[key]].append(values[key].reshape(-1).to(latents.dtype))
        state = torch.cat(results)
        return Emit(state, {name: torch.stack(each) for name, each in emitted.items()}) if made else state

    def _first(self, inputs: Sequence[Tensor], samples: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor, Values]]:
        """Yield time, noisy latents and the prompt of each sample."""
        times, *batches = inputs
        begin = 0
        for place, (call, _) in enumerate(samples):
            values: Values = {}
            if self.reader.prompts is not None:
                values[PROMPT], begin = take(batches[-1], begin, call.item.rows)
            yield times[place : place + 1], batches[place], values

    def _later(
        self, x: Tensor, samples: Sequence[Any], streams: Mapping[Any, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Values]]:
        """Yield the tensors of earlier layers for each sample. Its time and latents are zeros."""
        keys, begin = self.reader.division.rows[self.number - 1], 0
        for place, (call, _) in enumerate(samples):
            shapes = self.reader.shapes(call.item, call.calls, self.number - 1)
            state = from_rows(x[begin : begin + call.count], shapes, self.reader.width)
            begin += call.count
            values: Values = dict(zip(keys, state, strict=True))
            for key, stream in streams.items():
                values[key] = stream[place].reshape(call.calls[key[:2]].shapes[key[2]])
            yield x.new_zeros(1), x.new_zeros(()).expand(1, *call.shape), values


def _context(reader: GenericReader, noising: NoiseSampler, dtype: torch.dtype, part: BatchPart) -> dict[str, Any]:
    """Return the arguments of the library's forward pass for each sample of a part."""
    samples = [reader.call(item, dtype) for item in reader.items(part)]
    return as_context((), {"samples": samples, "iteration": part.iteration, "noising": noising})


def total(output: Tensor, part: BatchPart) -> Tensor:
    """Return the loss: the last layer computes that of each sample."""
    del part
    return output.sum()


def build_module(
    model: nn.Module, reader: GenericReader, noise: NoiseSampler, frozen: bool = False, after: tuple[str, ...] = ()
) -> Module:
    """Return the module ``transformer``."""
    division = reader.division
    parts, count = division.parts, len(division.rows)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    skeleton: dict[str, nn.Module] = {
        path: Part(path, None, model.get_submodule(path)) for path in (*parts.others, *parts.blocks)
    }
    layers: list[nn.Module] = []
    held: set[str] = set()
    for number, owned in enumerate(division.own):
        real = {
            path: Part(path, model.get_submodule(path), model.get_submodule(path))
            for path in owned
            if path in parts.others
        }
        own = [name for name in owned if name not in parts.others]
        if not number:
            # Parameters that nothing uses are kept, because files have them.
            own += _unused(model, division)
        held |= set(owned)
        block = model.get_submodule(parts.blocks[number - 1]) if 0 < number < count - 1 else None
        shell = hollow(model, own, {**skeleton, **real})
        layers.append(ReplayLayer(shell, number, block, reader))
    name = str(dtype)[6:]
    emits: dict[int, dict[str, Any]] = {}
    for key, stream in division.streams.items():
        size = reader.sizes[key]
        emits.setdefault(division.makes[key], {})[stream] = TensorShape(("instances", size), name)
    kinds = [f"{type(each).__name__}[{_size(each)}]" for each in map(model.get_submodule, parts.blocks)]
    return Module(
        "transformer",
        layers,
        reads="sequence",
        hidden=TensorShape(("tokens", reader.width), name),
        output=TensorShape(("instances", 1), name),
        inputs=partial(latents_in, reader, noise, dtype),
        context=partial(_context, reader, noise, dtype),
        after=after,
        frozen=frozen,
        kinds=("first", *kinds, "last"),
        emits=emits,
        takes={
            layer: tuple(division.streams[key] for key in keys) for layer, keys in enumerate(division.takes) if keys
        },
    )


def _unused(model: nn.Module, division: Division, *, tied: bool = False) -> list[str]:
    """Return the parameters that nothing uses. If ``tied``, all names of those with several count."""
    inside = (*division.parts.others, *division.parts.blocks)
    used = {name for owned in division.own for name in owned}
    return [
        name
        for name, _ in model.named_parameters(remove_duplicate=not tied)
        if name not in used and not any(name.startswith(f"{path}.") for path in inside)
    ]


# ------------------------------------------------------------------ acceptance


@dataclass(frozen=True, eq=False)
class AcceptedTransformer:
    """A transformer whose layers were tested: a reader of samples with their embeddings, and a narrow model of it."""

    base: GenericReader
    outline: nn.Module
    excluded: Mapping[Strategy, str]

    def reader(self, prompts: Prompts | None = None) -> GenericReader:
        """Return a reader of samples."""
        made = replace(self.base, prompts=prompts, cache={})
        return replace(made, record=partial(_recorded, self.outline, made))


def _undivided(names: Mapping[str, bool], form: Form) -> GenericReader:
    """Return a reader for the undivided model."""
    return GenericReader(names, form, None, None, 0, {})  # type: ignore[arg-type]


_ACCEPTED: dict[Any, AcceptedTransformer] = {}


def accept(
    model: Any, examples: Sequence[Mapping[str, Any]] | None = None, has_prompts: bool = False
) -> AcceptedTransformer:
    """Find the parts of a transformer, and test its layers on a small model of the same configuration.

    By default, ``examples``, which are samples of different sizes, are made up from the configuration. ``has_prompts``
    says whether another module computes the prompt's embedding. Raise `InputError` if a part is not found, no inputs
    could be made up, or gradients differ from the library's.
    """
    kind, config = type(model), dict(model.config)
    key = (kind, json.dumps(config, sort_keys=True, default=str), has_prompts)
    if examples is not None or key not in _ACCEPTED:
        try:
            with double(), torch.random.fork_rng(devices=[]):
                _ACCEPTED[key] = _accept(kind, config, examples, has_prompts)
        except Exception as error:
            problem = error.problem if isinstance(error, InputError) else f"cannot be tested: {_first(error)}"
            remedy = error.remedy if isinstance(error, InputError) and error.remedy else _REMEDY
            raise InputError("model", f"is a {kind.__name__}, not known by name, and {problem}", remedy) from error
    return _ACCEPTED[key]


def _first(error: Exception) -> str:
    return line(f"{type(error).__name__}: {error}")


def _time_scale(kind: type, config: Mapping[str, Any]) -> float:
    """Return the factor by which the pipelines of a class multiply the time, which is in thousandths."""
    if kind.__name__.startswith(REVERSED):
        problem = "its pipeline reverses the time or negates what the transformer predicts"
        raise InputError("model", problem, "train it by a script of its own")
    if kind.__name__.startswith("Sana"):
        return float(config.get("timestep_scale") or 1.0)
    return 1e-3 if kind.__name__.startswith(THOUSANDTHS) else 1.0


def _accept(
    kind: type, config: dict[str, Any], examples: Sequence[Mapping[str, Any]] | None, has_prompts: bool
) -> AcceptedTransformer:
    names = arguments(kind)
    narrow_config, few_config = smaller(kind, config)
    few = make(kind, few_config).double().eval()
    _randomize(few)
    form = Form(UNBATCHED, channels_of(config), _time_scale(kind, config))
    samples, form = find_samples(few, config, names, form, examples)
    noise = noising(FlowMatching(), None)
    bare = _undivided(names, form)
    items = [bare.read(sample) for sample in samples]
    runs = [
        lambda model, prompt=None, item=item: _run(model, bare, item, _noised(noise, item), prompt) for item in items
    ]
    with torch.no_grad():
        parts = find_parts(few, runs)
    inner = width_of(few_config) or 1
    prompts = [bare.batched(item, torch.float64).get(WORDS) if has_prompts else None for item in items]
    if has_prompts and None in prompts:
        raise InputError("model", "takes no prompt", "leave text_encoder out")
    tested = AcceptedTransformer(*_divided(bare, few, few, parts, [(run, None) for run in runs], (inner, inner)), {})
    loss, found = library_gradients(copy.deepcopy(few), bare, noise, samples)
    wanted = loss, {name.removeprefix("transformer."): each for name, each in found.items()}

    def assembled() -> Model:
        reader = tested.reader()
        return Model([build_module(few, reader, noise)], total, one, describe=reader.describe)

    excluded = try_strategies(few, samples, wanted, assembled)
    if "keep" in excluded:
        raise InputError("model", excluded["keep"])
    with shapes_only():
        narrow = make(kind, narrow_config)
    ratio = (width_of(config) or 1, width_of(narrow_config) or 1)
    deep = _deeper(parts, few, narrow)
    return AcceptedTransformer(
        *_divided(bare, narrow, few, deep, list(zip(runs, prompts, strict=True)), ratio), excluded
    )


def _randomize(model: nn.Module) -> None:
    """Give all parameters random values, because zeros and ones would hide differences."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            spread = 0.3 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            center = 1.0 if parameter.dim() == 1 and float(parameter.mean()) > 0.5 else 0.0
            parameter.copy_(center + spread * noise)


def find_samples(
    few: nn.Module,
    config: Mapping[str, Any],
    names: Mapping[str, bool],
    form: Form,
    examples: Sequence[Mapping[str, Any]] | None,
) -> tuple[list[dict[str, Any]], Form]:
    """Return samples with which the model runs, and how their arguments are passed."""
    reached, problem = -1, ""
    words = {count for _, count in SIZES}
    for guess in [None] if examples is not None else guesses(config, names):
        tries = 3
        while tries:
            tries -= 1
            samples: list[Any] = list(examples or ()) if guess is None else invent(config, names, guess)
            again = None
            for plain in (form.plain, frozenset[str]()):
                here = replace(form, plain=plain)
                reader = _undivided(names, here)
                try:
                    samples = doubled(samples)
                    with torch.no_grad():
                        for sample in samples:
                            item = reader.read(sample)
                            _run(few, reader, item, _noised(noising(FlowMatching(), None), item))
                    return samples, here
                except Exception as error:
                    # The error that comes last in the forward pass is that of the best guess.
                    at = _line_reached(error, type(few))
                    reached, problem = (at, _first(error)) if at > reached else (reached, problem)
                    again = again or (None if guess is None else corrected(guess, str(error), words))
            if again is None:
                break
            guess = again
    if examples is not None:
        raise InputError("model", f"its examples fail: {problem}", "give the arguments that its pipeline passes")
    raise InputError("model", f"no inputs could be made up: {problem}", _REMEDY)


def _line_reached(error: BaseException, kind: Any) -> int:
    """Return the last line of the forward pass that an error comes from."""
    code = inspect.unwrap(kind.forward).__code__
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    return max(lines, default=0)


def _noised(noise: NoiseSampler, item: Item) -> NoisySample:
    return noise.of(item.latents, item.name, 0)


def _run(model: Any, reader: GenericReader, item: Item, noised: NoisySample, prompt: Tensor | None = None) -> Tensor:
    """Return the prediction of the undivided model."""
    dtype = noised.target.dtype
    latents = reader.entered(item, noised.noisy)[None]
    time = reader.time(noised)
    given = reader.batched(item, dtype) | ({} if prompt is None else {WORDS: prompt})
    return predicted(model, latents, time, given, noised.target)


def library_gradients(
    model: nn.Module,
    reader: GenericReader,
    noise: NoiseSampler,
    samples: Sequence[Any],
    encoder: Any = None,
    iteration: int = 0,
) -> tuple[float, Gradients]:
    """Return the loss and the gradients of the undivided models, sample by sample."""
    losses = []
    for sample in samples:
        item = reader.read(sample)
        prompt = None if reader.prompts is None else reader.prompts.embed(encoder, sample)
        noised = noise.of(item.latents, item.name, iteration)
        losses.append(loss_of(_run(model, reader, item, noised, prompt), noised))
    return mean_gradients(losses, {"transformer": model, "text_encoder": encoder})


def _divided(
    bare: GenericReader,
    model: nn.Module,
    few: nn.Module,
    parts: Parts,
    runs: Sequence[tuple[Any, Tensor | None]],
    ratio: tuple[int, int],
) -> tuple[GenericReader, nn.Module]:
    """Return a reader for a divided model, and the model, of which only the other parts run: those of the small one.

    ``runs`` has functions that run the model on a sample, and the prompt's embedding if another module computes it.
    """
    outline = _outline(model, few, parts)
    recordings = []
    for run, prompt in runs:
        leaf = None if prompt is None else prompt.detach().clone().requires_grad_()
        given = None if leaf is None else leaf.clone()
        recordings.append(record(outline, parts, partial(run, prompt=given), leaf))
    division = divide(parts, recordings, ratio)
    shapes = division.shapes(recordings[0])
    sizes = {}
    for key in division.streams:
        shape = shapes[key[:2]].shapes[key[2]]
        assert shape is not None
        sizes[key] = torch.Size(shape).numel()
    widths = Counter(
        shape[-1] for keys in division.rows for k in keys if k != PROMPT and (shape := shapes[k[:2]].shapes[k[2]])
    )
    if not widths:
        raise InputError("model", "passes nothing between its blocks")
    width = widths.most_common(1)[0][0]
    for path in _idle(model, division):
        # A part, so that samples that make the model call it are noticed.
        above, _, name = path.rpartition(".")
        real = outline.get_submodule(path)
        setattr(outline.get_submodule(above), name, Part(path, real, real))
    return replace(bare, division=division, sizes=sizes, width=width), outline


def _idle(model: nn.Module, division: Division) -> list[str]:
    """Return the modules with parameters that no sample of the test used. Only the first layer has them."""
    unused, parts = set(_unused(model, division, tied=True)), (*division.parts.others, *division.parts.blocks)
    found: list[str] = []
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        has_parts = any(part.startswith(f"{path}.") for part in parts)
        # Lists of parameters are not called.
        is_called = type(module).forward is not nn.Module.forward
        if own and own <= unused and is_called and not has_parts and not path.startswith(tuple(f"{p}." for p in found)):
            found.append(path)
    return found


def _outline(model: nn.Module, few: nn.Module, parts: Parts) -> nn.Module:
    """Return a model without blocks, whose other parts are those of a small model of the same width."""
    inside = tuple(f"{path}." for path in (*parts.others, *parts.blocks))
    own = [name for name, _ in model.named_parameters() if not name.startswith(inside)]
    swap: dict[str, nn.Module] = {path: Part(path, None, model.get_submodule(path)) for path in parts.blocks}
    for path in parts.others:
        real = few.get_submodule(path)
        swap[path] = Part(path, real, real)
    out = hollow(model, own, swap)
    small = dict(few.named_parameters())
    for name in own:
        path, _, last = name.rpartition(".")
        # Parameters of further blocks that were not found because nothing calls them.
        like = small[name] if name in small else nn.Parameter(torch.zeros(model.get_parameter(name).shape))
        out.get_submodule(path)._parameters[last] = like
    return out


def _recorded(outline: nn.Module, reader: GenericReader, item: Item) -> Any:
    """Return the calls of a forward pass for a sample."""
    dtype = next(p.dtype for p in outline.parameters())
    given = reader.batched(item, dtype)
    if reader.prompts is not None:
        given[WORDS] = torch.zeros(reader.prompt_shape(item), dtype=dtype)
    latents = reader.entered(item, item.latents.to(dtype))[None]
    time = torch.ones(1, dtype=dtype)
    run = partial(predicted, latents=latents, time=time, given=given, target=item.latents)
    with torch.no_grad():
        found: Recording = record(outline, reader.division.parts, run)
    return reader.division.shapes(found)
