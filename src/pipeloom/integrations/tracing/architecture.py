"""Trace a model's own code into an `Architecture`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.build import build
from pipeloom.integrations.tracing.checks import check_backward, check_layer, check_parameters
from pipeloom.integrations.tracing.fitting import Features, TraceError, error_line
from pipeloom.integrations.tracing.fusion import Draft, Segment, draft
from pipeloom.integrations.tracing.inputs import (
    SINGLE,
    TEXTS,
    Call,
    Encoder,
    check_others,
    encoders_of,
    joint_call,
    text_calls,
)
from pipeloom.integrations.tracing.kernels import TooShort
from pipeloom.integrations.tracing.lowering import LoweredLayer, lower
from pipeloom.integrations.tracing.runs import Tower, TowerRun, Tracer
from pipeloom.spec.architecture import (
    Architecture,
    LanguageHeadLayer,
    Layer,
    ModuleArchitecture,
    Norm,
    TokenEmbeddingLayer,
    TracedLayer,
)
from pipeloom.spec.traced import KernelOperator, Operator, ProductOperator, TracedInput


def trace_config(config: Mapping[str, Any], name: str) -> Architecture:
    """Trace the library's model of a `config.json`."""
    model, how = build(config)
    architecture = trace_model(model, name or str(config.get("model_type")), how, config)
    check_parameters(architecture, model)
    return architecture


