from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.plan import Action, ExecutionPlan, Verb, from_msgpack, from_text, to_msgpack, to_text

from .cases import EVERY_STRATEGY, random_case

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,5}\.[0-9]{1,2}", fullmatch=True)
SMALL = st.integers(0, 10**4)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    verb = draw(st.sampled_from(get_args(Verb)))
    if verb == "OS":
        return Action(verb=verb)
    if verb in ("UN", "RG"):
        return Action(verb=verb, chunk=draw(NAMES))
    fields = {"verb": verb, "chunk": draw(NAMES), "microbatch": draw(SMALL), "sub_microbatch": draw(SMALL)}
    if verb == "F":
        fields["strategy"] = draw(st.sampled_from(["", "keep", "recompute", "keep,recompute,offload"]))
    if verb[0] in "SR" or verb in ("WF", "WB", "DF", "DB"):
        fields["target"] = draw(st.one_of(st.just(""), NAMES))
    if verb in ("SF", "SB", "RF", "RB"):
        fields["peer"] = draw(SMALL)
        fields["shape"] = tuple(draw(st.lists(SMALL, max_size=4)))
        fields["dtype"] = draw(st.sampled_from(["float32", "bfloat16"]))
    if verb == "RC":
        fields.pop("target", None)
    return Action(**fields)


PLANS = st.builds(
    lambda ranks, iteration, layout: ExecutionPlan(len(ranks), iteration, layout, tuple(map(tuple, ranks))),
    st.lists(st.lists(actions(), max_size=8), min_size=1, max_size=4),
    SMALL,
    st.text("0123456789abcdef", min_size=1, max_size=8),
)


@settings(deadline=None, max_examples=150)
@given(PLANS)
def test_text_and_wire_round_trip(plan: ExecutionPlan) -> None:
    assert from_text(to_text(plan)) == plan
    assert to_text(from_text(to_text(plan))) == to_text(plan)
    assert from_msgpack(to_msgpack(plan)) == plan


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**9))
def test_lowered_plans_round_trip(seed: int) -> None:
    plan = random_case(seed, strategies=EVERY_STRATEGY).plan
    assert from_text(to_text(plan)) == plan
    assert from_msgpack(to_msgpack(plan)) == plan


TEXT = """\
pipeloom.plan/1 ranks=2 iteration=17 layout=3f2a
rank 0
F  vision.0 3.0 keep
SF vision.0 3.0 to=1 shape=12,169,64 dtype=float32
RB vision.0 3.0 from=1 shape=12,169,64 dtype=float32
DF vision.0 3.0
WB vision.0 3.0
B  vision.0 3.0
RG vision.0
OS
rank 1
RF vision.0 3.0 from=0 shape=12,169,64 dtype=float32
WF vision.0 3.0
F  lm.0 3.0 keep,recompute
B  lm.0 3.0
SB vision.0 3.0 to=0 shape=12,169,64 dtype=float32
DB vision.0 3.0
OS
"""


def test_the_format_is_as_documented() -> None:
    plan = from_text(TEXT)
    assert to_text(plan) == TEXT
    assert plan.ranks[0][1] == Action(
        verb="SF", chunk="vision.0", microbatch=3, peer=1, shape=(12, 169, 64), dtype="float32"
    )
    assert from_text(TEXT.replace("F  vision", "F vision")) == plan


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("pipeloom.plan/1", "pipeloom.plan/2", "line 1"),
        ("ranks=2", "ranks=two", "line 1: 'two'"),
        ("ranks=2 ", "", "line 1: has no ranks="),
        ("ranks=2", "ranks=3", "has 2 ranks, its header says 3"),
        ("rank 1", "rank 2", "line 11"),
        ("rank 0\n", "", "line 2"),
        ("F  vision.0 3.0 keep", "G  vision.0 3.0 keep", "line 3: unknown verb 'G'"),
        ("F  vision.0 3.0 keep", "F  vision.0 3 keep", "line 3: '3' is no"),
        ("F  vision.0 3.0 keep", "F  vision.0", "line 3: F has no microbatch"),
        ("F  vision.0 3.0 keep", "F", "line 3: F has no chunk"),
        ("to=1 shape", "from=1 shape", "line 4: SF takes no from="),
        ("to=1 shape", "to=-1 shape", "line 4: '-1'"),
        ("to=1 shape=12,169,64", "to=1", "line 4: SF needs"),
        ("to=1 shape=12", "to=1 shape=x", "line 4: 'x'"),
        ("to=1 ", "to=1 to=1 ", "line 4: to= occurs twice"),
        ("to=1 ", "to=1 colour=red ", "line 4: unexpected 'colour=red'"),
        ("WB vision.0 3.0", "WB vision.0 3.0 keep", "line 7: WB takes no strategy"),
        ("B  vision.0 3.0\nRG", "B  vision.0 3.0 target=lm.0\nRG", "line 8: B takes no target"),
        ("RG vision.0", "RG vision.0 1.0", "line 9: RG takes a chunk only"),
        ("OS\nrank", "OS now\nrank", "line 10: OS takes no words"),
    ],
)
def test_mistakes_are_told_with_their_line(old: str, new: str, where: str) -> None:
    assert old in TEXT
    with pytest.raises(InputError) as caught:
        from_text(TEXT.replace(old, new, 1))
    assert where in str(caught.value)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(InputError, match="line 1"):
        from_text("")


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": [[{"verb": "XX"}]]},
        {"ranks": [[{"verb": "SF", "chunk": "a.0"}]]},
        {"ranks": [[{"verb": "F", "chunk": "a.0", "microbatch": -1}]]},
        {"ranks": [[{"verb": "F", "chunk": "a b"}]]},
        {"ranks": []},
        {"format": "pipeloom.plan/9"},
    ],
)
def test_garbage_on_the_wire_is_refused(change: dict[str, object]) -> None:
    plain = {
        "num_ranks": 1,
        "iteration": 0,
        "layout": "x",
        "ranks": [[{"verb": "OS"}]],
        "format": "pipeloom.plan/1",
    }
    assert from_msgpack(msgspec.msgpack.encode(plain)).ranks == ((Action(verb="OS"),),)
    with pytest.raises(InputError):
        from_msgpack(msgspec.msgpack.encode(plain | change))
    with pytest.raises(InputError):
        from_msgpack(b"\xff\x00")
