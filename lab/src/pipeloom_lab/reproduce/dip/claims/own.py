"""Figures of ours beside DIP's evaluation that our texts quote and no paper claims."""

from __future__ import annotations

from pipeloom_lab.reproduce.claims import Found, Least, OwnFigure
from pipeloom_lab.reproduce.dip.claims.words import (
    AHEAD,
    BY_TIME,
    INTERLEAVED,
    ITERATIONS,
    T2V,
    T2V_XL,
    VLM,
    VLM_XL,
    gain,
)
from pipeloom_lab.reproduce.dip.runs import BASELINE_TITLES, FORMS

OWN: tuple[OwnFigure, ...] = (
    OwnFigure(
        "over-megatron",
        "Five models, over Megatron-LM interleaved by parameters with any number of chunks: least and most",
        tuple(gain("over Megatron-LM", how=how) for how in ("least", "most")),
        "%",
    ),
    OwnFigure(
        "over-megatron-time",
        "The same, over Megatron-LM interleaved by time",
        tuple(Found("figure-8a", AHEAD, ((*VLM, *T2V), BY_TIME), ITERATIONS, how) for how in ("least", "most")),
        "%",
    ),
    OwnFigure(
        "over-best",
        "The same, over the best of nine baselines, DIP not among them",
        tuple(gain("over the best baseline", how=how) for how in ("least", "most")),
        "%",
    ),
    OwnFigure(
        "over-all",
        "VLM-S, M, L, T2V-S, L: over the fastest of the nine baselines and of DIP's forms",
        tuple(
            Found("figure-8a", AHEAD, (model, (*BASELINE_TITLES, "DIP")), ITERATIONS, "least") for model in (*VLM, *T2V)
        ),
        "%",
    ),
    OwnFigure(
        "over-unsearched",
        "VLM-S, M, L, T2V-S, L: over the faster of two without a search: our own layouts under Megatron-LM's "
        "interleaved order, and DIP's layout under the dual queue",
        tuple(
            Least((Found("unsearched", AHEAD, (model,)), Found("published", "ours by", (model, "DIP, no search"))))
            for model in (*VLM, *T2V)
        ),
        "%",
    ),
    OwnFigure(
        "over-best-given",
        "VLM-S, M, L, T2V-S, L: over the best of nine with the microbatches that these are given",
        tuple(gain("the same, microbatches given", model) for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "room",
        "VLM-S, M, L, T2V-S, L: the best of nine baselines above the least lower bound, of three layouts with given "
        "microbatches and of the packings that our planner judged",
        tuple(gain("room to the lower bound", model) for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure("room-closed", "Of it closed by ours", tuple(gain("of it closed", model) for model in (*VLM, *T2V)), "%"),
    OwnFigure(
        "room-closed-given",
        "The same with the microbatches that the baselines are given",
        tuple(gain("closed, microbatches given", model) for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "images-over-megatron",
        "VLM-S with 2 to 44 images a microbatch, two iterations of one seed, over Megatron-LM interleaved by "
        "parameters: least and most",
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
        "Five models, over the best form of DIP, layout and packing counted in",
        tuple(gain("over DIP, best of its forms", how=how) for how in ("least", "most")),
        "%",
    ),
    OwnFigure(
        "over-dip-same",
        "VLM-S, M, L, T2V-S, L: over the best form of DIP, on DIP's own layout and microbatches",
        tuple(Found("published", "ours on DIP's layout", (model, FORMS), how="least") for model in (*VLM, *T2V)),
        "%",
    ),
    OwnFigure(
        "over-omni",
        "VLM-S and M: over MegaScale-Omni's way, whose encoders are whole on every device too; VLM-L's does not fit so",
        tuple(Found("figure-8a", AHEAD, (model, "MegaScale-Omni"), ITERATIONS) for model in VLM[:2]),
        "%",
    ),
    OwnFigure(
        "over-dip-large",
        "On thousands of GPUs, over the best form of DIP: VLM-XL on 8 and 16 ranks, T2V-XL on 4 and 8",
        tuple(
            Found("figure-14", AHEAD, (setup, ("DIP", "PipeWeaver")), "Large clusters", "least")
            for setup in (*VLM_XL, *T2V_XL)
        ),
        "%",
    ),
    OwnFigure(
        "planning-gap",
        "Five models: plans of ten seconds above the lower bound of their layout and of the packings judged, least and "
        "most",
        tuple(Found("planning", "above the lower bound", ((*VLM, *T2V),), how=how) for how in ("least", "most")),
        "%",
    ),
    OwnFigure(
        "vlm-m-rules",
        "VLM-M: lower bound of the rules' layout, the best divided one and its bound, the best dealt one and its bound",
        (
            Found("layouts", "lower bound, s", ("vision 9 x1, lm all x1",), "VLM-M"),
            Found("layouts", "planned, s", ("vision 18 x1, lm all x1",), "VLM-M"),
            Found("layouts", "lower bound, s", ("vision 18 x1, lm all x1",), "VLM-M"),
            Found("layouts", "planned, s", ("vision all x1, lm all x1; instances dealt",), "VLM-M"),
            Found("layouts", "lower bound, s", ("vision all x1, lm all x1; instances dealt",), "VLM-M"),
        ),
        "s",
    ),
)
