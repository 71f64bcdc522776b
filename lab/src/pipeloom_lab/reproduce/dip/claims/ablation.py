"""What each of DIP's techniques brings (its section 7.3)."""

from __future__ import annotations

from pipeloom_lab.reproduce.claims import Claim, Found
from pipeloom_lab.reproduce.dip.claims.words import UNSTATED_SECONDS


def _step(label: str) -> Found:
    return Found("table-5", "faster by", (label,))


def _shows_on(effect: str, column: str = "shows on") -> Found:
    """On how many of the workloads that were tried an effect shows, or of how many."""
    return Found("literal", column, (effect,), "On how many")


ABLATION: tuple[Claim, ...] = (
    Claim(
        "table-5-seconds",
        "VLM-S: seconds of vanilla Megatron-LM, and of DIP",
        "DIP Table 5, PipeWeaver Table 5",
        "26.13, 16.05 s",
        tuple(
            Found("table-5", "seconds", (name,))
            for name in ("Megatron-LM interleaved", "+ per-layer memory strategies")
        ),
        "near",
        UNSTATED_SECONDS,
        "s",
        of="written again",
        incomparable=True,
    ),
    Claim(
        "table-5-partitioner",
        "+ modality-aware partitioner",
        "DIP Table 5, §7.3, PipeWeaver Table 5",
        "17.3 %",
        (_step("+ modality-aware partitioner"),),
        "at least",
        "DIP written again. Megatron-LM has as many chunks as suit it, and is nearer to even than the paper's.",
        "%",
        of="written again",
    ),
    Claim(
        "table-5-interleaving",
        "+ pipeline stage interleaving",
        "DIP Table 5, PipeWeaver Table 5",
        "38.9 %",
        (_step("+ stage interleaving"),),
        "at least",
        "DIP written again, over the same nearer-to-even Megatron-LM.",
        "%",
        of="written again",
    ),
    Claim(
        "table-5-reordering",
        "+ pipeline segment reordering",
        "DIP Table 5, PipeWeaver Table 5",
        "48.3 %",
        (_step("+ segment reordering"),),
        "at least",
        "With 64 microbatches the tree search, on one core, finds no better order than its first; with 8 reordering "
        "brings {eight} %, with 4 {four} %.",
        "%",
        also={
            "eight": Found("literal", "reordering brings", ("VLM-S", "8", "its own data", "100 %")),
            "four": Found("literal", "reordering brings", ("VLM-S", "4")),
        },
        of="written again",
    ),
    Claim(
        "table-5-dip",
        "+ per-layer memory optimisation: DIP whole",
        "DIP Table 5, PipeWeaver Table 5",
        "62.8 %",
        (_step("+ per-layer memory strategies"),),
        "at least",
        "DIP written again; from the best uniform strategies it has {uniform} %. Orders made for the leanest "
        "strategies fill the memory; made to the paper's letter, strategies pay on {pay} of {tried} workloads tried.",
        "%",
        also={
            "uniform": _step("the same, orders made for the best uniform"),
            "pay": _shows_on("strategies"),
            "tried": _shows_on("strategies", "of"),
        },
        of="written again",
    ),
    Claim(
        "table-5-ours",
        "The same, by Pipeloom",
        "DIP Table 5",
        "62.8 %",
        (_step("ours"),),
        "at least",
        "Over Megatron-LM by parameters with any number of chunks; cut by time, Megatron-LM gains {even} % itself. On "
        "DIP's layout ours has {same} %: the rest is layout, dealt images and packing, which DIP does not have.",
        "%",
        also={"even": _step("Megatron-LM interleaved, by time"), "same": _step("ours on DIP's layout")},
    ),
    Claim(
        "step-interleaving",
        "Interleaving alone brings, in points",
        "DIP §7.3, PipeWeaver §8.2",
        "21.6 points",
        (Found("table-5", "faster by", ("+ stage",), minus=_step("+ modality-aware partitioner")),),
        "at least",
        "DIP written again.",
        "points",
        of="written again",
    ),
    Claim(
        "step-reordering",
        "Reordering and memory strategies together bring, in points",
        "DIP §7.3, PipeWeaver §8.2",
        "23.9 points",
        (Found("table-5", "faster by", ("+ per-layer",), minus=_step("+ stage interleaving")),),
        "at least",
        "DIP written again: strategies chosen for the published orders lose against the best uniform one. Of {tried} "
        "workloads tried, strategies made to the paper's letter pay on {pay}, reordering under uniform ones on "
        "{reordering}. Pipeloom has {ours} % in all.",
        "points",
        also={
            "ours": _step("ours"),
            "tried": _shows_on("strategies", "of"),
            "pay": _shows_on("strategies"),
            "reordering": _shows_on("reordering"),
        },
        of="written again",
    ),
    Claim(
        "figure-9-gap",
        "Gap of best and worst order: large sub-microbatches, and small ones",
        "DIP Fig. 9, §7.3, PipeWeaver Fig. 10",
        "15.4, 5.1 %",
        (
            Found("figure-9", "ours", ("gap at the largest",), "What it shows"),
            Found("figure-9", "ours", ("gap at 4",), "What it shows"),
        ),
        "near",
        "The worst order found here is as far off at every size.",
        "%",
        of="setting",
    ),
    Claim(
        "figure-9-small",
        "Sub-microbatches below 8 images lengthen the iteration",
        "DIP Fig. 9, §7.3, PipeWeaver Fig. 10",
        "12.1 %",
        (Found("figure-9", "ours", ("4 images against",), "What it shows"),),
        "near",
        "The emulated kernels lose less efficiency on few images.",
        "%",
        of="setting",
    ),
    Claim(
        "figure-9-best",
        "The best size of a sub-microbatch, in images",
        "DIP §7.3, PipeWeaver §8.2",
        "12",
        (Found("figure-9", "ours", ("best size",), "What it shows"),),
        "near",
        "With 12 images an iteration takes {twelve} s, with the best size {best} s.",
        also={
            "twelve": Found("figure-9", "best, s", ("12",), "VLM-S"),
            "best": Found("figure-9", "best, s", how="least", table="VLM-S"),
        },
        of="setting",
    ),
    Claim(
        "figure-10-optimus",
        "Optimus' peak memory is above Megatron-LM's",
        "DIP Fig. 10, §7.3, PipeWeaver Fig. 11",
        "25.3 %",
        (Found("figure-10", "ours", ("Optimus' peak",), "What it shows"),),
        "near",
        "Microbatches and recomputation of the paper are not stated.",
        "%",
        of="written again",
    ),
    Claim(
        "figure-10-full",
        "Per-layer strategies use the memory that Megatron-LM leaves, peaks in GB",
        "DIP Fig. 10, §7.3, PipeWeaver Fig. 11",
        "more",
        tuple(Found("figure-10", "peak, GB", (name,)) for name in ("Megatron-LM interleaved", "DIP as published")),
        "rises",
        "Of devices with 80 GB.",
        "GB",
        of="written again",
    ),
    Claim(
        "figure-10-calm",
        "Memory fluctuates less than Megatron-LM's",
        "DIP Fig. 10, §7.3, PipeWeaver Fig. 11",
        "52.9 %",
        (Found("figure-10", "ours", ("fluctuation of ours",), "What it shows"),),
        "at least",
        "Pipeloom fills the memory; DIP, in its quickest form, fluctuates {dip} % less. The measure is our reading.",
        "%",
        also={"dip": Found("figure-10", "ours", ("fluctuation of DIP",), "What it shows")},
    ),
    Claim(
        "figure-10-equal",
        "Faster than Optimus at its peak memory",
        "DIP Fig. 10, §7.3, PipeWeaver Fig. 11",
        "12.2 %",
        (Found("figure-10", "ours", ("ours over Optimus",), "What it shows"),),
        "at least",
        "Pipeloom's, which deals images and makes its own microbatches, on one iteration of VLM-M. DIP written again "
        "is put to no such limit: in all the device's memory it takes {dip} s, from the best uniform strategies "
        "{uniform} s, Optimus {optimus} s at its peak.",
        "%",
        also={
            "dip": Found("figure-10", "seconds", ("DIP as published",)),
            "uniform": Found("figure-10", "seconds", ("DIP from uniform",)),
            "optimus": Found("figure-10", "seconds", ("Optimus, coarse",)),
        },
    ),
)
