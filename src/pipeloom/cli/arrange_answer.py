"""What `pipeloom arrange` says of its answer: lines, a document, a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.cli.output import draw
from pipeloom.report import make_track, share_text, size_text, time_text

if TYPE_CHECKING:
    from pipeloom.layout.cooptimise import CooptimisedPipeline, LayerChain
    from pipeloom.report import Track


@dataclass(frozen=True, slots=True)
class Standard:
    """1F1B on stages of equally many layers: what the answer is compared with, on the same costs."""

    makespan_ns: int
    peak_bytes: int
    track: Track


def compare(chain: LayerChain) -> Standard | None:
    """Run 1F1B without a memory limit; None where there are fewer layers than ranks."""
    from pipeloom.layout.cooptimise import graph_of
    from pipeloom.layout.cooptimise.standard import stages
    from pipeloom.search import one_f_one_b
    from pipeloom.timeline import simulate

    if chain.num_layers < chain.num_ranks:
        return None
    graph = graph_of(chain.with_capacity(None), stages(chain))
    order = one_f_one_b(graph)
    timeline = simulate(graph, order)
    track = make_track("1F1B, equal layers", graph, order, timeline)
    return Standard(timeline.makespan_ns, int(timeline.peak_bytes.max()), track)


def lines(found: CooptimisedPipeline, standard: Standard | None) -> list[str]:
    """The answer in a few lines."""
    ns, chain = found.timeline.makespan_ns, found.chain
    said = [
        f"makespan {time_text(ns)}, lower bound over all placements {time_text(found.lower_bound.ns)} "
        f"({found.lower_bound.name}), gap {share_text(found.gap)}, {found.evaluations} placements tried"
    ]
    if standard is not None:
        said.append(
            f"1F1B on equal stages {time_text(standard.makespan_ns)}: "
            f"{share_text(1 - ns / standard.makespan_ns)} less; "
            f"peak memory {size_text(int(found.timeline.peak_bytes.max()))}, 1F1B {size_text(standard.peak_bytes)}"
        )
    for rank in range(chain.num_ranks):
        mine = [f"{first}-{last}" if last > first else str(first) for first, last in found.placement.layers_of(rank)]
        held = size_text(int(found.timeline.peak_bytes[rank]))
        said.append(f"rank {rank}: layers {', '.join(mine) or 'none'}; peak memory {held}")
    return said


def document(found: CooptimisedPipeline, standard: Standard | None) -> dict[str, Any]:
    """The answer for ``--json``."""
    return {
        "name": found.chain.name,
        "makespan_s": found.timeline.makespan_ns / 1e9,
        "lower_bound_s": found.lower_bound.ns / 1e9,
        "lower_bound": found.lower_bound.name,
        "gap": found.gap,
        "one_f_one_b_s": None if standard is None else standard.makespan_ns / 1e9,
        "peak_memory_bytes": found.timeline.peak_bytes.tolist(),
        "first_layers": list(found.placement.cuts[:-1]),
        "ranks": list(found.placement.ranks),
        "strategies": found.strategies,
        "evaluations": found.evaluations,
        "elapsed_s": found.elapsed_s,
    }


def write_page(page: Path, found: CooptimisedPipeline, standard: Standard | None) -> list[str]:
    """Timelines of 1F1B and of the answer, with the search's own account above them."""
    tracks = [] if standard is None else [standard.track]
    tracks.append(make_track("arranged", found.graph, found.schedule, found.timeline, found.lower_bound))
    return draw(tracks, title=f"{found.chain.name}: arranged", note=account(found), html_file=page)


def account(found: CooptimisedPipeline) -> str:
    """What the search did and why it chose this: loads, starts, and the moves that brought new bests."""
    from pipeloom.layout.cooptimise.layer_chain import rank_work_ns

    loads = rank_work_ns(found.chain, found.placement).tolist()
    by_bests = sorted(found.moves.items(), key=lambda item: -item[1][2])[:5]
    starts = ", ".join(
        f"{r.start.num_chunks} chunks: {time_text(r.start_ns)} to {time_text(r.best_ns)}" for r in found.reports
    )
    return " ".join(
        [
            *(f"{line}." for line in lines(found, None)),
            f"Work per microbatch by rank: {', '.join(time_text(load) for load in loads)}.",
            f"{found.method[0].upper()}{found.method[1:]}, from {len(found.reports)} starts ({starts}).",
            "Changes that brought most new bests: " + ", ".join(f"{name} {c[2]}" for name, c in by_bests) + ".",
            "Times are planned from the given layer costs.",
        ]
    )
