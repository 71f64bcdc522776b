"""Figures of ours beside DIP's evaluation that our texts quote and no paper claims."""

from __future__ import annotations

from pipeloom.lab.reproduce.claims import Found, OwnFigure
from pipeloom.lab.reproduce.dip.claims.words import AHEAD, INTERLEAVED, ITERATIONS, T2V, VLM
from pipeloom.lab.reproduce.dip.runs import FORMS

OWN: tuple[OwnFigure, ...] = (
    OwnFigure(
        "over-megatron",
        "Five models, over Megatron-LM interleaved by parameters with any number of chunks: least and most",
        tuple(Found("figure-8a", "over Megatron-LM", how=how, table="Gain of ours") for how in ("least", "most")),
        "%",
    ),
    OwnFigure(
        "over-best",
        "The same, over the best baseline",
        tuple(Found("figure-8a", "over the best baseline", how=how, table="Gain of ours") for how in ("least", "most")),
        "%",
    ),
    OwnFigure(
        "over-best-given",
        "The same with the microbatches that the baselines are given: VLM-S, M, L, T2V-S, L",
        tuple(Found("figure-8a", "the same, microbatches given", (model,), "Gain of ours") for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "room",
        "VLM-S, M, L, T2V-S, L: the best baseline above the least lower bound of the layouts and packings tried",
        tuple(Found("figure-8a", "room to the lower bound", (model,), "Gain of ours") for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "room-closed",
        "Of it closed by ours",
        tuple(Found("figure-8a", "of it closed", (model,), "Gain of ours") for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "room-closed-given",
        "The same with the microbatches that the baselines are given",
        tuple(Found("figure-8a", "closed, microbatches given", (model,), "Gain of ours") for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "images-over-megatron",
        "VLM-S with 2 to 44 images a microbatch, over Megatron-LM interleaved by parameters: least and most",
        tuple(
            Found("images", f"over {INTERLEAVED}", how=how, table="Fig. 8a over images") for how in ("least", "most")
        ),
        "%",
    ),
    OwnFigure(
        "images-over-best",
        "The same, over the best baseline",
        tuple(
            Found("images", "over the best of these", how=how, table="Fig. 8a over images") for how in ("least", "most")
        ),
        "%",
    ),
    OwnFigure(
        "over-dip",
        "Five models, over the best form of DIP",
        tuple(
            Found("figure-8a", "over DIP, best of its forms", how=how, table="Gain of ours")
            for how in ("least", "most")
        ),
        "%",
    ),
    OwnFigure(
        "over-dip-same",
        "VLM-S, M, L, T2V-S, L: over the best form of DIP on DIP's own layout",
        tuple(Found("published", "ours on DIP's layout", (model, FORMS), how="least") for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "over-omni",
        "VLM-S, M, L: over MegaScale-Omni's way, whose encoders are whole on every device too",
        tuple(Found("figure-8a", AHEAD, (model, "MegaScale-Omni"), ITERATIONS) for model in VLM),
        "%",
    ),
    OwnFigure(
        "vlm-m-rules",
        "VLM-M: lower bound of the rules' layout, the best divided one and its bound, the best dealt one and its bound",
        (
            Found("layouts", "lower bound, s", ("vision 9 x1, lm all x1",), "VLM-M"),
            Found("layouts", "planned, s", ("vision 18 x2, lm all x2",), "VLM-M"),
            Found("layouts", "lower bound, s", ("vision 18 x2, lm all x2",), "VLM-M"),
            Found("layouts", "planned, s", ("vision all x1, lm all x1; instances dealt",), "VLM-M"),
            Found("layouts", "lower bound, s", ("vision all x1, lm all x1; instances dealt",), "VLM-M"),
        ),
        "s",
    ),
)
