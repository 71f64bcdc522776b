"""Instances dealt to tensor-parallel ranks: who gets which, and how a layout says so."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from pipeloom.errors import InputError
from pipeloom.spec import Chunk, Layout, ModuleLayout, Parallelism, StreamEnd, Workload
from pipeloom.spec.batch import split_instances

MODULES = (ModuleLayout("vision"), ModuleLayout("lm", ("vision",)))
CHUNKS = (Chunk("vision", (0, 1), 0), Chunk("lm", (0, 3), 0))


def test_no_other_cut_into_runs_gives_the_fullest_rank_less() -> None:
    rng = random.Random(0)
    for _ in range(300):
        lengths = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 7)))
        ranks = rng.randint(1, 5)
        found = split_instances(lengths, ranks)
        assert len(found) == ranks
        assert [i for first, count in found for i in range(first, first + count)] == list(range(len(lengths)))
        cuts = itertools.combinations_with_replacement(range(len(lengths) + 1), ranks - 1)
        bounds = ([0, *cut, len(lengths)] for cut in cuts)
        least = min(max(sum(lengths[a:b]) for a, b in itertools.pairwise(each)) for each in bounds)
        assert max(sum(lengths[first : first + count]) for first, count in found) == least
        assert sum(Workload(lengths).largest_share(ranks).lengths) == least


def test_of_equal_runs_the_one_with_longer_instances_counts() -> None:
    assert Workload((3, 3, 6)).largest_share(2).lengths == (6,)
    assert Workload(()).largest_share(4).lengths == ()


def test_a_layout_that_deals_nothing_is_written_as_ever() -> None:
    plain = Layout(1, MODULES, CHUNKS, Parallelism(2))
    assert "on_tensor_ranks" not in str(plain.document)
    assert plain.digest == "659fcc68"
    uses_encoder_dp = Layout(
        1, (msgspec.structs.replace(MODULES[0], on_tensor_ranks="dealt"), MODULES[1]), CHUNKS, Parallelism(2)
    )
    assert uses_encoder_dp.document["modules"][0]["on_tensor_ranks"] == "dealt"
    assert "on_tensor_ranks" not in uses_encoder_dp.document["modules"][1]
    assert uses_encoder_dp.digest != plain.digest
    for layout in (plain, uses_encoder_dp):
        assert msgspec.convert(layout.document, Layout) == layout
    assert uses_encoder_dp.uses_encoder_dp("vision")
    assert not uses_encoder_dp.uses_encoder_dp("lm")
    assert not msgspec.structs.replace(uses_encoder_dp, parallelism=Parallelism()).uses_encoder_dp("vision")


def test_what_cannot_be_divided_is_refused() -> None:
    last = msgspec.structs.replace(MODULES[1], on_tensor_ranks="dealt")
    with pytest.raises(InputError, match=r"module 'lm'.on_tensor_ranks: is 'dealt', and its output goes into the loss"):
        Layout(1, (MODULES[0], last), CHUNKS)
    emitting = msgspec.structs.replace(MODULES[0], on_tensor_ranks="dealt", emits=(StreamEnd("deep", 0),))
    taking = msgspec.structs.replace(MODULES[1], takes=(StreamEnd("deep", 1),))
    with pytest.raises(InputError, match=r"module 'vision'.on_tensor_ranks: is 'dealt', and its layers emit or take"):
        Layout(1, (emitting, taking), CHUNKS)
