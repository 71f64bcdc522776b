"""What is run now beside the systems, and Pipeloom's gain over it in steps."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pipeloom.compare.answer import Question
from pipeloom.compare.baselines.dip import our_layout
from pipeloom.compare.baselines.megatron import megatron_1f1b, megatron_interleaved
from pipeloom.compare.comparison import Comparison
from pipeloom.compare.gain import packing_system, split_gain
from pipeloom.compare.iterations import Grouping, own_microbatches, sampled_iterations
from pipeloom.compare.model_on_cluster import ModelOnCluster, put_on_cluster
from pipeloom.compare.now import check_groups, held_as, megatron_group, now_system, run_costs, tuned_system
from pipeloom.compare.outcome import Outcome
from pipeloom.errors import InputError
from pipeloom.layout import layout_of_stages
from pipeloom.search import Budget, group_sizes, interleaved_one_f_one_b
from pipeloom.spec import ChunkStrategy, Sample
from pipeloom.spec.current_run import CurrentRun
from pipeloom.timeline import Schedule, check
from tests.compare.cases import shallow

ONE = Budget(evaluations=1)


def case_of(run: CurrentRun) -> ModelOnCluster:
    return put_on_cluster(shallow("vlm-7b", vision=6, lm=6), "8xH100", run.degrees(2))


def test_what_is_run_now_is_what_it_says() -> None:
    """The layout, order and recomputation of the words, and nothing else, on a graph that the checker accepts."""
    run = CurrentRun(pp=2, layout=(2, 4), recompute="full:0.5")
    setting = case_of(run)
    given = sampled_iterations(setting, None, Grouping(3), 0)
    found = now_system(setting, run).run(given.groups, ONE, 0)
    assert found.layout == layout_of_stages(setting.model, 2, (2, 4))
    assert held_as(run_costs(setting, run), found) == ChunkStrategy("recompute", 0.5)
    assert not check(found.graph, found.schedule, found.timeline)
    # 1F1B: rank 0 runs one forward ahead, then alternates.
    kinds = [int(found.graph.kind[task]) for task in found.schedule.order[1]]
    assert kinds[0] != kinds[-1]
    least = CurrentRun(pp=2, layout=(2, 4))
    assert now_system(setting, least).run(given.groups, ONE, 0).iteration_s <= found.iteration_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_schedule_runs(schedule: str) -> None:
    run = CurrentRun(pp=2, schedule=schedule, chunks=2 if schedule == "interleaved" else None)  # type: ignore[arg-type]
    setting = case_of(run)
    given = sampled_iterations(setting, None, Grouping(3), 0)
    found = now_system(setting, run).run(given.groups, ONE, 0)
    assert found.fits
    tuned = tuned_system(setting, run, given.typical).run(given.groups, ONE, 0)
    assert tuned.fits
    assert all(chunk.rank == 0 for chunk in tuned.layout.chunks if chunk.module == "vision")


def test_a_run_that_needs_too_much_is_timed_all_the_same() -> None:
    run = CurrentRun(pp=2, recompute="none")
    setting = case_of(run)
    given = sampled_iterations(setting, None, Grouping(3), 0)
    needs = now_system(setting, run).run(given.groups, ONE, 0)
    small = replace(setting, capacity_bytes=int(0.8 * needs.timeline.peak_bytes.max()))
    found = now_system(small, run).run(given.groups, ONE, 0)
    assert not found.fits
    assert found.iteration_s == needs.iteration_s
    # So is one whose weights alone need too much.
    tiny = replace(setting, capacity_bytes=int(0.5 * needs.graph.static_bytes.max()))
    found = now_system(tiny, run).run(given.groups, ONE, 0)
    assert not found.fits
    assert found.iteration_s == needs.iteration_s


def test_a_run_without_memory_for_its_workspace_does_not_fit() -> None:
    """As in `pipeloom emulate`: the peak of weights and activations alone does not exceed the memory."""
    run = CurrentRun(pp=2, recompute="none")
    setting = case_of(run)
    given = sampled_iterations(setting, None, Grouping(3), 0)
    needs = now_system(setting, run).run(given.groups, ONE, 0)
    for capacity, fits in ((setting.capacity_bytes, True), (int(needs.timeline.peak_bytes.max()), False)):
        bounded = replace(setting, capacity_bytes=capacity)
        found = now_system(bounded, run).run(given.groups, ONE, 0)
        one = Comparison("now", "Your setup", found.layout, found)
        row = Outcome(Question(bounded, given, Grouping(3), (), run), (one,)).row(one)
        assert row["fits"] == fits
        assert row["peak_memory_bytes"] <= capacity


def test_a_trainer_set_anew_is_no_slower_on_what_it_was_set_for() -> None:
    run = CurrentRun(pp=2, recompute="full")
    setting = case_of(run)
    given = sampled_iterations(setting, None, Grouping(4), 0)
    both = [given.groups]
    now, tuned = now_system(setting, run), tuned_system(setting, run, both)
    assert setting.iteration_s(tuned.run(given.groups, ONE, 0)) <= setting.iteration_s(now.run(given.groups, ONE, 0))
    assert tuned.choice is not None
    assert tuned.choice.seconds == setting.iteration_s


def test_steps_begin_with_the_layout_and_end_with_the_plan() -> None:
    run = CurrentRun(pp=2, recompute="full", microbatch_samples=1, pad_to=8192)
    setting = case_of(run)
    given = sampled_iterations(setting, None, Grouping(6, samples=1, pad_to=8192), 0)
    layout = our_layout(setting, given.typical)
    packed = packing_system("packed", setting, layout, 8192).run(given.real.groups, Budget(evaluations=20), 0)
    assert not check(packed.graph, packed.schedule, packed.timeline)
    steps = split_gain(setting, run, given.groups, packed, ONE)
    assert [step.name for step in steps] == ["layout", "packing", "order", "memory"]
    assert steps[-1].iteration_s == setting.iteration_s(packed)
    # The first step has my layout replaced alone; with my own layout it would be what I run.
    mine = now_system(setting, run)
    other = replace(packed, layout=mine.layout)
    (first, *_), now = split_gain(setting, run, given.groups, other, ONE), mine.run(given.groups, ONE, 0)
    assert first.iteration_s == pytest.approx(setting.iteration_s(now))
    # Samples that are no longer padded are a third as long.
    assert steps[1].iteration_s < steps[0].iteration_s
    assert steps[2].iteration_s <= steps[1].iteration_s


def test_padding_changes_what_is_computed_and_not_what_is_learnt() -> None:
    run = CurrentRun(pp=2)
    setting = case_of(run)
    plain = sampled_iterations(setting, None, Grouping(4, samples=2), 0)
    padded = sampled_iterations(setting, None, Grouping(4, samples=2, pad_to=9000), 0)
    assert padded.real == plain.real == plain
    assert all(s.sequence_tokens == 9000 for group in padded.groups for s in group)
    assert [len(group) for group in padded.groups] == [2] * 4
    ours, theirs = (now_system(setting, run).run(each.groups, ONE, 0) for each in (plain, padded))
    assert ours.iteration_s < theirs.iteration_s


def test_videos_go_together_by_their_size() -> None:
    setting = put_on_cluster("t2v-s", "8xH100", CurrentRun(pp=2, tp=4).degrees(8))
    with pytest.raises(InputError, match="reads videos, which are grouped by size"):
        sampled_iterations(setting, None, Grouping(3, pad_to=100), 0)
    clips = [
        Sample(f"s{i}", video_seconds=each, video_height=(480,) * len(each), video_width=(832,) * len(each))
        for i, each in enumerate([(60.0,), (5.0, 6.0), (40.0,)])
    ]
    # None is cut. The longest sample limits a microbatch.
    assert own_microbatches(setting.architecture, clips, Grouping(3)) == [[clips[0]], [clips[1], clips[2]]]


def test_batches_of_a_model_have_their_own_size() -> None:
    """Another one is refused. Files of trainers always have one, which may be the same."""
    setting, batches = case_of(CurrentRun(pp=2)), [[Sample("a", 30), Sample("b", 50)], [Sample("c", 20)]]
    for grouping in (Grouping(3, pad_to=64), Grouping(3, tokens=80), Grouping(3, samples=2)):
        given = sampled_iterations(setting, None, grouping, 0, batches)
        assert [len(group) for group in given.groups] == [2, 1, 2]
    for grouping, size in ((Grouping(3, tokens=8192), "8192 tokens"), (Grouping(3, samples=8), "8 samples")):
        with pytest.raises(InputError, match=f"microbatches: of {size} are set, but they are the batches that came"):
            sampled_iterations(setting, None, grouping, 0, batches)


def test_batches_of_a_model_that_are_left_out_are_noted() -> None:
    setting, batches = case_of(CurrentRun(pp=2)), [[Sample(str(n), 30 + n)] for n in range(5)]
    given = sampled_iterations(setting, None, Grouping(3), 0, batches)
    note = "the model comes with 5 batches, of which the first 3 are the microbatches"
    assert note in given.notes
    assert all("batches" not in each for each in sampled_iterations(setting, None, Grouping(5), 0, batches).notes)


def test_padding_counts_in_the_tokens_of_a_microbatch() -> None:
    setting = put_on_cluster(shallow("llama3-8b", lm=6), "8xH100", CurrentRun(pp=2).degrees(2))
    given = sampled_iterations(setting, None, Grouping(3, tokens=8192, pad_to=2048), 0)
    assert [sum(sample.sequence_tokens for sample in group) for group in given.groups] == [8192] * 3
    # Samples of data sets are cut to a microbatch, as without padding.
    vlm = case_of(CurrentRun(pp=2))
    given = sampled_iterations(vlm, "datamix1", Grouping(40, tokens=8192, pad_to=8192), 0)
    assert [len(group) for group in given.groups] == [1] * 40
    with pytest.raises(InputError, match="pad_to: 2048 is above the 1024 tokens of a microbatch"):
        sampled_iterations(setting, None, Grouping(3, tokens=1024, pad_to=2048), 0)


def test_untold_it_is_megatrons_layout_of_a_language_model() -> None:
    run = CurrentRun(pp=2)
    setting = put_on_cluster(shallow("llama3-8b", lm=6), "8xH100", run.degrees(2))
    given = sampled_iterations(setting, None, Grouping(3), 0)
    mine = now_system(setting, run)
    theirs = megatron_1f1b(setting, given.typical)
    assert [c.rank for c in mine.layout.chunks] == [c.rank for c in theirs.layout.chunks]
    blocks = np.array([chunk.num_layers for chunk in mine.layout.chunks])
    assert blocks.tolist() == [4, 4]  # three blocks each, embedding or head


def test_groups_of_microbatches_change_the_order() -> None:
    orders = []
    for group in (None, 2, 4):
        run = CurrentRun(pp=2, chunks=2, recompute="full", group=group)
        setting = case_of(run)
        found = now_system(setting, run).run(sampled_iterations(setting, None, Grouping(4), 0).groups, ONE, 0)
        orders.append([tasks.tolist() if hasattr(tasks, "tolist") else list(tasks) for tasks in found.schedule.order])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("count", [3, 4, 5, 7, 8])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_timed_interleaved_is_what_megatron_accepts(count: int, ranks: int) -> None:
    """Every order with several stages a rank has a group size that Megatron takes, and the words name it."""
    run = CurrentRun(pp=ranks, chunks=2)
    setting = put_on_cluster(shallow("vlm-7b", vision=6, lm=6), "8xH100", run.degrees(ranks))
    given = sampled_iterations(setting, None, Grouping(count), 0)
    size = group_sizes(ranks, count)[0]
    assert megatron_group(run, count) == (None if size == ranks else size)
    for made in (
        tuned_system(setting, run, given.typical).run(given.groups, ONE, 0),
        megatron_interleaved(setting, given.typical).run(given.groups, ONE, 0),
    ):
        several = len(made.layout.chunks) > 2 * ranks
        as_megatron = interleaved_one_f_one_b(made.graph, size) if several else None
        assert as_megatron is None or _orders(made.schedule) == _orders(as_megatron)
    if size == ranks:
        check_groups(run, count)
    else:
        with pytest.raises(
            InputError, match=f"group: {ranks} does not suit {count} microbatches on {ranks} ranks; use"
        ):
            check_groups(run, count)
    check_groups(msgspec.structs.replace(run, group=size), count)


def _orders(schedule: Schedule) -> list[list[int]]:
    return [[int(task) for task in tasks] for tasks in schedule.order]


def test_fewer_microbatches_than_ranks_run_by_one_f_one_b() -> None:
    run = CurrentRun(pp=2, chunks=2)
    setting = case_of(run)
    given = sampled_iterations(setting, None, Grouping(1), 0)
    with pytest.raises(InputError, match="group: 2 does not suit 1 microbatches on 2 ranks; use more microbatches"):
        check_groups(run, 1)
    check_groups(msgspec.structs.replace(run, source="run.toml, of torchtitan"), 1)
    for made in (
        tuned_system(setting, run, given.typical).run(given.groups, ONE, 0),
        megatron_interleaved(setting, given.typical).run(given.groups, ONE, 0),
    ):
        ranks = [chunk.rank for chunk in made.layout.chunks]
        assert ranks == sorted(ranks)


def test_other_settings_of_a_trainer_may_allow_one_schedule_alone() -> None:
    for only, most in (("1f1b", True), ("interleaved", False)):
        run = CurrentRun(pp=2, only=only)  # type: ignore[arg-type]
        setting = case_of(run)
        given = sampled_iterations(setting, None, Grouping(4), 0)
        ranks = [chunk.rank for chunk in tuned_system(setting, run, given.typical).layout.chunks]
        assert (ranks == sorted(ranks)) == most
