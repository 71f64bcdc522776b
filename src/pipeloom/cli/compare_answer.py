"""The result of `pipeloom compare`: the same sections on the console, on the page, and in ``--json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pipeloom.cli.emulate import parameters_text
from pipeloom.compare.comparison import Comparison
from pipeloom.compare.gain import PACKED, packed_budget
from pipeloom.compare.now import NOW, TUNED, held_as, megatron_group, run_costs
from pipeloom.compare.outcome import degrees_text
from pipeloom.compare.registry import OURS
from pipeloom.integrations.megatron.model import pattern_of
from pipeloom.integrations.megatron.setup import PipelineSettings, Recompute
from pipeloom.iteration import batch_of
from pipeloom.layout import blocks_of_stages
from pipeloom.packing.loads import budget_tokens
from pipeloom.report import seconds_text, share_text, size_text
from pipeloom.report.table_page import Section, TableSection, TextSection
from pipeloom.spec import STRATEGIES, TRAITS
from pipeloom.spec.architecture import PredictionLayer, num_experts
from pipeloom.spec.current_run import CurrentRun
from pipeloom.spec.datasets import CONTEXT_TOKENS
from pipeloom.units import seconds_range_text
from pipeloom.validation import INTERVAL, SIGN_RIGHT

if TYPE_CHECKING:
    from pipeloom.compare.answer import Question
    from pipeloom.compare.outcome import Outcome
    from pipeloom.spec import ChunkStrategy, Sample
    from pipeloom.spec.architecture import Layer
    from pipeloom.spec.parallelism import Degrees

COLUMNS = (
    "system",
    "iteration",
    INTERVAL,
    "gain",
    "sign right",
    "tok/s/GPU",
    "MFU",
    "bubbles",
    "memory",
    "above bound",
)
STEPS = {
    "layout": "layout, and the division of images",
    "packing": "packing",
    "order": "order",
    "memory": "memory strategies",
}


def gain_text(gain: float) -> str:
    """Return a gain in percent with its sign."""
    return f"{100 * gain:+.1f} %"


def row_cells(row: dict[str, Any], baseline: str = "") -> tuple[str, ...]:
    """Return one system's row of `COLUMNS`, without a gain in the row of the ``baseline`` or if it is unknown."""
    if "problem" in row:
        return (row["system"], "does not fit" if row["can_run"] else "cannot run", *[""] * (len(COLUMNS) - 2))
    gain = row["gain"]
    return (
        row["system"],
        seconds_text(row["iteration_s"]),
        seconds_range_text(row["iteration_low_s"], row["iteration_high_s"]),
        "" if gain is None or row["system"] == baseline else gain_text(gain),
        "" if gain is None or row["system"] == baseline else f"{100 * row['sign_probability']:.0f} %",
        f"{row['tokens_per_s_per_device']:,.0f}",
        f"{row['mfu']:.3f}",
        share_text(row["bubble_share"]),
        size_text(row["peak_memory_bytes"]) + ("" if row["fits"] else "!"),
        "" if row["gap"] is None else share_text(row["gap"]),
    )


def sections(outcome: Outcome, layout_file: Path | None = None) -> list[Section]:
    """Return the sections below the `answer`; ``layout_file`` is the file of Pipeloom's layout."""
    made = [
        _ranking(outcome),
        _unfit(outcome),
        _steps(outcome),
        *_changes(outcome, layout_file),
        _samples(outcome),
        _confidence(outcome),
    ]
    return [section for section in made if section is not None]


def answer(outcome: Outcome) -> str:
    """Return the result in one line: the fastest system, and the best setup of the own trainer."""
    base = outcome.baseline
    if base is None:
        text = "No system fits." if outcome.question.run is None else "Your present setup cannot be emulated."
        return text + _would_fit(outcome)
    fitting = sorted((one for one in outcome.systems if one.result is not None), key=outcome.iteration_s)
    names = [one.name for one in fitting]
    notable = [] if names[0] == base.name else [fitting[0]]
    notable += [one for one in fitting[1:] if one.name == TUNED and base.name == NOW and _is_better(outcome, one)]
    times = {one.name: seconds_text(outcome.iteration_s(one)) for one in fitting}
    text = f"Emulated: {'you take' if base.name == NOW else f'{base.title} takes'} {times[base.name]} an iteration"
    parts = [
        f"{one.title} takes {times[one.name]}, {gain_text(outcome.row(one)['gain'])} throughput "
        f"({one.name}; sign right: {outcome.chance(one).text} of published pairs)"
        for one in notable
    ]
    if len(fitting) > 1 and not parts:
        return f"{text}, and no other system is faster."
    return ". ".join([text, *parts]) + "." + _would_fit(outcome)


