"""Comparison of systems with the current run and with Pipeloom, in up to two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context

from pipeloom.compare.comparison import Comparison, compare_setting, compared
from pipeloom.compare.gain import PACKED, PACKED_TITLE, GainStep, packing_system, packs_anew, split_gain
from pipeloom.compare.iterations import Grouping, Iterations
from pipeloom.compare.model_on_cluster import ModelOnCluster, put_on_cluster
from pipeloom.compare.now import NOW, NOW_TITLE, TUNED, TUNED_TITLE, now_system, tuned_system
from pipeloom.compare.registry import OURS, suitable
from pipeloom.errors import ExecutionError
from pipeloom.search import Budget, compile_kernels
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.current_run import CurrentRun
from pipeloom.spec.datasets import CONTEXT_TOKENS
from pipeloom.spec.hardware import ClusterSpec
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.trainer import TrainerSpec

PACKING_TIMES = 4
"""Factor of the budget for a search over packings, since each packing needs a search of its order."""


@dataclass(frozen=True)
class Question:
    """Input of a comparison: systems, iterations and, if given, the current run."""

    setting: ModelOnCluster
    iterations: Iterations
    grouping: Grouping
    names: tuple[str, ...]
    """Keys of `BASELINES`."""
    run: CurrentRun | None = None
    budget_s: float = 1.0
    """Budget of systems that search, in seconds of CPU time."""
    seed: int = 0

    @property
    def budget(self) -> Budget:
        """Budget of each search."""
        return Budget(seconds=self.budget_s, clock="cpu")


Answer = Comparison | tuple[GainStep, ...]
"""The result of a system, or the steps of the gain."""


def answers(
    question: Question, *, processes: int = 2, on_system: Callable[[str], None] = lambda _: None
) -> Iterator[Answer]:
    """Yield the result of every system as soon as it is known, and last the steps of the gain, if any.

    With two ``processes``, Pipeloom's layout is chosen in parallel with the other systems; raise `ExecutionError` if
    the second process dies. ``on_system`` is called with the title of each system before it is timed.
    """
    setting, wanted = question.setting, suitable(question.setting, question.names)
    ours = OURS in wanted
    if not ours or processes < 2:
        yield from _others(question, on_system)
        if ours:
            on_system("Pipeloom")
            yield from our_answer(question)
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        rest = replace(question, setting=None)  # type: ignore[arg-type]
        spec = (setting.architecture, setting.cluster, setting.degrees, setting.trainer)
        future = pool.submit(_our_answer_for, spec, rest)
        try:
            yield from _others(question, on_system)
            on_system("Pipeloom")
            yield from future.result()
        except BrokenProcessPool as error:
            raise ExecutionError("the process that plans for Pipeloom died; give the machine more memory") from error
        finally:
            future.cancel()


def _others(question: Question, on_system: Callable[[str], None]) -> Iterator[Comparison]:
    """Yield the results of the current run, its tuned form, and all systems except Pipeloom."""
    setting, sampled, run = question.setting, question.iterations, question.run
    if run is not None:
        on_system(NOW_TITLE)
        yield compared(NOW, NOW_TITLE, lambda: now_system(setting, run), sampled.groups, question.budget, question.seed)
        on_system(TUNED_TITLE)
        yield compared(
            TUNED, TUNED_TITLE, lambda: tuned_system(setting, run, sampled.typical), sampled.groups, question.budget, 0
        )
    names = [name for name in question.names if name != OURS]
    yield from compare_setting(setting, sampled, names, budget=question.budget, seed=question.seed, on_system=on_system)


def _our_answer_for(spec: tuple[Architecture, ClusterSpec, Degrees, TrainerSpec], rest: Question) -> list[Answer]:
    """Run `our_answer` in another process, without sending emulated costs to it."""
    model, cluster, degrees, trainer = spec
    return our_answer(replace(rest, setting=put_on_cluster(model, cluster, degrees, trainer=trainer)))


def our_answer(question: Question) -> list[Answer]:
    """Evaluate Pipeloom: on the given microbatches, with its own packing, and the steps of its gain."""
    setting, sampled = question.setting, question.iterations
    # Compile first, since compilation would count as search.
    compile_kernels()
    (one,) = compare_setting(setting, sampled, [OURS], budget=question.budget, seed=question.seed)
    found: list[Answer] = [one]
    if one.result is None or one.layout is None:
        return found
    layout, best = one.layout, one.result
    if packs_anew(setting):
        tokens = question.grouping.tokens or CONTEXT_TOKENS
        budget = Budget(seconds=PACKING_TIMES * question.budget_s, clock="cpu")
        packed = compared(
            PACKED,
            PACKED_TITLE,
            lambda: packing_system(PACKED_TITLE, setting, layout, tokens),
            sampled.real.groups,
            budget,
            question.seed,
        )
        found.append(packed)
        if packed.result is not None:
            best = min(best, packed.result, key=lambda result: result.iteration_s)
    if question.run is not None:
        found.append(split_gain(setting, question.run, sampled.groups, best, question.budget, question.seed))
    return found
