"""Predict published training runs, fit constants to them, and say how far predictions can be trusted."""

from pipeloom.validation.confidence import (
    INTERVAL,
    SIGN_RIGHT,
    Chance,
    Interval,
    chance,
    interval,
    interval_for,
    published_device,
)
from pipeloom.validation.memory import MemoryErrors
from pipeloom.validation.papers import PaperFigure, PaperPrediction, paper_figures, predict_figure
from pipeloom.validation.predict import Prediction, predict
from pipeloom.validation.runs import PublishedRun, published_runs, read_runs
from pipeloom.validation.summary import Errors, Regret, Summary, summarize

__all__ = [
    "INTERVAL",
    "SIGN_RIGHT",
    "Chance",
    "Errors",
    "Interval",
    "MemoryErrors",
    "PaperFigure",
    "PaperPrediction",
    "Prediction",
    "PublishedRun",
    "Regret",
    "Summary",
    "chance",
    "interval",
    "interval_for",
    "paper_figures",
    "predict",
    "predict_figure",
    "published_device",
    "published_runs",
    "read_runs",
    "summarize",
]
