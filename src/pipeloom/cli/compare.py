"""`pipeloom compare`: one iteration of a described model under several baselines and the current setup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipeloom.cli.options import CLUSTER_HELP, FREEZE_HELP, TRAINER_HELP, check_budget
from pipeloom.cli.output import JSON_HELP, check_targets, compiled_kernels, print_json, print_written, stderr, stdout
from pipeloom.errors import InfeasibleError, InputError, visible_line
from pipeloom.heartbeat import doing
from pipeloom.kernels import COMPARE
from pipeloom.limits import MAX_COUNT, MAX_DEVICES, MAX_MICROBATCHES, MAX_RANKS, MAX_SEED

if TYPE_CHECKING:
    from pipeloom.cli.console import VisibleConsole
    from pipeloom.compare.answer import Question
    from pipeloom.compare.iterations import Grouping
    from pipeloom.compare.outcome import Outcome
    from pipeloom.report.table_page import Section
    from pipeloom.spec.current_run import CurrentRun
    from pipeloom.spec.hardware import ClusterSpec
    from pipeloom.spec.parallelism import Degrees
    from pipeloom.spec.trainer import TrainerSpec

HELP = """\
Estimate your gain: emulate one iteration of your model, data and cluster under a dozen baselines and your own setup.

All baselines have the same data, memory and costs. The command prints a ranking with the gain over your current setup,
the sources of the gain, the contents of the samples, the settings to change, and the uncertainty. --out and --html
write the same as a page. Times are emulated, not measured.
"""
EPILOG = (
    'Examples: pipeloom compare Qwen2.5-VL-7B --cluster 8xH100 --data samples.jsonl --now "pp=4 recompute=full" --out '
    "answer. pipeloom compare config.json --cluster cluster.toml --systems interleaved,dip,pipeloom. All names: "
    "pipeloom emulate list."
)
PIPELINE = 4
"""Default limit of pipeline ranks."""
MICROBATCHES = 16


def compare(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="A model's name, a Hugging Face folder or config.json, a .toml, or module:function."
    ),
    systems: str = typer.Option(
        "all", metavar="NAMES", help="Baselines, separated by commas; all: every suitable one."
    ),
    cluster: str = typer.Option("8xH100", help=CLUSTER_HELP),
    data: str | None = typer.Option(
        None,
        help="A data set of the zoo, or samples (.jsonl, .parquet, .tar, pattern, folder); default: the model's own.",
    ),
    now: str | None = typer.Option(
        None, metavar="RUN", help="Your current setup: 'tp=2 pp=4 recompute=full', or a file (docs/compare.md)."
    ),
    tp: int | None = typer.Option(None, min=1, max=MAX_DEVICES, help="Tensor parallelism; default: as in --now, or 1."),
    pp: int | None = typer.Option(None, min=1, max=MAX_RANKS, help="Pipeline ranks; default: as in --now, or up to 4."),
    dp: int | None = typer.Option(
        None, min=1, max=MAX_DEVICES, help="Replicas; default: as many as the devices allow."
    ),
    freeze: list[str] = typer.Option([], metavar="MODULE", help=FREEZE_HELP),
    microbatches: int | None = typer.Option(
        None, min=1, max=MAX_MICROBATCHES, metavar="N", help="Microbatches of one replica; default: 16."
    ),
    tokens: int | None = typer.Option(
        None,
        min=1,
        max=MAX_COUNT,
        metavar="N",
        help="Maximum tokens in a microbatch; default: 8192, or as in a data set's paper.",
    ),
    budget: float = typer.Option(1.0, metavar="SECONDS", help="Search seconds, for baselines that search."),
    trainer: str | None = typer.Option(
        None, help=f"{TRAINER_HELP} Default: megatron with the overlap of a Megatron run, otherwise fused."
    ),
    processes: int = typer.Option(2, min=1, max=2, help="With 2, Pipeloom's layout is chosen while the baselines run."),
    seed: int = typer.Option(0, min=0, max=MAX_SEED, metavar="N", help="Seed of all random choices."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page with all timelines."),
    out: Path | None = typer.Option(
        None, metavar="FOLDER", help="Output folder for the page and the layout; created if missing."
    ),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    from pipeloom.compare.answer import Question
    from pipeloom.compare.iterations import sampled_iterations
    from pipeloom.compare.model_on_cluster import put_on_cluster
    from pipeloom.compare.now import check_groups, now_system
    from pipeloom.compare.registry import suitable
    from pipeloom.integrations.current_runs import load_run
    from pipeloom.integrations.foreign import is_megatron
    from pipeloom.integrations.models import load_model, own_batches
    from pipeloom.io import make_folder
    from pipeloom.spec.catalog import load_cluster

    check_budget(budget)
    page = html or (None if out is None else out / "comparison.html")
    check_targets(
        html, later=[] if out is None else [*([] if html else [out / "comparison.html"]), out / "layout.json"]
    )
    _check_pages(page)
    architecture, hardware = load_model(model, freeze), load_cluster(cluster)
    declared_by = "--now"
    if now is None and is_megatron(model):
        now = declared_by = model
    run = None if now is None else load_run(now, hardware.num_devices, architecture.modules[-1].num_blocks)
    degrees = _degrees(run, hardware, {"tp": tp, "pp": pp, "dp": dp}, declared_by)
    setting = put_on_cluster(architecture, hardware, degrees, trainer=_trainer(run, trainer))
    if run is not None:
        now_system(setting, run)  # rejects a layout of another model before anything is timed
    names = suitable(setting, None if systems == "all" else systems.split(","))
    if not names and run is None:
        raise InputError("--systems", "names no system that can train this model", "add pipeloom")
    grouping = _grouping(run, microbatches, tokens, declared_by)
    if run is not None:
        check_groups(run, grouping.num_microbatches)
    iterations = sampled_iterations(setting, data, grouping, seed, own_batches(model))
    if out is not None:
        make_folder(out)
    found = _compare_systems(Question(setting, iterations, grouping, names, run, budget, seed), processes, quiet=json)
    _write_and_print(found, page, out, json)


def _check_pages(page: Path | None) -> None:
    """Raise `InputError` early if a page cannot be drawn."""
    from importlib.util import find_spec

    if page is not None and find_spec("bokeh") is None:
        raise InputError("--html", "needs Bokeh", "pip install 'pipeloom[report]'")


def _degrees(run: CurrentRun | None, hardware: ClusterSpec, flags: dict[str, int | None], declared_by: str) -> Degrees:
    from pipeloom.spec.current_run import CurrentRun

    if run is not None:
        for name, flag in flags.items():
            declared = getattr(run, name)
            if flag is not None and flag != declared:
                raise InputError(f"--{name}", f"is {flag}, but {declared_by} has {declared}", "omit it")
        return run.degrees(hardware.num_devices)
    tp, pp, dp = flags["tp"] or 1, flags["pp"], flags["dp"]
    limit = hardware.num_devices // tp
    ranks = next((n for n in (PIPELINE, 2) if n <= limit), 1)
    return CurrentRun(tp=tp, pp=pp or ranks, dp=dp).degrees(hardware.num_devices)


def _trainer(run: CurrentRun | None, name: str | None) -> TrainerSpec:
    """Return the trainer of a name, with the dropout of the run, and its precision unless the name states one.

    A file states one.
    """
    import msgspec

    from pipeloom.spec.catalog import load_trainer, names

    own = None if run is None else run.trainer
    if own is None or name is None:
        return own or load_trainer(name or "fused")
    found = msgspec.structs.replace(load_trainer(name), dropout=own.dropout)
    if name not in names("trainers"):
        return found
    return msgspec.structs.replace(found, precision=own.precision, quantized_weights=own.quantized_weights)


def _grouping(run: CurrentRun | None, microbatches: int | None, tokens: int | None, declared_by: str) -> Grouping:
    from pipeloom.compare.iterations import Grouping

    if run is None:
        return Grouping(microbatches or MICROBATCHES, tokens)
    if microbatches is not None and run.microbatches is not None:
        raise InputError("--microbatches", f"is set, but {declared_by} sets their number", "omit it")
    if tokens is not None and (run.microbatch_tokens is not None or run.microbatch_samples is not None):
        raise InputError("--tokens", f"is set, but {declared_by} sets a microbatch's size", "omit it")
    count = run.microbatches or microbatches or MICROBATCHES
    return Grouping(count, run.microbatch_tokens or tokens, run.microbatch_samples, run.pad_to)


def _compare_systems(question: Question, processes: int, *, quiet: bool) -> Outcome:
    """Compare the systems, and print each one's row on standard error when it is finished."""
    from rich.text import Text

    from pipeloom.cli.compare_answer import COLUMNS, row_cells
    from pipeloom.compare.answer import answers
    from pipeloom.compare.comparison import Comparison
    from pipeloom.compare.fitting import fitting_degrees
    from pipeloom.compare.gain import GainStep
    from pipeloom.compare.outcome import Outcome

    console = stderr()
    systems: list[Comparison] = []
    steps: tuple[GainStep, ...] = ()

    def start(title: str) -> None:
        status.update(Text(f"{title} ..."))
        doing(f"timing {title}")

    doing("preparing")
    with compiled_kernels(COMPARE), console.status("preparing ...") as status:
        for each in answers(question, processes=processes, on_system=start):
            if not isinstance(each, Comparison):
                steps = each
                continue
            systems.append(each)
            if not quiet:
                if len(systems) == 1:
                    console.print_line(_line(COLUMNS, console.width))
                row = Outcome(question, (each,)).row(each)
                console.print_line(_line(row_cells(row, each.name), console.width))
        if not any(one.can_run for one in systems):
            raise InputError("--systems", f"none of them can run: {systems[0].problem}")
        found, would_fit = Outcome(question, tuple(systems), steps), None
        if not any(row.get("fits", False) for row in found.rows()):
            status.update("looking for degrees that fit ...")
            doing("looking for degrees that fit")
            would_fit = fitting_degrees(question)
    return replace(found, would_fit=would_fit)


