"""What would I gain? Systems, what somebody runs now, and where Pipeloom's gain comes from, in two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context

from pipeloom.compare.comparison import Comparison, compare_case, compared
from pipeloom.compare.gain import PACKED, PACKED_TITLE, GainStep, packing_system, packs_anew, split_gain
from pipeloom.compare.iterations import TOKENS, Grouping, Iterations
from pipeloom.compare.model_on_cluster import ModelOnCluster, put_on_cluster
from pipeloom.compare.now import NOW, NOW_TITLE, TUNED, TUNED_TITLE, now_system, tuned_system
from pipeloom.compare.registry import OURS, suitable
from pipeloom.errors import ExecutionError
from pipeloom.search import Deadline, warm_up
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.current_run import CurrentRun
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees

PACKING_TIMES = 4
"""Of the seconds that an order is searched, to choose a packing with its order: several are searched."""


@dataclass(frozen=True)
class Question:
    """What is compared: systems on iterations of a case, beside what somebody runs now."""

    case: ModelOnCluster
    iterations: Iterations
    grouping: Grouping
    names: tuple[str, ...]
    """Keys of `BASELINES`."""
    run: CurrentRun | None = None
    budget_s: float = 1.0
    """Processor seconds of search, for the systems that search."""
    seed: int = 0

    @property
    def budget(self) -> Deadline:
        """The rule by which searches end."""
        return Deadline(self.budget_s, "cpu")


@dataclass(frozen=True)
class Ours:
    """Pipeloom on given microbatches, on its own, and what it gains by what."""

    systems: tuple[Comparison, ...]
    steps: tuple[GainStep, ...] = ()


def answers(
    question: Question, *, processes: int = 2, on_system: Callable[[str], None] = lambda _: None
) -> Iterator[Comparison | tuple[GainStep, ...]]:
    """Compare, and give every system as soon as it is known; the steps of the gain come last, where there are any.

    Parameters
    ----------
    processes : int
        1 or 2: Pipeloom's layout is chosen beside what others do.
    on_system : callable
        Told the title of each system before its turn.

    Raises
    ------
    ExecutionError
        The other process died.
    """
    case, wanted = question.case, suitable(question.case, question.names)
    ours = OURS in wanted
    if not ours or processes < 2:
        yield from _others(question, on_system)
        if ours:
            on_system("Pipeloom")
            yield from _in_order(our_answer(question))
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        rest = replace(question, case=None)  # type: ignore[arg-type]
        coming = pool.submit(_our_answer_for, case.architecture, case.cluster, case.degrees, rest)
        try:
            yield from _others(question, on_system)
            on_system("Pipeloom")
            yield from _in_order(coming.result())
        except BrokenProcessPool as error:
            raise ExecutionError("the process that plans for Pipeloom died; give the machine more memory") from error
        finally:
            coming.cancel()


def _in_order(found: Ours) -> Iterator[Comparison | tuple[GainStep, ...]]:
    yield from found.systems
    if found.steps:
        yield found.steps


def _others(question: Question, on_system: Callable[[str], None]) -> Iterator[Comparison]:
    """What somebody runs now, and all systems but Pipeloom."""
    case, given, run = question.case, question.iterations, question.run
    if run is not None:
        on_system(NOW_TITLE)
        yield compared(NOW, NOW_TITLE, lambda: now_system(case, run), given.groups, question.budget, question.seed)
        on_system(TUNED_TITLE)
        yield compared(
            TUNED, TUNED_TITLE, lambda: tuned_system(case, run, given.typical), given.groups, question.budget, 0
        )
    names = [name for name in question.names if name != OURS]
    yield from compare_case(
        case, given.typical, given.groups, names, budget=question.budget, seed=question.seed, on_system=on_system
    )


def _our_answer_for(architecture: Architecture, cluster: ClusterSpec, degrees: Degrees, rest: Question) -> Ours:
    """In a process of its own, which is not sent what has been emulated."""
    return our_answer(replace(rest, case=put_on_cluster(architecture, cluster, degrees)))


def our_answer(question: Question) -> Ours:
    """Pipeloom: its layout, a searched schedule on the given microbatches, a plan of its own, and the gain in steps."""
    case, given = question.case, question.iterations
    # Compiling would be counted as searching.
    warm_up()
    (one,) = compare_case(case, given.typical, given.groups, [OURS], budget=question.budget, seed=question.seed)
    if one.result is None or one.layout is None:
        return Ours((one,))
    systems, layout, best = [one], one.layout, one.result
    if packs_anew(case):
        tokens = question.grouping.tokens or TOKENS
        budget = Deadline(PACKING_TIMES * question.budget_s, "cpu")
        packed = compared(
            PACKED,
            PACKED_TITLE,
            lambda: packing_system(PACKED_TITLE, case, layout, tokens),
            given.real,
            budget,
            question.seed,
        )
        systems.append(packed)
        if packed.result is not None:
            best = min(best, packed.result, key=lambda result: result.iteration_s)
    if question.run is None:
        return Ours(tuple(systems))
    steps = split_gain(case, question.run, given.groups, best, question.budget, question.seed)
    return Ours(tuple(systems), steps)
