"""Predict published training runs, and summarize the errors."""

from pipeloom.validation.memory import MemoryErrors
from pipeloom.validation.predict import Prediction, predict
from pipeloom.validation.runs import PublishedRun, read_runs
from pipeloom.validation.summary import Errors, Regret, Summary, summarize

__all__ = [
    "Errors",
    "MemoryErrors",
    "Prediction",
    "PublishedRun",
    "Regret",
    "Summary",
    "predict",
    "read_runs",
    "summarize",
]
