"""Claims: looked up in records, judged by one rule; what texts quote is what is recorded."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from pipeloom_lab.reproduce import PAPERS, Outcome, Part, Record, Settings, Table, parts_of
from pipeloom_lab.reproduce.claims import (
    SUBJECTS,
    VERDICTS,
    Cause,
    Cell,
    Claim,
    MissingCellError,
    Rule,
    Verdict,
    judge,
    paper_numbers,
    quantities_text,
)
from pipeloom_lab.reproduce.claims_file import paper_claims
from pipeloom_lab.reproduce.index import gains_of, index_page, judged_claims, own_figures
from pipeloom_lab.reproduce.page import opening_of
from pipeloom_lab.reproduce.part import Options
from pipeloom_lab.reproduce.record import make_record, read_records
from tests.chromium import FLAGS, find_chromium, needs_chromium

ROOT = Path(__file__).parents[3]
RECORDS = {paper: read_records(ROOT / "docs" / "results", paper) for paper in PAPERS}
FIGURE = re.compile(r"\d+(?:\.\d+)?")

SYSTEMS = Table(
    "Seconds of systems",
    ("model", "system", "seconds", "seconds, longest", "gain", "alike"),
    (
        ("S", "one", "2.0", "3.5", "+10.5 % (a)", "3 of 4"),
        ("S", "two: best form", "4.00", "9", "-2 %", "4 of 4"),
        ("L", "one", "out of memory", "", "", "DP 8, TP 2"),
    ),
)


def _records(*tables: Table) -> dict[str, Record]:
    part = Part("part", "", "", "emulated", lambda _: Outcome(tables), uses=())
    return {"part": make_record(part, Options())[0]}


BESIDE = _records(SYSTEMS, Table("Seconds of others", ("model", "seconds"), (("S", "8"),)))


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell("part", "seconds", ("S", "one")), "2.0"),
        (Cell("part", "seconds", ("S", "two")), "4.00"),
        (Cell("part", "seconds, l", ("S", "one")), "3.5"),
        (Cell("part", "seconds", ("S",), "Seconds of systems", "mean"), "3.00"),
        (Cell("part", "seconds", (("S", "L"), ("one", "two")), reduce="min"), "2.00"),
        (Cell("part", "seconds", reduce="max"), "8.00"),
        (Cell("part", "gain", ("S", "two"), negated=True), "2"),
        (Cell("part", "gain", ("S", "one"), minus=Cell("part", "gain", ("S", "two"))), "12.5"),
        (Cell("part", "alike", ("S", "one")), "75"),
        (Cell("part", "alike", ("L", "one"), index=1), "2"),
    ],
)
def test_a_figure_is_looked_up(cell: Cell, text: str) -> None:
    assert quantities_text((cell,), "", BESIDE) == text


@pytest.mark.parametrize(
    "cell",
    [
        Cell("part", "hours", ("S", "one")),
        Cell("part", "seconds", ("M",)),
        Cell("part", "seconds", ("S",), "Nothing"),
        Cell("part", "seconds", ("S",), "Seconds of systems"),  # which of the two?
        Cell("part", "seconds", ("L", "one"), "Seconds of systems"),
        Cell("part", "gain", ("S", "one"), index=3),
    ],
)
def test_what_is_not_there_is_an_error(cell: Cell) -> None:
    with pytest.raises(MissingCellError):
        cell.number(BESIDE)


@pytest.mark.parametrize(
    ("rule", "paper", "cells", "speedup", "verdict"),
    [
        ("at least", "10 %", ("10",), False, "reached"),
        ("at least", "10 %", ("9.9",), False, "partly"),
        ("at least", "10 %", ("4.9",), False, "not reached"),
        ("at least", "above 0 %", ("0",), False, "not reached"),
        ("at least", "above 0 %", ("0.1",), False, "reached"),
        ("at least", "1.34 times", ("1.17",), True, "partly"),
        ("at least", "1.34 times", ("1.16",), True, "not reached"),
        ("at least", "10 to 20 %", ("12", "19"), False, "partly"),
        ("at least", "10 to 20 %", ("12", "21"), False, "reached"),
        ("at least", "10 to 20 %", ("1", "21"), False, "partly"),
        ("at most", "below 10 s", ("10",), False, "reached"),
        ("at most", "below 10 s", ("19",), False, "partly"),
        ("at most", "below 10 s", ("21",), False, "not reached"),
        ("near", "0.400", ("0.440",), False, "reached"),
        ("near", "0.400", ("0.31",), False, "partly"),
        ("near", "0.400", ("0.29",), False, "not reached"),
        ("rises", "grows", ("1", "2", "3"), False, "reached"),
        ("rises", "grows", ("1", "2", "2"), False, "not reached"),
        ("rises", "grows", ("2", "1"), False, "not reached"),
        ("says", "TP 2", ("DP 8, TP 2",), False, "reached"),
        ("says", "TP 2", ("DP 8, TP 1",), False, "not reached"),
    ],
)
def test_the_rule(rule: Rule, paper: str, cells: tuple[str, ...], speedup: bool, verdict: Verdict) -> None:
    columns = tuple(f"column {i}" for i in range(len(cells)))
    records = _records(Table("t", columns, (cells,)))
    ours = tuple(Cell("part", c) for c in columns)
    claim = Claim(name="c", text="Text", paper=paper, ours=ours, rule=rule, reason="Why.", speedup=speedup)
    judged = judge(claim, "dip", records)
    assert judged.verdict == verdict
    assert judged.command == "pipeloom reproduce dip part"
    assert judge(replace(claim, comparable=False), "dip", records).verdict == "not comparable"
    assert judge(claim, "dip", {}).verdict == judge(replace(claim, ours=(), command="x"), "dip", records).verdict
    assert judge(claim, "dip", {}).verdict == "not made"


@pytest.mark.parametrize(("cell", "verdict"), [("91", "reached"), ("92", "partly"), ("98", "not reached")])
def test_a_share_is_judged_by_the_part_that_is_lost(cell: str, verdict: Verdict) -> None:
    claim = Claim(name="c", text="T", paper="90 %", ours=(Cell("part", "c"),), rule="near", reason="Why.", lost=True)
    assert judge(claim, "dip", _records(Table("t", ("c",), ((cell,),)))).verdict == verdict


@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_is_whole(paper: str) -> None:
    claims, names = paper_claims(paper).claims, {part.name for part in parts_of(paper)}
    known = [claim.name for claim in claims] + [own.name for own in paper_claims(paper).own]
    assert len(set(known)) == len(known)
    for claim in claims:
        assert all((claim.text, claim.where, claim.paper, claim.reason)), claim.name
        assert claim.ours or claim.command, f"{claim.name} has no command"
        assert claim.rule in get_args(Rule), claim.name
        assert claim.cause in get_args(Cause), claim.name
        assert claim.subject in SUBJECTS, claim.name
        assert {found.part for found in (*claim.ours, *claim.values.values())} <= names, claim.name
        if claim.ours and claim.rule not in ("says", "rises"):
            assert len(paper_numbers(claim)) == len(claim.ours), claim.name
        assert not re.search(r"\d\.\d|\d %", claim.reason), (
            f"{claim.name}: its figures of ours are typed, not looked up"
        )
        assert set(re.findall(r"\{(\w+)\}", claim.reason)) == set(claim.values), claim.name


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_of_a_claim_stands_in_the_records(paper: str) -> None:
    for claim in paper_claims(paper).claims:
        judged = judge(claim, paper, RECORDS[paper])
        assert not claim.cause or judged.verdict in ("partly", "not reached"), claim.name
        recorded = all(found.part in RECORDS[paper] for found in claim.ours)
        assert (judged.verdict == "not made") == (not claim.ours or not recorded), claim.name
        beside = all(found.part in RECORDS[paper] for found in claim.values.values())
        assert "not made" not in judged.reason or not beside, claim.name
    for name, (own, text, _) in own_figures(RECORDS).items():
        # What is built and not recorded yet is told as not made.
        recorded = all(found.part in RECORDS[name.partition("-")[0]] for found in own.ours)
        assert recorded == (text != "not made"), name


def _cells(row: str) -> list[str]:
    """Split a row of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def _claim_rows(page: str) -> list[list[str]]:
    """Return the table of all claims, with its header."""
    table = page.partition("\n## All claims\n")[2].partition("\n## ")[0]
    return [_cells(line) for line in table.splitlines() if line.startswith("| ")]


