"""Commands with the files that they read: valid ones, of which some are changed, and numbers of options."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import NamedTuple, get_type_hints

from typer.models import OptionInfo

from pipeloom.cli.app import commands
from tests.cli.test_train_resume import CONFIG
from tests.cli.test_train_user_code import GOOD, TASK
from tests.explain.traces.test_megatron_log import log
from tests.integrations.megatron.cases import listed
from tests.integrations.megatron.test_reading import BRIDGE
from tests.io.documents import TINY, TINY_SCHEDULE

from .mutations import Mutator, change_bytes, change_json, change_lines, change_toml, change_words

EXTREMES = ("0", "-1", "nan", "inf", "-inf", "1e300", "-1e300", str(2**31), str(2**62), str(2**63), "9" * 400)

_MODEL = """name = "tiny"
[[modules]]
name = "vision"
reads = "images"
layers = [{kind = "vit", count = 4, num_parameters = 49984, output = {dims = ["tokens", 64]}}]
[[modules]]
name = "lm"
reads = "sequence"
after = ["vision"]
layers = [{kind = "gpt", count = 8, num_parameters = 49984, output = {dims = ["tokens", 64]}}]
"""
_RANKS = """name = "two-cores"
memory_capacity_bytes = 2000000000
link_bytes_per_s = 1e9
link_latency_s = 1e-4
hosts = [0, 1]
links = [{hosts = [0, 1], bytes_per_s = 1e9, latency_s = 1e-4}]
"""
_LAYOUT = {
    "format": "pipeloom.layout/1",
    "num_ranks": 2,
    "modules": [{"name": "vision", "sub_microbatch": 3}, {"name": "lm", "after": ["vision"]}],
    "chunks": [
        {"module": name, "layers": [half * rank, half * (rank + 1) - 1], "rank": rank}
        for name, half in (("vision", 2), ("lm", 4))
        for rank in (0, 1)
    ],
}
_FIT = {
    "forward_s": [3e-4, 0.0, 1e-6, 2e-9],
    "backward_s": [6e-4, 0.0, 2e-6, 4e-9],
    "activation_bytes": [0.0, 0.0, 4096.0, 16.0],
}
_PROFILE = {"format": "pipeloom.profile/1", "machine": "a", "layers": {"vision/vit": _FIT, "lm/gpt": _FIT}}
_SAMPLES = "\n".join(json.dumps({"id": str(i), "text_tokens": 20 + i, "image_tokens": [4, 9]}) for i in range(4))
_TEXTS = "\n".join(json.dumps({"id": str(i), "text_tokens": 20 + i}) for i in range(40))
_LAYERS = {
    "format": "pipeloom.layers/1",
    "name": "two",
    "num_ranks": 2,
    "num_microbatches": 4,
    "boundary_s": 0.0002,
    "boundary_bytes": 1000,
    "memory_capacity_bytes": [400_000_000, 400_000_000],
    "layers": [
        {"name": f"l{i}", "forward_s": 0.003, "activation_bytes": 1000, "parameter_bytes": 2000, "backward_s": 0.006}
        for i in range(3)
    ],
}
_ARCHITECTURE = """name = "small"
source = "made up"
[[module]]
name = "lm"
reads = "sequence"
[[module.layers]]
layer = "token_embedding"
vocabulary = 1000
hidden = 64
[[module.layers]]
layer = "residual"
hidden = 64
count = 4
mixers = [{mixer = "attention", heads = 4, kv_heads = 4, head_width = 16}, {mixer = "mlp", inner = 256}]
[[module.layers]]
layer = "language_head"
hidden = 64
vocabulary = 1000
"""
_CLUSTER = """name = "four"
source = "made up"
devices_per_node = 4
num_nodes = 2
nic_bytes_per_s = 25e9
nic_latency_s = 5e-6
host_memory_bytes = 256000000000
host_bytes_per_s = 1e11
host_cores = 16
[device]
name = "d"
basis = "datasheet"
source = "made up"
flops_per_s = 1e14
sustained_flops_per_s = 9e13
memory_bytes = 80000000000
memory_bytes_per_s = 3e12
nvlink_bytes_per_s = 2e11
nvlink_latency_s = 1e-6
pcie_bytes_per_s = 5e10
pcie_latency_s = 1e-5
launch_s = 1e-6
jitter = 0.02
reserved_bytes = 5000000000
[device.efficiency.compute]
matmul = {flops = [[1e-5, 0.3], [1e-3, 0.8]], memory = 0.9}
"""
_DATA = """name = "few"
source = "made up"
fitted = true
text_tokens = {median = 21, mean = 23, minimum = 5, maximum = 100}
images = {median = 2, mean = 2, maximum = 5}
images_share = 0.5
image_tokens = 16
image_patches = 64
"""
_NOW = """[now]
pp = 2
dp = 1
schedule = "1f1b"
layout = [2, 2]
recompute = "full"
microbatch_tokens = 512
microbatches = 4
"""
_TITAN = """[training]
local_batch_size = 2
global_batch_size = 16
seq_len = 128
[parallelism]
tensor_parallel_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
_COMPARE = (
    *("compare", "model.toml", "--cluster", "cluster.toml", "--data", "samples.jsonl", "--now", "now.toml"),
    *("--systems", "1f1b,interleaved", "--budget", "0", "--processes", "1"),
)
_SCRIPT = f"""#!/bin/bash
GPUS=8
SIZES=(--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
if [ $GPUS -gt 4 ]; then PP=2; else PP=1; fi
torchrun --nproc-per-node $GPUS pretrain_gpt.py {" ".join(listed(num_layers=4, pipeline_model_parallel_size=None))} \\
    --pipeline-model-parallel-size $PP "${{SIZES[@]}}"
"""
_RECIPE = re.sub("^    ", "", BRIDGE.replace("LAYOUT", "null"), flags=re.MULTILINE)


