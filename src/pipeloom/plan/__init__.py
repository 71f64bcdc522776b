"""Execution plans: actions, lowering from a schedule, verification, text form."""

from pipeloom.plan.action import Action, ExecutionPlan, Verb, promised_verbs
from pipeloom.plan.delivery import Answer, Delivery, PackingCounts, RankAnswer, delivery_of, packing_counts
from pipeloom.plan.dryrun import BACKENDS, Backend, BackendName, backend_of
from pipeloom.plan.lower import lower
from pipeloom.plan.measured import Measured, MessageTime, fit_links
from pipeloom.plan.memory import peak_bytes
from pipeloom.plan.messages import joined_posts
from pipeloom.plan.pytorch import schedule_from_pytorch_csv, to_pytorch_csv
from pipeloom.plan.rank_plan import RankPlan, rank_plan, rank_plans
from pipeloom.plan.routes import (
    BoundaryTransfer,
    Router,
    Routes,
    Shapes,
    Unit,
    boundary_shapes,
    check_shapes,
    collective_order,
    make_routes,
    target_word,
    transferred_workload,
)
from pipeloom.plan.text import action_text, from_msgpack, from_text, to_msgpack, to_text
from pipeloom.plan.verify import verify

__all__ = [
    "BACKENDS",
    "Action",
    "Answer",
    "Backend",
    "BackendName",
    "BoundaryTransfer",
    "Delivery",
    "ExecutionPlan",
    "Measured",
    "MessageTime",
    "PackingCounts",
    "RankAnswer",
    "RankPlan",
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
    "delivery_of",
    "fit_links",
    "from_msgpack",
    "from_text",
    "joined_posts",
    "lower",
    "make_routes",
    "packing_counts",
    "peak_bytes",
    "promised_verbs",
    "rank_plan",
    "rank_plans",
    "schedule_from_pytorch_csv",
    "target_word",
    "to_msgpack",
    "to_pytorch_csv",
    "to_text",
    "transferred_workload",
    "verify",
]
