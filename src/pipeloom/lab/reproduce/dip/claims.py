"""What DIP and PipeWeaver claim. Pages of PipeWeaver repeat DIP's figures; its own are named so."""

from __future__ import annotations

from pipeloom.lab.reproduce.claims import Claim, Found, OwnFigure
from pipeloom.lab.reproduce.dip.runs import BASELINES, FORMS

_VLM, _T2V = ("VLM-S", "VLM-M", "VLM-L"), ("T2V-S", "T2V-L")
_INTERLEAVED = "Megatron-LM interleaved, by parameters"
_BY_TIME = "Megatron-LM interleaved, by time"
_BASELINES = (_INTERLEAVED, "nnScaler*", "Optimus, coarse")
"""The paper's own."""
_AHEAD, _ITERATIONS = "ours is faster by", "Seconds of an iteration"
_GPUS = "Needs GPUs under every degree of parallelism; none was at hand."


def _faster(models: tuple[str, ...], how: str) -> Found:
    return Found("figure-8a", _AHEAD, (models, _BASELINES), _ITERATIONS, "least" if how == "least" else "most")


def _step(label: str) -> Found:
    return Found("table-5", "faster by", (label,))


def _large(system: str, setups: tuple[str, ...], column: str) -> tuple[Found, ...]:
    return tuple(Found("figure-14", column, (setup, system), "Large clusters") for setup in setups)


def _large_mfu(model: str, setups: tuple[str, ...], paper: str, devices: str) -> Claim:
    """MFU on thousands of GPUs."""
    beside = {"dip": "DIP as published", "megatron": _BY_TIME}
    return Claim(
        f"figure-14-{model[:3].lower()}",
        f"{model} on {devices}: MFU",
        "DIP Fig. 14, §7.5, PipeWeaver Fig. 14",
        ", ".join(paper for _ in setups),
        _large("Pipeloom", setups, "MFU"),
        "at least",
        "Pipeloom's. DIP written again has {dip}, Megatron-LM by time {megatron}: emulated kernels lack what GPUs add. "
        "One iteration of one seed.",
        also={name: _large(system, setups[:1], "MFU")[0] for name, system in beside.items()},
        incomparable=True,
    )


def _large_grows(model: str, setups: tuple[str, ...], ranks: str) -> Claim:
    """The gain over the best baseline, on the shorter and on the longer pipeline."""
    lengths = {"few": "shorter pipeline", "many": "longer pipeline"}
    return Claim(
        f"figure-14-{model[:3].lower()}-grows",
        f"{model}: the gain grows with the pipeline",
        "DIP Fig. 14, §7.5, PipeWeaver §8.4",
        "grows",
        tuple(Found("figure-14", _AHEAD, (setup, BASELINES), "Large clusters", "least") for setup in setups),
        "rises",
        f"Pipeloom over the best baseline, on {ranks} ranks; over Megatron-LM interleaved by parameters it is "
        "{few} and {many} %. One iteration of one seed.",
        "%",
        also={name: Found("figure-14", column, (model,), "Gain over") for name, column in lengths.items()},
    )


def _behind(system: str, column: str, nth: int = 1) -> Found:
    return Found("figure-8b", column, (system,), nth=nth)


_VLM_XL = ("VLM-XL, 8192 GPUs", "VLM-XL, 16384 GPUs")
_T2V_XL = ("T2V-XL, 3072 GPUs", "T2V-XL, 6144 GPUs")
_UNSTATED_SECONDS = "The paper states neither its microbatches, nor what is recomputed, nor the mixture of its data."
_FITTED = "The samplers were fitted to this, so that it agrees shows nothing."