def trace_model(
    model: Any, name: str, source: str, given: Mapping[str, Any] | None = None, frozen: Collection[str] = ()
) -> Architecture:
    """Trace a model of the library that is on the meta device.

    ``given`` is its configuration as its file has it, and ``frozen`` the names of parameters that are not trained. If
    the model's code does not run on meta tensors, or what it runs cannot be described, `TraceError` is raised.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        problem = "has a decoder that attends to an encoder, whose inputs are not known from its configuration"
        raise TraceError("model", problem, "plan MODULE:FUNCTION that returns the model and a batch")
    try:
        return Architecture(name, source, _modules(model, given or {}, frozenset(frozen)))
    except InputError:
        raise
    except Exception as error:
        problem = f"does not run on tensors without numbers: {error_line(error)}"
        raise TraceError("model", problem, "describe it in a .toml file") from error


def _modules(model: Any, given: Mapping[str, Any], frozen: frozenset[str]) -> tuple[ModuleArchitecture, ...]:
    tracer = Tracer(model)
    modules: list[ModuleArchitecture] = []
    taken: set[str] = set()
    taps: dict[str, set[str]] = {}
    """Parameters from which each stream is computed."""
    tapped: list[tuple[Encoder, ModuleArchitecture]] = []
    for forms in encoders_of(model, given):
        encoder, module, own, streams = _traced(model, tracer, forms, taken)
        tapped += [(encoder, module)] if streams else []
        modules.append(msgspec.structs.replace(module, frozen=bool(own) and own <= frozen))
        taken, taps = taken | own, taps | streams
    check_others(model, given, taken)
    takes: dict[int, str] = {}
    after = tuple(m.name for m in modules)
    for texts in (TEXTS, SINGLE):
        tower = _text_tower(model, tracer, texts)
        if taps:
            found = tracer.taken(tower, joint_call(model, *tapped[0]), list(taps.values()))
            takes = {place: list(taps)[stream] for place, stream in found.items()}
        try:
            text = _text(model, tower, taken, after, takes)
            break
        except TraceError:
            if texts is SINGLE:
                raise
    trained = {name for name, _ in model.named_parameters()} - taken - frozen
    return (*modules, msgspec.structs.replace(text, frozen=not trained))


def _text_tower(model: Any, tracer: Tracer, texts: Sequence[tuple[int, int]]) -> Tower:
    """Run the language model on texts that are long enough for its sparse attention to select keys."""
    for longer in (1, 4, 16):
        calls = text_calls(model, texts, longer)
        try:
            tower = max(tracer.find(calls[0][1]), key=lambda each: len(each.blocks))
        except TooShort:
            continue
        _run_all(tracer, tower, calls)
        return tower
    raise TraceError("model", f"selects all of {calls[0][0].lengths[0]} keys", "describe it in a .toml file")


def _run_all(tracer: Tracer, tower: Tower, calls: Sequence[tuple[Features, Call]]) -> None:
    """Run a tower at all sizes, with the backward at the first and at the last, on which counts are checked."""
    tower.features = [features for features, _ in calls]
    for number, (_, call) in enumerate(calls):
        tracer.run(tower, call, backward=number in (0, len(calls) - 1))


def _traced(
    model: Any, tracer: Tracer, forms: Sequence[Encoder], taken: set[str]
) -> tuple[Encoder, ModuleArchitecture, set[str], dict[str, set[str]]]:
    """Trace an encoder on the first form of its input on which it runs and can be described."""
    problems: list[Exception] = []
    for encoder in forms:
        try:
            calls = encoder.calls()
            tower = max(tracer.find(calls[0][1]), key=lambda each: len(each.blocks))
            _run_all(tracer, tower, calls)
            return encoder, *_encoder(model, encoder, tower, taken)
        except Exception as error:
            problems.append(error)
    for described in problems:
        if isinstance(described, TraceError):
            raise described
    reason = f"does not run on {encoder.reads} of any known form: {error_line(problems[0])}"
    raise TraceError("encoder", reason, "describe it in a .toml file") from problems[0]


# ------------------------------------------------------------------ modules


class Part:
    """Lowers the segments of one tower."""

    def __init__(self, model: nn.Module, tower: Tower, taken: set[str]) -> None:
        self.tower, self.features = tower, tower.features
        self.sizes = {name: p.numel() for name, p in model.named_parameters()}
        self.own = {name: n for name, n in self.sizes.items() if name not in taken and not tower.holds(name)}
        """Parameters outside of the blocks that no other part and no segment before has, with their sizes."""
        self.held = {name for name in self.sizes if tower.holds(name)}
        """Parameters of the blocks."""
        self.width = tower.runs[0].running.shape[-1]

    @property
    def fixed_rows(self) -> int | None:
        """The length of all sequences; None: they have several."""
        lengths = {n for features in self.features for n in features.lengths}
        return lengths.pop() if len(lengths) == 1 else None

    def size(self, names: Iterable[str]) -> int:
        """Return the number of these parameters' elements."""
        return sum(self.sizes[name] for name in names)

    def lower(self, where: str, segments: Sequence[Segment], *, bounded: bool = False) -> LoweredLayer:
        """Return the operators of segments. What they read of ``own`` is then no longer in it."""
        drafts = [draft(segment) for segment in segments]
        states = [segment.state for segment in segments]
        results = [segment.leaves[0] if segment.leaves else None for segment in segments]
        found = lower(where, self.features, drafts, states, results, self.own, bounded=bounded)
        self.own = {name: size for name, size in self.own.items() if name not in found.used}
        return found

    def around(self, name: str, lowered: LoweredLayer, parameters: Iterable[str]) -> TracedLayer:
        """Return what stands before or behind the blocks."""
        return TracedLayer(
            name=name,
            hidden=lowered.inputs[0].width if lowered.inputs else self.width,
            inputs=lowered.inputs,
            operators=lowered.operators,
            parameters=self.size(parameters),
            block=False,
            result=lowered.result,
        )

    def unused(self, parameters: int) -> tuple[TracedLayer, ...]:
        """Return a layer that runs nothing and has this many parameters; none if there are none."""
        state = TracedInput((0.0, 0.0, 1.0, 0.0), self.width)
        return (TracedLayer("unused", self.width, (state,), (), parameters, block=False),) if parameters else ()

    def blocks(
        self,
        streams: Mapping[int, tuple[str, LoweredLayer, int]],
        takes: Mapping[int, str] | None = None,
        used: int | None = None,
    ) -> tuple[list[TracedLayer], list[TracedLayer]]:
        """Return the blocks, and those behind the first ``used``, whose results nothing reads.

        ``streams`` has the taps by block: name of the stream, operators, parameters.
        """
        tower, made = self.tower, dict[int, TracedLayer]()
        for place in sorted(set(tower.kinds)):
            block = tower.blocks[place]
            prefix = tower.prefix(place)
            own = {n: s for n, s in self.sizes.items() if n.startswith(prefix)}
            label = type(block).__name__
            where = f"block {prefix[:-1]} ({label})"
            runs = [run.running.blocks[place] for run in tower.runs]
            segments, results = [run.segment for run in runs], [run.result for run in runs]
            drafts = [draft(segment) for segment in segments]
            for run, each, features in zip(runs, drafts, self.features, strict=True):
                check_backward(where, each, run.backward_flops, features)
            found = lower(where, self.features, drafts, [s.state for s in segments], results, own)
            layer = TracedLayer(
                name=f"{label}.{place}" if place else label,
                hidden=self.width,
                inputs=found.inputs,
                operators=found.operators,
                parameters=sum(own.values()),
                result=found.result,
            )
            check_layer(where, layer, self.features, segments, drafts)
            equal = (each for each in made.values() if msgspec.structs.replace(layer, name=each.name) == each)
            made[place] = next(equal, layer)
        out: list[TracedLayer] = []
        for place, kind in enumerate(tower.kinds):
            layer = made[kind]
            size = sum(s for n, s in self.sizes.items() if n.startswith(tower.prefix(place)))
            if size != layer.parameters:
                problem = f"has {size} parameters, its kind {layer.parameters}"
                raise TraceError(f"block {place} of {tower.path!r}", problem)
            if place in streams:
                name, tap, parameters = streams[place]
                layer = msgspec.structs.replace(layer, emits=name, taps=tap.operators, tap_parameters=parameters)
            if takes and place in takes:
                layer = msgspec.structs.replace(layer, takes=takes[place])
            out.append(layer)
        return _counted(out[:used]), _counted(out[len(out) if used is None else used :])