def test_the_index_has_all_claims_and_no_empty_cell() -> None:
    page = index_page(RECORDS)
    rows = [line for line in page.splitlines() if line.startswith('| <a id="')]
    assert len(rows) == sum(len(paper_claims(paper).claims) + len(paper_claims(paper).own) for paper in PAPERS)
    assert all(all(_cells(row)) for row in rows)
    header, *claims = _claim_rows(page)
    judged = [(f"{paper}-{one.claim.name}", one) for paper, found in judged_claims(RECORDS).items() for one in found]
    for (name, one), cells in zip(judged, claims, strict=True):
        row = dict(zip(header, cells, strict=True))
        assert row["claim"].startswith(f'<a id="{name}"></a>')
        assert (row["paper"], row["verdict"]) == (one.claim.paper, one.verdict)
        assert row["why"] == (f"*{one.claim.cause}*: " if one.claim.cause else "") + one.reason.replace("|", "\\|")


def test_the_index_opens_with_a_figure_and_at_most_ten_gains() -> None:
    """Each gain has the recorded figures of its claim, and links to it."""
    gains = gains_of(RECORDS)
    assert gains is not None
    assert gains_of({}) is None
    opening = index_page(RECORDS, gains).partition("\n## ")[0]
    assert f"({gains.name}.svg)" in opening
    assert "](gains.svg)" not in index_page({})
    lines = re.findall(r"^- \[([^\]]*)\]\(#([\w-]+)\) (.*)$", opening, re.MULTILINE)
    assert len(lines) == opening.count("\n- ") <= 10
    for figures, name, text in lines:
        assert FIGURE.findall(figures) == FIGURE.findall(_lines()[name])
        assert not re.search(r"\d\.\d|\d %", text), f"{name}: a figure is typed, not looked up"


