from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.torchtitan import pipeline_planned, split_by_costs
from pipeloom.integrations.torchtitan.costs import completed, estimated_costs
from pipeloom.integrations.torchtitan.measured import Trial, _measured_here
from pipeloom.integrations.torchtitan.parts import with_all_modules
from pipeloom.runtime.launch.processes import launch

COSTS = {"vision_encoder.layers.0": 4.0, "vision_encoder.layers.1": 4.0, "tok_embeddings": 0.0} | {
    f"layers.{i}": 1.0 for i in range(6)
}
COSTS |= {"norm": 0.0, "lm_head": 2.0}


def test_an_encoder_is_cut_like_the_rest() -> None:
    assert split_by_costs(COSTS, 4) == [
        ["vision_encoder.layers.0"],
        ["vision_encoder.layers.1"],
        ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"],
        ["layers.4", "layers.5", "norm", "lm_head"],
    ]


def test_an_encoder_that_cannot_be_cut_is_weighed_whole() -> None:
    costs = {"vision_encoder": 3.0, **{name: cost for name, cost in COSTS.items() if not name.startswith("vision")}}
    first, second = split_by_costs(costs, 2)
    assert first == ["vision_encoder", "tok_embeddings", "layers.0", "layers.1"]
    assert second == ["layers.2", "layers.3", "layers.4", "layers.5", "norm", "lm_head"]


def test_more_stages_than_parts_are_refused() -> None:
    with pytest.raises(InputError, match="asks for 11 stages, the model has 10 parts to split"):
        split_by_costs(COSTS, 11)


def test_embedding_and_head_may_be_stages() -> None:
    costs = {name: cost for name, cost in COSTS.items() if not name.startswith("vision")}
    layers = [[f"layers.{i}"] for i in range(6)]
    assert split_by_costs(costs, 7) == [["tok_embeddings", "layers.0"], *layers[1:], ["norm", "lm_head"]]
    assert split_by_costs(costs, 8) == [["tok_embeddings"], *layers, ["norm", "lm_head"]]


def test_a_large_head_is_a_stage() -> None:
    costs = {name: cost for name, cost in COSTS.items() if not name.startswith("vision")} | {"lm_head": 6.0}
    assert split_by_costs(costs, 3) == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5"],
        ["norm", "lm_head"],
    ]


def test_costs_that_are_not_given_are_estimated_in_the_unit_of_those_that_are() -> None:
    estimated = {name: 1e9 * cost for name, cost in COSTS.items()}
    seconds = {f"layers.{i}": 0.002 for i in range(6)}
    assert completed(seconds, estimated) == pytest.approx({name: 0.002 * cost for name, cost in COSTS.items()})


def test_costs_of_what_the_model_has_not_are_refused() -> None:
    with pytest.raises(InputError, match=r"costs\['layers.6'\]: is not a part of the model; its parts are vision"):
        completed({"layers.6": 1.0}, COSTS)


def _seeing() -> nn.Module:
    """Return a model with modules that are neither layers nor ends of them, of which one has no weights."""
    model = nn.Module()
    names = ("tok_embeddings", "norm", "lm_head", "vision_encoder", "vision_adapter", "vision_projection")
    for name in names:
        setattr(model, name, nn.Linear(2, 2))
    model.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(4)})
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.perception_emb_norm = nn.RMSNorm(2, elementwise_affine=False)
    return model


def test_every_module_is_in_one_stage() -> None:
    model = _seeing()
    costs = {"vision_encoder": 1.0, "tok_embeddings": 0.0} | {f"layers.{i}": 1.0 for i in range(4)}
    costs |= {"norm": 0.0, "lm_head": 1.0}
    stages = with_all_modules(model, split_by_costs(costs, 2))
    found = [f"{name}.{weight}" for stage in stages for name in stage for weight, _ in _weights(model, name)]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    assert "perception_emb_norm" in stages[0]
    assert stages[1][-2:] == ["norm", "lm_head"]
    assert with_all_modules(model, stages) == stages
    stages[0].remove("blocks.1")
    assert "blocks.1" in with_all_modules(model, stages)[0]


def test_modules_that_no_stage_names_have_costs() -> None:
    model = _seeing()
    model.vision_adapter = nn.Linear(2, 100)
    costs = estimated_costs(model, 8, vision_tokens=2.0)
    other = {"vision_adapter": 800.0, "vision_projection": 16.0, "blocks.0": 16.0, "blocks.1": 16.0}
    layers = {f"layers.{i}": 8.0 for i in range(4)}
    assert costs == {"vision_encoder": 16.0, **other, "tok_embeddings": 0.0, **layers, "norm": 0.0, "lm_head": 8.0}
    first = ["vision_encoder", *other, "tok_embeddings"]
    assert split_by_costs(costs, 2)[0] == [*first, "layers.0"]
    assert split_by_costs(costs, 6)[:2] == [first, ["layers.0"]]
    unknown = {"tok_embeddings": 0.0, "blocks.0": 1.0, "blocks.1": 1.0, "blocks.2": 1.0}
    assert split_by_costs(unknown, 3) == [["tok_embeddings", "blocks.0"], ["blocks.1"], ["blocks.2"]]


