"""Ranks that have one communicator: every message of a rank waits for those that it posted before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import ExecutionError, InputError
from pipeloom.plan import joined_posts
from pipeloom.plan.dryrun import dry_run
from pipeloom.runtime import BatchedTransport, Executor, ThreadHub, TorchTransport
from pipeloom.runtime.launch.transport import MatchOrder, Post, batches_p2p
from tests.plan.cases import EVERY_STRATEGY

from .cases import assert_equal_gradients, expected, random_run, run_threads, take_gradients


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_random_plans_are_exact_over_one_communicator(seed: int, joined: bool, anyhow: bool) -> None:
    run = random_run(seed, strategies=EVERY_STRATEGY)
    _, wanted = expected(run)
    plan = (run.case.at_any_times(seed) if anyhow else run.case).serial_plan
    run_threads(run, plan, "serial", joined)
    assert_equal_gradients(take_gradients(run.model), wanted)


def test_joined_messages_are_exact_and_there_are_some() -> None:
    num_joined = 0
    for seed in range(6):
        run = random_run(seed, 2 + seed % 3)
        _, wanted = expected(run)
        plan = run.case.serial_plan
        num_joined += sum(len(joined_posts(plan, rank)) for rank in range(plan.num_ranks))
        run_threads(run, plan, "serial", True)
        assert_equal_gradients(take_gradients(run.model), wanted)
    assert num_joined > 0


def test_a_plan_that_the_dry_run_stops_stops_on_ranks_too() -> None:
    run, plan = next(
        (run, plan)
        for seed in range(100)
        for run in [random_run(seed, 4)]
        for plan in [run.case.at_any_times(seed).plan]
        if dry_run(plan, "nccl serial") is not None
    )
    run_threads(run, plan, "in order")
    with pytest.raises(ExecutionError, match=r"no answer of rank|another rank failed"):
        run_threads(run, plan, "serial", timeout_s=0.5)


def test_an_executor_refuses_plans_for_other_backends() -> None:
    run, plan = next(
        (run, plan)
        for seed in range(100)
        for run in [random_run(seed, 4)]
        for plan in [run.case.at_any_times(seed).plan]
        if dry_run(plan, "nccl serial") is not None
    )
    executor = Executor(run.model, run.case.layout, 0, BatchedTransport())
    with pytest.raises(InputError, match=r'may deadlock with NCCL .*give its PlanningProblem backend="nccl"'):
        executor.prepare(plan, run.case.packing)
    executor.prepare(run.case.serial_plan, run.case.packing)


@pytest.mark.parametrize(("order", "joined"), [("in order", False), ("serial", False), ("serial", True)])
def test_first_messages_that_block_a_rank_are_sent_before_the_plan(order: MatchOrder, joined: bool) -> None:
    for seed in (3, 7, 10):
        run = random_run(seed, 3)
        _, wanted = expected(run)
        plan = run.case.at_any_times(seed).serial_plan
        run_threads(run, plan, order, joined, lazy=True, greets=True)
        assert_equal_gradients(take_gradients(run.model), wanted)


def test_first_messages_that_block_a_rank_may_stop_a_plan() -> None:
    def stops(seed: int) -> bool:
        run = random_run(seed, 3)
        try:
            run_threads(run, run.case.at_any_times(seed).plan, "in order", timeout_s=0.5, lazy=True)
        except ExecutionError as error:
            return "no answer of rank" in str(error) or "another rank failed" in str(error)
        return False

    assert any(stops(seed) for seed in (3, 7, 10, *range(11, 60)))


def test_operations_that_differ_at_their_ends_are_refused() -> None:
    hub = ThreadHub("serial", batches_p2p=True)
    here, there = hub.transport(0), hub.transport(1)
    assert batches_p2p(here)
    assert batches_p2p(there)
    handles = here.post([Post(True, torch.ones(1), 1, 0), Post(False, torch.ones(1), 1, 0)])
    there.post([Post(False, torch.ones(1), 0, 0)])
    with pytest.raises(ExecutionError, match="do not match"):
        handles[0].wait()


def test_which_transports_join() -> None:
    assert batches_p2p(BatchedTransport())
    assert not batches_p2p(TorchTransport())
    assert not batches_p2p(ThreadHub().transport(0))