def _is_better(outcome: Outcome, one: Comparison) -> bool:
    """Return whether a fitting system is faster than the present setup, or that does not fit."""
    base = outcome.baseline
    if base is None or base.name != NOW or not outcome.row(base)["fits"]:
        return True
    return outcome.iteration_s(one) < outcome.iteration_s(base)


def _would_fit(outcome: Outcome) -> str:
    """Return which degrees fit if no system does; empty if one does, or nothing was found."""
    degrees = outcome.would_fit
    if degrees is None:
        return ""
    run = outcome.question.run
    flags = f"--tp {degrees.tensor} --pp {degrees.pipeline}"
    if degrees.expert > 1 or run is not None:
        flags = f"--now '{_words(degrees, run or CurrentRun())}'"
    count = degrees.num_devices
    return f" The nearest that fits: {degrees_text(degrees)} on {count} devices ({flags}, with a --cluster of {count})."


def _words(degrees: Degrees, run: CurrentRun, **settings: object) -> str:
    """Return degrees, settings that are not None, and the microbatches of a run in the form of ``--now``."""
    usual = CurrentRun()
    words = {"tp": degrees.tensor, "pp": degrees.pipeline, "dp": degrees.data}
    others = {"cp": degrees.context, "ep": degrees.expert, "etp": degrees.expert_tensor, "zero": degrees.zero}
    words |= {name: value for name, value in others.items() if value != getattr(usual, name)}
    microbatches = {
        name: getattr(run, name) for name in ("microbatch_samples", "microbatch_tokens", "pad_to", "microbatches")
    }
    return " ".join(f"{k}={v}" for k, v in (words | settings | microbatches).items() if v is not None)


def _ranking(outcome: Outcome) -> Section:
    rows, base = outcome.rows(), outcome.baseline
    best = frozenset(i for i, row in enumerate(rows) if row["system"] in (NOW, OURS, PACKED))
    name = "" if base is None else base.name
    count = len(outcome.question.iterations.groups)
    notes = [f"{count} microbatches a replica, seed {outcome.question.seed}"]
    if base is not None:
        notes.append(f"gain over {base.name} ({base.title})")
        notes.append(f"sign right: {SIGN_RIGHT}")
    notes.append("above bound: gap to the lower bound of all schedules of that layout")
    if any(not row.get("fits", True) for row in rows):
        capacity = size_text(outcome.setting.capacity_bytes)
        notes.append(f"!: with workspace and messages, exceeds the memory of {capacity}, by the emulator")
    return TableSection(
        "Systems, fastest first", "; ".join(notes), COLUMNS, [row_cells(row, name) for row in rows], best
    )


def _unfit(outcome: Outcome) -> Section | None:
    unfit = [one for one in outcome.systems if one.result is None]
    heading = "What does not fit" if all(one.can_run for one in unfit) else "What does not fit or cannot run"
    return TextSection(heading, "", [f"{one.name}: {one.problem}" for one in unfit]) if unfit else None


def _steps(outcome: Outcome) -> Section | None:
    rows, base = outcome.step_rows(), outcome.baseline
    if not rows or base is None:
        return None
    cells = [("as you run it", seconds_text(outcome.iteration_s(base)), "", "", "", "")]
    cells += [
        (
            STEPS[row["step"]],
            seconds_text(row["iteration_s"]),
            ("-" if row["saved_s"] < 0 else "") + seconds_text(abs(row["saved_s"])),
            share_text(row["share"]),
            f"{100 * row['sign_probability']:.0f} %",
            row["note"],
        )
        for row in rows
    ]
    note = "Pipeloom's choices are applied one after the other; gains that several share count for the first."
    return TableSection(
        "Where the gain comes from", note, ("", "iteration", "saved", "of all", "sign right", ""), cells
    )


def _samples(outcome: Outcome) -> Section:
    groups = outcome.question.iterations.real.groups
    samples = [sample for group in groups for sample in group]
    measures: list[tuple[str, Callable[[Sample], Sequence[float]]]] = [
        ("tokens of a sample", lambda s: [s.sequence_tokens]),
        ("text of a sample", lambda s: [s.text_tokens]),
        ("images of a sample", lambda s: [len(s.image_tokens)]),
        ("tokens of an image", lambda s: s.image_tokens),
        ("patches of an image", lambda s: s.patches),
        ("seconds of a video", lambda s: s.video_seconds),
        ("seconds of a recording", lambda s: s.audio_seconds),
    ]
    rows = [_spread(name, [value for sample in samples for value in of(sample)]) for name, of in measures]
    rows.append(_spread("samples of a microbatch", [len(group) for group in groups]))
    rows.append(_spread("tokens of a microbatch", [sum(s.sequence_tokens for s in group) for group in groups]))
    shown = [row for row in rows if row is not None and row[2] != "0"]
    note = f"{len(samples):,} samples in {len(groups):,} microbatches. {parameters_text(outcome.setting.architecture)}."
    header = ("one iteration of a replica", "number", "sum", "5 %", "median", "95 %", "most")
    return TableSection("What is trained on what", note, header, shown)


