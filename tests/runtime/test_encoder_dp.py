"""Encoders whose instances are dealt to tensor-parallel ranks train as one process would."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement, separate
from pipeloom.layout.layouts import with_encoder_dp
from pipeloom.packing import PackingSpec, pack
from pipeloom.runtime import Executor
from pipeloom.runtime.launch.processes import launch
from pipeloom.runtime.model.encoder_dp import EncoderDataParallel
from pipeloom.runtime.model.random_state import ForwardSeeds
from pipeloom.spec import Batch, Chunk, Parallelism, Sample, TensorShape
from tests.cases import vlm_spec

from .cases import real_model
from .divided_training import Degrees, train_divided
from .on_mesh import Shape, run_on_mesh
from .test_divided_training import assert_undivided

pytestmark = pytest.mark.ranks

PIPELINED, REPLICAS, SHARDS = (
    Shape(2, 1, 2, encoder_dp=True),
    Shape(1, 2, 2, encoder_dp=True),
    Shape(1, 2, 2, True, True),
)


def test_encoder_data_parallelism_is_exact() -> None:
    """Pipelined and on all ranks, trained and frozen, with every strategy, split backwards, some ranks without work."""
    assert launch(run_on_mesh, 4, [PIPELINED, SHARDS], list(range(4)), timeout_s=120.0)[0] == 8


@pytest.mark.full
def test_encoder_data_parallelism_is_exact_on_more_models() -> None:
    shapes = [PIPELINED, REPLICAS, SHARDS, Shape(1, 1, 4, encoder_dp=True)]
    launch(run_on_mesh, 4, shapes, list(range(4, 16)), timeout_s=240.0)


@pytest.mark.soak
def test_encoder_data_parallelism_is_exact_with_all_kinds_of_parallelism() -> None:
    shapes = [Shape(2, 2, 2, encoder_dp=True), Shape(2, 2, 2, True, True), Shape(2, 1, 4, encoder_dp=True)]
    launch(run_on_mesh, 8, shapes, list(range(12)), timeout_s=300.0)


@pytest.mark.full
def test_training_equals_undivided_training_and_resumes_under_other_degrees(tmp_path: Path) -> None:
    degrees = [
        Degrees(2, 1, 2, None, True),
        Degrees(2, 2, 1),
        Degrees(1, 2, 2, "fsdp", True),
        Degrees(1, 1, 4, None, True),
    ]
    assert_undivided(launch(train_divided, 4, degrees, [3, 4, 5, 6], str(tmp_path), timeout_s=240.0))


def test_what_cannot_be_divided_is_refused() -> None:
    spec = vlm_spec(vision_layers=3)
    plain = separate(spec, 1, {}, lambda *_: 1.0)
    cut = (Chunk("vision", (0, 0), 0), Chunk("vision", (1, 2), 0), Chunk("lm", (0, 7), 0))
    layout = replace(with_encoder_dp(plain, ["vision"]), parallelism=Parallelism(2), chunks=cut)
    model = real_model(random.Random(0), spec)
    with pytest.raises(
        InputError, match=r"module 'vision': uses encoder data parallelism over 2 ranks, but the executor has no group"
    ):
        Executor(model, layout, 0, None)  # type: ignore[arg-type]
    vision, lm = model.modules
    padded = dataclasses.replace(vision, hidden=TensorShape((1, "tokens", 4), "float64"))
    with pytest.raises(InputError, match=r"layer 0 at the end of a chunk gives \[1, 'tokens', 4\], which has no rows"):
        EncoderDataParallel(dataclasses.replace(model, modules=[padded, lm]), layout, None)
    weight = vision.layers[1].register_parameter("shared", next(lm.layers[1].parameters()))
    assert weight is None
    with pytest.raises(InputError, match=r"parameter 'vision.1.shared': is tied to that of another layer"):
        EncoderDataParallel(dataclasses.replace(model, modules=[vision, lm]), layout, None)


def test_a_share_draws_as_a_part_of_its_own_would() -> None:
    spec, batch = vlm_spec(), Batch((Sample("a", 5, (1, 1, 1)),))
    drawn = []
    for size, sub, own in ((None, 0, (1, 1)), (1, 1, None), (None, 0, (0, 1))):
        layout = separate(spec, 1, {"vision": ModulePlacement(1, size)}, lambda *_: 1.0)
        seeds = ForwardSeeds(3, torch.device("cpu"))
        seeds.begin(0, pack(batch, spec, layout, PackingSpec(60)))
        with seeds.seeded(0, (0, 3), 0, (0, sub), own):
            drawn.append(float(torch.rand(())))
        seeds.end()
        # A rank without a share of one part may have one of the next.
        assert seeds.silent == set()
    assert drawn[0] == drawn[1] != drawn[2]
