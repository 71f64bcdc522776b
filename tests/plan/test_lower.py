from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError, PlanError
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import (
    Action,
    ExecutionPlan,
    Unit,
    Verb,
    boundary_shapes,
    joined_posts,
    lower,
    make_routes,
    to_text,
    verify,
)
from pipeloom.plan.dryrun import dry_run
from pipeloom.plan.messages import messages_of
from pipeloom.spec import Batch, Chunk, LayerSpec, Layout, ModelSpec, ModuleLayout, ModuleSpec, Sample, TensorShape
from pipeloom.timeline import Schedule

from .cases import EVERY_STRATEGY, Case, random_case

SEEDS = st.integers(0, 10**9)


@given(SEEDS)
def test_every_lowered_plan_verifies(seed: int) -> None:
    case = random_case(seed, strategies=EVERY_STRATEGY)
    plan = case.plan
    verify(plan, case.layout, case.packing)
    assert dry_run(plan, "gloo") is None


@given(SEEDS)
def test_every_task_is_one_action_in_the_order_of_the_schedule(seed: int) -> None:
    case = random_case(seed)
    names = case.layout.chunk_names
    assert case.graph.labels is not None
    for order, actions in zip(case.schedule.order, case.plan.ranks, strict=True):
        expected = []
        for task in map(case.graph.task, order.tolist()):
            label = case.graph.labels[task.pair]
            expected.append((task.kind, names[label.chunk], label.microbatch, label.sub_microbatch))
        assert expected == [(a.verb, a.chunk, a.microbatch, a.sub_microbatch) for a in actions if a.verb.is_compute]


@given(SEEDS, st.randoms(use_true_random=False))
def test_any_times_give_a_legal_plan(seed: int, rng: object) -> None:
    case = random_case(seed)
    noise = np.random.default_rng(seed).integers(0, 10**7, case.graph.num_tasks)
    timeline = replace(case.timeline, start_ns=noise, end_ns=noise + case.graph.duration_ns)
    verify(replace(case, timeline=timeline).plan, case.layout, case.packing)


def remove(plan: ExecutionPlan, rank: int, step: int) -> ExecutionPlan:
    ranks = [list(actions) for actions in plan.ranks]
    del ranks[rank][step]
    return ExecutionPlan(plan.num_ranks, plan.iteration, plan.layout, tuple(map(tuple, ranks)))


def put(plan: ExecutionPlan, rank: int, step: int, action: Action) -> ExecutionPlan:
    ranks = [list(actions) for actions in plan.ranks]
    ranks[rank][step] = action
    return ExecutionPlan(plan.num_ranks, plan.iteration, plan.layout, tuple(map(tuple, ranks)))


def with_fields(action: Action, **changes: object) -> Action:
    fields = {name: getattr(action, name) for name in action.__struct_fields__}
    return Action(**(fields | changes))  # type: ignore[arg-type]


@given(SEEDS, st.data())
def test_a_dropped_action_is_caught(seed: int, data: st.DataObject) -> None:
    case = random_case(seed, strategies=EVERY_STRATEGY)
    plan = case.plan
    places = [(r, s) for r, actions in enumerate(plan.ranks) for s in range(len(actions))]
    rank, step = data.draw(st.sampled_from(places))
    with pytest.raises(PlanError):
        verify(remove(plan, rank, step), case.layout, case.packing)


def crossing_case(seed: int, num_ranks: int = 3) -> Case:
    """A case with messages: the first one from the seed on."""
    while True:
        case = random_case(seed, num_ranks)
        if any(a.verb == Verb.SEND_F for actions in case.plan.ranks for a in actions):
            return case
        seed += 1


@given(SEEDS, st.data())
def test_two_messages_of_a_pair_swapped_at_one_end_are_caught(seed: int, data: st.DataObject) -> None:
    case = crossing_case(seed, 2)
    plan = case.plan
    rank = data.draw(st.sampled_from([0, 1]))
    posts = [s for s, a in enumerate(plan.ranks[rank]) if a.peer is not None]
    if len(posts) < 2:
        return
    i = data.draw(st.integers(0, len(posts) - 2))
    first, second = posts[i], posts[i + 1]
    a, b = plan.ranks[rank][first], plan.ranks[rank][second]
    with pytest.raises(PlanError):
        verify(put(put(plan, rank, first, b), rank, second, a), case.layout, case.packing)


