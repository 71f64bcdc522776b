"""Data flow of a plan without its packing, derived from the names of its chunks and messages.

A message names its consumer only if its producer has several consumers. Without a packing, it is therefore unknown
which part of a module goes into which part of the next module. If several consumers are possible, the flow contains
only conditions that hold for each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from pipeloom.plan.action import Action, Verb
from pipeloom.plan.table import PlanTable, code
from pipeloom.spec import Layout

Move = tuple[int, int, int, int, int]
"""Row of the source, row of the destination, row of the producer, number of the target, and 1 for a gradient."""


class _Part(NamedTuple):
    """A unit, with the name of its chunk split into the module and the index of the chunk (-1: no index)."""

    module: str
    place: int
    microbatch: int
    sub_microbatch: int

    def moved(self, places: int) -> _Part:
        """Return the same part ``places`` chunks later."""
        return self._replace(place=self.place + places)


def flow_of(table: PlanTable, layout: Layout | None) -> tuple[list[Move], list[tuple[int, str]], list[int]]:
    """Return the moves between units of a plan, invalid rows with their problems, and rows with unknown inputs.

    A row has unknown inputs if it is a forward whose inputs cannot all be derived from the plan. Without a layout,
    messages show which modules follow each other.
    """
    flow = _Flow(table, layout)
    moves, faults = list(flow.inside_modules()), []
    for row in table.messages.tolist():
        producer = flow.part(flow.listed[row])
        if producer not in flow.forward:
            faults.append((row, "is about a unit that no rank computes"))
        elif table.verb[row] == code(Verb.RECV_F):
            moves += flow.by_message(row, producer)
    if layout is not None:
        moves += flow.between_modules(layout)
        faults += flow.incomplete_parts(layout)
    return moves, faults, sorted(flow.unknown)


class _Flow:
    """Rows of the forwards of a plan, and of the backwards (B or I) that give gradients, by unit."""

    def __init__(self, table: PlanTable, layout: Layout | None) -> None:
        self.table = table
        self.after = None if layout is None else {module.name: module.after for module in layout.modules}
        self.listed = [action for actions in table.plan.ranks for action in actions]
        self.forward = {self.part(a): row for row, a in enumerate(self.listed) if a.verb is Verb.F}
        self.backward = {self.part(a): row for row, a in enumerate(self.listed) if a.verb in (Verb.B, Verb.I)}
        self.unknown: set[int] = set()
        self.of_rank: defaultdict[tuple[int, int], list[_Part]] = defaultdict(list)
        for part, row in self.forward.items():
            self.of_rank[int(table.rank[row]), part.microbatch].append(part)

    def part(self, action: Action) -> _Part:
        module, _, place = action.chunk.rpartition(".")
        if not (module and place.isdecimal()):
            module, place = action.chunk, "-1"
        return _Part(module, int(place), action.microbatch, action.sub_microbatch)

    def inside_modules(self) -> Iterator[Move]:
        """Yield the moves between chunks of one module, where a part stays whole."""
        target = self.table.targets.get(("", ""), -1)
        for above, row in self.forward.items():
            below = above.moved(1)
            if below in self.forward:
                yield row, self.forward[below], row, target, 0
                if above in self.backward and below in self.backward:
                    yield self.backward[below], self.backward[above], row, target, 1

    def by_message(self, row: int, producer: _Part) -> Iterator[Move]:
        """Yield the moves from the producer of a received message to the units that may take it."""
        action = self.listed[row]
        if not action.target and not action.stream and producer.moved(1) in self.forward:
            return
        takers = [part for part in self.of_rank[int(self.table.rank[row]), producer.microbatch] if part != producer]
        if not action.stream:
            takers = [part for part in takers if part.moved(-1) not in self.forward and part.module != producer.module]
            if self.after is not None:
                takers = [part for part in takers if producer.module in self.after.get(part.module, ())]
        if action.target:
            takers = [part for part in takers if action.target in _names(part)]
        if not takers:
            return
        if len(takers) > 1:
            self.unknown.update(self.forward[part] for part in takers)
        made, target = self.forward[producer], self.table.targets[action.target, action.stream]
        yield made, max(self.forward[part] for part in takers), made, target, 0
        gives = [self.backward[part] for part in takers if part in self.backward]
        if gives and producer in self.backward:
            yield min(gives), self.backward[producer], made, target, 1

    def incomplete_parts(self, layout: Layout) -> Iterator[tuple[int, str]]:
        """Yield parts of pipelined modules that do not pass all chunks."""
        for module in layout.modules:
            last = len(layout.chunks_of(module.name)) - 1
            for part, row in self.forward.items() if module.on_ranks == "pipelined" else ():
                for step, end in ((-1, 0), (1, last)):
                    other = part.moved(step)
                    if part.module == module.name and part.place != end and other not in self.forward:
                        unit = f"{module.name}.{other.place} {part.microbatch}.{part.sub_microbatch}"
                        yield row, f"belongs to a part whose unit {unit} has no F"

    def between_modules(self, layout: Layout) -> Iterator[Move]:
        """Yield moves on one rank between two modules, if a microbatch is one part in the second module.

        This part takes data of each preceding module, though not of each part.
        """
        firsts: defaultdict[tuple[str, int], list[_Part]] = defaultdict(list)
        lasts: defaultdict[tuple[str, int], list[_Part]] = defaultdict(list)
        for part in self.forward:
            if part.moved(-1) not in self.forward:
                firsts[part.module, part.microbatch].append(part)
            if part.moved(1) not in self.forward:
                lasts[part.module, part.microbatch].append(part)
        for module in layout.modules:
            for (name, microbatch), takers in firsts.items():
                for above in module.after if name == module.name else ():
                    if len(takers) == 1:
                        yield from self._between(lasts[above, microbatch], takers[0])
                    ranks = {int(self.table.rank[self.forward[part]]) for part in lasts[above, microbatch]}
                    mine = [self.forward[part] for part in takers]
                    if len(takers) > 1 or len(ranks) > 1:
                        self.unknown.update(row for row in mine if int(self.table.rank[row]) in ranks)

    def _between(self, producers: list[_Part], taker: _Part) -> Iterator[Move]:
        rank, taken = self.table.rank, self.forward[taker]
        made = [self.forward[part] for part in producers]
        if not made or any(rank[row] != rank[taken] for row in made):
            return
        yield min(made), taken, min(made), -1, 0
        back = [self.backward[part] for part in producers if part in self.backward]
        if back and taker in self.backward:
            yield self.backward[taker], max(back), min(made), -1, 1


def _names(part: _Part) -> tuple[str, str]:
    """Return the names that a message may use for its consumer; see `pipeloom.plan.routes.target_word`."""
    chunk = f"{part.module}.{part.place}"
    return chunk, f"{chunk}:{part.sub_microbatch}"
