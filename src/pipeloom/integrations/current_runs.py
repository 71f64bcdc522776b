"""What somebody runs now, wherever its description comes from: words, a file of ours, torchtitan's, Megatron's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.errors import InputError
from pipeloom.io.document import convert
from pipeloom.io.files import printable, read_text
from pipeloom.spec.current_run import CurrentRun, RunSchedule

WORDS = "tp=2 pp=4 schedule=1f1b recompute=full microbatch_tokens=8192"
"""An example."""
FIELDS = tuple(name for name in CurrentRun.__struct_fields__ if name not in ("only", "source", "notes"))
"""What may be said."""
_TITAN_TABLES = ("parallelism", "training", "job")
_TITAN_SCHEDULES: dict[str, tuple[RunSchedule, int]] = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved1f1b": ("interleaved", 2),
}
"""Those that can be emulated, with the least number of stages a rank."""


def load_run(given: str, num_devices: int | None = None) -> CurrentRun:
    """What somebody runs now.

    Parameters
    ----------
    given : str
        Words ``tp=2 pp=4 schedule=1f1b`` (`CurrentRun` has the names), or a file: a ``.toml`` with these fields in a
        table ``[now]``, one of torchtitan, or arguments of Megatron in any other.
    num_devices : int or None
        Of the cluster, for Megatron's replicas where its arguments do not say.

    Raises
    ------
    InputError
        Neither, or a field that cannot be; it is named.
    """
    if given.endswith(".toml") and Path(given).is_file():
        return _of_toml(Path(given))
    if is_megatron(given):
        return _of_megatron(Path(given), num_devices)
    if "=" in given and not given.lstrip().startswith("-"):
        return _convert(_words(given), "--now", strict=False, source="words")
    raise InputError(f"--now {given!r}", "is neither a file nor words", f"write {WORDS!r}, or name a file")


def is_megatron(name: str) -> bool:
    """Whether a file is read as Megatron's arguments: one that no other reader takes by its name."""
    path = Path(name)
    return not name.endswith((".toml", ".json")) and len(name) < 4096 and "\0" not in name and path.is_file()


def _of_megatron(path: Path, num_devices: int | None) -> CurrentRun:
    """The one place where a run as Megatron describes it becomes ours."""
    from pipeloom.emulator.static import MIXED_PRECISION
    from pipeloom.integrations.megatron import read_megatron

    megatron = read_megatron(path, default_devices=num_devices)
    degrees, setup, recompute = megatron.degrees, megatron.now, megatron.now.recompute
    counts = [stage.count("t") for stage in setup.stages]
    notes = list(megatron.notes)
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
    if megatron.state != MIXED_PRECISION:
        direction = "low" if sum(megatron.state) > sum(MIXED_PRECISION) else "high"
        notes.append(f"gradients and optimizer states are emulated as of float32 Adam; memory is too {direction}")
    fields = {
        "tp": degrees.tensor,
        "pp": degrees.pipeline,
        "dp": degrees.data,
        "cp": degrees.context,
        "ep": degrees.expert,
        "zero": degrees.zero,
        "schedule": "interleaved" if setup.virtual > 1 else "1f1b",
        "group": setup.group_size if setup.virtual > 1 else None,
        # All prediction layers are one block, which Megatron keeps in one stage.
        "layout": [count + ("m" in stage) for count, stage in zip(counts, setup.stages, strict=True)],
        "recompute": word,
        "microbatch_tokens": megatron.micro_batch_size * megatron.seq_length,
        "microbatches": megatron.num_microbatches,
        "notes": notes,
    }
    run = _convert(fields, str(path), strict=True, source=f"{path}, of Megatron")
    only: RunSchedule | None = "interleaved" if megatron.rules.one_stage else None
    return msgspec.structs.replace(run, only="1f1b" if megatron.rules.several_stages else only)


