"""What goes from whom to whom, and in which order collectives come: the same for lowering, checking and running.

Decided by layout and packing alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeloom.errors import InputError
from pipeloom.packing import Packing, Piece, pieces
from pipeloom.spec import Chunk, Layout, ModelSpec, Workload

Shapes = Callable[[int, Workload, str], tuple[tuple[int, ...], str]]
"""From a chunk number and a workload to shape and dtype of the chunk's output, or of a stream that it emits."""


class Unit(NamedTuple):
    """One chunk's work on one (sub-)microbatch; its F and its backward belong to one unit."""

    chunk: int
    microbatch: int
    sub_microbatch: int


class BoundaryTransfer(NamedTuple):
    """The output of one unit goes into another, and where ``gradient`` is set its gradient comes back.

    ``piece`` is None where it is all of the output, else which instances of the producer's part: the first, and how
    many. ``stream`` names what is transferred where it is not the output: the stream that a layer of the one emits and
    layers of the other take, straight from the one to the other, and once however many of them take it.
    """

    producer: Unit
    consumer: Unit
    gradient: bool
    piece: tuple[int, int] | None = None
    stream: str = ""


class StreamPlace(NamedTuple):
    """The other end of a stream that a chunk takes or gives: its module, and the chunk's place among that module's."""

    stream: str
    module: int
    place: int


class _Place(NamedTuple):
    """Where a chunk stands: its module, its neighbours inside it (-1: none), the modules around it, and streams."""

    module: int
    before: int
    after: int
    sources: tuple[int, ...]
    consumers: tuple[int, ...]
    gradient: bool
    takes: tuple[StreamPlace, ...]
    gives: tuple[StreamPlace, ...]


