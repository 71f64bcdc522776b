"""`pipeloom emulate`: seconds and bytes of one iteration, before anything is launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from pipeloom.cli.options import CLUSTER_HELP, FREEZE_HELP, TRAINER_HELP
from pipeloom.cli.output import JSON_HELP, check_targets, draw, print_json, print_written, stderr, stdout
from pipeloom.emulator import module_parameters
from pipeloom.errors import InputError
from pipeloom.heartbeat import doing
from pipeloom.integrations.data.sources import names_samples, read_all_samples
from pipeloom.integrations.models import load_model, own_batches
from pipeloom.iteration import Draw, EmulatedStep
from pipeloom.iteration import emulate as run_emulation
from pipeloom.iteration.microbatches import left_out, repeated
from pipeloom.limits import MAX_DEVICES, MAX_MICROBATCHES, MAX_RANKS, MAX_SEED
from pipeloom.printing import print_line
from pipeloom.report import emulated_track, share_text, size_text
from pipeloom.report.any_width import Table
from pipeloom.spec import Sample
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import load_cluster, load_trainer, names
from pipeloom.spec.datasets import CONTEXT_TOKENS, draw_samples, own_clips_of_iterations, pack_documents
from pipeloom.spec.media_tokens import as_model_makes, check_lengths, disagreements, missing_data
from pipeloom.spec.parallelism import Degrees
from pipeloom.validation import INTERVAL, Interval, interval_for

HELP = """\
Emulate one training iteration: time, MFU, bubbles, and peak memory of every rank.

