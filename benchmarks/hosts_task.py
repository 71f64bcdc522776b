"""The sleeping model with rows of some kB: what its messages took, and plans that know links in turn; for `hosts`."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

import pipeloom as pl
from benchmarks import slow_task
from benchmarks.slow_task import batches, describe
from pipeloom.cost import Correction
from pipeloom.cost.correction import host_link
from pipeloom.plan import Answer
from pipeloom.plan.measured import Measured, fit_links
from pipeloom.runtime.execute.result import Calibrator
from pipeloom.spec import host_pair

__all__ = ["batches", "build_model", "describe"]

_NEVER = 10**9


def build_model(seed: int, layers: int, width: int, stretch: int, file: str) -> pl.Model:
    """Build the model; what iterations measure goes to a file, a line each.

    Parameters
    ----------
    layers : int
        Of each of both modules.
    width : int
        Numbers in a row.
    stretch : int
        So many iterations in turn are planned with one link for all pairs, and with that of each; 0: always with each.
    """
    global _turns
    if _turns is None:
        # A process builds the model more than once.
        _turns = _Turns(stretch, Path(file))
        patch.object(Calibrator, "learn", _turns.learn(Calibrator.learn)).start()
    return slow_task.build_model(seed, layers, slower=1.0, blind=_NEVER, width=width)


class _Turns:
    """Knows all links, and hides them from the plans of every second stretch of iterations."""

    def __init__(self, stretch: int, file: Path) -> None:
        self.stretch, self.file = stretch, file
        self.iteration = 0
        self.known: Correction | None = None
        self.alike = Correction()

    def learn(self, before: Any) -> Any:
        """What a calibrator does in place of its own."""

        def learn(calibrator: Calibrator, answer: Answer, used: Correction, measured: Measured) -> None:
            calibrator.correction = self.known or calibrator.correction
            before(calibrator, answer, used, measured)
            self.known = calibrator.correction
            messages = measured.messages(answer.plan)
            self.alike = self.alike.towards(fit_links(messages, ()), 0.3)
            self._write(used, messages)
            self.iteration += 1
            if self.stretch and self.iteration // self.stretch % 2 == 0 and self.alike.link is not None:
                hosts = sorted(set(self.known.hosts))
                same = [host_link(pair, self.alike.link) for pair in combinations_with_replacement(hosts, 2)]
                calibrator.correction = msgspec.structs.replace(self.known, links=tuple(same))

        return learn

    def _write(self, used: Correction, messages: list[Any]) -> None:
        lines = {link.hosts: link.line for link in used.links}
        rows = []
        for each in messages:
            pair = host_pair(used.hosts, each.sender, each.receiver)
            if each.was_waited_for and pair in lines:
                latency_s, s_per_byte = lines[pair]
                planned_s = latency_s + s_per_byte * each.num_bytes
                rows.append([*pair, each.num_bytes, planned_s, each.under_way_ns / 1e9])
        blind = len({link.line for link in used.links}) == 1
        with self.file.open("a") as file:
            file.write(json.dumps({"blind": blind, "messages": rows}) + "\n")


_turns: _Turns | None = None
