"""Plans with actions moved, left out and repeated: what the verifier passes, a naive executor of the text runs."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from pipeloom.errors import PlanError
from pipeloom.plan import ExecutionPlan, Verb, from_text, to_text, verify

from .cases import EVERY_STRATEGY, Case, random_case, random_model, with_streams
from .executor import Executor

FIXTURES = Path(__file__).parent / "fixtures"


def mutated(rng: random.Random, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with one or two actions of a rank elsewhere, gone, or there twice."""
    ranks = [list(actions) for actions in plan.ranks]
    actions = ranks[rng.choice([rank for rank, each in enumerate(ranks) if len(each) > 1])]
    for _ in range(rng.choice((1, 1, 1, 2))):
        place, kind = rng.randrange(len(actions)), rng.random()
        if kind < 0.5:
            after = min(len(actions) - 1, place + 1)
            actions[place], actions[after] = actions[after], actions[place]
        elif kind < 0.9:
            actions.insert(max(0, min(len(actions) - 1, place + rng.randint(-8, 8))), actions.pop(place))
        elif kind < 0.95:
            actions.pop(place)
        else:
            actions.insert(rng.randrange(len(actions)), actions[place])
    return msgspec.structs.replace(plan, ranks=tuple(map(tuple, ranks)))


def passes(plan: ExecutionPlan, *beside: object) -> bool:
    try:
        verify(plan, *beside)  # type: ignore[arg-type]
    except PlanError:
        return False
    return True


def has_one_part(case: Case) -> bool:
    """Whether no module cuts a microbatch into several parts, so that names say what goes where."""
    return all(len(parts) <= 1 for microbatch in case.packing.microbatches for parts in microbatch.parts)


def units(plan: ExecutionPlan) -> list[tuple[str, int, int]]:
    """The units that have a forward; that one is missing may show in the packing alone."""
    return sorted((a.chunk, a.microbatch, a.sub_microbatch) for each in plan.ranks for a in each if a.verb is Verb.F)


def check_seed(seed: int) -> int:
    """Judge twenty mutated plans of a case; return how many of them do not run."""
    rng = random.Random(seed)
    case = random_case(seed, strategies=EVERY_STRATEGY if seed % 3 == 0 else ("keep",))
    executor, plan, bad = Executor(case.graph, case.layout.chunk_names), case.plan, 0
    assert executor.run(to_text(plan)) == ""
    assert passes(plan)
    assert passes(plan, case.layout)
    assert passes(plan, case.layout, case.packing)
    for _ in range(20 if max(map(len, plan.ranks)) > 1 else 0):
        changed = mutated(rng, plan)
        problem = executor.run(to_text(changed))
        whole = passes(changed, case.layout, case.packing)
        bad += bool(problem)
        assert not (problem and whole), (seed, problem)
        if problem and has_one_part(case) and units(changed) == units(plan):
            assert not passes(changed, case.layout), (seed, problem)
        # Less that is known never refuses more.
        assert passes(changed) >= passes(changed, case.layout) >= whole, seed
    return bad


@pytest.mark.parametrize("first", [0, 6, 12])
def test_what_verifies_runs(first: int) -> None:
    assert sum(map(check_seed, range(first, first + 6))) > 20


@pytest.mark.full
def test_what_verifies_runs_on_many_plans() -> None:
    assert sum(map(check_seed, range(1000, 1500))) > 2000


@pytest.mark.parametrize("seed", range(60))
def test_plans_with_streams_and_replicated_modules_pass_with_and_without_a_layout(seed: int) -> None:
    rng = random.Random(seed)
    model = with_streams(rng, random_model(rng))
    replicated = (model.modules[0].name,) if seed % 2 and len(model.modules) > 1 else ()
    case = random_case(seed, model=model, replicated=replicated)
    assert passes(case.plan)
    assert passes(case.plan, case.layout)
    assert passes(case.plan, case.layout, case.packing)


def test_a_forward_before_its_input_has_arrived_is_refused() -> None:
    plan = from_text((FIXTURES / "forward_before_input.plan").read_text())
    with pytest.raises(PlanError, match=r"'F lm\.1 3\.0 keep' starts before its input has arrived"):
        verify(plan)


@pytest.mark.parametrize("seed", range(40))
def test_what_only_a_packing_tells_is_said_to_be_unchecked(seed: int) -> None:
    """Where a packing refuses what a layout passes, either units are missing or it is said which parts are unknown."""
    rng = random.Random(seed)
    case = random_case(seed)
    assert verify(case.plan, case.layout, case.packing) == ()
    parts = [each for each in verify(case.plan, case.layout) if "which parts" in each]
    assert not (parts and has_one_part(case))
    for _ in range(20):
        plan = mutated(rng, case.plan)
        if passes(plan, case.layout) and not passes(plan, case.layout, case.packing):
            said = verify(plan, case.layout)
            assert said[0].startswith("that all samples of the batch are present")
            assert units(plan) != units(case.plan) or any("which parts" in each for each in said)


def test_a_message_about_a_unit_that_no_rank_computes_is_refused() -> None:
    plan = from_text((FIXTURES / "forward_before_input.plan").read_text())
    ranks = [
        tuple(
            msgspec.structs.replace(a, microbatch=9)
            if (a.chunk, a.microbatch) == ("lm.0", 2) and a.verb.is_message
            else a
            for a in actions
        )
        for actions in plan.ranks
    ]
    with pytest.raises(PlanError, match="is about a unit that no rank computes"):
        verify(msgspec.structs.replace(plan, ranks=tuple(ranks)))


@pytest.mark.parametrize("seed", range(20))
def test_strategies_of_another_number_of_layers_are_refused(seed: int) -> None:
    case = random_case(seed, strategies=EVERY_STRATEGY)
    layers = {name: chunk.num_layers for name, chunk in zip(case.layout.chunk_names, case.layout.chunks, strict=True)}
    rank, step, action = next(
        (r, s, a) for r, actions in enumerate(case.plan.ranks) for s, a in enumerate(actions) if a.verb is Verb.F
    )
    # The same strategies for one layer more, as recomputation and offloading stay what the plan has for them.
    words = action.strategy.split(",")
    wrong = ",".join([*(words * layers[action.chunk])[: layers[action.chunk]], words[-1]])
    ranks = [list(actions) for actions in case.plan.ranks]
    ranks[rank][step] = msgspec.structs.replace(action, strategy=wrong)
    changed = msgspec.structs.replace(case.plan, ranks=tuple(map(tuple, ranks)))
    verify(changed)
    with pytest.raises(PlanError, match=f"strategies, its chunk has {layers[action.chunk]} layers"):
        verify(changed, case.layout)
