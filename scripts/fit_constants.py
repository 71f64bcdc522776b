"""Fit the emulator's constants to published runs, and record the errors from which predictions take their intervals.

Usage: ``python scripts/fit_constants.py [--keep] [--halves]``. Takes the runs of ``validation/data/runs.csv`` that are
open, plausible (no ``flag``) and not bound by the host (not Megatron-LM's functional tests, nor runs with
deterministic kernels). Writes

- the constants into the zoo's ``generations`` and ``trainers``, unless ``--keep``;
- ``validation/data/fit.csv``: error of each run and its slope by each constant, for refits without some of the runs;
- ``validation/data/residuals.csv``: error of each run with constants that are fitted without its source's runs of its
  model.

``--halves`` prints the errors on runs whose source and model take no part in the fit: means of eight random halves.
Run it with ``--keep`` after every change that moves emulated times.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from pipeloom.errors import PipeloomError
from pipeloom.validation import PublishedRun, read_runs
from pipeloom.validation.constants import Constant, FittedRun, Values, constants, refit, shipped, with_values
from pipeloom.validation.express import ExpressedRun, express, precision
from pipeloom.validation.summary import kendall_tau_of
from pipeloom.validation.unstated import complete

SOURCE = Path(__file__).resolve().parents[1] / "src" / "pipeloom"
DATA, ZOO = SOURCE / "validation" / "data", SOURCE / "spec" / "zoo"
STEP = {False: 0.05, True: 0.2}
"""Step of a derivative: of the logarithm of a constant, or of the logarithm of a share's odds."""
ROUNDS = 2
Run = tuple[PublishedRun, ExpressedRun]


def main() -> None:
    """Fit and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the constants; only record errors and slopes")
    parser.add_argument("--halves", action="store_true", help="print the errors on halves that were not fitted")
    options = parser.parse_args()
    runs = [(run, found) for run in read_runs(DATA / "runs.csv") if counts(run) and (found := try_express(run))]
    values = dict(shipped())
    fitted = slopes_of(runs, values)
    if not options.keep:
        for _ in range(ROUNDS):
            values = rounded(refit(fitted, values))
            fitted = slopes_of(runs, values)
            print(", ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)
    write_fit(fitted)
    write_residuals(runs, fitted, values)
    if options.halves:
        print_halves(runs, fitted, values)
        print_left_out(runs, "source", errors_without(runs, fitted, values, lambda run: (run.source,)))
    if not options.keep:
        # Last, because runs are expressed with the values of the zoo.
        write_constants(values)


def counts(run: PublishedRun) -> bool:
    """Return whether a run may be fitted."""
    return run.split == "open" and not run.flag and run.measured_s is not None and run.source != "megatron-golden"


def try_express(run: PublishedRun) -> ExpressedRun | None:
    """Express a run, or return None. Loops of the host bind deterministic scans, so they say little about devices."""
    try:
        found = express(complete(run).run)
    except PipeloomError:
        return None
    return None if found.trainer.scan_loops else found


def slopes_of(runs: Sequence[Run], values: Values) -> list[FittedRun]:
    """Return error and slopes of every run at some values of the constants."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(slopes_of_run, runs, itertools.repeat(values), chunksize=8))


def slopes_of_run(pair: Run, values: Values) -> FittedRun:
    """Return error and slopes of one run."""
    run, found = pair
    base = with_values(found, values)
    at = predicted(base)
    slopes = []
    for one in constants():
        other = with_values(found, moved(one, values))
        unchanged = (other.cluster, other.trainer) == (base.cluster, base.trainer)
        slopes.append(0.0 if unchanged else (predicted(other) - at) / STEP[one.share])
    error = math.log(run.measured_s or 1.0) - at
    return FittedRun(run.id, run.source, run.device, run.model, run.kind, error, tuple(slopes))


def moved(one: Constant, values: Values) -> Values:
    """Return the values with one of them moved by a step."""
    return {**values, one.name: one.from_line(one.to_line(values[one.name]) + STEP[one.share])}


def predictions(runs: Sequence[Run], values: Values) -> np.ndarray:
    """Return the logarithms of the predicted times."""
    with ProcessPoolExecutor() as pool:
        return np.array(list(pool.map(predicted, [with_values(found, values) for _, found in runs], chunksize=8)))


def predicted(found: ExpressedRun) -> float:
    """Return the logarithm of the predicted time."""
    return math.log(found.predict()[0])


def rounded(values: Values) -> dict[str, float]:
    """Return the values as the zoo has them."""
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def write_constants(values: Values) -> None:
    """Write the values into the zoo."""
    for one in constants():
        for target in one.targets:
            entry, field = target.rsplit(".", 1)
            path = ZOO / f"{entry}.toml"
            text, count = re.subn(rf"(?m)^{field} = \S+", f"{field} = {values[one.name]:.3g}", path.read_text())
            assert count == 1, target
            path.write_text(text)


