"""Ranks that are processes, each with a simulated device: replicas, shards, tensor-parallel ranks, training."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.errors import ExecutionError
from pipeloom.runtime.launch.device import Place
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.launch.transport import HostTransport
from tests.runtime.divided_training import train_divided
from tests.runtime.on_mesh import Shape, run_on_mesh
from tests.runtime.test_divided_training import REPLICAS, SHARDS, TENSORS, assert_undivided

from . import device as sim
from .on_ranks import (
    draw_on_one_stage,
    faults,
    run_many_microbatches,
    run_planned_forward_backward,
    run_planned_schedule,
    run_with_averages,
    simulated,
    sum_shared_rows,
    train_equal_chunks,
)

SIM = Place(sim.KIND)  # type: ignore[arg-type]
SHAPES = [
    Shape(2, 2, 1, sharded=True),
    *(
        pytest.param(shape, marks=pytest.mark.full)
        for shape in (Shape(2, 2, 1), Shape(2, 1, 2), Shape(1, 2, 2, sharded=True), Shape(2, 1, 2, encoder_dp=True))
    ),
]


@pytest.mark.full
def test_faults_in_plain_torch_are_found() -> None:
    early, waited, first, in_order, swapped = launch(faults, 2, device=SIM)[0]
    assert "reads memory that c10d.allreduce_" in early
    assert "makes the communicator with rank 1 while other operations are in progress" in first
    assert "another order on rank 1" in swapped
    assert (waited, in_order) == ("", "")


@pytest.mark.full
def test_one_stage_draws_random_numbers_for_a_dtensor() -> None:
    """Without a collective of all ranks, which would wait for the other stage."""
    drawn = launch(draw_on_one_stage, 4, device=SIM, timeout_s=30.0)
    assert drawn[0] == drawn[1] > 0


@pytest.mark.full
def test_gradients_of_encoders_that_are_averaged_are_found() -> None:
    """As in Megatron-Bridge#5555: an encoder has other replicas than the language model."""
    with pytest.raises(ExecutionError, match=r"differs by"):
        launch(simulated, 2, run_with_averages, Shape(1, 1, 2, encoder_dp=True), device=SIM)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_exact_and_nothing_races(shape: Shape) -> None:
    assert launch(simulated, 4, run_on_mesh, [shape], [0, 1], sim.KIND, device=SIM)[0] == 2


@pytest.mark.full
def test_messages_through_host_memory_are_exact_and_nothing_races() -> None:
    place = Place(sim.KIND, "host")  # type: ignore[arg-type]
    assert (
        launch(simulated, 2, run_on_mesh, [Shape(2, 1, 1)], list(range(4)), sim.KIND, HostTransport, device=place)[0]
        == 4
    )


@pytest.mark.full
def test_training_resumes_under_other_degrees_and_is_undivided_training(tmp_path: Path) -> None:
    """Losses, evaluation, averaged weights, clipping, checkpoints and gathered weights."""
    degrees, until = [REPLICAS, TENSORS, SHARDS], [3, 4, 5]
    assert_undivided(launch(simulated, 4, train_divided, degrees, until, str(tmp_path), sim.KIND, device=SIM))


@pytest.mark.parametrize(
    ("backward", "without_host"), [pytest.param("whole", False, marks=pytest.mark.full), ("split", True)]
)
def test_a_planned_schedule_is_exact_and_nothing_races(backward: str, without_host: bool) -> None:
    assert max(launch(simulated, 3, run_planned_schedule, 0, backward, without_host, device=SIM)) < 1e-10


@pytest.mark.full
def test_replicas_that_shard_equal_chunks_train_as_one() -> None:
    (alone,) = launch(train_equal_chunks, 1)
    for found in launch(simulated, 2, train_equal_chunks, device=SIM):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
def test_gradients_of_rows_that_ranks_share_are_summed() -> None:
    assert launch(simulated, 2, sum_shared_rows, device=SIM) == [[[1, 3, 2, 0], [10, 21, 11, 0]]] * 2


@pytest.mark.full
def test_all_messages_of_a_planned_step_are_awaited() -> None:
    assert launch(run_many_microbatches, 2) == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize(("vpp", "backward"), [(None, "whole"), (2, "split")])
def test_planned_steps_in_megatron_are_exact_and_nothing_races(vpp: int | None, backward: str) -> None:
    pytest.importorskip("megatron.core")
    assert max(launch(simulated, 2, run_planned_forward_backward, vpp, backward, device=SIM)) < 1e-10
