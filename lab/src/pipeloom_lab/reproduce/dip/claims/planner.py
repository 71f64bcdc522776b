"""DIP's and PipeWeaver's searches, simulator and scaling (DIP sections 7.4 and 7.5)."""

from __future__ import annotations

from collections.abc import Mapping

from pipeloom_lab.reproduce.claims import Claim, Found
from pipeloom_lab.reproduce.dip.claims.words import AHEAD, BY_TIME, T2V_XL, VLM_XL
from pipeloom_lab.reproduce.dip.runs import BASELINE_TITLES, PAPERS_BASELINES

_GPUS = (
    "Needs 64 GPUs, under every degree of parallelism. Nearest is `make gpu`, which compares single layers with the "
    "emulator and a small model's iteration with its plan, on one GPU."
)


def _large(system: str, setups: tuple[str, ...], column: str) -> tuple[Found, ...]:
    return tuple(Found("figure-14", column, (setup, system), "Large clusters") for setup in setups)


def _large_mfu(model: str, setups: tuple[str, ...], paper: str, devices: str) -> Claim:
    """MFU on thousands of GPUs."""
    beside = {"dip": "DIP as published", "megatron": BY_TIME}
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
        tuple(Found("figure-14", AHEAD, (setup, BASELINE_TITLES), "Large clusters", "least") for setup in setups),
        "rises",
        f"Pipeloom over the best baseline, on {ranks} ranks; over Megatron-LM interleaved by parameters it is "
        "{few} and {many} %. One iteration of one seed.",
        "%",
        also={name: Found("figure-14", column, (model,), "Gain over") for name, column in lengths.items()},
    )


def _unproved(
    name: str, says: str, where: str, solver: str, why: str, also: Mapping[str, Found] | None = None
) -> Claim:
    """A solver that proves nothing in time, at two microbatches of both models."""
    cells = tuple(Found("figure-12", solver, (model, "2")) for model in ("VLM-S", "T2V-S"))
    return Claim(
        name, says, where, "not proved", cells, "says", why, also=also or {}, of="written again", incomparable=True
    )


PLANNER: tuple[Claim, ...] = (
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
        "Seconds of the best schedule. On one core all keep their first order; of {tried} workloads tried a "
        "lead shows on {shows}, of {lead} % at most.",
        "s",
        also={
            "tried": Found("literal", "of", ("lead of the tree search",)),
            "shows": Found("literal", "shows on", ("lead of the tree search",)),
            "lead": Found("literal", "lead of the tree search", (("VLM-S", "VLM-L", "T2V-S"),), how="most"),
        },
        of="written again",
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
    _unproved(
        "figure-12-z3",
        "Z3 does not end in time beyond a few microbatches",
        "DIP Fig. 12, §7.4",
        "Z3",
        "At two microbatches, cut after 60 s and not tried on more; the paper has 30 minutes beyond ten.",
    ),
    _unproved(
        "figure-12-gurobi",
        "Gurobi does not end in time beyond a few microbatches",
        "DIP Fig. 12, §7.4",
        "Gurobi",
        "Its free licence allows 2000 variables and 2000 constraints; two microbatches have {vlm} constraints (VLM-S) "
        "and {t2v} (T2V-S).",
        {
            # After the variables, and after the 2 of the name.
            "vlm": Found("figure-12", "Gurobi", ("VLM-S", "2"), nth=1),
            "t2v": Found("figure-12", "Gurobi", ("T2V-S", "2"), nth=2),
        },
    ),
    _unproved(
        "milp",
        "The integer program of the whole schedule does not end in time",
        "PipeWeaver §3.2, DIP §3.1",
        "HiGHS",
        "HiGHS, at two microbatches, cut after 60 s; the papers speak of over 50 minutes, and of hours.",
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
        "figure-13-predicts",
        "The simulator before calibration predicts the degrees that are best on GPUs",
        "DIP §7.4",
        "predicts",
        (),
        "says",
        _GPUS,
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
    _large_mfu("VLM-XL", VLM_XL, "0.36", "8192 and 16384 GPUs"),
    _large_mfu("T2V-XL", T2V_XL, "0.39", "3072 and 6144 GPUs"),
    Claim(
        "figure-14-most",
        "Ahead of the baselines by up to",
        "DIP Fig. 14, §7.5, PipeWeaver §8.4",
        "82.8 %",
        (Found("figure-14", AHEAD, ((*VLM_XL, *T2V_XL), PAPERS_BASELINES), "Large clusters", "most"),),
        "at least",
        "Pipeloom's, over Megatron-LM interleaved by parameters, nnScaler* and Optimus.",
        "%",
    ),
    _large_grows("VLM-XL", VLM_XL, "8 and on 16"),
    _large_grows("T2V-XL", T2V_XL, "4 and on 8"),
)