def test_modules_with_unknown_inputs_are_estimated() -> None:
    estimated = {"vision_adapter": 2.0, "tok_embeddings": 0.0, "lm_head": 1.0}
    found = _measured_here(_seeing(), estimated, Trial(1, 8, torch.device("cpu"), torch.float32))
    assert found["vision_adapter"] == "NotImplementedError: the inputs of a Linear are unknown"


def _weights(model: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    return list(model.get_submodule(name).named_parameters())


def test_modules_without_a_stage_are_refused() -> None:
    left = "vision_encoder, vision_adapter, vision_projection, blocks.0, blocks.1, perception_emb_norm"
    with pytest.raises(InputError, match=f"does not name tok_embeddings, norm, lm_head, {left}"):
        with_all_modules(_seeing(), [["layers.0"], ["layers.1", "layers.2", "layers.3"]])


@pytest.mark.parametrize(("batch", "microbatch"), [(3, 2), (1, 2)])
def test_a_batch_that_is_no_multiple_of_microbatches_is_refused(batch: int, microbatch: int) -> None:
    parallelism = SimpleNamespace(pipeline_parallel_schedule_csv="", pipeline_parallel_microbatch_size=microbatch)
    given: dict[str, Any] = dict.fromkeys(("parallel_dims", "model_config", "device", "loss_fn"))
    training = SimpleNamespace(local_batch_size=batch)
    with pytest.raises(InputError, match=f"training.local_batch_size: is {batch}, no multiple of the 2 sequences"):
        pipeline_planned(None, **given, parallelism=parallelism, training=training)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "num_ranks", "schedule", "precision", "degrees"),
    [
        ("dense", 4, "Interleaved1F1B", "float32", {"data_parallel_shard_degree": 2}),
        # Stages hand on DTensors, and the head is divided by its vocabulary.
        ("dense", 4, "Interleaved1F1B", "float32", {"tensor_parallel_degree": 2}),
        # torchtitan's default; the others have "partial_dtensor".
        ("dense", 2, "1F1B", "float32", {"spmd_backend": "spmd_types"}),
        ("unequal", 2, "1F1B", "float32", {}),
        ("sparse", 4, "1F1B", "float32", {"data_parallel_shard_degree": 2}),
        ("sparse", 4, "1F1B", "float32", {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}),
        # What a cut encoder hands on stays in the type in which it is computed.
        ("seeing", 2, "Interleaved1F1B", "bfloat16", {}),
    ],
)
def test_losses_and_gradients_are_torchtitans(
    kind: str, num_ranks: int, schedule: str, precision: str, degrees: dict[str, Any]
) -> None:
    pytest.importorskip("torchtitan", reason="pip install 'pipeloom[torchtitan]'")
    from .torchtitan_on_ranks import compared

    for found in launch(compared, num_ranks, kind, schedule, precision, degrees, timeout_s=400.0):
        theirs, ours = found["losses"]
        assert ours == [[pytest.approx(one, rel=1e-6) for one in step] for step in theirs]
        assert found["worst"] <= 1e-6
        assert found["num_gradients"] > 40
        assert "tp" in found["meshes"] or "tensor_parallel_degree" not in degrees
        assert "ep" in found["meshes"] or "expert_parallel_degree" not in degrees
        if kind == "seeing":
            # In two stages at least, of which one has nothing else.
            assert sum(any("vision" in name for name in part) for part in found["parts"]) >= 2
        if kind == "unequal":
            # The slow layer is alone, though by weights there would be three on either side.
            first, second = ({name.split(".")[1] for name in part if "layers" in name} for part in found["parts"])
            assert (first, second) == ({"0"}, set("12345"))


@pytest.mark.full
@pytest.mark.ranks
def test_torchtitan_runs_a_plan_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="pip install 'pipeloom[torchtitan]'")
    from .torchtitan_on_ranks import by_file

    for found in launch(by_file, 2, str(tmp_path), timeout_s=300.0):
        theirs, ours = found["losses"]
        assert ours == [[pytest.approx(one, rel=1e-6) for one in step] for step in theirs]
        assert found["worst"] <= 1e-6


@pytest.mark.full
@pytest.mark.ranks
def test_torchtitans_trainer_trains_as_with_its_own(tmp_path: Path) -> None:
    """Losses, gradient norms and validation, also after a checkpoint is taken up with stages cut elsewhere."""
    pytest.importorskip("torchtitan", reason="pip install 'pipeloom[torchtitan]'")
    from .torchtitan_trainer import both

    for found in launch(both, 2, str(tmp_path), "1F1B", timeout_s=400.0):
        theirs, ours = found["theirs"], found["ours"]
        steps = [row[:2] for row in theirs["logged"]]
        assert [row for row in steps if row[0] == "step"] == [("step", i) for i in (1, 2, 3, 4)]
        assert steps[-1] == ("validation", 4)
        assert [row[:2] for row in ours["logged"]] == steps
        for wanted, got in zip(theirs["logged"], ours["logged"], strict=True):
            assert got[2:] == pytest.approx(wanted[2:], rel=1e-6)
        before, after = ours["parts"]
        assert before != after
