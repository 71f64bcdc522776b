"""The index page: every claim of the papers with our figures, from the records."""

from __future__ import annotations

from collections.abc import Mapping

from pipeloom.report import markdown_table
from pipeloom_lab.reproduce.claims import (
    SUBJECTS,
    VERDICTS,
    Claim,
    Judgment,
    MissingCellError,
    OwnFigure,
    command_of,
    judge,
    quantities_text,
)
from pipeloom_lab.reproduce.claims_file import paper_claims
from pipeloom_lab.reproduce.part import PAPERS, Part, parts_of, read_data
from pipeloom_lab.reproduce.record import Record

Records = Mapping[str, Mapping[str, Record]]
"""Records by paper and part."""


_CORES, _MOST_MINUTES = 2, 90
"""The goal for the whole evaluation: minutes, and on how many cores."""


def judged_claims(records: Records) -> dict[str, list[Judgment]]:
    """Judge every claim of every paper. A claim whose figures are not recorded is *not made*."""
    return {
        paper: [_judged(claim, paper, records.get(paper, {})) for claim in paper_claims(paper).claims]
        for paper in PAPERS
    }


def _judged(claim: Claim, paper: str, records: Mapping[str, Record]) -> Judgment:
    try:
        return judge(claim, paper, records)
    except MissingCellError as error:  # a part that was made with little, or whose rows have other names now
        return Judgment(claim, "not made", "not made", f"Not in the record: {error}.", command_of(claim, paper))


def own_figures(records: Records) -> dict[str, tuple[OwnFigure, str, str]]:
    """Return our own figures by name, with their text and the command that makes them."""
    found = {}
    for paper in PAPERS:
        for own in paper_claims(paper).own:
            try:
                text = quantities_text(own.ours, own.unit, records.get(paper, {}))
            except LookupError:
                text = "not made"
            found[f"{paper}-{own.name}"] = own, text, f"pipeloom reproduce {paper} {own.ours[0].part}"
    return found


def index_page(records: Records) -> str:
    """Return the page."""
    found = judged_claims(records)
    texts = read_data("pages")
    blocks = [texts["index_head"].strip(), "## How many", _tally(found), texts["rules"].strip()]
    blocks += ["## What was missed", _misses(found)]
    blocks += ["## What we set out to reach", _goals(records)]
    for paper, title in PAPERS.items():
        columns = ("claim", "where", "paper", "ours", "of", "verdict", "why", "command")
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


def _goals(records: Records) -> str:
    """Return the table of our goals and of the duration of the whole evaluation."""
    rows = list[tuple[str, ...]]()
    for paper in PAPERS:
        for goal in paper_claims(paper).goals:
            one = _judged(goal, paper, records.get(paper, {}))
            rows.append((goal.text, goal.paper, one.ours, one.verdict, one.reason, f"`{one.command}`"))
    rows.append(_whole_evaluation(records))
    return markdown_table(("goal", "to reach", "ours", "verdict", "why", "command"), rows, words=True)


def _whole_evaluation(records: Records) -> tuple[str, ...]:
    """Return the row that compares the duration of the whole evaluation with its goal."""
    seconds = {True: 0.0, False: 0.0}
    for _, part, record in _every_part(records):
        seconds[part.alone] += 0.0 if record is None else record.made.seconds
    minutes = (seconds[True] + seconds[False] / _CORES) / 60
    return (
        "The whole evaluation, on two cores",
        f"{_MOST_MINUTES} min",
        f"{minutes:.0f} min",
        "reached" if minutes <= _MOST_MINUTES else "partly",
        f"Seconds of all parts that are recorded; of those that do not run alone {_CORES} at a time.",
        "`pipeloom reproduce all`",
    )


def _every_part(records: Records) -> list[tuple[str, Part, Record | None]]:
    """Return all parts of all papers with their records."""
    return [(paper, part, records.get(paper, {}).get(part.name)) for paper in PAPERS for part in parts_of(paper)]


def _makings(records: Records) -> str:
    """Return the table of parts by the source that made them, newest first, then parts without a record."""
    names: dict[tuple[str, str], list[str]] = {}
    for paper, part, record in _every_part(records):
        made = ("", "not made") if record is None else (record.made.day, record.made.commit or "not recorded")
        names.setdefault(made, []).append(f"{paper} {part.name}")
    rows = [(day, commit, ", ".join(parts)) for (day, commit), parts in sorted(names.items(), reverse=True)]
    return markdown_table(("day", "commit", "parts"), rows, words=True)


def _row(paper: str, one: Judgment) -> tuple[str, ...]:
    claim = one.claim
    name = f'<a id="{paper}-{claim.name}"></a>{claim.text}'
    return name, claim.where, claim.paper, one.ours, claim.subject, one.verdict, one.reason, f"`{one.command}`"


def _tally(found: Mapping[str, list[Judgment]]) -> str:
    every = [one for each in found.values() for one in each]
    groups = {PAPERS[paper]: each for paper, each in found.items()}
    groups |= {f"*of* {subject}": [one for one in every if one.claim.subject == subject] for subject in SUBJECTS}
    groups["all"] = every
    rows = [
        (name, str(len(each)), *(str(sum(one.verdict == verdict for one in each)) for verdict in VERDICTS))
        for name, each in groups.items()
    ]
    return markdown_table(("claims", "number", *VERDICTS), rows)


def _misses(found: Mapping[str, list[Judgment]]) -> str:
    lines = []
    for verdict in ("not reached", "not made"):
        names = [
            f"- [{one.claim.text}](#{paper}-{one.claim.name}): {one.claim.paper}, ours {one.ours} ({one.claim.subject})"
            for paper, each in found.items()
            for one in each
            if one.verdict == verdict
        ]
        lines.append(f"{verdict.capitalize()}:\n\n" + ("\n".join(names) or "- none"))
    return "\n\n".join(lines)
