"""Multi-token prediction: which stage computes what, what is sent, and that other commands keep the layers."""

from __future__ import annotations

import shlex
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from pipeloom.compare.model_on_cluster import put_on_cluster
from pipeloom.compare.now import now_system
from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.emulator.build import module_parameters
from pipeloom.integrations.current_runs import load_run
from pipeloom.integrations.megatron import PipelineSettings, Timing, read_megatron
from pipeloom.integrations.megatron.costs import StageCosts
from pipeloom.layout import blocks_of_stages
from pipeloom.spec import Chunk
from pipeloom.spec.catalog import load_cluster
from tests.integrations.megatron.cases import KERNELS

H100 = load_cluster("h100-8")
APART = """
    --num-layers 8
    --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --global-batch-size 32
    --vocab-size 128000 --bf16 --position-embedding-type rope --swiglu --normalization RMSNorm
    --untie-embeddings-and-output-weights --pipeline-model-parallel-size 4 --use-distributed-optimizer
"""


def apart(*more):
    return read_megatron([*shlex.split(APART), *more], num_devices=8)


def placed(random, layers, predictors, p, v=1):
    """Stages with the predictions in one of the last p stages."""
    count = p * v
    at = random.randrange(max(1, count - p), count)
    cuts = sorted(random.randint(0, layers) for _ in range(at))
    sizes = [b - a for a, b in pairwise([0, *cuts, layers])] + [0] * (count - at - 1)
    letters = ["t" * size for size in sizes]
    letters[at] += "m" * predictors
    letters[0], letters[-1] = "E" + letters[0], letters[-1] + "L"
    return PipelineSettings(tuple(letters), p, p)


def test_the_stage_of_the_loss_has_the_products_with_the_vocabulary():
    """Of the figures of a run: seconds, and GiB of the stages of the predictions and of the loss."""
    run = apart("--mtp-num-layers", "1", "--pipeline-model-parallel-layout", "Et*3|t*5|m|L")
    now = Timing(run, H100, KERNELS).of(run.now)
    assert now.iteration_s == pytest.approx(0.2414, rel=0.03)
    assert now.peak_bytes[2:] / 2**30 == pytest.approx([4.45, 6.0], rel=0.01)


@pytest.mark.parametrize("predictors", [1, 2, 3])
def test_where_predictions_stand_moves_their_blocks_alone(predictors):
    random, run = Random(predictors), apart("--mtp-num-layers", str(predictors))
    costs, plain = StageCosts(run, H100, KERNELS), StageCosts(apart(), H100, KERNELS)
    whole = dict.fromkeys(range(2), 0)
    for _ in range(12):
        setup = placed(random, 8, predictors, 4, random.choice((1, 2)))
        numbers = costs.of(setup)
        # A stage of the loss without layers takes 1 + predictors times what it takes without predictions.
        if setup.stages[-1] == "L":
            one = plain.of(PipelineSettings(("Et*8".replace("t*8", "t" * 8), "", "", "L"), 4, 4))[-1]
            assert numbers[-1].forward_ns == pytest.approx((1 + predictors) * one.forward_ns, rel=0.01)
            assert numbers[-1].held_bytes == pytest.approx((1 + predictors) * one.held_bytes, rel=0.01)
        for i in whole:
            total = sum(stage[i] for stage in numbers)
            assert total == pytest.approx(whole[i] or total, rel=0.01)
            whole[i] = total
        sent = costs.sent_bytes(setup)
        first = next(i for i, stage in enumerate(setup.stages) if "m" in stage)
        hidden = 2048 * 2048 * 2
        assert sent == tuple(hidden * (1 + predictors * (i >= first)) for i in range(len(setup.stages) - 1))


def test_a_stage_has_one_copy_of_the_embedding():
    run = apart("--mtp-num-layers", "2")
    costs = StageCosts(run, H100, KERNELS)
    table = 128000 * 2048 * (2 + 4 + 12 / 2)
    block = costs.of_ranks(PipelineSettings(("E", "t" * 8, "mm", "L"), 4, 4))[1].static_bytes / 8
    for stages, copies in (
        (("Et", "tttttt", "t", "mmL"), [1, 0, 0, 2]),
        (("Et", "tttttt", "tmm", "L"), [1, 0, 1, 1]),
        (("E", "t" * 8, "mm", "L"), [1, 0, 1, 1]),
    ):
        found = costs.of_ranks(PipelineSettings(stages, 4, 4))
        tables = [
            (rank.static_bytes - stage.count("t") * block) / table for rank, stage in zip(found, stages, strict=True)
        ]
        # A prediction layer's own weights are less than half of a table.
        assert [int(each) for each in tables] == copies


