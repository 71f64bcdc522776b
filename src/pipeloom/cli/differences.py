"""Say where measured and planned time differ: a page in the run's folder, and a table at its end."""

from __future__ import annotations

from rich.table import Table

from pipeloom.planner.difference import Difference
from pipeloom.report.table_page import TableSection, table_page

_CAUSES = {
    "computation_s": "computation took more processor time than predicted",
    "shared_cores_s": "ranks shared cores: their clock went on, their processor time did not",
    "messages_s": "messages were under way for longer than predicted",
    "rest_s": "posting messages, dispatch and the rest",
}


def difference_page(name: str, found: Difference) -> str:
    """The whole explanation as an offline page."""
    causes = [["planned", _ms(found.planned_s), ""]]
    causes += [
        [f"+ {words}", _ms(getattr(found, field)), _share(getattr(found, field), found)]
        for field, words in _CAUSES.items()
    ]
    causes.append(["measured", _ms(found.measured_s), _share(found.measured_s - found.planned_s, found)])
    kinds = [
        [kind.kind, _ms(kind.forward_planned_s), _ms(kind.forward_measured_s),
         _ratio(kind.forward_measured_s, kind.forward_planned_s), _ms(kind.backward_planned_s),
         _ms(kind.backward_measured_s), _ratio(kind.backward_measured_s, kind.backward_planned_s)]
        for kind in found.kinds
    ]  # fmt: skip
    rank = [
        ["idle, or waiting for messages", _ms(found.wait_planned_s), _ms(found.wait_measured_s)],
        ["posting messages and other actions", _ms(0.0), _ms(found.posting_s)],
    ]
    idle = [[each.cause, _ms(each.planned_s), _ms(each.measured_s)] for each in found.idle]
    idle.append(
        ["idle in all", *(_ms(sum(getattr(x, k) for x in found.idle)) for k in ("planned_s", "measured_s"))]
    )
    message = [["one message (median)", _ms(found.message_planned_s), _ms(found.message_measured_s)]]
    return table_page(
        [
            TableSection(
                "Why an iteration took as long as it did",
                "The plan is replayed with one measured cause after the other: so much longer does each make it.",
                ("", "ms", "of planned"), causes, frozenset({0, len(causes) - 1}),
            ),
            TableSection(
                "Computation by kind of layer",
                "Milliseconds of all layers of a kind in an iteration, all ranks together. What a chunk took is "
                "split by the predicted shares of its layers. Measured is by the clock, whatever else the cores did.",
                ("kind", "forward planned", "measured", "ratio", "backward planned", "measured", "ratio"), kinds,
            ),
            TableSection(
                "A rank beside its computation", "Milliseconds of an iteration, mean over ranks.",
                ("", "planned", "measured"), rank,
            ),
            TableSection(
                "Idle ranks, by cause",
                "Milliseconds in which a rank computes nothing, mean over ranks, from first start to last end of "
                "computation in an iteration: by what the next task waited for.",
                ("", "planned", "measured"), idle, frozenset({len(idle) - 1}),
            ),
            TableSection(
                "Messages",
                f"{found.num_messages} an iteration; measured are those whose receivers were there before they came.",
                ("", "planned ms", "measured ms"), message,
            ),
        ],
        title=f"{name}: planned and measured", note=f"Means over {found.iterations} iterations.",
    )  # fmt: skip


def difference_table(found: Difference) -> Table:
    """The causes alone, for the terminal."""
    table = Table(title="Why an iteration took longer than planned", title_justify="left")
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_row("planned", f"{_ms(found.planned_s)} ms")
    for field, words in _CAUSES.items():
        table.add_row(f"+ {words}", f"{_ms(getattr(found, field))} ms")
    table.add_row("measured", f"{_ms(found.measured_s)} ms")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _share(seconds: float, found: Difference) -> str:
    return f"{seconds / found.planned_s:+.1%}" if found.planned_s else ""


def _ratio(measured_s: float, planned_s: float) -> str:
    return f"{measured_s / planned_s:.2f}" if planned_s else ""
