"""Packings whose dealt instances are a multiple of the devices that they are dealt to."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.layout.layouts import by_count, separate, with_encoder_dp
from pipeloom.packing import Loads, PackingSpec, cost_loads
from pipeloom.packing.choices import even_microbatches, numbers
from pipeloom.packing.policies import fill_shares
from pipeloom.spec import Batch, Sample
from pipeloom.spec.parallelism import Degrees
from tests.compare.cases import vlm_on_h800


def drawn(num: int, devices: int, seed: int) -> Loads:
    """Documents with mostly none or one image, as web data have."""
    random = np.random.default_rng(seed)
    images = np.minimum(random.geometric(0.6, num) - 1, 9)
    tokens = 40 * images + random.integers(20, 200, num)
    return Loads(tokens, tokens.astype(float), 60.0 * images, images, devices)


def missing(groups: tuple[tuple[int, ...], ...], loads: Loads) -> int:
    """Places of devices that stay empty."""
    assert loads.instances is not None
    return sum(-int(loads.instances[list(members)].sum()) % loads.num_devices for members in groups)


def height(groups: tuple[tuple[int, ...], ...], loads: Loads) -> float:
    """Of the highest microbatch, in those of the mean one: by the backbone or by all work."""
    both = loads.backbone, loads.backbone + loads.encoder
    return max(load[list(members)].sum() * len(groups) / load.sum() for load in both for members in groups)


@given(st.integers(1, 200), st.integers(2, 8), st.integers(1, 20), st.integers(0, 10**6))
def test_no_sample_is_lost_no_budget_broken_and_fewer_places_stay_empty(
    num: int, devices: int, number: int, seed: int
) -> None:
    loads = drawn(num, devices, seed)
    spec = PackingSpec(int(max(loads.tokens.max(), 2 * loads.tokens.sum() / min(number, num))))
    before = even_microbatches(replace(loads, instances=None), spec, min(number, num))
    groups = even_microbatches(loads, spec, min(number, num))
    assert sorted(itertools.chain(*groups)) == list(range(num))
    assert max(int(loads.tokens[list(members)].sum()) for members in groups) <= spec.token_budget
    assert missing(groups, loads) <= missing(before, loads)
    assert height(groups, loads) <= max(height(before, loads), 1.1) * (1 + 1e-9)


def test_where_samples_allow_it_no_place_stays_empty_but_the_last_ones() -> None:
    for devices, seed in itertools.product((4, 8), range(5)):
        loads = drawn(800, devices, seed)
        assert loads.instances is not None
        for number in numbers(loads, PackingSpec(10**6))[2:8]:
            groups = even_microbatches(loads, PackingSpec(10**6), number)
            assert missing(groups, loads) == -int(loads.instances.sum()) % devices


def test_as_few_as_exhaustive_search_finds() -> None:
    random = np.random.default_rng(0)
    for seed in range(30):
        loads = drawn(8, 3, seed)
        bins = random.integers(0, 3, 8)
        bins[:3] = range(3)
        weightless = replace(loads, backbone=0 * loads.backbone, encoder=0 * loads.encoder)
        fill_shares(weightless, 10**9, bins)  # nothing to stay even
        groups = tuple(tuple(np.flatnonzero(bins == b).tolist()) for b in range(3))
        least = min(
            missing(tuple(tuple(i for i in range(8) if each[i] == b) for b in range(3)), loads)
            for each in itertools.product(range(3), repeat=8)
        )
        # A local search: at most one device's worth more.
        assert missing(groups, loads) <= least + loads.num_devices


def test_numbers_leave_as_many_for_every_device() -> None:
    loads = drawn(825, 8, 1)
    assert loads.instances is not None
    rounds = loads.instances.sum() / 8
    few = [number for number in numbers(loads, PackingSpec(10**6)) if number < rounds]
    # Rounds of a microbatch are whole, but for the last one's missing instances.
    assert all(number == -(-loads.instances.sum() // (8 * round(rounds / number))) for number in few)
    assert few != [number for number in numbers(replace(loads, instances=None), PackingSpec(10**6)) if number < rounds]


def test_costs_name_encoder_dp() -> None:
    setting = vlm_on_h800(Degrees(tensor=4, pipeline=2), vision=4, lm=4)
    batch = Batch((Sample("a", 10, (4, 4), (16, 16)), Sample("b", 10)))
    plain = separate(setting.model, 2, {}, by_count)
    assert cost_loads(batch, setting.model, plain, setting.costs).instances is None
    loads = cost_loads(batch, setting.model, with_encoder_dp(plain, ["vision"]), setting.costs)
    assert loads.instances is not None
    assert (loads.instances.tolist(), loads.num_devices) == ([2, 0], 4)
