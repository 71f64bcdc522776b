"""Ours with microbatches of another size and of its own, and what then remains to the lower bound."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pipeloom.errors import InfeasibleError
from pipeloom.explain.compare import BaselineResult
from pipeloom.lab.reproduce.dip import runs
from pipeloom.lab.reproduce.dip.setups import SETUPS, PaperSetup, device, mean, seconds_text
from pipeloom.lab.reproduce.part import Options, Outcome, Table
from pipeloom.lab.systems.answer import PACKING_TIMES
from pipeloom.lab.systems.gain import packed_anew, packs_anew
from pipeloom.lab.systems.iterations import TOKENS
from pipeloom.lab.systems.model_on_cluster import Microbatches, resized
from pipeloom.lab.systems.systems import SIZES
from pipeloom.search import Deadline
from pipeloom.taskgraph import NS_PER_S

GIVEN, SIZE, OWN = "given", "of one size", "its own"
WAYS = (GIVEN, SIZE, OWN)
WORDS = {0: "halved", 1: "as given", 2: "two together", 4: "four together"}

Plan = Callable[[Microbatches, int], BaselineResult]
"""Of an iteration's microbatches and a seed."""


def packings(options: Options) -> Outcome:
    """Time ours on the microbatches given, on these in another size, and on its own; bound all of them together."""
    rows = []
    for label, setup in SETUPS.items():
        numbers = runs.iterations(options, None if options.full else 1)
        size, search_s = _chosen_size(setup, options.search_s), options.search_s
        plans = _plans(setup, size, search_s)
        seconds, bounds = {way: list[float]() for way in plans}, list[float]()
        for seed, number in numbers:
            groups = setup.groups(seed, number)
            found = {way: plan(groups, seed) for way, plan in plans.items()}
            for way, one in found.items():
                runs.judge(one)
                seconds[way].append(one.iteration_s)
            bounds.append(min(runs.least_bound_s(setup, groups), *(_bound_s(one) for one in found.values())))
        means, bound = {way: mean(each) for way, each in seconds.items()}, mean(bounds)
        means.setdefault(SIZE, means[GIVEN])
        name, theirs = _best_baseline(setup, numbers, search_s)
        room = theirs - bound
        rows.append(
            (
                label,
                name,
                seconds_text(theirs),
                *(seconds_text(means[way]) if way in means else "" for way in WAYS),
                WORDS[size],
                seconds_text(bound),
                f"{room / bound * 100:.1f} %",
                *(f"{(theirs - means[way]) / room * 100:.0f} %" if way in means else "" for way in WAYS),
            )
        )
    columns = (
        "model",
        "best baseline",
        "its seconds",
        *(f"ours, microbatches {way}" for way in WAYS),
        "the size",
        "least lower bound",
        "room",
        *(f"closed, microbatches {way}" for way in WAYS),
    )
    note = (
        "Baselines have their microbatches in the size that is fastest for every single iteration; ours has one size, "
        "chosen on the sampled iterations like the layout, or makes its own of the same samples, of at most "
        f"{TOKENS} tokens or as many as the longest sample has, for which it has {PACKING_TIMES} times the search; "
        f"clips of one size stay together, and are not packed anew. {len(numbers)} iterations a model. The lower "
        f"bound is the least of the {runs.FEW_BOUNDS} layouts tried that have the least, on the microbatches given, "
        "and of those of the other plans. It knows no order that memory forbids, so what remains is an upper limit. "
        f"{runs.rule(options)}"
    )
    return Outcome(
        (Table("Microbatches given, of another size, and our own", columns, tuple(rows), note),),
        devices=device(*SETUPS.values()),
    )


def _plans(setup: PaperSetup, size: int, search_s: float) -> dict[str, Plan]:
    def own(groups: Microbatches, seed: int) -> BaselineResult:
        budget = Deadline(PACKING_TIMES * search_s, "cpu")
        return packed_anew(setup.case, setup.layouts[0].layout, groups, TOKENS, budget, seed).result

    plans: dict[str, Plan] = {GIVEN: partial(_of_size, setup, 1, search_s)}
    if size != 1:
        plans[SIZE] = partial(_of_size, setup, size, search_s)
    return plans | ({OWN: own} if packs_anew(setup.case) else {})


def _of_size(setup: PaperSetup, size: int, search_s: float, groups: Microbatches, seed: int) -> BaselineResult:
    system = runs.system(setup, runs.OURS)
    return system.run(resized(groups, size), runs.budget_of(setup, runs.OURS, search_s), seed)


def _chosen_size(setup: PaperSetup, search_s: float) -> int:
    """How many microbatches go into one: what is fastest on the iterations that the layout was chosen on."""
    means = dict[int, float]()
    for size in SIZES:
        with suppress(InfeasibleError):
            found = [_of_size(setup, size, search_s, groups, seed) for seed, groups in enumerate(setup.typical)]
            means[size] = mean(one.iteration_s for one in found)
    return min(means, key=lambda size: means[size])


def _bound_s(found: BaselineResult) -> float:
    return found.lower_bound.ns / NS_PER_S + found.after_s


def _best_baseline(setup: PaperSetup, numbers: list[tuple[int, int]], search_s: float) -> tuple[str, float]:
    """The fastest of those that fit every iteration."""
    seconds = {
        name: mean(found)
        for name in runs.BASELINES
        if runs.suits(name, setup) and (found := runs.seconds_of(setup, name, numbers, search_s)) is not None
    }
    name = min(seconds, key=lambda each: seconds[each])
    return name, seconds[name]
