"""Read a configuration file of torchtitan as fields of a `CurrentRun`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError
from pipeloom.integrations.titan_fields import NOTED, READ, REFUSED, RENAMED, UNIMPORTANT
from pipeloom.io.files import printable
from pipeloom.search.schedules import SCHEDULES, schedule_name
from pipeloom.spec.current_run import RunSchedule

TABLES = ("parallelism", "training", "job")
"""Tables that identify a file of torchtitan."""
_EMULATED = tuple(schedule.pytorch for schedule in SCHEDULES.values() if schedule.pytorch)
"""Supported schedules of PyTorch."""
_FIELDS = frozenset((*READ, *RENAMED, *NOTED, *REFUSED, *UNIMPORTANT))
_PARENTS = frozenset(field[:i] for field in _FIELDS for i, letter in enumerate(field) if letter == ".")
_QUANTIZED = re.compile(r"(quantize\.\w+\.)?(float8|mx)")


class _File:
    """The fields of a file by their current paths. Unknown fields raise `InputError`."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.path = path
        self.given: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        for label, value in self._flat(content):
            name = RENAMED.get(label, label)
            if name in self.given:
                raise InputError(f"{path}: {label}", f"is given beside {self.labels[name]}", "give one of them")
            self.given[name], self.labels[name] = value, label
        for name, field in REFUSED.items():
            if not field.is_exact(self.given.get(name, field.default)):
                raise self.refused(name, field.text)

    def _flat(self, table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            label = prefix + key
            if label in _FIELDS:
                yield label, value
            elif label in _PARENTS and isinstance(value, dict):
                yield from self._flat(value, f"{label}.")
            else:
                near = get_close_matches(label, sorted(_FIELDS), n=1)
                remedy = f"did you mean {near[0]}? " if near else ""
                raise InputError(
                    f"{self.path}: {printable(label)}",
                    "is not a field of torchtitan",
                    f"{remedy}leave out fields of your own configuration classes",
                )

    def get(self, name: str) -> Any:
        """Return a field's value, or torchtitan's default, checked to be of the default's type."""
        default = READ[name]
        value = self.given.get(name, default)
        if default is not None and (not isinstance(value, type(default)) or isinstance(value, bool)):
            kind = {int: "a whole number", str: "a word", list: "a list of words"}[type(default)]
            raise self.refused(name, f"give {kind}")
        return value

    def count(self, name: str) -> int:
        """Return a number that must be at least 1."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(name, "give a whole number, 1 or more")
        return value

    def one_of(self, name: str, words: tuple[str, ...]) -> str:
        """Return a word that must be one of the supported ones."""
        value: str = self.get(name)
        if value not in words:
            raise self.refused(name, f"choose from {', '.join(words)}")
        return value

    def label(self, name: str) -> str:
        """Return the name of a field in the file."""
        return self.labels.get(name, name)

    def refused(self, name: str, remedy: str) -> InputError:
        """Return an error for the value of a field."""
        value = self.given.get(name, READ.get(name))
        return InputError(f"{self.path}: {self.label(name)}", f"{value!r} is not supported", remedy)

    def notes(self) -> list[str]:
        """Return notes on fields that are not emulated exactly and do not depend on others."""
        notes = []
        for name, field in NOTED.items():
            value = self.given.get(name, field.default)
            if not field.is_exact(value):
                notes.append(f"{self.label(name)} = {value!r}: {field.text}" if name in self.given else field.text)
        return notes


def read_titan(content: dict[str, Any], path: Path, num_devices: int | None, num_blocks: int | None) -> dict[str, Any]:
    """Return the fields of `CurrentRun` of torchtitan's configuration. Samples are assumed to be packed to ``seq_len``.

    ``num_devices``, if known, determines the data-parallel degree if the file does not. torchtitan's split into stages
    follows from ``num_blocks``, the number of the model's blocks; None for stages of equal size.
    """
    file = _File(content, path)
    notes = file.notes()
    pp = file.count("parallelism.pipeline_parallel_degree")
    order, chunks = _schedule(file, pp)
    layout = _stages(file, pp, chunks, num_blocks)
    if len(layout) > pp and order == "1f1b" and "parallelism.pipeline_parallel_schedule" not in file.given:
        order = "interleaved"
        notes.append("torchtitan's default schedule, 1F1B, takes one stage a rank; interleaved 1F1B is emulated")
    if pp > 1 and not layout:
        notes.append("its split into stages is emulated as equal numbers of blocks")
    degrees, replicas = _degrees(file, pp, num_devices)
    notes += _sharding_notes(file, degrees)
    size, count = _microbatches(file, pp, len(layout) or pp * chunks)
    steps = _accumulated(file, replicas)
    if pp > 1 and steps > 1:
        notes.append(
            f"the pipeline runs empty after each of {steps} accumulation steps; one pipeline of all microbatches is "
            "emulated, so times are too low"
        )
    mode = file.one_of("activation_checkpoint.mode", ("none", "selective", "full"))
    option = file.get("activation_checkpoint.selective_ac_option")
    if mode == "selective":
        notes.append(_selective_note(file, option))
    return degrees | {
        "schedule": order,
        "layout": layout,
        "chunks": None if layout else chunks,
        "recompute": mode,
        "microbatch_tokens": size * file.count("training.seq_len"),
        "microbatches": count * steps,
        "notes": notes,
    }


def _schedule(file: _File, pp: int) -> tuple[RunSchedule, int]:
    """Return the schedule, and the default number of stages per rank."""
    word: str = file.get("parallelism.pipeline_parallel_schedule")
    if pp == 1:
        return "1f1b", 1
    if word.lower() not in _EMULATED:
        raise file.refused("parallelism.pipeline_parallel_schedule", f"choose from {', '.join(_EMULATED)}")
    name = schedule_name(word)
    return name, SCHEDULES[name].stages


def _stages(file: _File, pp: int, chunks: int, num_blocks: int | None) -> list[int]:
    """Return the number of blocks of each stage. The list is empty without a pipeline, or if the model is unknown."""
    if pp == 1:
        return []
    name = "parallelism.module_fqns_per_model_part"
    parts = file.get(name)
    if parts:
        if not isinstance(parts, list) or len(parts) % pp or not all(isinstance(part, list) for part in parts):
            raise file.refused(name, f"give a list of names for each stage of {pp} ranks")
        return [sum(bool(re.fullmatch(r"layers\.\d+", str(name))) for name in part) for part in parts]
    name = "parallelism.pipeline_parallel_layers_per_stage"
    per_stage = None if file.get(name) is None else file.count(name)
    if per_stage is not None and num_blocks is None:
        raise file.refused(name, "give module_fqns_per_model_part instead")
    if num_blocks is None:
        return []
    ends = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    less = [file.get(end) for end in ends]
    stages = pp * chunks if per_stage is None else -(-(num_blocks + sum(less)) // per_stage)
    if stages % pp or (stages > pp) != (chunks > 1):
        raise file.refused(name, f"it gives {stages} stages, give one that suits {pp} ranks and the schedule")
    return _split(file, ends, less, stages, num_blocks)


def _split(file: _File, ends: list[str], less: list[int], stages: int, num_blocks: int) -> list[int]:
    """Divide blocks as torchtitan does: embedding and head count as ``less`` blocks, the first stages get the rest."""
    share, more = divmod(num_blocks + sum(less), stages)
    if share == 0:
        raise file.refused("parallelism.pipeline_parallel_degree", f"{num_blocks} blocks are no {stages} stages")
    for end, number in zip(ends, less, strict=True):
        if not 0 <= number <= share:
            raise file.refused(end, f"{stages} stages of {num_blocks} blocks take 0 to {share}")
    counts = [share + (i < more) for i in range(stages)]
    counts[0] -= less[0]
    counts[-1] -= less[1]
    return counts


def _degrees(file: _File, pp: int, num_devices: int | None) -> tuple[dict[str, Any], int | None]:
    """Return the degrees of `CurrentRun`, and the number of replicas, or None if it depends on the unknown cluster."""
    tp, cp = file.count("parallelism.tensor_parallel_degree"), file.count("parallelism.context_parallel_degree")
    copies = file.count("parallelism.data_parallel_replicate_degree")
    is_open = file.get("parallelism.data_parallel_shard_degree") == -1
    shards: int | None = None
    if not is_open:
        shards = file.count("parallelism.data_parallel_shard_degree")
    elif num_devices is not None:
        shards = max(1, num_devices // (tp * pp * cp * copies))
    policy = file.one_of("parallelism.fsdp_reshard_after_forward", ("default", "always", "never"))
    zero = 3 if policy == "always" or (policy == "default" and pp == 1) else 1
    if file.one_of("training.data_parallel_type", ("fsdp", "ddp")) == "ddp" or (shards == 1 and cp == 1):
        zero = 0
    replicas = None if shards is None else shards * copies
    degrees = {
        "tp": tp,
        "pp": pp,
        "dp": None if is_open else replicas,
        "cp": cp,
        "ep": file.count("parallelism.expert_parallel_degree"),
        "zero": zero,
    }
    return degrees, replicas


def _sharding_notes(file: _File, degrees: dict[str, Any]) -> list[str]:
    """Return notes on sharding and precision that are not emulated exactly."""
    notes = []
    if degrees["zero"] and file.get("parallelism.data_parallel_replicate_degree") > 1:
        notes.append("weights and optimizer states are emulated as divided over all replicas, so memory is too low")
    is_wide = file.one_of("training.mixed_precision_param", ("bfloat16", "float32")) == "float32"
    # Weights are cast by FSDP, or by autocast if there is no other parallelism.
    if is_wide or (degrees["zero"] == 0 and degrees["tp"] * degrees["pp"] > 1):
        notes.append("bfloat16 is emulated where torchtitan computes in float32, so times and memory are too low")
    converters = file.get("model.converters")
    if not all(_QUANTIZED.fullmatch(str(one)) for one in converters):
        raise file.refused("model.converters", "float8 and mx are known")
    if converters:
        formats = sorted({"FP8" if "float8" in one else "MXFP8" for one in converters})
        notes.append(f"{' and '.join(formats)} is emulated as bfloat16, so times are too high")
    if degrees["ep"] > 1 and file.count("parallelism.expert_tensor_parallel_degree") > 1:
        notes.append("experts are emulated whole on each device, without tensor parallelism inside them")
    return notes


def _microbatches(file: _File, pp: int, num_stages: int) -> tuple[int, int]:
    """Return the sequences per microbatch, and the microbatches per local batch."""
    batch = file.count("training.local_batch_size")
    if pp == 1:
        return batch, 1
    name, older = "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_microbatches"
    # Older versions configure the number of microbatches, by default that of stages.
    label = file.labels["parallelism.pipeline_parallel_degree"]
    if file.get(older) is not None or (name not in file.given and not label.startswith("parallelism.")):
        count = num_stages if file.get(older) is None else file.count(older)
        if batch % count:
            raise file.refused(older, f"{file.label('training.local_batch_size')} = {batch} must be a multiple")
        return batch // count, count
    size = file.count(name)
    if batch % size:
        raise file.refused(name, f"{file.label('training.local_batch_size')} = {batch} must be a multiple")
    return size, batch // size


def _accumulated(file: _File, replicas: int | None) -> int:
    """Return the number of local batches per iteration of a replica."""
    name = "training.global_batch_size"
    total: int = file.get(name)
    if total < 0:
        return 1
    if replicas is None:
        raise file.refused(name, "give parallelism.data_parallel_shard_degree too")
    one = replicas * file.count("training.local_batch_size")
    if total == 0 or total % one:
        raise file.refused(name, f"give a multiple of {one}, the local batches of {replicas} replicas")
    return total // one


def _selective_note(file: _File, option: str) -> str:
    """Return how selective checkpointing differs from ``recompute=selective``: norms and activation functions."""
    if option == "op":
        return (
            "selective checkpointing also computes every second matrix product again; norms and activation functions "
            "are emulated, so times are too low and memory is too high"
        )
    if not option.isdigit():
        raise file.refused("activation_checkpoint.selective_ac_option", "give 'op' or a whole number as a word")
    every = max(1, int(option))
    return (
        f"selective checkpointing computes 1 of {every} layers again; norms and activation functions of all layers are "
        f"emulated, so times may be too low; recompute=full:{1 / every:.4g} in words emulates it"
    )