def _task() -> str:
    text = TASK
    for name, code in GOOD.items():
        text = text.replace(name, code)
    return text


@dataclass(frozen=True)
class Case:
    """A command line, whose words that are names of files become their paths."""

    words: tuple[str, ...]
    files: dict[str, str]


_MUTATORS: dict[str, tuple[Mutator, ...]] = {
    "json": (change_json, change_json, change_words),
    "jsonl": (change_lines, change_lines, change_words),
    "toml": (change_toml, change_toml, change_words),
    "log": (change_words, change_bytes),
    "sh": (change_words, change_words, change_bytes),
    "yaml": (change_words, change_words, change_bytes),
}
"""By the ends of files' names; other files stay as they are."""

CASES = {
    "plan": Case(
        (
            *("plan", "samples.jsonl", "--model", "model.toml", "--cluster", "ranks.toml", "--layout", "layout.json"),
            *("--profile", "profile.json", "--tokens", "60", "--budget", "0", "--out", "out"),
        ),
        {
            "samples.jsonl": _SAMPLES,
            "model.toml": _MODEL,
            "ranks.toml": _RANKS,
            "layout.json": json.dumps(_LAYOUT),
            "profile.json": json.dumps(_PROFILE),
        },
    ),
    "pack": Case(("pack", "samples.jsonl", "--tokens", "60", "--out", "out.json"), {"samples.jsonl": _SAMPLES}),
    "arrange": Case(
        ("arrange", "layers.json", "--budget", "0", "--threads", "1", "--out", "out.json"),
        {"layers.json": json.dumps(_LAYERS)},
    ),
    "solve": Case(
        ("solve", "tiny.json", "--budget", "0", "--threads", "1", "--out", "out.json"), {"tiny.json": json.dumps(TINY)}
    ),
    **{
        name: Case(
            (name, "tiny.json", "schedule.json"),
            {"tiny.json": json.dumps(TINY), "schedule.json": json.dumps(TINY_SCHEDULE)},
        )
        for name in ("check", "simulate")
    },
    "emulate": Case(
        (
            *("emulate", "model.toml", "--cluster", "cluster.toml", "--data", "data.toml"),
            *("--pp", "2", "--tp", "2", "--microbatches", "2"),
        ),
        {"model.toml": _ARCHITECTURE, "cluster.toml": _CLUSTER, "data.toml": _DATA},
    ),
    "sweep": Case(
        ("sweep", "model.toml", "--cluster", "cluster.toml", "--data", "data.toml", "--microbatches", "4"),
        {"model.toml": _ARCHITECTURE, "cluster.toml": _CLUSTER, "data.toml": _DATA},
    ),
    "explain": Case(("explain", "a.log", "--budget", "0"), {"a.log": log()}),
    **{
        name: Case(
            _COMPARE, {"model.toml": _ARCHITECTURE, "cluster.toml": _CLUSTER, "samples.jsonl": _TEXTS, "now.toml": now}
        )
        for name, now in (("compare", _NOW), ("compare with torchtitan", _TITAN))
    },
    **{
        f"megatron {file}": Case(
            ("megatron", file, "--cluster", "cluster.toml", "--gpus", "8", "--budget", "0"),
            {file: text, "cluster.toml": _CLUSTER},
        )
        for file, text in (("run.sh", _SCRIPT), ("recipe.yaml", _RECIPE))
    },
    "train": Case(
        ("train", "train.toml", "--runs", "runs", "--from-scratch", "--iterations", "1"),
        {"train.toml": CONFIG, "task.py": _task()},
    ),
}


class NumericOption(NamedTuple):
    """An option of a command that takes a number."""

    command: str
    name: str
    whole: bool
    info: OptionInfo


@cache
def numeric_options() -> tuple[NumericOption, ...]:
    """Every option of every command that takes a number, as the commands' own signatures have them."""
    found = []
    for name, command in commands().items():
        function = getattr(import_module(command.module), name)
        hints = get_type_hints(function)
        for field, parameter in inspect.signature(function).parameters.items():
            kinds = set(re.findall(r"int|float", str(hints[field])))
            if isinstance(parameter.default, OptionInfo) and kinds:
                declared = [word for word in parameter.default.param_decls or () if word.startswith("--")]
                option = declared[0] if declared else f"--{field.replace('_', '-')}"
                found.append(NumericOption(name, option, kinds == {"int"}, parameter.default))
    return tuple(found)


def draw_case(name: str, random: Random, folder: Path) -> list[str]:
    """Write the files of a command, one of them changed, and return its words, now and then with another number."""
    case = CASES[name]
    files = [file for file in sorted(case.files) if file.partition(".")[2] in _MUTATORS]
    changed = random.choice(files) if random.random() < 0.85 else ""
    for file, text in case.files.items():
        data = text.encode()
        if file == changed:
            data = random.choice(_MUTATORS[file.partition(".")[2]])(random, data)
        (folder / file).write_bytes(data)
    words = [str(folder / word) if "." in word and word[0].isalpha() else word for word in case.words]
    options = [each.name for each in numeric_options() if each.command == case.words[0] and each.name != "--seed"]
    if not changed and options:
        option = random.choice(options)
        value = random.choice(EXTREMES)
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words