def _counted(layers: Sequence[TracedLayer]) -> list[TracedLayer]:
    """Merge equal consecutive layers into one entry with a count."""
    runs = [(layer, len(list(run))) for layer, run in itertools.groupby(layers)]
    return [msgspec.structs.replace(layer, count=count) for layer, count in runs]


def _used(run: TowerRun) -> int:
    """Return the number of blocks up to the last one whose result something reads."""
    read = {value for each in draft(run.after) for value in each.reads} | set(run.after.leaves)
    results = [result for _, _, result in run.running.marks]
    return max((place + 1 for place, value in enumerate(results) if value in read), default=len(results))


def _encoder(
    model: Any, encoder: Encoder, tower: Tower, taken: set[str]
) -> tuple[ModuleArchitecture, set[str], dict[str, set[str]]]:
    part = Part(model, tower, taken)
    whole = {n for n in part.sizes if n.startswith(f"{encoder.path}.")} if encoder.path else set()
    runs = tower.runs
    streams: dict[int, tuple[str, LoweredLayer, int]] = {}
    taps: dict[str, set[str]] = {}
    for number, place in enumerate(runs[0].between):
        tap = part.lower(f"what follows block {place} of {tower.path!r}", [r.between[place] for r in runs])
        name = f"{encoder.name}_{number}"
        streams[place] = name, tap, part.size(tap.used)
        taps[name] = tap.used
    before = part.lower(f"what precedes {tower.path!r}", [r.before for r in runs])
    used_blocks = _used(runs[0])
    for run in runs:
        run.after.state = run.running.marks[used_blocks - 1][2]
    after = part.lower(f"what follows {tower.path!r}", [r.after for r in runs])
    blocks, idle = part.blocks(streams, used=used_blocks)
    mine = part.held.union(before.used, after.used, whole, *taps.values())
    layers = [part.around(f"{encoder.name} embedding", before, before.used), *blocks]
    if after.operators:
        layers.append(part.around(f"{encoder.name} adapter", after, after.used))
    held = sum(layer.parameters * layer.count for layer in (*layers, *idle))
    rest = part.size(mine) - held - sum(each[2] for each in streams.values())
    unused = (*idle, *part.unused(rest))
    module = ModuleArchitecture(encoder.name, encoder.reads, tuple(layers), unused=unused, fixed_rows=part.fixed_rows)
    return module, mine, taps


