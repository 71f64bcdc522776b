"""Mixtures of strategies over a chunk's layers, against all that there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost.mixtures import HELD, HOST, LayerOption, mix, pareto_steps, pass_times
from pipeloom.errors import InputError

TIMES = st.integers(0, 9)
OPTION = st.tuples(TIMES, TIMES, st.integers(0, 50), st.sampled_from([0, 0, 7, 20]), TIMES, TIMES)
KINDS = st.lists(st.tuples(st.integers(1, 4), st.lists(OPTION, min_size=1, max_size=3)), min_size=1, max_size=2)


def options_of(rows):
    """A copy takes its lane only where something goes to the host."""
    return [LayerOption(f"s{i}", *row[:4], *(row[4:] if row[3] else (0, 0))) for i, row in enumerate(rows)]


def every(layers):
    """Bytes, bytes on the host, time and names of all combinations."""
    for combination in product(*layers):
        sums = np.sum([option[1:] for option in combination], axis=0)
        yield sums[HELD], sums[HOST], pass_times(sums[None].astype(float)).sum()


@given(KINDS)
def test_equal_layers_are_distributed_to_options_exactly(kinds):
    """Of one kind nothing is missed; nor of several, of what keeps off the host."""
    layers = [options_of(rows) for count, rows in kinds for _ in range(count)][:6]
    found = mix(layers)
    for held, host, time in every(layers):
        if host == 0:
            assert any(found.amounts[r, HELD] <= held and found.times[r] <= time for r in found.front_without_offload)
        if len(kinds) == 1:
            assert any(found.amounts[r, HELD] <= held and found.times[r] <= time for r in found.front)


@given(KINDS)
def test_a_mixture_is_what_its_layers_are(kinds):
    layers = [options_of(rows) for count, rows in kinds for _ in range(count)][:6]
    found = mix(layers)
    for row in [*found.front, *found.front_without_offload]:
        names = found.layers(row)
        sums = np.sum(
            [next(o for o in options if o.strategy == n)[1:] for options, n in zip(layers, names, strict=True)], 0
        )
        assert found.amounts[row] == pytest.approx(sums)
        assert found.times[row] == pytest.approx(max(sums[0], sums[4]) + max(sums[1], sums[5]))


@given(KINDS, st.integers(2, 7), st.integers(1, 3))
def test_a_ladder_goes_down_in_bytes_and_never_up_in_what_it_keeps_off_the_host(kinds, num_free, num_offloading):
    layers = [[LayerOption("keep", 1, 1, 60), *options_of(rows)] for count, rows in kinds for _ in range(count)][:6]
    found = mix(layers)
    rows = pareto_steps(found, num_free, num_offloading)
    free, others = rows[:num_free], rows[num_free:]
    assert len(others) in (0, num_offloading)
    assert (np.diff(found.amounts[free, HELD]) <= 0).all()
    assert (found.amounts[free, HOST] == 0).all()
    off_host = found.amounts[:, HOST] == 0
    assert found.times[free[0]] == found.times[off_host].min()
    assert found.amounts[free[-1], HELD] == found.amounts[off_host, HELD].min()
    if others:
        assert found.amounts[others[-1], HELD] == found.amounts[:, HELD].min()


def test_folder_replicas_hide_under_the_computation_of_the_chunks_other_layers():
    layer = [
        LayerOption("keep", 4, 6, 100),
        LayerOption("recompute", 4, 10, 10),
        LayerOption("offload", 4, 6, 0, 100, 8, 8),
    ]
    found = mix([layer] * 4)
    row = next(r for r in found.front if found.layers(r).count("offload") == 2 and "recompute" not in found.layers(r))
    # Two of four layers: 16 each way, as long as a forward, and shorter than a backward.
    assert found.times[row] == 4 * 10
    assert found.amounts[row, HELD] == 200
    # A third would take the link 8 longer than the forward, and the backward is as long as it.
    assert found.times[next(r for r in found.front if found.layers(r).count("offload") == 3)] >= 24 + 24


def test_many_equal_layers_go_over_several_at_a_time():
    found = mix([[LayerOption("keep", 1, 2, 10), LayerOption("recompute", 1, 3, 1)]] * 80)
    shares = {found.layers(row).count("recompute") for row in found.front}
    assert {0, 40, 80} <= shares
    assert len(shares) == 13


def test_nothing_to_mix_is_refused():
    with pytest.raises(InputError, match="layer without options"):
        mix([[]])


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=40))
def test_lanes_never_have_more_to_do_than_one_pass_brings(passes):
    """Why two buffers do: passes in any order, each no shorter than its copies, with any idle time in between.

    At the end of a pass its copies come on top of what the lane has not done yet. Backwards in time these are the
    copies in, each wanted whole when its backward begins.
    """
    waiting, most = 0, max(copy for _, copy, _ in passes)
    for computes, copy, idle in passes:
        waiting = max(0, waiting - idle - max(computes, copy)) + copy
        assert waiting <= most
