import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.layout import ModulePlacement, chain_of_stages, encoder_first, partition_chain, segment_counts, separate
from tests.cases import vlm_spec


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_partition_is_the_best_of_all(loads: list[int], parts: int) -> None:
    parts = min(parts, len(loads))
    runs = partition_chain(loads, parts)
    assert [i for first, last in runs for i in range(first, last + 1)] == list(range(len(loads)))

    def largest(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(loads))
        return max(sum(loads[a:b]) for a, b in itertools.pairwise(edges))

    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(loads)), parts - 1))
    assert max(sum(loads[first : last + 1]) for first, last in runs) == best


def test_separate_gives_each_module_segments_of_its_own() -> None:
    layout = separate(vlm_spec(4, 8), 4, {"lm": ModulePlacement(2)}, lambda module, layer: 1.0)
    assert [chunk.rank for chunk in layout.chunks] == [0, 1, 2, 3] * 3
    assert [chunk.module for chunk in layout.chunks] == ["vision"] * 4 + ["lm"] * 8
    with pytest.raises(InputError, match="'vision': has 4 layers for 4 ranks x 2 segments"):
        separate(vlm_spec(4, 8), 4, {"vision": ModulePlacement(2)}, lambda module, layer: 1.0)
    with pytest.raises(InputError, match="'visoin': is unknown"):
        separate(vlm_spec(4, 8), 4, {"visoin": ModulePlacement(1)}, lambda module, layer: 1.0)


def test_a_module_of_fewer_layers_than_ranks_has_a_chunk_for_each() -> None:
    """As what brings a prompt to a transformer's width; the last module has to have layers for all ranks."""
    layout = separate(vlm_spec(2, 8), 4, {}, lambda module, layer: 1.0)
    assert [(c.module, c.layers, c.rank) for c in layout.chunks[:2]] == [("vision", (0, 0), 0), ("vision", (1, 1), 1)]
    assert len(layout.chunks) == 6
    assert segment_counts({"vision": 1.0, "lm": 3.0}, {"vision": 2, "lm": 8}, 4) == {"vision": 1, "lm": 2}
    with pytest.raises(InputError, match="'lm': has 3 layers for 4 ranks x 1 segments"):
        separate(vlm_spec(4, 3), 4, {}, lambda module, layer: 1.0)


def test_chain_cuts_across_modules() -> None:
    layout = chain_of_stages(vlm_spec(4, 8), 3, 1, lambda module, layer: 1.0)
    assert [(c.module, c.layers, c.rank) for c in layout.chunks] == [
        ("vision", (0, 3), 0),
        ("lm", (0, 3), 1),
        ("lm", (4, 7), 2),
    ]
    mixed = chain_of_stages(vlm_spec(4, 8), 2, 1, lambda module, layer: 1.0)
    assert [(c.module, c.layers, c.rank) for c in mixed.chunks] == [
        ("vision", (0, 3), 0),
        ("lm", (0, 1), 0),
        ("lm", (2, 7), 1),
    ]


def test_encoder_first_keeps_encoders_whole_on_the_first_rank() -> None:
    model = vlm_spec(4, 8)
    even = encoder_first(model, 4, lambda *_: 1.0, even_layers=True)
    assert [(c.module, c.layers, c.rank) for c in even.chunks] == [
        ("vision", (0, 3), 0),
        ("lm", (0, 1), 0),
        ("lm", (2, 3), 1),
        ("lm", (4, 5), 2),
        ("lm", (6, 7), 3),
    ]
    # The encoder weighs as much as two layers of the other, so its rank gets fewer of them.
    balanced = encoder_first(model, 4, lambda module, _: 0.5 if module == "vision" else 1.0)
    assert [c.num_layers for c in balanced.chunks if c.module == "lm"] == [1, 2, 2, 3]
    with pytest.raises(InputError, match=r"module 'lm'\.segments: 2, encoders on the first rank leave 1"):
        encoder_first(model, 2, lambda *_: 1.0, placements={"lm": ModulePlacement(2)})
