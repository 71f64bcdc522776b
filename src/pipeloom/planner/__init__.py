"""The planner: turns a batch's metadata into a verified plan ahead of training, without blocking training."""

from pipeloom.planner.client import HostedStore, Planner
from pipeloom.planner.messages import Request, answer_of
from pipeloom.planner.planning import FinishingTime, PlannedBatch, plan_batch
from pipeloom.planner.problem import PlanningProblem, Problem, Setup
from pipeloom.planner.problem_file import check_problem, read_problem, write_problem
from pipeloom.planner.process import PlannerProcess
from pipeloom.planner.service import Store, serve

__all__ = [
    "FinishingTime",
    "HostedStore",
    "PlannedBatch",
    "Planner",
    "PlannerProcess",
    "PlanningProblem",
    "Problem",
    "Request",
    "Setup",
    "Store",
    "answer_of",
    "check_problem",
    "plan_batch",
    "read_problem",
    "serve",
    "write_problem",
]
