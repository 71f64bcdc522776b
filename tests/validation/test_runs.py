"""Tables of published runs: every row is read, predicted, or has a reason; nothing aborts."""

from __future__ import annotations

import csv
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.validation import PublishedRun, predict, read_runs
from pipeloom.validation import runs as runs_module
from pipeloom.validation.express import precision

DATA = Path(runs_module.__file__).parent / "data" / "runs.csv"
LLAMA = PublishedRun(
    id="llama",
    device="H100",
    gpus=64,
    arch="dense",
    layers=32,
    hidden=4096,
    ffn=14336,
    heads=32,
    kv_heads=8,
    vocab=128256,
    seq_len=8192,
    gated=True,
    norm="rms",
    pos="rope",
    tied=False,
    bias=False,
    tp=2,
    pp=2,
    sp=True,
    zero=1,
    mbs=1,
    gbs=128,
    schedule="1f1b",
    precision="bf16",
    attention="te",
    iteration_s=4.0,
)


def test_columns_that_a_table_of_ones_own_leaves_empty_are_noted() -> None:
    assert predict(LLAMA).notes == ()
    (note,) = predict(replace(LLAMA, gated=None, norm="", sp=None, zero=None, kv_heads=None)).notes
    assert note == "assumed for empty columns: gated 0, norm layer, kv_heads 32, sp 0, zero 0"
    assert not any("empty columns" in each for run in read_runs(DATA)[::40] for each in predict(run).notes)


def test_replicas_that_contradict_the_devices_are_noted() -> None:
    found = predict(replace(LLAMA, gpus=32, tp=4, pp=2, dp=2))
    assert found.notes == ("dp 2 contradicts 32 devices, which have 4 replicas; correct dp or gpus",)
    right = predict(replace(LLAMA, gpus=32, tp=4, pp=2, dp=4))
    assert (found.seconds, right.notes) == (right.seconds, ())


def test_expert_tensor_parallelism_has_a_column() -> None:
    experts = replace(LLAMA, arch="moe", experts=8, topk=2, moe_ffn=14336, ep=2)
    whole, divided = (predict(replace(experts, etp=degree)) for degree in (1, 2))
    unstated = predict(experts)
    assert unstated.seconds == whole.seconds != divided.seconds
    assert unstated.notes == (*whole.notes, "assumed for empty columns: etp 1")
    assert not whole.notes
    # Megatron divides experts like other layers if they are all on each rank.
    assert "expert-tensor-parallel-size" in predict(replace(experts, ep=1, etp=1)).reason
    assert predict(replace(experts, ep=1)).notes == ("assumed for empty columns: etp 2",)


def test_every_shipped_run_that_states_its_sizes_is_expressed_or_has_a_reason() -> None:
    table = read_runs(DATA)
    assert len(table) == 1164
    assert len({run.id for run in table}) == 1164
    some = random.Random(1).sample(table, 40)
    found = [predict(run) for run in some]
    assert all(bool(each.reason) != (each.seconds > 0) for each in found)
    assert sum(not each.reason for each in found) > 15
    for each in found:
        if not each.reason:
            assert each.low_s < each.high_s
            assert each.peak_bytes > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": None}, "layers is not stated"),
        ({"device": "H100000"}, "device H100000"),
        ({"precision": "fp32"}, "precision fp32"),
        ({"precision": "nvfp4"}, "device 'H100 SXM5 80GB': has no products of precision nvfp4; use bf16, fp8_delayed"),
        ({"precision": "fp8", "device": "A100-80"}, "has no products of precision fp8_current; use bf16, or another"),
        ({"schedule": "DualPipe"}, "schedule DualPipe"),
        ({"heads": 7}, "num-attention-heads"),
        ({"gbs": 100}, "global-batch-size"),
        ({"gbs": None, "mbs": None}, "mbs is not stated"),
        ({"recompute": "everything"}, "recomputation everything"),
        ({"window": "128/0"}, "window: '128/0' is not like 128/2"),
        ({"mla": "q1536,kw512"}, "mla: 'kw512'"),
        ({"arch": ""}, "model that is not described"),
        ({"layout": "Et*33|t"}, "layout"),
        ({"hidden": 2**30, "ffn": 2**31, "seq_len": 2**31 - 2}, ""),
    ],
)
def test_a_run_that_cannot_be_expressed_has_one_reason(changes: dict[str, object], reason: str) -> None:
    found = predict(replace(LLAMA, **changes))  # type: ignore[arg-type]
    assert reason in found.reason
    assert found.reason
    assert "\n" not in found.reason


def test_an_unstated_recomputation_widens_the_interval() -> None:
    stated, unstated = predict(LLAMA), predict(replace(LLAMA, recompute="unknown"))
    assert unstated.seconds == stated.seconds
    assert unstated.low_s == stated.low_s
    assert unstated.high_s > 1.15 * stated.high_s
    assert unstated.notes


