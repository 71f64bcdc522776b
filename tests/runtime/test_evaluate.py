"""Evaluation runs forwards alone, has the undivided model's loss, and leaves training as it was."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.plan import ExecutionPlan, boundary_shapes, lower, verify
from pipeloom.planner import PlanningProblem
from pipeloom.planner.forwards import forward_problem
from pipeloom.runtime import Executor, StepResult, ThreadHub, run_undivided
from pipeloom.runtime.train.evaluate import evaluating, forward_executor, preserve_random_state
from pipeloom.taskgraph import build_graph
from pipeloom.training.loop_config import EvaluationConfig
from pipeloom.training.rank import _Evaluator
from tests.plan.cases import RandomCosts, earliest, random_schedule
from tests.planner.cases import random_problem
from tests.runtime.cases import Run, copied, random_run, take_gradients, total_loss
from tests.threads import on_threads


def forward_plan(run: Run, seed: int) -> ExecutionPlan:
    """A random plan of the forwards of a random iteration."""
    case, layout = run.case, run.case.layout.forward_only()
    graph = build_graph(layout, case.packing, RandomCosts(seed, False))
    schedule = random_schedule(random.Random(seed), graph)
    timeline = earliest(graph, schedule)
    plan = lower(graph, schedule, timeline, layout, case.packing, boundary_shapes(case.model, layout))
    verify(plan, layout, case.packing)
    return plan


def evaluate_threads(run: Run, plan: ExecutionPlan) -> list[StepResult]:
    """With a thread per rank, each with a copy of the model and an executor that could train it."""
    num_ranks, hub = run.case.layout.num_ranks, ThreadHub("tags", 20.0)
    models = [replace(run.model, modules=copied(run.model)) for _ in range(num_ranks)]

    def work(rank: int) -> StepResult:
        executor = Executor(models[rank], run.case.layout, rank, hub.transport(rank), reduce_gradients=lambda *_: None)
        before = [p.requires_grad for _, p in executor.named_parameters()]
        result = forward_executor(executor).run(plan, run.case.packing, run.documents)
        assert [p.requires_grad for _, p in executor.named_parameters()] == before
        return result

    results = on_threads(hub, num_ranks, work)
    for model in models:
        assert all(gradient is None for gradient in take_gradients(model).values())
    return results


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**9), st.booleans(), st.booleans())
def test_any_plan_of_forwards_has_the_loss_of_the_undivided_model(seed: int, streams: bool, replicate: bool) -> None:
    run = random_run(seed, streams=streams, replicate=replicate)
    wanted = run_undivided(run.model, run.case.packing.batch, run.documents, backward=False)
    plan = forward_plan(run, seed)
    verbs = {action.verb for actions in plan.ranks for action in actions}
    assert not {verb for verb in verbs if verb.direction == "B"} | (verbs & {"B", "I", "W", "RECOMPUTE", "REDUCE_GRAD"})
    results = evaluate_threads(run, plan)
    assert total_loss(results) == pytest.approx(wanted, abs=1e-10 * (1 + abs(wanted)), rel=0)


@pytest.mark.parametrize(("weights", "copies"), [("trained", 3.0), ("ema", 4.0)])
def test_averages_need_memory_for_the_weights_that_they_replace(
    weights: Literal["trained", "ema"], copies: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, made = random_problem(3), list[PlanningProblem]()
    frozen = msgspec.structs.replace(problem.model.modules[0], frozen=True)
    model = msgspec.structs.replace(problem.model, modules=(frozen, *problem.model.modules[1:]))
    problem = replace(problem, model=model, costs=replace(problem.profile_costs, model=model))
    rank = sys.modules[_Evaluator.__module__]
    monkeypatch.setattr(
        rank, "forward_problem", lambda *given, **named: made.append(forward_problem(*given, **named)) or made[-1]
    )
    job: Any = SimpleNamespace(config=SimpleNamespace(evaluation=EvaluationConfig(1, weights=weights)))
    trainer: Any = None
    _Evaluator(job, problem, trainer, None, lambda: None)
    held = made[0].profile_costs.held_copies
    assert held == {key: 1.0 if key.startswith("vision/") else copies for key in held}


def test_kernels_are_compiled_before_a_resumed_run_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, seen, rank = random_problem(3), list[str](), sys.modules[_Evaluator.__module__]
    monkeypatch.setattr(PlanningProblem, "compile_kernels", lambda _problem: seen.append("compiled"))
    monkeypatch.setattr(rank, "LongBarrier", lambda: SimpleNamespace(wait=lambda _what: seen.append("waited")))
    monkeypatch.setattr(rank, "broadcast_bytes", lambda *_, **__: msgspec.msgpack.encode((0, 0.0)))
    monkeypatch.setattr(_Evaluator, "after", lambda _evaluator, done: seen.append(f"evaluated {done}"))
    job: Any = SimpleNamespace(config=SimpleNamespace(evaluation=EvaluationConfig(2)))
    trainer: Any = SimpleNamespace(membership=SimpleNamespace(is_planner_rank=True))
    _Evaluator(job, problem, trainer, None, lambda: None).begin(4)
    assert seen == ["compiled", "waited", "evaluated 4"]


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3)


def test_modes_and_random_states_are_put_back() -> None:
    layers: list[torch.nn.Module] = [Mixed(), Mixed()]
    layers[1].norm.eval()
    before = [module.training for layer in layers for module in layer.modules()]
    with evaluating(layers):
        assert not any(module.training for layer in layers for module in layer.modules())
    assert [module.training for layer in layers for module in layer.modules()] == before

    def draw() -> list[Any]:
        return [float(torch.rand(())), random.random(), float(np.random.random())]  # noqa: NPY002

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    wanted = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    with preserve_random_state(torch.device("cpu")):
        assert draw() == wanted
    assert draw() == wanted
