"""Record the emulator's errors on the published runs, from which predictions take their intervals.

Usage: ``python scripts/record_residuals.py``. Run it after every change that moves emulated times. Implausible rows (a
``flag`` in the table) and Megatron-LM's functional tests, which the host binds, do not count.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from pipeloom.validation import predict, read_runs

DATA = Path(__file__).resolve().parents[1] / "src" / "pipeloom" / "validation" / "data"
HEADER = ("id", "source", "device", "model", "kind", "log_published_over_predicted")


def main() -> None:
    """Predict every run, and write the errors."""
    rows = []
    for run in read_runs(DATA / "runs.csv"):
        if run.source != "megatron-golden" and run.measured_s is not None and not run.flag:
            found = predict(run)
            if not found.reason:
                error = math.log(run.measured_s / found.seconds)
                rows.append((run.id, run.source, run.device, run.model, run.kind, f"{error:.4f}"))
    with (DATA / "residuals.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
    print(f"{len(rows)} runs")


if __name__ == "__main__":
    main()
