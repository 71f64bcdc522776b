"""The index: every claim of the papers beside ours, from the records."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from pipeloom.lab.reproduce.claims import (
    RULES,
    VERDICTS,
    Claim,
    Judged,
    NotThereError,
    OwnFigure,
    command_of,
    judge,
    told,
)
from pipeloom.lab.reproduce.part import PAPERS, parts_of
from pipeloom.lab.reproduce.record import Record
from pipeloom.report import markdown_table

Records = Mapping[str, Mapping[str, Record]]
"""Records by paper and part."""

_HEAD = """\
# The papers' claims, and ours

Every claim of the four papers, the paper's figure, ours, and whether it was reached. Written by `pipeloom reproduce`
from the recorded data, which the pages of [DIP and PipeWeaver](dip.md), [PipeTune](pipetune.md) and
[AdaPtis](adaptis.md) show in full; no figure of ours and no verdict is typed by hand. Times are emulated: no claim is
measured on GPUs. What two papers say alike is one claim.

Not all sections were made by one state of the source: [when each was made](#when-each-was-made). Since 2026-11-23
device tables go by duration and links by nodes ([emulator](../emulator.md)), and baselines choose the size of their
microbatches.

`pipeloom reproduce PAPER PART` makes a line again, `pipeloom reproduce all` everything. A part is recorded as soon as
it has ended, in `PAPER/PART.json` beside these pages; after an interruption the same command goes on from there, for
what is recorded of the same source with the same options is not made again (`--again` makes it). As many parts run at
a time as there are cores (`--processes`). Searches have processor time, not time of the clock; parts that read the
clock run alone. The time left is told as parts begin and end, by what they took the last time.
"""


def claims_of(paper: str) -> tuple[Claim, ...]:
    """All claims of a paper's evaluation, in its order."""
    claims: tuple[Claim, ...] = import_module(f"pipeloom.lab.reproduce.{paper}.claims").CLAIMS
    return claims


def own_of(paper: str) -> tuple[OwnFigure, ...]:
    """Figures that no paper claims, and that our texts quote."""
    own: tuple[OwnFigure, ...] = getattr(import_module(f"pipeloom.lab.reproduce.{paper}.claims"), "OWN", ())
    return own


def judged_claims(records: Records) -> dict[str, list[Judged]]:
    """Every claim of every paper with ours beside it; what cannot be looked up is not made."""
    return {paper: [_judged(claim, paper, records.get(paper, {})) for claim in claims_of(paper)] for paper in PAPERS}


def _judged(claim: Claim, paper: str, records: Mapping[str, Record]) -> Judged:
    try:
        return judge(claim, paper, records)
    except NotThereError as error:  # a part that was made with little, or whose rows have other names now
        return Judged(claim, "not made", "not made", f"Not in the record: {error}.", command_of(claim, paper))


def own_figures(records: Records) -> dict[str, tuple[OwnFigure, str, str]]:
    """Our own figures by name, told, with the commands that make them."""
    found = {}
    for paper in PAPERS:
        for own in own_of(paper):
            try:
                text = told(own.ours, own.unit, records.get(paper, {}))
            except LookupError:
                text = "not made"
            found[f"{paper}-{own.name}"] = own, text, f"pipeloom reproduce {paper} {own.ours[0].part}"
    return found


def index_page(records: Records) -> str:
    """The whole page."""
    found = judged_claims(records)
    blocks = [_HEAD.strip(), "## How many", _tally(found), RULES.strip()]
    blocks += ["## What was missed", _misses(found)]
    for paper, title in PAPERS.items():
        columns = ("claim", "where", "paper", "ours", "verdict", "why", "command")
        rows = [_row(paper, one) for one in found[paper]]
        blocks += [f"## {title}", markdown_table(columns, rows, words=True)]
    own = [
        (f'<a id="{name}"></a>{figure.text}', text, f"`{command}`")
        for name, (figure, text, command) in own_figures(records).items()
    ]
    table = markdown_table(("figure", "ours", "command"), own, words=True)
    blocks += ["## Our own figures", "No paper claims these.", table]
    blocks += ["## When each was made", _makings(records)]
    return "\n\n".join(blocks) + "\n"


def _makings(records: Records) -> str:
    """Which parts were made by which state of the source, the newest first, and those that were not made."""
    names: dict[tuple[str, str], list[str]] = {}
    for paper in PAPERS:
        for part in parts_of(paper):
            record = records.get(paper, {}).get(part.name)
            made = ("", "not made") if record is None else (record.made.day, record.made.commit or "not recorded")
            names.setdefault(made, []).append(f"{paper} {part.name}")
    rows = [(day, commit, ", ".join(parts)) for (day, commit), parts in sorted(names.items(), reverse=True)]
    return markdown_table(("day", "commit", "parts"), rows, words=True)


def _row(paper: str, one: Judged) -> tuple[str, ...]:
    claim = one.claim
    name = f'<a id="{paper}-{claim.name}"></a>{claim.text}'
    return name, claim.where, claim.paper, one.ours, one.verdict, one.why, f"`{one.command}`"


def _tally(found: Mapping[str, list[Judged]]) -> str:
    counts = {paper: [sum(one.verdict == v for one in found[paper]) for v in VERDICTS] for paper in found}
    rows = [(PAPERS[paper], str(sum(each)), *map(str, each)) for paper, each in counts.items()]
    rows.append(("all", *(str(sum(int(row[i]) for row in rows)) for i in range(1, len(VERDICTS) + 2))))
    return markdown_table(("paper", "claims", *VERDICTS), rows)


def _misses(found: Mapping[str, list[Judged]]) -> str:
    lines = []
    for verdict in ("not reached", "not made"):
        names = [
            f"[{one.claim.text}](#{paper}-{one.claim.name})"
            for paper, each in found.items()
            for one in each
            if one.verdict == verdict
        ]
        lines.append(f"{verdict.capitalize()}: {'; '.join(names) or 'none'}.")
    return "\n\n".join(lines)
