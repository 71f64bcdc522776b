"""Load the description of a current training run: words, a TOML file, or a file of torchtitan or Megatron."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.errors import InputError
from pipeloom.integrations.foreign import LONGEST_PATH, foreign_kind
from pipeloom.integrations.titan_fields import PACKED
from pipeloom.integrations.titan_runs import TABLES, read_titan
from pipeloom.io.document import convert
from pipeloom.io.files import printable, read_text
from pipeloom.search import group_sizes
from pipeloom.spec.current_run import CurrentRun, RunSchedule
from pipeloom.spec.strategies import Strategy

WORDS = "tp=2 pp=4 schedule=1f1b recompute=full microbatch_tokens=8192"
"""An example for error messages."""
_OF_TRAINERS = ("only", "rejected", "state", "trainer", "source", "notes")
"""Fields that are only set from a trainer's own files."""
FIELDS = tuple(name for name in CurrentRun.__struct_fields__ if name not in _OF_TRAINERS)
"""Fields that a user may set."""
_READS = f"words ({WORDS}), a .toml with a table [now] or of torchtitan, and arguments of Megatron"


def load_run(given: str, num_devices: int | None = None, num_blocks: int | None = None) -> CurrentRun:
    """Load the description of a current training run.

    Parameters
    ----------
    given : str
        Words such as ``tp=2 pp=4 schedule=1f1b`` with the fields of `CurrentRun`, or a file: a ``.toml`` with these
        fields in a table ``[now]``, a ``.toml`` of torchtitan, or any other file with Megatron's arguments.
    num_devices : int or None
        Devices of the cluster. Determines the number of replicas if the file does not.
    num_blocks : int or None
        Blocks of the model's last module, which torchtitan divides into stages by its own rule.

    Raises
    ------
    InputError
        The text is neither words nor a file, or a field is invalid.
    """
    path = Path(given) if len(given) < LONGEST_PATH and "\0" not in given else None
    if path is not None and path.is_file():
        if path.suffix == ".toml":
            return _of_toml(path, num_devices, num_blocks)
        kind = foreign_kind(path) or ("JSON, but no description of a run" if path.suffix == ".json" else "")
        if kind:
            raise InputError(f"--now {printable(given)}", f"is {kind}", f"it reads {_READS}")
        return _of_megatron(path, num_devices)
    if path is not None and path.is_dir():
        raise InputError(f"--now {printable(given)}", "is a folder", f"it reads {_READS}")
    if "=" in given and not given.lstrip().startswith("-"):
        return _convert(_words(given), "--now", strict=False, source="words")
    raise InputError(f"--now {given!r}", "is neither a file nor words", f"write {WORDS!r}, or name a file")


_WHOLE = "attention to whole sequences is emulated"
"""Note of `read_megatron` on ``--reset-attention-mask``."""


