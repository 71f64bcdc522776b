"""Costs of modules whose instances are dealt to tensor-parallel ranks."""

from __future__ import annotations

import msgspec
import pytest

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.cost.encoder_dp import EncoderDpCosts, costs_under_layout, encoder_dp_reduce_s
from pipeloom.cost.model import PassBytes
from pipeloom.layout import ModulePlacement, separate
from pipeloom.layout.layouts import with_encoder_dp
from pipeloom.packing import PackingSpec, cost_loads, pack
from pipeloom.spec import Chunk, Parallelism, Workload
from pipeloom.spec.parallelism import Degrees
from pipeloom.taskgraph import build_graph
from tests.cases import ToyCosts, random_batch, vlm_spec

MODEL = vlm_spec()
PLAIN = separate(MODEL, 2, {"vision": ModulePlacement(1, 4)}, lambda *_: 1.0)
LAYOUT = msgspec.structs.replace(with_encoder_dp(PLAIN, ["vision"]), parallelism=Parallelism(2))


def test_a_part_costs_what_its_largest_share_does_and_handing_it_round() -> None:
    plain = ToyCosts(MODEL, transfer_s=0.5, split=True)
    costs = costs_under_layout(plain, LAYOUT)
    first, second = Chunk("vision", (0, 1), 0), Chunk("vision", (2, 3), 1)
    work = Workload((3, 2, 4))
    (begin,), (end,) = costs.chunk_costs(first, work), costs.chunk_costs(second, work)
    # 5 and 4 tokens; nobody before the first chunk takes a gradient.
    assert begin.forward_s == pytest.approx(2 * 5e-3 + 0.5)
    assert begin.backward_s == pytest.approx(4 * 5e-3)
    assert end.backward_s == pytest.approx(4 * 5e-3 + 0.5)
    assert (end.backward_input_s, end.backward_weight_s) == pytest.approx((2 * 5e-3 + 0.5, 2 * 5e-3))
    assert begin.activation_bytes == 10 * 5 * 2
    assert costs.boundary_bytes(first, work) == plain.boundary_bytes(first, work)
    lm = Chunk("lm", (0, 3), 0)
    assert costs.chunk_costs(lm, work) == plain.chunk_costs(lm, work)


def test_nothing_changes_where_nothing_is_divided_or_there_is_one_rank_to_deal_to() -> None:
    plain = ToyCosts(MODEL)
    assert costs_under_layout(plain, msgspec.structs.replace(PLAIN, parallelism=Parallelism(2))) is plain
    assert costs_under_layout(plain, msgspec.structs.replace(LAYOUT, parallelism=Parallelism())) is plain


def test_graphs_are_made_of_them() -> None:
    packing = pack(random_batch(1, text_only=0.0), MODEL, LAYOUT, PackingSpec(60))
    plain, shared = (build_graph(layout, packing, ToyCosts(MODEL)) for layout in (PLAIN, LAYOUT))
    of_vision = [LAYOUT.chunks[label.chunk].module == "vision" for label in shared.labels or ()]
    for pair, is_vision in enumerate(of_vision):
        both = [graph.duration_ns[graph.pair == pair].sum() for graph in (plain, shared)]
        assert both[0] == both[1] if not is_vision else both[0] / 2 <= both[1] <= both[0]
    assert shared.duration_ns.sum() < plain.duration_ns.sum()


def test_gradients_are_summed_by_the_rank_that_has_most() -> None:
    costs = ToyCosts(MODEL, transfer_s=0.25)
    assert encoder_dp_reduce_s(LAYOUT, MODEL, costs, lambda _: 8) == pytest.approx(2 * 0.25)
    assert encoder_dp_reduce_s(PLAIN, MODEL, costs, lambda _: 8) == 0.0


def test_emulated_encoders_are_whole_on_each_device() -> None:
    degrees = Degrees(tensor=4, pipeline=2)
    emulated = EmulatedCosts("vlm-s", "dip-h800-64", degrees, ["keep"])
    alone = EmulatedCosts("vlm-s", "dip-h800-64", Degrees(tensor=1, pipeline=2), ["keep"])
    vision, lm = (Chunk(name, (1, 2), 0) for name in ("vision", "lm"))
    costs = EncoderDpCosts(emulated, frozenset(["vision"]), 4)
    assert costs.static_bytes(vision) == alone.static_bytes(vision) > 3 * emulated.static_bytes(vision)
    assert costs.static_bytes(lm) == emulated.static_bytes(lm)
    many = Workload((1024,) * 8)
    (rank_cost,), (divided,) = costs.chunk_costs(vision, many), emulated.chunk_costs(vision, many)
    (one,) = alone.chunk_costs(vision, Workload((1024,) * 2))
    assert one.forward_s < rank_cost.forward_s < divided.forward_s
    assert rank_cost.activation_bytes == one.activation_bytes
    assert costs.workspace_bytes(vision, many) > alone.workspace_bytes(vision, Workload((1024,) * 2))
    # A single image is faster where its layers are divided.
    single = Workload((1024,))
    assert costs.chunk_costs(vision, single)[0].forward_s > emulated.chunk_costs(vision, single)[0].forward_s


@pytest.mark.parametrize("tensor", range(2, 9))
def test_a_sample_weighs_its_part_of_the_whole_whatever_it_is_assigned_to(tensor: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, parallelism=Parallelism(tensor))
    batch = random_batch(3, text_only=0.0)
    whole, shared = (cost_loads(batch, MODEL, each, ToyCosts(MODEL)) for each in (PLAIN, layout))
    assert shared.encoder == pytest.approx(whole.encoder / tensor)
    assert shared.backbone == pytest.approx(whole.backbone)


def test_what_a_share_is_given_grows_with_its_tokens() -> None:
    share = Workload((6, 3, 1), ((4, 20),)).largest_share(2)
    assert (share.lengths, share.given) == ((6,), ((3, 12),))
    assert Workload((), ((1, 2),)).largest_share(2).given == ((0, 0),)


def test_gathering_has_room_for_pieces_of_one_size_and_for_all_rows() -> None:
    emulated = EmulatedCosts("vlm-s", "dip-h800-64", Degrees(tensor=4, pipeline=2), ["keep"])
    alone, costs = emulated.undivided, EncoderDpCosts(emulated, frozenset(["vision"]), 4)
    chunk, one = Chunk("vision", (1, 2), 0), Workload((1024,))
    # Four pieces as large as the one image, one that is sent, and its rows.
    more = 6 * alone.boundary_bytes(chunk, one)
    assert costs.workspace_bytes(chunk, one) == alone.workspace_bytes(chunk, one) + more


def test_every_pass_that_gathers_has_the_bytes_of_it() -> None:
    class Measured(ToyCosts):
        def pass_bytes(self, chunk: Chunk, workload: Workload, strategy: str) -> PassBytes:
            return PassBytes(1, 2, 3, 4, 5, 6, 7)

    costs = EncoderDpCosts(Measured(MODEL), LAYOUT.encoder_dp_modules, 2)
    chunk, one = Chunk("vision", (0, 1), 0), Workload((4,))
    more = 4 * costs.boundary_bytes(chunk, one)  # two pieces, one that is sent, and its rows
    assert costs.pass_bytes(chunk, one, "keep") == (1 + more, 2 + more, 3 + more, 4 + more, 5, 6, 7)
