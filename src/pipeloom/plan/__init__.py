"""Execution plans: actions, lowering from a schedule, verification, text form."""

from pipeloom.plan.action import COMPUTE_VERBS, RECEIVE_VERBS, SEND_VERBS, Action, ExecutionPlan, Verb

__all__ = ["COMPUTE_VERBS", "RECEIVE_VERBS", "SEND_VERBS", "Action", "ExecutionPlan", "Verb"]
