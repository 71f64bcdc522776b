"""Add kernels of aiconfigurator-core to the tables of ``benchmarks/kernels``: quantized products, and casts.

Usage: ``python scripts/read_kernels.py FOLDER``, where the wheel was unpacked. Needs pyarrow. Takes `MOST` shapes of
each device and precision, by a checksum of the shape, which also tells what is held out. Of B300 and GB300, which no
other rows describe, products in bfloat16 are added too.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "benchmarks" / "kernels"
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "l40s": "l40s"}
SYSTEMS |= {"gb200": "gb200", "gb300": "gb300"}
MOST = 500
LEAST_WIDTH = 512
TABLES = {"gemm": "gemm/{}/gemm_perf.parquet"}
TABLES |= {"quantize": "quantize/{}/scale_matrix_perf.parquet", "amax": "quantize/{}/computescale_perf.parquet"}
ADDED = ("fp8", "fp8_block", "nvfp4")
FRAMEWORK = "trtllm"
"""Its FP8 products are those of cuBLASLt, as Transformer Engine's are."""
PLAIN = {"b300": ("trtllm", "vllm"), "gb300": ("trtllm", "vllm")}


def checksum(row: dict[str, object]) -> int:
    """Return the checksum of a kernel's shape."""
    return zlib.crc32(f"{row['m']},{row.get('n', '')},{row['k']}".encode())


def kernels(folder: Path, device: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a device."""
    import pyarrow.parquet

    data = folder / "aiconfigurator_core" / "systems" / "data" / SYSTEMS[device]
    for op, pattern in TABLES.items():
        for framework in sorted({FRAMEWORK, *PLAIN.get(device, ())}):
            for path in sorted(data.glob(pattern.format(f"{framework}/*"))):
                precisions = ADDED if framework == FRAMEWORK else ()
                if op == "gemm" and framework in PLAIN.get(device, ()):
                    precisions += ("bfloat16",)
                rows = pyarrow.parquet.read_table(path).to_pylist()
                for precision in precisions:
                    yield from _chosen(rows, op, precision, device, f"{path.relative_to(data.parents[1])}")


def _chosen(
    rows: list[dict[str, object]], op: str, precision: str, device: str, source: str
) -> Iterator[dict[str, object]]:
    sizes = ("m", "n", "k") if op == "gemm" else ("m", "k")
    known = []
    for row in rows:
        kind = row["gemm_dtype" if op == "gemm" else "quant_dtype"]
        shape = [int(str(row[size])) for size in sizes]
        if kind == precision and min(shape) >= LEAST_WIDTH and shape[0] % 256 == 0 and float(str(row["latency"])) > 0:
            known.append(row)
    known.sort(key=checksum)
    for row in known[:MOST] if op == "gemm" else known:
        version = source.split("/")[4]
        yield {
            **{"gpu": device.upper(), "device": row["device"], "op": op, "dtype": precision},
            **{"pass": "forward (NT)" if op == "gemm" else "", **{size: row[size] for size in sizes}},
            "latency_us": f"{float(str(row['latency'])) * 1e3:.4f}",
            **{"measurements": 1, "framework": str(row["framework"]).lower(), "version": version},
            **{"kernel": row["kernel_source"], "source": f"aiconfigurator-core 0.12.0 {source}"},
            **{"license": "Apache-2.0", "split": "held" if checksum(row) % 5 < 2 else "open"},
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
