from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.plan import Action, ExecutionPlan, Verb, from_msgpack, from_text, to_msgpack, to_text
from pipeloom.spec import EmittedStream, LayerSpec, ModelSpec, ModuleSpec, StreamEnd, TensorShape
from pipeloom.spec.model import MOST_LAYERS

from .cases import EVERY_STRATEGY, random_case

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,5}\.[0-9]{1,2}", fullmatch=True)
SMALL = st.integers(0, 10**4)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    verb = draw(st.sampled_from(Verb))
    if verb is Verb.OPTIMIZER_STEP:
        return Action(verb=verb)
    if verb.is_chunk:
        return Action(verb=verb, chunk=draw(NAMES))
    fields = {"verb": verb, "chunk": draw(NAMES), "microbatch": draw(SMALL), "sub_microbatch": draw(SMALL)}
    if verb == "F":
        fields["strategy"] = draw(st.sampled_from(["", "keep", "recompute", "keep,recompute,offload"]))
    if verb.is_message:
        fields["target"] = draw(st.one_of(st.just(""), NAMES))
    if verb.is_post:
        fields["peer"] = draw(SMALL)
        fields["shape"] = tuple(draw(st.lists(SMALL, max_size=4)))
        fields["dtype"] = draw(st.sampled_from(["float32", "bfloat16"]))
    if verb == Verb.RECOMPUTE:
        fields.pop("target", None)
    return Action(**fields)


PLANS = st.builds(
    lambda ranks, iteration, layout: ExecutionPlan(len(ranks), iteration, layout, tuple(map(tuple, ranks))),
    st.lists(st.lists(actions(), max_size=8), min_size=1, max_size=4),
    SMALL,
    st.text("0123456789abcdef", min_size=1, max_size=8),
)


@given(PLANS)
def test_text_and_wire_round_trip(plan: ExecutionPlan) -> None:
    assert from_text(to_text(plan)) == plan
    assert to_text(from_text(to_text(plan))) == to_text(plan)
    assert from_msgpack(to_msgpack(plan)) == plan


def module_named(name: str) -> ModuleSpec:
    return ModuleSpec(name, "text", (LayerSpec("layer", TensorShape(("tokens", 1))),))


SPACES = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\u00a0\u3000"


@given(st.text(st.characters() | st.sampled_from(SPACES + " .=\t\n"), max_size=8), st.booleans())
def test_every_name_that_a_model_accepts_round_trips(name: str, long: bool) -> None:
    name = (name * 190)[:190] if long else name
    try:
        module_named(name)
    except InputError:
        assert not name or any(c.isspace() or c in ".=" or "\ud800" <= c <= "\udfff" for c in name)
        return
    chunk = f"{name}.{MOST_LAYERS - 1}"
    send = Action(Verb.SEND_F, chunk, peer=0, shape=(1,), dtype="float32", target=chunk)
    plan = ExecutionPlan(1, 0, "ab", ((Action(Verb.F, chunk, strategy="keep"), send),))
    assert from_text(to_text(plan)) == plan
    assert from_msgpack(to_msgpack(plan)) == plan


@pytest.mark.parametrize("name", [*SPACES, "\ud800"])
def test_names_that_a_plan_cannot_contain_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"is empty or contains '\.', '=', white space or a lone surrogate"):
        module_named(f"a{name}b")
    plan = ExecutionPlan(1, 0, "ab", ((Action(Verb.F, f"a{name}b.0"),),))
    if name.isspace():
        with pytest.raises(InputError, match="contains white space"):
            from_msgpack(to_msgpack(plan))


def test_names_that_are_too_long_are_refused() -> None:
    with pytest.raises(InputError, match=r"module 'mmm.*'.name: has 191 letters, more than 190; use a shorter name"):
        module_named("m" * 191)
    layers = (LayerSpec("layer", TensorShape(("tokens", 1)), 2),)
    emits, takes = (EmittedStream("s" * 191, 0, TensorShape(("tokens", 1))),), (StreamEnd("s" * 191, 1),)
    with pytest.raises(InputError, match=r"module 'm'.emits\[0\]: stream 'sss.*': has 191 letters, more than 190"):
        ModelSpec("model", (ModuleSpec("m", "text", layers, emits=emits, takes=takes),))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**9))
def test_lowered_plans_round_trip(seed: int) -> None:
    plan = random_case(seed, strategies=EVERY_STRATEGY).plan
    assert from_text(to_text(plan)) == plan
    assert from_msgpack(to_msgpack(plan)) == plan


TEXT = """\
pipeloom.plan/2 ranks=2 iteration=17 layout=3f2a
rank 0
F           vision.0 3.0 keep
SEND_F      vision.0 3.0 to=1 shape=12,169,64 dtype=float32
RECV_B      vision.0 3.0 from=1 shape=12,169,64 dtype=float32
WAIT_SEND_F vision.0 3.0
WAIT_B      vision.0 3.0
B           vision.0 3.0
REDUCE_GRAD vision.0
OPTIMIZER_STEP
rank 1
RECV_F      vision.0 3.0 from=0 shape=12,169,64 dtype=float32
WAIT_F      vision.0 3.0
F           lm.0 3.0 keep,recompute
B           lm.0 3.0
SEND_B      vision.0 3.0 to=0 shape=12,169,64 dtype=float32
WAIT_SEND_B vision.0 3.0
OPTIMIZER_STEP
"""


