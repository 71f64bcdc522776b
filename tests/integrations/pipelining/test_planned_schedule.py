from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.explain.traces.read import explain_traces
from pipeloom.runtime.launch.processes import launch
from pipeloom.search import Budget
from pipeloom.taskgraph import KIND_NAMES

from .on_ranks import (
    against_theirs,
    changing,
    divided,
    modes,
    refused,
    replicas,
    searched,
    traced,
    two_steps,
    unequal_replicas,
)

pytestmark = pytest.mark.ranks


def test_gradients_are_those_of_pytorchs_schedules() -> None:
    for found in launch(against_theirs, 2, [0, 1, 2], timeout_s=60.0):
        assert found["plans"] == 6
        assert found["kinds"] == ["1f1b", "interleaved", "zero bubble"]


@pytest.mark.newer_torch("ScheduleZBVZeroBubble fails")
def test_gradients_are_those_of_pytorchs_v_schedule() -> None:
    for found in launch(against_theirs, 2, [3], timeout_s=60.0):
        assert found["plans"] == 2
        assert found["kinds"] == ["v"]


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_of_many_random_plans(num_ranks: int) -> None:
    for found in launch(against_theirs, num_ranks, list(range(100, 200)), timeout_s=120.0):
        assert found["plans"] == 200


@pytest.mark.parametrize("several", [False, True])
def test_microbatches_differ_from_step_to_step(several: bool) -> None:
    for found in launch(changing, 2, several, timeout_s=60.0):
        assert found["steps"] == 8


def test_gradients_of_two_steps_are_added_also_of_a_weight_of_two_stages() -> None:
    assert max(launch(two_steps, 2, [0, 1, 0, 1], timeout_s=60.0)) <= 1e-12


def test_gradients_of_two_steps_are_added_under_fsdp() -> None:
    assert max(launch(two_steps, 2, [0, 0, 0, 0], True, timeout_s=60.0)) <= 1e-12


def test_shapes_and_types_may_depend_on_the_kind_of_step() -> None:
    _, found = launch(modes, 2, timeout_s=60.0)
    shapes = [(2, 7, 5), (2, 8, 5)] * 2
    assert found == [(shape, dtype) for dtype in ("torch.bfloat16", "torch.float32") for shape in shapes]


def test_pipelines_with_one_plan_may_have_different_shapes() -> None:
    _, one, _, other = launch(replicas, 4, timeout_s=60.0)
    assert one != other


def test_pipelines_with_one_plan_refuse_a_batch_with_too_few_rows() -> None:
    problem = "the batch: splits into 3 microbatches, not 4; give more rows"
    for rank, found in enumerate(launch(unequal_replicas, 4, timeout_s=60.0)):
        assert found == [problem if rank == 2 else f"rank 2: {problem}", "nothing"]


@pytest.mark.newer_torch("PipelineStage has no get_mesh")
def test_stages_hand_on_tensors_that_lie_over_a_mesh() -> None:
    for found in launch(divided, 4, timeout_s=60.0):
        assert max(found) <= 1e-12


def test_nonsense_is_reported_in_one_line_on_every_rank() -> None:
    first, second = launch(refused, 2, timeout_s=60.0)
    reported = [
        "stage 1: is on ranks 0 and 1; give every stage of the chain to one rank",
        "stage 1: of 0..3 is on no rank; give every stage of the chain to one rank",
        "stages: disagree on num_stages: [2, 3]; give all of them the same",
        "stages[0]: is a Block; give torch.distributed.pipelining.PipelineStage",
        "stages: is empty; give every rank of the group at least one stage",
        "n_microbatches: is None, and no microbatches are given; give one of both",
        "arg_mbs: is empty; give at least one microbatch",
        "sizes: step 0 has 2, and 1 microbatches; give one for each",
        "target: is not given on the rank of the last stage; give target or target_mbs there",
        "rank 1: target_mbs: has 1 microbatches, the step 2; give one for each",
        "nothing",
        "rank 1: runs forwards only, the rank of the first stage a training step; call step or eval on all ranks",
        "sizes, microbatch 0: 'nan' is not a finite number; give tokens, or another number that costs grow with",
        "step(): needs gradients, and they are switched off; call eval()",
        "target: is not given on the rank of the last stage; give target or target_mbs there",
    ]
    # What only the rank of the last stage can know, the others hear, too.
    assert first == [f"rank 1: {each}" if i == 8 else each for i, each in enumerate(reported)]
    # What only the rank of the first stage can know, the others hear from it.
    heard = [f"rank 0, of the first stage: {each}" if i in (5, 6, 7, 12) else each for i, each in enumerate(reported)]
    assert second == heard


def test_a_trace_of_planned_steps_is_explained(tmp_path: Path) -> None:
    launch(traced, 2, str(tmp_path), timeout_s=60.0)
    explained = explain_traces([tmp_path], budget=Budget(evaluations=20))
    assert len(explained.run.iterations) >= 2
    for iteration in explained.run.iterations:
        for rank, found in enumerate(iteration.ranks):
            done = sorted((one.unit.stage, KIND_NAMES[one.unit.kind], one.unit.microbatch) for one in found)
            assert {kind for _, kind, _ in done} <= {"F", "B", "I", "W"}
            assert {(stage, m) for stage, kind, m in done if kind == "F"} == {
                (stage, m) for stage in (rank, rank + 2) for m in range(3)
            }


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True])
def test_the_planners_plans_run(ahead: bool) -> None:
    for found in launch(searched, 2, ahead, timeout_s=120.0):
        assert found["done"]
        assert found["worst"] <= 1e-10
