"""How far claims can be trusted, and what changed between two results."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.validation import chance
from pipeloom_lab.reproduce import PAPERS
from pipeloom_lab.reproduce.claims_file import paper_claims
from pipeloom_lab.reproduce.index import index_page, judged_claims
from pipeloom_lab.reproduce.record import read_records
from pipeloom_lab.reproduce.trust import SURE, Gain, device_rows, sign_probability, sign_text

ROOT = Path(__file__).parents[3]
COMPARE = runpy.run_path(str(ROOT / "scripts" / "compare_results.py"))
Entry, changes, changes_table, entries = (COMPARE[name] for name in ("Entry", "changes", "changes_table", "entries"))
RECORDS = {paper: read_records(ROOT / "docs" / "results", paper) for paper in PAPERS}


@pytest.mark.parametrize(
    ("gain", "figures", "ratio"),
    [
        ("faster", (25.0,), 1.25),
        ("shorter", (20.0,), 1.25),
        ("times", (1.25,), 1.25),
        ("share", (80.0,), 1.25),
        ("seconds", (10.0, 12.5), 1.25),
        ("faster", (-20.0,), 1.25),
        ("times", (3.0, 1.25, 2.0), None),
    ],
)
def test_a_sign_is_as_sure_as_that_of_pairs_that_differ_as_much(
    gain: Gain, figures: tuple[float, ...], ratio: float | None
) -> None:
    found = sign_probability(gain, figures)
    ratios = figures if ratio is None else (ratio,)
    assert found == pytest.approx(min(chance(each).probability for each in ratios))


def test_a_rising_gain_has_the_sign_of_its_smallest_step() -> None:
    steps = sign_probability("faster", (10.0, 21.0, 93.6), rises=True)
    assert steps == pytest.approx(min(chance(1.1).probability, chance(1.6).probability))


def test_what_compares_no_times_has_no_sign() -> None:
    assert sign_probability("", (5.0,)) is None
    assert sign_probability("faster", ()) is None
    assert sign_probability("shorter", (0.0,)) == 0.5
    assert sign_text(None) == "-"


def test_a_sign_below_the_bound_is_marked() -> None:
    assert sign_text(SURE) == "90 %"
    assert sign_text(SURE - 0.004) == "**89 %**"


def test_gains_are_of_emulated_times() -> None:
    for paper in PAPERS:
        claims = paper_claims(paper)
        for each in (*claims.claims, *claims.own):
            if each.gain:
                kinds = {
                    RECORDS[paper][quantity.part].time for quantity in each.ours if quantity.part in RECORDS[paper]
                }
                assert kinds <= {"emulated", "planned"}, each.name
                assert each.gain in ("faster", "shorter", "times", "share", "seconds"), each.name


def test_the_index_marks_claims_whose_sign_could_turn() -> None:
    page = index_page(RECORDS)
    rows = {
        line.partition('"')[2].partition('"')[0]: line for line in page.splitlines() if line.startswith('| <a id="')
    }
    judged = [(paper, one) for paper, each in judged_claims(RECORDS).items() for one in each]
    signs = [one.sign for _, one in judged if one.sign is not None]
    assert len(signs) > 50
    assert min(signs) < SURE < max(signs)
    for paper, one in judged:
        assert f"| {sign_text(one.sign)} |" in rows[f"{paper}-{one.claim.name}"]


def test_every_device_of_the_records_has_an_error() -> None:
    rows = device_rows(RECORDS)
    named = {label.partition(" (")[0] for each in RECORDS.values() for one in each.values() for label in one.devices}
    assert {row[0] for row in rows} == named
    for _, _, _, parts, median, bounds, basis in rows:
        assert parts
        assert float(median.removesuffix(" %")) > 0
        low, high = (float(word) for word in bounds.removesuffix(" %").split(" to "))
        assert low < 0 < high
        assert "published runs" in basis
    assert device_rows({}) == []


INDEX = """\
| claim | paper | ours | sign | verdict | why |
|---|---|---|---|---|---|
| <a id="dip-one"></a>One \\| two | 5 % | 4 % | **80 %** | partly | so |
| <a id="dip-two"></a>Two | 5 % | 6 % | - | reached | so |
| <a id="dip-three"></a>Three | 5 % | 7 % | - | reached | so |

| figure | ours | command |
|---|---|---|
| <a id="dip-own"></a>Own | 1 s | `x` |
"""


def test_entries_of_an_index_are_read_by_the_names_of_its_columns() -> None:
    assert entries(INDEX) == {
        "dip-one": Entry("One \\| two", "4 %", "partly"),
        "dip-two": Entry("Two", "6 %", "reached"),
        "dip-three": Entry("Three", "7 %", "reached"),
        "dip-own": Entry("Own", "1 s", ""),
    }
    recorded = entries(index_page(RECORDS))
    assert len(recorded) == sum(len(paper_claims(paper).claims) + len(paper_claims(paper).own) for paper in PAPERS)


def test_changed_verdicts_come_before_changed_figures() -> None:
    new = INDEX.replace("6 %", "5 %").replace("4 % | **80 %** | partly", "4 % | **80 %** | not reached")
    new = new.replace('<a id="dip-own"></a>Own', '<a id="dip-other"></a>Other')
    found = [change.name for change in changes(entries(INDEX), entries(new))]
    assert found == ["dip-one", "dip-other", "dip-own", "dip-two"]
    table = changes_table(INDEX, new)
    assert table.startswith("4 of 5 figures changed")
    assert "| 6 % | 5 % | reached | reached |" in table
    assert "[Own](index.md#dip-own) | 1 s |  |" in table
    assert "[Other](index.md#dip-other) |  | 1 s |" in table
    assert "figures changed" in changes_table(INDEX, INDEX)
    assert not list(changes(entries(INDEX), entries(INDEX)))


def test_the_script_compares_two_folders(tmp_path: Path) -> None:
    for name, text in {"old": INDEX, "new": INDEX.replace("7 %", "8 %")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.md").write_text(text)
    script = [sys.executable, str(ROOT / "scripts" / "compare_results.py")]
    done = subprocess.run([*script, str(tmp_path / "old"), str(tmp_path / "new")], capture_output=True, text=True)
    assert "| 7 % | 8 % | reached | reached |" in done.stdout
    failed = subprocess.run([*script, "no-such-commit"], capture_output=True, text=True)
    assert failed.returncode != 0
    assert "no-such-commit" in failed.stderr


def test_pages_are_written_from_records_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "all", "--pages", "--out", str(tmp_path)]) == 0
    assert "index.md" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.md")} == {"index.md", *(f"{paper}.md" for paper in PAPERS)}
    assert not list(tmp_path.rglob("*.json"))
    assert run(["reproduce", "dip", "table-1", "--pages", "--out", str(tmp_path)]) == 2
    assert "--pages" in capsys.readouterr().err
