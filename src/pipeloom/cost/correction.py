"""Correction: what measured iterations say about predicted costs."""

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
# A measured rate of nothing stands for a link that no message of this size could fill.
_LEAST_S_PER_BYTE = 1e-15
_LEAST_S = 1e-9

Line = tuple[float, float]
"""A link: seconds of an empty message, and seconds per byte."""


class Slowed(Protocol):
    """What says how slow ranks are: a correction, or costs that were corrected by it."""

    @property
    def slowness(self) -> Sequence[float]:
        """Per rank, how many times longer it computes than most; beyond its end 1, so that empty says: all alike."""
        ...


def slowness_of(slowed: Slowed, rank: int) -> float:
    """How many times longer a rank computes than most."""
    return slowed.slowness[rank] if rank < len(slowed.slowness) else 1.0


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Corrections of a cost model, learned while training ran.

    Attributes
    ----------
    modules : dict
        Per module, measured over predicted seconds of (forward, backward). Absent means 1.
    link : (float, float) or None
        Measured seconds of an empty message between two ranks, and seconds per byte; None: nothing was measured
        yet, and the cluster's own link holds.
    hosts : tuple of int
        Number of the host of every pipeline rank where they are on several; empty: as the cluster says.
    links : tuple of HostLink
        What was measured of links by the hosts of their ends, in place of the cluster's own.
    slowness : tuple of float
        Per pipeline rank, how many times longer it computes than the modules' factors say; beyond its end 1.
    """

    modules: dict[str, tuple[Factor, Factor]] = {}
    link: tuple[Seconds, Magnitude] | None = None
    slowness: tuple[Factor, ...] = ()
    hosts: tuple[Number, ...] = ()
    links: tuple[HostLink, ...] = ()

    def corrected(self, rank: RankSpec) -> RankSpec:
        """A cluster's ranks with the links that were measured."""
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
        """Move links towards what was found of some, by the hosts of their ends; None: the one for all pairs."""
        links = {link.hosts: link for link in self.links}
        link = self.link
        for pair, line in lines.items():
            if pair is None:
                link = _towards(link, line, rate)
            else:
                links[pair] = host_link(pair, _towards(links[pair].line if pair in links else None, line, rate))
        return msgspec.structs.replace(self, link=link, links=tuple(links[pair] for pair in sorted(links)))

    def of_ranks(self, num_ranks: int) -> tuple[float, ...]:
        """The slowness of so many ranks."""
        return tuple(slowness_of(self, rank) for rank in range(num_ranks))

    def __post_init__(self) -> None:
        """Refuse factors and links that cannot be."""
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
    """A link between hosts from seconds of an empty message and seconds per byte."""
    return HostLink(hosts, 1.0 / max(line[1], _LEAST_S_PER_BYTE), line[0])


def fit_link(messages: Sequence[tuple[int, float]]) -> Line | None:
    """Fit a link to messages: (bytes, seconds under way) to seconds of an empty one, and seconds per byte.

    Of the lines through the medians of any two sizes, level ones and those without latency included, the one that
    is least off: messages that were held up by something else do not bend it. Off is the logarithm of the ratio, for
    which twice as long is as far as half as long; relative errors would favour lines that are too quick. None where
    there is no message.
    """
    if not messages:
        return None
    size, seconds = (np.array(column, dtype=float) for column in zip(*sorted(messages), strict=True))
    # Sizes in the order of magnitude of one another count as one.
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