def test_messages_with_states_of_predictions_take_longer():
    run = apart("--mtp-num-layers", "3")
    timing = Timing(run, H100, KERNELS)
    near = timing.of(PipelineSettings(("E", "t" * 8, "", "mmmL"), 4, 4))
    graph = timing.of(PipelineSettings(("E", "t" * 8, "mmm", "L"), 4, 4)).graph
    longest, plain = int(graph.edge_delay_ns.max()), int(near.graph.edge_delay_ns.max())
    sent = timing.costs.boundary_bytes
    assert longest == timing.costs.message_ns(4 * sent) > plain == timing.costs.message_ns(sent)
    m = run.num_microbatches
    assert (graph.edge_delay_ns == longest).sum() == 2 * m
    assert (graph.edge_delay_ns == plain).sum() == 4 * m


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("predictors", [0, 1, 2])
@pytest.mark.parametrize("more", [(), ("--num-experts", "4"), ("--multi-latent-attention",), ("--add-qkv-bias",)])
def test_the_architecture_keeps_all_parameters(predictors, tied, more):
    words = [word for word in shlex.split(APART) if not tied or "untie" not in word]
    run = read_megatron([*words, "--mtp-num-layers", str(predictors), *more], num_devices=8)
    assert sum(module_parameters(run.architecture).values()) == StageCosts(run, H100, KERNELS).num_parameters
    if (predictors, tied, more) == (2, False, ()):
        assert StageCosts(run, H100, KERNELS).num_parameters == 1_043_329_280


def test_the_architecture_costs_what_stages_do():
    """Prediction layers and loss as layers of a model take what they take as parts of Megatron's stages."""
    run = apart("--mtp-num-layers", "2")
    costs = EmulatedCosts(run.architecture, H100, run.degrees, ("keep",), split=False, trainer=run.trainer)
    stages = StageCosts(run, H100).of(PipelineSettings(("E", "t" * 8, "mm", "L"), 4, 4))
    for layer, stage in ((9, stages[2]), (10, stages[3])):
        (found,) = costs.chunk_costs(Chunk("lm", (layer, layer), 0), run.workload)
        assert found.forward_s * 1e9 == pytest.approx(stage.forward_ns, rel=0.1)
        assert found.backward_s * 1e9 == pytest.approx(stage.backward_ns, rel=0.1)
        assert found.activation_bytes == pytest.approx(stage.held_bytes, rel=0.15)
    assert costs.boundary_bytes(Chunk("lm", (9, 9), 0), run.workload) == 3 * 2048 * 2048 * 2
    # The copy of the embedding is memory and no parameter.
    block = costs.static_bytes(Chunk("lm", (8, 8), 0))
    assert costs.static_bytes(Chunk("lm", (9, 9), 0)) > 2 * block + 128000 * 2048 * 12


@pytest.mark.parametrize("layout", ["Et*3|t*5|mm|L", "Ett|tt|tt|ttmmL", "E|t*5|t*3mm|L", "Et|tt|t|t|t|t|tmm|L"])
def test_a_run_now_keeps_the_stage_of_the_predictions(layout, tmp_path):
    file = tmp_path / "arguments.txt"
    file.write_text(f"{APART} --mtp-num-layers 2 --pipeline-model-parallel-layout '{layout}'")
    run, megatron = load_run(str(file), 8), read_megatron(file, num_devices=8)
    case = put_on_cluster(megatron.architecture, H100, run.degrees(8))
    stages = blocks_of_stages(now_system(case, run).layout, case.model)
    blocks = [stage.count("t") + ("m" in stage) for stage in megatron.now.stages]
    assert stages is not None
    assert [stage["lm"] for stage in stages] == blocks
    assert np.sum(blocks) == 9