_CHARACTER = (
    Claim(
        "layer-vit",
        "A layer of the ViT takes 6.75 ms for 8 images",
        "DIP §2.2, PipeWeaver §2.2",
        "6.75 ms",
        (Found("section-2-2", "ours", ("layer of the ViT",)),),
        "near",
        "It was in view when the efficiencies of H800 were chosen, so that it agrees shows nothing.",
        "ms",
        incomparable=True,
    ),
    Claim(
        "layer-lm",
        "A layer of the language model takes 10.5 ms for 8192 tokens",
        "DIP §2.2, PipeWeaver §2.2",
        "10.5 ms",
        (Found("section-2-2", "ours", ("layer of the language model",)),),
        "near",
        "It was in view when the efficiencies of H800 were chosen, so that it agrees shows nothing.",
        "ms",
        incomparable=True,
    ),
    Claim(
        "best-cut",
        "The best cut into 16 stages leaves them unequal",
        "DIP §2.2, PipeWeaver §2.2",
        "16.7 %",
        (Found("section-2-2", "ours", ("variation",)),),
        "near",
        "Sizes of embeddings and heads are not stated; with ours the cut comes out evener.",
        "%",
    ),
    Claim(
        "best-cut-bubbles",
        "The best cut adds bubbles under 1F1B",
        "DIP §1, §2.2, PipeWeaver §1, §2.2",
        "22.8 %",
        (Found("section-2-2", "ours", ("idle share",)),),
        "near",
        "The paper does not define its additional bubbles; ours is the idle share of all ranks' time.",
        "%",
        incomparable=True,
    ),
    Claim(
        "best-cut-latency",
        "The best cut's unevenness lengthens the iteration",
        "PipeWeaver §2.2",
        "5 %",
        (Found("section-2-2", "ours", ("1F1B slower than with even stages",)),),
        "near",
        "As unevenness is less here, so is what it costs.",
        "%",
    ),
    Claim(
        "laion",
        "LAION-2B has few text tokens an image",
        "DIP §2.2, Fig. 4a, PipeWeaver §2.2",
        "16.4 tokens",
        (Found("figure-4", "mean", ("laion-2b",), "Text tokens"),),
        "near",
        _FITTED,
        "tokens",
        incomparable=True,
    ),
    Claim(
        "obelics",
        "OBELICS has highly variable ratios of text tokens to images",
        "DIP §2.2, Fig. 4a, PipeWeaver §2.2",
        "0.4 to 3115 tokens",
        (
            Found("figure-4", "least", ("obelics",), "Text tokens"),
            Found("figure-4", "most", ("obelics",), "Text tokens"),
        ),
        "near",
        "The sampler is log-normal and fitted to published means and medians, not to the extremes.",
        "tokens",
    ),
    Claim(
        "t2v-spread",
        "The largest T2V batch has more work than the smallest, packed",
        "DIP §1, §2.2, Fig. 4d, PipeWeaver §1",
        "4.15 times",
        (Found("figure-4", "mean over seeds", ("T2V-S",), "Work"),),
        "near",
        "The sampler of clips follows published statistics and is fitted to nothing; its spread is narrower.",
        "times",
    ),
    Claim(
        "table-1-lm",
        "LM 7B: seconds and MFU",
        "DIP Table 1, PipeWeaver Table 1",
        "4.068 s, MFU 0.400",
        (Found("table-1", "seconds", ("LM 7B",)), Found("table-1", "MFU", ("LM 7B",))),
        "near",
        "The number of microbatches follows from the paper's operations.",
    ),
    Claim(
        "table-1-static",
        "ViT 2B + LM 5B, static data: seconds and MFU",
        "DIP Table 1, PipeWeaver Table 1",
        "4.567 s, MFU 0.351",
        tuple(Found("table-1", column, ("ViT 2B + LM 5B, static data, 2",)) for column in ("seconds", "MFU")),
        "near",
        "With 2 images a microbatch, which was found by trying, since the paper does not state how many: that it "
        "agrees shows nothing. Our mixture has more, and takes {many} s.",
        also={"many": Found("table-1", "seconds", ("ViT 2B + LM 5B, static data",))},
        incomparable=True,
    ),
    Claim(
        "table-1-dynamic",
        "ViT 2B + LM 5B, dynamic data: seconds and MFU",
        "DIP Table 1, PipeWeaver Table 1",
        "6.789 s, MFU 0.239",
        tuple(Found("table-1", column, ("ViT 2B + LM 5B, dynamic data, 0 to 8",)) for column in ("seconds", "MFU")),
        "near",
        "With 0 to 8 images a microbatch, found by trying as well, and not the number that suits static data. Our "
        "mixture takes {many} s.",
        also={"many": Found("table-1", "seconds", ("ViT 2B + LM 5B, dynamic data",))},
        incomparable=True,
    ),
    Claim(
        "static-overhead",
        "Stage imbalance costs, with static data",
        "DIP §2.3, PipeWeaver §2.3",
        "12.5 %",
        (Found("table-1", "overhead", ("ViT 2B + LM 5B, static data, 2",)),),
        "near",
        "With 2 images a microbatch; with our mixture, of more, it is {many} %. The number is not stated.",
        "%",
        also={"many": Found("table-1", "overhead", ("ViT 2B + LM 5B, static data",))},
    ),
    Claim(
        "dynamic-overhead",
        "Dynamic imbalance costs, with real data",
        "DIP §1, §2.3, PipeWeaver §2.3",
        "40.3 %",
        (Found("table-1", "overhead", ("ViT 2B + LM 5B, dynamic data, 0 to 8",)),),
        "near",
        "With 0 to 8 images a microbatch, found by trying; with our mixture it is {many} %. Where dynamic data cost so "
        "much here, static ones cost {static} % already.",
        "%",
        also={
            "many": Found("table-1", "overhead", ("ViT 2B + LM 5B, dynamic data",)),
            "static": Found("images", "static: overhead", ("4",), "Table 1"),
        },
        incomparable=True,
    ),
    Claim(
        "dynamic-adds",
        "Dynamic data add to what static imbalance costs, in points",
        "DIP §2.3, PipeWeaver §2.3",
        "27.8 points",
        (
            Found(
                "images",
                "dynamic: overhead",
                ("2",),
                "Table 1",
                minus=Found("images", "static: overhead", ("2",), "Table 1"),
            ),
        ),
        "near",
        "With 2 images a microbatch on average, where they add most of all numbers from 1 to 44.",
        "points",
    ),
    Claim(
        "separated",
        "Separated partitioning alone is faster than the best mixed one",
        "DIP §3.1, PipeWeaver §5",
        "13.1 %",
        (Found("section-3-1", "over mixed 1F1B", ("separated, dual queue",)),),
        "at least",
        "Over mixed 1F1B, within memory: separated microbatches hold more, so that nearly all is recomputed. Without a "
        "limit it is {free} %, and interleaved 1F1B gains {interleaved} %.",
        "%",
        also={
            "free": Found("section-3-1", "memory not limited: over", ("separated, dual queue",)),
            "interleaved": Found("section-3-1", "memory not limited: over", ("mixed, interleaved",)),
        },
    ),
    Claim(
        "ordering",
        "Optimal schedules tend to keep the order of segments from rank to rank",
        "PipeWeaver §5",
        "most pairs, read as 50 %",
        (Found("consistency", "pairs in the same order", how="least"),),
        "at least",
        "On small instances whose optima CP-SAT proves; the paper gives no number.",
        "%",
    ),
    Claim(
        "ilp-10-ms",
        "An integer program for a rank's strategies is solved, warm and to 5 %, in milliseconds",
        "DIP §5.3, PipeWeaver §6.3",
        "below 10 ms",
        (Found("program", "to 5 %, warm, ms", ("VLM-S", "64")),),
        "at most",
        "HiGHS, one rank of VLM-S with 64 microbatches, as the paper has; with 4 it is {few} ms, and our "
        "Lagrangian takes {ours} ms with 64. The paper does not say for how many pairs.",
        "ms",
        {
            "few": Found("program", "to 5 %, warm, ms", ("VLM-S", "4")),
            "ours": Found("program", "our Lagrangian", ("VLM-S", "64")),
        },
    ),
)

