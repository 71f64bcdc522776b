"""`Correction`: adjusts predicted costs to measured iterations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from pipeloom.bounds import Factor, Magnitude, Number, Seconds
from pipeloom.errors import InputError
from pipeloom.spec import HostLink, RankSpec

_MOST_SIZES = 8
# A measured rate of 0 means that no message of this size filled the link.
_LEAST_S_PER_BYTE = 1e-15
_LEAST_S = 1e-9

Line = tuple[float, float]
"""Seconds of an empty message over a link, and seconds per byte."""


class RankSlowness(Protocol):
    """Protocol of corrections and of corrected costs."""

    @property
    def slowness(self) -> Sequence[float]:
        """Compute time of each rank relative to most ranks; 1 for ranks beyond its end."""


def slowness_of(slowed: RankSlowness, rank: int) -> float:
    """Return the compute time of a rank relative to most ranks."""
    return slowed.slowness[rank] if rank < len(slowed.slowness) else 1.0


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections of a cost model, learned during training."""

    modules: dict[str, tuple[Factor, Factor]] = {}
    """Measured over predicted seconds of (forward, backward) by module; 1 if absent."""
    link: tuple[Seconds, Magnitude] | None = None
    """Measured seconds of an empty message between two ranks, and seconds per byte. None: not measured yet; the
    cluster's link applies."""
    slowness: tuple[Factor, ...] = ()
    """Compute time of each pipeline rank relative to the modules' factors. Ranks beyond its end have 1."""
    hosts: tuple[Number, ...] = ()
    """Host number of every pipeline rank, if they are on several hosts. Empty: as in the cluster."""
    links: tuple[HostLink, ...] = ()
    """Measured links between hosts, which replace the cluster's."""

    def corrected(self, rank: RankSpec) -> RankSpec:
        """Return a cluster's ranks with the measured links."""
        changes: dict[str, object] = {}
        if self.link is not None:
            latency_s, s_per_byte = self.link
            changes |= {"link_latency_s": latency_s, "link_bytes_per_s": 1.0 / max(s_per_byte, _LEAST_S_PER_BYTE)}
        if self.hosts:
            changes["hosts"] = self.hosts
        if self.links:
            found = {link.hosts: link for link in (*rank.links, *self.links)}
            changes["links"] = tuple(found[pair] for pair in sorted(found))
        return msgspec.structs.replace(rank, **changes) if changes else rank

    def towards(self, lines: Mapping[tuple[int, int] | None, Line], rate: float = 1.0) -> Correction:
        """Move links toward measured lines by the fraction ``rate``.

        Keys of ``lines`` are the hosts of a link; None is the link of all other pairs.
        """
        links = {link.hosts: link for link in self.links}
        link = self.link
        for pair, line in lines.items():
            if pair is None:
                link = _towards(link, line, rate)
            else:
                links[pair] = host_link(pair, _towards(links[pair].line if pair in links else None, line, rate))
        return msgspec.structs.replace(self, link=link, links=tuple(links[pair] for pair in sorted(links)))

    def of_ranks(self, num_ranks: int) -> tuple[float, ...]:
        """Return the slowness of ``num_ranks`` ranks."""
        return tuple(slowness_of(self, rank) for rank in range(num_ranks))

    def __post_init__(self) -> None:
        for name, pair in self.modules.items():
            if not all(0 < factor < float("inf") for factor in pair):
                raise InputError(f"correction.modules[{name!r}]", f"{pair} are not positive and finite")
        if self.link is not None and not all(0 <= part < float("inf") for part in self.link):
            raise InputError("correction.link", f"{self.link} are not finite and at least 0")
        if not all(0 < factor < float("inf") for factor in self.slowness):
            raise InputError("correction.slowness", f"{self.slowness} are not positive and finite")


def _towards(old: Line | None, new: Line, rate: float) -> Line:
    if old is None or rate == 1.0:
        return new
    return old[0] + rate * (new[0] - old[0]), old[1] + rate * (new[1] - old[1])


def host_link(hosts: tuple[int, int], line: Line) -> HostLink:
    """Return a link between hosts from seconds of an empty message and seconds per byte."""
    return HostLink(hosts, 1.0 / max(line[1], _LEAST_S_PER_BYTE), line[0])


def fit_link(messages: Sequence[tuple[int, float]]) -> Line | None:
    """Fit a link to messages of (bytes, seconds): return seconds of an empty message and seconds per byte.

    Candidates are the lines through the medians of any two sizes, including lines of constant time and lines without
    latency. The result is the one with the smallest total error, so delayed messages do not bend it. The error is the
    absolute logarithm of the ratio, because relative errors would favor lines that are too fast. Return None if there
    are no messages.
    """
    if not messages:
        return None
    size, seconds = (np.array(column, dtype=float) for column in zip(*sorted(messages), strict=True))
    # Sizes of similar magnitude count as one.
    groups = np.array_split(np.arange(len(size)), min(_MOST_SIZES, len(np.unique(size))))
    points = [(float(np.median(size[group])), float(np.median(seconds[group]))) for group in groups]
    lines = [(slow, 0.0) for _, slow in points] + [(0.0, slow / large) for large, slow in points if large]
    for (small, quick), (large, slow) in itertools.combinations(points, 2):
        if large > small and slow >= quick:
            rate = (slow - quick) / (large - small)
            if quick >= rate * small:
                lines.append((quick - rate * small, rate))
    measured = np.log(np.maximum(seconds, _LEAST_S))

    def off(line: Line) -> float:
        return float(np.abs(np.log(np.maximum(line[0] + line[1] * size, _LEAST_S)) - measured).sum())

    return min(lines, key=off)
