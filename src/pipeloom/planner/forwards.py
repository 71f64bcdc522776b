"""Forward-only plans for batches on which a model is evaluated."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from pipeloom.cost import usual_copies
from pipeloom.errors import InfeasibleError
from pipeloom.packing import budget_tokens
from pipeloom.plan import Delivery, delivery_of
from pipeloom.planner.client import fallback_plan
from pipeloom.planner.messages import answer_of
from pipeloom.planner.problem import PlanningProblem
from pipeloom.spec import Batch

_HALVINGS = 8


def forward_problem(problem: PlanningProblem, *, averaged: bool = False) -> PlanningProblem:
    """Return the problem of planning only the forwards of a training problem, with its layout and memory.

    Weights and optimizer state are held as in training, but no gradients and no activations for a backward. The
    strategy is recomputation, because its forward saves nothing.

    Parameters
    ----------
    problem : PlanningProblem
        The training problem.
    averaged : bool
        Whether averaged weights are evaluated. The trained weights are kept meanwhile, in the memory
        that gradients have in training.
    """
    costs = problem.profile_costs
    frozen = tuple(msgspec.structs.replace(module, frozen=True) for module in problem.model.modules)
    model = msgspec.structs.replace(problem.model, modules=frozen)
    held = {}
    for module in problem.model.modules:
        freed = 0.0 if module.frozen or averaged else 1.0
        for layer in module.flat_layers:
            key = f"{module.name}/{layer.kind}"
            held[key] = costs.held_copies.get(key, usual_copies(module.frozen)) - freed
    # If nothing is held, the number of microbatches matters little. PipeTune's recurrence includes backwards.
    policy = "balanced" if problem.packing.policy == "planned" else problem.packing.policy
    costs = replace(costs, model=model, strategies=("recompute",), split_backward=False, held_copies=held)
    return replace(
        problem,
        model=model,
        layout=problem.layout.forward_only(),
        packing=msgspec.structs.replace(problem.packing, policy=policy),
        costs=costs,
        tuning=None,
        search=msgspec.structs.replace(problem.search, rules=()),
        threads=1,
    )


def plan_forwards(problem: PlanningProblem, batch: Batch) -> Delivery:
    """Plan the forwards of a batch by a fixed heuristic, in milliseconds. If they do not fit, use smaller microbatches.

    ``problem`` comes from `forward_problem`.

    Raises
    ------
    InputError, InfeasibleError
        If the batch cannot be packed, or does not fit into memory.
    """
    begin = time.monotonic()
    most = problem.packing.token_budget
    longest = min(most, int(budget_tokens(batch, problem.model).max()))
    for halving in range(_HALVINGS + 1):
        packing = msgspec.structs.replace(problem.packing, token_budget=max(most >> halving, longest, 1))
        try:
            planned = fallback_plan(replace(problem, packing=packing), batch)
            break
        except InfeasibleError:
            if halving == _HALVINGS or problem.memory.capacity_bytes is None:
                raise
    answer = answer_of(planned, search_s=time.monotonic() - begin, ready_ns=time.monotonic_ns())
    return delivery_of(answer, planned.packing, problem.layout, backend=problem.backend)