@pytest.mark.parametrize(
    ("cell", "fault"),
    [("x", "could not convert"), ("nan", ""), ("-3", ""), ("1e300", ""), ("2.5", ""), (str(2**63), "")],
)
@pytest.mark.parametrize("column", ["layers", "gpus", "seq_len", "iteration_s"])
def test_a_cell_that_cannot_be_read_is_a_fault_of_its_row(tmp_path: Path, column: str, cell: str, fault: str) -> None:
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerows([["id", column, "made_up"], ["a", cell, "1"], ["b", "", ""]])
    first, second = read_runs(file)
    assert second.faults == ()
    if column == "iteration_s" and cell in ("2.5", "1e300", str(2**63)):
        assert first.faults == ()
    else:
        assert column in first.faults[0]
        assert fault in first.faults[0]
        assert predict(first).reason.startswith(column)


@pytest.mark.parametrize("cell", ["inf", "-inf", "1e999"])
def test_an_infinite_size_is_a_fault_of_its_row(tmp_path: Path, cell: str) -> None:
    sizes = [each.name for each in fields(PublishedRun) if each.type == "int | None"]
    file = tmp_path / "runs.csv"
    lines = [",".join(["id", *sizes]), *(f"{name}{',' * (i + 1)}{cell}" for i, name in enumerate(sizes)), "last,8"]
    file.write_text("\n".join(lines))
    *first, last = read_runs(file)
    assert len(first) == len(sizes) > 20
    assert [run.faults for run in first] == [
        (f"{name}: {cell!r} is not a whole number from 0 to 2147483648",) for name in sizes
    ]
    assert (last.gpus, last.faults) == (8, ())


def test_flags_are_read_as_pandas_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("id,gated,tied,bias,sp\na,1.0,0.0,True,0\nb,2,,,\n")
    first, second = read_runs(file)
    assert (first.gated, first.tied, first.bias, first.sp, first.faults) == (True, False, True, False, ())
    assert second.faults == ("gated: '2' is neither 0 nor 1",)


@pytest.mark.parametrize(("mark", "comma"), [("\ufeff", ","), ("", ", "), ("\ufeff", ", ")])
def test_a_byte_order_mark_and_spaces_after_commas_change_nothing(tmp_path: Path, mark: str, comma: str) -> None:
    rows = [("id", "layers", "overlap"), ("a", "32", '"grad reduce, param gather"'), ("b", "8", "")]
    plain, other = tmp_path / "plain.csv", tmp_path / "other.csv"
    plain.write_text("\n".join(map(",".join, rows)))
    other.write_text(mark + "\n".join(map(comma.join, rows)), encoding="utf-8")
    assert read_runs(other) == read_runs(plain)
    assert [(run.id, run.layers) for run in read_runs(other)] == [("a", 32), ("b", 8)]


def test_a_row_with_more_cells_than_the_header_has_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("id,layers\na,8,9\nb\n")
    first, second = read_runs(file)
    assert first.faults == ("has more cells than the header",)
    assert (second.layers, second.faults) == (None, ())


@pytest.mark.parametrize("content", ["", "x,y\n1,2\n", "id\n", "\0\0\0", '"'])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(content)
    with pytest.raises(InputError, match=r"runs\.csv"):
        read_runs(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_runs(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("fp8_mx", "mxfp8"), ("fp8-mx", "mxfp8"), ("mxfp8", "mxfp8"), ("fp8-cs", "fp8_current")),
        *(("fp8 (25.09 release, not stated)", "fp8_current"), ("FP8_SC", "fp8_block"), ("NVFP4", "nvfp4")),
        *(("bf16 AdamW", "bf16"), ("", "bf16"), ("fp32", None), ("unknown", None)),
    ],
)
def test_spellings_of_a_precision_are_one(text: str, name: str | None) -> None:
    assert precision(text) == name


def test_narrower_products_are_faster_where_they_are_large() -> None:
    """Of the same run on one device; the recipe that a table leaves out is noted."""
    run = replace(LLAMA, device="GB200")
    spelled = {each: predict(replace(run, precision=each)) for each in ("bf16", "fp8", "fp8_mx", "nvfp4")}
    assert not any(found.reason for found in spelled.values())
    seconds = [spelled[each].seconds for each in ("bf16", "fp8_mx", "nvfp4")]
    assert seconds == sorted(seconds, reverse=True)
    assert spelled["fp8"].notes == ("the recipe of FP8 is not stated, current scaling is assumed",)
    bridge = predict(replace(run, precision="fp8_mx", source="bridge-cards"))
    assert "gathered as they are quantized" in bridge.notes[0]
    assert bridge.peak_bytes < spelled["fp8_mx"].peak_bytes
