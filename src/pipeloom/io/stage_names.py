"""Layouts in the notation of other programs: Megatron's pipeline layout string and torchtitan's module names per stage.

Megatron (``--pipeline-model-parallel-layout``): ``E`` is the embedding, ``t`` a layer, ``m`` a multi-token prediction
layer and ``L`` the loss. ``|`` separates stages; ``x*3`` and ``(x)*3`` repeat. Stage i is on rank ``i % p``. torchtitan
(``module_fqns_per_model_part``): a list of module names per stage, with stages on ranks in turn or in a V.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from pipeloom.errors import InputError
from pipeloom.spec import Layout

_MOST_LETTERS = 2**20
_REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
"""Patterns of repetitions, in the order in which Megatron expands them: a bracket, then one character."""


def _chunks(layout: Layout, num_layers: int) -> list[tuple[int, int, int]]:
    """Return first layer, last layer and rank of every stage. Adjacent chunks on one rank are one stage."""
    if len(layout.modules) != 1:
        raise InputError("layout", f"has {len(layout.modules)} modules", "only one chain can be written so")
    stages: list[tuple[int, int, int]] = []
    for chunk in layout.chunks:
        if stages and stages[-1][2] == chunk.rank:
            stages[-1] = (stages[-1][0], chunk.layers[1], chunk.rank)
        else:
            stages.append((*chunk.layers, chunk.rank))
    if stages[-1][1] != num_layers - 1:
        raise InputError("layers", f"are {num_layers}, the layout has {stages[-1][1] + 1}")
    return stages


def _letters(names: tuple[str, ...]) -> list[str]:
    """Return the letters of each layer.

    An embedding or head that is not a layer of its own joins the first or last layer.
    """
    alone_first, alone_last = names[0] == "embedding", names[-1] == "head"
    letters = ["t"] * len(names)
    letters[0] = "E" if alone_first else "Et"
    letters[-1] = "L" if alone_last else letters[-1] + "L"
    return letters


def megatron_layout(layout: Layout, layer_names: tuple[str, ...]) -> str:
    """Return a layout of one module as Megatron's string.

    If ``layer_names`` begin with ``embedding`` or end with ``head``, these are layers of their own. Otherwise both are
    part of a layer. Raise `InputError` if the stages are not on the ranks in turn, with the same number on each rank.
    Megatron supports nothing else.
    """
    stages = _chunks(layout, len(layer_names))
    p = layout.num_ranks
    for i, (first, last, rank) in enumerate(stages):
        if rank != i % p:
            raise InputError(
                f"layers {first} to {last}", f"are on rank {rank}, Megatron puts stage {i} on rank {i % p}"
            )
    if len(stages) % p:
        raise InputError("layout", f"has {len(stages)} stages, which is not a multiple of {p} ranks")
    letters = _letters(layer_names)
    return megatron_text(["".join(letters[first : last + 1]) for first, last, _ in stages])


def megatron_text(stages: Sequence[str]) -> str:
    """Return stages of letters as Megatron's string, with runs of three or more as ``t*3`` and ``(tt|)*3``."""
    parts: list[str] = []
    for stage, run in itertools.groupby(stages):
        text, count = re.sub("t{3,}", lambda layers: f"t*{len(layers[0])}", stage), len(list(run))
        parts.append(f"({text}|)*{count}" if count > 2 else f"{text}|" * count)
    whole = "".join(parts)
    # The last stage has no bar after it. So a run at the end of the string is one shorter, followed by the stage.
    ended = re.fullmatch(r"(.*)\(([^()]*)\|\)\*(\d+)", whole)
    if ended is None:
        return whole.removesuffix("|")
    before, text, left = ended[1], ended[2], int(ended[3]) - 1
    return before + (f"({text}|)*{left}" if left > 2 else f"{text}|" * left) + text


def megatron_stages(text: str) -> tuple[str, ...]:
    """Return the letters of every stage, with repetitions expanded as in Megatron's parser.

    Raise `InputError` if Megatron rejects the string, or it is too long.
    """
    text = text.replace(",", "")
    for pattern in _REPEATS:
        size = len(text) + sum(len(found[1]) * int(found[2][:9]) for found in pattern.finditer(text))
        if size > _MOST_LETTERS:
            raise InputError("layout", f"is longer than {_MOST_LETTERS} letters")
        text = pattern.sub(lambda found: found[1] * int(found[2]), text)
    unknown = sorted(set(text) - set("EtLm|"))
    if set("*()").intersection(unknown):
        raise InputError(
            "layout",
            "has a * or a bracket that Megatron cannot read",
            "repeat a letter as t*3, and stages as (tt|)*3, without a repetition of a repetition",
        )
    if unknown:
        raise InputError("layout", f"{unknown[0]!r} is not known", "use E, t, m, L, |, * and brackets")
    return tuple(text.split("|"))


def torchtitan_modules(layout: Layout, layer_names: tuple[str, ...]) -> list[list[str]]:
    """Return a layout as torchtitan's module names per stage (``module_fqns_per_model_part``).

    Raise `InputError` if the stages are neither on the ranks in turn nor, two per rank, in a V.
    """
    stages, p = _chunks(layout, len(layer_names)), layout.num_ranks
    if [rank for _, _, rank in stages] == [*range(p), *reversed(range(p - 1))]:
        # A V has two stages on the last rank. Cut at the last chunk boundary inside it, or else in the middle.
        first, last, rank = stages[p - 1]
        inner = [c.layers[0] for c in layout.chunks if first < c.layers[0] <= last]
        at = inner[0] if inner else (first + last + 1) // 2
        if at > first:
            stages[p - 1 : p] = [(first, at - 1, rank), (at, last, rank)]
    ranks = [rank for _, _, rank in stages]
    in_turn = len(ranks) % p == 0 and ranks == [i % p for i in range(len(ranks))]
    if not in_turn and ranks != [*range(p), *reversed(range(p))]:
        raise InputError(
            "layout", f"has its stages on ranks {ranks}", "torchtitan knows stages in turn, or two a rank in a V"
        )
    shift = 1 if layer_names[0] == "embedding" else 0
    names: list[list[str]] = []
    for first, last, _ in stages:
        stage = []
        for layer in range(first, last + 1):
            if layer == 0:
                stage.append("tok_embeddings")
            if not (layer == 0 and shift) and not (layer == len(layer_names) - 1 and layer_names[-1] == "head"):
                stage.append(f"layers.{layer - shift}")
            if layer == len(layer_names) - 1:
                stage += ["norm", "output"]
        names.append(stage)
    return names