_END_TO_END = (
    Claim(
        "table-4-seconds",
        "VLM-S on 16 H20: seconds of FSDP, Megatron-LM and DIP",
        "DIP Table 4",
        "40.270, 39.053, 28.606 s",
        tuple(Found("table-4", "seconds", (name,)) for name in ("FSDP2, ZeRO-3", _INTERLEAVED, "DIP as published")),
        "near",
        _UNSTATED_SECONDS,
        "s",
        incomparable=True,
    ),
    Claim(
        "table-4-fsdp",
        "On H20 FSDP's time over Megatron-LM's",
        "DIP Table 4, §7.2",
        "1.03",
        (Found("table-4", "relative", ("FSDP2, ZeRO-3",)),),
        "near",
        "Megatron-LM has the number of chunks that suits it best. Efficiencies of H20 are those of H800 at equal "
        "operations.",
    ),
    Claim(
        "table-4-dip",
        "On H20 DIP's time over Megatron-LM's",
        "DIP Table 4, §7.2",
        "0.73",
        (Found("table-4", "relative", ("DIP as published",)),),
        "near",
        "DIP written again; its best form has {form}, Pipeloom {ours}. Megatron-LM has as many chunks as suit it.",
        also={
            "form": Found("table-4", "relative", ("DIP, best of its forms",)),
            "ours": Found("table-4", "relative", ("Pipeloom",)),
        },
    ),
    Claim(
        "figure-8a-vlm",
        "VLM: more throughput than Megatron-LM, nnScaler* and Optimus, least and most",
        "DIP Fig. 8a, §7.2, PipeWeaver Fig. 9a",
        "15.6 to 76.2 %",
        (_faster(_VLM, "least"), _faster(_VLM, "most")),
        "at least",
        "Pipeloom's. Megatron-LM may have any number of chunks here; the paper does not say how many it has, nor its "
        "mixture, on which gains depend. Over the best baseline ours is {best} % at least.",
        "%",
        also={"best": Found("figure-8a", "over the best baseline", (_VLM,), "Gain of ours", "least")},
    ),
    Claim(
        "figure-8a-t2v",
        "T2V: more throughput than Megatron-LM and nnScaler*, least and most",
        "DIP Fig. 8a, §7.2, abstract, PipeWeaver Fig. 9a",
        "36.6 to 97.3 %",
        (_faster(_T2V, "least"), _faster(_T2V, "most")),
        "at least",
        "Pipeloom's. As above, Megatron-LM may have any number of chunks. Over the best baseline ours "
        "is {best} % at least.",
        "%",
        also={"best": Found("figure-8a", "over the best baseline", (_T2V,), "Gain of ours", "least")},
    ),
    Claim(
        "figure-8a-all",
        "Consistent gains over all baselines, on all five models",
        "DIP §7.2, Fig. 8a",
        "above 0, 0 %",
        (
            Found("figure-8a", "over the best baseline", how="least", table="Gain of ours"),
            Found("images", "over the best of these", how="least", table="Fig. 8a over images"),
        ),
        "at least",
        "Pipeloom's least gain over the best baseline, each with its best layout and recomputation: of the five models "
        "on our mixtures, and of VLM-S with 2 to 44 images a microbatch.",
        "%",
    ),
    Claim(
        "figure-8b-megatron",
        "Changing data: Megatron-LM is behind, at most",
        "DIP Fig. 8b, §7.2, PipeWeaver Fig. 9b",
        "52.9 %",
        (_behind(_INTERLEAVED, "most behind ours", 0),),
        "at least",
        "Behind Pipeloom. DIP written again is {dip} % behind ours at most.",
        "%",
        also={"dip": _behind("DIP as published", "most behind ours", 0)},
    ),
    Claim(
        "figure-8b-others",
        "Many images: nnScaler and Optimus are behind",
        "DIP §7.2, iterations 1 to 10, PipeWeaver §8.1",
        "10.4, 10.4 %",
        (_behind("nnScaler*", "iterations 1-10"), _behind("Optimus, coarse", "iterations 1-10")),
        "at least",
        "Behind Pipeloom, mean of these iterations. Here they are further behind than Megatron-LM ({megatron} %); in "
        "the paper it is the other way round.",
        "%",
        also={"megatron": _behind(_INTERLEAVED, "iterations 1-10")},
        incomparable=True,
    ),
    Claim(
        "figure-8b-nnscaler",
        "Few images: nnScaler's single segment is behind",
        "DIP §7.2, iterations 15 to 20, PipeWeaver §8.1",
        "50.5 %",
        (_behind("nnScaler*", "iterations 15-20"),),
        "at least",
        "Its stages are made for the mixture's images and are far from even without any.",
        "%",
    ),
    Claim(
        "figure-8b-converge",
        "As images become fewer, the gap to the baselines narrows",
        "DIP §7.2, iterations 11 to 20",
        "narrows",
        (_behind(_INTERLEAVED, "iterations 15-20"), _behind(_INTERLEAVED, "iterations 1-10")),
        "rises",
        "Megatron-LM behind Pipeloom, with few images and with many.",
        "%",
    ),
    Claim(
        "overlap",
        "Planning ends within an iteration, and is hidden behind it",
        "DIP §3.1, §7.4, PipeWeaver §8.3",
        "10 s",
        (Found("planning", "in all, CPU s", how="most"),),
        "at most",
        "Pipeloom's, from samples to a proved plan on one core, the largest of nine models.",
        "s",
    ),
)