@given(SEEDS, st.data(), st.sampled_from(["shape", "dtype", "peer", "chunk"]))
def test_a_changed_message_is_caught(seed: int, data: st.DataObject, field: str) -> None:
    case = crossing_case(seed)
    plan = case.plan
    posts = [(r, s) for r, actions in enumerate(plan.ranks) for s, a in enumerate(actions) if a.shape]
    rank, step = data.draw(st.sampled_from(posts))
    action = plan.ranks[rank][step]
    assert action.shape is not None
    assert action.peer is not None
    changed = {
        "shape": (action.shape[0] + 1, *action.shape[1:]),
        "dtype": "float16",
        "peer": 3 - rank - action.peer,
        "chunk": "nobody.0",
    }
    with pytest.raises(PlanError):
        verify(put(plan, rank, step, with_fields(action, **{field: changed[field]})), case.layout, case.packing)


@given(SEEDS, st.data())
def test_any_damage_is_reported_as_a_plan_error(seed: int, data: st.DataObject) -> None:
    case = random_case(seed, strategies=EVERY_STRATEGY)
    plan = case.plan
    rank, step = data.draw(st.sampled_from([(r, s) for r, a in enumerate(plan.ranks) for s in range(len(a))]))
    values: dict[str, st.SearchStrategy[object]] = {
        "verb": st.sampled_from(Verb),
        "chunk": st.sampled_from(["", "nobody.0", *case.layout.chunk_names]),
        "microbatch": st.integers(-1, 3),
        "sub_microbatch": st.integers(-1, 3),
        "peer": st.sampled_from([None, -1, 0, 1, 9]),
        "shape": st.sampled_from([None, (), (1, 2)]),
    }
    field = data.draw(st.sampled_from(sorted(values)))
    changed = with_fields(plan.ranks[rank][step], **{field: data.draw(values[field])})
    with contextlib.suppress(PlanError):  # nothing else may come out; some changes are harmless
        verify(put(plan, rank, step, changed), case.layout, case.packing)


def test_the_message_shows_the_place() -> None:
    case = crossing_case(1, 2)
    plan = case.plan
    rank, step = next((r, s) for r in (0, 1) for s, a in enumerate(plan.ranks[r]) if a.verb == Verb.SEND_F)
    with pytest.raises(PlanError) as caught:
        verify(remove(plan, rank, step))
    message = str(caught.value)
    assert "rank 0 step" in message
    assert "rank 1 step" in message
    assert ">" in message


def test_crossed_messages_pass_gloo_but_not_nccl() -> None:
    def message(verb: Verb, sub: int, peer: int | None = None) -> Action:
        if peer is None:
            return Action(verb=verb, chunk="a.0", sub_microbatch=sub)
        return Action(verb=verb, chunk="a.0", sub_microbatch=sub, peer=peer, shape=(1,), dtype="float32")

    plan = ExecutionPlan(
        2,
        0,
        "x",
        (
            (
                message(Verb.SEND_F, 0, 1),
                message(Verb.SEND_F, 1, 1),
                message(Verb.WAIT_SEND_F, 0),
                message(Verb.WAIT_SEND_F, 1),
            ),
            (message(Verb.RECV_F, 1, 0), message(Verb.RECV_F, 0, 0), message(Verb.WAIT_F, 0), message(Verb.WAIT_F, 1)),
        ),
    )
    assert dry_run(plan, "gloo") is None
    with pytest.raises(PlanError, match="not under gloo's, which match tags"):
        verify(plan)


