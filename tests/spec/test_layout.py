import pytest

from pipeloom.errors import InputError
from pipeloom.spec import (
    Batch,
    Chunk,
    LayerSpec,
    Layout,
    ModuleLayout,
    ModuleSpec,
    Sample,
    TensorShape,
    Workload,
    batch_from_dicts,
)

LM = (ModuleLayout("lm"),)


def test_every_layer_belongs_to_exactly_one_chunk() -> None:
    Layout(2, LM, (Chunk("lm", (0, 3), 0), Chunk("lm", (4, 4), 1)))
    with pytest.raises(InputError, match=r"chunks\[1\].layers: begins at 5, layer 4"):
        Layout(2, LM, (Chunk("lm", (0, 3), 0), Chunk("lm", (5, 6), 1)))
    with pytest.raises(InputError, match=r"chunks\[0\].rank: 2 is not in 0..1"):
        Layout(2, LM, (Chunk("lm", (0, 3), 2),))
    with pytest.raises(InputError, match="has no chunk"):
        Layout(1, (*LM, ModuleLayout("vision")), (Chunk("lm", (0, 3), 0),))


def test_more_ranks_than_any_pipeline_has_are_refused() -> None:
    with pytest.raises(InputError, match="num_ranks: 2000000 is above 4096"):
        Layout(2_000_000, LM, (Chunk("lm", (0, 3), 0),))


def test_a_replicated_module_has_a_chunk_on_every_rank() -> None:
    modules = (ModuleLayout("vision", on_ranks="replicated"),)
    Layout(2, modules, (Chunk("vision", (0, 3), 0), Chunk("vision", (0, 3), 1)))
    with pytest.raises(InputError, match="one chunk on every rank"):
        Layout(2, modules, (Chunk("vision", (0, 3), 0),))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([(0, 3), (2, 3)], r"chunks\[1\].layers: begins at 2, not at layer 0 of 'v'"),
        ([(-1, 3), (-1, 3)], r"chunks\[0\].layers: begins at -1, not at layer 0"),
        ([(0, 3), (0, 2)], r"chunks\[1\].layers: \[0, 2\] of 'v', but the chunk on rank 0 has \[0, 3\]; .*each rank"),
    ],
)
def test_replicas_of_a_module_have_the_same_layers(layers: list[tuple[int, int]], problem: str) -> None:
    modules = (ModuleLayout("v", on_ranks="replicated"),)
    with pytest.raises(InputError, match=problem):
        Layout(2, modules, tuple(Chunk("v", each, rank) for rank, each in enumerate(layers)))


def test_gradients_flow_through_a_frozen_module_only_after_a_trained_one() -> None:
    modules = (
        ModuleLayout("vision", frozen=True),
        ModuleLayout("adapter", ("vision",)),
        ModuleLayout("lm", ("adapter",), frozen=True),
    )
    layout = Layout(1, modules, tuple(Chunk(m.name, (0, 0), 0) for m in modules))
    assert [layout.has_backward(m.name) for m in modules] == [False, True, True]


def test_chunk_names_count_within_their_module() -> None:
    modules = (ModuleLayout("v"), ModuleLayout("lm", ("v",)))
    chunks = (Chunk("v", (0, 0), 0), Chunk("v", (1, 1), 1), Chunk("lm", (0, 5), 0))
    layout = Layout(2, modules, chunks)
    assert layout.chunk_names == ("v.0", "v.1", "lm.0")
    assert layout.digest != Layout(2, modules, (*chunks[:2], Chunk("lm", (0, 5), 1))).digest


def test_bad_samples_are_named() -> None:
    with pytest.raises(InputError, match=r"'a'.image_patches: 1 entries, image_tokens has 2"):
        Sample("a", 3, (2, 2), (4,))
    with pytest.raises(InputError, match=r"'a'.image_tokens\[0\]: 0 is not positive"):
        Sample("a", 3, (0,))
    with pytest.raises(InputError, match="'a' occurs twice"):
        Batch((Sample("a"), Sample("a")))
    with pytest.raises(InputError, match=r"batch.samples\[0\]: colour: is not a known field"):
        batch_from_dicts([{"id": "a", "colour": 1}])


def test_shapes_resolve_from_the_workload() -> None:
    shape = TensorShape(("instances", 4, "tokens"), "bfloat16")
    assert shape.resolve(Workload((3, 5))) == (2, 4, 8)
    assert shape.num_bytes(Workload((3, 5))) == 2 * 4 * 8 * 2
    assert shape.resolve(Workload(())) == (0, 4, 0)


def test_more_layers_than_any_model_has_are_refused_before_room_is_made_for_them() -> None:
    block = LayerSpec("block", TensorShape(("tokens", 8)), 10**9)
    with pytest.raises(InputError, match=r"module 'lm'.layers: 1000000000 layers are more than 100000"):
        ModuleSpec("lm", "sequence", (block,))
