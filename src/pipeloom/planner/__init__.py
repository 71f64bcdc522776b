"""The planner: a batch's metadata in, a verified plan out, ahead of training; never stalls it."""

from pipeloom.planner.client import Delivery, PlannerClient
from pipeloom.planner.messages import Answer, PackingCounts, Request, Setup, packing_counts
from pipeloom.planner.plan_batch import PlannedBatch, Problem, plan_batch
from pipeloom.planner.service import Store, serve

__all__ = [
    "Answer",
    "Delivery",
    "PackingCounts",
    "PlannedBatch",
    "PlannerClient",
    "Problem",
    "Request",
    "Setup",
    "Store",
    "packing_counts",
    "plan_batch",
    "serve",
]
