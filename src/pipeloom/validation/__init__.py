"""Predict published training runs, fit constants to them, and say how far predictions can be trusted."""

from pipeloom.validation.confidence import Chance, Interval, chance, interval, published_device
from pipeloom.validation.memory import MemoryErrors
from pipeloom.validation.predict import Prediction, predict
from pipeloom.validation.runs import PublishedRun, read_runs
from pipeloom.validation.summary import Errors, Regret, Summary, summarize

__all__ = [
    "Chance",
    "Errors",
    "Interval",
    "MemoryErrors",
    "Prediction",
    "PublishedRun",
    "Regret",
    "Summary",
    "chance",
    "interval",
    "predict",
    "published_device",
    "read_runs",
    "summarize",
]
