"""Fig. 14 (strong scaling) and Fig. 15 (weak scaling), 8 to 128 devices, every system on the best of its own grid."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout.cooptimize import placement_bound
from pipeloom_lab.adaptis.systems import SYSTEMS, ChainResult
from pipeloom_lab.figures import Axis, bar_figure
from pipeloom_lab.reproduce.adaptis import setups
from pipeloom_lab.reproduce.part import Figure, Options, Outcome
from pipeloom_lab.reproduce.texts import make_note, make_table

_DEVICES = (8, 16, 32, 64, 128)
_TENSOR = (1, 2, 4, 8)
_TOKENS = 4096
_STRONG = (
    (0.95, 1.03, 1.06, 1.22),
    (0.79, 1.05, 1.10, 1.35),
    (0.78, 1.07, 1.19, 1.43),
    (0.66, 0.96, 1.16, 1.41),
    (0.77, 1.05, 1.24, 1.47),
)
_WEAK = (
    (0.89, 1.01, 1.06, 1.22),
    (0.79, 1.03, 1.09, 1.33),
    (0.70, 0.93, 1.12, 1.33),
    (0.75, 1.05, 1.17, 1.40),
    (0.74, 1.03, 1.14, 1.26),
)
_MODELS = {"Nemotron-H": ("nemotron-h-large", (1,)), "DeepSeek": ("deepseek-medium", (1, 8))}
"""By family: the model, and over how many devices experts may be divided."""
_NAMES = {system: name for name, system in setups.BASELINES.items()}


@dataclass(frozen=True, slots=True)
class _Best:
    """A system on the grid point where it is fastest."""

    seconds: float
    setup: setups.PaperSetup


def figure_14(options: Options) -> Outcome:
    """The same batch of 256 sequences on more devices."""
    return _scale(options, "figure-14", "Strong scaling", lambda _: 256, _STRONG)


def figure_15(options: Options) -> Outcome:
    """32 sequences for every 8 devices."""
    return _scale(options, "figure-15", "Weak scaling", lambda devices: 4 * devices, _WEAK)


def _scale(
    options: Options, name: str, title: str, batch: Callable[[int], int], paper: tuple[tuple[float, ...], ...]
) -> Outcome:
    tables, figures = [], []
    for family, (model, _) in _MODELS.items():
        rows = []
        shown = (*setups.BASELINES, setups.GENERATOR, "ours")
        bars: dict[str, list[float | None]] = {system: [] for system in shown}
        first = 0.0
        for devices, theirs in zip(_DEVICES, paper, strict=True):
            sequences = batch(devices)
            points = grid(family, devices, sequences)
            best = _baselines(points)
            best |= {
                setups.GENERATOR: _searched(points, lambda s: setups.generated(s, options.search_s)),
                "ours": _searched(points, lambda s: setups.ours(s, options.seeds[0], options.search_s)),
            }
            base, mine = best["S-1F1B"], best["ours"]
            ratio = {system: base.seconds / one.seconds if base and (one := best[system]) else None for system in shown}
            for system, value in ratio.items():
                bars[system].append(value)
            rate = sequences / mine.seconds if mine else 0.0
            first = first or rate
            rows.append(
                (
                    str(devices),
                    _degrees(base),
                    _degrees(mine),
                    *("out of memory" if (x := ratio[system]) is None else f"{x:.2f}" for system in shown[1:]),
                    _over_fastest(best, mine),
                    _over_generator(best, mine),
                    " / ".join(f"{x:.2f}" for x in theirs) if model == "nemotron-h-large" else "",
                    f"{rate / first:.1f}" if first else "",
                )
            )
        svg = bar_figure([str(d) for d in _DEVICES], bars, y=Axis("throughput over S-1F1B"))
        tables.append(make_table("adaptis/scaling", rows, model=model, generator=setups.GENERATOR))
        stem = name if family == "Nemotron-H" else f"{name}-{family.lower()}"
        figures.append(Figure(stem, f"{title}, {model}", svg))
    depths, tensor = (", ".join(map(str, sorted(each))) for each in (setups.DEPTHS, _TENSOR))
    note = make_note("adaptis/scaling", tokens=_TOKENS, depths=depths, tensor=tensor)
    return Outcome(tuple(tables), tuple(figures), (note,), setups.device())


def _over_fastest(best: dict[str, _Best | None], mine: _Best | None) -> str:
    """Our speedup over whichever published system is fastest, and which that is."""
    published = {system: one.seconds for system in SYSTEMS if (one := best[_NAMES.get(system, system)]) is not None}
    if not published or mine is None:
        return ""
    fastest = min(published, key=lambda system: published[system])
    return f"{published[fastest] / mine.seconds:.2f} ({fastest})"


def _over_generator(best: dict[str, _Best | None], mine: _Best | None) -> str:
    theirs = best[setups.GENERATOR]
    return "" if theirs is None or mine is None else f"{theirs.seconds / mine.seconds:.3f}"


def _degrees(best: _Best | None) -> str:
    if best is None:
        return "none fits"
    setup = best.setup
    experts = f", E {setup.expert}" if setup.expert > 1 else ""
    return f"P {setup.pipeline}, T {setup.tensor}, D {setup.data}{experts}, {setup.num_microbatches} microbatches"


def _baselines(points: list[setups.PaperSetup]) -> dict[str, _Best | None]:
    """Every published system on the point where it is fastest; None: it fits on none."""
    found: dict[str, _Best | None] = {}
    for system in SYSTEMS:
        best: _Best | None = None
        for setup in points:
            try:
                result = setups.run_baseline(system, setup)
            except InputError:  # too few layers or microbatches for it
                continue
            seconds = setups.iteration_s(setup, result)
            if result.fits and (best is None or seconds < best.seconds):
                best = _Best(seconds, setup)
        found[_NAMES.get(system, system)] = best
    return found


def _searched(points: list[setups.PaperSetup], search: Callable[[setups.PaperSetup], ChainResult]) -> _Best | None:
    """A search on every point that can still be the best, most promising first."""
    best: _Best | None = None
    for setup, least in sorted(((s, _least_s(s)) for s in points), key=lambda entry: entry[1]):
        if best is not None and least >= best.seconds:
            break
        try:
            seconds = setups.iteration_s(setup, search(setup))
        except InfeasibleError:
            continue
        if best is None or seconds < best.seconds:
            best = _Best(seconds, setup)
    return best


@functools.lru_cache(maxsize=512)
def _least_s(setup: setups.PaperSetup) -> float:
    """No placement's iteration is shorter. Layers update faster together than one by one, so updates do not count."""
    return placement_bound(replace(setups.chains(setup)[1], update_ns=None)).ns / 1e9


def grid(family: str, devices: int, sequences: int) -> list[setups.PaperSetup]:
    """All P, T, E and D on so many devices that leave every replica at least P microbatches."""
    model, experts = _MODELS[family]
    found = []
    for depth in setups.DEPTHS:
        for tensor in _TENSOR:
            data = devices // (tensor * depth)
            if not data or data * tensor * depth != devices:
                continue
            if sequences % data or sequences // data < depth:
                continue
            found += [
                setups.PaperSetup(model, depth, tensor, sequences // data, _TOKENS, data, expert, ends=True)
                for expert in experts
                if (data * tensor) % expert == 0
            ]
    if not found:
        raise InputError("devices", f"{devices} suit no degrees")
    return found