def _spread(name: str, values: Sequence[float]) -> tuple[str, ...] | None:
    if not values:
        return None
    low, middle, high = np.percentile(values, (5, 50, 95))
    numbers = (len(values), sum(values), low, middle, high, max(values))
    return (name, *(f"{number:,.0f}" for number in numbers))


def _changes(outcome: Outcome, layout_file: Path | None) -> list[Section]:
    found = {one.name: one for one in outcome.systems if one.result is not None}
    made: list[Section] = []
    if TUNED in found and NOW in found:
        made.append(TextSection("What to change in your trainer", "", _trainer_lines(outcome, found[TUNED])))
    if OURS in found:
        made.append(TextSection("The same run as a train.toml", "", _pipeloom_lines(outcome, found, layout_file)))
    return made


def _trainer_lines(outcome: Outcome, tuned: Comparison) -> list[str]:
    """Return other settings of the trainer in the form of ``--now``, and as Megatron's string."""
    run, setting = outcome.question.run, outcome.setting
    assert run is not None
    assert tuned.result is not None
    layout = tuned.result.layout
    if not _is_better(outcome, tuned):
        return ["# nothing: no faster settings were found"]
    row = outcome.row(tuned)
    lines = [f"# your trainer with other settings: {seconds_text(row['iteration_s'])}, {gain_text(row['gain'])}"]
    if run.source.endswith("of Megatron"):
        lines.append("# to search all settings of Megatron: pipeloom megatron, with the same file")
    stages = blocks_of_stages(layout, setting.model)
    if stages is None:
        return lines
    backbone = setting.model.modules[-1].name
    counts = [stage.get(backbone, 0) for stage in stages]
    order = run.order
    if order in ("1f1b", "interleaved"):
        order = "interleaved" if len(counts) > setting.num_ranks else "1f1b"
    group = megatron_group(run, len(outcome.question.iterations.groups)) if order == "interleaved" else None
    held = held_as(run_costs(setting, msgspec.structs.replace(run, recompute=None)), tuned.result)
    recompute = {"keep": "none"}.get(str(held), str(held).replace("recompute", "full"))
    settings = {"schedule": order, "group": group, "layout": ",".join(map(str, counts)), "recompute": recompute}
    lines.append(_words(setting.degrees, run, **settings))
    layers = outcome.setting.architecture.modules[-1].layers
    letters, pattern = _letters(counts, layers), pattern_of(layers)
    again = _recompute(held, [stage.count("t") for stage in letters], layers)
    if pattern is not None and again.granularity == "full":
        return [*lines, "# Megatron cannot recompute whole layers of a hybrid model"]
    group = setting.num_ranks if group is None else group
    lines += PipelineSettings(tuple(letters), setting.num_ranks, group, again, pattern=pattern).arguments
    return lines


def _letters(counts: Sequence[int], layers: Sequence[Layer]) -> list[str]:
    """Return the letters of Megatron's layout for numbers of blocks; the last block may be prediction layers."""
    depth = sum(layer.depth for layer in layers if isinstance(layer, PredictionLayer))
    letters = ["t" * count for count in counts]
    if depth:
        stage = max(i for i, count in enumerate(counts) if count)
        letters[stage] = letters[stage][1:] + "m" * depth
    letters[0], letters[-1] = "E" + letters[0], letters[-1] + "L"
    return letters


def _recompute(held: ChunkStrategy, counts: Sequence[int], layers: Sequence[Layer]) -> Recompute:
    """Return Megatron's setting for a share of each stage's layers, from the stage with most of them."""
    if held.first == "recompute":
        if held.share == 1:
            return Recompute("full", "uniform", 1)
        return Recompute("full", "block", max(round(held.share * count) for count in counts))
    if held.first != "selective":
        return Recompute()
    # Norms and activation functions. Transformer Engine has no separate activation function in dense layers.
    modules = ("layernorm", "moe_act") if any(map(num_experts, layers)) else ("layernorm",)
    return Recompute("selective", modules=modules)


