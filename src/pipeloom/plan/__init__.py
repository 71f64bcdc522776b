"""Execution plans: actions, lowering from a schedule, verification, text form."""

from pipeloom.plan.action import (
    COMPUTE_VERBS,
    MEMORY_VERBS,
    POST_VERBS,
    RECEIVE_VERBS,
    SEND_VERBS,
    WAIT_VERBS,
    Action,
    ExecutionPlan,
    Verb,
)
from pipeloom.plan.backend import BACKENDS, Backend, BackendName, backend_of
from pipeloom.plan.collectives import collective_order
from pipeloom.plan.delivery import Answer, Delivery, PackingCounts, packing_counts
from pipeloom.plan.joined import joined_posts
from pipeloom.plan.lower import lower, strategy_word
from pipeloom.plan.measured import Measured, MessageTime
from pipeloom.plan.pytorch import schedule_from_pytorch_csv, to_pytorch_csv
from pipeloom.plan.routes import (
    HandOver,
    Router,
    Routes,
    Shapes,
    Unit,
    boundary_shapes,
    handed_workload,
    make_routes,
    target_word,
)
from pipeloom.plan.shapes import check_shapes
from pipeloom.plan.text import action_text, from_msgpack, from_text, to_msgpack, to_text
from pipeloom.plan.verify import verify

__all__ = [
    "BACKENDS",
    "COMPUTE_VERBS",
    "MEMORY_VERBS",
    "POST_VERBS",
    "RECEIVE_VERBS",
    "SEND_VERBS",
    "WAIT_VERBS",
    "Action",
    "Answer",
    "Backend",
    "BackendName",
    "Delivery",
    "ExecutionPlan",
    "HandOver",
    "Measured",
    "MessageTime",
    "PackingCounts",
    "Router",
    "Routes",
    "Shapes",
    "Unit",
    "Verb",
    "action_text",
    "backend_of",
    "boundary_shapes",
    "check_shapes",
    "collective_order",
    "from_msgpack",
    "from_text",
    "handed_workload",
    "joined_posts",
    "lower",
    "make_routes",
    "packing_counts",
    "schedule_from_pytorch_csv",
    "strategy_word",
    "target_word",
    "to_msgpack",
    "to_pytorch_csv",
    "to_text",
    "verify",
]
