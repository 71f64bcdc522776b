"""Boundary transfers between units, the order of collectives, and a check of the shapes of a plan's messages.

Transfers and order depend only on the layout and the packing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import Packing, Piece, pieces
from pipeloom.plan.action import ExecutionPlan
from pipeloom.plan.text import action_text
from pipeloom.spec import Layout, ModelSpec, Workload

Shapes = Callable[[int, Workload, str], tuple[tuple[int, ...], str]]
"""Return shape and dtype for a chunk number, a workload and a stream. An empty stream stands for the output."""


class Unit(NamedTuple):
    """One chunk's work on one (sub-)microbatch: its F and its backward."""

    chunk: int
    microbatch: int
    sub_microbatch: int


class BoundaryTransfer(NamedTuple):
    """Transfer of one unit's output to another unit and, if ``gradient`` is set, of its gradient back.

    ``piece`` is the first transferred instance of the producer's part and the number of instances. None: the whole
    output. ``stream`` names a stream that a layer of the producer emits and layers of the consumer take. It is empty
    for the output. A stream is transferred directly, and only once for all layers that take it.
    """

    producer: Unit
    consumer: Unit
    gradient: bool
    piece: tuple[int, int] | None = None
    stream: str = ""


class StreamPlace(NamedTuple):
    """The other end of a stream that a chunk takes or gives: its module, and the index of its chunk in that module."""

    stream: str
    module: int
    place: int


class _Place(NamedTuple):
    """Connections of a chunk: its module, its neighbors in it (-1: none), adjacent modules, and streams."""

    module: int
    before: int
    after: int
    sources: tuple[int, ...]
    consumers: tuple[int, ...]
    gradient: bool
    takes: tuple[StreamPlace, ...]
    gives: tuple[StreamPlace, ...]


