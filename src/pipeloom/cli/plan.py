"""`pipeloom plan`: one batch from metadata to a verified plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from pipeloom.cli.options import PARAMS_HELP, check_budget, check_method, read_params
from pipeloom.cli.output import (
    JSON_HELP,
    check_targets,
    draw,
    figures_document,
    figures_text,
    print_json,
    print_written,
)
from pipeloom.cli.solve import interruptible
from pipeloom.errors import InfeasibleError, InputError, located
from pipeloom.heartbeat import doing
from pipeloom.io import (
    SearchRecord,
    make_folder,
    packed_batches,
    read_layout,
    read_rule,
    read_samples,
    read_spec,
    write_batches,
    write_instance,
    write_schedule,
    write_text,
)
from pipeloom.limits import MAX_COUNT, MAX_SEED
from pipeloom.printing import print_line
from pipeloom.report import key_figures, make_track
from pipeloom.spec import Batch, ModelSpec, RankSpec

if TYPE_CHECKING:
    from pipeloom.planner import PlannedBatch, PlanningProblem

HELP = """\
Plan one batch: packing, instance, schedule and execution plan.

Writes to FOLDER: batches.json (the packing), instance.json and schedule.json (the scheduling problem and its
solution, as pipeloom solve and check read them), and batch.plan (the actions of every rank, proved
complete and free of deadlock).
"""
EPILOG = (
    "Examples: pipeloom plan samples.jsonl --setup runs/digits_vlm/setup.json --out planned. pipeloom plan "
    "samples.jsonl --model vlm.toml --layout vlm.layout.json --profile profile.json --tokens 512 --out planned."
)

_DEFAULT = "by default that of the setup, or {}"


def plan(
    samples: Path = typer.Argument(..., metavar="SAMPLES", help="Metadata of one batch: JSON Lines or Parquet."),
    out: Path | None = typer.Option(None, metavar="FOLDER", help="Output folder; created if missing."),
    setup: Path | None = typer.Option(
        None, metavar="FILE", help="setup.json of a run, in place of --model, --layout, --profile and --tokens."
    ),
    model: Path | None = typer.Option(None, metavar="FILE", help="The model: modules and layers, TOML or JSON."),
    layout: Path | None = typer.Option(None, metavar="FILE", help="A pipeloom.layout/1."),
    profile: Path | None = typer.Option(None, metavar="FILE", help="Measured layer costs, a pipeloom.profile/1."),
    tokens: int = typer.Option(
        0, min=0, max=MAX_COUNT, metavar="N", help="Maximum tokens in a microbatch; 0: as in the setup."
    ),
    cluster: Path | None = typer.Option(None, metavar="FILE", help="Links and memory of the ranks, TOML or JSON."),
    budget: float | None = typer.Option(
        None, metavar="SECONDS", help=f"Seconds for the plan, including verification; {_DEFAULT.format(1)}."
    ),
    method: str | None = typer.Option(
        None, metavar="NAME", help=f"Search method, as in pipeloom solve; {_DEFAULT.format('default')}."
    ),
    seed: int | None = typer.Option(
        None, min=0, max=MAX_SEED, metavar="N", help=f"Seed of all random choices; {_DEFAULT.format(0)}."
    ),
    iteration: int = typer.Option(
        0, min=0, max=MAX_COUNT, metavar="N", help="Iteration number to write into the plan."
    ),
    params: Path | None = typer.Option(None, metavar="FILE", help=PARAMS_HELP),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page with the timeline."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    if budget is not None:
        check_budget(budget)
    if out is None:
        raise InputError("--out", "is missing", "name a folder for the plan")
    if method is not None:
        check_method("--method", method)
    check_targets(html, later=_targets(out))
    if out.exists() and not out.is_dir():
        raise InputError(str(out), "is a file", "give the name of a folder")
    problem = read_parts(setup, model, layout, profile, cluster, tokens)
    budget = problem.budget_s if budget is None else budget
    seed = problem.seed if seed is None else seed
    if method is None:
        method = problem.method
        check_method(f"{setup}: method", method)
    problem = replace(problem, seed=seed, method=method)
    if params is not None:
        read = read_params(params)
        rules = (*read.rules, *problem.search.rules)
        problem = replace(problem, search=msgspec.structs.replace(read, rules=rules))
    batch = Batch(read_samples(samples), iteration)
    planned = _plan(problem, batch, str(samples), budget)
    record = SearchRecord(method, seed, budget, None, planned.evaluations)
    written = _write(out, planned, problem.packing.policy, record)
    names = problem.layout.chunk_names
    track = make_track("planned", planned.graph, planned.schedule, planned.timeline, planned.lower_bound, names)
    written += draw([track], title=f"{samples.name}, iteration {iteration}", html_file=html)
    if json:
        counts = {"num_samples": len(batch.samples), "num_microbatches": len(planned.packing.microbatches)}
        print_json(figures_document(track) | counts | {"written": written})
        return
    packed = f"{len(batch.samples)} samples in {len(planned.packing.microbatches)} microbatches"
    print_line(f"{packed}; {figures_text(key_figures(track))}")
    print_written(written)


def _plan(problem: PlanningProblem, batch: Batch, where: str, budget_s: float) -> PlannedBatch:
    """Plan a batch until the budget is spent or the user presses Ctrl-C; errors name the file."""
    from pipeloom.planner import plan_batch

    with interruptible(budget_s) as interrupt:
        problem.compile_kernels()
        doing(f"planning (budget {budget_s:g} s)")
        try:
            with located(where):
                return plan_batch(problem, batch, budget=interrupt.budget)
        except InfeasibleError as error:
            raise type(error)(f"{where}: {error.verdict}: {error}") from error
        except OverflowError as error:
            raise InputError(where, "sizes times costs do not fit in 64 bits of ns or bytes") from error


def _write(out: Path, planned: PlannedBatch, policy: str, record: SearchRecord) -> list[str]:
    """Write all results to one folder."""
    from pipeloom.plan import to_text

    make_folder(out)
    targets = _targets(out)
    write_batches(targets[0], packed_batches([planned.packing], policy))
    write_instance(targets[1], planned.graph)
    write_schedule(targets[2], planned.graph, planned.schedule, planned.timeline, planned.lower_bound, record)
    write_text(targets[3], to_text(planned.plan))
    return [str(target) for target in targets]


def _targets(out: Path) -> list[Path]:
    return [out / name for name in ("batches.json", "instance.json", "schedule.json", "batch.plan")]


def read_parts(
    setup: Path | None, model: Path | None, layout: Path | None, profile: Path | None, cluster: Path | None, tokens: int
) -> PlanningProblem:
    """Read the problem from one file, or from several."""
    from pipeloom.cost import Profile
    from pipeloom.packing import PackingSpec
    from pipeloom.planner import PlanningProblem, check_problem, read_problem
    from pipeloom.search import SearchParams
    from pipeloom.taskgraph.iteration import MemoryLimit

    parts: dict[str, Any] = {"--model": model, "--layout": layout, "--profile": profile}
    if setup is not None:
        redundant = next((name for name, path in parts.items() if path is not None), None)
        if redundant is not None:
            raise InputError(redundant, "is set, but --setup contains it", "omit one of them")
        problem = read_problem(setup)
        if tokens:
            problem = replace(problem, packing=msgspec.structs.replace(problem.packing, token_budget=tokens))
        if cluster is not None:
            links = read_spec(cluster, RankSpec)
            costs = replace(problem.profile_costs, rank=links)
            problem = replace(problem, costs=costs, memory=MemoryLimit.of(links))
            check_problem(problem, str(setup), str(setup))
        return problem
    missing = next((name for name, path in parts.items() if path is None), None)
    if missing is not None or model is None or layout is None or profile is None:
        raise InputError(str(missing), "is missing", "give --setup, or --model, --layout and --profile")
    if tokens < 1:
        raise InputError("--tokens", f"{tokens} is below 1", "give the most tokens of a microbatch")
    links = RankSpec() if cluster is None else read_spec(cluster, RankSpec)
    spec, laid = read_spec(model, ModelSpec), read_layout(layout)
    rule = read_rule(layout, laid)
    problem = PlanningProblem.from_profile(
        spec,
        laid,
        read_spec(profile, Profile),
        PackingSpec(tokens),
        links,
        search=SearchParams(rules=() if rule is None else (rule,)),
    )
    check_problem(problem, str(layout), str(profile))
    return problem