def test_the_table_of_claims_is_filtered(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The script of the site finds the table by its heading and its columns."""
    needs_chromium(pytestconfig)
    header, *rows = _claim_rows(index_page(RECORDS))
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    script = (ROOT / "docs" / "javascripts" / "claims.js").read_text()
    (tmp_path / "page.html").write_text(f"""<!doctype html><meta charset="utf-8"><h2 id="all-claims">All claims</h2>
        <table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><script>{script}</script><script>
        const seen = []
        for (const paper of document.forms[0].paper.options) for (const verdict of document.forms[0].verdict.options) {{
          paper.selected = verdict.selected = true
          document.forms[0].dispatchEvent(new Event("change"))
          seen.push([paper.value, verdict.value, [...table.tBodies[0].rows].filter(row => !row.hidden).length])
        }}
        document.body.replaceChildren(JSON.stringify(seen))</script>""")
    found = find_chromium()
    assert found is not None
    flags = [flag for flag in FLAGS if "debugging" not in flag]  # with it, the browser does not end
    command = [found, *flags, f"--user-data-dir={tmp_path}", "--dump-dom", (tmp_path / "page.html").as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    seen = json.loads(page.partition("<body>")[2].partition("</body>")[0])
    where, verdict = header.index("where"), header.index("verdict")
    assert {paper for paper, *_ in seen} == {"", "DIP", "PipeWeaver", "PipeTune", "AdaPtis"}
    assert {one for _, one, _ in seen} == {"", *VERDICTS}
    for paper, one, count in seen:
        assert count == sum(paper in row[where] and one in ("", row[verdict]) for row in rows)
        assert count or paper


def test_an_index_without_records_makes_nothing_up() -> None:
    assert {one.verdict for found in judged_claims({}).values() for one in found} == {"not made"}
    bare = {"dip": {"table-5": replace(BESIDE["part"], part="table-5", settings=Settings())}}
    (one,) = (one for one in judged_claims(bare)["dip"] if one.claim.name == "table-5-ours")
    assert one.verdict == "not made"
    assert "Not in the record" in one.reason


@pytest.mark.parametrize("paper", PAPERS)
def test_goals_are_judged_from_the_records(paper: str) -> None:
    page = index_page(RECORDS)
    for goal in paper_claims(paper).goals:
        judged = judge(goal, paper, RECORDS[paper])
        assert judged.verdict in ("reached", "partly", "not reached")
        assert f"| {goal.text} | {goal.paper} | {judged.ours} | {judged.verdict} |" in page
        assert "not made" not in judged.reason


def test_what_the_bound_allows_over_megatron() -> None:
    gains = ("over the best baseline", "room to the lower bound", "of it closed", "over Megatron-LM interleaved")
    rows = tuple(
        (model, "+20.0 %", "25.0 %", "80 %", "+50.0 %") for model in ("VLM-S", "VLM-M", "VLM-L", "T2V-S", "T2V-L")
    )
    table = Table("Gain of ours", ("model", *gains), rows)
    records = {"figure-8a": _records(table)["part"]}
    # Theirs takes 1.5, the best baseline 1.2 and the bound 0.96 of ours.
    assert "allows 56.2, 56.2, 56.2 %" in judge(paper_claims("dip").goals[0], "dip", records).reason


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_opens_with_a_picture_of_what_is_recorded(paper: str) -> None:
    assert opening_of(paper, {}) is None
    first = opening_of(paper, RECORDS[paper])
    assert first is not None
    assert "<svg" in first.svg


LINK = re.compile(r"\[([^\]]*)\]\(([^)#]+)(?:#([^)]*))?\)")
RESULTS = ROOT / "docs" / "results"
TEXTS = [
    ROOT / "README.md",
    RESULTS / "summary.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "notes").glob("*.md")),
]


def _blocks(text: str) -> list[str]:
    """Paragraphs and items, and every row of a table by itself."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*] )", text):
        lines = block.splitlines()
        rows = [line for line in lines if line.startswith("|")]
        found += rows or [" ".join(lines)]
    return found


