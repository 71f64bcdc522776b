"""The frame of the reproductions: parts by name, records, pages from them, processes, wrong input."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.errors import InputError, PipeloomError
from pipeloom.report import join_sections, sections
from pipeloom_lab.reproduce import (
    PAPERS,
    Figure,
    Options,
    Outcome,
    Part,
    Progress,
    Table,
    dip,
    parts_of,
    provenance,
    record,
    reproduce,
)
from pipeloom_lab.reproduce import run as run_module
from pipeloom_lab.reproduce.page import MOST_ROWS, long_tables, paper_page, section
from pipeloom_lab.reproduce.record import make_record, read_record, read_records, record_path
from pipeloom_lab.reproduce.run import Job, Remaining, page_files

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def _part(name: str, value: str = "17", work: Callable[[], object] = lambda: None) -> Part:
    outcome = Outcome(
        (Table("numbers", ("model", "ours", "paper"), (("a|b", value, "1"),), "They differ."),),
        (Figure(f"{name}-figure", "A line", "<svg/>"),),
        ("A note.",),
        ("h800 (data sheet)",),
    )

    def made(_: Options) -> Outcome:
        work()
        return outcome

    return Part(name, f"Part {name}", "DIP Table 1", "emulated", made)


def _counted(name: str, seen: list[str]) -> Part:
    return _part(name, "17", lambda: seen.append(name))


def _made(part: Part, options: Options) -> record.Record:
    return make_record(part, options)[0]


def test_every_part_is_recorded_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dip, "PARTS", (_part("one", "17"), _part("two", "23")))
    made = reproduce([("dip", Options())], (), tmp_path)
    assert list(made["dip"]) == ["one", "two"]
    assert made["dip"] == read_records(tmp_path, "dip")
    page = tmp_path / "dip.md"
    before = page.read_text()
    assert "a\\|b | 17 | 1" in before
    assert (tmp_path / "dip" / "two-figure.svg").read_text() == "<svg/>"
    assert "not made" in (tmp_path / "index.md").read_text()
    first = record_path(tmp_path, "dip", "one").read_bytes()
    monkeypatch.setattr(dip, "PARTS", (_part("one", "18"), _part("two", "24")))
    reproduce([("dip", Options(seeds=(5,)))], ("two",), tmp_path)
    assert record_path(tmp_path, "dip", "one").read_bytes() == first
    after = page.read_text()
    assert after.partition("## Part two")[0] == before.partition("## Part two")[0]
    assert "24" in after
    assert "Seeds 5;" in after


def test_what_is_recorded_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption, that is; with other options, on other source or when asked it is."""
    seen: list[str] = []
    reported: list[Progress] = []
    monkeypatch.setattr(dip, "PARTS", (_counted("one", seen), _counted("two", seen)))
    reproduce([("dip", Options())], ("one",), tmp_path)
    reproduce([("dip", Options())], (), tmp_path, on_progress=reported.append)
    assert seen == ["one", "two"]
    assert [(p.part.name, p.state.split(",")[0]) for p in reported] == [
        ("one", "recorded already"),
        ("two", "begins"),
        ("two", "done"),
    ]
    reproduce([("dip", Options(solver_s=7.0))], (), tmp_path)
    assert seen == ["one", "two"], "neither uses solvers"
    reproduce([("dip", Options(seeds=(1,)))], ("one",), tmp_path)
    reproduce([("dip", Options())], ("two",), tmp_path, again=True)
    assert seen == ["one", "two", "one", "two"]
    monkeypatch.setattr(record, "source_digest", lambda: "other")
    reproduce([("dip", Options())], ("two",), tmp_path)
    assert seen[4:] == ["two"]


def test_a_part_that_fails_leaves_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(dip, "PARTS", (_part("one"), _part("two", work=fail)))
    with pytest.raises(ZeroDivisionError):
        reproduce([("dip", Options())], (), tmp_path)
    assert "## Part one" in (tmp_path / "dip.md").read_text()


