"""Run parts of the evaluations, several at a time in separate processes, and write their pages."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from pipeloom.errors import InputError, PipeloomError
from pipeloom.io import make_folder, write_text
from pipeloom_lab.reproduce.index import gains_of, index_page
from pipeloom_lab.reproduce.page import long_tables, opening_of, paper_page
from pipeloom_lab.reproduce.part import PAPERS, Options, Part, parts_of
from pipeloom_lab.reproduce.provenance import source_commit
from pipeloom_lab.reproduce.record import Record, is_made, make_part, read_records

EVERY_S = 60.0
"""Seconds between progress reports while no part starts or ends."""


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a part: begun, under way, done, failed, or recorded earlier."""

    paper: str
    part: Part
    state: str
    elapsed_s: float
    """Seconds since the part began, or the recorded duration of a part recorded earlier."""
    left: str
    """Remaining parts and time, in words."""


@dataclass(frozen=True, slots=True)
class Job:
    """Parts that one process runs in turn."""

    paper: str
    parts: tuple[Part, ...]
    options: Options

    @property
    def alone(self) -> bool:
        """Whether nothing else may run at the same time."""
        return any(part.alone for part in self.parts)


@dataclass(slots=True)
class Remaining:
    """Estimate of the remaining time from the durations of the last records."""

    known_s: dict[tuple[str, str], float]
    processes: int
    waiting: list[Job]
    begun: dict[tuple[str, str], float] = field(default_factory=dict)
    """Start times of running parts."""
    ended: set[tuple[str, str]] = field(default_factory=set)

    def of(self, job: Job, now: float) -> float:
        """Return the remaining seconds of a job."""
        names = [(job.paper, part.name) for part in job.parts]
        return sum(
            max(0.0, self.known_s.get(name, 0.0) - (now - self.begun[name] if name in self.begun else 0.0))
            for name in names
            if name not in self.ended
        )

    def words(self) -> str:
        """Return the remaining parts and time in words."""
        now = time.monotonic()
        names = [(job.paper, part.name) for job in self.waiting for part in job.parts]
        left = [name for name in names if name not in self.ended]
        together = [self.of(job, now) for job in self.waiting if not job.alone]
        alone = sum(self.of(job, now) for job in self.waiting if job.alone)
        seconds = alone + max(sum(together) / self.processes, max(together, default=0.0))
        unknown = sum(name not in self.known_s for name in left)
        more = f" and {unknown} never timed" if unknown else ""
        return f"{len(left)} of {len(names)} parts left, about {_time(seconds)}{more}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def reproduce(
    papers: Sequence[tuple[str, Options]],
    names: Sequence[str],
    out: Path,
    *,
    processes: int = 1,
    again: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, dict[str, Record]]:
    """Run the named parts of papers, or all, and write their records, the pages and the index.

    A part with a record of the same source and options is skipped. Each record is written as soon as its part ends, so
    an interrupted run resumes there. Records of other parts stay as they are.

    Parameters
    ----------
    names : sequence of str
        Parts to run; empty for all.
    out : Path
        Folder of ``PAPER/PART.json``, figures and long tables, ``PAPER.md`` and ``index.md``.
    processes : int
        Largest number of parts at a time. Parts that measure wall time run alone. Searches are limited by processor
        time, so parallel parts do not affect them.
    again : bool
        Also run parts that are recorded.

    Returns
    -------
    dict of dict of Record
        Records of the named parts, by paper.

    Raises
    ------
    InputError
        No such paper or part.
    PipeloomError
        A part failed in its process. All other parts were run.
    """
    if processes < 1:
        raise InputError("--processes", f"{processes} is below 1")
    wanted = {paper: _named(paper, names) for paper, _ in papers}
    source_commit()
    for paper in wanted:
        make_folder(out / paper)
    old = {paper: read_records(out, paper) for paper in wanted}
    jobs = list[Job]()
    known = {(paper, name): one.made.seconds for paper, each in old.items() for name, one in each.items()}
    remaining = Remaining(known, processes, jobs)
    for paper, options in papers:
        kept = [part for part in wanted[paper] if not again and is_made(old[paper].get(part.name), part, options)]
        jobs += _jobs(paper, [part for part in wanted[paper] if part not in kept], options)
        for part in kept:
            on_progress(Progress(paper, part, "recorded already, made in", known[paper, part.name], ""))
    several = processes > 1 and len(jobs) > 1
    steps = _in_processes(jobs, out, remaining) if several else _here(jobs, out)
    failed = []
    for paper, part, state, elapsed_s in steps:
        if state == "begins":
            remaining.begun[paper, part.name] = time.monotonic()
        elif state != "under way":
            remaining.ended.add((paper, part.name))
            write_pages(out, paper)
        if state.startswith("failed"):
            failed.append(f"{paper} {part.name} {state}")
        on_progress(Progress(paper, part, state, elapsed_s, remaining.words()))
    for paper in wanted:
        write_pages(out, paper)
    if failed:
        raise PipeloomError("; ".join(failed))
    made = {paper: read_records(out, paper) for paper in wanted}
    return {paper: {part.name: made[paper][part.name] for part in parts} for paper, parts in wanted.items()}


