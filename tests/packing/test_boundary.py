from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeloom.packing import pieces, reach
from pipeloom.spec import Sample
from tests.plan.cases import random_case


def test_a_part_takes_the_samples_that_it_covers() -> None:
    samples = [Sample("a", 1, (1, 1)), Sample("b", 1), Sample("c", 1, (1,)), Sample("d", 1)]
    assert reach(samples, "sequence", "images", 0, 2) == (0, 1)
    assert reach(samples, "sequence", "images", 1, 2) == (0, 3)
    assert reach(samples, "sequence", "images", 2, 1) == (2, 1)
    assert reach(samples, "images", "sequence", 1, 2) == (2, 1)
    assert reach(samples, "images", "sequence", 1, 1) == (2, 0)
    assert reach(samples, "images", "images", 1, 2) == (1, 2)


@given(st.integers(0, 10**9))
def test_every_part_is_given_what_it_reaches_in_order(seed: int) -> None:
    case = random_case(seed)
    packing = case.packing
    for m, microbatch in enumerate(packing.microbatches):
        samples = [packing.batch.samples[i] for i in microbatch.samples]
        for below, module in enumerate(case.layout.modules):
            for source in module.after:
                above = packing.modules.index(source)
                found = pieces(packing, m, above, below)
                for number, part in enumerate(microbatch.parts[below]):
                    taken = [
                        microbatch.parts[above][p.above].first + p.first + i
                        for p in found
                        if p.below == number
                        for i in range(p.count)
                    ]
                    first, count = reach(samples, packing.reads[above], packing.reads[below], part.first, part.count)
                    assert taken == list(range(first, first + count))
                    lengths = [n for other in microbatch.parts[above] for n in other.workload.lengths]
                    assert part.workload.given[module.after.index(source)] == (count, sum(lengths[i] for i in taken))
                assert all(p.whole == (p.count == microbatch.parts[above][p.above].count) for p in found)