def write_fit(fitted: Sequence[FittedRun]) -> None:
    """Write errors and slopes."""
    header = ["id", "source", "device", "model", "kind", "log_published_over_predicted", *(c.name for c in constants())]
    rows = [[*run[:5], f"{run.error:.5f}", *(f"{slope:.4f}" for slope in run.slopes)] for run in fitted]
    _write("fit.csv", [header, *rows])


def write_residuals(runs: Sequence[Run], fitted: Sequence[FittedRun], values: Values) -> None:
    """Write the errors of each run with constants that are fitted without its group, and without its device."""
    header = ["id", "source", "device", "model", "kind", "log_published_over_predicted", "without_device"]
    by_group = errors_without(runs, fitted, values, group_of)
    by_device = errors_without(runs, fitted, values, lambda run: (run.device,))
    print_left_out(runs, "source and model", by_group)
    print_left_out(runs, "device", by_device)
    rows = [[*run[:5], f"{by_group[run.id]:.4f}", f"{by_device[run.id]:.4f}"] for run in fitted]
    _write("residuals.csv", [header, *rows])


def errors_without(
    runs: Sequence[Run],
    fitted: Sequence[FittedRun],
    values: Values,
    key: Callable[[PublishedRun | FittedRun], tuple[str, ...]],
) -> dict[str, float]:
    """Return the error of each run with constants that are fitted to the runs with another key."""
    errors = {}
    for group in sorted({key(run) for run in fitted}):
        others = refit([run for run in fitted if key(run) != group], values)
        mine = [(run, found) for run, found in runs if key(run) == group]
        for (run, _), at in zip(mine, predictions(mine, others), strict=True):
            errors[run.id] = math.log(run.measured_s or 1.0) - at
    return errors


def _write(name: str, rows: Sequence[Sequence[str]]) -> None:
    with (DATA / name).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    print(f"{name}: {len(rows) - 1} runs", flush=True)


def group_of(run: PublishedRun | FittedRun) -> tuple[str, str]:
    """Return the group of a run that is left out as a whole."""
    return run.source, run.model


KINDS: dict[str, Callable[[PublishedRun, ExpressedRun], bool]] = {
    "dense, BF16, Megatron": lambda run, found: _is(run, "dense") and found.trainer.name == "megatron",
    "dense, BF16": lambda run, _: _is(run, "dense"),
    "experts, BF16": lambda run, _: _is(run, "experts"),
    "FP8, MXFP8, NVFP4": lambda run, _: precision(run.precision) != "bf16" and run.kind != "other",
    "hybrids": lambda _, found: found.has_scans,
    "multimodal": lambda _, found: found.run.model.towers is not None,
}


def _is(run: PublishedRun, kind: str) -> bool:
    return run.kind == kind and precision(run.precision) == "bf16"


def print_left_out(runs: Sequence[Run], name: str, errors: dict[str, float]) -> None:
    """Print the errors on runs, each with constants that are fitted without its group."""
    for kind, belongs in KINDS.items():
        some = np.abs([math.expm1(-errors[run.id]) for run, found in runs if belongs(run, found)])
        if not len(some):
            continue
        median, ninth = np.quantile(some, (0.5, 0.9))
        print(f"{kind:22} {len(some):3} runs, {name} left out: median {median:.1%}, 90th percentile {ninth:.1%}")


def print_halves(runs: Sequence[Run], fitted: Sequence[FittedRun], values: Values) -> None:
    """Print the errors on runs whose group takes no part in the fit: means of eight random halves of the groups."""
    groups = sorted({group_of(run) for run in fitted})
    found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
    for seed in range(8):
        chosen = np.random.default_rng(seed).permutation(len(groups))[: len(groups) // 2]
        half = {groups[i] for i in chosen}
        others = refit([run for run in fitted if group_of(run) in half], values)
        rest = [pair for pair in runs if group_of(pair[0]) not in half]
        times = np.exp(predictions(rest, others))
        for kind, belongs in KINDS.items():
            some = [(run, t) for (run, each), t in zip(rest, times, strict=True) if belongs(run, each)]
            if not some:
                continue
            errors = np.abs([t / (run.measured_s or 1.0) - 1 for run, t in some])
            taus = [kendall_tau_of(some, per_token=each) for each in (True, False)]
            found[kind].append((*np.quantile(errors, (0.5, 0.9)), *(np.nan if tau is None else tau for tau in taus)))
    for kind, rows in found.items():
        median, ninth, tau, whole = np.nanmean(rows, axis=0)
        print(f"{kind:22} halves: median {median:.1%}, 90th percentile {ninth:.1%}", end=", ")
        print(f"tau {tau:.2f} by time a token, {whole:.2f} by iteration time")


if __name__ == "__main__":
    main()
