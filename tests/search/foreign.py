"""Instance files as strangers might write them: odd graphs within the letter of ``docs/formats.md``.

Nothing here knows of modules' chains or of microbatches that pass all ranks: tasks lie anywhere, edges go from
anything earlier to anything later, times are written as decimal seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def foreign_document(seed: int, *, room: float | None = None) -> dict[str, Any]:
    """One `pipeloom.instance/1`, feasible since one order of all tasks fits.

    Parameters
    ----------
    room : float, optional
        Capacity over what that order needs at its fullest on each rank, at least 1; None: sometimes no limit,
        sometimes 1 to 3.
    """
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 5))
    if room is None and rng.random() < 0.7:
        room = float(rng.choice([1.0, 1.0, 1.2, 2.0, 3.0]))
    jobs = int(rng.integers(1, 5))
    jitter = rng.random() < 0.5
    across = rng.random() < 0.3  # edges between the parts of the graph
    columns: dict[str, list[Any]] = {
        key: [] for key in ("kind", "rank", "duration_s", "pair", "segment", "microbatch", "module")
    }
    pairs: dict[str, list[Any]] = {"activation_bytes": [], "weight_gradient_bytes": []}
    candidates: list[list[dict[str, Any]]] = []
    edges: list[tuple[int, int, float, int]] = []
    scale = 10 ** int(rng.integers(-6, 2))
    bytes_scale = int(rng.choice([1, 1, 10**9]))
    numbers = rng.permutation(10_000).tolist()  # of microbatches: with gaps, in no order
    previous_ends: list[int] = []

    def seconds(base: float) -> float:
        if rng.random() < 0.08:
            return 0.0
        return round(base * (1 + 0.3 * float(rng.random())) * scale if jitter else base * scale, 9)

    def task(kind: str, pair: int, rank: int, base: float, number: int, module: str) -> int:
        values = (kind, rank, seconds(base), pair, len(columns["kind"]), number, module)
        for key, value in zip(columns, values, strict=True):
            columns[key].append(value)
        return len(columns["kind"]) - 1

    for job in range(jobs):
        number = numbers[job]
        open_pairs: list[tuple[int, int, str, float]] = []
        ends: list[int] = []
        first = len(columns["kind"])
        for _ in range(int(rng.integers(1, 7))):
            rank, pair, module = (int(rng.integers(ranks)), len(pairs["activation_bytes"]), f"part {rng.integers(3)}")
            base = float(rng.integers(1, 20))
            pairs["activation_bytes"].append(int(rng.integers(0, 9)) * bytes_scale)
            pairs["weight_gradient_bytes"].append(int(rng.integers(0, 9)) * bytes_scale)
            made = task("F", pair, rank, base, number, module)
            for source in _some(rng, list(range(first, made)), 2) + (_some(rng, previous_ends, 1) if across else []):
                held = _held(rng, columns, source, made, bytes_scale)
                edges.append((source, made, _delay(rng, scale), held))
            form = str(rng.choice(["B", "B", "IW", "none"]))
            candidates.append([])
            if form != "none":
                open_pairs.append((pair, rank, form, base))
            else:
                candidates[-1].append(_candidate(columns, pairs, made, None, None))
        for pair, rank, form, base in reversed(open_pairs):
            made = task("B" if form == "B" else "I", pair, rank, 2 * base, number, "back")
            edges += [(s, made, _delay(rng, scale), 0) for s in _some(rng, list(range(first, made)), 2)]
            forward = next(t for t in range(made) if columns["pair"][t] == pair and columns["kind"][t] == "F")
            weight = None
            if form == "IW":
                weight = task("W", pair, rank, base, number, "weights")
            candidates[pair].append(_candidate(columns, pairs, forward, made, weight))
            ends.append(made)
        previous_ends = ends
    if rng.random() < 0.4:
        for row in candidates:
            for _ in range(int(rng.integers(0, 4))):
                row.append(_leaner(rng, row[-1], scale))
    else:
        candidates = []
    document: dict[str, Any] = {
        "format": "pipeloom.instance/1",
        "name": f"foreign {seed}",
        "num_ranks": ranks,
        "memory_capacity_bytes": None,
        "memory_static_bytes": [int(x) * bytes_scale for x in rng.integers(0, 5, ranks)],
        "tasks": columns,
        "pairs": {**pairs, "candidates": candidates or None},
        "edges": {
            "source": [e[0] for e in edges],
            "target": [e[1] for e in edges],
            "delay_s": [e[2] for e in edges],
            "bytes": [e[3] for e in edges] if any(e[3] for e in edges) else None,
        },
    }
    if rng.random() < 0.3:
        document["pairs"]["weight_gradient_bytes"] = None
        for row in document["pairs"]["candidates"] or []:
            for choice in row:
                if "weight_gradient_bytes" in choice:
                    choice["weight_gradient_bytes"] = choice["activation_bytes"]
    if room is not None:
        static = document["memory_static_bytes"]
        need = _needs(document)
        document["memory_capacity_bytes"] = [s + int(np.ceil(room * n)) for s, n in zip(static, need, strict=True)]
    return document


def _some(rng: np.random.Generator, from_: list[int], most: int) -> list[int]:
    count = min(len(from_), int(rng.integers(0, most + 1)))
    return sorted(rng.choice(from_, size=count, replace=False).tolist()) if count else []


def _delay(rng: np.random.Generator, scale: float) -> float:
    return round(float(rng.random()) * scale, 9) if rng.random() < 0.4 else 0.0


def _held(rng: np.random.Generator, columns: dict[str, list[Any]], source: int, target: int, scale: int) -> int:
    same = columns["rank"][source] == columns["rank"][target]
    return int(rng.integers(1, 5)) * scale if same and rng.random() < 0.3 else 0


def _candidate(
    columns: dict[str, list[Any]], pairs: dict[str, list[Any]], forward: int, back: int | None, weight: int | None
) -> dict[str, Any]:
    """The base: what the task and pair columns say."""
    pair = columns["pair"][forward]
    choice = {
        "strategy": "keep",
        "forward_s": columns["duration_s"][forward],
        "activation_bytes": pairs["activation_bytes"][pair],
    }
    if weight is not None and back is not None:
        choice |= {
            "backward_input_s": columns["duration_s"][back],
            "backward_weight_s": columns["duration_s"][weight],
            "weight_gradient_bytes": pairs["weight_gradient_bytes"][pair],
        }
    elif back is not None:
        choice["backward_s"] = columns["duration_s"][back]
    return choice


def _leaner(rng: np.random.Generator, last: dict[str, Any], scale: float) -> dict[str, Any]:
    """Another way for the pair: fewer bytes, some of the times longer, sometimes a whole backward."""
    choice = dict(
        last, strategy=f"other {rng.integers(9)}", activation_bytes=int(last["activation_bytes"] * rng.random())
    )
    if "backward_s" in choice:
        choice["backward_s"] = round(choice["backward_s"] + float(rng.integers(0, 5)) * scale, 9)
    if "backward_input_s" in choice:
        choice["weight_gradient_bytes"] = int(last["weight_gradient_bytes"] * rng.random())
        if rng.random() < 0.5:
            choice["backward_input_s"] = round(choice["backward_input_s"] + choice["backward_weight_s"], 9)
            choice["backward_weight_s"] = 0.0
    return choice


def _needs(document: dict[str, Any]) -> list[int]:
    """Most that every rank holds above its static bytes when tasks run in the order of the file, one at a time."""
    tasks, pairs, edges = document["tasks"], document["pairs"], document["edges"]
    gradient = pairs["weight_gradient_bytes"] or pairs["activation_bytes"]
    kinds_of: dict[int, str] = {}
    for kind, pair in zip(tasks["kind"], tasks["pair"], strict=True):
        kinds_of[pair] = kinds_of.get(pair, "") + kind
    held, most = [0] * document["num_ranks"], [0] * document["num_ranks"]
    for t, (kind, pair, rank) in enumerate(zip(tasks["kind"], tasks["pair"], tasks["rank"], strict=True)):
        if kind == "F":
            held[rank] += pairs["activation_bytes"][pair]
        most[rank] = max(most[rank], held[rank])
        if kind in "BI" or kinds_of[pair] == "F":
            held[rank] -= pairs["activation_bytes"][pair]
        if kind == "I":
            held[rank] += gradient[pair]
        if kind == "W":
            held[rank] -= gradient[pair]
        for source, target, amount in zip(
            edges["source"], edges["target"], edges["bytes"] or [0] * len(edges["source"]), strict=True
        ):
            held[rank] += amount * ((source == t) - (target == t))
        most[rank] = max(most[rank], held[rank])
    return most
