"""One reader for all formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeloom.conversion import UPGRADE
from pipeloom.cost import Profile
from pipeloom.cost.layers import LayerTable
from pipeloom.errors import InputError, located
from pipeloom.io import batches, instance, layers, layout, rule, samples, schedule
from pipeloom.io.document import convert, parse_document, show
from pipeloom.io.files import PathLike, printable, read_text
from pipeloom.plan import ExecutionPlan, from_text
from pipeloom.search.rule import OrderRule
from pipeloom.spec import Layout, Sample
from pipeloom.taskgraph import TaskGraph

Loaded = (
    TaskGraph
    | schedule.ScheduleFile
    | Layout
    | LayerTable
    | Profile
    | batches.PackedBatches
    | OrderRule
    | ExecutionPlan
    | tuple[Sample, ...]
)

_READERS: dict[str, Callable[[dict[str, Any], str], Loaded]] = {
    instance.FORMAT: instance.instance_from_document,
    schedule.FORMAT: schedule.schedule_from_document,
    layout.FORMAT: layout.layout_from_document,
    layout.FORMAT_WITH_STREAMS: layout.layout_from_document,
    layers.FORMAT: layers.layers_from_document,
    rule.FORMAT: rule.rule_from_document,
    batches.FORMAT: batches.batches_from_document,
    "pipeloom.profile/1": lambda document, where: convert(document, Profile, where),
}


def load(path: PathLike) -> Loaded:
    """Read a file of any format.

    Parameters
    ----------
    path : str or path
        Sample metadata is recognized by its suffix (``.jsonl``, ``.parquet``, ``.tar``). All other files begin with
        their format. A file whose name ends in ``.gz`` is decompressed.

    Raises
    ------
    InputError
        One line with the file, the path inside, the value and the bound.
    """
    where = printable(str(path))
    if str(path).endswith(samples.SAMPLE_SUFFIXES):
        return samples.read_samples(path)
    text = read_text(path)
    if text.startswith("pipeloom.plan/"):
        return plan_from_text(text, where)
    document = parse_document(text, where)
    name = document.get("format")
    reader = _READERS.get(name) if isinstance(name, str) else None
    if reader is None:
        problem = "is missing" if name is None else f"{show(name)} is unknown"
        known = f"known are {', '.join(sorted(_READERS))}"
        raise InputError(f"{where}: format", problem, f"{known}; {UPGRADE}" if "pipeloom." in str(name) else known)
    return reader(document, where)


def read_plan(path: PathLike) -> ExecutionPlan:
    """Read the text form of an execution plan."""
    return plan_from_text(read_text(path), printable(str(path)))


def plan_from_text(text: str, where: str) -> ExecutionPlan:
    """Parse the text form of a plan. Errors begin with ``where``."""
    try:
        with located(where):
            return from_text(text)
    except InputError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(where, "has a number with too many digits") from error
