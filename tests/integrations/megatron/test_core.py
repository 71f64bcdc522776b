"""Against Megatron Core itself: its parser, its default stages, its order of tasks, and its gradients on CPU ranks.

pip install "pipeloom[megatron]"
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.integrations.megatron import PipelineSettings, Timing, best_layout, read_megatron
from pipeloom.integrations.megatron.effects import known_fields, known_names
from pipeloom.integrations.megatron.files import read_arguments
from pipeloom.integrations.megatron.setup import read_stages
from pipeloom.search import Budget, group_sizes
from pipeloom.spec.catalog import load_cluster
from tests.integrations.megatron.cases import listed
from tests.integrations.megatron.train_step import OnCpu

pytestmark = [
    pytest.mark.full,  # importing Megatron Core takes seconds
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron Core is not installed"),
    # Megatron Core says what it has not found, such as Transformer Engine.
    pytest.mark.filterwarnings("ignore"),
]


@st.composite
def setups(draw):
    """Any stages that Megatron can have, with layers dealt at random."""
    p, v = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 9), min_size=p * v, max_size=p * v).filter(any))
    predictors = draw(st.integers(0, 2))
    letters = ["t" * size for size in sizes]
    letters[0] = "E" + letters[0]
    letters[-1] += "m" * predictors + "L"
    return PipelineSettings(tuple(letters), p, p)


@given(setups())
@settings(max_examples=200)
def test_its_parser_reads_what_we_write(setup):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letter = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}
    theirs = PipelineParallelLayerLayout(setup.layout, setup.num_ranks)
    letters = "".join(setup.stages)
    theirs.validate_layer_layout(letters.count("t"), letters.count("m"))
    assert theirs.virtual_pipeline_model_parallel_size == setup.virtual
    for i, stage in enumerate(setup.stages):
        rank, chunk = i % setup.num_ranks, i // setup.num_ranks
        assert "".join(letter[one] for one in theirs.layout[rank][chunk]) == stage


def parsed(read):
    """What a parser makes of a string: a list of stages; None: it refuses."""
    try:
        return [list(stage) for stage in read()]
    except (AssertionError, InputError, ValueError):
        return None


@st.composite
def placed_predictions(draw):
    """Layouts with prediction layers anywhere behind the decoder's."""
    p, v, k = draw(st.integers(2, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    letters = "E" + "t" * draw(st.integers(1, 6)) + "m" * k + "L"
    cuts = sorted(draw(st.lists(st.integers(0, len(letters)), min_size=p * v - 1, max_size=p * v - 1)))
    return [letters[a:b] for a, b in pairwise([0, *cuts, len(letters)])], p, k


@given(placed_predictions())
@settings(max_examples=300, deadline=None)
def test_both_accept_predictions_in_the_same_stages(case):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    stages, p, k = case
    layers = "".join(stages).count("t")
    changes = {"num_layers": layers, "mtp_num_layers": k or None, "pipeline_model_parallel_size": p}
    arguments = read_arguments(listed(changes, pipeline_model_parallel_layout="|".join(stages)))
    ours = parsed(lambda: read_stages(arguments, p, layers, k))
    try:
        PipelineParallelLayerLayout("|".join(stages), p).validate_layer_layout(layers, k or None)
    except AssertionError:
        assert ours is None
    else:
        assert ours == [list(stage) for stage in stages]


@st.composite
def even_stages(draw):
    """Numbers of layers that Megatron deals itself."""
    p, v, each = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    changes = {"pipeline_model_parallel_size": p}
    layers = p * v * each
    if draw(st.booleans()):
        first = v * draw(st.integers(1, 3))
        changes["decoder_first_pipeline_num_layers"] = first
        layers += first - v * each
    else:
        for end in draw(st.sets(st.sampled_from(["embedding", "loss"]))):
            changes[f"account_for_{end}_in_pipeline_split"] = True
            layers -= 1
    if v > 1:
        changes["num_virtual_stages_per_pipeline_rank"] = v
    assume(layers > 0)
    return changes | {"num_layers": layers}


@given(even_stages())
@settings(max_examples=100)
def test_default_stages_are_its_own(changes):
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    p, v = changes["pipeline_model_parallel_size"], changes.get("num_virtual_stages_per_pipeline_rank")
    config = TransformerConfig(
        num_layers=changes["num_layers"],
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=changes.get("decoder_first_pipeline_num_layers"),
        account_for_embedding_in_pipeline_split=changes.get("account_for_embedding_in_pipeline_split", False),
        account_for_loss_in_pipeline_split=changes.get("account_for_loss_in_pipeline_split", False),
    )
    ours = read_stages(read_arguments(listed(changes)), p, changes["num_layers"], 0)
    theirs = [
        get_num_layers_to_build(config, chunk if v else None, rank) for chunk in range(v or 1) for rank in range(p)
    ]
    assert [stage.count("t") for stage in ours] == theirs


class Communicator:
    """What Megatron Core's count of warm-up forwards asks: the rank, and how many there are."""

    def __init__(self, rank, ranks, virtual):
        self._rank, self._ranks = rank, ranks
        self.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None

    @property
    def pp_group(self):
        return self

    def size(self):
        return self._ranks

    def rank(self):
        return self._rank


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_the_order_is_its_own(p, v, m, data):
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    sizes = group_sizes(p, m)
    size = data.draw(st.sampled_from(sizes)) if v > 1 and sizes else p
    v = v if sizes else 1
    stages = ("Et", *["t"] * (p * v - 2), "tL")
    run = read_megatron(
        listed(
            pipeline_model_parallel_size=p,
            num_layers=p * v,
            pipeline_model_parallel_layout="|".join(stages),
            global_batch_size=m,
            microbatch_group_size_per_virtual_pipeline_stage=size,
        )
    )
    timed = Timing(run, load_cluster("h100-8")).of(run.now)
    graph, table = timed.graph, get_schedule_table(m, v, size)
    for rank, tasks in enumerate(timed.schedule.order):
        chunk = graph.pair[tasks] // m // p
        ours = list(
            zip((graph.kind[tasks] == 0).tolist(), graph.microbatch[tasks].tolist(), chunk.tolist(), strict=True)
        )
        total, _, warm, left = get_pp_rank_microbatches(m, v, size, p2p_communicator=Communicator(rank, p, v))
        forward = [(True, i, chunk) for i, chunk in table]
        backward = [(False, i, v - 1 - chunk) for i, chunk in table]
        theirs = forward[:warm]
        for k in range(left):
            theirs += [forward[warm + k], backward[k]]
        assert ours == theirs + backward[left:total]


@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 22))
@settings(max_examples=300, deadline=None)
def test_its_schedule_takes_the_group_sizes_that_we_do(p, m, size):
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving

    off = ("batch_p2p_comm", "finalize_model_grads_func", "timers", "no_sync_func", "grad_sync_func", "param_sync_func")
    config = SimpleNamespace(overlap_p2p_comm=True, microbatch_group_size_per_vp_stage=size, **dict.fromkeys(off, None))
    chunk, communicator = torch.nn.Identity(), Communicator(0, p, 2)
    chunk.config, chunk.model_type, communicator.config = config, ModelType.encoder_or_decoder, config
    groups = SimpleNamespace(**dict.fromkeys(("tp", "cp", "embd", "pos_embd", "pp", "dp_cp")))
    with OnCpu(), pytest.raises((AttributeError, RuntimeError, ValueError)) as caught:
        forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[],
            model=[chunk, chunk],
            num_microbatches=m,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    # Behind its checks it asks for the hidden size, which our stand-in lacks.
    assert ("hidden_size" in str(caught.value)) == (size in group_sizes(p, m))


