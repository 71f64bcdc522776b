"""Colors of modules: one hue per module, light for forward, dark for backward."""

from __future__ import annotations

from collections.abc import Iterable

HUES = ("#3f6fb5", "#dd8432", "#3f9b6d", "#8d64b9", "#c9514f", "#2f98a3", "#97902f", "#c56b9c")
"""Hues of modules in order of first appearance, repeated after eight."""
RANK_LINES = ("#33415c", "#c9514f", "#2f98a3", "#dd8432", "#8d64b9", "#3f9b6d", "#97902f", "#3f6fb5")
INK, FAINT, PAPER, LANE, BOUND = "#22262e", "#737a87", "#ffffff", "#eceef2", "#c0392b"

# Distance of each kind's fill from its module's hue, toward white or (negative) toward black.
_TONES = {"F": 0.58, "B": -0.14, "I": -0.14, "W": 0.20}


def module_hues(modules: Iterable[str]) -> dict[str, str]:
    """Return the hue of every module, by first appearance."""
    hues: dict[str, str] = {}
    for module in modules:
        hues.setdefault(module, HUES[len(hues) % len(HUES)])
    return hues


def fill(hue: str, kind: str) -> str:
    """Return the fill of a task of one kind."""
    tone = _TONES[kind]
    return mix(hue, "#ffffff", tone) if tone > 0 else mix(hue, "#000000", -tone)


def text_on(color: str) -> str:
    """Return the text color, ink or white, that is readable on a fill."""
    red, green, blue = _channels(color)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def mix(color: str, other: str, share: float) -> str:
    """Mix ``share`` of the other color into this one."""
    mixed = (round(a + (b - a) * share) for a, b in zip(_channels(color), _channels(other), strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
