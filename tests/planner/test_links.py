"""Links that differ by the hosts of their ends: in graphs, plans, layouts and corrections."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.conversion import convert
from pipeloom.cost import Correction, between_s, link_table
from pipeloom.errors import InputError
from pipeloom.layout.links import closer, links_differ, neighbors, on_ranks, rank_distances
from pipeloom.plan import Measured, MessageTime, fit_links, to_text
from pipeloom.planner import PlanningProblem, answer_of, plan_batch
from pipeloom.planner.planning import PlannedBatch
from pipeloom.planner.problem_file import decode_problem, encode_problem
from pipeloom.runtime.execute.result import Calibrator
from pipeloom.runtime.launch.host_links import rounds
from pipeloom.search import Budget
from pipeloom.spec import HostLink, RankSpec, host_pair
from pipeloom.taskgraph import to_ns
from pipeloom.timeline import check
from tests.cases import random_batch
from tests.planner.cases import on_cluster, random_problem


def host_links(hosts: Sequence[int], rng: random.Random | None) -> tuple[HostLink, ...]:
    """A link for every two hosts and the inside of each: drawn, or all as the one that is usual."""
    usual = RankSpec()
    pairs = itertools.combinations_with_replacement(sorted(set(hosts)), 2)
    if rng is None:
        return tuple(HostLink(pair, usual.link_bytes_per_s, usual.link_latency_s) for pair in pairs)
    return tuple(HostLink(pair, 10 ** rng.uniform(5, 10), 10 ** rng.uniform(-6, -2)) for pair in pairs)


def on_hosts(seed: int, *, unlike: bool, everywhere: bool = False) -> tuple[PlanningProblem, PlanningProblem]:
    """A problem on one host, and the same on several."""
    rng = random.Random(seed)
    problem = random_problem(seed, everywhere=everywhere)
    hosts = tuple(rng.randrange(3) for _ in range(problem.layout.num_ranks))
    cluster = RankSpec(hosts=hosts, links=host_links(hosts, rng if unlike else None))
    return problem, on_cluster(problem, cluster)


def planned(problem: PlanningProblem, seed: int) -> PlannedBatch:
    return plan_batch(problem, random_batch(seed), budget=Budget(evaluations=60))


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.booleans())
def test_links_that_are_all_alike_change_nothing(seed: int, everywhere: bool) -> None:
    one, several = (planned(problem, seed) for problem in on_hosts(seed, unlike=False, everywhere=everywhere))
    assert to_text(one.plan) == to_text(several.plan)
    assert one.timeline.start_ns.tolist() == several.timeline.start_ns.tolist()
    assert one.lower_bound == several.lower_bound


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.booleans())
def test_every_message_takes_as_long_as_on_the_link_of_its_ranks(seed: int, everywhere: bool) -> None:
    _, problem = on_hosts(seed, unlike=True, everywhere=everywhere)
    found = planned(problem, seed)
    graph, timeline, costs = found.graph, found.timeline, problem.costs
    assert check(graph, found.schedule, timeline) == ()
    assert found.lower_bound.ns <= timeline.makespan_ns
    assert graph.labels is not None
    for source, target, delay in zip(graph.edge_source, graph.edge_target, graph.edge_delay_ns, strict=True):
        here, there = int(graph.rank[source]), int(graph.rank[target])
        # What is sent is the output of the pair above, forward and back.
        above = graph.pair[source if graph.kind[source] == 0 and graph.kind[target] == 0 else target]
        label = graph.labels[above]
        chunk = problem.layout.chunks[label.chunk]
        workload = found.packing.parts_of(label.microbatch, chunk.module)[label.sub_microbatch].workload
        if here == there:
            assert delay == 0
        elif chunk.module == "lm":
            seconds = between_s(costs, costs.boundary_bytes(chunk, workload), here, there)
            assert delay == to_ns(seconds, "a message")


def test_a_problem_with_links_survives_encoding() -> None:
    _, problem = on_hosts(3, unlike=True)
    assert decode_problem(encode_problem(problem)) == problem
    older = msgspec.json.decode(b'{"link_bytes_per_s": 1e8, "link_latency_s": 0.001}', type=RankSpec)
    assert older.link_between(0, 1) == 0
    assert older.transfer_s(10**8) == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"links": [{"hosts": [1, 0], "bytes_per_s": 1.0, "latency_s": 0.0}]}, "the smaller first"),
        ({"links": [{"hosts": [0, 1], "bytes_per_s": 0.0, "latency_s": 0.0}]}, "not positive"),
        ({"links": [{"hosts": [0, 1], "bytes_per_s": 1.0, "latency_s": 0.0}] * 2}, "twice"),
        ({"hosts": [0, -1]}, "hosts"),
    ],
)
def test_links_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        convert(wrong, RankSpec, "ranks")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_links_are_timed_once_each_and_no_host_is_in_two_at_once(hosts: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    for at_once in rounds(hosts):
        busy = [host for pair in at_once for host in set(pair)]
        assert len(set(busy)) == len(busy)
        for pair, (low, high) in at_once.items():
            assert low != high
            assert host_pair(hosts, low, high) == pair
        seen += at_once
    wanted = {host_pair(hosts, a, b) for a, b in itertools.combinations(range(len(hosts)), 2)}
    assert sorted(seen) == sorted(wanted)


def measured_over(found: PlannedBatch, cluster: RankSpec) -> tuple[Measured, list[MessageTime]]:
    """As if the plan had run, with waits as long as messages take over links."""
    plan = found.plan
    blank = Measured(tuple(np.zeros((len(actions), 2), np.int64) for actions in plan.ranks), (-1,) * plan.num_ranks)
    made = [
        each._replace(arrived_ns=to_ns(between(cluster, each), "a message") + 10**6, sent_ns=10**6)
        for each in blank.messages(plan)
    ]
    return blank, made


def between(cluster: RankSpec, message: MessageTime) -> float:
    return cluster.transfer_s(message.num_bytes, cluster.link_between(message.sender, message.receiver))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_corrections_come_to_what_messages_take(seed: int) -> None:
    _, problem = on_hosts(seed, unlike=True)
    cluster = problem.profile_costs.rank
    _, messages = measured_over(planned(problem, seed), cluster)
    known = Correction(hosts=cluster.hosts)
    for _ in range(80):
        known = known.towards(fit_links(messages, cluster.hosts), 0.1)
    assert known.link is None
    corrected = known.corrected(RankSpec())
    for each in messages:
        if each.was_waited_for:
            assert between(corrected, each) == pytest.approx(between(cluster, each), rel=0.01)
    # On one host there is one link.
    alone = Correction().towards(fit_links(messages, ()))
    assert (alone.links, alone.hosts) == ((), ())
    assert decode_again(known) == known


def decode_again(correction: Correction) -> Correction:
    return msgspec.json.decode(msgspec.json.encode(correction), type=Correction)


def test_the_calibrator_keeps_the_hosts() -> None:
    _, problem = next(p for p in (on_hosts(s, unlike=True) for s in range(50)) if p[1].layout.num_ranks == 4)
    found = planned(problem, 0)
    measured, _ = measured_over(found, problem.profile_costs.rank)
    calibrator = Calibrator(Correction(hosts=problem.profile_costs.rank.hosts), num_measured=1)
    calibrator.learn(answer_of(found, search_s=0.0, ready_ns=0), Correction(), measured)
    assert calibrator.correction.hosts == problem.profile_costs.rank.hosts


HOSTS = (0, 1, 0, 1)
FAR = RankSpec(
    hosts=HOSTS, links=(HostLink((0, 0), 1e10, 0.0), HostLink((0, 1), 1e7, 0.0), HostLink((1, 1), 1e10, 0.0))
)


def crossings(ranks: Sequence[int], hosts: Sequence[int]) -> int:
    return sum(hosts[a] != hosts[b] for a, b in itertools.pairwise(ranks))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000))
def test_the_same_chunks_are_put_on_ranks_that_are_close(seed: int) -> None:
    problem, several = on_hosts(seed, unlike=True)
    num_ranks = problem.layout.num_ranks
    assert not links_differ(rank_distances(problem.costs, num_ranks))
    assert neighbors(rank_distances(problem.costs, num_ranks)) == tuple(range(num_ranks))
    distances = rank_distances(several.costs, num_ranks)
    order = neighbors(distances)
    assert sorted(order) == list(range(num_ranks))
    for layout in [on_ranks(problem.layout, order), *(other for _, other in closer(problem.layout, distances))]:
        assert [c.layers for c in layout.chunks] == [c.layers for c in problem.layout.chunks]
        count = np.bincount([c.rank for c in layout.chunks], minlength=num_ranks)
        before = np.bincount([c.rank for c in problem.layout.chunks], minlength=num_ranks)
        assert sorted(count) == sorted(before)
        # It plans, and its plans are verified.
        planned(replace(several, layout=layout), seed)


def test_hosts_of_every_second_rank_are_brought_together() -> None:
    problem = next(s for s in map(random_problem, range(50)) if s.layout.num_ranks == 4)
    costs = on_cluster(problem, FAR).costs
    assert link_table(costs, 4)[0].tolist() == [1, 2, 1, 2]
    order = neighbors(rank_distances(costs, 4))
    assert crossings(range(4), HOSTS) == 3
    assert crossings(order, HOSTS) == 1
    there = on_ranks(problem.layout, order)
    found = dict(closer(there, rank_distances(costs, 4)))
    ranks = [c.rank for c in there.chunks]
    assert crossings([c.rank for c in found["group by group"].chunks], HOSTS) == 1
    assert crossings([c.rank for c in found["there and back"].chunks], HOSTS) < crossings(ranks, HOSTS)