_ABLATION = (
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
        _UNSTATED_SECONDS,
        "s",
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
    ),
    Claim(
        "table-5-dip",
        "+ per-layer memory optimisation: DIP whole",
        "DIP Table 5, PipeWeaver Table 5",
        "62.8 %",
        (_step("+ per-layer memory strategies"),),
        "at least",
        "DIP written again; from the best uniform strategies it has {uniform} %. Orders made for the leanest "
        "strategies fill the memory.",
        "%",
        also={"uniform": _step("the same, orders made for the best uniform")},
    ),
    Claim(
        "table-5-ours",
        "The same, by Pipeloom",
        "DIP Table 5",
        "62.8 %",
        (_step("ours"),),
        "at least",
        "Over Megatron-LM by parameters with any number of chunks; cut by time, Megatron-LM gains {even} % itself.",
        "%",
        also={"even": _step("Megatron-LM interleaved, by time")},
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
    ),
    Claim(
        "step-reordering",
        "Reordering and memory strategies together bring, in points",
        "DIP §7.3, PipeWeaver §8.2",
        "23.9 points",
        (Found("table-5", "faster by", ("+ per-layer",), minus=_step("+ stage interleaving")),),
        "at least",
        "DIP written again: strategies chosen for the published orders lose against the best uniform one. "
        "Pipeloom has {ours} % in all.",
        "points",
        also={"ours": _step("ours")},
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
        "Pipeloom's, on one iteration.",
        "%",
    ),
)

