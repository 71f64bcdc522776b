"""torchtitan's files: every field and default is torchtitan's own, and none is dropped."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.integrations.current_runs import load_run
from pipeloom.integrations.titan_fields import NOTED, READ, REFUSED, RENAMED, UNIMPORTANT
from pipeloom.spec.current_run import CurrentRun

KNOWN = json.loads((Path(__file__).parent / "fixtures" / "torchtitan_fields.json").read_text())
DEFAULTS = KNOWN["defaults of 0.2.2"]
PIPELINE = "[parallelism]\npipeline_parallel_degree = 4\n"


def read(folder: Path, text: str, num_devices: int | None = 8, num_blocks: int | None = 32) -> CurrentRun:
    (folder / "run.toml").write_text(text)
    return load_run(str(folder / "run.toml"), num_devices, num_blocks)


def test_stages_without_a_pipeline_are_ignored(tmp_path: Path) -> None:
    """torchtitan reads them only if the pipeline has several ranks."""
    parts = 'module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]\n'
    run = read(tmp_path, "[parallelism]\n" + parts)
    assert (run.pp, run.layout, run.order) == (1, (), "1f1b")


def test_every_field_of_torchtitan_is_in_one_table() -> None:
    sorted_in = Counter([*READ, *RENAMED, *NOTED, *REFUSED, *UNIMPORTANT])
    assert max(sorted_in.values()) == 1
    assert set(sorted_in) == {*DEFAULTS, *KNOWN["older fields"]}


def test_defaults_are_torchtitans() -> None:
    ours = READ | {name: one.default for name, one in (NOTED | REFUSED).items()}
    assert {name: ours[name] for name in ours if name in DEFAULTS} == {
        name: DEFAULTS[name] for name in ours if name in DEFAULTS
    }
    assert set(RENAMED.values()) <= {*READ, *NOTED, *REFUSED, *UNIMPORTANT}


def test_a_file_without_settings_is_torchtitans_default(tmp_path: Path) -> None:
    run = read(tmp_path, "[training]\n")
    assert (run.tp, run.pp, run.cp, run.ep, run.dp) == (1, 1, 1, 1, None)
    assert (run.microbatch_tokens, run.microbatches, run.zero) == (8 * 2048, 1, 3)
    assert read(tmp_path, PIPELINE).order == "1f1b"


@pytest.mark.parametrize("name", sorted({*NOTED, *REFUSED}))
def test_what_is_not_modeled_is_noted_or_refused(tmp_path: Path, name: str) -> None:
    """A value of such a field that runs otherwise is never read without a word."""
    table, _, field = name.rpartition(".")
    other = {"parallelism.context_parallel_load_balancer": '"none"', "model.attn_mask_type": '"full"'}.get(name, "7")
    text = f"[training]\n[{table}]\n{field} = {other}\n" if table != "training" else f"[training]\n{field} = {other}\n"
    if name in REFUSED:
        with pytest.raises(InputError, match=rf"{name}: 7 is not supported; "):
            read(tmp_path, text)
        return
    (note,) = (note for note in read(tmp_path, text).notes if note.startswith(f"{name} = "))
    assert re.search(r"(times|memory).*(too (low|high))", note)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nbatch_size = 2\nseq_len = 8192\n[parallelism]\ntensor_parallel_degree = 8\n", (16384, 1)),
        ("[training]\nlocal_batch_size = 4\nglobal_batch_size = 64\nseq_len = 4096\n", (16384, 2)),
        (PIPELINE + "[training]\nlocal_batch_size = 4\nglobal_batch_size = 16\nseq_len = 1024\n", (1024, 8)),
        (PIPELINE + "pipeline_parallel_microbatch_size = 2\n[training]\nlocal_batch_size = 8\n", (4096, 4)),
        ("[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_degree = 4\n", (4096, 4)),
        (
            "[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_degree = 4\n"
            "pipeline_parallel_microbatches = 8\n",
            (2048, 8),
        ),
    ],
)
def test_sizes_of_microbatches(tmp_path: Path, text: str, expected: tuple[int, int]) -> None:
    run = read(tmp_path, text)
    assert (run.microbatch_tokens, run.microbatches) == expected


@pytest.mark.parametrize(
    ("lines", "num_blocks", "layout"),
    [
        (
            "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 4\n",
            32,
            "9,9,9,5",
        ),
        ("", 32, "8,9,8,7"),
        ('pipeline_parallel_schedule = "Interleaved1F1B"\n', 16, "2,3,2,2,2,2,2,1"),
        ("pipeline_parallel_layers_per_stage = 8\n", 30, "7,8,8,7"),
        (
            'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 2\n',
            14,
            "1,2,2,2,2,2,2,1",
        ),
    ],
)
def test_stages_are_torchtitans(tmp_path: Path, lines: str, num_blocks: int, layout: str) -> None:
    run = read(tmp_path, PIPELINE + lines, 8, num_blocks)
    assert run.layout == tuple(map(int, layout.split(",")))
    assert not any("split" in note for note in run.notes)


@given(st.integers(1, 8), st.integers(0, 3), st.integers(0, 3), st.integers(1, 80))
def test_stages_have_every_block_once(
    tmp_path_factory: pytest.TempPathFactory, pp: int, first: int, last: int, num_blocks: int
) -> None:
    text = (
        f"[parallelism]\npipeline_parallel_degree = {pp}\npipeline_parallel_first_stage_less_layers = {first}\n"
        f"pipeline_parallel_last_stage_less_layers = {last}\n"
    )
    share = (num_blocks + first + last) // pp
    folder = tmp_path_factory.mktemp("t")
    if pp > 1 and (max(first, last) > share or share == 0):
        with pytest.raises(InputError, match=r"stage_less_layers|blocks are no"):
            read(folder, text, 8, num_blocks)
        return
    layout = read(folder, text, 8, num_blocks).layout
    assert pp == 1 or (len(layout), sum(layout)) == (pp, num_blocks)
    # The ends count as blocks, and no stage has over one more than another.
    weights = [count + (i == 0) * first + (i == pp - 1) * last for i, count in enumerate(layout)]
    assert not weights or max(weights) - min(weights) <= 1


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("[training]\n", 3),
        (PIPELINE, 1),
        (PIPELINE + 'fsdp_reshard_after_forward = "always"\n', 3),
        ('[parallelism]\nfsdp_reshard_after_forward = "never"\n', 1),
        ("[parallelism]\ntensor_parallel_degree = 8\n", 0),
        ("[parallelism]\ndata_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n", 0),
        ("[parallelism]\ncontext_parallel_degree = 8\n", 3),
    ],
)
def test_what_is_sharded(tmp_path: Path, text: str, zero: int) -> None:
    assert read(tmp_path, text).zero == zero


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[training]\n[model]\nconverters = ["float8"]\n', "FP8 is emulated as bfloat16, so times are too high"),
        ('[training]\n[model]\nconverters = ["quantize.linear.mx"]\n', "MXFP8 is emulated as bfloat16"),
        ("[training]\nenable_cpu_offload = true\n", "memory is too high and times are too low"),
        (PIPELINE + "[training]\nlocal_batch_size = 4\nglobal_batch_size = 16\n", "2 accumulation steps"),
        ("[parallelism]\ntensor_parallel_degree = 8\n", "computes in float32, so times and memory are too low"),
        ("[parallelism]\ndata_parallel_replicate_degree = 2\n", "over all replicas, so memory is too low"),
        ("[training]\n", r"computes 1 of 2 layers again; .*recompute=full:0.5 in words"),
        ('[training]\n[activation_checkpoint]\nselective_ac_option = "op"\n', "every second matrix product"),
        ("[training]\n", "without torch.compile"),
    ],
)
def test_what_is_emulated_otherwise_is_noted(tmp_path: Path, text: str, words: str) -> None:
    assert re.search(words, "; ".join(read(tmp_path, text).notes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nlocal_batch_sise = 4\n", "training.local_batch_sise: is not a field of torchtitan; did you mean"),
        ("[training]\n[paralelism]\npipeline_parallel_degree = 4\n", "paralelism: is not a field of torchtitan"),
        ("[training]\nbatch_size = 4\nlocal_batch_size = 2\n", "local_batch_size: is given beside training.batch_size"),
        ("[training]\nlocal_batch_size = 4\nglobal_batch_size = 33\n", "33 is not supported; give a multiple of 32"),
        (PIPELINE + "pipeline_parallel_microbatch_size = 3\n", "local_batch_size = 8 must be a multiple"),
        ("[training]\nlocal_batch_size = 0\n", "local_batch_size: 0 is not supported; give a whole number"),
        ('[training]\n[model]\nconverters = ["lora"]\n', r"model.converters: \['lora'\] is not supported"),
        ('[training]\n[optimizer]\nname = "Muon"\n', "optimizer.name: 'Muon' is not supported"),
        ('[training]\n[activation_checkpoint]\nselective_ac_option = "some"\n', "give 'op' or a whole number"),
        (PIPELINE + 'pipeline_parallel_schedule_csv = "a.csv"\n', "emulated are schedules by name"),
        (
            "[parallelism]\npipeline_parallel_degree = 1_000_000_000\npipeline_parallel_first_stage_less_layers = 0\n"
            "pipeline_parallel_last_stage_less_layers = 0\n",
            "32 blocks are no 1000000000 stages",
        ),
        (PIPELINE + "pipeline_parallel_layers_per_stage = 3\n", "pipeline_parallel_layers_per_stage: 3"),
    ],
)
def test_what_cannot_be_emulated_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        read(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_replicas_that_only_the_cluster_tells_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"give parallelism\.data_parallel_shard_degree too"):
        read(tmp_path, "[training]\nglobal_batch_size = 64\n", None)
