"""What a layout costs on sampled iterations."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.spec import Layout


@dataclass(frozen=True, slots=True)
class LayoutTrial:
    """What a layout costs on the sampled iterations.

    Attributes
    ----------
    name : str
    layout : Layout
    seconds : float
        Mean planned iteration; infinite where it does not fit. A layout that its lower bound rules out, or its bound
        and the first plans, is not planned further: it is given what was known, and ``ruled_out`` is true.
    bound_s : float
        Mean lower bound of its iterations.
    problem : str
        Why it does not fit, or nothing.
    """

    name: str
    layout: Layout
    seconds: float
    bound_s: float
    ruled_out: bool = False
    problem: str = ""
