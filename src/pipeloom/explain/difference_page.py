"""Page about the difference between planned and measured time."""

from __future__ import annotations

from pipeloom.explain.difference import Difference
from pipeloom.report.table_page import TableSection, table_page

_CAUSES = {
    "computation_s": ("layers took longer than profiled", "layers were faster than profiled"),
    "messages_s": ("messages took longer than predicted", "messages were faster than predicted"),
    "rest_s": ("dispatch of actions, posting of messages", "waits and messages overlapped more than in the replay"),
}
"""Texts of each cause, for longer and for shorter iterations."""
SHARED = 0.97
"""Share of a core per rank below which ranks are considered to share cores."""


def difference_page(name: str, found: Difference) -> str:
    """Make an offline page with the explanation."""
    rows = steps(found)
    causes = [[words, _ms(seconds), share] for words, seconds, share in rows]
    totals = frozenset(number for number, (words, _, _) in enumerate(rows) if words.startswith(("planned", "measured")))
    kinds = [
        [
            kind.kind,
            _ms(kind.forward_planned_s),
            _ms(kind.forward_measured_s),
            _ratio(kind.forward_measured_s, kind.forward_planned_s),
            _ms(kind.backward_planned_s),
            _ms(kind.backward_measured_s),
            _ratio(kind.backward_measured_s, kind.backward_planned_s),
        ]
        for kind in found.kinds
    ]
    rank = [
        ["idle, or waiting for messages", _ms(found.wait_planned_s), _ms(found.wait_measured_s)],
        ["posting messages and other actions", _ms(0.0), _ms(found.posting_s)],
    ]
    idle = [[each.cause, _ms(each.planned_s), _ms(each.measured_s)] for each in found.idle]
    idle.append(["total", *(_ms(sum(getattr(x, k) for x in found.idle)) for k in ("planned_s", "measured_s"))])
    message = [["one message (median)", _ms(found.message_planned_s), _ms(found.message_measured_s)]]
    return table_page(
        [
            TableSection(
                "Why measured time differs from planned time",
                core_words(found)
                + "The plan is replayed with one measured cause after another. Each line is the change of the "
                "iteration time: longer (+) or shorter (-).",
                ("", "ms", "of planned"),
                causes,
                totals,
            ),
            TableSection(
                "Computation by kind of layer",
                "Milliseconds of all layers of a kind in an iteration, over all ranks. The measured time of a chunk is "
                "divided by the predicted shares of its layers. It is wall-clock time, with other use of the cores.",
                ("kind", "forward planned", "measured", "ratio", "backward planned", "measured", "ratio"),
                kinds,
            ),
            TableSection(
                "Time of a rank outside computation",
                "Milliseconds of an iteration, mean over ranks.",
                ("", "planned", "measured"),
                rank,
            ),
            TableSection(
                "Idle ranks, by cause",
                "Milliseconds in which a rank computes nothing, mean over ranks, between the first start and the last "
                "end of a computation, by the reason why the next task waited.",
                ("", "planned", "measured"),
                idle,
                frozenset({len(idle) - 1}),
            ),
            TableSection(
                "Messages",
                f"{found.num_messages} per iteration. Measured are messages whose receivers waited for them.",
                ("", "planned ms", "measured ms"),
                message,
            ),
        ],
        title=f"{name}: planned and measured",
        note=f"Every figure is a mean over {found.iterations} iterations; timeline.html shows one of them.",
    )


def core_words(found: Difference) -> str:
    """Return a note if ranks shared cores, since plans for separate devices then do not apply."""
    if found.core_share >= SHARED:
        return ""
    return (
        f"Ranks shared cores: while computing, a rank had {found.core_share:.0%} of a core. Plans learn this from "
        "previous iterations: expected times above the profile are attributed to shared cores. "
    )


def steps(found: Difference) -> list[tuple[str, float, str]]:
    """Return the steps from planned to measured time: text, seconds, and share of the planned time."""
    base, shared = found.planned_s, found.core_share < SHARED
    rows = [("planned, corrected by previous iterations" if shared else "planned", base, "")]
    causes = dict(_CAUSES)
    if shared:
        known = base + found.shared_cores_s
        rows.append(
            (f"planned, at {found.core_share:.0%} of a core per rank", known, _share(found.shared_cores_s, found))
        )
    for field, (longer, shorter) in causes.items():
        seconds = getattr(found, field)
        if field == "computation_s" and not shared:
            seconds += found.shared_cores_s
        sign = "+" if seconds >= 0 else "-"
        rows.append((f"{sign} {longer if seconds >= 0 else shorter}", abs(seconds), _share(seconds, found)))
    rows.append(("measured", found.measured_s, _share(found.measured_s - base, found)))
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _share(seconds: float, found: Difference) -> str:
    return f"{seconds / found.planned_s:+.1%}" if found.planned_s else ""


def _ratio(measured_s: float, planned_s: float) -> str:
    return f"{measured_s / planned_s:.2f}" if planned_s else ""
