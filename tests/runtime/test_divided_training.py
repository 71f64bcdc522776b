"""Training over replicas, tensor-parallel ranks and shards is the undivided training."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.train.divide import check_divisible
from pipeloom.spec import Parallelism

from .divided_training import (
    DOCUMENTS,
    SHORT,
    Asked,
    Degrees,
    Found,
    Tried,
    divisible,
    held_out,
    problem_of,
    train_divided,
    train_refuse_and_read,
)
from .training import data, drawn, losses_undivided

pytestmark = pytest.mark.ranks

REPLICAS, TENSORS, SHARDS = Degrees(2, 2, 1), Degrees(2, 1, 2), Degrees(2, 2, 1, "fsdp")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Tried]:
    """Four ranks that go from one kind of parallelism to the next, with a checkpoint in between."""
    folder = str(tmp_path_factory.mktemp("divided"))
    return launch(train_refuse_and_read, 4, [REPLICAS, TENSORS, SHARDS], [3, 4, 5], folder)


def assert_undivided(ranks: list[list[Found]]) -> None:
    """Losses are those of undivided training, and all ranks have the same norms and, in the end, weights."""
    count = sum(len(found.losses) for found in ranks[0])
    wanted = losses_undivided(count, tied=True, documents=DOCUMENTS, short=SHORT)
    for rank in ranks:
        assert [loss for found in rank for loss in found.losses] == pytest.approx(wanted, abs=1e-8, rel=0)
        for found, first in zip(rank, ranks[0], strict=True):
            assert found.norms == pytest.approx(first.norms, rel=1e-12)
            assert found.digest == first.digest
            assert found.all_fresh
            assert found.evaluated == pytest.approx(found.wanted, rel=1e-9)
            assert found.evaluated[0] != pytest.approx(found.evaluated[1], rel=1e-6)


@pytest.mark.full
def test_replicas_equal_undivided_training(tmp_path: Path) -> None:
    """The second trainer uses the process groups of the first one."""
    assert_undivided(launch(train_divided, 2, [Degrees(1, 2, 1, "fsdp")] * 2, [1, 2], str(tmp_path)))


@pytest.mark.full
def test_divided_training_equals_undivided_training(trained: list[Tried]) -> None:
    assert_undivided([found for found, _, _ in trained])


@pytest.mark.full
def test_replicas_have_plans_of_their_own_and_tensor_parallel_ranks_share_them(trained: list[Tried]) -> None:
    replicas, tensors, shards = ([found[i].counts for found, _, _ in trained] for i in range(3))
    # Neighbouring ranks are replicas of one pipeline rank, or share its tensors.
    for counts in (replicas, shards):
        assert counts[0] == counts[2]
        assert counts[1] == counts[3]
    assert replicas[0] != replicas[1]
    assert tensors == [tensors[0]] * 4


def assert_loaded_once(ranks: list[list[Asked]], documents: list[data.Document]) -> None:
    """Of two stages of two replicas: what was loaded is what their own layers take of their own documents."""
    for stage, (first, second) in enumerate((ranks[:2], ranks[2:])):
        # A document is a replica's own, on both of its stages.
        both = [{each.document for each in asked} for asked in (first, second)]
        assert not both[0] & both[1]
        assert both[0] | both[1] == {document.identifier for document in documents}
        assert [{each.document for each in asked} for asked in ranks[:2]] == both
        of_lm = sorted(each for each in (*first, *second) if each.module == "lm")
        wanted = ((0,), False) if stage == 0 else ((), True)
        assert of_lm == sorted(Asked(document.identifier, "lm", *wanted) for document in documents)
        images = sorted(
            (each.document, n) for each in (*first, *second) if each.module == "vision" for n in each.instances
        )
        every = sorted((document.identifier, n) for document in documents for n in range(len(document.images)))
        assert images == (every if stage == 0 else [])
        assert stage == 0 or all(each.module == "lm" for each in (*first, *second))


@pytest.mark.full
def test_a_process_loads_what_its_own_layers_take_of_its_replicas_samples(trained: list[Tried]) -> None:
    for number, begin, end in ((0, 0, 3), (2, 4, 5)):
        of_training = [found[number].asked for found, _, _ in trained]
        of_evaluation = [found[number].asked_to_evaluate for found, _, _ in trained]
        for asked, batches in ((of_training, drawn(end, DOCUMENTS, SHORT)[begin:]), (of_evaluation, list(held_out()))):
            assigned = [document for batch in batches if len(batch) > 1 for document in batch]
            # The one sample of a short batch is both replicas'.
            alone = {batch[0].identifier for batch in batches if len(batch) == 1}
            assert_loaded_once([[each for each in mine if each.document not in alone] for mine in asked], assigned)
            assert all({each.document for each in mine} >= alone for mine in asked)
            assert not assigned or sum(len(document.images) for document in assigned) > 4  # of a part at most


@pytest.mark.full
def test_no_layer_that_is_divided_is_whole_when_the_next_is_read(trained: list[Tried]) -> None:
    for process, (_, _, reads) in enumerate(trained):
        for degrees, (read, whole) in zip((REPLICAS, TENSORS, SHARDS), reads, strict=True):
            mine = [chunk for chunk in problem_of(degrees).layout.chunks if chunk.rank == process // 2]
            own = {f"{c.module}.{number}" for c in mine for number in range(c.layers[0], c.layers[1] + 1)}
            assert {".".join(name.split(".")[:2]) for name in read} == own
            assert len(read) == len(set(read))
            names = [name for each in whole for name in each]
            if degrees == TENSORS:
                # Of a block the perceptron is divided; its norms stay whole.
                assert any("_norm." in name for name in names)
                assert not any(".widen." in name or name.endswith(".narrow.weight") for name in names)
            elif degrees == SHARDS:
                assert len(whole) > 1
                assert not names


@pytest.mark.full
def test_divided_layers_hold_less(trained: list[Tried]) -> None:
    for (whole, tensors, shards), _, _ in trained:
        assert tensors.held < 0.8 * whole.held
        assert shards.held < 0.6 * whole.held


@pytest.mark.full
def test_rules_that_cannot_be_followed_are_named(trained: list[Tried]) -> None:
    for _, (uneven, renaming, raising, nothing, missing, size), _ in trained:
        assert "project.weight: has 7 in dimension 0, not a multiple of the 2 tensor-parallel ranks" in uneven
        assert "layers[1]: has renamed parameters after parallelize" in renaming
        assert "layers[0]: parallelize: raised RuntimeError: no idea how" in raising
        assert "parallelize divided no parameter of any layer" in nothing
        assert "has no `parallelize` for 2 tensor-parallel ranks" in missing
        assert "layout.num_ranks: 2, but 4 processes run" in size


def test_shards_need_replicas() -> None:
    with pytest.raises(InputError, match=r"shard: 'fsdp' shards over replicas, and parallelism.data is 1"):
        check_divisible(divisible(), Parallelism(2, 1), "fsdp")


@pytest.mark.soak
def test_all_three_together_equal_undivided_training(tmp_path: Path) -> None:
    degrees = [Degrees(2, 2, 2), Degrees(2, 2, 2, "fsdp"), Degrees(4, 1, 2), Degrees(1, 4, 2, "fsdp")]
    assert_undivided(launch(train_divided, 8, degrees, [3, 6, 8, 10], str(tmp_path), timeout_s=300.0))