_PLANNER = (
    Claim(
        "figure-11-near",
        "Within 10 s of search the schedule is near the optimum",
        "DIP Fig. 11, §7.4, PipeWeaver Fig. 12",
        "near, read as 1 %",
        (Found("figure-11", "above the lower bound", ("ours",)),),
        "at most",
        "Pipeloom's, above the lower bound, on one core where the paper has 64. DIP written again is at {dip} %, from "
        "the best uniform strategies at {uniform} %.",
        "%",
        also={
            "dip": Found("figure-11", "above the lower bound", ("DIP: tree search",)),
            "uniform": Found("figure-11", "above the lower bound", ("DIP from the best",)),
        },
    ),
    Claim(
        "figure-11-others",
        "Tree search is ahead of depth-first and of random search",
        "DIP Fig. 11, §7.4, PipeWeaver Fig. 12",
        "ahead",
        (
            Found("figure-11", "after 10 s", ("DIP: tree search",)),
            Found("figure-11", "after 10 s", (("depth first", "random"),), how="least"),
        ),
        "rises",
        "Seconds of the best schedule. On one core all keep their first order; of other workloads that were tried the "
        "lead is {lead} % at most.",
        "s",
        also={"lead": Found("literal", "lead of the tree search", (("VLM-S", "VLM-L", "T2V-S"),), how="most")},
    ),
    Claim(
        "figure-12-dip",
        "Search stays below 10 s at every number of microbatches",
        "DIP Fig. 12, §7.4",
        "10 s",
        (Found("figure-12", "ours", how="most"),),
        "at most",
        "Pipeloom's is ended after a second, whatever it has found, up to 16 microbatches; orders alone.",
        "s",
        incomparable=True,
    ),
    Claim(
        "figure-12-z3",
        "Z3 does not end in time beyond a few microbatches",
        "DIP Fig. 12, §7.4",
        "not proved",
        (Found("figure-12", "Z3", ("VLM-S", "2")), Found("figure-12", "Z3", ("T2V-S", "2"))),
        "says",
        "At two microbatches, cut after 60 s and not tried on more; the paper has 30 minutes beyond ten.",
        incomparable=True,
    ),
    Claim(
        "figure-12-gurobi",
        "Gurobi does not end in time beyond a few microbatches",
        "DIP Fig. 12, §7.4",
        "not proved",
        (Found("figure-12", "Gurobi", ("VLM-S", "2")), Found("figure-12", "Gurobi", ("T2V-S", "2"))),
        "says",
        "The licence that comes with it allows 2000 variables, which two microbatches exceed.",
        incomparable=True,
    ),
    Claim(
        "milp",
        "The integer program of the whole schedule does not end in time",
        "PipeWeaver §3.2, DIP §3.1",
        "not proved",
        (Found("figure-12", "HiGHS", ("VLM-S", "2")), Found("figure-12", "HiGHS", ("T2V-S", "2"))),
        "says",
        "HiGHS, at two microbatches, cut after 60 s; the paper speaks of minutes to hours.",
        incomparable=True,
    ),
    Claim(
        "figure-13-best",
        "The best degrees of VLM-M on 64 GPUs",
        "DIP Fig. 13, §7.4, PipeWeaver Fig. 13",
        "DP 8, TP 2, PP 4",
        (Found("figure-13", "ours", ("best degrees",), "The best"),),
        "says",
        "The paper's best is place {place} here, {behind} % behind. Efficiencies are of a data sheet; the paper's are "
        "calibrated.",
        also={
            "place": Found("figure-13", "ours", ("place of",), "The best"),
            "behind": Found("figure-13", "ours", ("its throughput below",), "The best"),
        },
    ),
    Claim(
        "figure-13-mfu",
        "MFU under these degrees",
        "DIP Fig. 13, §7.4, PipeWeaver Fig. 13",
        "0.297",
        (Found("figure-13", "ours", ("MFU of the paper's best",), "The best"),),
        "near",
        "Planned by our search on emulated kernels, without what GPUs add.",
    ),
    Claim(
        "figure-13-uncalibrated",
        "The simulator is off by at most, before calibration",
        "DIP Fig. 13, §7.4, PipeWeaver §8.3",
        "10 %",
        (),
        "at most",
        _GPUS,
        "%",
        command="make gpu",
    ),
    Claim(
        "figure-13-calibrated",
        "The simulator's accuracy after calibration",
        "DIP Fig. 13, §7.4, PipeWeaver §8.3",
        "97.6 %",
        (),
        "at least",
        _GPUS,
        "%",
        command="make gpu",
    ),
    _large_mfu("VLM-XL", _VLM_XL, "0.36", "8192 and 16384 GPUs"),
    _large_mfu("T2V-XL", _T2V_XL, "0.39", "3072 and 6144 GPUs"),
    Claim(
        "figure-14-most",
        "Ahead of the baselines by up to",
        "DIP Fig. 14, §7.5, PipeWeaver §8.4",
        "82.8 %",
        (Found("figure-14", _AHEAD, ((*_VLM_XL, *_T2V_XL), _BASELINES), "Large clusters", "most"),),
        "at least",
        "Pipeloom's, over Megatron-LM interleaved by parameters, nnScaler* and Optimus.",
        "%",
    ),
    _large_grows("VLM-XL", _VLM_XL, "8 and on 16"),
    _large_grows("T2V-XL", _T2V_XL, "4 and on 8"),
)