def test_parts_run_in_processes_and_some_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")  # these parts are of this test, and a fresh process would not know them
    monkeypatch.setattr(run_module.multiprocessing, "get_context", lambda _: fork)
    place = tmp_path / "running"
    place.mkdir()

    def stay(name: str, number: int) -> Callable[[], None]:
        def work() -> None:
            (place / name).touch()
            end = time.monotonic() + 20
            while len(list(place.iterdir())) < number and time.monotonic() < end:
                time.sleep(0.01)
            (tmp_path / f"{name} saw {len(list(place.iterdir()))}").touch()
            time.sleep(0.2)
            (place / name).unlink()

        return work

    def fail() -> None:
        raise ValueError("no")

    parts = (
        replace(_part("clock", work=stay("clock", 1)), alone=True),
        _part("left", work=stay("left", 2)),
        _part("right", work=stay("right", 2)),
        replace(_part("first", work=fail), shares="both"),
        replace(_part("second"), shares="both"),
        _part("dead", work=lambda: os._exit(3)),
    )
    monkeypatch.setattr(dip, "PARTS", parts)
    reported: list[Progress] = []
    with pytest.raises(PipeloomError, match=r"dip first failed: ValueError: no.*|dip dead failed: .* 3") as error:
        reproduce([("dip", Options())], (), tmp_path, processes=2, on_progress=reported.append)
    assert "first failed: ValueError: no" in str(error.value)
    assert "dead failed: its process ended with 3" in str(error.value)
    assert set(read_records(tmp_path, "dip")) == {"clock", "left", "right", "second"}
    assert {path.name for path in tmp_path.glob("* saw *")} == {"left saw 2", "right saw 2", "clock saw 1"}
    assert reported[-1].left.startswith("0 of 6 parts left")


@pytest.mark.full
def test_a_part_is_made_in_a_fresh_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (part,) = (part for part in parts_of("adaptis") if part.name == "figure-4")
    jobs = [Job("adaptis", (part,), Options())]
    steps = list(run_module._in_processes(jobs, tmp_path, Remaining({}, 2, jobs)))
    assert [(name, each.name, state) for name, each, state, _ in steps] == [
        ("adaptis", "figure-4", "begins"),
        ("adaptis", "figure-4", "done"),
    ]
    assert run(["reproduce", "adaptis", "figure-4", "--json", "--out", str(tmp_path)]) == 0
    said = capfd.readouterr()
    assert "recorded already" in said.err
    assert list(json.loads(said.out)["parts"]) == ["figure-4"]


def test_the_time_left_is_that_of_the_last_run() -> None:
    parts = {name: _part(name) for name in "abcd"}
    known = {("dip", "a"): 600.0, ("dip", "b"): 300.0, ("dip", "c"): 120.0}
    alone = Job("dip", (replace(parts["c"], alone=True),), Options())
    jobs = [Job("dip", (parts["a"],), Options()), Job("dip", (parts["b"],), Options()), alone]
    assert Remaining(known, 2, jobs).words() == "3 of 3 parts left, about 12 min"
    one = Remaining(known, 1, jobs)
    assert one.words() == "3 of 3 parts left, about 17 min"
    one.ended.add(("dip", "a"))
    assert one.words() == "2 of 3 parts left, about 7 min"
    one.begun["dip", "b"] = time.monotonic() - 280
    assert one.words() == "2 of 3 parts left, about 2 min"
    never = Job("dip", (parts["d"],), Options())
    assert Remaining(known, 2, [never]).words() == "1 of 1 parts left, about 0 s and 1 never timed"


@pytest.mark.parametrize("paper", PAPERS)
def test_pages_are_those_of_the_records(paper: str) -> None:
    """Pages, long tables and index in the repository are what the data beside them give."""
    records = {each: read_records(RESULTS, each) for each in PAPERS}
    files = page_files(records, paper)
    for name, text in files.items():
        assert (RESULTS / name).read_text() == text, f"{name}: written by hand? `pipeloom reproduce {paper} --pages`"
    assert {f"{paper}/{path.name}" for path in (RESULTS / paper).glob("*.csv")} == {
        name for name in files if name.endswith(".csv")
    }
    pictures = {"opening.svg", *(f"{name}.svg" for one in records[paper].values() for name in one.figures)}
    assert {path.name for path in (RESULTS / paper).glob("*.svg")} == pictures
    assert {path.stem for path in (RESULTS / paper).glob("*.json")} <= {part.name for part in parts_of(paper)}


