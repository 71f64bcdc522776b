"""The planner: turns a batch's metadata into a verified plan ahead of training, without blocking training."""

from pipeloom.planner.client import HostedStore, Planner
from pipeloom.planner.messages import Request, Setup, answer_of, check_setup
from pipeloom.planner.planning import FinishingTime, PlannedBatch, plan_batch
from pipeloom.planner.problem import Problem
from pipeloom.planner.process import PlannerProcess
from pipeloom.planner.service import Store, serve

__all__ = [
    "FinishingTime",
    "HostedStore",
    "PlannedBatch",
    "Planner",
    "PlannerProcess",
    "Problem",
    "Request",
    "Setup",
    "Store",
    "answer_of",
    "check_setup",
    "plan_batch",
    "serve",
]