def _of_megatron(path: Path, num_devices: int | None) -> CurrentRun:
    """Convert the description of a run from Megatron's arguments."""
    from pipeloom.integrations.megatron import read_megatron

    megatron = read_megatron(path, default_devices=num_devices)
    degrees, setup, recompute = megatron.degrees, megatron.now, megatron.now.recompute
    counts = [stage.count("t") for stage in setup.stages]
    # Here each sample attends only to itself; `Timing` emulates attention over whole sequences.
    notes = [note for note in megatron.notes if _WHOLE not in note]
    if len(notes) == len(megatron.notes):
        notes.append(PACKED)
    if degrees.tensor > 1 and not degrees.sequence_parallel:
        notes.append("sequence parallelism is emulated, which it runs without, so times and memory are too low")
    if plain := megatron.precision.plain_first + megatron.precision.plain_last:
        notes.append(f"{megatron.precision.products} is emulated in the {plain} layers at the ends in bfloat16 too")
    word = "none"
    if recompute.granularity == "full":
        share = sum(map(recompute.recomputed, counts)) / max(1, sum(counts))
        word = "full" if share == 1 else f"full:{share:.4g}"
        if any(recompute.recomputed(count) != round(share * count) for count in counts):
            notes.append(f"recomputing {recompute} is emulated as recompute={word}")
    elif recompute.granularity == "selective":
        cheap = bool({"layernorm", "moe_act", "mlp", "moe"} & set(recompute.modules))
        word = "selective" if cheap else "none"
        notes.append(f"recomputing {' and '.join(recompute.modules)} is emulated as recompute={word}")
    fields = {
        "tp": degrees.tensor,
        "pp": degrees.pipeline,
        "dp": degrees.data,
        "cp": degrees.context,
        "ep": degrees.expert,
        "etp": degrees.expert_tensor,
        "zero": degrees.zero,
        "schedule": "interleaved" if setup.virtual > 1 else "1f1b",
        "group": setup.group_size if setup.virtual > 1 else None,
        # All multi-token prediction layers are one block, which Megatron keeps in one stage.
        "layout": [count + ("m" in stage) for count, stage in zip(counts, setup.stages, strict=True)],
        "recompute": word,
        "microbatch_tokens": megatron.micro_batch_size * megatron.seq_length,
        "microbatches": megatron.num_microbatches,
        "notes": notes,
    }
    run = _convert(fields, str(path), strict=True, source=f"{path}, of Megatron")
    only: RunSchedule | None = "interleaved" if megatron.rules.one_stage else None
    only = "1f1b" if megatron.rules.several_stages else only
    if setup.virtual == 1:
        group = group_sizes(degrees.pipeline, megatron.num_microbatches)[:1]
        if group != group_sizes(degrees.pipeline, megatron.num_microbatches, *megatron.other_counts)[:1]:
            only = "1f1b"  # the ramp-up of the batch, or evaluation, rejects the group of virtual stages
    rejected: list[Strategy] = [] if "layernorm" in megatron.recomputable else ["selective"]
    if megatron.rules.full:
        rejected.append("recompute")
    trainer = megatron.with_options(megatron.trainer)
    return msgspec.structs.replace(run, only=only, rejected=tuple(rejected), state=degrees.state, trainer=trainer)


def _words(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise InputError("--now", f"{word!r} is not name=value", f"write {WORDS!r}")
        if name in fields:
            raise InputError("--now", f"{name} is given twice", "give it once")
        fields[name] = value
        if name == "layout":
            # Longer numbers are refused as text.
            fields[name] = [int(part) if part.isdecimal() and len(part) < 19 else part for part in value.split(",")]
    return fields


def _convert(fields: dict[str, Any], entity: str, *, strict: bool, source: str) -> CurrentRun:
    unknown = [name for name in fields if name not in FIELDS and name != "notes"]
    if unknown:
        raise InputError(
            f"{entity}: {printable(unknown[0])}", "is no field of a run", f"fields are {', '.join(FIELDS)}"
        )
    return msgspec.structs.replace(convert(fields, CurrentRun, entity, strict=strict), source=source)


def _of_toml(path: Path, num_devices: int | None, num_blocks: int | None) -> CurrentRun:
    text = read_text(path)
    try:
        content = tomllib.loads(text)
    # ValueError: not TOML, or a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), f"is not TOML: {error}") from error
    if "now" in content:
        table = content["now"]
        if not isinstance(table, dict):
            raise InputError(f"{path}: now", "is not a table", "write [now] and its fields below it")
        others = [name for name in content if name != "now"]
        if others:
            raise InputError(f"{path}: {printable(others[0])}", "is beside [now], and not read", "leave it out")
        return _convert(table, f"{path}: now", strict=True, source=str(path))
    if any(isinstance(content.get(name), dict) for name in TABLES):
        fields = read_titan(content, path, num_devices, num_blocks)
        return _convert(fields, str(path), strict=True, source=f"{path}, of torchtitan")
    raise InputError(str(path), "has no table [now], and none of torchtitan's", f"write [now] and below it {WORDS}")
