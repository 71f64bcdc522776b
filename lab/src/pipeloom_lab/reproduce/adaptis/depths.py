"""Fig. 8 over every pipeline degree and number of microbatches that the paper's text names or implies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.layout.cooptimize import placement_bound
from pipeloom_lab.adaptis.systems import ChainResult
from pipeloom_lab.figures import Axis, bar_figure
from pipeloom_lab.reproduce.adaptis import setups
from pipeloom_lab.reproduce.part import Figure, Options, Outcome, Table
from pipeloom_lab.reproduce.texts import make_table

TOKENS = 4096
_BEST, _BOUND = "the best of eleven", "the lower bound"
_PAPER = {"Mist": "1.20", "S-1F1B": "1.34", "I-1F1B": "1.42", "ZB": "1.34"}
"""Average throughput over each system. For display only."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One model and size on one pipeline."""

    label: str
    pipeline: int
    rounds: int
    """Ranks, and microbatches of each."""
    seconds: dict[str, float]
    """Of an iteration under what fits."""
    bound_s: float
    """No placement's iteration is shorter."""
    best: str
    """The fastest published system that fits."""

    def over(self, system: str, who: str = "ours") -> float | None:
        """Throughput of one system over another's; None: one of them does not fit."""
        theirs, mine = self.seconds.get(system), self.seconds.get(who)
        return None if theirs is None or mine is None else theirs / mine


def figure_8_depths(options: Options) -> Outcome:
    """Every model and size on 4, 8 and 16 ranks, with two and four microbatches a rank."""
    cells = [
        _cell(family, size, pipeline, rounds, options)
        for pipeline in sorted(setups.DEPTHS)
        for rounds in setups.ROUNDS
        for family in setups.FAMILIES
        for size in setups.SIZES
    ]
    groups: list[tuple[str, str, list[Cell]]] = []
    for pipeline in sorted(setups.DEPTHS):
        here = [cell for cell in cells if cell.pipeline == pipeline]
        groups += [(str(pipeline), str(rounds), [c for c in here if c.rounds == rounds]) for rounds in setups.ROUNDS]
        groups.append((str(pipeline), "both", here))
    groups.append(("all", "both", cells))
    bars = {
        system: [_average(each, system) for _, _, each in groups]
        for system in (*setups.BASELINES, setups.GENERATOR, _BEST)
    }
    svg = bar_figure([f"P {p}, {r}" for p, r, _ in groups], bars, y=Axis("our throughput over it, average"))
    return Outcome(
        (_headline(groups), _all_systems(groups), _each(cells)),
        (Figure("figure-8-depths", "Our throughput over each system, by P and microbatches a rank", svg),),
        devices=setups.device(),
    )


def _cell(family: str, size: str, pipeline: int, rounds: int, options: Options) -> Cell:
    setup = setups.PaperSetup(f"{setups.FAMILIES[family]}-{size.lower()}", pipeline, 2, rounds * pipeline, TOKENS)
    seconds = dict[str, float]()
    for name, system in setups.BASELINES.items():
        with suppress(InputError):  # too few layers or microbatches for it
            result = setups.run_baseline(system, setup)
            if result.fits:
                seconds[name] = setups.seconds_of(result)
    best = setups.best_baseline(setup)
    if best is not None:
        seconds[_BEST] = setups.seconds_of(best)
    searches: dict[str, Callable[[], ChainResult]] = {
        setups.GENERATOR: lambda: setups.generated(setup, options.search_s),
        "ours": lambda: setups.ours(setup, options.seeds[0], options.search_s),
    }
    for name, search in searches.items():
        with suppress(InfeasibleError):
            seconds[name] = setups.seconds_of(search())
    bound_s = placement_bound(setups.chains(setup)[1]).ns / 1e9
    return Cell(f"{family} {size}", pipeline, rounds, seconds, bound_s, "" if best is None else best.name)


def _gains(cells: Sequence[Cell], system: str, who: str = "ours") -> list[float]:
    return [gain for cell in cells if (gain := cell.over(system, who)) is not None]


def _average(cells: Sequence[Cell], system: str, who: str = "ours") -> float | None:
    gains = _gains(cells, system, who)
    return setups.mean(gains) if gains else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _headline(groups: Sequence[tuple[str, str, list[Cell]]]) -> Table:
    """Over Mist and over the paper's own generator, and how far from the bound that one is."""
    rows = []
    for pipeline, rounds, cells in groups:
        over, own = _gains(cells, "Mist"), _gains(cells, setups.GENERATOR)
        theirs = [cell.seconds[setups.GENERATOR] / cell.bound_s for cell in cells if setups.GENERATOR in cell.seconds]
        rows.append(
            (
                pipeline,
                rounds,
                _text(_average(cells, "Mist")),
                _text(max(over, default=None)),
                _text(_average(cells, "Mist", setups.GENERATOR)),
                _text(_average(cells, setups.GENERATOR)),
                _text(min(own, default=None)),
                _text(max(own, default=None)),
                _text(setups.mean(theirs) if theirs else None),
                _PAPER["Mist"] if pipeline == "all" else "",
            )
        )
    return make_table("adaptis/figure-8-depths-mist", rows, tokens=TOKENS, generator=setups.GENERATOR)


def _all_systems(groups: Sequence[tuple[str, str, list[Cell]]]) -> Table:
    names = (*setups.BASELINES, _BEST)
    rows = [(p, r, *(_text(_average(cells, name)) for name in names)) for p, r, cells in groups]
    rows.append(("paper", "not stated", *(_PAPER.get(name, "") for name in names)))
    return make_table("adaptis/figure-8-depths-systems", rows, names=names)


def _each(cells: Sequence[Cell]) -> Table:
    names = ("I-1F1B", "ZB", "Mist", setups.GENERATOR, "ours")
    rows = tuple(
        (
            cell.label,
            str(cell.pipeline),
            str(cell.rounds),
            *(_text(cell.over("S-1F1B", name)) for name in names),
            _text(cell.over(_BEST)),
            cell.best,
            _text(cell.seconds["ours"] / cell.bound_s if "ours" in cell.seconds else None),
        )
        for cell in cells
    )
    return make_table("adaptis/figure-8-depths-models", rows, names=names)