def _words(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise InputError("--now", f"{word!r} is not name=value", f"write {WORDS!r}")
        if name in fields:
            raise InputError("--now", f"{name} is given twice", "give it once")
        fields[name] = [_number(part) for part in value.split(",")] if name == "layout" else value
    return fields


def _number(text: str) -> Any:
    return int(text) if text.isdecimal() else text


def _convert(fields: dict[str, Any], entity: str, *, strict: bool, source: str) -> CurrentRun:
    unknown = [name for name in fields if name not in FIELDS and name != "notes"]
    if unknown:
        raise InputError(
            f"{entity}: {printable(unknown[0])}", "is no field of a run", f"fields are {', '.join(FIELDS)}"
        )
    return msgspec.structs.replace(convert(fields, CurrentRun, entity, strict=strict), source=source)


def _of_toml(path: Path) -> CurrentRun:
    text = read_text(path)
    try:
        content = tomllib.loads(text)
    # ValueError: no TOML, or a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), f"is not TOML: {error}") from error
    if "now" in content:
        table = content["now"]
        if not isinstance(table, dict):
            raise InputError(f"{path}: now", "is not a table", "write [now] and its fields below it")
        return _convert(table, f"{path}: now", strict=True, source=str(path))
    if any(isinstance(content.get(name), dict) for name in _TITAN_TABLES):
        return _of_torchtitan(content, path)
    raise InputError(str(path), "has no table [now], and none of torchtitan's", f"write [now] and below it {WORDS}")


class _Titan:
    """Values of a torchtitan file, each checked to be of its kind."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.content, self.path = content, path

    def get(self, table: str, name: str, default: Any) -> Any:
        inside = self.content.get(table, {})
        value = inside.get(name, default) if isinstance(inside, dict) else default
        if default is not None and (not isinstance(value, type(default)) or isinstance(value, bool)):
            raise self.refused(table, name, value, f"give {'a whole number' if isinstance(default, int) else 'a word'}")
        return value

    def refused(self, table: str, name: str, value: Any, remedy: str) -> InputError:
        return InputError(f"{self.path}: {table}.{name}", f"{value!r} is not understood", remedy)


def _of_torchtitan(content: dict[str, Any], path: Path) -> CurrentRun:
    """A file of torchtitan: its data are packed to ``seq_len``, and a microbatch has so many sequences."""
    titan = _Titan(content, path)
    pp = titan.get("parallelism", "pipeline_parallel_degree", 1)
    shards = titan.get("parallelism", "data_parallel_shard_degree", -1)
    replicas = titan.get("parallelism", "data_parallel_replicate_degree", 1)
    word = titan.get("parallelism", "pipeline_parallel_schedule", "Interleaved1F1B")
    if pp > 1 and word.lower() not in _TITAN_SCHEDULES:
        raise titan.refused(
            "parallelism", "pipeline_parallel_schedule", word, f"emulated are {', '.join(_TITAN_SCHEDULES)}"
        )
    order, chunks = _TITAN_SCHEDULES.get(word.lower(), ("1f1b", 1)) if pp > 1 else ("1f1b", 1)
    mode = titan.get("activation_checkpoint", "mode", "selective")
    if mode not in ("none", "selective", "full"):
        raise titan.refused("activation_checkpoint", "mode", mode, "emulated are none, selective, full")
    size = titan.get("parallelism", "pipeline_parallel_microbatch_size", 1)
    batch, seq_len = titan.get("training", "local_batch_size", 8), titan.get("training", "seq_len", 2048)
    layout = _titan_layers(titan, pp)
    fields = {
        "tp": titan.get("parallelism", "tensor_parallel_degree", 1),
        "pp": pp,
        "dp": None if shards == -1 else shards * replicas,
        "cp": titan.get("parallelism", "context_parallel_degree", 1),
        "ep": titan.get("parallelism", "expert_parallel_degree", 1),
        "zero": 3 if titan.get("parallelism", "fsdp_reshard_after_forward", "default") == "always" else 1,
        "schedule": order,
        "layout": layout,
        "chunks": None if layout else chunks,
        "recompute": mode,
        "microbatch_tokens": (size if pp > 1 else batch) * seq_len,
        "microbatches": max(1, batch // size) if pp > 1 else 1,
        "notes": [] if layout else ["its even split is emulated as equal numbers of blocks"],
    }
    return _convert(fields, str(path), strict=True, source=f"{path}, of torchtitan")


def _titan_layers(titan: _Titan, pp: int) -> list[int]:
    """Blocks of every stage, where the file has them."""
    if titan.get("parallelism", "pipeline_parallel_layers_per_stage", None) is not None:
        raise titan.refused(
            "parallelism", "pipeline_parallel_layers_per_stage", "a number", "give module_fqns_per_model_part instead"
        )
    parts = titan.get("parallelism", "module_fqns_per_model_part", None)
    if not parts:
        return []
    if not isinstance(parts, list) or len(parts) % pp or not all(isinstance(part, list) for part in parts):
        raise titan.refused(
            "parallelism", "module_fqns_per_model_part", parts, f"give a list of names for each stage of {pp} ranks"
        )
    return [sum(bool(re.fullmatch(r"layers\.\d+", str(name))) for name in part) for part in parts]