class Router:
    """The part of boundary transfers that depends only on the layout, computed once for all units.

    Inside a module, a part goes from chunk to chunk. At a module boundary, parts are cut and joined by
    `pipeloom.packing.pieces`.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        number = {module.name: i for i, module in enumerate(layout.modules)}
        self.chunks_of = [layout.chunks_of(module.name) for module in layout.modules]
        self.replicated = [module.on_ranks == "replicated" for module in layout.modules]
        gradient = [layout.has_backward(module.name) for module in layout.modules]
        sources = [tuple(number[name] for name in module.after) for module in layout.modules]
        consumers = [tuple(i for i, above in enumerate(sources) if m in above) for m in range(len(sources))]
        takes, gives = self._streams()
        self.places: list[_Place] = []
        for i, chunk in enumerate(layout.chunks):
            m = number[chunk.module]
            row = self.chunks_of[m]
            at = row.index(i)
            first = at == 0 or self.replicated[m]
            last = at == len(row) - 1 or self.replicated[m]
            self.places.append(
                _Place(
                    module=m,
                    before=-1 if first else row[at - 1],
                    after=-1 if last else row[at + 1],
                    sources=sources[m] if first else (),
                    consumers=consumers[m] if last else (),
                    gradient=gradient[m],
                    takes=tuple(takes[i]),
                    gives=tuple(gives[i]),
                )
            )

    def _streams(self) -> tuple[list[list[StreamPlace]], list[list[StreamPlace]]]:
        """Return the streams that each chunk takes from other chunks, and those that it gives to other chunks."""
        layout, chunks_of = self.layout, self.chunks_of

        def place_of(module: int, layer: int) -> int:
            # Every chunk of a replicated module has all layers. The rank of each part is not known yet.
            last_layers = (layout.chunks[c].layers[1] for c in chunks_of[module])
            return next(place for place, last in enumerate(last_layers) if layer <= last)

        ends = {
            end.stream: (m, place_of(m, end.layer)) for m, module in enumerate(layout.modules) for end in module.emits
        }
        takes: list[list[StreamPlace]] = [[] for _ in layout.chunks]
        gives: list[list[StreamPlace]] = [[] for _ in layout.chunks]
        for m, module in enumerate(layout.modules):
            for stream in dict.fromkeys(end.stream for end in module.takes):
                source, above = ends[stream]
                for below in sorted({place_of(m, end.layer) for end in module.takes if end.stream == stream}):
                    if (source, above) == (m, below):
                        continue
                    for chunk in chunks_of[m] if self.replicated[m] else (chunks_of[m][below],):
                        takes[chunk].append(StreamPlace(stream, source, above))
                    for chunk in chunks_of[source] if self.replicated[source] else (chunks_of[source][above],):
                        gives[chunk].append(StreamPlace(stream, m, below))
        return takes, gives

    def of(self, packing: Packing, units: Iterable[Unit]) -> IterationRoutes:
        """Return the routes of one iteration. ``units`` define the rank of each part of a replicated module."""
        where: dict[tuple[int, int, int], int] = {}
        if any(self.replicated):
            for unit in units:
                m = self.places[unit.chunk].module
                if self.replicated[m]:
                    where[m, unit.microbatch, unit.sub_microbatch] = unit.chunk
        counts = [tuple(map(len, microbatch.parts)) for microbatch in packing.microbatches]
        return IterationRoutes(self, packing, counts, where)


class IterationRoutes:
    """Boundary transfers of one iteration, by unit. ``counts`` has the number of parts by microbatch and module."""

    def __init__(
        self, router: Router, packing: Packing, counts: list[tuple[int, ...]], where: dict[tuple[int, int, int], int]
    ) -> None:
        self.router, self.packing, self.counts, self.where = router, packing, counts, where
        self._pieces: dict[tuple[int, int, int], tuple[Piece, ...]] = {}

    def into(self, unit: Unit) -> tuple[BoundaryTransfer, ...]:
        """Return the inputs of a unit, in the order of concatenation."""
        place, (_, microbatch, sub) = self.router.places[unit.chunk], unit
        found: list[BoundaryTransfer] = []
        if place.before >= 0:
            found.append(BoundaryTransfer(Unit(place.before, microbatch, sub), unit, place.gradient))
        for stream, source, above in (*(("", source, -1) for source in place.sources), *place.takes):
            for piece in self._boundary(microbatch, source, place.module):
                if piece.below == sub:
                    chunk = self._chunk(source, microbatch, piece.above, above)
                    producer = Unit(chunk, microbatch, piece.above)
                    flows = self.router.places[chunk].gradient
                    found.append(BoundaryTransfer(producer, unit, flows, _cut(piece), stream))
        return tuple(found)

    def out_of(self, unit: Unit) -> tuple[BoundaryTransfer, ...]:
        """Return the transfers of a unit's output and streams."""
        place, (_, microbatch, sub) = self.router.places[unit.chunk], unit
        found: list[BoundaryTransfer] = []
        if place.after >= 0:
            found.append(BoundaryTransfer(unit, Unit(place.after, microbatch, sub), place.gradient))
        for stream, module, below in (*(("", module, 0) for module in place.consumers), *place.gives):
            for piece in self._boundary(microbatch, place.module, module):
                if piece.above == sub:
                    consumer = Unit(self._chunk(module, microbatch, piece.below, below), microbatch, piece.below)
                    found.append(BoundaryTransfer(unit, consumer, place.gradient, _cut(piece), stream))
        return tuple(found)

    def _boundary(self, microbatch: int, above: int, below: int) -> tuple[Piece, ...]:
        key = (microbatch, above, below)
        known = self._pieces.get(key)
        if known is None:
            known = self._pieces[key] = pieces(self.packing, microbatch, above, below)
        return known

    def _chunk(self, module: int, microbatch: int, sub: int, place: int) -> int:
        if not self.router.replicated[module]:
            return self.router.chunks_of[module][place]
        try:
            return self.where[module, microbatch, sub]
        except KeyError:
            name = self.router.layout.modules[module].name
            raise InputError(f"unit {name} {microbatch}.{sub}", "is on no rank", "plan every part once") from None


