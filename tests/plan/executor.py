"""A naive executor of a plan's text: it computes with sets of names, and shares no code with the verifier.

It knows which unit takes the output of which other unit, as the task graph says, and runs the lines of every rank as
far as they go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pipeloom.taskgraph import FORWARD, NO_TASK, TaskGraph

Unit = tuple[str, str]
"""Chunk, and microbatch with sub-microbatch, as a plan writes them."""
SENDS = {"SEND_F": "F", "SEND_B": "B"}
RECEIVES = {"RECV_F": "F", "RECV_B": "B"}
WAITS = {"WAIT_F": "F", "WAIT_B": "B", "WAIT_SEND_F": "F", "WAIT_SEND_B": "B"}


def units_of(graph: TaskGraph, names: tuple[str, ...]) -> list[Unit]:
    """The unit of every pair."""
    assert graph.labels is not None
    return [(names[label.chunk], f"{label.microbatch}.{label.sub_microbatch}") for label in graph.labels]


class Executor:
    """What units need, and a run of a plan under it.

    Parameters
    ----------
    graph : TaskGraph
        Without streams, of the iteration that plans are for.
    names : tuple of str
        Of the layout's chunks.
    """

    def __init__(self, graph: TaskGraph, names: tuple[str, ...]) -> None:
        units = units_of(graph, names)
        self.trained = {units[p] for p in range(graph.num_pairs) if graph.backward_of[p] != NO_TASK}
        self.units = set(units)
        self.producers: defaultdict[Unit, set[Unit]] = defaultdict(set)
        self.consumers: defaultdict[Unit, set[Unit]] = defaultdict(set)
        for source, target in zip(graph.edge_source.tolist(), graph.edge_target.tolist(), strict=True):
            above, below = units[graph.pair[source]], units[graph.pair[target]]
            if graph.kind[source] == FORWARD == graph.kind[target]:
                self.producers[below].add(above)
            elif graph.kind[source] != FORWARD:
                self.consumers[below].add(above)

    def run(self, text: str) -> str:
        """Run a plan's text; return what is wrong, or nothing."""
        lines: list[list[list[str]]] = []
        for line in text.splitlines()[1:]:
            if line.startswith("rank "):
                lines.append([])
            elif line.strip():
                lines[-1].append(line.split())
        run = _Run(self, lines)
        moved = True
        while moved:
            moved = False
            for rank in range(len(lines)):
                moved |= run.advance(rank)
            if run.problem:
                return run.problem
        stuck = [rank for rank, at in enumerate(run.at) if at < len(lines[rank])]
        if stuck:
            return f"rank {stuck[0]} waits for ever"
        if {unit for unit, kind in run.done if kind == "F"} != self.units:
            return "forwards are missing"
        if not all((unit, "B") in run.done or {(unit, "I"), (unit, "W")} <= run.done for unit in self.trained):
            return "backwards are missing"
        return ""


class _Run:
    def __init__(self, executor: Executor, lines: list[list[list[str]]]) -> None:
        self.executor, self.lines, self.problem = executor, lines, ""
        self.at = [0] * len(lines)
        self.done: set[tuple[Unit, str]] = set()
        self.where: dict[Unit, int] = {}
        self.activations: list[set[Unit]] = [set() for _ in lines]
        self.gradients: list[set[tuple[Unit, Unit]]] = [set() for _ in lines]
        """Per rank, units and the consumers whose gradients of their outputs it has."""
        self.sent: dict[tuple[object, ...], frozenset[Unit]] = {}
        self.received: set[tuple[object, ...]] = set()

    def advance(self, rank: int) -> bool:
        """Run a rank until it waits; whether it moved."""
        begin = self.at[rank]
        while not self.problem and self.at[rank] < len(self.lines[rank]):
            words = self.lines[rank][self.at[rank]]
            if words[0] in WAITS:
                if not self.arrived(rank, words):
                    break
            elif words[0] in SENDS or words[0] in RECEIVES:
                self.post(rank, words)
            else:
                self.compute(rank, words)
            self.at[rank] += 1
        return self.at[rank] > begin

    def compute(self, rank: int, words: list[str]) -> None:
        if len(words) < 3:
            return
        verb, unit = words[0], (words[1], words[2])
        before = {"F": set(), "B": {"F"}, "I": {"F"}, "W": {"F", "I"}}.get(verb)
        if before is None:
            return
        self.check(unit in self.executor.units, f"{words} is no unit")
        self.check((unit, verb) not in self.done, f"{words} is done twice")
        self.check(self.where.setdefault(unit, rank) == rank, f"{words} is elsewhere")
        self.check(all((unit, kind) in self.done for kind in before), f"{words} is too early")
        self.done.add((unit, verb))
        if verb == "F":
            missing = self.executor.producers[unit] - self.activations[rank]
            self.activations[rank].add(unit)
        else:
            needed = {(unit, consumer) for consumer in self.executor.consumers[unit]} if verb != "W" else set()
            missing = {consumer for _, consumer in needed - self.gradients[rank]}
            self.gradients[rank] |= {(above, unit) for above in self.executor.producers[unit]}
        self.check(not missing, f"{words} lacks {missing}")

    def post(self, rank: int, words: list[str]) -> None:
        unit, fields = (words[1], words[2]), dict(word.split("=") for word in words[3:])
        peer = int(fields.get("to", fields.get("from", "-1")))
        if words[0] in RECEIVES:
            self.received.add((peer, rank, RECEIVES[words[0]], unit, fields.get("target", "")))
            return
        held: Iterable[Unit] = [unit]
        if words[0] == "SEND_B":
            held = [consumer for above, consumer in self.gradients[rank] if above == unit]
            if target := fields.get("target", ""):
                chunk, _, sub = target.partition(":")
                held = [c for c in held if c[0] == chunk and (not sub or c[1].partition(".")[2] == sub)]
            self.check(bool(list(held)), f"{words} has nothing to send")
        else:
            self.check(unit in self.activations[rank] and self.where.get(unit) == rank, f"{words} is too early")
        self.sent[rank, peer, SENDS[words[0]], unit, fields.get("target", "")] = frozenset(held)

    def arrived(self, rank: int, words: list[str]) -> bool:
        unit, fields = (words[1], words[2]), dict(word.split("=") for word in words[3:])
        back, target = WAITS[words[0]], fields.get("target", "")
        if words[0].startswith("WAIT_SEND"):
            return any(key[0] == rank and key[2:] == (back, unit, target) and key in self.received for key in self.sent)
        for key, held in self.sent.items():
            if key[1] == rank and key[2:] == (back, unit, target) and key in self.received:
                if back == "F":
                    self.activations[rank].add(unit)
                else:
                    self.gradients[rank] |= {(unit, consumer) for consumer in held}
                return True
        return False

    def check(self, holds: bool, problem: str) -> None:
        if not holds and not self.problem:
            self.problem = problem
