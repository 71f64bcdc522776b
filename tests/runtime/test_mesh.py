from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.errors import ExecutionError
from pipeloom.runtime.launch.processes import launch

from .on_mesh import Shape, run_on_mesh, train_through
from .parallel_page import train_page

pytestmark = pytest.mark.ranks

TWO_BY_TWO = [
    Shape(2, 2, 1),
    Shape(2, 2, 1, sharded=True),
    Shape(2, 1, 2),
    Shape(1, 2, 2),
    Shape(1, 2, 2, sharded=True),
]


@pytest.mark.full
def test_two_kinds_of_parallelism_at_a_time_are_exact() -> None:
    assert launch(run_on_mesh, 4, TWO_BY_TWO, list(range(3)), timeout_s=120.0)[0] == 15


@pytest.mark.soak
def test_all_three_together_are_exact() -> None:
    shapes = [Shape(2, 2, 2), Shape(2, 2, 2, sharded=True)]
    launch(run_on_mesh, 8, shapes, list(range(12)), timeout_s=300.0)


@pytest.mark.soak
def test_two_kinds_of_parallelism_are_exact_on_many_models() -> None:
    launch(run_on_mesh, 4, TWO_BY_TWO, list(range(100, 130)), timeout_s=300.0)


def test_a_wrong_number_of_processes_is_named() -> None:
    with pytest.raises(ExecutionError, match=r"2 pipeline x 2 data x 1 tensor = 4 processes, 1 run"):
        launch(run_on_mesh, 1, [Shape(2, 2, 1)], [0], timeout_s=30.0)


@pytest.mark.full
def test_training_resumes_under_other_degrees_of_parallelism(tmp_path: Path) -> None:
    shapes = [Shape(2, 2, 1, sharded=True), Shape(2, 1, 2), Shape(1, 2, 2, sharded=True)]
    found = launch(train_through, 4, shapes, 12, str(tmp_path), timeout_s=120.0)[0]
    whole = found[0]
    assert len(whole) == 6
    assert whole[0] != pytest.approx(whole[3], rel=1e-3)
    for number, losses in enumerate(found[1:], start=3):
        assert losses == pytest.approx(whole[number : number + 2], rel=1e-9)


@pytest.mark.full
def test_the_code_of_the_page_trains_alike_under_all_degrees(tmp_path: Path) -> None:
    found = launch(train_page, 4, [(2, 2, 1), (1, 2, 2)], str(tmp_path), timeout_s=120.0)[0]
    assert found[0][0] > found[0][3]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-9)


def test_the_code_of_the_page_trains_tied_weights_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone, both = (
        launch(train_page, num, [(num, 1, 1)], str(tmp_path / str(num)), True, timeout_s=120.0)[0][0] for num in (1, 2)
    )
    assert alone[0] > alone[3]
    assert both == pytest.approx(alone, rel=1e-9)