def _pipeloom_lines(outcome: Outcome, found: dict[str, Comparison], layout_file: Path | None) -> list[str]:
    setting, degrees = outcome.setting, outcome.setting.degrees
    best = min((found[name] for name in (OURS, PACKED) if name in found), key=outcome.iteration_s)
    if not _is_better(outcome, best):
        return ["# none: Pipeloom is no faster than your setup"]
    if degrees.context > 1 or degrees.expert > 1:
        named = f"cp = {degrees.context}, ep = {degrees.expert}"
        return [f"# none: pipeloom train has no context or expert parallelism, and this run has {named}"]
    row = outcome.row(best)
    chosen = found[OURS].tried[0].name if found[OURS].tried else ""
    gain = "" if row["gain"] is None else f", {gain_text(row['gain'])}"
    host = setting.cluster.offload_bytes
    strategies = [each for each in STRATEGIES if host or not TRAITS[each].offloads]
    return [
        f"# Pipeloom: {seconds_text(row['iteration_s'])}{gain}; layout {chosen}, of {len(found[OURS].tried)} tried",
        "[layout]",
        f"ranks = {degrees.pipeline}",
        *(['kind = "chosen"'] if layout_file is None else ['kind = "file"', f'path = "{layout_file.name}"']),
        "[parallel]",
        f"dp = {degrees.data}",
        f"tp = {degrees.tensor}",
        *_sharding_lines(degrees),
        "[packing]",
        f"token_budget = {_token_budget(outcome.question, best.name)}",
        "[cluster]",
        f"memory_capacity_bytes = {setting.capacity_bytes}",
        *([f"host_capacity_bytes = {host}"] if host else []),
        "[planner]",
        f"strategies = [{', '.join(map(repr, strategies))}]".replace("'", '"'),
    ]


def _sharding_lines(degrees: Degrees) -> list[str]:
    """Return how the replicas of `pipeloom train` shard their state, and how this differs from what was emulated."""
    if degrees.data == 1 or degrees.zero == 0:
        return []
    if degrees.zero == 3:
        return ['shard = "fsdp"', "# emulated with ZeRO 3; pipeloom train gathers weights for the whole iteration"]
    return ["# emulated with ZeRO 1; in pipeloom train, each replica holds the whole optimizer state"]


def _token_budget(question: Question, name: str) -> int:
    """Return the most tokens of a microbatch in the row of this name: `PACKED`, or one with the given microbatches."""
    model, iterations, grouping = question.setting.model, question.iterations, question.grouping
    limit = grouping.tokens or CONTEXT_TOKENS
    if name == PACKED:
        return packed_budget(model, iterations.real.groups, limit)
    given = [microbatch for each in (iterations.groups, *iterations.typical) for microbatch in each]
    largest = max(int(budget_tokens(batch_of([samples]), model).sum()) for samples in given)
    return largest if grouping.samples else max(limit, largest)


def _confidence(outcome: Outcome) -> Section:
    cluster, device = outcome.setting.cluster, outcome.setting.cluster.device
    lines = [
        f"Emulated, not measured: {device.name}, {device.basis} table ({device.source}); cluster {cluster.source}.",
        f"Trainer of all systems: {outcome.setting.trainer.text}.",
        f"{outcome.interval.note}.",
    ]
    if device.basis == "measured":
        lines.append("The table was measured; pipeloom calibrate reports its error on other sizes.")
    elif device.basis == "blended":
        lines.append(f"The table was corrected by measurements of this device. Error of the table: {device.error}.")
    else:
        lines.append(
            "Efficiencies are from kernels and training runs that others published; the interval is the error on such "
            "runs. Pipeloom itself has run on one GPU, not on a cluster."
        )
        lines.append("pipeloom calibrate corrects it with measurements of your device; use its table for your times.")
    if outcome.question.run is not None:
        lines += [f"Of your setup, {note}." for note in outcome.question.run.notes]
    lines += [f"Of the data, {note}." for note in outcome.question.iterations.notes]
    lines.append(
        "One replica represents all; pipeloom sweep compares degrees of parallelism. "
        "Not modeled: links shared by ranks, jitter."
    )
    return TextSection("How sure this is", "\n".join(lines), ())


def document(outcome: Outcome, made: Sequence[Section]) -> dict[str, Any]:
    """Return the result for ``--json``: numbers, and the printed sections."""
    setting, question = outcome.setting, outcome.question
    return {
        "model": setting.architecture.name,
        "cluster": setting.cluster.name,
        "kind_of_time": "emulated",
        "device": setting.cluster.device.name,
        "device_basis": setting.cluster.device.basis,
        "trainer": setting.trainer.name,
        "interval_basis": outcome.interval.basis,
        "seed": question.seed,
        "num_microbatches": len(question.iterations.groups),
        "gain_over": None if outcome.baseline is None else outcome.baseline.name,
        "answer": answer(outcome),
        "would_fit": None if outcome.would_fit is None else msgspec.to_builtins(outcome.would_fit),
        "systems": outcome.rows(),
        "steps": outcome.step_rows(),
        "sections": [_section_document(section) for section in made],
    }


def _section_document(section: Section) -> dict[str, Any]:
    fields: dict[str, Any] = section._asdict()
    fields.pop("totals", None)
    return fields
