"""Dealing by predicted time, on random loads and predictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import LayerFit, Profile, ProfileCosts
from pipeloom.errors import InputError
from pipeloom.layout import encoder_first, replicated, separate
from pipeloom.packing import Loads, assign_by_time, assign_to_replicas, cost_loads
from pipeloom.packing.replicas import Members, Predict
from tests.cases import random_batch, vlm_spec
from tests.planner.cases import random_problem

FIT = LayerFit((1e-4, 0, 1e-5, 1e-8), (2e-4, 0, 2e-5, 2e-8), (0, 0, 8, 0))


def random_loads(seed: int, num_samples: int) -> Loads:
    """A few long samples among short ones; some have nothing for the encoder."""
    random = np.random.default_rng(seed)
    backbone = random.lognormal(0, 1.2, num_samples)
    encoder = random.lognormal(0, 1.0, num_samples) * (random.random(num_samples) < 0.5)
    return Loads(np.ones(num_samples, np.int64), backbone, encoder)


def pipelined(loads: Loads, ranks: int = 4, room: float = float("inf")) -> Predict:
    """All work evenly on all ranks, and the longest sample once through all of them; samples above room do not fit."""
    work = loads.backbone + loads.encoder

    def predict(members: Members, replica: int = 0) -> float:
        own = work[list(members)]
        return float(own.sum() / ranks + own.max()) if own.sum() <= room else float("inf")

    return predict


def limited(predict: Predict, most: int) -> Predict:
    """So often and no more."""
    left = most

    def asked(members: Members, replica: int) -> float | None:
        nonlocal left
        left -= 1
        return predict(members, replica) if left >= 0 else None

    return asked


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 60))
def test_no_sample_is_lost_and_no_assignment_predicted_slower_than_by_loads(
    seed: int, num_replicas: int, most: int
) -> None:
    loads = random_loads(seed, num_replicas + seed % 30)
    predict = pipelined(loads)
    found = assign_by_time(loads, num_replicas, limited(predict, most), seed)
    assert sorted(i for members in found.members for i in members) == list(range(len(loads)))
    assert all(members and list(members) == sorted(members) for members in found.members)
    assert [found.members[replica].count(i) for i, replica in enumerate(found.replicas)] == [1] * len(loads)
    assert found == assign_by_time(loads, num_replicas, limited(predict, most), seed)
    first = assign_to_replicas(loads, num_replicas, seed)
    slowest = max(predict(members, 0) or 0.0 for members in found.members)
    assert slowest <= max(predict(members, 0) or 0.0 for members in first)
    if most < num_replicas or num_replicas == 1:
        assert found.members == first
        assert found.predicted == ()
    else:
        assert found.predicted == tuple(predict(members, 0) for members in found.members)
        assert found.slowest == slowest


def test_a_replica_with_a_long_sample_gives_others_away() -> None:
    """By loads it has as much as the other, and then fills its pipeline badly."""
    gains = []
    for seed in range(10):
        loads = random_loads(seed, 24)
        loads.backbone[0] = 0.3 * loads.backbone.sum()
        predict = pipelined(loads)
        by_loads = max(predict(members, 0) or 0.0 for members in assign_to_replicas(loads, 3, seed))
        gains.append(by_loads / assign_by_time(loads, 3, limited(predict, 60), seed).slowest)
    assert min(gains) >= 1.0
    assert sum(gains) / len(gains) > 1.04


def test_shares_that_do_not_fit_are_left_while_others_do() -> None:
    """Loads alone say nothing of room: here there is little for a share of many samples."""
    mended = 0
    for seed in range(10):
        loads = random_loads(seed, 30)

        def predict(members: Members, replica: int = 0) -> float:
            return float("inf") if len(members) > 12 else float(len(members))

        found = assign_by_time(loads, 3, limited(predict, 200), seed)
        crowded = any(len(members) > 12 for members in assign_to_replicas(loads, 3, seed))
        assert found.slowest < float("inf") or crowded
        mended += crowded and found.slowest < float("inf")
    assert mended


@pytest.mark.parametrize("num_replicas", [0, 4])
def test_replicas_without_samples_are_refused(num_replicas: int) -> None:
    loads = random_loads(0, 3)
    with pytest.raises(InputError, match=rf"num_replicas.*{num_replicas} is not in 1\.\.3"):
        assign_by_time(loads, num_replicas, pipelined(loads))


@pytest.mark.parametrize("backbone", [[0] * 8, [10, 0, 0, 0], [0, 0, 7, 0, 0, 3, 0]])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_samples_without_work_leave_no_replica_empty(backbone: list[int], num_replicas: int) -> None:
    for encoder in (np.zeros(len(backbone)), np.array([0.0, 5.0] + [0.0] * (len(backbone) - 2))):
        loads = Loads(np.zeros(len(backbone), np.int64), np.array(backbone, float), encoder)
        for weight in (0.0, 1.0, 4.0):
            assigned = assign_to_replicas(replace(loads, encoder_weight=weight), num_replicas)
            assert sorted(i for members in assigned for i in members) == list(range(len(backbone)))
            assert min(map(len, assigned)) >= 1
    # If no sample has any work, replicas have equal numbers of samples.
    if not any(backbone):
        loads = Loads(loads.tokens, np.zeros(len(backbone)), np.zeros(len(backbone)))
        numbers = [len(members) for members in assign_to_replicas(loads, num_replicas)]
        assert max(numbers) - min(numbers) <= 1


def test_encoders_weigh_more_on_few_ranks() -> None:
    model = vlm_spec(2, 8)
    kinds = {f"{m.name}/{layer.kind}": FIT for m in model.modules for layer in m.flat_layers}
    costs, batch = ProfileCosts(model, Profile("made", kinds)), random_batch(3)
    first = encoder_first(model, 4, lambda *_: 1.0)
    two, four = (separate(model, ranks, {}, lambda *_: 1.0) for ranks in (2, 4))
    for layout, weight in ((first, 4), (four, 2), (two, 1), (replicated(first, ["vision"]), 1)):
        assert cost_loads(batch, model, layout, costs).encoder_weight == weight
    loads = random_loads(3, 24)
    assert assign_to_replicas(loads, 3) != assign_to_replicas(replace(loads, encoder_weight=4), 3)


def test_an_encoder_that_lies_on_every_rank_weighs_what_one_of_them_does() -> None:
    problem, batch = random_problem(3), random_batch(3)
    everywhere = replicated(problem.layout, ["vision"])
    assert everywhere.num_ranks > 1
    once, there = (cost_loads(batch, problem.model, layout, problem.costs) for layout in (problem.layout, everywhere))
    assert there.encoder == pytest.approx(once.encoder)
    assert there.backbone == pytest.approx(once.backbone)
