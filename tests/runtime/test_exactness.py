from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.plan import verify
from tests.plan.cases import EVERY_STRATEGY

from .cases import assert_equal_gradients, expected, random_run, run_threads, take_gradients, total_loss


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**9), st.sampled_from(["tags", "in order"]), st.booleans())
def test_any_plan_with_streams_gives_the_gradients_of_the_undivided_model(
    seed: int, order: str, replicate: bool
) -> None:
    run = random_run(seed, strategies=EVERY_STRATEGY, replicate=replicate, streams=True)
    verify(run.case.plan, run.case.layout, run.case.packing)
    loss, wanted = expected(run)
    results = run_threads(run, order=order)  # type: ignore[arg-type]
    assert abs(total_loss(results) - loss) < 1e-10 * (1 + abs(loss))
    assert_equal_gradients(take_gradients(run.model), wanted)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**9), st.sampled_from(["tags", "in order"]), st.booleans())
def test_any_plan_gives_the_gradients_of_the_undivided_model(seed: int, order: str, replicate: bool) -> None:
    run = random_run(seed, strategies=EVERY_STRATEGY, replicate=replicate)
    verify(run.case.plan, run.case.layout, run.case.packing)
    loss, wanted = expected(run)
    results = run_threads(run, order=order)  # type: ignore[arg-type]
    assert abs(total_loss(results) - loss) < 1e-10 * (1 + abs(loss))
    assert_equal_gradients(take_gradients(run.model), wanted)
