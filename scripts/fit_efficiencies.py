"""Fit the efficiency tables of the zoo's devices to published kernel times, and print the errors on held-out kernels.

Usage: ``python scripts/fit_efficiencies.py [--write] [DEVICE ...]``. Reads ``benchmarks/kernels``, whose README names
the sources. A table has the share of the peak that a kernel reaches on a cool device, by its time at the peak. Rows
with ``split = held`` are not fitted.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.spec.catalog import load_device
from pipeloom.spec.precision import RECIPES

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "benchmarks" / "kernels"
ZOO = ROOT / "src" / "pipeloom" / "spec" / "zoo" / "efficiencies"
DEVICES = ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "l40s")
LIKE = {"b300": "b200", "gb300": "gb200"}
"""Devices whose rows time products and casts only, and the device that stands for them otherwise."""
MEASURED = "h100"
"""The device of our own measurements, ``measured-h100.csv``."""
TRAINING = {"h200": "h200", "b200": "gb200", "gb200": "gb200"}
"""Devices whose attention was timed with cuDNN's kernels for training, and stands for the same chip. Other rows are
kernels for serving."""
QUANTIZED = {"fp8": ("fp8",), "fp8_block": ("fp8_block", "mxfp8"), "nvfp4": ("nvfp4",)}
"""Kinds of quantized products by their rows' precision. Blackwell multiplies blocks of 128 as those of 32, which have
no rows."""
WIDTHS = {"causal_attention": (64, 128, 256), "attention": (64, 72, 80, 128)}
COLLECTIVES = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"}
COLLECTIVES |= {"alltoall": "all_to_all"}
RANKS = (2, 4, 8)
EXTRA_KEYS = range(0, 2001, 100)
FEWEST = 3
"""Own measurements to which a curve is fitted; fewer scale that of kernels for serving."""
BACKWARD = 0.82
"""Rate of attention's backward, relative to the forward's: SimuMax's measurements on A100 and B200 at width 128."""
MEMORY = 0.8
"""Share of the memory bandwidth that products reach when it limits them."""

Array = npt.NDArray[np.float64]

OTHER_COMPUTE = (
    "scan = { flops = [[1e-6, 0.05], [1e-5, 0.15], [1e-4, 0.25]], memory = 0.7 } # assumed",
    # Our own elementwise kernels reach 0.84 to 0.91 of H100's bandwidth from 64 MB, and more where tensors are cached.
    # Their curve made predictions of published runs no better.
    '"*" = { flops = 0.05, memory = [[3e-8, 0.03], [3e-7, 0.18], [3e-6, 0.55], [3e-5, 0.80]] } # assumed',
)
OTHER_LINKS = (
    "",
    "[nic]",
    '"*" = { network = [[4e-6, 0.20], [4e-5, 0.55], [4e-4, 0.80], [4e-3, 0.88]] } # assumed',
    "",
    "[pcie]",
    '"*" = { network = [[1.6e-6, 0.20], [1.6e-5, 0.60], [1.6e-4, 0.85]] } # assumed',
)


class Curve(NamedTuple):
    """Efficiencies at knots (log2 of the seconds at the peak), and the extra keys of an attention's queries."""

    knots: Array
    values: Array
    extra_keys: float = 0.0

    def at(self, seconds: Array) -> Array:
        """Return the efficiency of kernels that would take so long at the peak."""
        return np.interp(np.log2(seconds), self.knots, self.values)

    @property
    def toml(self) -> str:
        """The points as TOML."""
        return "[" + ", ".join(f"[{2.0**x:.3g}, {y:.3g}]" for x, y in zip(*self[:2], strict=True)) + "]"


