"""Check that a plan's messages have the shapes that the model declares."""

from __future__ import annotations

from pipeloom.errors import PlanError
from pipeloom.packing import Packing
from pipeloom.plan.action import ExecutionPlan
from pipeloom.plan.routes import Router, Unit, boundary_shapes, target_word, transferred_workload
from pipeloom.plan.text import action_text
from pipeloom.spec import Layout, ModelSpec


def check_shapes(plan: ExecutionPlan, model: ModelSpec, layout: Layout, packing: Packing) -> None:
    """Raise `PlanError` if messages of a verified plan have other shapes than the model declares for the batch.

    A plan that is complete and free of deadlock may still be a plan for another model or batch.

    Raises
    ------
    PlanError
        A shape differs. The error names the first such message and its expected shape.
    """
    shapes = boundary_shapes(model, layout)
    names = layout.chunk_names
    chunks = {name: number for number, name in enumerate(names)}
    everything = [action for actions in plan.ranks for action in actions]
    units = [Unit(chunks[a.chunk], a.microbatch, a.sub_microbatch) for a in everything if a.verb == "F"]
    routes = Router(layout).of(packing, units)
    # If the consuming module has smaller parts, each consumer takes only some rows of an output. Messages of one unit
    # may therefore differ in shape.
    expected_of: dict[Unit, dict[tuple[str, str], tuple[tuple[int, ...], str]]] = {}
    for action in everything:
        if action.shape is None:
            continue
        unit = Unit(chunks[action.chunk], action.microbatch, action.sub_microbatch)
        if unit not in expected_of:
            siblings = routes.out_of(unit)
            expected_of[unit] = {
                (target_word(h, siblings, names), h.stream): shapes(
                    unit.chunk, transferred_workload(h, layout, packing), h.stream
                )
                for h in siblings
            }
        expected = expected_of[unit].get((action.target, action.stream))
        if (action.shape, action.dtype) != expected:
            should = "has no consumer" if expected is None else f"has another shape than {expected[0]} {expected[1]}"
            raise PlanError(f"'{action_text(action)}' {should}")
