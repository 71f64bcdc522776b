"""Readers and writers of the file formats (``docs/formats.md``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.io.files import check_writable, make_folder, read_text, write_bytes, write_text
from pipeloom.io.instance import instance_document, instance_from_document, read_instance, write_instance
from pipeloom.io.schedule import (
    ScheduleFile,
    SearchRecord,
    read_schedule,
    schedule_document,
    schedule_from_document,
    write_schedule,
)
from pipeloom.lazy import lazy_names

if TYPE_CHECKING:
    from pipeloom.io.any_format import Loaded, load, read_plan
    from pipeloom.io.batches import (
        PackedBatch,
        PackedBatches,
        PackedMicrobatch,
        packed_batches,
        read_batches,
        write_batches,
    )
    from pipeloom.io.layers import read_layers, write_layers
    from pipeloom.io.layout import layout_document, read_layout, write_layout
    from pipeloom.io.rule import read_rule, rule_document, rule_path, write_rule
    from pipeloom.io.samples import SAMPLE_SUFFIXES, read_samples, write_samples
    from pipeloom.io.specs import read_spec

__getattr__, __dir__ = lazy_names(__name__, __file__)

__all__ = [
    "SAMPLE_SUFFIXES",
    "Loaded",
    "PackedBatch",
    "PackedBatches",
    "PackedMicrobatch",
    "ScheduleFile",
    "SearchRecord",
    "check_writable",
    "instance_document",
    "instance_from_document",
    "layout_document",
    "load",
    "make_folder",
    "packed_batches",
    "read_batches",
    "read_instance",
    "read_layers",
    "read_layout",
    "read_plan",
    "read_rule",
    "read_samples",
    "read_schedule",
    "read_spec",
    "read_text",
    "rule_document",
    "rule_path",
    "schedule_document",
    "schedule_from_document",
    "write_batches",
    "write_bytes",
    "write_instance",
    "write_layers",
    "write_layout",
    "write_rule",
    "write_samples",
    "write_schedule",
    "write_text",
]