def fit(at_peak: Array, seconds: Array, num_knots: int) -> Curve:
    """Fit a curve that minimizes the sum of absolute relative errors, by iteratively reweighted least squares."""
    low, high = np.log2(np.quantile(at_peak, (0.01, 0.99)))
    knots = np.linspace(low, high, num_knots)
    x = np.clip(np.log2(at_peak), low, high)
    left = np.clip(np.searchsorted(knots, x) - 1, 0, num_knots - 2)
    share = (x - knots[left]) / (knots[left + 1] - knots[left])
    rows = np.arange(len(x))
    matrix = np.zeros((len(x), num_knots))
    matrix[rows, left], matrix[rows, left + 1] = 1 - share, share
    found = at_peak / seconds
    weight = 1 / found
    for _ in range(60):
        ridge = 1e-6 * np.eye(num_knots)
        target = np.append(found * weight, np.zeros(num_knots))
        values = np.linalg.lstsq(np.vstack([matrix * weight[:, None], ridge]), target, rcond=None)[0]
        weight = 1 / found / np.sqrt(np.maximum(np.abs(matrix @ values / found - 1), 0.01))
    return Curve(knots, np.maximum(values, 1e-3))


def read(device: str) -> list[dict[str, str]]:
    """Return the kernels of a device, and of the device like it what it lacks."""
    with gzip.open(KERNELS / f"kernels-{device}.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    if device in LIKE:
        own = {row["op"] for row in rows}
        rows += [row for row in read(LIKE[device]) if row["op"] not in own]
    return rows


def read_measured() -> list[dict[str, str]]:
    """Return our own measurements. There are too few of a kind to hold some out."""
    with (KERNELS / f"measured-{MEASURED}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["split"] = "open"
    return rows


def columns(rows: Sequence[dict[str, str]], *names: str) -> Iterator[Array]:
    """Return columns as arrays; empty cells are 0."""
    for name in names:
        yield np.array([float(row[name] or 0) for row in rows])


def errors(name: str, predicted: Array, seconds: Array, held: npt.NDArray[np.bool_]) -> str:
    """Return a line with the errors on held-out kernels."""
    error = np.abs(predicted / seconds - 1)[held]
    median, ninth = np.quantile(error, (0.5, 0.9)) if len(error) else (np.nan, np.nan)
    return f"{name:28} {len(seconds):5} kernels, held out: median {median:.1%}, 90th percentile {ninth:.1%}"


def fit_products(device: str, rows: Sequence[dict[str, str]]) -> tuple[str, str]:
    """Fit matrix products. Return their line of TOML, and their errors."""
    spec = load_device(device)
    some = [row for row in rows if row["op"] == "gemm" and row["dtype"] == "bfloat16"]
    m, n, k, seconds = columns(some, "m", "n", "k", "latency_us")
    seconds = seconds * 1e-6
    held = np.array([row["split"] == "held" for row in some])
    at_peak = 2 * m * n * k / spec.flops_per_s
    moved = 2 * (m * n + m * k + n * k) / spec.memory_bytes_per_s / MEMORY
    known = ~held & (moved < 0.95 * seconds)
    curve = fit(at_peak[known], seconds[known], 9)
    line = f"matmul = {{ flops = {curve.toml}, memory = {MEMORY} }}"
    return line, errors("matmul", np.maximum(at_peak / curve.at(at_peak), moved), seconds, held)


def fit_casts(device: str, rows: Sequence[dict[str, str]]) -> tuple[Curve, str]:
    """Fit the share of the memory bandwidth that casts reach. Return the curve, and its errors.

    Small tensors are read from the cache there, which is no more than the bandwidth here.
    """
    some = [row for row in rows if row["op"] == "quantize"]
    m, k, seconds = columns(some, "m", "k", "latency_us")
    held = np.array([row["split"] == "held" for row in some])
    at_peak = 3 * m * k / load_device(device).memory_bytes_per_s
    curve = fit(at_peak[~held], seconds[~held] * 1e-6, 6)
    curve = curve._replace(values=np.minimum(curve.values, 1.0))
    return curve, errors("cast", at_peak / curve.at(at_peak), seconds * 1e-6, held)


def fit_quantized(device: str, rows: Sequence[dict[str, str]], precision: str, cast: Curve) -> tuple[list[str], str]:
    """Fit quantized products. Return their lines of TOML, and their errors.

    The times have the quantization of the input in them. Of FP8 with one scale a tensor, its two kernels were timed
    too, by the same framework; of blocks, it is a cast.
    """
    spec = load_device(device)
    kinds = [kind for kind in QUANTIZED[precision] if kind in spec.quantized_products]
    some = [row for row in rows if row["op"] == "gemm" and row["dtype"] == precision]
    if not some or not kinds:
        return [], ""
    m, n, k, seconds = columns(some, "m", "n", "k", "latency_us")
    recipe = next(each for each in RECIPES.values() if each.products == kinds[-1])
    if precision == "fp8":
        parts = {(row["op"], row["m"], row["k"]): float(row["latency_us"]) for row in rows if not row["n"]}
        seconds = seconds - [
            sum(parts.get((op, row["m"], row["k"]), 0.0) for op in ("quantize", "amax")) for row in some
        ]
        seconds = seconds * 1e-6
    else:
        read_and_written = m * k * (2 + recipe.num_bytes) / spec.memory_bytes_per_s
        seconds = seconds * 1e-6 - read_and_written / cast.at(read_and_written)
    peak = spec.quantized_products[kinds[0]][0]
    at_peak = 2 * m * n * k / peak
    moved = (2 * m * n + (m + n) * k * recipe.num_bytes) / spec.memory_bytes_per_s / MEMORY
    left = seconds > at_peak
    held = np.array([row["split"] == "held" for row in some])
    known = ~held & left & (moved < 0.95 * seconds)
    curve = fit(at_peak[known], seconds[known], 7)
    predicted = np.maximum(at_peak / curve.at(at_peak), moved)
    line = f"{{ flops = {curve.toml}, memory = {MEMORY} }}"
    lines = [f'"{name}@{kind}" = {line}' for name in ("matmul", "grouped_matmul") for kind in kinds]
    return lines, errors(f"matmul@{', '.join(kinds)}", predicted, seconds, held & left)


def fit_attention(device: str, rows: Sequence[dict[str, str]], kind: str, width: int) -> tuple[list[str], str]:
    """Fit attention of one head width. Return its lines of TOML, and its errors."""
    spec = load_device(device)
    causal = kind == "causal_attention"
    ops = ("attention", "encoder_attention", "attention, no mask")
    some = [
        row
        for row in rows
        if row["op"] in ops and row["pass"] == "forward" and row["head_dim"] == str(width)
        if (row["causal"] == "1") == causal and not float(row["window"] or 0) and "PCIE" not in row["device"].upper()
    ]
    if device == MEASURED and len(measured_attention(kind, width, "forward")) >= FEWEST:
        return fit_measured_attention(kind, width)
    if len(some) < 20:
        return [], ""
    batch, length, heads, values, seconds = columns(some, "batch", "seq", "heads", "v_dim", "latency_us")
    seconds = seconds * 1e-6
    held = np.array([row["split"] == "held" for row in some])
    per_key = 2 * batch * heads * length * (width + np.where(values > 0, values, width)) / spec.flops_per_s
    keys = (length + 1) / 2 if causal else length
    best, found = np.inf, Curve(np.zeros(1), np.ones(1))
    for extra in EXTRA_KEYS:
        at_peak = per_key * (keys + extra)
        curve = fit(at_peak[~held], seconds[~held], 6)
        error = float(np.median(np.abs(at_peak / curve.at(at_peak) / seconds - 1)[~held]))
        if error < best:
            best, found = error, curve._replace(extra_keys=extra)
    at_peak = per_key * (keys + found.extra_keys)
    said = [errors(f"{kind}@{width}", at_peak / found.at(at_peak), seconds, held)]
    back = found._replace(knots=found.knots + np.log2(2.5), values=found.values * BACKWARD)
    lines = []
    for name, curve, passes in ((kind, found, "forward"), (f"{kind}_backward", back, "backward")):
        each, error = as_in_training(device, curve, kind, width, passes)
        said += [error] * bool(error)
        lines.append(
            f'"{name}@{width}" = {{ flops = {each.toml}, memory = {MEMORY}, extra_keys = {found.extra_keys:g} }}'
        )
    return lines, "\n  ".join(said)


def measured_attention(kind: str, width: int, passes: str) -> list[dict[str, str]]:
    """Return our own times of cuDNN's attention for training."""
    return [
        row
        for row in read_measured()
        if row["kind"] == "attention" and row["backend"] == "cudnn" and row["pass"] == passes
        if row["head_dim"] == str(width) and (row["causal"] == "1") == (kind == "causal_attention")
    ]


def fit_errors(at_peak: Array, seconds: Array, rows: npt.NDArray[np.bool_]) -> tuple[Curve, Array]:
    """Fit a curve of few knots to some rows. Return it, and the relative errors of all rows."""
    curve = fit(at_peak[rows], seconds[rows], min(4, int(rows.sum())))
    return curve, np.abs(at_peak / curve.at(at_peak) / seconds - 1)


def fit_measured_attention(kind: str, width: int) -> tuple[list[str], str]:
    """Fit our own times of cuDNN's attention for training. Return lines of TOML, and their errors.

    There are a few rows of each width, so none is held out: the error on a row is that of a fit to the others.
    """
    lines, said = [], []
    for name, passes, products in ((kind, "forward", 1.0), (f"{kind}_backward", "backward", 2.5)):
        some = measured_attention(kind, width, passes)
        batch, length, heads, seconds = columns(some, "batch", "seq", "heads", "seconds")
        per_key = products * 4 * batch * heads * length * width / load_device(MEASURED).flops_per_s
        keys = (length + 1) / 2 if kind == "causal_attention" else length
        every = np.ones(len(some), bool)
        tried = [fit_errors(per_key * (keys + extra), seconds, every)[1].mean() for extra in EXTRA_KEYS]
        extra = EXTRA_KEYS[int(np.argmin(tried))]
        at_peak = per_key * (keys + extra)
        curve, _ = fit_errors(at_peak, seconds, every)
        alone = [fit_errors(at_peak, seconds, np.arange(len(some)) != row)[1][row] for row in range(len(some))]
        curve = curve._replace(values=np.minimum(curve.values, 1.0))
        lines.append(f'"{name}@{width}" = {{ flops = {curve.toml}, memory = {MEMORY}, extra_keys = {extra:g} }}')
        said.append(f"{name}@{width:<5} {len(some)} kernels, each left out in turn: median {np.median(alone):.1%}")
    return lines, "\n  ".join(said)


def as_in_training(device: str, curve: Curve, kind: str, width: int, passes: str) -> tuple[Curve, str]:
    """Scale the curve of many serving kernels to the few training kernels of cuDNN. Return it and its errors."""
    source = MEASURED if device == MEASURED else TRAINING.get(device)
    if source is None:
        return curve, ""
    if device == MEASURED:
        own = measured_attention(kind, width, passes)
        some = [row | {"latency_us": f"{float(row['seconds']) * 1e6}"} for row in own]
    else:
        some = _training_rows(source, kind, width, passes)
    held = np.array([row["split"] == "held" for row in some], bool)
    if (~held).sum() < 2:
        return curve, ""
    batch, length, heads, seconds = columns(some, "batch", "seq", "heads", "latency_us")
    seconds = seconds * 1e-6
    keys = ((length + 1) / 2 if kind == "causal_attention" else length) + curve.extra_keys
    products = 2.5 if passes == "backward" else 1.0
    at_peak = products * 4 * batch * heads * length * width * keys / load_device(source).flops_per_s
    speed = float(np.median((at_peak / curve.at(at_peak) / seconds)[~held]))
    scaled = curve._replace(values=np.minimum(1, curve.values * speed))
    label = f"{kind}@{width}, {passes} of cuDNN on {source}, {speed:.2f} x"
    return scaled, errors(label, at_peak / scaled.at(at_peak), seconds, held)


def _training_rows(source: str, kind: str, width: int, passes: str) -> list[dict[str, str]]:
    return [
        row
        for row in read(source)
        if row["framework"] == "cudnn" and row["pass"] == passes and row["head_dim"] == row["v_dim"] == str(width)
        if row["op"].startswith("attention") and (row["causal"] == "1") == (kind == "causal_attention")
        if not float(row["window"] or 0)
    ]


def fit_collective(device: str, rows: Sequence[dict[str, str]], name: str, ranks: int) -> tuple[str, str]:
    """Fit a collective of ``ranks`` devices of a node. Return its line of TOML, and its errors from 1 MiB."""
    spec = load_device(device)
    wanted = ("collective", name, str(ranks))
    some = [row for row in rows if (row["op"], row["collective"], row["ranks"]) == wanted]
    if not some:
        return "", ""
    size, seconds = columns(some, "message_bytes", "latency_us")
    passes = 2 if name == "all_reduce" else 1
    steps = passes * (ranks - 1)
    held = np.array([row["split"] == "held" for row in some])
    at_peak = passes * size * (ranks - 1) / ranks / spec.nvlink_bytes_per_s
    left = seconds * 1e-6 - steps * spec.nvlink_latency_s
    known = ~held & (left > 0)
    # A size occurs once: the points are the measurements, between which the curve is a line.
    order = np.argsort(at_peak[known])
    curve = Curve(np.log2(at_peak[known][order]), (at_peak / left)[known][order])
    predicted = at_peak / curve.at(at_peak) + steps * spec.nvlink_latency_s
    label = f"{COLLECTIVES[name]}@{ranks}"
    line = f'"{label}" = {{ network = {curve.toml} }}'
    return line, errors(f"{label}, from 1 MiB", predicted, seconds * 1e-6, held & (size >= 2**20))


def table(device: str) -> tuple[str, list[str]]:
    """Return the efficiency table of a device as TOML, and the lines of errors."""
    rows = read(device)
    compute, said = [], []
    line, error = fit_products(device, rows)
    compute.append(line)
    said.append(error)
    for kind, widths in WIDTHS.items():
        for width in widths:
            lines, error = fit_attention(device, rows, kind, width)
            compute += lines
            said += [error] * bool(error)
    compute += _other_widths(compute)
    links = []
    if load_device(device).nvlink_bytes_per_s:
        for name in COLLECTIVES:
            found = [each for ranks in RANKS if (each := fit_collective(device, rows, name, ranks))[0]]
            links += [line for line, _ in found]
            links.append(f"{COLLECTIVES[name]} = {links[-1].partition(' = ')[2]}")
            said += [error for _, error in found]
    compute += [f"grouped_{compute[0]}", *OTHER_COMPUTE]
    if load_device(device).quantized_products:
        cast, error = fit_casts(device, rows)
        said.append(error)
        compute.append(f"cast = {{ memory = {cast.toml} }}")
        for precision in QUANTIZED:
            lines, error = fit_quantized(device, rows, precision, cast)
            compute += lines
            said += [error] * bool(error)
    head = "# Fitted by scripts/fit_efficiencies.py to the kernel times of benchmarks/kernels; other kinds are assumed."
    links += [links[-1].replace(COLLECTIVES[name], '"*"', 1)] if links else []
    return "\n".join([head, "[compute]", *compute, "", "[nvlink]", *links, *OTHER_LINKS, ""]), said


def _other_widths(lines: Sequence[str]) -> list[str]:
    """Return the efficiencies of attention at other widths: those of the width nearest to 128 that was measured."""
    out = []
    for suffix in ("", "_backward"):
        for kind in ("causal_attention", "attention"):
            names = [f'"{each}{suffix}@{width}"' for each in (kind, "causal_attention") for width in (128, 80, 64)]
            found = next(line for name in names for line in lines if line.startswith(name))
            out.append(f"{kind}{suffix} = {found.partition(' = ')[2]}")
    return out


def main() -> None:
    """Fit the tables of the devices on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", help=f"of {', '.join(DEVICES)}; default: all")
    parser.add_argument("--write", action="store_true", help="write the tables to the zoo")
    options = parser.parse_args()
    for device in options.devices or DEVICES:
        text, said = table(device)
        print(device, *said, sep="\n  ")
        if options.write:
            (ZOO / f"{device}.toml").write_text(text)


if __name__ == "__main__":
    main()
