"""The frame of the reproductions: parts by name, pages section by section, wrong input."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.errors import InputError
from pipeloom.lab.reproduce import (
    PAPERS,
    Figure,
    Options,
    Outcome,
    Part,
    Table,
    commit,
    dip,
    parts_of,
    reproduce,
    write,
)
from pipeloom.lab.reproduce.write import CLAIMS, section
from pipeloom.report import join_sections, sections

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def _part(name: str, value: str) -> Part:
    outcome = Outcome(
        (Table("numbers", ("model", "ours", "paper"), (("a|b", value, "1"),), "They differ."),),
        (Figure(f"{name}-figure", "A line", "<svg/>"),),
        ("A note.",),
        ("h800 (data sheet)",),
    )
    return Part(name, f"Part {name}", "dip.txt Table 1", "emulated", lambda _: outcome)


def test_every_part_is_a_section_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dip, "PARTS", (_part("one", "17"), _part("two", "23")))
    page, outcomes = reproduce("dip", (), Options(), tmp_path)
    assert list(outcomes) == ["one", "two"]
    before = sections(page.read_text())
    assert list(before) == ["about", "one", "two"]
    assert "a\\|b | 17 | 1" in before["one"]
    assert (tmp_path / "dip" / "two-figure.svg").read_text() == "<svg/>"
    monkeypatch.setattr(dip, "PARTS", (_part("one", "18"), _part("two", "24")))
    reproduce("dip", ("two",), Options(seeds=(5,)), tmp_path)
    after = sections(page.read_text())
    assert after["one"] == before["one"]
    assert "24" in after["two"]
    assert "Seeds 5;" in after["two"]


def test_the_table_that_opens_a_page_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dip, "PARTS", (_part("one", "17"),))
    (tmp_path / "dip.md").write_text("# Old\n\n<!-- claims -->\n| claim |\n\n<!-- one -->\n## Old\n")
    page, _ = reproduce("dip", (), Options(), tmp_path)
    assert list(sections(page.read_text())) == ["claims", "about", "one"]
    assert page.read_text().startswith("# DIP and PipeWeaver: the evaluation again\n\n<!-- claims -->\n| claim |\n")


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_opens_with_what_its_sections_say(paper: str) -> None:
    """Every number that the table of claims has as ours stands in a section of the page."""
    found = sections((Path(__file__).parents[3] / "docs" / "results" / f"{paper}.md").read_text())
    assert next(iter(found)) == CLAIMS
    rows = [line.strip("| ").split(" | ") for line in found[CLAIMS].splitlines() if line.startswith("| ")]
    assert rows[0] == ["the paper's claim", "measured here", "reached", "why"]
    said = set(_NUMBER.findall("\n".join(body for name, body in found.items() if name != CLAIMS)))
    for claim, ours, reached, why in rows[1:]:
        assert claim
        assert why
        assert reached.split(",")[0] in ("yes", "no", "partly", "not tried")
        assert set(_NUMBER.findall(ours)) <= said, ours


def test_a_section_states_the_options_that_count() -> None:
    part, options = _part("one", "17"), Options(seeds=(3,), iterations=1, search_s=0.25, solver_s=7.0)
    said = section("dip", part, part.run(options), options, 1.0, 1.0)
    assert "Seeds 3; 1 iteration; 0.25 s of search a batch." in said
    assert "solvers" not in said
    solver = replace(part, uses=("solver",))
    assert "Solvers cut after 7 s." in section("dip", solver, part.run(options), options, 1.0, 1.0)
    searched = replace(part, uses=("search",), searched="an arrangement", search_factor=4.0)
    assert "1 s of search an arrangement." in section("dip", searched, part.run(options), options, 1.0, 1.0)
    nothing = section("dip", replace(part, uses=()), part.run(options), options, 1.0, 1.0)
    assert not any(word in nothing for word in ("Seeds", "iteration", "search"))


def test_names_and_amounts_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="'nothing' is none of"):
        reproduce("dip", ("nothing",), Options(), tmp_path)
    for arguments in (["nobody"], ["dip", "nothing"], ["dip", "--seeds", "0"], ["dip", "--solver", "-1"]):
        assert run(["reproduce", *arguments, "--out", str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("paper", PAPERS)
def test_parts_have_names_of_their_own(paper: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [part.name for part in parts_of(paper)]
    assert len(set(names)) == len(names)
    assert run(["reproduce", paper, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(names)


def test_full_is_as_large_as_the_paper_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(dip, "PARTS", (Part("one", "", "", "emulated", lambda o: seen.append(o) or Outcome()),))
    for words in (["--full"], ["--full", "--iterations", "2"], []):
        assert run(["reproduce", "dip", *words, "--out", str(tmp_path)]) == 0
    full, fewer, small = seen
    assert full == dip.FULL
    assert full.iterations > small.iterations
    assert fewer == replace(full, iterations=2)
    assert small == Options()


def test_a_section_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dip, "PARTS", (_part("one", "17"),))
    monkeypatch.setattr(write, "source_commit", lambda: "abc-dirty")
    page, _ = reproduce("dip", (), Options(), tmp_path)
    assert " at abc-dirty." in page.read_text()


def test_the_commit_is_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean, then dirty; nothing for a package that some other checkout merely has lying in it."""
    package = tmp_path / "repository" / "src" / "pipeloom"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(commit.pipeloom, "__file__", str(package / "__init__.py"))
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init"], [*identity, "commit", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path / "repository"), *words], check=True, capture_output=True)
    assert commit.source_commit.__wrapped__() == ""
    for words in (["add", "."], [*identity, "commit", "-m", "second"]):
        subprocess.run(["git", "-C", str(tmp_path / "repository"), *words], check=True, capture_output=True)
    clean = commit.source_commit.__wrapped__()
    assert len(clean) == 10
    (package.parent.parent / "page.md").write_text("beside the package")
    assert commit.source_commit.__wrapped__() == clean
    (package / "new.py").write_text("")
    assert commit.source_commit.__wrapped__() == f"{clean}-dirty"


def test_sections_come_back_as_they_were_written() -> None:
    bodies = {"a": "## A\n\ntext", "b-2": "| x | y |"}
    page = join_sections("# Head\n\nwords", ("b-2", "missing", "a"), bodies)
    assert sections(page) == bodies
    assert page.startswith("# Head\n\nwords\n\n<!-- b-2 -->")
