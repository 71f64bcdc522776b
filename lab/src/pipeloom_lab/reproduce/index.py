"""The index page: every claim of the papers with our figures, from the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from pipeloom.report import markdown_table
from pipeloom_lab.figures import Axis, bar_figure
from pipeloom_lab.reproduce.claims import (
    SUBJECTS,
    VERDICTS,
    Cause,
    Claim,
    Judgment,
    MissingCellError,
    OwnFigure,
    command_of,
    judge,
    quantities_text,
)
from pipeloom_lab.reproduce.claims_file import paper_claims
from pipeloom_lab.reproduce.part import PAPERS, Figure, Part, parts_of, read_data
from pipeloom_lab.reproduce.record import Record
from pipeloom_lab.reproduce.trust import SURE, device_rows, sign_probability, sign_text

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


def gains_of(records: Records) -> Figure | None:
    """Draw how much faster Pipeloom is, model by model of all papers; None if a number is not recorded."""
    texts = read_data("pages")["gains"]
    groups, bars = list[str](), {texts["baseline"]: list[float](), texts["system"]: list[float]()}
    for paper in PAPERS:
        gains, mine = paper_claims(paper).gains, records.get(paper, {})
        groups += gains.groups
        for values, quantities in zip(bars.values(), (gains.baseline, gains.system), strict=True):
            try:
                values += [quantity.number(mine).value for quantity in quantities]
            except LookupError:
                return None
    return Figure("gains", texts["title"], bar_figure(groups, bars, y=Axis(texts["axis"]), values=".1f"))


def index_page(records: Records, gains: Figure | None = None) -> str:
    """Return the page, which opens with a figure of the gains."""
    found = judged_claims(records)
    texts = read_data("pages")
    blocks = [texts["index_head"].strip()]
    if gains is not None:
        blocks.append(f"![{gains.title}]({gains.name}.svg)\n\n*{gains.title}.* {texts['gains']['caption'].strip()}")
    for lines in texts["gains"]["lines"]:
        blocks += [lines["head"], "\n".join(f"- {_line(line, records)}" for line in lines["lines"])]
    blocks += ["## All claims", _summary(found)]
    columns = ("claim", "paper", "ours", "sign", "verdict", "why", "where", "subject", "command")
    rows = [_row(paper, one) for paper, each in found.items() for one in each]
    blocks += [markdown_table(columns, rows, words=True)]
    blocks += [texts["rules"].strip(), "**Counts**", _tally(found), _causes(found), texts["commands"].strip()]
    blocks += ["## Goals", texts["goals"].strip(), _goals(records)]
    own = [
        (f'<a id="{name}"></a>{figure.text}', text, _own_sign(name, figure, records), f"`{command}`")
        for name, (figure, text, command) in own_figures(records).items()
    ]
    table = markdown_table(("figure", "ours", "sign", "command"), own, words=True)
    blocks += ["## Our own figures", "The papers do not claim these figures.", table]
    devices = ("device", "models", "table", "parts", "median error", "80 % interval", "from")
    blocks += [texts["devices"].strip(), markdown_table(devices, device_rows(records), words=True)]
    blocks += ["## When each part was recorded", _makings(records), texts["limitations"].strip()]
    return "\n\n".join(blocks) + "\n"


def _own_sign(name: str, figure: OwnFigure, records: Records) -> str:
    """Return the probability that a figure of ours has the right sign, as text; a dash without a gain or a record."""
    mine = records.get(name.partition("-")[0], {})
    try:
        return sign_text(sign_probability(figure.gain, [each.number(mine).value for each in figure.ours]))
    except LookupError:
        return sign_text(None)


def _line(line: Mapping[str, str], records: Records) -> str:
    """Return a gain in words, whose figures link to their claim."""
    paper, _, name = line["claim"].partition("-")
    claims = paper_claims(paper)
    known: dict[str, Claim | OwnFigure] = {each.name: each for each in claims.claims}
    known |= {each.name: each for each in claims.own}
    try:
        numbers = [quantity.number(records.get(paper, {})) for quantity in known[name].ours]
    except LookupError:
        return f"[not made](#{line['claim']}) {line['text']}"
    sign = sign_probability(known[name].gain, [number.value for number in numbers])
    doubt = "" if sign is None or sign >= SURE else " [The sign could turn](#how-claims-are-judged)."
    return f"[{line['figures'].format(*numbers)}](#{line['claim']}) {line['text']}{doubt}"


def _summary(found: Mapping[str, list[Judgment]]) -> str:
    """Return one sentence with the number of claims by verdict."""
    every = [one.verdict for each in found.values() for one in each]
    counts = ", ".join(f"{every.count(verdict)} {verdict}" for verdict in VERDICTS)
    signs = [one.sign for each in found.values() for one in each if one.sign is not None]
    turn = sum(sign < SURE for sign in signs)
    return (
        f"{len(every)} claims: {counts}. Of {len(signs)} that compare emulated times, {turn} could turn their sign. "
        "[How claims are judged](#how-claims-are-judged) explains the columns."
    )


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
    why = f"*{claim.cause}*: {one.reason}" if claim.cause else one.reason
    return (
        name,
        claim.paper,
        one.ours,
        sign_text(one.sign),
        one.verdict,
        why,
        claim.where,
        claim.subject,
        f"`{one.command}`",
    )


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


def _causes(found: Mapping[str, list[Judgment]]) -> str:
    """Return the table of causes of claims that were not reached or only partly, by paper."""
    causes = [cause for cause in get_args(Cause) if cause]
    rows = list[tuple[str, ...]]()
    for paper, title in PAPERS.items():
        missed = [one.claim.cause for one in found[paper] if one.verdict in ("partly", "not reached")]
        counts = (str(missed.count(cause)) for cause in (*causes, ""))
        rows.append((title, str(len(missed)), *counts))
    return markdown_table(("partly or not reached", "number", *causes, "other, see *why*"), rows)
