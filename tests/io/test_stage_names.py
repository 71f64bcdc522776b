"""Layouts in the forms of Megatron and torchtitan."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.errors import InputError
from pipeloom.io.stage_names import megatron_layout, megatron_stages, torchtitan_modules
from pipeloom.spec import Chunk, Layout, ModuleLayout


def layout(cuts: list[int], ranks: list[int], num_ranks: int) -> Layout:
    chunks = tuple(Chunk("lm", (a, b - 1), r) for a, b, r in zip(cuts, cuts[1:], ranks, strict=False))
    return Layout(num_ranks=num_ranks, modules=(ModuleLayout("lm"),), chunks=chunks)


NAMES = ("embedding", *(f"layer.{i}" for i in range(1, 7)), "head")


def test_megatron_with_embedding_and_head_of_their_own() -> None:
    assert megatron_layout(layout([0, 1, 5, 7, 8], [0, 1, 0, 1], 2), NAMES) == "E|t*4|tt|L"


def test_megatron_with_embedding_and_head_in_layers() -> None:
    names = tuple(f"layer.{i}" for i in range(5))
    assert megatron_layout(layout([0, 2, 5], [0, 1], 2), names) == "Ett|t*3L"


def test_megatron_joins_neighbors_on_one_rank_and_refuses_other_placements() -> None:
    assert megatron_layout(layout([0, 1, 3, 8], [0, 0, 1], 2), NAMES) == "Ett|t*4L"
    with pytest.raises(InputError, match="are on rank 1, Megatron puts stage 3 on rank 0"):
        megatron_layout(layout([0, 2, 4, 5, 8], [0, 1, 2, 1], 3), NAMES)
    with pytest.raises(InputError, match="not a multiple of 2 ranks"):
        megatron_layout(layout([0, 2, 4, 8], [0, 1, 0], 2), NAMES)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 3))
def test_megatron_is_read_back(sizes: list[int], rounds: int) -> None:
    p = len(sizes)
    counts = sizes * rounds
    cuts = [0]
    for size in counts:
        cuts.append(cuts[-1] + size)
    ranks = [i % p for i in range(len(counts))] if p > 1 else [0] * len(counts)
    one = layout(cuts, ranks, p)
    names = tuple(f"layer.{i}" for i in range(cuts[-1]))
    again = [stage.count("t") for stage in megatron_stages(megatron_layout(one, names))]
    assert again == (counts if p > 1 else [cuts[-1]])


def test_megatron_repetitions() -> None:
    assert megatron_stages("Et*3|(tt|)*2tL") == ("Ettt", "tt", "tt", "tL")
    assert megatron_stages("E,(t*2|)*2,|*2L") == ("Ett", "tt", "", "", "L")
    assert megatron_stages("t*0E*1(tt)*2") == ("Etttt",)
    assert megatron_stages("(t|)*2*2") == ("t", "t", "", "")


@pytest.mark.parametrize(
    "text",
    [
        *("E|x|L", "t*", "E**2|t", "Et t|L", "E|t|l", "t*2*2", "E((t|)*2t|)*2ttL|", "E(t)|L", "()*2", "t*-1", "t*2)"),
        *("t*" + "9" * 8, "(t*999)*9999999", "t*" + "9" * 5000, "((t*99)*99)*99"),
    ],
)
def test_megatron_refuses(text: str) -> None:
    with pytest.raises(InputError):
        megatron_stages(text)


PIECES = [
    "E",
    "t",
    "L",
    "m",
    "|",
    "*",
    "*2",
    "*3",
    "*0",
    "(",
    ")",
    "tt",
    "t|",
    "(t|)*2",
    "t*2",
    ",",
    " ",
    "x",
    "2",
    "e",
]


def megatrons_parser():
    """Its function alone, since importing the package takes many seconds."""
    found = importlib.util.find_spec("megatron")
    # Folders of that name, among our examples for one, belong to the package too.
    folders = map(Path, found.submodule_search_locations or ()) if found is not None else ()
    files = [folder / "core/transformer/pipeline_parallel_layer_layout.py" for folder in folders]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        pytest.skip("Megatron Core is not installed")
    nodes = ast.walk(ast.parse(file.read_text()))
    (function,) = (n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "parse_str_to_list")
    function.decorator_list = []
    scope = {"re": re, "LayerType": SimpleNamespace(embedding="E", decoder="t", mtp="m", loss="L")}
    exec(compile(ast.Module([function], []), str(file), "exec"), scope)
    return scope["parse_str_to_list"]


def test_megatrons_own_parser_reads_and_refuses_the_same_strings() -> None:
    """Thousands of strings of pieces that layouts are made of, and as many mutations of layouts."""
    parser, random, taken = megatrons_parser(), Random(7), 0
    for _ in range(4000):
        made = "".join(random.choices(PIECES, k=random.randint(1, 9)))
        good = "E" + "".join(random.choices(["t*3|", "(tt|)*2", "t|", "|", "tt|"], k=random.randint(1, 5))) + "mL"
        at = random.randrange(len(good))
        changed = good[:at] + random.choice(["", *"*()|,2tE x"]) + good[at + random.randint(0, 1) :]
        for text in (made, good, changed):
            try:
                theirs = ["".join(stage) for stage in parser(text)]
            except AssertionError:
                with pytest.raises(InputError):
                    megatron_stages(text)
            else:
                assert list(megatron_stages(text)) == theirs, text
                taken += 1
    assert 5000 < taken < 11000


def test_torchtitan_in_turn_and_in_a_v() -> None:
    assert torchtitan_modules(layout([0, 1, 7, 8], [0, 1, 2], 3), NAMES) == [
        ["tok_embeddings"],
        [f"layers.{i}" for i in range(6)],
        ["norm", "output"],
    ]
    # In a V the two stages of the last rank are neighbours, and so one: such a layout has 2p - 1 stages.
    five = tuple(f"layer.{i}" for i in range(5))
    assert torchtitan_modules(layout([0, 1, 2, 3, 4, 5], [0, 1, 1, 0, 0], 2), five) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2"],
        ["layers.3", "layers.4", "norm", "output"],
    ]
    with pytest.raises(InputError, match="in turn, or two a rank in a V"):
        torchtitan_modules(layout([0, 2, 4, 8], [0, 2, 1], 3), NAMES)
