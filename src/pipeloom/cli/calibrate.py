"""`pipeloom calibrate`: write a device table from measurements of this machine, or from files of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from pipeloom.cli.options import CLUSTER_HELP
from pipeloom.cli.output import JSON_HELP, check_targets, print_json, stderr, stdout
from pipeloom.emulator import Calibration, CalibrationRow, mean_error
from pipeloom.errors import InputError
from pipeloom.io import write_text
from pipeloom.printing import print_line
from pipeloom.report import share_text
from pipeloom.report.any_width import Table
from pipeloom.spec.catalog import device_toml, load_cluster, load_device
from pipeloom.spec.hardware import ClusterSpec, DeviceSpec

if TYPE_CHECKING:
    from pipeloom.calibration import Blend, Evidence

HELP = """\
Write a device table from measurements, and check it on others.

With --device, time products, attention, norms, copies, messages and collectives of this machine, and fit a table to
them. Errors are measured on operator shapes, whole layers and message sizes that were not fitted. The table's link
inside a node (nvlink_*) is the one between two processes of this machine. Links between machines are in the cluster
file.

With --base, blend a table with measurements from files, in any mixture: traces of torch.profiler (record_shapes=True),
output of nccl-tests, tables of kernels, and tables of training runs (docs/formats.md). Values about which there is much
evidence move to it, others stay. Every third measurement checks the blend. With both options, this machine's
measurements are blended with the base table.
"""
EPILOG = (
    "Examples: pipeloom calibrate --device cpu --out cpu.toml (runs unattended; a CPU takes a few minutes), "
    "pipeloom calibrate --base h100 --out my.toml trace.json.gz all_reduce_perf.txt gemm.csv runs.csv."
)

MOST_REASONS = 20
"""Reasons that are printed."""


def calibrate(
    evidence: list[Path] | None = typer.Argument(
        None, metavar="[EVIDENCE...]", help="With --base: files of measurements on this kind of device."
    ),
    device: str = typer.Option("", help="Measure this machine: cpu or cuda."),
    base: str = typer.Option(
        "",
        metavar="NAME|DEVICE.toml",
        help="Blend this device's table with measurements: a name such as h100, or a file.",
    ),
    out: Path = typer.Option(..., metavar="DEVICE.toml", help="The device table to write."),
    name: str = typer.Option("", help="Name of the device; default: the name that the system reports, or the base's."),
    repeats: int = typer.Option(9, min=1, max=10000, help="Timed runs of each shape; the median is used."),
    plot: Path | None = typer.Option(
        None, metavar="FILE.html", help="With --device: write an HTML page of predicted and measured times."
    ),
    links: bool = typer.Option(
        True, help="Also time messages and collectives between two processes (cuda: if there are two GPUs)."
    ),
    quick: bool = typer.Option(False, help="Time only a few small shapes, for a quick trial."),
    per_node: int = typer.Option(
        0,
        min=0,
        max=1024,
        help="Devices that NVLink joins, for collectives; default: those of a node of --cluster, or else 8 (GB200 and "
        "GB300: 72).",
    ),
    cluster: str = typer.Option(
        "", help=f"With --base: the cluster over whose network EVIDENCE was measured. {CLUSTER_HELP}"
    ),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    check_targets(out, plot)
    files = evidence or []
    _check(device, base, out, plot, files)
    table = load_device(base if base.endswith(".toml") else base.lower()) if base else None
    network = _cluster(cluster, table) if cluster else None
    # Files are read first, because measuring takes minutes.
    read = None
    if table is not None:
        from pipeloom.calibration import read_evidence

        read = read_evidence(files, table, per_node=per_node, cluster=network)
    found = None
    if device:
        kind: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
        found = _measured(kind, name=name, repeats=repeats, quick=quick, links=links, base=table)
        if plot is not None:
            from pipeloom.report.calibration_page import calibration_page

            write_text(plot, calibration_page(found))
    if read is not None:
        _blend(read, found, out, name=name, as_json=json)
    elif found is not None:
        write_text(out, device_toml(found.device))
        _report(found, out, as_json=json)


def _check(device: str, base: str, out: Path, plot: Path | None, files: list[Path]) -> None:
    if not device and not base:
        raise InputError("calibrate", "has neither --device nor --base", "measure with --device, or blend with --base")
    if device and device not in ("cpu", "cuda"):
        raise InputError("--device", f"{device!r} is neither 'cpu' nor 'cuda'")
    if not str(out).endswith(".toml"):
        raise InputError("--out", f"{str(out)!r} does not end in .toml", "device tables are TOML")
    if files and not base:
        raise InputError(str(files[0]), "is evidence, but there is no --base to blend it with", "add --base, e.g. h100")
    if base and not files and not device:
        raise InputError("--base", "has no evidence to blend with", "give files, or --device to measure this machine")
    if plot is not None and not device:
        raise InputError("--plot", "draws what --device measures", "leave it out, or add --device")


def _cluster(name: str, base: DeviceSpec | None) -> ClusterSpec:
    from pipeloom.calibration import other_device

    if base is None:
        raise InputError("--cluster", "is for evidence, but there is no --base to blend it with", "add --base")
    found = load_cluster(name)
    if other_device(found.device.name, base):
        raise InputError("--cluster", f"has {found.device.name}, not {base.name}", "give the cluster of the evidence")
    return found


def _measured(
    device: Literal["cpu", "cuda"], *, name: str, repeats: int, quick: bool, links: bool, base: DeviceSpec | None
) -> Calibration:
    import torch

    from pipeloom.runtime.measure.microbench import calibrate as measure

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device", "'cuda', but torch sees no CUDA device", "use --device cpu")
    if base is not None:
        from pipeloom.calibration import other_device

        stated = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
        if other_device(stated, base):
            raise InputError("--base", f"is a table of {base.name}, but this device is {stated}", "name its own table")
    notes = stderr()
    return measure(
        device, name=name, repeats=repeats, small=quick, links=links, progress=lambda line: notes.print(line)
    )


def _report(found: Calibration, out: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "device": found.device.name,
                "out": str(out),
                "mean_operator_error": mean_error(found.operators),
                "mean_layer_error": found.mean_layer_error,
                "operators": [_document(row) for row in found.operators],
                "layers": [_document(row) for row in found.layers],
                "links": [_document(row) for row in found.links],
                "mean_link_error": mean_error(found.links) if found.links else None,
                "links_note": found.links_note,
            }
        )
        return
    _print(found.layers, "Layers that were not fitted")
    if found.links:
        _print(found.links, "Messages and collectives of sizes that were not fitted")
    print_line(found.links_note[:1].upper() + found.links_note[1:] + ".")
    errors = f"operators {mean_error(found.operators):.1%}, layers {found.mean_layer_error:.1%}"
    if found.links:
        errors += f", links {mean_error(found.links):.1%}"
    print_line(f"mean error: {errors}; wrote {out}")


def _document(row: CalibrationRow) -> dict[str, Any]:
    return {"name": row.name, "predicted_s": row.predicted_s, "measured_s": row.measured_s, "error": row.error}


def _print(rows: tuple[CalibrationRow, ...], title: str) -> None:
    table = Table("what", "predicted", "measured", "error", title=title)
    for row in rows:
        table.add_row(
            row.name, f"{row.predicted_s * 1e3:.3g} ms", f"{row.measured_s * 1e3:.3g} ms", f"{row.error:+.1%}"
        )
    stdout().print(table)


def _blend(evidence: Evidence, measured: Calibration | None, out: Path, *, name: str, as_json: bool) -> None:
    from pipeloom.calibration import blend

    base = evidence.base
    if measured is not None:
        evidence.source = "this machine"
        evidence.kinds[evidence.source] = "timed now"
        evidence.measured(measured.measurements)
    blended = blend(base, evidence, name=name)
    write_text(out, device_toml(blended.device))
    if as_json:
        print_json(_blend_document(base, evidence, blended, out))
    else:
        _print_blend(base, evidence, blended, out)


def _blend_document(base: DeviceSpec, evidence: Evidence, blended: Blend, out: Path) -> dict[str, Any]:
    return {
        "device": blended.device.name,
        "base": base.name,
        "out": str(out),
        "files": evidence.kinds,
        "network": _network(evidence),
        "quantities": [
            {name: None if value != value else value for name, value in row._asdict().items()} for row in blended.rows
        ],
        "num_held_out": len(blended.base_errors),
        "median_base_error": _median(blended.base_errors),
        "median_blended_error": _median(blended.blended_errors),
        "unusable": [
            {"file": file, "reason": reason, "count": count}
            for (file, reason), count in evidence.unusable.most_common()
        ],
    }


def _network(evidence: Evidence) -> dict[str, Any] | None:
    """Return the network that evidence between nodes counts with; None without such evidence."""
    network = evidence.network
    if network is None or not evidence.uses_network:
        return None
    return {
        "bytes_per_s": network.nic_bytes_per_s,
        "latency_s": network.nic_latency_s,
        "assumed": evidence.cluster is None,
    }


def _median(errors: tuple[float, ...]) -> float | None:
    from statistics import median

    return median(errors) if errors else None


def _print_blend(base: DeviceSpec, evidence: Evidence, blended: Blend, out: Path) -> None:
    for file, kind in evidence.kinds.items():
        print_line(f"{file}: {kind}, {evidence.num_read(file)} usable measurements")
    if network := _network(evidence):
        print_line(
            f"network between nodes: {8e-9 * network['bytes_per_s']:g} Gbit/s a device, "
            f"{network['latency_s'] * 1e6:g} us a message, "
            + ("assumed for this device; --cluster describes another" if network["assumed"] else "from --cluster")
        )
    columns = ("quantity", "shipped", "evidence", "number", "times", "blended", "held out")
    title = f"{base.name}: shares of the peak, and what the evidence changed"
    table = Table(*columns, "error before", "error after", title=title)
    for row in blended.rows:
        times = f"{row.lowest_s:.2g} to {row.highest_s:.2g} s"
        values = [_value(value) for value in (row.shipped, row.evidence, row.blended)]
        errors = ["" if error is None else share_text(error) for error in (row.base_error, row.blended_error)]
        held = str(row.num_held or "")
        table.add_row(row.name, values[0], values[1], str(row.num_observations), times, values[2], held, *errors)
    stdout().print(table)
    if evidence.unusable:
        print_line("Not usable, by reason:")
        found = evidence.unusable.most_common()
        for (file, reason), count in found[:MOST_REASONS]:
            print_line(f"  {count:6}  {file}: {reason}")
        if len(found) > MOST_REASONS:
            rest = sum(count for _, count in found[MOST_REASONS:])
            print_line(f"  {rest:6}  {len(found) - MOST_REASONS} other reasons; --json lists them")
    if blended.base_errors:
        before, after = (share_text(_median(each) or 0.0) for each in (blended.base_errors, blended.blended_errors))
        print_line(
            f"Median error on {len(blended.base_errors)} measurements that were held out: {before} with the base "
            f"table, {after} with a blend of the others."
        )
    print_line(f"wrote {out}: {blended.device.name}, a blend of all usable measurements")


def _value(value: float) -> str:
    """Return a share of the peak in percent, or a latency."""
    if value != value:
        return ""
    return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{100 * value:.3g} %"
