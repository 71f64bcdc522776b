"""The predicted gain of plans for every step over a layout in Megatron's order."""

from __future__ import annotations

import random

import pytest

from pipeloom.errors import InputError
from pipeloom.integrations.megatron import PipelineSettings, Timing, plan_gain, read_megatron
from pipeloom.integrations.megatron.planned import excluded_by, packed_steps
from pipeloom.integrations.megatron.setup import ORDER_BOUND
from pipeloom.search import Budget
from pipeloom.spec import Sample, Workload
from pipeloom.spec.catalog import load_cluster
from pipeloom.timeline import check
from tests.integrations.megatron.cases import listed

H100 = load_cluster("h100-8")
LARGE = {"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 16384, "max_position_embeddings": 16384}
"""Sizes at which kernels take longer than their launches."""
MOE = {"num_experts": 8, "moe_grouped_gemm": True, "moe_layer_freq": "[0]*6+[1]*6", "swiglu": True}


def samples_of(lengths: list[int]) -> tuple[Sample, ...]:
    return tuple(Sample(str(i), text_tokens=length) for i, length in enumerate(lengths))


def test_samples_are_packed_in_order() -> None:
    run = read_megatron(listed(global_batch_size=4, pipeline_model_parallel_size=2, seq_length=4096))
    # Longer samples are cut. The last two do not fill a step.
    (step,) = packed_steps(run, samples_of([4000, 96, 1, 9000, 5, 4096, 4000]))
    assert step == [Workload((4000, 96)), Workload((1,)), Workload((4096,)), Workload((5,))]
    with pytest.raises(InputError, match="samples: fill 1 microbatches of 4096 tokens, a step has 16; give more"):
        next(packed_steps(read_megatron(listed()), samples_of([4000])))


@pytest.mark.parametrize("changes", [LARGE, LARGE | MOE])
def test_plans_gain_where_microbatches_differ(changes: dict) -> None:
    timing = Timing(read_megatron(listed(changes)), H100)
    setup = PipelineSettings(("Et", "t" * 4, "t" * 4, "tttL"), 4, 4)
    same = plan_gain(timing, setup, budget=Budget(evaluations=50))
    (static,), (planned,) = same.static, same.planned
    assert static.iteration_s == timing.of(setup).iteration_s
    assert planned.iteration_s <= static.iteration_s
    rng = random.Random(1)
    lengths = [round(16384 ** rng.uniform(0.5, 1.0)) for _ in range(200)]
    packed = plan_gain(timing, setup, samples_of(lengths), budget=Budget(evaluations=1000))
    assert packed.gain > same.gain + 0.02
    for one in packed.planned:
        check(one.graph, one.schedule, one.timeline)
        # The same work in another order.
        assert sorted(one.graph.duration_ns) == sorted(packed.static[packed.planned.index(one)].graph.duration_ns)


def test_packs_cost_what_their_attention_costs() -> None:
    timing = Timing(read_megatron(listed(LARGE)), H100)
    setup = PipelineSettings(("Et", "t" * 4, "t" * 4, "tttL"), 4, 4)
    whole, pieces = Workload((16384,)), Workload((2048,) * 8)
    forward = timing.of_step(setup, [whole, pieces] * 8).graph.duration_ns[: 4 * 16].reshape(4, 16)
    for times, stage in zip(forward, timing.costs.of(setup), strict=True):
        assert set(times[0::2]) == {stage.forward_ns}
        assert times[1::2].max() < stage.forward_ns
    assert timing.of_step(setup, [whole] * 16).iteration_s == timing.of(setup).iteration_s


def test_runs_that_exclude_plans() -> None:
    assert excluded_by(read_megatron(listed())) == ""
    graphs = read_megatron(listed(enable_cuda_graph=True, cuda_graph_scope="attn", te_rng_tracker=True))
    assert excluded_by(graphs).startswith("--")
    for name in (each.replace("_", "-") for each in ORDER_BOUND):
        value = "local" if name == "cuda-graph-impl" else True
        run = read_megatron(listed({name: value}, num_layers_per_virtual_pipeline_stage=1))
        assert excluded_by(run) == f"--{name}"
        assert f"--{name}" in run.read
    instances = {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True}
    assert excluded_by(read_megatron(listed(instances))) == ""
    both = read_megatron(listed(instances, overlap_grad_reduce=True))
    assert excluded_by(both) == "--num-distributed-optimizer-instances"
    for name in ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"):
        same, more = (read_megatron(listed({name: n}, tensor_model_parallel_size=2)) for n in (2, 4))
        assert (excluded_by(same), excluded_by(more)) == ("", f"--{name.replace('_', '-')}")
