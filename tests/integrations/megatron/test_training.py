"""`planned_forward_backward` beside Megatron Core's own schedules, on gloo CPU ranks.

pip install "pipeloom[megatron]"
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeloom.errors import InputError
from pipeloom.runtime.launch.processes import launch

from .on_core import ENOUGH, Case, run_all

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed"),
    # Megatron Core says what it has not found, such as Transformer Engine.
    pytest.mark.filterwarnings("ignore"),
]
ROOT = Path(__file__).parents[3]
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_dtype": "fp64",
    "add_bias_linear": False,
}
LENGTHS = (3, 5, 8, 13, 24)
ALL_LAYERS = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def run(num_ranks: int, calls: list[tuple[str, tuple[Any, ...]]]) -> list[list[Any]]:
    """Return the results of calls, by rank."""
    return list(launch(run_all, num_ranks, calls, timeout_s=240.0))


def agrees(num_ranks: int, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    for found in itertools.chain.from_iterable(run(num_ranks, calls)):
        assert found["gradients"] <= ENOUGH
        assert found["losses"] <= ENOUGH


@pytest.mark.ranks
def test_gradients_are_those_of_megatrons_schedules() -> None:
    agrees(
        2,
        [
            ("against_megatron", (Case(), 2)),
            ("against_megatron", (Case(vpp=2, config=VARIABLE), 3, "either", LENGTHS)),
            (
                "against_megatron",
                (Case(vpp=2, tied=True, ddp={}, scale=16.0, config={"calculate_per_token_loss": True}), 2, "split"),
            ),
            ("against_megatron", (Case(vpp=2, config=EXPERTS), 2, "either")),
            ("placed_otherwise", (Case(stages=((0, 3), (1, 2))), 2)),
        ],
    )


@pytest.mark.full
@pytest.mark.ranks
def test_gradients_of_many_random_plans() -> None:
    predictors = Case(vpp=2, tied=True, ddp={}, config={"mtp_num_layers": 1})
    partial = {**ALL_LAYERS, "num_microbatches_with_partial_activation_checkpoints": 1}
    agrees(
        2,
        [
            ("against_megatron", (Case(), 100, "either")),
            ("against_megatron", (Case(vpp=2, config=VARIABLE), 100, "either", LENGTHS)),
            ("against_megatron", (Case(vpp=2, config=VARIABLE), 20, "either", LENGTHS, False)),
            ("against_megatron", (Case(vpp=3, layers=6, config=EXPERTS), 100, "either")),
            ("against_megatron", (predictors, 20, "either")),
            ("against_megatron", (Case(vpp=2, layers=8, config=partial), 10)),
            ("placed_otherwise", (Case(stages=((1,), (2, 0, 3))), 20)),
        ],
    )


@pytest.mark.full
@pytest.mark.ranks
def test_gradients_on_more_degrees() -> None:
    """Four ranks: replicas with plans of their own, tensor and expert parallelism, longer pipelines."""
    sharded = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    together = {**EXPERTS, "expert_model_parallel_size": 2}
    divided = {"sequence_parallel": True}
    per_token = {**VARIABLE, "calculate_per_token_loss": True}
    agrees(
        4,
        [
            ("against_megatron", (Case(vpp=2, ddp=sharded), 10, "either")),
            ("against_megatron", (Case(ddp=sharded, tied=True), 10, "either")),
            ("against_megatron", (Case(vpp=2, ddp=sharded, config=per_token), 10, "either", LENGTHS)),
            ("against_megatron", (Case(vpp=2, tp=2, ddp={}, tied=True, config=divided), 10, "either")),
            ("against_megatron", (Case(vpp=2, ddp={"overlap_grad_reduce": True}, config=together), 10, "either")),
            ("against_megatron", (Case(pp=4, vpp=3, layers=12), 20, "either")),
        ],
    )


@pytest.mark.full
@pytest.mark.ranks
def test_a_run_that_is_stopped_and_resumed_has_megatrons_losses() -> None:
    _, (found,) = run(2, [("resumed", (Case(vpp=2, config=VARIABLE), 100))])
    assert found["number"] == 300
    assert found["losses"] <= ENOUGH


@pytest.mark.full
@pytest.mark.ranks
def test_gradients_on_context_ranks() -> None:
    """With attention of our own, since Megatron's needs Transformer Engine. Context ranks gather in one order."""
    agrees(4, [("against_megatron", (Case(cp=2, vpp=2, config=VARIABLE), 10, "either", (4, 8, 12, 24)))])


@pytest.mark.full
@pytest.mark.ranks
def test_distributed_checkpoints_are_megatrons(tmp_path: Path) -> None:
    """Written after planned steps and read by Megatron's loop, and the other way; weights stand for gradients."""
    case = Case(vpp=2)
    agrees(2, [("checkpointed", (case, str(tmp_path), ours_first)) for ours_first in (True, False)])


