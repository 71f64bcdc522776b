"""Trainers change costs, and a run's flags change its trainer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.emulated_mixtures import ParetoSteps
from pipeloom.errors import InputError
from pipeloom.integrations.megatron import Timing, read_megatron
from pipeloom.integrations.megatron.costs import StageNumbers
from pipeloom.iteration import Draw, emulate
from pipeloom.spec import Chunk, Workload
from pipeloom.spec.architecture import RoutedExperts
from pipeloom.spec.catalog import load_cluster, load_trainer, names
from pipeloom.spec.parallelism import Degrees
from pipeloom.spec.trainer import FUSED, Overlap, TrainerSpec
from pipeloom.validation.constants import constants
from tests.integrations.megatron.cases import listed


def test_the_default_is_in_the_zoo() -> None:
    assert load_trainer("fused") == FUSED
    assert {load_trainer(name).name for name in names("trainers")} == set(names("trainers"))


def test_a_constant_has_one_value_in_all_trainers() -> None:
    for constant in constants():
        targets = [target.split("/")[1].rsplit(".", 1) for target in constant.targets if target.startswith("trainers/")]
        assert len({getattr(load_trainer(name), field) for name, field in targets}) <= 1, constant.name


def test_eager_operators_cost_time_and_memory() -> None:
    chunk, work = Chunk("lm", (1, 4), 0), Workload((4096,))
    found = {}
    for name in ("fused", "megatron", "pipeloom"):
        costs = EmulatedCosts("llama2-7b", "8xH100", Degrees(), ("keep",), split=False, trainer=load_trainer(name))
        (found[name],) = costs.chunk_costs(chunk, work)
    assert found["fused"].forward_s < found["megatron"].forward_s < found["pipeloom"].forward_s
    assert found["fused"].activation_bytes == found["megatron"].activation_bytes < found["pipeloom"].activation_bytes


@pytest.mark.parametrize("name", ["fused", "megatron", "pipeloom"])
def test_a_plan_has_no_more_memory_than_the_trainer_leaves(name: str) -> None:
    trainer, cluster = load_trainer(name), load_cluster("8xH100")
    costs = EmulatedCosts("llama2-7b", cluster, Degrees(pipeline=2), ("keep",), split=False, trainer=trainer)
    step = emulate("llama2-7b", cluster, Degrees(pipeline=2), batch=Draw(4), strategy="keep", trainer=trainer)
    left = cluster.device.usable_bytes - trainer.library_bytes
    assert costs.rank.memory_capacity_bytes == step.capacity_bytes == left


def test_a_pass_takes_at_least_its_launches() -> None:
    """Short microbatches are bound by the host, which launches recomputed operators again in the backward."""
    strategies = ("keep", "recompute", "recompute:0.5", "selective")
    costs = EmulatedCosts("llama2-7b", "8xH100", Degrees(), strategies, trainer=load_trainer("megatron"))
    host = 4 * load_trainer("megatron").layer_host_s
    found = dict(zip(strategies, costs.chunk_costs(Chunk("lm", (1, 4), 0), Workload((8,))), strict=True))
    for strategy, again in ("keep", 0.0), ("recompute", 1.0), ("recompute:0.5", 0.5):
        cost = found[strategy]
        assert cost.forward_s == pytest.approx(host / 3)
        assert cost.backward_s == pytest.approx((2 + again) * host / 3)
        assert cost.backward_input_s == pytest.approx((1 + again) * host / 3)
        assert cost.backward_weight_s == pytest.approx(host / 3)
    assert found["keep"].backward_s < found["selective"].backward_s < found["recompute"].backward_s


def test_mixtures_take_at_least_their_launches() -> None:
    trainer = load_trainer("megatron")
    costs = EmulatedCosts(
        "llama2-7b", "8xH100", Degrees(), pareto_steps=ParetoSteps(), split=False, trainer=trainer
    ).chunk_costs(Chunk("lm", (1, 4), 0), Workload((8,)))
    whole = next(cost for cost in costs if cost.layers == ("recompute",) * 4)
    assert whole.backward_s == pytest.approx(4 * trainer.layer_host_s)
    assert costs[0].backward_s == pytest.approx(4 * trainer.layer_host_s * 2 / 3)


def test_megatron_launches_again_what_it_recomputes() -> None:
    """The backward of a stage of three layers that the host binds, under several recomputations."""
    full = {"recompute_granularity": "full", "recompute_num_layers": 1}
    found = {
        name: stage_numbers(flags)
        for name, flags in {
            "nothing": {},
            "core": {"recompute_granularity": "selective"},
            "modules": {"recompute_granularity": "selective", "recompute_modules": "core_attn mlp"},
            "one": full | {"recompute_method": "block"},
            "all": full | {"recompute_method": "uniform"},
        }.items()
    }
    layer_ns = load_trainer("megatron").layer_host_s * 1e9
    assert found["nothing"].backward_ns == pytest.approx(3 * layer_ns * 2 / 3)
    assert found["one"].backward_ns - found["nothing"].backward_ns == pytest.approx(layer_ns / 3, abs=2)
    assert found["all"].backward_ns == pytest.approx(3 * layer_ns)
    times = [found[name].backward_ns for name in ("nothing", "core", "modules", "all")]
    assert times == sorted(set(times))
    assert len({numbers.forward_ns for numbers in found.values()}) == 1


def stage_numbers(flags: dict[str, object]) -> StageNumbers:
    """Return the numbers of the second of four stages, with microbatches of 128 tokens."""
    run = read_megatron(listed(flags, seq_length=128), num_devices=4)
    return Timing(run, load_cluster("8xH100")).costs.of(run.now)[1]


def test_flags_decide_what_is_hidden() -> None:
    sizes = {"sequence_parallel": True, "tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
    full = load_trainer("megatron")
    plain = read_megatron(listed(sizes), num_devices=16)
    overlapped = read_megatron(
        listed(sizes, overlap_grad_reduce=True, overlap_param_gather=True, tp_comm_overlap=True), num_devices=16
    )
    assert plain.trainer == replace(full.overlapping(Overlap()), dispatcher="allgather")
    assert "no overlap" in plain.trainer.text
    hidden = full.overlapping(Overlap(reduction=True, gather=True, tensor=True))
    assert overlapped.trainer == replace(hidden, dispatcher="allgather")
    assert "gradient reduction, parameter gathering, tensor messages" in overlapped.trainer.text
    cluster = load_cluster("16xH100")
    slow, fast = (Timing(run, cluster).of(run.now) for run in (plain, overlapped))
    assert slow.iteration_s - slow.pipeline_s > fast.iteration_s - fast.pipeline_s


@pytest.mark.parametrize("name", ["hidden_reduction", "hidden_gather", "hidden_tensor", "hidden_expert"])
def test_messages_may_be_hidden_as_a_whole(name: str) -> None:
    degrees, cluster = Degrees(tensor=2, data=2, expert=2), load_cluster("8xH100")
    times = []
    for share in (0.0, 0.5, 1.0):
        trainer = replace(FUSED, **{name: share})
        step = emulate("mixtral-8x7b", cluster, degrees, batch=Draw(2), strategy="keep", trainer=trainer)
        times.append(step.iteration_s)
    assert times[0] > times[1] > times[2] > 0


def test_graphs_and_a_fused_loss_change_the_trainer() -> None:
    graphed = read_megatron(listed(enable_cuda_graph=True)).trainer
    assert graphed.layer_host_s == graphed.expert_layer_host_s == 0
    partly = read_megatron(listed(cuda_graph_impl="transformer_engine", cuda_graph_scope="attn moe_router")).trainer
    assert partly.graphed
    assert partly.expert_layer_host_s == load_trainer("megatron").expert_layer_host_s
    fused = read_megatron(listed(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")).trainer
    assert fused.cross_entropy == 1
    assert fused.loss_in_place


def test_the_host_launches_biases_of_experts_one_by_one() -> None:
    mixer = RoutedExperts(64, have_biases=True)
    trainer = load_trainer("megatron")
    few, many = (trainer.experts_host_s(mixer, devices) for devices in (64, 8))
    assert trainer.expert_layer_host_s < few < many
    assert replace(trainer, fused_experts=True).experts_host_s(mixer, 8) == trainer.expert_layer_host_s
    assert trainer.with_graphs(experts=False).experts_host_s(mixer, 64) < few
    assert trainer.with_graphs().experts_host_s(mixer, 8) == 0


def test_dispatchers_are_read_by_name() -> None:
    def of(**given: object) -> TrainerSpec:
        return read_megatron(listed(given)).trainer

    assert of(moe_token_dispatcher_type="alltoall").dispatcher == "alltoall"
    assert of(moe_token_dispatcher_type="flex").dispatcher == "deepep"
    assert of(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep").dispatcher == "hybridep"
    overlapping = of(overlap_moe_expert_parallel_comm=True, num_virtual_stages_per_pipeline_rank=3)
    assert overlapping.hidden_expert == load_trainer("megatron").hidden_expert
    assert of(use_transformer_engine_op_fuser=True).fused_experts
    with pytest.raises(InputError, match="'mesh' is none of alltoall, allgather, deepep, hybridep"):
        of(moe_token_dispatcher_type="mesh")
