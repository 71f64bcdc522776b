"""Layouts written as blocks of each stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.errors import InputError
from pipeloom.layout import blocks_of_stages, by_count, encoders_in_first_stage, layout_of_stages
from pipeloom.spec import ModelSpec
from pipeloom.spec.parallelism import Degrees
from tests.integrations.hand_counted import architecture_of
from tests.integrations.published import QWEN2_VL_7B


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    """Embedding, 32 blocks and a merger before embedding, 28 blocks and a head."""
    architecture = architecture_of(QWEN2_VL_7B, "qwen")
    return EmulatedCosts(architecture, "8xH100", Degrees(), ("keep",), split=False).model_spec


def _parts(draw: st.DrawFn, total: int, count: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@given(st.data())
def test_numbers_are_there_and_back_again(model: ModelSpec, data: st.DataObject) -> None:
    ranks, chunks = data.draw(st.sampled_from([(2, 1), (4, 1), (2, 3), (3, 2), (1, 1)]))
    counts = data.draw(st.composite(_parts)(28, ranks * chunks))
    layout = layout_of_stages(model, ranks, counts)
    vision, first, *_ = layout.chunks
    assert (vision.module, vision.rank, vision.layers) == ("vision", 0, (0, len(model.modules[0].flat_layers) - 1))
    assert (first.module, first.rank) == ("lm", 0)
    blocks = [i for i, layer in enumerate(model.modules[1].flat_layers) if layer.kind.startswith("block")]
    for chunk in layout.chunks[1:]:
        held = sum(chunk.layers[0] <= block <= chunk.layers[1] for block in blocks)
        assert held in [count for j, count in enumerate(counts) if j % ranks == chunk.rank]
    # A stage of nothing leaves no trace in a layout.
    if 0 not in counts[1:-1]:
        stages = blocks_of_stages(layout, model)
        assert stages is not None or ranks == 1
        if stages is not None and len(stages) == len(counts):
            assert [stage["lm"] for stage in stages] == counts


def test_tables_cut_encoders_too(model: ModelSpec) -> None:
    stages = [{"vision": 20}, {"vision": 12, "lm": 4}, {"lm": 12}, {"lm": 12}]
    layout = layout_of_stages(model, 4, stages)
    assert "".join(f"{c.module[0]}{c.rank} " for c in layout.chunks) == "v0 v1 l1 l2 l3 "
    assert blocks_of_stages(layout, model) == stages


def test_even_stages_do_not_count_the_encoder(model: ModelSpec) -> None:
    layout = encoders_in_first_stage(model, 4, 1, counted=False)
    assert blocks_of_stages(layout, model) == [{"vision": 32, "lm": 7}, {"lm": 7}, {"lm": 7}, {"lm": 7}]
    counted = encoders_in_first_stage(model, 4, 1, by_count)
    stages = blocks_of_stages(counted, model)
    assert stages is not None
    assert stages[0] == {"vision": 32, "lm": 0}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([7, 7, 7], "layout: has 21 blocks of lm, the model 28; give all of them"),
        ([30, -1, -1, 0], "has 28 blocks of lm|give all"),
        ([7, {"lm": 21}], "mixes numbers and tables"),
        ([{"lm": 28, "visoin": 1}], "'visoin': is unknown"),
        ([{"lm": 14}, {"vision": 32}, {"lm": 14}], "lm begins in stage 0, before stage 1 ends vision"),
        ([{"lm": 28}], "has 0 blocks of vision"),
    ],
)
def test_what_is_no_layout_is_named(model: ModelSpec, stages: list[int | dict[str, int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        layout_of_stages(model, 2, stages)