class Router:
    """What is fixed about boundary transfers once a layout is: made once, asked for every unit.

    Inside a module a part goes from chunk to chunk; at a module boundary parts are cut and joined as
    `pipeloom.packing.pieces` says.
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
        """Per chunk, the streams that it takes from other chunks, and those that it gives to others."""
        layout, chunks_of = self.layout, self.chunks_of

        def places(module: int, layer: int) -> list[int]:
            # Of a replicated module all chunks have all layers; where a part is worked on is known later.
            row = [place for place, c in enumerate(chunks_of[module]) if _holds(layout.chunks[c], layer)]
            return row[:1]

        ends = {
            end.stream: (m, end.layer, places(m, end.layer)[0])
            for m, module in enumerate(layout.modules)
            for end in module.emits
        }
        takes: list[list[StreamPlace]] = [[] for _ in layout.chunks]
        gives: list[list[StreamPlace]] = [[] for _ in layout.chunks]
        for m, module in enumerate(layout.modules):
            for stream in dict.fromkeys(end.stream for end in module.takes):
                source, _, above = ends[stream]
                layers = [end.layer for end in module.takes if end.stream == stream]
                for below in sorted({place for layer in layers for place in places(m, layer)}):
                    if (source, above) == (m, below):
                        continue
                    everywhere = self.replicated[m]
                    for chunk in chunks_of[m] if everywhere else (chunks_of[m][below],):
                        takes[chunk].append(StreamPlace(stream, source, above))
                    everywhere = self.replicated[source]
                    for chunk in chunks_of[source] if everywhere else (chunks_of[source][above],):
                        gives[chunk].append(StreamPlace(stream, m, below))
        return takes, gives

    def of(self, packing: Packing, units: Iterable[Unit]) -> RoutesOf:
        """Bind to one iteration; the units say on which rank each part of a replicated module is worked on."""
        where: dict[tuple[int, int, int], int] = {}
        if any(self.replicated):
            for unit in units:
                m = self.places[unit.chunk].module
                if self.replicated[m]:
                    where[m, unit.microbatch, unit.sub_microbatch] = unit.chunk
        counts = [tuple(map(len, microbatch.parts)) for microbatch in packing.microbatches]
        return RoutesOf(self, packing, counts, where)


class RoutesOf:
    """Boundary transfers of one iteration, answered unit by unit.

    Attributes
    ----------
    counts : list of tuple of int
        Per microbatch and module, its number of parts.
    """

    def __init__(
        self, router: Router, packing: Packing, counts: list[tuple[int, ...]], where: dict[tuple[int, int, int], int]
    ) -> None:
        self.router, self.packing, self.counts, self.where = router, packing, counts, where
        self._pieces: dict[tuple[int, int, int], tuple[Piece, ...]] = {}

    def into(self, unit: Unit) -> tuple[BoundaryTransfer, ...]:
        """What a unit takes, in the order in which it concatenates it."""
        place, (_, microbatch, sub) = self.router.places[unit.chunk], unit
        if place.before >= 0:
            main = BoundaryTransfer(Unit(place.before, microbatch, sub), unit, place.gradient)
            return (main, *self._streams_into(unit)) if place.takes else (main,)
        found: list[BoundaryTransfer] = []
        for source in place.sources:
            for piece in self._boundary(microbatch, source, place.module):
                if piece.below == sub:
                    chunk = self._chunk(source, microbatch, piece.above, -1)
                    producer = Unit(chunk, microbatch, piece.above)
                    flows = self.router.places[chunk].gradient
                    found.append(BoundaryTransfer(producer, unit, flows, _cut(piece)))
        if place.takes:
            found += self._streams_into(unit)
        return tuple(found)

    def _streams_into(self, unit: Unit) -> list[BoundaryTransfer]:
        place, (_, microbatch, sub) = self.router.places[unit.chunk], unit
        found: list[BoundaryTransfer] = []
        for stream, source, above in place.takes:
            for piece in self._boundary(microbatch, source, place.module):
                if piece.below == sub:
                    chunk = self._chunk(source, microbatch, piece.above, above)
                    producer = Unit(chunk, microbatch, piece.above)
                    flows = self.router.places[chunk].gradient
                    found.append(BoundaryTransfer(producer, unit, flows, _cut(piece), stream))
        return found

    def out_of(self, unit: Unit) -> tuple[BoundaryTransfer, ...]:
        """Where a unit's output goes."""
        place, (_, microbatch, sub) = self.router.places[unit.chunk], unit
        if place.after >= 0:
            main = BoundaryTransfer(unit, Unit(place.after, microbatch, sub), place.gradient)
            return (main, *self._streams_out_of(unit)) if place.gives else (main,)
        found: list[BoundaryTransfer] = []
        for module in place.consumers:
            for piece in self._boundary(microbatch, place.module, module):
                if piece.above == sub:
                    chunk = self._chunk(module, microbatch, piece.below, 0)
                    consumer = Unit(chunk, microbatch, piece.below)
                    found.append(BoundaryTransfer(unit, consumer, place.gradient, _cut(piece)))
        if place.gives:
            found += self._streams_out_of(unit)
        return tuple(found)

    def _streams_out_of(self, unit: Unit) -> list[BoundaryTransfer]:
        place, (_, microbatch, sub) = self.router.places[unit.chunk], unit
        found: list[BoundaryTransfer] = []
        for stream, module, below in place.gives:
            for piece in self._boundary(microbatch, place.module, module):
                if piece.above == sub:
                    consumer = Unit(self._chunk(module, microbatch, piece.below, below), microbatch, piece.below)
                    found.append(BoundaryTransfer(unit, consumer, place.gradient, _cut(piece), stream))
        return found

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
    """All boundary transfers of one iteration.

    Attributes
    ----------
    units : tuple of Unit
        Microbatch by microbatch, in model order.
    transfers : tuple of BoundaryTransfer
        Those of one consumer stand in the order in which it concatenates them.
    """

    units: tuple[Unit, ...]
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
        """How its message names the consumer; see `target_word`."""
        return target_word(transfer, self.out_of[transfer.producer], names)


def target_word(transfer: BoundaryTransfer, siblings: Sequence[BoundaryTransfer], names: Sequence[str]) -> str:
    """How a message names its consumer: not at all where there is one, else its chunk, and its part if need be.

    Parameters
    ----------
    siblings : sequence of BoundaryTransfer
        All of the same producer; those of the same stream matter.
    names : sequence of str
        Of the layout's chunks.
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
        Every unit that has an F. (For a replicated module they say on which rank each part is worked on.)

    Raises
    ------
    InputError
        When a unit is missing, unknown or doubled, or parts at a module boundary match in neither way.
    """
    listed = list(units)
    known = set(listed)
    if len(known) != len(listed):
        raise InputError(f"unit {_name(layout, _first_double(listed))}", "has two forwards")
    router = Router(layout)
    for unit in listed:
        if not 0 <= unit.chunk < len(layout.chunks):
            raise InputError(f"unit {tuple(unit)}", "is of no chunk of the layout")
    routes = router.of(packing, listed)
    ordered: list[Unit] = []
    for microbatch, counts in enumerate(routes.counts):
        for m, num_parts in enumerate(counts):
            for sub in range(num_parts):
                ordered += _units_of(layout, router, m, microbatch, sub, known)
    stray = known - set(ordered)
    if stray:
        raise InputError(f"unit {_name(layout, min(stray))}", "is not in the packing", "plan for this packing")
    # Both sides are asked: a part that feeds nothing shows on its own side only.
    transfers = [transfer for unit in ordered for transfer in routes.into(unit)]
    if len(transfers) != sum(len(routes.out_of(unit)) for unit in ordered):
        raise AssertionError("boundary transfers differ between their two sides")
    return Routes(tuple(ordered), tuple(transfers))