CLAIMS: tuple[Claim, ...] = (*_CHARACTER, *_END_TO_END, *_ABLATION, *_PLANNER)

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
        tuple(Found("figure-8a", "the same, microbatches given", (model,), "Gain of ours") for model in (*_VLM, *_T2V)),
        "%",
    ),
    OwnFigure(
        "room",
        "VLM-S, M, L, T2V-S, L: the best baseline above the least lower bound of the layouts and packings tried",
        tuple(Found("figure-8a", "room to the lower bound", (model,), "Gain of ours") for model in (*_VLM, *_T2V)),
        "%",
    ),
    OwnFigure(
        "room-closed",
        "Of it closed by ours",
        tuple(Found("figure-8a", "of it closed", (model,), "Gain of ours") for model in (*_VLM, *_T2V)),
        "%",
    ),
    OwnFigure(
        "room-closed-given",
        "The same with the microbatches that the baselines are given",
        tuple(Found("figure-8a", "closed, microbatches given", (model,), "Gain of ours") for model in (*_VLM, *_T2V)),
        "%",
    ),
    OwnFigure(
        "images-over-megatron",
        "VLM-S with 2 to 44 images a microbatch, over Megatron-LM interleaved by parameters: least and most",
        tuple(
            Found("images", f"over {_INTERLEAVED}", how=how, table="Fig. 8a over images") for how in ("least", "most")
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
        tuple(Found("published", "ours on DIP's layout", (model, FORMS), how="least") for model in (*_VLM, *_T2V)),
        "%",
    ),
    OwnFigure(
        "over-omni",
        "VLM-S, M, L: over MegaScale-Omni's way, whose encoders are whole on every device too",
        tuple(Found("figure-8a", _AHEAD, (model, "MegaScale-Omni"), _ITERATIONS) for model in _VLM),
        "%",
    ),
    OwnFigure(
        "vlm-m-rules",
        "VLM-M: lower bound of the rules' layout, the best divided one and its bound, the best dealt one and its bound",
        (
            Found("layouts", "lower bound, s", ("vision 9 x1, lm all x1",), "VLM-M"),
            Found("layouts", "planned, s", ("vision 18 x3, lm all x3",), "VLM-M"),
            Found("layouts", "lower bound, s", ("vision 18 x3, lm all x3",), "VLM-M"),
            Found("layouts", "planned, s", ("vision all x1, lm all x1; instances dealt",), "VLM-M"),
            Found("layouts", "lower bound, s", ("vision all x1, lm all x1; instances dealt",), "VLM-M"),
        ),
        "s",
    ),
)