def test_the_names_that_we_know_are_those_of_its_settings():
    """Every argument that is read is one; names that Megatron Core's settings have are known too."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    without = {"--nproc-per-node", "--nnodes"}
    fields = {name.replace("_", "-") for name in TransformerConfig.__dataclass_fields__}
    assert len(fields & known_names()) > 150
    for config in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        assert not {
            name
            for name in config.__dataclass_fields__
            if not name.startswith("_") and name.replace("_", "-") not in known_fields()
        }
    assert {label for label in read_megatron(listed()).read if label not in without} <= {
        f"--{n}" for n in known_names()
    }


def run_steps(case, folder):
    """Gradients of every run of a case, by processes of their own."""
    (folder / "case.json").write_text(json.dumps(case))
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.megatron.train_step"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, str(folder / "case.json"), str(folder / "out.pt")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


@pytest.mark.ranks
def test_one_step_under_our_layout_has_the_gradients_of_the_default_layout(tmp_path):
    """Two ranks with unequal stages, two and three of them each, layers recomputed, groups larger than the pipeline."""
    case = {"ranks": 2, "layers": 6, "hidden": 32, "heads": 4, "vocabulary": 64, "tokens": 8, "microbatches": 4}
    run = read_megatron(
        listed(
            num_layers=6,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=64,
            seq_length=8,
            global_batch_size=4,
            pipeline_model_parallel_size=2,
            untie_embeddings_and_output_weights=True,
        )
    )
    found = best_layout(run, load_cluster("h100-8"), budget=Budget(evaluations=60)).best.setup
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    case["runs"] = [
        {"layout": None, "virtual": None},
        {"layout": found.layout, "virtual": found.virtual if found.virtual > 1 else None, "group": found.group_size},
        {"layout": "Et|t*3|tt|L", "virtual": 2, "group": 4, "recompute": block},
        {"layout": "E|tt|t|t|t|tL", "virtual": 3, "group": 2},
    ]
    default, *others = run_steps(case, tmp_path)
    assert all(gradient.abs().max() > 0 for gradient in default.values())
    for mine in others:
        assert mine.keys() == default.keys()
        for name, gradient in default.items():
            assert torch.equal(mine[name], gradient), name
    # A run that differs would be seen: gradients of different layers are not alike.
    rows = [default[f"decoder.layers.{i}.mlp.linear_fc1.weight"] for i in range(6)]
    assert not any(torch.equal(a, b) for a, b in pairwise(rows))


def test_the_defaults_of_megatron_core_are_those_that_are_noted() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    layer = TransformerConfig.__dataclass_fields__
    found = {name: layer[name].default for name in ("attention_dropout", "hidden_dropout", "moe_grouped_gemm")}
    assert found == {"attention_dropout": 0.1, "hidden_dropout": 0.1, "moe_grouped_gemm": False}
    assert (layer["cross_entropy_loss_fusion"].default, layer["moe_permute_fusion"].default) == (False, False)
    assert layer["moe_token_dispatcher_type"].default == "allgather"
    assert OptimizerConfig().clip_grad == 1.0
    assert DistributedDataParallelConfig().grad_reduce_in_fp32 is False