def test_a_forward_has_one_strategy_for_each_of_many_layers() -> None:
    mixed = ",".join(["recompute", "keep"] * 40)
    plan = ExecutionPlan(1, 0, "ab", ((Action(Verb.F, "lm.0", strategy=mixed),),))
    assert from_text(to_text(plan)) == plan
    assert from_msgpack(to_msgpack(plan)) == plan
    for strategy, problem in (("keep," * 100_000, "names 100001 strategies"), ("k" * 201 + ",keep", "has 201 letters")):
        wrong = ExecutionPlan(1, 0, "ab", ((Action(Verb.F, "lm.0", strategy=strategy),),))
        with pytest.raises(InputError, match=problem):
            from_text(to_text(wrong))
        with pytest.raises(InputError, match=problem):
            from_msgpack(to_msgpack(wrong))


def test_the_format_is_as_documented() -> None:
    plan = from_text(TEXT)
    assert to_text(plan) == TEXT
    assert plan.ranks[0][1] == Action(
        verb=Verb.SEND_F, chunk="vision.0", microbatch=3, peer=1, shape=(12, 169, 64), dtype="float32"
    )
    assert from_text(re.sub(" +", " ", TEXT)) == plan


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("pipeloom.plan/2", "pipeloom.plan/1", "line 1: is a 'pipeloom.plan/1', expected 'pipeloom.plan/2'"),
        ("pipeloom.plan/2", "pipeloom.plan/9", "line 1: is a 'pipeloom.plan/9'"),
        ("pipeloom.plan/2", "schedule", "line 1: is a 'schedule'"),
        ("ranks=2", "ranks=two", "line 1: 'two'"),
        ("ranks=2 ", "", "line 1: has no ranks="),
        ("ranks=2", f"ranks={2**64}", "line 1: '18446744073709551616' is above 2147483648"),
        ("vision.0 3.0 keep", f"vision.0 {'9' * 5000}.0 keep", "line 3: '99999999999999999999' is above 2147483648"),
        ("ranks=2", "ranks=3", "has 2 ranks, its header says 3"),
        ("rank 1", "rank 2", "line 11"),
        ("rank 0\n", "", "line 2"),
        ("F           vision.0 3.0 keep", "G           vision.0 3.0 keep", "line 3: unknown verb 'G'"),
        ("F           vision.0 3.0 keep", "F           vision.0 3 keep", "line 3: '3' is no"),
        ("F           vision.0 3.0 keep", "F  vision.0", "line 3: F has no microbatch"),
        ("F           vision.0 3.0 keep", "F", "line 3: F has no chunk"),
        ("to=1 shape", "from=1 shape", "line 4: SEND_F takes no from="),
        ("to=1 shape", "to=-1 shape", "line 4: '-1'"),
        ("to=1 shape=12,169,64", "to=1", "line 4: SEND_F needs"),
        ("to=1 shape=12", "to=1 shape=x", "line 4: 'x'"),
        ("to=1 ", "to=1 to=1 ", "line 4: to= occurs twice"),
        ("to=1 ", "to=1 colour=red ", "line 4: unexpected 'colour=red'"),
        ("WAIT_B      vision.0 3.0", "WAIT_B      vision.0 3.0 keep", "line 7: WAIT_B takes no strategy"),
        (
            "B           vision.0 3.0\nREDUCE",
            "B           vision.0 3.0 target=lm.0\nREDUCE",
            "line 8: B takes no target",
        ),
        ("REDUCE_GRAD vision.0", "REDUCE_GRAD vision.0 1.0", "line 9: REDUCE_GRAD takes a chunk only"),
        ("OPTIMIZER_STEP\nrank", "OPTIMIZER_STEP now\nrank", "line 10: OPTIMIZER_STEP takes no words"),
    ],
)
def test_mistakes_are_reported_with_their_line(old: str, new: str, where: str) -> None:
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
        {"ranks": [[{"verb": Verb.SEND_F, "chunk": "a.0"}]]},
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
        "ranks": [[{"verb": Verb.OPTIMIZER_STEP}]],
        "format": "pipeloom.plan/2",
    }
    assert from_msgpack(msgspec.msgpack.encode(plain)).ranks == ((Action(verb=Verb.OPTIMIZER_STEP),),)
    with pytest.raises(InputError):
        from_msgpack(msgspec.msgpack.encode(plain | change))
    with pytest.raises(InputError):
        from_msgpack(b"\xff\x00")


def test_a_plan_of_the_first_version_asks_for_planning_again() -> None:
    old = {"num_ranks": 1, "iteration": 0, "layout": "x", "ranks": [[{"verb": "OS"}]], "format": "pipeloom.plan/1"}
    with pytest.raises(InputError, match=r"is a 'pipeloom.plan/1', expected 'pipeloom.plan/2'.*plan again"):
        from_msgpack(msgspec.msgpack.encode(old))
    with pytest.raises(InputError, match=r"line 1: is a 'pipeloom.plan/1', expected 'pipeloom.plan/2'.*plan again"):
        from_text("pipeloom.plan/1 ranks=1 iteration=0 layout=x\nrank 0\nOS\n")


def test_verbs_of_messages_know_their_other_end_and_their_wait() -> None:
    assert [verb for verb in Verb if verb.is_compute] == ["F", "B", "I", "W"]
    rows = {(v, v.other_end, v.wait, v.direction) for v in Verb if v.is_post}
    assert rows == {
        (Verb.SEND_F, Verb.RECV_F, Verb.WAIT_SEND_F, "F"),
        (Verb.RECV_F, Verb.SEND_F, Verb.WAIT_F, "F"),
        (Verb.SEND_B, Verb.RECV_B, Verb.WAIT_SEND_B, "B"),
        (Verb.RECV_B, Verb.SEND_B, Verb.WAIT_B, "B"),
    }
    assert all(v.wait.post is v and v.wait.is_wait and v.wait.direction == v.direction for v in Verb if v.is_post)
    of_one_kind = [[v.is_unit, v.is_chunk, v.is_message, v is Verb.OPTIMIZER_STEP].count(True) for v in Verb]
    assert set(of_one_kind) == {1}