@functools.cache
def _lines() -> dict[str, str]:
    """What the index has as ours, by the name of the line."""
    lines = {f"{p}-{j.claim.name}": j.ours for p, found in judged_claims(RECORDS).items() for j in found}
    return lines | {name: text for name, (_, text, _) in own_figures(RECORDS).items()}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_a_quoted_figure_is_the_recorded_one(path: Path) -> None:
    """A result of the evaluation is quoted as the text of a link to its line in the index, and nowhere else."""
    lines = _lines()
    for block in _blocks(path.read_text()):
        links = [link for link in LINK.finditer(block) if (path.parent / link[2]).resolve().parent == RESULTS]
        for words, page, name in (link.groups() for link in links):
            figures = FIGURE.findall(words)
            if not figures:
                continue
            assert page.endswith("index.md"), f"{path.name} quotes {words!r}: link it to its line in the index"
            assert name in lines, f"{path.name} quotes {words!r} of {name!r}, which is none of the index"
            recorded = [float(figure) for figure in FIGURE.findall(lines[name])]
            assert len(figures) == len(recorded), f"{path.name} quotes {words!r} of {name}, recorded is {lines[name]}"
            said = [
                f"{round(value, len(text.partition('.')[2])):.{len(text.partition('.')[2])}f}"
                for value, text in zip(recorded, figures, strict=True)
            ]
            assert figures == said, f"{path.name} quotes {words!r} of {name}, recorded is {lines[name]}"
        if links:
            left = functools.reduce(lambda text, link: text.replace(link[0], ""), links, block)
            assert not re.search(r"\d %", left), f"{path.name} quotes a result beside a link, not in it: {left}"
