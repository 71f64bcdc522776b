"""Numbers of Megatron's arguments and files have bounds that are named."""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys

import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.megatron import Timing, read_megatron
from pipeloom.integrations.megatron.effects import effects_of
from pipeloom.spec.catalog import load_cluster
from tests.integrations.megatron.cases import listed

VALUES = ("0", "-1", str(2**31 - 1), str(2**31), str(2**62), str(2**63), "1e300", "nan")
RUNS = (
    {},
    {"num_experts": 8, "mtp_num_layers": 1, "use_distributed_optimizer": True},
    {"num_experts": 8, "multi_latent_attention": True},
)
NAMED_BY_ANOTHER = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
"""Flags, whatever their value, which change how many layers there are to divide."""


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_every_number_is_read_or_refused_by_its_name(run) -> None:
    cluster = load_cluster("h100-8")
    for name, value in itertools.product(sorted(effects_of("arguments").modeled), VALUES):
        words = [*listed(run | {name.replace("-", "_"): None}), f"--{name}", value]
        said = ""
        try:
            timing = Timing(read_megatron(words, default_devices=8), cluster)
            timing.of(timing.run.now)
        except InputError as error:
            said = str(error)
        assert not said or name in NAMED_BY_ANOTHER or f"--{name}" in said, (name, value, said)


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("hidden-size", 2**31, 2**20),
        ("ffn-hidden-size", 2**31 - 1, 2**20),
        ("num-layers", 2**31, 100_000),
        ("mtp-num-layers", 2**31 - 1, 100_000),
        ("seq-length", 2**31, 2**26),
        ("micro-batch-size", 2**31 - 1, 65_536),
        ("vocab-size", 2**62, 2**31),
        ("num-experts", 2**31, 2**20),
    ],
)
def test_a_number_above_its_bound_is_named_with_both(name, value, bound) -> None:
    with pytest.raises(InputError, match=rf"^arguments: --{name}: {value} is above {bound}; give a smaller number"):
        read_megatron(listed({name: value}), default_devices=8)


def test_sizes_that_are_too_large_together_are_named() -> None:
    run = read_megatron(listed(hidden_size=2**20, seq_length=2**26, max_position_embeddings=2**26), default_devices=8)
    timing = Timing(run, load_cluster("h100-8"))
    with pytest.raises(
        InputError, match=r"arguments: sizes: together too large \(hidden size 1048576, sequences of 67108864"
    ):
        timing.of(run.now)


ALIASES = {
    "lists": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
    "tables": "a0: &a0 {x: 1, y: 2}\n"
    + "".join(f"a{i}: &a{i} {{{', '.join(f'k{k}: *a{i - 1}' for k in range(10))}}}\n" for i in range(1, 12)),
    "arguments": "a0: &a0 [--lr, 1]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    + "MODEL_ARGS: {--data-path: *a11}\n",
    "itself": "a: &a [1, *a]\n",
}
MOST_BYTES = 3 * 2**30
CODE = """
import sys
from pipeloom.errors import InputError
from pipeloom.integrations.megatron.files import read_arguments
try:
    read_arguments(sys.argv[1])
except InputError as error:
    print(error)
"""


@pytest.mark.full
@pytest.mark.parametrize("form", ALIASES)
def test_aliases_of_a_small_yaml_file_are_not_written_out_without_bound(form, tmp_path) -> None:
    """Files of 2 KB that stand for 10^11 entries, read by a process that has 3 GiB of addresses and 20 s."""
    pytest.importorskip("yaml")
    file = tmp_path / "recipe.yaml"
    file.write_text(ALIASES[form] + "model: {num_layers: 12}\n")
    assert file.stat().st_size < 2048
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(file)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES)),
    )
    assert re.match(rf"{re.escape(str(file))}: (its aliases stand for more than|has an alias inside)", done.stdout)
