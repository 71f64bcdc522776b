"""Tuning changes when work is done, never what is learned (PipeTune A.2, Fig. 9)."""

import pytest

from pipeloom.runtime.launch.processes import launch
from tests.runtime.tuned_training import invented_problem, losses

pytestmark = pytest.mark.ranks


def train(
    ranks: int, iterations: int, frozen: bool, names: tuple[str, ...], dtype: str = "float64"
) -> dict[str, list[float]]:
    # Compiled here once, so that no rank waits while planner and rank 0 compile.
    invented_problem(ranks, frozen, names[-1]).compile_kernels()
    results = launch(losses, ranks, ranks, iterations, frozen, names, dtype, timeout_s=900.0)
    for name, (found, early) in results[0].items():
        assert early or name != "precompute"
        assert not early or name in ("precompute", "all")
        for other in results[1:]:
            assert other[name][0] == found
    return {name: found for name, (found, _) in results[0].items()}


@pytest.mark.parametrize(("frozen", "name"), [(True, "precompute"), pytest.param(False, "all", marks=pytest.mark.full)])
def test_tuned_training_learns_the_same(frozen: bool, name: str) -> None:
    found = train(3, 5, frozen, ("untuned", name))
    assert found[name] == pytest.approx(found["untuned"], abs=1e-8, rel=0)
    assert found["untuned"][-1] < found["untuned"][0]


@pytest.mark.soak
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-8), ("float32", 0.01)])
def test_two_hundred_steps(frozen: bool, dtype: str, bound: float) -> None:
    # Each technique alone where the bound is tight enough to tell; rounding differs between all orders of summing.
    alone = ("pack", "micro_batch", "order", "precompute") if dtype == "float64" else ()
    names = ("untuned", *alone, "all")
    found = train(4, 200, frozen, names, dtype)
    for name in names:
        assert found[name] == pytest.approx(found["untuned"], abs=bound, rel=0), name
