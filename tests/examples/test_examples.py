"""The examples train over ranks, with a plan for every batch, exactly as they would in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeloom.cli.app import run
from pipeloom.layout import single_rank
from pipeloom.packing import PackingSpec, pack
from pipeloom.runtime import MeasureOptions, measure_layers
from pipeloom.runtime.launch.processes import launch
from pipeloom.spec import batch_from_dicts
from tests.examples.on_ranks import EXAMPLES, SIZES, losses_over_ranks, losses_undivided, task_of

pytestmark = pytest.mark.ranks

ITERATIONS = 3


@pytest.fixture(scope="module")
def over_ranks() -> list[dict[str, list[tuple[float, float, bool]]]]:
    return launch(losses_over_ranks, 2, list(SIZES), 2, ITERATIONS)


@pytest.mark.parametrize("name", SIZES)
def test_an_example_is_exact_under_plans_of_its_own(
    over_ranks: list[dict[str, list[tuple[float, float, bool]]]], name: str
) -> None:
    wanted = losses_undivided(name, ITERATIONS)
    for rank in over_ranks:
        assert [loss for loss, _, _ in rank[name]] == pytest.approx([loss for loss, _ in wanted], rel=1e-9)
        assert [norm for _, norm, _ in rank[name]] == pytest.approx([norm for _, norm in wanted], rel=1e-7)
    assert all(fresh for _, _, fresh in over_ranks[0][name])
    assert wanted[0][0] != pytest.approx(wanted[-1][0], rel=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "least"),
    [("moving_digits", {"digit_match": 0.6, "direction_match": 0.8}), ("moe_mamba_lm", {"answer_accuracy": 0.95})],
)
def test_a_whole_example_learns(name: str, least: dict[str, float], tmp_path: Path) -> None:
    assert run(["train", str(EXAMPLES / name / "train.toml"), "--runs", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert summary["plans_fresh"] > 0.9 * summary["iterations"]
    for score, bound in least.items():
        assert summary["evaluation"][score] > bound, summary["evaluation"]


def test_videos_are_judged() -> None:
    task_of("moving_digits")
    from moving_digits import data, evaluate, model

    clips = data.held_out(6)
    real = [data.frames_of(data.video(clip)) for clip in clips]
    assert [evaluate.motion(frames) for frames in real] == [clip.direction for clip in clips]
    assert sum(evaluate.read(frames, clip) == clip.label for frames, clip in zip(real, clips, strict=True)) >= 5
    scores = evaluate.evaluate(model.text_layers(0), model.video_layers(0), num_clips=6)
    assert set(scores) == {"held_out_loss", "digit_match", "direction_match", "digit_match_real"}
    assert all(0 <= score <= 1 for name, score in scores.items() if name != "held_out_loss")


def test_the_language_model_states_shapes_that_hold_under_autocast() -> None:
    task = task_of("moe_mamba_lm")
    model, samples = task.build_model(seed=0), next(iter(task.batches(1, 2)))
    batch = batch_from_dicts([task.describe(sample) for sample in samples])
    layout = single_rank(model.spec, {})
    packing = pack(batch, model.spec, layout, PackingSpec(1000))
    # Measuring refuses a layer that gives another dtype than stated, as running does.
    assert measure_layers(model, packing, samples, options=MeasureOptions(repeats=1, autocast=torch.bfloat16))