def test_opposite_waits_deadlock_under_both_rules() -> None:
    fields = {"shape": (1,), "dtype": "float32"}
    plan = ExecutionPlan(
        2,
        0,
        "x",
        tuple(
            (
                Action(verb=Verb.RECV_F, chunk=f"a.{1 - r}", peer=1 - r, **fields),
                Action(verb=Verb.WAIT_F, chunk=f"a.{1 - r}"),
                Action(verb=Verb.SEND_F, chunk=f"a.{r}", peer=1 - r, **fields),
                Action(verb=Verb.WAIT_SEND_F, chunk=f"a.{r}"),
            )
            for r in (0, 1)
        ),
    )
    stop = dry_run(plan, "gloo")
    assert stop is not None
    assert stop.reason == "rank 0 waits forever at 'WAIT_F a.1 0.0'"
    assert stop.steps == (1, 1)
    with pytest.raises(PlanError, match="NCCL's and gloo's"):
        verify(plan)


def two_rank_chain() -> Case:
    """The simplest pipeline with one message each way, found among the random ones."""
    seed = 0
    while True:
        case = random_case(seed, 2, split=False, strategies=("keep",))
        if len(case.layout.chunks) == 2 and len(case.packing.microbatches) == 1 and Verb.SEND_F in to_text(case.plan):
            verbs = [[a.verb for a in actions] for actions in case.plan.ranks]
            if sum(map(len, verbs)) == 14 and Verb.SEND_B in to_text(case.plan):
                return case
        seed += 1