def test_a_long_table_is_a_file_beside_the_page() -> None:
    rows = tuple((str(i), "a, b") for i in range(MOST_ROWS + 1))
    outcome = Outcome((Table("short", ("n",), (("1",),)), Table("long", ("n", "word"), rows, "Its note.")))
    one = _made(replace(_part("one"), run=lambda _: outcome), Options())
    (name,) = long_tables(one)
    assert name == "one-2.csv"
    assert long_tables(one)[name].splitlines()[:2] == ["n,word", '0,"a, b"']
    page = paper_page("dip", {"one": one})
    assert f"[{MOST_ROWS + 1} rows](dip/one-2.csv): n; word." in page
    assert "Its note." in page
    assert "| 1 |" in page
    assert "a, b" not in page


def test_a_section_states_the_options_that_count() -> None:
    part, options = _part("one"), Options(seeds=(3,), iterations=1, search_s=0.25, solver_s=7.0)
    said = section("dip", _made(part, options))
    assert "Seeds 3; 1 iteration; 0.25 s of search a batch." in said
    assert "solvers" not in said
    assert "Solvers cut after 7 s." in section("dip", _made(replace(part, uses=("solver",)), options))
    searched = replace(part, uses=("search",), searched="an arrangement", search_factor=4.0)
    assert "1 s of search an arrangement." in section("dip", _made(searched, options))
    nothing = section("dip", _made(replace(part, uses=()), options))
    assert not any(word in nothing for word in ("Seeds", "iteration", "search"))


def test_names_and_amounts_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="'nothing' is none of"):
        reproduce([("dip", Options())], ("nothing",), tmp_path)
    wrong = (["nobody"], ["dip", "nothing"], ["dip", "--seeds", "0"], ["dip", "--solver", "-1"])
    for arguments in (*wrong, ["all", "table-5"], ["dip", "table-5", "--processes", "0"]):
        assert run(["reproduce", *arguments, "--out", str(tmp_path)]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = record_path(tmp_path, "dip", "table-1")
    path.parent.mkdir()
    path.write_text('{"part": 1}')
    with pytest.raises(InputError, match=r"table-1.json: is no record of a part: .*; remove it"):
        read_record(path)


def test_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="the same name"):
        Table("t", ("a", "b", "a"), ())


@pytest.mark.parametrize("paper", PAPERS)
def test_parts_have_names_of_their_own(paper: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [part.name for part in parts_of(paper)]
    assert len(set(names)) == len(names)
    assert run(["reproduce", paper, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(names)


def test_full_is_as_large_as_the_paper_unless_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(dip, "PARTS", (_part("one"),))
    monkeypatch.setattr(record, "source_commit", lambda: "abc-dirty")
    reproduce([("dip", Options())], (), tmp_path)
    assert " at abc-dirty." in (tmp_path / "dip.md").read_text()


def test_the_commit_is_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean, then dirty; nothing for a package that some other checkout merely has lying in it."""
    package = tmp_path / "repository" / "src" / "pipeloom"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance.pipeloom, "__file__", str(package / "__init__.py"))
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init"], [*identity, "commit", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path / "repository"), *words], check=True, capture_output=True)
    assert provenance.source_commit.__wrapped__() == ""
    for words in (["add", "."], [*identity, "commit", "-m", "second"]):
        subprocess.run(["git", "-C", str(tmp_path / "repository"), *words], check=True, capture_output=True)
    clean, digest = provenance.source_commit.__wrapped__(), provenance.source_digest.__wrapped__()
    assert len(clean) == 10
    (package.parent.parent / "page.md").write_text("beside the package")
    assert provenance.source_commit.__wrapped__() == clean
    assert provenance.source_digest.__wrapped__() == digest
    (package / "new.py").write_text("")
    assert provenance.source_commit.__wrapped__() == f"{clean}-dirty"
    assert provenance.source_digest.__wrapped__() != digest


def test_sections_come_back_as_they_were_written() -> None:
    bodies = {"a": "## A\n\ntext", "b-2": "| x | y |"}
    page = join_sections("# Head\n\nwords", ("b-2", "missing", "a"), bodies)
    assert sections(page) == bodies
    assert page.startswith("# Head\n\nwords\n\n<!-- b-2 -->")


def test_a_part_times_no_more_batches_than_its_most_unless_all_is_asked_for() -> None:
    counts: list[int] = []

    def timed(options: Options) -> Outcome:
        counts.append(options.iterations)
        return Outcome()

    part = Part("few", "Few", "nowhere", "emulated", timed, most_iterations=3)
    for options, wanted in ((Options(), 3), (Options(iterations=2), 2), (Options(iterations=20, full=True), 20)):
        assert make_record(part, options)[0].settings.iterations == counts.pop() == wanted