@pytest.mark.full
@pytest.mark.ranks
def test_plans_of_the_search_run_for_sizes_that_were_read_ahead() -> None:
    """Until the planner's process is killed. No step is lost by that."""
    (first,), (second,) = run(2, [("searched", (Case(vpp=2, config=VARIABLE),))])
    assert first["counts"]["search"] >= 3
    assert sum(first["counts"].values()) == first["num_steps"]
    assert second["done"]
    assert second["after"] == 5 * 4
    assert not second["counts"]


@pytest.mark.full
@pytest.mark.ranks
def test_steps_that_cannot_run_end_on_all_ranks_with_one_line() -> None:
    (first,), (second,) = run(2, [("refused", ())])
    ends = "data_iterator: ends after 3 of 4 microbatches; give an item for every microbatch"
    assert first == [
        "stage 0: is on pipeline ranks 0 and 1; give every stage of the chain to one rank",
        "stage 1: of 0..2 is on no pipeline rank; give every stage of the chain to one rank",
        "rank 0: stages: has 2 numbers for 1 chunks; give one each",
        "rank 1: data_iterator: has 4 iterators for 1 model chunks; give one for each",
        "rank 1: data_iterator: is a dict; give an iterator, or None",
        "rank 0: config.defer_embedding_wgrad_compute: needs the order of Megatron Core's own schedule; switch it off",
        "rank 0: planner.backward: is 'either', and config.recompute_granularity runs the backward of a layer as a "
        "whole; give 'whole', or switch it off",
        "rank 1: num_microbatches: has 4 microbatches, the step 3; give one for each",
        f"rank 1: {ends}",
        ends,
        "rank 1: runs forwards only, the rank of the first stage a training step; pass the same forward_only on all "
        "ranks",
        "num_microbatches: is 0; give at least 1",
        "nothing",
    ]
    # Each rank reports its own failure as it is, and the failures of others with their rank.
    assert second[:8] == first[:8]
    assert second[8:10] == [ends, f"rank 0, of the first stage: {ends}"]
    assert second[10:] == first[10:]


@pytest.mark.full
def test_the_interface_that_we_rely_on() -> None:
    from megatron.core.pipeline_parallel import schedules

    from pipeloom.integrations.megatron.core.call import StepCall, check_interface
    from pipeloom.integrations.megatron.core.forward_backward import planned_forward_backward

    check_interface()
    names = [
        *("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size"),
        *("decoder_seq_length", "forward_only", "collect_non_loss_data", "first_val_step", "adjust_tensor_shapes_fn"),
        *("p2p_communicator", "pg_collection", "force_all_reduce"),
    ]
    assert list(inspect.signature(schedules.forward_backward_pipelining_with_interleaving).parameters) == names
    assert list(inspect.signature(planned_forward_backward).parameters) == [*names, "options"]
    assert list(StepCall.__dataclass_fields__) == names

    def shorter(forward_step_func: Any, data_iterator: Any) -> None: ...

    functions = {
        f"forward_backward_pipelining_{kind}_interleaving": schedules.forward_backward_pipelining_with_interleaving
        for kind in ("with", "without")
    }
    with pytest.raises(InputError, match=r"megatron-core 9: has no parameter 'model' of schedules.forward_step; "):
        check_interface("9", SimpleNamespace(forward_step=shorter, **functions))
    with pytest.raises(InputError, match=r"install a version from 0.16.1 to 0.19.2"):
        check_interface("9", SimpleNamespace())


@pytest.mark.full
def test_one_import_replaces_megatrons_function() -> None:
    code = (
        "from megatron.core.pipeline_parallel import get_forward_backward_func as earlier\n"
        "import pipeloom.integrations.megatron.auto\n"
        "from megatron.core.pipeline_parallel import get_forward_backward_func, schedules\n"
        "from pipeloom.integrations.megatron import planned_forward_backward as ours\n"
        "assert get_forward_backward_func(pp_size=2, vp_size=None) is ours\n"
        "assert schedules.get_forward_backward_func() is ours\n"
        "assert earlier is not get_forward_backward_func\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def test_the_readers_need_no_torch() -> None:
    """Those that the contract in pyproject names, which are all but the training part."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = {
        name
        for contract in contracts
        for name in contract.get("source_modules", ())
        if name.startswith("pipeloom.integrations.megatron")
    }
    folder = ROOT / "src/pipeloom/integrations/megatron"
    present = {f"pipeloom.integrations.megatron.{path.stem}" for path in folder.iterdir() if path.suffix == ".py"}
    present |= {f"pipeloom.integrations.megatron.{path.parent.name}" for path in folder.glob("*/__init__.py")}
    package = "pipeloom.integrations.megatron"
    assert listed - {package} == present - {f"{package}.{name}" for name in ("__init__", "auto", "core")}
    code = "import sys, importlib\nsys.modules['torch'] = None\nsys.modules['megatron'] = None\n"
    code += "".join(f"importlib.import_module({name!r})\n" for name in sorted(listed))
    code += f"import {package} as package\npackage.read_megatron\n"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