def test_a_chain_of_two_by_hand() -> None:
    case = two_rank_chain()
    first = case.layout.chunks[0].rank
    verbs = [" ".join(a.verb for a in case.plan.ranks[r]) for r in (first, 1 - first)]
    assert verbs == [
        "F SEND_F WAIT_SEND_F RECV_B WAIT_B B OPTIMIZER_STEP",
        "RECV_F WAIT_F F B SEND_B WAIT_SEND_B OPTIMIZER_STEP",
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_message_that_is_there_twice_is_refused(seed: int) -> None:
    """One of the same name between two other ranks was taken for it."""
    case = crossing_case(seed, 4)
    plan = case.plan
    ranks = [list(actions) for actions in plan.ranks]
    sender, sent = next((r, a) for r, actions in enumerate(ranks) for a in actions if a.verb == Verb.SEND_F)
    name = (sent.chunk, sent.microbatch, sent.sub_microbatch, sent.target)
    waits = {a.verb: a for r in ranks for a in r if (a.chunk, a.microbatch, a.sub_microbatch, a.target) == name}
    first, second = (r for r in range(4) if r not in (sender, sent.peer))
    ranks[first] = [with_fields(sent, peer=second), waits[Verb.WAIT_SEND_F], *ranks[first]]
    ranks[second] = [with_fields(sent, verb=Verb.RECV_F, peer=first), waits[Verb.WAIT_F], *ranks[second]]
    twice = ExecutionPlan(plan.num_ranks, plan.iteration, plan.layout, tuple(map(tuple, ranks)))
    with pytest.raises(PlanError, match=r"without a consumer|is missing on"):
        verify(twice, case.layout, case.packing)


def test_receives_are_posted_before_the_computation_that_runs_when_they_arrive() -> None:
    early = 0
    for seed in range(40):
        plan = random_case(seed, 3).plan
        for actions in plan.ranks:
            posted = [s for s, a in enumerate(actions) if a.verb.is_receive]
            for step in posted:
                action = actions[step]
                wait = next(
                    s
                    for s, a in enumerate(actions)
                    if a.verb == action.verb.wait
                    and (a.chunk, a.microbatch, a.sub_microbatch, a.target)
                    == (action.chunk, action.microbatch, action.sub_microbatch, action.target)
                )
                early += any(a.verb.is_compute for a in actions[step:wait])
    assert early > 0


def test_a_schedule_against_the_arrows_is_refused() -> None:
    case = random_case(5, 1)
    backwards = Schedule((case.schedule.order[0][::-1].copy(),), case.schedule.candidate)
    with pytest.raises(PlanError, match="deadlock"):
        _ = replace(case, schedule=backwards).plan


def test_a_missing_task_is_refused() -> None:
    case = random_case(5, 1)
    short = Schedule((case.schedule.order[0][:-1],), case.schedule.candidate)
    with pytest.raises(PlanError, match="missing"):
        _ = replace(case, schedule=short).plan


def test_another_packing_is_refused() -> None:
    case = crossing_case(2)
    seed = 3
    while (other := random_case(seed, model=case.model)).packing.microbatches == case.packing.microbatches or len(
        other.packing.microbatches
    ) == len(case.packing.microbatches):
        seed += 1
    with pytest.raises((InputError, PlanError)):
        lower(
            case.graph,
            case.schedule,
            case.timeline,
            case.layout,
            other.packing,
            boundary_shapes(case.model, case.layout),
        )


def test_gradients_are_reduced_in_one_order_when_data_parallel() -> None:
    case = random_case(11, 1)
    from pipeloom.spec import Parallelism

    layout = Layout(1, case.layout.modules, case.layout.chunks, Parallelism(data=2))
    plan = replace(case, layout=layout).plan
    reduced = [a.chunk for a in plan.ranks[0] if a.verb == Verb.REDUCE_GRAD]
    trained = [
        name
        for name, chunk in zip(layout.chunk_names, layout.chunks, strict=True)
        if not layout.module(chunk.module).frozen
    ]
    assert reduced == trained[::-1]
    assert plan.ranks[0][-1].verb == Verb.OPTIMIZER_STEP


def test_parts_of_other_sizes_take_rows_of_all_parts_that_they_cover() -> None:
    rng = random.Random(0)
    model = ModelSpec(
        "two",
        tuple(
            ModuleSpec(name, "images", (LayerSpec(name, TensorShape(("tokens", 3))),), after)
            for name, after in (("vision", ()), ("adapter", ("vision",)))
        ),
    )
    batch = Batch(tuple(Sample(str(i), 1, (1, 2, 3)) for i in range(2)))
    layout = Layout(
        1,
        (ModuleLayout("vision", sub_microbatch=2), ModuleLayout("adapter", ("vision",), sub_microbatch=3)),
        (Chunk("vision", (0, 0), 0), Chunk("adapter", (0, 0), 0)),
    )
    packing = pack(batch, model, layout, PackingSpec(100, "first_fit"))
    units = [Unit(0, 0, sub) for sub in range(3)] + [Unit(1, 0, sub) for sub in range(2)]
    rng.shuffle(units)
    routes = make_routes(layout, packing, units)
    assert [(h.producer[2], h.consumer[2], h.piece) for h in routes.transfers] == [
        (0, 0, None),
        (1, 0, (0, 1)),
        (1, 1, (1, 1)),
        (2, 1, None),
    ]


@given(SEEDS, st.booleans())
def test_a_plan_for_one_communicator_verifies_under_every_rule(seed: int, anyhow: bool) -> None:
    case = random_case(seed, strategies=EVERY_STRATEGY)
    plan = (case.at_any_times(seed) if anyhow else case).serial_plan
    verify(plan, case.layout, case.packing, single_communicator=True)
    assert dry_run(plan, "gloo") is None


def test_a_plan_for_communicators_of_pairs_may_stop_where_there_is_one() -> None:
    # At simulated times messages are lowered in the order of each rank's list anyway.
    plans = [random_case(seed, 4).at_any_times(seed).plan for seed in range(40)]
    stopped = [plan for plan in plans if dry_run(plan, "nccl serial") is not None]
    assert stopped
    assert all(dry_run(plan, "nccl") is None for plan in plans)
    with pytest.raises(PlanError, match="lower it with single_communicator=True"):
        verify(stopped[0], single_communicator=True)


@given(SEEDS)
def test_operations_are_the_same_messages_at_both_ends(seed: int) -> None:
    case = random_case(seed)
    for plan in (case.plan, case.at_any_times(seed).plan):
        operations = [joined_messages(plan, rank) for rank in range(plan.num_ranks)]
        for rank, mine in enumerate(operations):
            for peer, messages in mine:
                assert (rank, messages) in operations[peer]


def test_messages_are_joined() -> None:
    plans = [random_case(seed, 2 + seed % 3).serial_plan for seed in range(20)]
    sizes = [len(m) for plan in plans for rank in range(plan.num_ranks) for _, m in joined_messages(plan, rank)]
    assert max(sizes) > 1


def joined_messages(plan: ExecutionPlan, rank: int) -> list[tuple[int, tuple[int, ...]]]:
    """Operations of a rank: peer and messages of each."""
    joined, row = joined_posts(plan, rank), messages_of(plan)[rank]
    found: list[tuple[int, tuple[int, ...]]] = []
    grows = False
    for step, action in enumerate(plan.ranks[rank]):
        message = row[step]
        if not action.verb.is_post or message is None:
            assert not grows
            continue
        assert action.peer is not None
        if grows:
            peer, before = found.pop()
            assert peer == action.peer
            found.append((peer, (*before, message)))
        else:
            found.append((action.peer, (message,)))
        grows = step in joined
    assert not grows
    return found


def test_ranks_that_all_send_first_wait_for_each_other() -> None:
    def post(verb: Verb, chunk: str, peer: int) -> Action:
        return Action(verb=verb, chunk=chunk, peer=peer, shape=(1,), dtype="float32")

    def wait(verb: Verb, chunk: str) -> Action:
        return Action(verb=verb, chunk=chunk)

    # A ring of which each rank sends on, and receives.
    ring = [
        (
            post(Verb.SEND_F, f"a.{r}", (r + 1) % 3),
            post(Verb.RECV_F, f"a.{(r - 1) % 3}", (r - 1) % 3),
            wait(Verb.WAIT_F, f"a.{(r - 1) % 3}"),
            wait(Verb.WAIT_SEND_F, f"a.{r}"),
        )
        for r in range(3)
    ]
    send, receive, *waits = ring[0]
    assert dry_run(ExecutionPlan(3, 0, "x", tuple(ring)), "nccl") is None
    assert dry_run(ExecutionPlan(3, 0, "x", tuple(ring)), "nccl serial") is not None
    ring[0] = (receive, send, *waits)
    assert dry_run(ExecutionPlan(3, 0, "x", tuple(ring)), "nccl serial") is None


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_the_only_strategy_of_a_graph_is_in_its_plan(strategy: str) -> None:
    case = random_case(17, strategies=(strategy,))
    assert case.graph.candidates is None
    plan = case.plan
    verify(plan, case.layout, case.packing)
    units = {
        (a.chunk, a.microbatch, a.sub_microbatch): a for actions in plan.ranks for a in actions if a.verb is Verb.F
    }
    for actions in plan.ranks:
        for verb, words in (
            (Verb.RECOMPUTE, {"recompute", "selective"}),
            (Verb.OFFLOAD, {"offload"}),
            (Verb.LOAD, {"offload"}),
        ):
            done = {(a.chunk, a.microbatch, a.sub_microbatch) for a in actions if a.verb == verb}
            backs = {(a.chunk, a.microbatch, a.sub_microbatch) for a in actions if a.verb in (Verb.B, Verb.I)}
            assert done == {unit for unit in backs if words & set(units[unit].strategy.split(","))}


@pytest.mark.parametrize("strategy", ["keep", "sometimes"])
def test_a_plan_whose_actions_are_not_its_strategies_is_refused(strategy: str) -> None:
    case = random_case(17, strategies=("recompute",))
    ranks = [
        tuple(msgspec.structs.replace(a, strategy=strategy) if a.verb is Verb.F else a for a in actions)
        for actions in case.plan.ranks
    ]
    plan = msgspec.structs.replace(case.plan, ranks=tuple(ranks))
    with pytest.raises(PlanError, match=r"is not in the strategy of its F|'sometimes' is not one of"):
        verify(plan)


def test_a_number_beyond_64_bits_is_refused() -> None:
    plan = random_case(1).plan
    action = with_fields(plan.ranks[0][0], microbatch=1 << 70)
    with pytest.raises(PlanError, match="beyond 64 bits"):
        verify(put(plan, 0, 0, action))