Times are emulated from operators and a device table. The table says whether it was measured or taken from a
datasheet.
"""
EPILOG = (
    "Example: pipeloom emulate vlm-m --cluster dip-h800-64 --tp 2 --pp 4 --dp 8. Models, clusters and data sets: "
    "names of the zoo (pipeloom emulate list), or your own .toml files, described in docs/emulator.md."
)


def emulate(
    model: str = typer.Argument(
        ...,
        metavar="MODEL",
        help="A model's name, a Hugging Face config.json or folder, a .toml file, module:function, or 'list' for all.",
    ),
    cluster: str = typer.Option("dip-h800-64", help=CLUSTER_HELP),
    tp: int = typer.Option(1, min=1, max=MAX_DEVICES, help="Tensor parallelism."),
    pp: int = typer.Option(1, min=1, max=MAX_RANKS, help="Pipeline ranks."),
    dp: int = typer.Option(1, min=1, max=MAX_DEVICES, help="Data-parallel replicas."),
    cp: int = typer.Option(1, min=1, max=MAX_DEVICES, help="Context parallelism."),
    ep: int = typer.Option(1, min=1, max=MAX_DEVICES, help="Expert parallelism."),
    freeze: list[str] = typer.Option([], metavar="MODULE", help=FREEZE_HELP),
    zero: int = typer.Option(1, min=0, max=3, help="ZeRO stage over the replicas: 0, 1 or 3."),
    data: str | None = typer.Option(
        None, help="A data set of the zoo, or your own samples (.jsonl, .parquet, .tar); default: the papers' mixture."
    ),
    microbatches: int = typer.Option(16, min=1, max=MAX_MICROBATCHES, metavar="N", help="Microbatches of one replica."),
    strategy: str | None = typer.Option(
        None,
        help="keep, selective, recompute or offload; recompute:0.5: half of the layers; default: fastest that fits.",
    ),
    trainer: str = typer.Option("fused", help=TRAINER_HELP),
    seed: int = typer.Option(0, min=0, max=MAX_SEED, help="Seed of the drawn samples."),
    trace: Path | None = typer.Option(None, metavar="FILE", help="Write a Chrome trace (JSON)."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page with the timeline."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    if model == "list":
        _list(json)
        return
    check_targets(trace, html)
    if zero == 2:
        raise InputError("--zero", "2 is not supported", "use 0, 1 or 3")
    architecture, hardware, runs_it = load_model(model, freeze), load_cluster(cluster), load_trainer(trainer)
    doing(f"emulating {model}")
    degrees = Degrees(tensor=tp, pipeline=pp, data=dp, context=cp, expert=ep, zero=zero)  # type: ignore[arg-type]
    groups = microbatches_of(architecture, data, microbatches, seed, model)
    result = run_emulation(architecture, hardware, degrees, batch=groups, strategy=strategy, trainer=runs_it)
    trust = interval_for(hardware.device, architecture, runs_it)
    title = f"{architecture.name} on {hardware.name}, tp {tp} pp {pp} dp {dp}"
    written = []
    if trace is not None or html is not None:
        note = f"Emulated from the {hardware.device.basis} table of {hardware.device.name}; trainer: {runs_it.text}. "
        note += f"{trust.text(result.iteration_s)}: {trust.note}."
        track = emulated_track("emulated", result, result.layout.chunk_names)
        written = draw([track], title=title, note=note, trace_file=trace, html_file=html)
    if json:
        print_json(
            document(result, trust)
            | {
                "model": architecture.name,
                "parameters": module_parameters(architecture),
                "cluster": hardware.name,
                "device_basis": hardware.device.basis,
                "trainer": runs_it.name,
                "interval_basis": trust.basis,
                "written": written,
            }
        )
        return
    print_line(samples_text(groups))
    print_line(parameters_text(architecture))
    _print(result, trust, title, f"device table: {hardware.device.basis}; trainer: {runs_it.text}")
    print_written(written)


def _own_microbatches(architecture: Architecture, data: str, count: int) -> list[list[Sample]]:
    """Pack a user's own samples, whole, and return the first ``count`` microbatches; raise `InputError` for too few.

    A microbatch has `CONTEXT_TOKENS` tokens or `CLIP_SECONDS` of videos, as in the papers, or those of the longest
    sample.
    """
    samples, notes = as_model_makes(architecture, read_all_samples(data))
    _print_notes(notes)
    videos = any(module.reads == "videos" for module in architecture.modules)
    iterations = own_clips_of_iterations(samples, count) if videos else []
    tokens = max([CONTEXT_TOKENS, *(sample.sequence_tokens for sample in samples)])
    groups = next(iter(iterations), []) if videos else pack_documents(samples, tokens, max_images=tokens)
    if len(groups) < count:
        raise InputError(
            data, f"has {len(groups)} microbatches, but {count} are needed", "use --microbatches, or more samples"
        )
    return groups[:count]


def microbatches_of(
    architecture: Architecture, data: str | None, count: int, seed: int, model: str = ""
) -> Sequence[Sequence[Sample]]:
    """Return microbatches of a user's own samples, of the batches beside his ``model``, or drawn from a data set.

    Prints a note on standard error if images or recordings are those of another model, and for modules without work.
    """
    batches = own_batches(model) if data is None else ()
    groups: Sequence[Sequence[Sample]]
    if batches:
        groups = repeated(batches, count)
        _print_notes(left_out(batches, count))
    elif data is not None and names_samples(data):
        groups = _own_microbatches(architecture, data, count)
    else:
        if data is not None and data.endswith(".toml"):
            _print_notes(disagreements(architecture, draw_samples(data, 100, seed)))
        groups = Draw(count, data, seed).of(architecture)
    check_lengths(architecture, itertools.chain.from_iterable(groups))
    _print_notes(missing_data(architecture, [sample for group in groups for sample in group]))
    return groups


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        stderr().print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def samples_text(groups: Sequence[Sequence[Sample]]) -> str:
    """Describe the contents of microbatches in one line."""
    samples = [sample for group in groups for sample in group]
    images = [tokens for sample in samples for tokens in sample.image_tokens]
    parts = [f"{sum(sample.text_tokens for sample in samples):,} tokens of text"]
    if images:
        parts.append(f"{len(images):,} images of {sum(images):,} tokens")
    videos, recordings = sum(len(s.video_seconds) for s in samples), sum(len(s.audio_seconds) for s in samples)
    parts += [f"{number:,} {kind}" for kind, number in (("videos", videos), ("recordings", recordings)) if number]
    return f"{len(groups)} microbatches of {len(samples):,} samples: {', '.join(parts)}"


def parameters_text(architecture: Architecture) -> str:
    """Describe the parameters of a model and its modules in one line."""
    counts = module_parameters(architecture)
    frozen = {module.name for module in architecture.modules if module.frozen}
    parts = [f"{name} {number:,}{' frozen' if name in frozen else ''}" for name, number in counts.items()]
    return f"{architecture.name}: {sum(counts.values()):,} parameters ({', '.join(parts)})"


def document(result: EmulatedStep, trust: Interval) -> dict[str, Any]:
    """Return an emulated iteration for ``--json``."""
    return {
        "iteration_s": result.iteration_s,
        **trust.fields(result.iteration_s),
        "pipeline_s": result.pipeline_s,
        "bubble_share": result.bubble,
        "mfu": result.mfu,
        "peak_memory_bytes": result.peak_bytes.tolist(),
        "static_memory_bytes": result.static_bytes.tolist(),
        "host_memory_bytes": result.host_bytes.tolist(),
        "fits": result.fits,
        "strategy": result.strategy,
        "microbatches_in_flight": result.in_flight,
        "tokens_per_s_per_device": result.tokens_per_s,
        "layers": result.layers,
        "kind_of_time": "emulated",
    }


def _print(result: EmulatedStep, trust: Interval, title: str, basis: str) -> None:
    console = stdout()
    columns = ("iteration", INTERVAL, "MFU", "tokens/s", "bubbles", "strategy", "fits")
    table = Table(*columns, title=title, left=())
    table.add_row(
        f"{result.iteration_s:.4g} s",
        trust.text(result.iteration_s),
        f"{result.mfu:.3f}",
        f"{result.tokens_per_s:,.0f}",
        share_text(result.bubble),
        result.strategy,
        "yes" if result.fits else "no",
    )
    console.print(table)
    memory = Table("rank", "peak", "of it static", "layers", title="Peak memory, and layers", left=(3,))
    ranks = zip(result.peak_bytes.tolist(), result.static_bytes.tolist(), result.layers, strict=True)
    for rank, (peak, static, layers) in enumerate(ranks):
        memory.add_row(str(rank), size_text(peak), size_text(static), _layers_text(layers))
    console.print(memory)
    if result.host_excess:
        console.print(f"Does not fit: {result.host_excess}.", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Emulated, not measured; {basis}. tokens/s is per device. {trust.note}.", style="dim")


def _layers_text(layers: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    """Return a rank's layers as text: ``vision 0-13, lm 0-17``."""
    spans = {name: " ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in chunks) for name, chunks in layers.items()}
    return ", ".join(f"{name} {span}" for name, span in spans.items() if span)


def _list(json: bool) -> None:
    found = {
        "models": names("models"),
        "clusters": names("clusters"),
        "devices": names("devices"),
        "trainers": names("trainers"),
        "datasets": names("datasets"),
    }
    if json:
        print_json({kind: list(entries) for kind, entries in found.items()})
        return
    for kind, entries in found.items():
        stdout().print(f"{kind}: {', '.join(entries)}")
