"""What we set out to reach in DIP's evaluation; the picture that its page opens with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeloom.report.figures import Axis, bar_figure
from pipeloom_lab.reproduce import claims
from pipeloom_lab.reproduce.claims import Claim, Found
from pipeloom_lab.reproduce.dip.claims.words import T2V, VLM, gain
from pipeloom_lab.reproduce.part import Figure
from pipeloom_lab.reproduce.record import Record

_LARGE = "Gain over Megatron-LM interleaved by parameters"


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What a plan of the lower bound's length would be faster by than Megatron-LM interleaved by parameters."""

    model: str
    part: str = "figure-8a"

    def number(self, records: Mapping[str, Record]) -> claims.Figure:
        columns = "room to the lower bound", "over Megatron-LM", "over the best baseline"
        room, megatron, best = (1 + gain(column, self.model).number(records).value / 100 for column in columns)
        return claims.Figure(100 * (room * megatron / best - 1), 1)


def _over_megatron(models: tuple[str, ...], wanted: str) -> Claim:
    allowed = {model[-1]: _Allowed(model) for model in models}
    figures = ", ".join(f"{{{key}}}" for key in allowed)
    return Claim(
        f"megatron-{models[0][:3].lower()}",
        f"{', '.join(models)}: faster than Megatron-LM interleaved by parameters, any chunks",
        "",
        wanted,
        tuple(gain("over Megatron-LM", model) for model in models),
        "at least",
        f"The least lower bound of the layouts and packings tried allows {figures} %.",
        "%",
        also=allowed,
    )


GOALS: tuple[Claim, ...] = (
    _over_megatron(VLM, "62.8, 76.2, 76.2 %"),
    _over_megatron(T2V, "67, 67 %"),
    Claim(
        "room-closed",
        f"{', '.join((*VLM, *T2V))}: of the room between the best of nine baselines and the lower bound, closed",
        "",
        "90, 90, 90, 90, 90 %",
        tuple(gain("of it closed", model) for model in (*VLM, *T2V)),
        "at least",
        "The room is {S}, {M}, {L}, {s}, {l} %.",
        "%",
        also={key: gain("room to the lower bound", model) for key, model in zip("SMLsl", (*VLM, *T2V), strict=True)},
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
)


def opening(records: Mapping[str, Record]) -> Figure:
    """What ours is faster by, over three kinds of others.

    Raises
    ------
    LookupError
        It is not recorded.
    """
    columns = {
        "the best of nine baselines": "over the best baseline",
        "DIP written again, best of its forms": "over DIP, best of its forms",
        "Megatron-LM interleaved by parameters": "over Megatron-LM",
    }
    models = (*VLM, *T2V)
    bars = {name: [gain(column, model).number(records).value for model in models] for name, column in columns.items()}
    svg = bar_figure(models, bars, y=Axis("ours is faster by, %"), values=".0f")
    title = "What Pipeloom is faster by: five models on up to 64 GPUs, emulated (Fig. 8a below)"
    return Figure("opening", title, svg)
