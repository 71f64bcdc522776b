"""Traces of PyTorch's own schedules: whether they come out when they are replayed, and what their costs predict."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeloom.explain.traces.costs import delay_medians, task_means
from pipeloom.explain.traces.explained import Explanation
from pipeloom.explain.traces.read import explain_traces
from pipeloom.explain.traces.replay import chain_graph
from pipeloom.report import markdown_table
from pipeloom.search import Budget
from pipeloom.timeline import simulate

TITLE = "Traces replayed"
_EXAMPLE = Path(__file__).parents[1] / "examples" / "explain_trace.py"
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
_SAME_STAGES = {"gpipe": "1f1b", "1f1b": "gpipe"}


def run(repeats: int = 5) -> str:
    """Measure, and return the section as Markdown.

    Parameters
    ----------
    repeats : int
        Recordings of each schedule on two ranks, by turns; on four ranks, which share cores here, two.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks, times in ((2, repeats), (4, 2)):
            found: dict[str, list[Explanation]] = {name: [] for name in _SCHEDULES}
            for turn in range(times):
                for name in _SCHEDULES:
                    found[name].append(_recorded(Path(folder) / f"{name}-{ranks}-{turn}", name, ranks))
            rows += [_row(name, ranks, found) for name in _SCHEDULES]
    text = (
        "`examples/explain_trace.py` with PyTorch's schedules on gloo: 8 microbatches, real computation "
        f"on one thread per rank, {repeats} recordings of three iterations each, two on four ranks.\n\n"
        "- *Replayed*: the largest error of a replay with the measured duration of every task and message. "
        "Time that no message explains counts as host time. So an error is an order, a dependency or "
        "a clock that the replay gets wrong.\n"
        "- *Bubbles replayed*: the largest error of any rank's bubbles.\n"
        "- *Mean costs*: the same order with every task at the mean of its stage and every message at "
        "the median of its link, against the mean iteration of a recording.\n"
        "- *Other's costs*: the same with the costs of another schedule's trace on the same stages. This "
        "is the error of a prediction."
    )
    head = (
        "ranks",
        "schedule",
        "measured, ms",
        "bubbles",
        "replayed",
        "bubbles replayed",
        "mean costs",
        "other's costs",
    )
    return f"{text}\n\n{markdown_table(head, rows)}"


def _recorded(folder: Path, name: str, ranks: int) -> Explanation:
    words = ["--schedule", name, "--ranks", str(ranks), "--out", str(folder)]
    subprocess.run([sys.executable, str(_EXAMPLE), *words], check=True, capture_output=True)
    return explain_traces([folder], budget=Budget(evaluations=2))


def _row(name: str, ranks: int, found: dict[str, list[Explanation]]) -> list[str]:
    mine = found[name]
    replays = [one for each in mine for one in each.replays]
    idle = sum(float(one.measured_idle_ns.sum()) for one in replays) / sum(one.measured_ns * ranks for one in replays)
    means = [each.what_if.as_traced_timeline.makespan_ns / each.mean_measured_ns - 1 for each in mine]
    others = [
        _predicted(other, each) for other, each in zip(found.get(_SAME_STAGES.get(name, ""), ()), mine, strict=False)
    ]
    return [
        str(ranks),
        name,
        _range([one.measured_ns / 1e6 for one in replays], "{:.0f}"),
        f"{idle:.1%}",
        f"{max((one.error for one in replays), key=abs):+.2%}",
        f"{max((error for one in replays for error in one.bubble_errors), key=abs):+.2%}",
        _range(means, "{:+.1%}"),
        _range(others, "{:+.1%}"),
    ]


def _predicted(costs: Explanation, order: Explanation) -> float:
    """Predict one trace's iterations from another's costs."""
    made = [one.replay_graph for one in costs.replays]
    graph = chain_graph(costs.run, "predicted", task_means(costs.run, made), delay_medians(costs.run, made))
    return simulate(graph, order.what_if.as_traced).makespan_ns / order.mean_measured_ns - 1


def _range(values: Sequence[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}" if values else ""
