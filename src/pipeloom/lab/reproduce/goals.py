"""What we set out to reach, beside what is recorded, and beside what the lower bound allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeloom.lab.reproduce.claims import Claim, Figure, Found
from pipeloom.lab.reproduce.record import Record

MODELS = ("VLM-S", "VLM-M", "VLM-L", "T2V-S", "T2V-L")
MIXES = ("DataMix1", "DataMix2", "DataMix3")
SIZES = tuple(f"{size} TP4·PP4" for size in ("3B", "7B", "13B"))
PIPELINES = ("4", "8", "16")
_TENTH = 1


def gain(column: str, model: str) -> Found:
    """What ours is faster by in Fig. 8a."""
    return Found("figure-8a", column, (model,), "Gain of ours")


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What a plan of the lower bound's length would be faster by than Megatron-LM interleaved by parameters."""

    model: str
    part: str = "figure-8a"

    def number(self, records: Mapping[str, Record]) -> Figure:
        columns = "room to the lower bound", "over Megatron-LM", "over the best baseline"
        room, megatron, best = (1 + gain(column, self.model).number(records).value / 100 for column in columns)
        return Figure(100 * (room * megatron / best - 1), _TENTH)


def _over_megatron(models: tuple[str, ...], wanted: str) -> Claim:
    return Claim(
        f"megatron-{models[0][:3].lower()}",
        f"{', '.join(models)}: faster than Megatron-LM interleaved by parameters, any chunks",
        "",
        wanted,
        tuple(gain("over Megatron-LM", model) for model in models),
        "at least",
        "The least lower bound of the layouts and packings tried allows "
        + ", ".join(f"{{{model[-1]}}}" for model in models)
        + " %.",
        "%",
        also={model[-1]: _Allowed(model) for model in models},
    )


def saved(column: str, mix: str, models: str | tuple[str, ...]) -> Found:
    """Time saved against Original, of several models the least."""
    row = (models, ("A",), mix, "the fastest", "as long as they are")
    return Found("regime", column, row, "Models, clusters and mixtures", "least", negated=True)


def _original(column: str, models: str | tuple[str, ...], name: str, text: str, wanted: str, why: str) -> Claim:
    return Claim(
        f"original-{name}",
        text,
        "",
        wanted,
        tuple(saved(column, mix, models) for mix in MIXES),
        "at least",
        why,
        "%",
        also={mix.removeprefix("Data").lower(): saved("the lower bound", mix, models) for mix in MIXES},
    )


def depths(column: str) -> tuple[Found, ...]:
    """Throughput by the length of the pipeline."""
    return tuple(Found("figure-8-depths", column, (pipeline, "both"), "Over Mist") for pipeline in PIPELINES)


def _depths(name: str, column: str, wanted: str, why: str) -> Claim:
    return Claim(
        name,
        f"P = 4, 8 and 16: throughput {column.removesuffix(', average')}, average",
        "",
        wanted,
        depths(column),
        "at least",
        why,
        "times",
        dict(zip(("P4", "P8", "P16"), depths("AdaPtis over the lower bound"), strict=True)),
        speedup=True,
    )


_LARGE = "Gain over Megatron-LM interleaved by parameters"

GOALS: dict[str, tuple[Claim, ...]] = {
    "dip": (
        _over_megatron(MODELS[:3], "62.8, 76.2, 76.2 %"),
        _over_megatron(MODELS[3:], "67, 67 %"),
        Claim(
            "room-closed",
            f"{', '.join(MODELS)}: of the room between the best of nine baselines and the lower bound, closed",
            "",
            "90, 90, 90, 90, 90 %",
            tuple(gain("of it closed", model) for model in MODELS),
            "at least",
            "The room is {S}, {M}, {L}, {s}, {l} %.",
            "%",
            also={
                key: gain("room to the lower bound", model)
                for key, model in zip(("S", "M", "L", "s", "l"), MODELS, strict=True)
            },
        ),
        Claim(
            "large",
            "VLM-XL, T2V-XL: faster than Megatron-LM by parameters on the longer pipeline",
            "",
            "82.8, 82.8 %",
            tuple(Found("figure-14", "longer pipeline", (model,), _LARGE) for model in ("VLM-XL", "T2V-XL")),
            "at least",
            "On the shorter pipeline {vlm} and {t2v} %.",
            "%",
            also={
                model[:3].lower(): Found("figure-14", "shorter pipeline", (model,), _LARGE)
                for model in ("VLM-XL", "T2V-XL")
            },
        ),
    ),
    "pipetune": (
        _original(
            "ours",
            SIZES,
            "joined",
            "Joined planner, least of 3B, 7B, 13B: saves against Original",
            "40.7, 28.9, 16.1 %",
            "The lower bound of its layout and of the packings judged allows {mix1}, {mix2}, {mix3} %.",
        ),
        _original(
            "PipeTune",
            SIZES[2],
            "own",
            "PipeTune's own form, 13B: within five points of the paper",
            "35.7, 23.9, 11.1 %",
            "The paper states neither the size of Original's microbatches nor whether contexts are filled up.",
        ),
    ),
    "adaptis": (
        _depths(
            "mist", "over Mist, average", "1.25, 1.25, 1.25 times", "The mean of two and of four microbatches a rank."
        ),
        _depths(
            "generator",
            "over AdaPtis, average",
            "1.03, 1.03, 1.03 times",
            "The bound of all placements allows {P4}, {P8} and {P16} times that generator's throughput.",
        ),
    ),
}
"""By paper: numbers that we wanted ours to reach, judged as the papers' claims are."""
