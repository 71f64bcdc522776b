from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.plan import Verb, schedule_from_pytorch_csv, to_pytorch_csv
from pipeloom.spec import LayerSpec, ModelSpec, ModuleSpec, TensorShape

from .cases import DTYPE, WIDTH, Case, in_order, random_case


def chain_case(seed: int, **options: object) -> Case:
    """A chain of one module on two or three ranks."""
    rng = random.Random(seed)
    layers = tuple(LayerSpec(f"layer{i}", TensorShape(("tokens", WIDTH), DTYPE)) for i in range(rng.randint(1, 6)))
    model = ModelSpec("chain", (ModuleSpec("lm", "sequence", layers),))
    case = random_case(seed, rng.randint(1, 3), model=model, strategies=("keep",), **options)  # type: ignore[arg-type]
    return replace(case, schedule=in_order(case.graph, case.schedule))


@given(st.integers(0, 10**9), st.booleans())
def test_schedules_of_chains_round_trip(seed: int, communication: bool) -> None:
    case = chain_case(seed)
    text = to_pytorch_csv(case.plan, case.layout, communication=communication)
    again = schedule_from_pytorch_csv(text, case.graph)
    assert [order.tolist() for order in again.order] == [order.tolist() for order in case.schedule.order]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**9))
def test_pytorch_reads_every_cell(seed: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    case = chain_case(seed)
    for row in to_pytorch_csv(case.plan, case.layout, communication=True).splitlines():
        for cell in filter(None, row.split(",")):
            assert str(schedules._Action.from_str(cell)) == cell


def whole() -> Case:
    """Two chunks on one rank, whole backwards, at least two microbatches."""
    return next(
        case
        for seed in range(1000)
        if (case := chain_case(seed, split=False)).layout.num_ranks == 1
        and len(case.layout.chunks) == 2
        and len(case.packing.microbatches) == 2
    )


def test_bubbles_overlaps_and_communication_are_understood() -> None:
    case = whole()
    text = "0UNSHARD,0F0,,1F0,0SEND_F0,1RECV_F1,0F1,(1F1;1B0)OVERLAP_F_B, 0B0 ,1B1,0B1,0REDUCE_GRAD\n"
    schedule = schedule_from_pytorch_csv(text, case.graph)
    kinds = [case.graph.task(t).kind for t in schedule.order[0].tolist()]
    assert "".join(kinds) == "FFFFBBBB"
    verbs = [a.verb for a in replace(case, schedule=schedule).plan.ranks[0]]
    assert verbs == [*"FFFFBBBB", Verb.OPTIMIZER_STEP]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,zero\n", "row 1, column 2: 'zero' is not an action"),
        ("0F\n", "row 1, column 1: '0F' is not an action"),
        ("0F9\n", "row 1, column 1: '0F9' is no task of the graph"),
        ("0F0,0I0\n", "build the graph with split backwards"),
        ("0F0,0F0\n", "row 1, column 2: '0F0' comes twice"),
        ("0F0\n", "is missing"),
        ("0F0\n0F1\n", "row 2, column 1: '0F1' is on rank 0"),
        ("", "has 0 rows"),
    ],
)
def test_mistakes_are_reported_with_row_and_column(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        schedule_from_pytorch_csv(text, whole().graph)
    assert message in str(caught.value)


def test_what_pytorch_cannot_run_is_not_exported() -> None:
    reasons = set()
    for seed in range(200):
        case = random_case(seed, strategies=("keep", "recompute")[: 1 + seed % 2])
        try:
            to_pytorch_csv(case.plan, case.layout)
        except InputError as error:
            reasons.add(error.remedy)
    assert reasons >= {
        "PyTorch has none",
        "PyTorch keeps them",
        "PyTorch connects a chain only",
        "PyTorch runs one for every stage",
        "PyTorch takes losses in order",
    }