@dataclass(frozen=True)
class Routes:
    """All boundary transfers of one iteration. Those of one consumer are in the order of concatenation."""

    transfers: tuple[BoundaryTransfer, ...]

    @cached_property
    def into(self) -> Mapping[Unit, tuple[BoundaryTransfer, ...]]:
        """Boundary transfers by consumer; units without any are absent."""
        return _grouped((transfer.consumer, transfer) for transfer in self.transfers)

    @cached_property
    def out_of(self) -> Mapping[Unit, tuple[BoundaryTransfer, ...]]:
        """Boundary transfers by producer; units without any are absent."""
        return _grouped((transfer.producer, transfer) for transfer in self.transfers)

    def target(self, transfer: BoundaryTransfer, names: Sequence[str]) -> str:
        """Return the name of the consumer in the transfer's message; see `target_word`."""
        return target_word(transfer, self.out_of[transfer.producer], names)


def target_word(transfer: BoundaryTransfer, siblings: Sequence[BoundaryTransfer], names: Sequence[str]) -> str:
    """Return the name of the consumer in a message.

    It is empty for a single consumer. Otherwise it is the chunk, with the sub-microbatch if several consumers are of
    one chunk.

    Parameters
    ----------
    siblings : sequence of BoundaryTransfer
        All transfers of the same producer.
    names : sequence of str
        Names of the layout's chunks.
    """
    if len(siblings) == 1:
        return ""
    siblings = [other for other in siblings if other.stream == transfer.stream]
    if len(siblings) == 1:
        return ""
    consumer = transfer.consumer
    if sum(other.consumer.chunk == consumer.chunk for other in siblings) == 1:
        return names[consumer.chunk]
    return f"{names[consumer.chunk]}:{consumer.sub_microbatch}"


def make_routes(layout: Layout, packing: Packing, units: Iterable[Unit]) -> Routes:
    """Connect the units of one iteration, and check that they are exactly those that the packing needs.

    Parameters
    ----------
    units : iterable of Unit
        Every unit with an F. For replicated modules, they define the rank of each part.

    Raises
    ------
    InputError
        A unit is missing, unknown or repeated, or parts do not match at a module boundary.
    """
    listed = list(units)
    known = set(listed)
    if len(known) != len(listed):
        unit = next(unit for unit, count in Counter(listed).items() if count > 1)
        raise InputError(f"unit {_name(layout, unit)}", "has two forwards")
    router = Router(layout)
    for unit in listed:
        if not 0 <= unit.chunk < len(layout.chunks):
            raise InputError(f"unit {tuple(unit)}", "has a chunk that is not in the layout")
    routes = router.of(packing, listed)
    ordered: list[Unit] = []
    for microbatch, counts in enumerate(routes.counts):
        for m, num_parts in enumerate(counts):
            for sub in range(num_parts):
                ordered += _units_of(layout, router, m, microbatch, sub, known)
    stray = known - set(ordered)
    if stray:
        raise InputError(f"unit {_name(layout, min(stray))}", "is not in the packing", "plan for this packing")
    # A part without consumers appears only on the side of the producer, so compare both sides.
    transfers = [transfer for unit in ordered for transfer in routes.into(unit)]
    if len(transfers) != sum(len(routes.out_of(unit)) for unit in ordered):
        raise AssertionError("boundary transfers differ between their two sides")
    return Routes(tuple(transfers))


def transferred_workload(transfer: BoundaryTransfer, layout: Layout, packing: Packing) -> Workload:
    """Return the workload of a transfer, from which `Shapes` derives the shape of its message."""
    producer = transfer.producer
    part = packing.parts_of(producer.microbatch, layout.chunks[producer.chunk].module)[producer.sub_microbatch]
    if transfer.piece is None:
        return part.workload
    first, count = transfer.piece
    return Workload(part.workload.lengths[first : first + count])


def boundary_shapes(model: ModelSpec, layout: Layout) -> Shapes:
    """Return the shapes of outputs, as the model declares them for the last layer of each chunk, and of streams."""
    outputs = [model.module(chunk.module).flat_layers[chunk.layers[1]].output for chunk in layout.chunks]
    streams = {end.stream: end.output for module in model.modules for end in module.emits}

    def shapes(chunk: int, workload: Workload, stream: str = "") -> tuple[tuple[int, ...], str]:
        shape = streams[stream] if stream else outputs[chunk]
        return shape.resolve(workload), shape.dtype

    return shapes


