"""Add kernels of aiconfigurator-core to the tables of ``benchmarks/kernels``: quantized products, and casts.

Usage: ``python scripts/read_kernels.py FOLDER``, where the wheel was unpacked. Needs pyarrow. Takes `MOST` shapes of
each device and precision, by a checksum of the shape, which also decides what is held out. Of B300 and GB300, which no
other rows describe, products and causal attention in bfloat16 are added too.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[1] / "benchmarks" / "kernels"
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "l40s": "l40s"}
SYSTEMS |= {"gb200": "gb200", "gb300": "gb300"}
MOST = 500
LEAST_WIDTH = 512
TABLES = {"gemm": "gemm/{}/gemm_perf.parquet"}
TABLES |= {"quantize": "quantize/{}/scale_matrix_perf.parquet", "amax": "quantize/{}/computescale_perf.parquet"}
ADDED = ("fp8", "fp8_block", "nvfp4")
PRODUCT = ("m", "n", "k")
ATTENTION = {"batch_size": "batch", "isl": "seq", "num_heads": "heads", "num_key_value_heads": "kv_heads"}
ATTENTION |= {"head_dim": "head_dim", "window_size": "window"}
SHAPE = (*PRODUCT, *ATTENTION.values())
FRAMEWORK = "trtllm"
"""Its FP8 products are those of cuBLASLt, as Transformer Engine's are."""
PLAIN = ("b300", "gb300")


def checksum(row: dict[str, object]) -> int:
    """Return the checksum of a kernel's shape."""
    return zlib.crc32(",".join(str(row.get(name, "")) for name in SHAPE).encode())


def kernels(folder: Path, device: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a device."""
    data = folder / "aiconfigurator_core" / "systems" / "data" / SYSTEMS[device]
    for op, pattern in TABLES.items():
        paths = sorted(data.glob(pattern.format(f"{FRAMEWORK}/*")))
        for precision in ADDED:
            yield from _chosen(_products(paths, op, precision), MOST if op == "gemm" else None)
    if device in PLAIN:
        yield from _chosen(_products(sorted(data.glob(TABLES["gemm"].format("*/*"))), "gemm", "bfloat16"), 2 * MOST)
        yield from _chosen(_attention(sorted(data.glob("attention/*/*/context_attention_perf.parquet"))), 2 * MOST)


def _chosen(rows: Iterable[dict[str, Any]], most: int | None) -> Iterator[dict[str, object]]:
    """Yield rows of some shapes, of each the fastest kernel."""
    fastest: dict[int, dict[str, Any]] = {}
    for row in rows:
        key = checksum(row)
        if key not in fastest or float(row["latency_us"]) < float(fastest[key]["latency_us"]):
            fastest[key] = row
    for key in sorted(fastest)[:most]:
        yield fastest[key] | {"split": "held" if key % 5 < 2 else "open"}


def _products(paths: Sequence[Path], op: str, precision: str) -> Iterator[dict[str, Any]]:
    sizes = PRODUCT if op == "gemm" else ("m", "k")
    for path in paths:
        for row in _rows(path):
            kind = row["gemm_dtype" if op == "gemm" else "quant_dtype"]
            if kind == precision and row["m"] % 256 == 0 and min(row[size] for size in sizes) >= LEAST_WIDTH:
                yield {size: row[size] for size in sizes} | {
                    "pass": "forward (NT)" if op == "gemm" else "",
                    **_common(row, path, op, precision),
                }


def _attention(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for row in _rows(path):
            plain = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16" and row["step"] == 0
            if plain and row["isl"] >= LEAST_WIDTH and not row["window_size"]:
                sizes = {name: row[theirs] for theirs, name in ATTENTION.items()}
                sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
                yield sizes | {"pass": "forward", "causal": 1, **_common(row, path, "attention", "bfloat16")}


def _rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return [row for row in rows if row["latency"] > 0]


def _common(row: dict[str, Any], path: Path, op: str, precision: str) -> dict[str, object]:
    version, source = path.parts[-2], "/".join(path.parts[-6:])
    return {
        **{"gpu": path.parts[-5].split("_")[0].upper(), "device": row["device"], "op": op, "dtype": precision},
        **{"latency_us": f"{row['latency'] * 1e3:.4f}", "measurements": 1, "framework": row["framework"].lower()},
        **{"version": version, "kernel": row["kernel_source"], "source": f"aiconfigurator-core 0.12.0 {source}"},
        "license": "Apache-2.0",
    }


def main() -> None:
    """Add the rows of all devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with gzip.open(KERNELS / "kernels-h100.csv.gz", "rt", newline="") as file:
        names = next(csv.reader(file))
    for device in SYSTEMS:
        path = KERNELS / f"kernels-{device}.csv.gz"
        old: list[dict[str, object]] = []
        if path.exists():
            with gzip.open(path, "rt", newline="") as file:
                old = [*csv.DictReader(file)]  # type: ignore[list-item]
        old = [row for row in old if row["op"] not in ("quantize", "amax") and row["dtype"] not in ADDED]
        if device in PLAIN:
            old = []
        added = [*kernels(folder, device)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *added])
        path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
        print(device, len(old), "kept", len(added), "added")


if __name__ == "__main__":
    main()