def _line(cells: Sequence[str], limit: int) -> str:
    """Return a row of the progress output with as many cells as fit, without interval and gain."""
    name, iteration, _interval, _gain, _sign, *rest = cells
    shown = [iteration, *rest][: max(1, (limit - 20) // 12)]
    return f"{name:<20}" + "".join(f"{cell:>12}" for cell in shown)


def _write_and_print(found: Outcome, page: Path | None, out: Path | None, json: bool) -> None:
    """Write the files, and print the same content."""
    from pipeloom.cli.compare_answer import answer, document, sections
    from pipeloom.compare.registry import OURS
    from pipeloom.io import write_layout, write_text
    from pipeloom.report import timeline_html

    layout = next((one.layout for one in found.systems if one.name == OURS and one.result is not None), None)
    written: list[str] = []
    file = None
    if out is not None and layout is not None:
        file = out / "layout.json"
        write_layout(file, layout)
        written.append(str(file))
    made = sections(found, file)
    if page is not None and not any(one.result for one in found.systems):
        raise InfeasibleError(f"{found.title}: {answer(found)} {found.systems[-1].name}: {found.systems[-1].problem}")
    if page is not None:
        write_text(page, timeline_html(found.tracks(), title=found.title, note=answer(found), sections=made))
        written.append(str(page))
    if json:
        print_json(document(found, made) | {"written": written})
        return
    console = stdout()
    console.print(visible_line(found.title), style="bold")
    console.print_line(answer(found))
    console.print()
    for section in made:
        _print(console, section)
    print_written(written)


def _print(console: VisibleConsole, section: Section) -> None:
    """Print a section as on the page."""
    from pipeloom.report.any_width import Table
    from pipeloom.report.table_page import TextSection

    console.print(section.heading, style="bold")
    if isinstance(section, TextSection):
        for line in section.lines:
            console.print_line(line)
    else:
        table = Table(*section.header, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for number, row in enumerate(section.rows):
            table.add_row(*row, style="bold" if number in section.totals else "")
        console.print(table)
    if section.note:
        console.print(section.note, style="dim", soft_wrap=True)
    console.print()