def check_shapes(plan: ExecutionPlan, model: ModelSpec, layout: Layout, packing: Packing) -> None:
    """Raise `PlanError` if messages of a verified plan have other shapes than the model declares for the batch.

    A plan that is complete and free of deadlock may still be a plan for another model or batch.

    Raises
    ------
    PlanError
        A shape differs. The error names the first such message and its expected shape.
    """
    shapes = boundary_shapes(model, layout)
    names = layout.chunk_names
    chunks = {name: number for number, name in enumerate(names)}
    everything = [action for actions in plan.ranks for action in actions]
    units = [Unit(chunks[a.chunk], a.microbatch, a.sub_microbatch) for a in everything if a.verb == "F"]
    routes = Router(layout).of(packing, units)
    # If the consuming module has smaller parts, each consumer takes only some rows of an output. Messages of one unit
    # may therefore differ in shape.
    expected_of: dict[Unit, dict[tuple[str, str], tuple[tuple[int, ...], str]]] = {}
    for action in everything:
        if action.shape is None:
            continue
        unit = Unit(chunks[action.chunk], action.microbatch, action.sub_microbatch)
        if unit not in expected_of:
            siblings = routes.out_of(unit)
            expected_of[unit] = {
                (target_word(h, siblings, names), h.stream): shapes(
                    unit.chunk, transferred_workload(h, layout, packing), h.stream
                )
                for h in siblings
            }
        expected = expected_of[unit].get((action.target, action.stream))
        if (action.shape, action.dtype) != expected:
            should = "has no consumer" if expected is None else f"has another shape than {expected[0]} {expected[1]}"
            raise PlanError(f"'{action_text(action)}' {should}")


def _units_of(
    layout: Layout, router: Router, module: int, microbatch: int, sub: int, known: set[Unit]
) -> tuple[Unit, ...]:
    """Return the units of one part of one module, in model order."""
    candidates = [Unit(chunk, microbatch, sub) for chunk in router.chunks_of[module]]
    present = tuple(unit for unit in candidates if unit in known)
    wanted = 1 if router.replicated[module] else len(candidates)
    if len(present) != wanted:
        missing = next((unit for unit in candidates if unit not in known), candidates[0])
        raise InputError(
            f"unit {_name(layout, missing)}",
            f"{len(present)} of the units of this part are planned, but {wanted} are required",
            "plan every part exactly once",
        )
    return present


def _cut(piece: Piece) -> tuple[int, int] | None:
    return None if piece.whole else (piece.first, piece.count)


def _grouped(entries: Iterable[tuple[Unit, BoundaryTransfer]]) -> dict[Unit, tuple[BoundaryTransfer, ...]]:
    groups: defaultdict[Unit, list[BoundaryTransfer]] = defaultdict(list)
    for unit, transfer in entries:
        groups[unit].append(transfer)
    return {unit: tuple(group) for unit, group in groups.items()}


def _name(layout: Layout, unit: Unit) -> str:
    return f"{layout.chunk_names[unit.chunk]} {unit.microbatch}.{unit.sub_microbatch}"


@dataclass(frozen=True, slots=True)
class CollectiveOrder:
    """Chunks of one rank in the order of their collectives.

    Attributes
    ----------
    unshard : tuple of int
        Chunks of UNSHARD, in forward order: all chunks with several replicas, otherwise none.
    reduce : tuple of int
        Chunks of REDUCE_GRAD, in backward order: all trained chunks that several processes hold. A chunk without work
        in an iteration is also reduced, since other replicas wait for it.
    """

    unshard: tuple[int, ...]
    reduce: tuple[int, ...]


def collective_order(layout: Layout, rank: int) -> CollectiveOrder:
    """Return the order of a rank's collectives, which depends only on the layout."""
    several = layout.parallelism.data > 1
    unshard, reduce = [], []
    for number, chunk in enumerate(layout.chunks):
        if chunk.rank != rank:
            continue
        module = layout.module(chunk.module)
        if several:
            unshard.append(number)
        everywhere = module.on_ranks == "replicated" and layout.num_ranks > 1
        if (several or everywhere or layout.uses_encoder_dp(chunk.module)) and not module.frozen:
            reduce.append(number)
    return CollectiveOrder(tuple(unshard), tuple(reversed(reduce)))
