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
from pipeloom.planner.messages import Setup, answer_of
from pipeloom.planner.problem import Problem
from pipeloom.spec import Batch

_HALVINGS = 8


def forward_problem(setup: Setup) -> Problem:
    """Return the problem of planning only forwards, with the layout and memory of a training run.

    Weights and optimizer state are held as in training, but no gradients and no activations for a backward. The
    strategy is recomputation, because its forward saves nothing.
    """
    frozen = tuple(msgspec.structs.replace(module, frozen=True) for module in setup.model.modules)
    model = msgspec.structs.replace(setup.model, modules=frozen)
    held = {}
    for module in setup.model.modules:
        for layer in module.flat_layers:
            key = f"{module.name}/{layer.kind}"
            held[key] = setup.held_copies.get(key, usual_copies(module.frozen)) - (0.0 if module.frozen else 1.0)
    # If nothing is held, the number of microbatches matters little. PipeTune's recurrence includes backwards.
    policy = "balanced" if setup.packing.policy == "planned" else setup.packing.policy
    forwards = msgspec.structs.replace(
        setup,
        model=model,
        layout=setup.layout.forward_only(),
        packing=msgspec.structs.replace(setup.packing, policy=policy),
        strategies=("recompute",),
        tuning=None,
        split_backward=False,
        held_copies=held,
        search=msgspec.structs.replace(setup.search, rules=()),
        threads=1,
    )
    return forwards.problem()


def plan_forwards(problem: Problem, batch: Batch) -> Delivery:
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
            if halving == _HALVINGS or problem.capacity_bytes is None:
                raise
    answer = answer_of(planned, search_s=time.monotonic() - begin, ready_ns=time.monotonic_ns())
    return delivery_of(answer, planned.packing, problem.layout, backend=problem.backend)