def _named(paper: str, names: Sequence[str]) -> list[Part]:
    parts = parts_of(paper)
    known = {part.name: part for part in parts}
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"part of {paper}", f"{unknown[0]!r} is none of {', '.join(known)}")
    return [part for part in parts if not names or part.name in names]


def write_pages(out: Path, paper: str) -> None:
    """Write a paper's page, its long tables and the index from the records in a folder."""
    found = {each: read_records(out, each) for each in PAPERS}
    files = page_files(found, paper)
    for path in (out / paper).glob("*.csv"):
        if f"{paper}/{path.name}" not in files and path.stem.rpartition("-")[0] in found[paper]:
            path.unlink()  # of a table that has become short
    for name, text in files.items():
        write_text(out / name, text)


def page_files(records: Mapping[str, Mapping[str, Record]], paper: str) -> dict[str, str]:
    """Return all files that records determine, by path: a paper's page and long tables, and the index."""
    mine = records[paper]
    files = {f"{paper}/{name}": text for one in mine.values() for name, text in long_tables(one).items()}
    if (opening := opening_of(paper, mine)) is not None:
        files[f"{paper}/{opening.name}.svg"] = opening.svg
    gains = gains_of(records)
    if gains is not None:
        files[f"{gains.name}.svg"] = gains.svg
    return files | {f"{paper}.md": paper_page(paper, mine, opening), "index.md": index_page(records, gains)}


def _jobs(paper: str, parts: Sequence[Part], options: Options) -> list[Job]:
    """Group parts that share timings into one job each, in the paper's order."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.shares or part.name, []).append(part)
    return [Job(paper, tuple(each), options) for each in groups.values()]


Step = tuple[str, Part, str, float]
"""Paper, part, state, and seconds."""


def _here(jobs: Sequence[Job], out: Path) -> Iterator[Step]:
    """Run the parts in turn in this process."""
    for job in jobs:
        for part in job.parts:
            yield job.paper, part, "begins", 0.0
            record = make_part(part, job.options, out, job.paper)
            yield job.paper, part, "done", record.made.seconds


def _in_processes(jobs: Sequence[Job], out: Path, remaining: Remaining) -> Iterator[Step]:
    """Run every job in a fresh process: the longest first, and last those that run alone."""
    todo = sorted(jobs, key=lambda job: (job.alone, -remaining.of(job, 0.0)))
    running: dict[Connection, tuple[SpawnProcess, Job, list[Part]]] = {}
    try:
        while todo or running:
            while todo and (not running if todo[0].alone else len(running) < remaining.processes):
                job = todo.pop(0)
                here, there = multiprocessing.Pipe(duplex=False)
                names = [part.name for part in job.parts]
                process = multiprocessing.get_context("spawn").Process(
                    target=_work, args=(there, job.paper, names, job.options, out)
                )
                process.start()
                there.close()
                running[here] = process, job, list(job.parts)
            ready = multiprocessing.connection.wait(list(running), EVERY_S)
            for connection in ready:
                assert isinstance(connection, Connection)
                yield from _received(connection, running)
            if not ready:
                for _, job, parts in running.values():
                    if parts and (job.paper, parts[0].name) in remaining.begun:
                        since = time.monotonic() - remaining.begun[job.paper, parts[0].name]
                        yield job.paper, parts[0], "under way", since
    finally:
        for process, _, _ in running.values():
            process.terminate()
            process.join()


def _received(
    connection: Connection, running: dict[Connection, tuple[SpawnProcess, Job, list[Part]]]
) -> Iterator[Step]:
    """Yield what a process reports. When it has ended, its unfinished parts have failed."""
    process, job, parts = running[connection]
    try:
        state, seconds = connection.recv()
    except EOFError:
        del running[connection]
        process.join()
        for part in parts:
            yield job.paper, part, f"failed: its process ended with {process.exitcode}", 0.0
        return
    yield job.paper, parts[0], state, seconds
    if state != "begins":
        del parts[0]


def _work(connection: Connection, paper: str, names: Sequence[str], options: Options, out: Path) -> None:
    """Run parts in a child process, and report each over the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted is who waits for this, and ends it
    known = {part.name: part for part in parts_of(paper)}
    for name in names:
        connection.send(("begins", 0.0))
        begin = time.monotonic()
        try:
            record = make_part(known[name], options, out, paper)
        except Exception as error:  # one part that fails leaves the others alone
            connection.send((f"failed: {type(error).__name__}: {error}", time.monotonic() - begin))
        else:
            connection.send(("done", record.made.seconds))
