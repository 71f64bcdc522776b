"""Bytes between ranks of Qwen3-VL's deepstack features: as streams, and as columns of all that goes their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod

import msgspec

from pipeloom.cost.emulated import EmulatedCosts
from pipeloom.integrations.tracing.architecture import trace_config
from pipeloom.layout import separate
from pipeloom.layout.layouts import by_count, partition_chain
from pipeloom.packing import PackingSpec, pack
from pipeloom.plan import Unit, boundary_shapes, make_routes
from pipeloom.plan.routes import transferred_workload
from pipeloom.report import markdown_table
from pipeloom.spec import Batch, Chunk, LayerSpec, Layout, ModelSpec, ModuleLayout, ModuleSpec, Sample, TensorShape
from pipeloom.spec.model import DTYPE_BYTES
from pipeloom.spec.parallelism import Degrees

TITLE = "Bytes of Qwen3-VL's deepstack features"
_CHUNKS = (1, 2, 3, 4, 6, 8, 9, 12, 16)
_NUM_SAMPLES, _PATCHES, _TEXT_TOKENS = 4, 1024, 256
_MERGED = 4
"""Patches to a row of the language model."""
# As published: blocks and width of the encoder, and its blocks that emit; blocks and width of the language model.
_SIZES = {
    "4B": (24, 1024, [5, 11, 17], 36, 2560),
    "30B-A3B": (27, 1152, [8, 16, 24], 48, 2048),
    "8B": (27, 1152, [8, 16, 24], 36, 4096),
    "32B": (27, 1152, [8, 16, 24], 64, 5120),
}
_SHOWN = "8B"
_THIRD = 1 / 3
LayOut = Callable[[ModelSpec, int], Layout]
"""From a model and how many chunks the encoder has."""


def run() -> str:
    """Count, and return the section as Markdown."""
    layouts: Sequence[LayOut] = (behind_one_another, taken_apart, on_the_same_ranks)
    rows = [[str(n), *(each for layout in layouts for each in _cells(_SHOWN, layout, n))] for n in _CHUNKS]
    header = ["encoder's chunks", "one behind the other, MB", "ratio", "takers apart, MB", "ratio", "both, MB", "ratio"]
    shown = [f"{n} chunks" for n in _CHUNKS[1:]]
    columns = ["model", "v, d", *shown, "a third from", "merged, 4 chunks", "merged, 16 chunks", "a third from"]
    return (
        f"{_INTRODUCTION}\n\n{markdown_table(header, rows)}\n\n"
        f"{_ARITHMETIC}\n\n{markdown_table(columns, [_size_row(size) for size in _SIZES])}"
    )


_INTRODUCTION = (
    "Size of all forward messages of a plan between ranks, from the encoder's first layer to the "
    "last layer that takes a feature. Backward messages have the same size. *Ratio* compares it with "
    "the widened form, which has no streams and space for the three features in every row, four times "
    f"its width. {_NUM_SAMPLES} samples, each with an image of {_PATCHES} patches and {_TEXT_TOKENS} "
    f"tokens of text, bfloat16, Qwen3-VL-{_SHOWN}. *One behind the other*: every chunk on its own "
    "rank, and the three layers that take features on one rank. *Takers apart*: these layers on three "
    "ranks. *Both*: the `separate` layout, where every rank has a chunk of either module."
)
_ARITHMETIC = (
    "**With few chunks, a ratio of one third is impossible.** For each row of the language model, "
    "a boundary inside an encoder of width `v` takes `4 v` numbers, and the encoder's output takes "
    "`d`. Each feature takes at least the narrowest width of its merger, `min(4 v, d)`. If all of "
    "these are on separate ranks, every exchange of whole tensors takes at least `4 v (n - 1) + d "
    "+ 3 min(4 v, d)`. Streams take `4 v (n - 1) + 4 d`, each feature once. That is the minimum unless "
    "`d` is above `4 v` (at 32B, merging at the taker would save a tenth of each feature). The widened "
    "form takes `16 v (n - 1) + 4 d`. So the ratio is 1 for one chunk, and one third from `n = 1 "
    "+ 2 d / v`. The table is for *one behind the other*. Its last columns compare with rows widened "
    "by merged features, to `v + 3 d / 4` (at 32B more):"
)


def count(size: str, lay_out: LayOut, num_chunks: int, merged: bool = False) -> tuple[int, int]:
    """Forward bytes between ranks of features as streams, and of the widened form."""
    model = model_of(size)
    layout = lay_out(model, num_chunks)
    wide = widened(model, merged)
    modules = tuple(ModuleLayout.of(module) for module in wide.modules)
    last = next(i for i in layout.chunks_of("lm") if layout.chunks[i].layers[1] >= model.modules[1].takes[-1].layer)
    return (
        forward_bytes(model, layout, last),
        forward_bytes(wide, msgspec.structs.replace(layout, modules=modules), last),
    )


def forward_bytes(model: ModelSpec, layout: Layout, last: int) -> int:
    """What transfers between ranks add up to, up to a chunk."""
    samples = tuple(Sample(str(i), _TEXT_TOKENS, (_PATCHES // _MERGED,), (_PATCHES,)) for i in range(_NUM_SAMPLES))
    packing = pack(Batch(samples), model, layout, PackingSpec(_PATCHES))
    units = (
        Unit(chunk, m, part)
        for m, microbatch in enumerate(packing.microbatches)
        for chunk, where in enumerate(layout.chunks)
        for part in range(len(microbatch.parts[packing.modules.index(where.module)]))
    )
    shapes, total = boundary_shapes(model, layout), 0
    for transfer in make_routes(layout, packing, units).transfers:
        above, below = transfer.producer.chunk, transfer.consumer.chunk
        if below <= last and layout.chunks[above].rank != layout.chunks[below].rank:
            shape, dtype = shapes(above, transferred_workload(transfer, layout, packing), transfer.stream)
            total += prod(shape) * DTYPE_BYTES[dtype]
    return total


@cache
def model_of(size: str) -> ModelSpec:
    """As planned from its configuration."""
    depth, width, emitting, blocks, hidden = _SIZES[size]
    text = {"model_type": "qwen3_vl_text", "hidden_size": hidden, "num_hidden_layers": blocks}
    vision = {"depth": depth, "hidden_size": width, "out_hidden_size": hidden, "deepstack_visual_indexes": emitting}
    config = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    return EmulatedCosts(trace_config(config | {"vision_config": vision}, size), "h100-8", Degrees()).model_spec


def widened(model: ModelSpec, merged: bool = False) -> ModelSpec:
    """The same without streams, with room for all features in every row on the way.

    ``merged``: inside the encoder for features that are merged, four rows in one, and else for rows as they are.
    """
    vision, lm = model.modules
    factor = 1 + len(vision.emits)
    inside = sum(_width(end.output) // _MERGED for end in vision.emits)

    def in_vision(layer: LayerSpec, number: int) -> int:
        is_inside = number < len(vision.flat_layers) - 1
        return _width(layer.output) + inside if merged and is_inside else _width(layer.output) * factor

    def in_lm(layer: LayerSpec, number: int) -> int:
        return _width(layer.output) * (factor if number < lm.takes[-1].layer else 1)

    return ModelSpec(model.name, (_of_widths(vision, in_vision), _of_widths(lm, in_lm)))


def _of_widths(module: ModuleSpec, width: Callable[[LayerSpec, int], int]) -> ModuleSpec:
    layers = []
    for number, layer in enumerate(module.flat_layers):
        output = TensorShape((layer.output.dims[0], width(layer, number)), layer.output.dtype)
        layers.append(msgspec.structs.replace(layer, count=1, output=output))
    return msgspec.structs.replace(module, layers=tuple(layers), emits=(), takes=())


def _width(shape: TensorShape) -> int:
    _, width = shape.dims
    assert isinstance(width, int)
    return width


# ------------------------------------------------------------------ layouts


def behind_one_another(model: ModelSpec, num_chunks: int) -> Layout:
    """Every chunk on a rank of its own, the language model in four: its first layers in the first of them."""
    return _chain(model, num_chunks, _runs(model.modules[1], 4))


def taken_apart(model: ModelSpec, num_chunks: int) -> Layout:
    """Likewise, the layers that take features in chunks of their own."""
    lm = model.modules[1]
    first, *others = [end.layer for end in lm.takes]
    last = len(lm.flat_layers) - 1
    return _chain(model, num_chunks, [(0, first), *((layer, layer) for layer in others[:-1]), (others[-1], last)])


def on_the_same_ranks(model: ModelSpec, num_chunks: int) -> Layout:
    """Every rank has a chunk of either module."""
    return separate(model, num_chunks, {}, by_count)


def _chain(model: ModelSpec, num_chunks: int, runs: Iterable[tuple[int, int]]) -> Layout:
    parts = [("vision", run) for run in _runs(model.modules[0], num_chunks)] + [("lm", run) for run in runs]
    chunks = tuple(Chunk(name, run, rank) for rank, (name, run) in enumerate(parts))
    return Layout(len(chunks), tuple(map(ModuleLayout.of, model.modules)), chunks)


def _runs(module: ModuleSpec, num_chunks: int) -> tuple[tuple[int, int], ...]:
    return partition_chain([by_count(module.name, layer) for layer in module.flat_layers], num_chunks)


# ------------------------------------------------------------------ rows


def _cells(size: str, lay_out: LayOut, num_chunks: int) -> tuple[str, str]:
    named, wide = count(size, lay_out, num_chunks)
    return (f"{named / 1e6:.1f}", f"{named / wide:.3f}") if wide else ("0", "")


def _size_row(size: str) -> list[str]:
    depth, width, _, _, hidden = _SIZES[size]
    found = {}
    for merged in (False, True):
        counts = {n: count(size, behind_one_another, n, merged) for n in range(1, depth + 3)}
        found[merged] = {n: named / wide for n, (named, wide) in counts.items()}
    first = [next((str(n) for n, ratio in each.items() if ratio <= _THIRD), "never") for each in found.values()]
    ratios = [f"{found[False][n]:.3f}" for n in _CHUNKS[1:]]
    return [size, f"{width}, {hidden}", *ratios, first[0], *(f"{found[True][n]:.3f}" for n in (4, 16)), first[1]]