def transferred_workload(transfer: BoundaryTransfer, layout: Layout, packing: Packing) -> Workload:
    """Workload of what is transferred: with `Shapes`, shape and dtype of its message."""
    producer = transfer.producer
    part = packing.parts_of(producer.microbatch, layout.chunks[producer.chunk].module)[producer.sub_microbatch]
    if transfer.piece is None:
        return part.workload
    first, count = transfer.piece
    return Workload(part.workload.lengths[first : first + count])


def boundary_shapes(model: ModelSpec, layout: Layout) -> Shapes:
    """Shape and dtype of every chunk's output, as the model states it for the chunk's last layer, and of streams."""
    outputs = [model.module(chunk.module).flat_layers[chunk.layers[1]].output for chunk in layout.chunks]
    streams = {end.stream: end.output for module in model.modules for end in module.emits}

    def shapes(chunk: int, workload: Workload, stream: str = "") -> tuple[tuple[int, ...], str]:
        shape = streams[stream] if stream else outputs[chunk]
        return shape.resolve(workload), shape.dtype

    return shapes


def _units_of(
    layout: Layout, router: Router, module: int, microbatch: int, sub: int, known: set[Unit]
) -> tuple[Unit, ...]:
    """Units that one part of one module passes, in model order."""
    candidates = [Unit(chunk, microbatch, sub) for chunk in router.chunks_of[module]]
    present = tuple(unit for unit in candidates if unit in known)
    wanted = 1 if router.replicated[module] else len(candidates)
    if len(present) != wanted:
        missing = next((unit for unit in candidates if unit not in known), candidates[0])
        raise InputError(
            f"unit {_name(layout, missing)}",
            f"{len(present)} of the units of this part are planned, {wanted} expected",
            "plan every part exactly once",
        )
    return present


def _holds(chunk: Chunk, layer: int) -> bool:
    return chunk.layers[0] <= layer <= chunk.layers[1]


def _cut(piece: Piece) -> tuple[int, int] | None:
    return None if piece.whole else (piece.first, piece.count)


def _grouped(entries: Iterable[tuple[Unit, BoundaryTransfer]]) -> dict[Unit, tuple[BoundaryTransfer, ...]]:
    groups: defaultdict[Unit, list[BoundaryTransfer]] = defaultdict(list)
    for unit, transfer in entries:
        groups[unit].append(transfer)
    return {unit: tuple(group) for unit, group in groups.items()}


def _first_double(units: list[Unit]) -> Unit:
    seen: set[Unit] = set()
    for unit in units:
        if unit in seen:
            return unit
        seen.add(unit)
    raise AssertionError("no double")


def _name(layout: Layout, unit: Unit) -> str:
    return f"{layout.chunk_name(unit.chunk)} {unit.microbatch}.{unit.sub_microbatch}"


@dataclass(frozen=True, slots=True)
class CollectiveOrder:
    """Chunk numbers of one rank, in the order of their collectives.

    Attributes
    ----------
    unshard : tuple of int
        UNSHARD: where there are replicas, every chunk, as a forward comes to them.
    reduce : tuple of int
        REDUCE_GRAD: trained chunks that exist several times, as a backward comes to them. A chunk without work in an
        iteration is reduced too: other replicas wait for its share.
    """

    unshard: tuple[int, ...]
    reduce: tuple[int, ...]


def collective_order(layout: Layout, rank: int) -> CollectiveOrder:
    """Order of a rank's collectives: decided by the layout alone."""
    several = layout.parallelism.data > 1
    unshard, reduce = [], []
    for number, chunk in enumerate(layout.chunks):
        if chunk.rank != rank:
            continue
        module = layout.module(chunk.module)
        if several:
            unshard.append(number)
        everywhere = module.on_ranks == "replicated" and layout.num_ranks > 1
        if (several or everywhere or layout.deals(chunk.module)) and not module.frozen:
            reduce.append(number)
    return CollectiveOrder(tuple(unshard), tuple(reversed(reduce)))
