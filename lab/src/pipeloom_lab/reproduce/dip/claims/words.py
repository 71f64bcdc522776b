"""Words that several of DIP's claims use: systems, models and columns as the records name them."""

from __future__ import annotations

from pipeloom_lab.reproduce.claims import Found, How

VLM, T2V = ("VLM-S", "VLM-M", "VLM-L"), ("T2V-S", "T2V-L")
VLM_XL = ("VLM-XL, 8192 GPUs", "VLM-XL, 16384 GPUs")
T2V_XL = ("T2V-XL, 3072 GPUs", "T2V-XL, 6144 GPUs")
INTERLEAVED = "Megatron-LM interleaved, by parameters"
BY_TIME = "Megatron-LM interleaved, by time"
AHEAD, ITERATIONS = "ours is faster by", "Seconds of an iteration"
UNSTATED_SECONDS = (
    "The paper states neither how many microbatches it has here (its section 2 counts with 64), nor what is "
    "recomputed, nor the mixture of its data."
)


def gain(column: str, models: str | tuple[str, ...] = (*VLM, *T2V), how: How = "one") -> Found:
    """What ours is faster by in Fig. 8a, or the room that there is."""
    return Found("figure-8a", column, (models,), "Gain of ours", how)