def _text(
    model: Any, tower: Tower, taken: set[str], after: tuple[str, ...], takes: Mapping[int, str]
) -> ModuleArchitecture:
    part = Part(model, tower, taken)
    runs = tower.runs
    if runs[0].between:
        place = next(iter(runs[0].between))
        raise TraceError(f"tower {tower.path!r}", f"computes between its blocks {place} and {place + 1}")
    where = f"what precedes {tower.path!r}"
    tables = [_words(where, run.before) for run in runs]
    table = tables[0]
    embedding, behind, used = split_embedding(part, where, [run.before for run in runs], tables)
    layers: list[Layer] = [embedding]
    if behind.parameters:
        layers.append(behind)  # such as positions, and tables of words for every block
    layers += part.blocks({}, takes)[0]
    last = part.lower(f"what follows {tower.path!r}", [r.after for r in runs])
    head, others = head_of(last, part.width, tied=bool(used & last.used))
    words_in, words_out = table.fixed["vocabulary"], head.vocabulary
    if words_out < words_in // 2:
        problem = f"has a head of {words_out} columns, which is none of {words_in} words"
        raise TraceError("model", problem, "name its class with a language-modeling head in `architectures`")
    if others:
        norm = part.width * (2 if head.norm == "layer" else 1)
        layer = part.around("before the head", last, last.used)
        count = layer.parameters - head.vocabulary * part.width - norm
        layers.append(msgspec.structs.replace(layer, operators=others, parameters=count))
    layers.append(head)
    unused = part.unused(part.size(part.own.keys() - used))
    return ModuleArchitecture("lm", "sequence", tuple(layers), after=after, unused=unused)


def _words(where: str, segment: Segment) -> Draft:
    """Return the first table that a segment looks up."""
    table = next((each for each in draft(segment) if each.kind == "embedding"), None)
    if table is None:
        raise TraceError(where, "has no token embedding")
    return table


def split_embedding(
    part: Part, where: str, segments: Sequence[Segment], tables: Sequence[Draft], *, bounded: bool = False
) -> tuple[TokenEmbeddingLayer, TracedLayer, set[str]]:
    """Return the look-up in a table, what runs besides it, and the parameters of both."""
    table = tables[0]
    pairs = zip(segments, tables, strict=True)
    behind = part.lower(where, [_behind(segment, each) for segment, each in pairs], bounded=bounded)
    used = set(table.parameters)
    layer = part.around("behind the embedding", behind, behind.used - used)
    return TokenEmbeddingLayer(table.fixed["vocabulary"], table.fixed["width"]), layer, used | behind.used


def _behind(segment: Segment, table: Draft) -> Segment:
    """Return what a segment runs besides looking up words in a table."""
    words = table.results[0]
    rest = [record for record in segment.records if words not in record.writes]
    return Segment(rest, words, segment.leaves, segment.regions)


def head_of(last: LoweredLayer, width: int, *, tied: bool) -> tuple[LanguageHeadLayer, tuple[Operator, ...]]:
    """Return the head, and the operators before its norm that it does not have."""
    products = [i for i, each in enumerate(last.operators) if isinstance(each, ProductOperator)]
    if not products:
        raise TraceError("what follows the blocks", "has no product with a vocabulary")
    at = products[-1]
    product = last.operators[at]
    assert isinstance(product, ProductOperator)
    norms = [
        i for i, each in enumerate(last.operators[:at]) if isinstance(each, KernelOperator) and each.kind == "norm"
    ]
    kind: Norm = "rms"
    if norms:
        norm = last.operators[norms[-1]]
        assert isinstance(norm, KernelOperator)
        kind = "layer" if norm.statistics[2] > 4 or norm.parameters == 2 * width else "rms"
    # Between the norm and the head there may be a cast, which is not worth an operator.
    ends = [i for i in norms[-1:] if not any(i < place < at for place in products)]
    before = last.operators[: ends[0] if ends else at]
    # The head has its own loss, also if the model computes one. Trainers have factors of the logits in its kernel.
    capped = any(isinstance(each, KernelOperator) and each.kind == "activation" for each in last.operators[at:])
    return LanguageHeadLayer(product.in_width, product.out_width, tied=tied, norm=kind, capped=capped), before
