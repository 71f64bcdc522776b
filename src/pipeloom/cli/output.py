"""Output of commands: one JSON document, or text and tables; progress on standard error."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.errors import InputError, printable_line, visible_line
from pipeloom.heartbeat import doing
from pipeloom.io import check_writable, write_text
from pipeloom.io.files import is_regular_target
from pipeloom.outputs import declare_outputs
from pipeloom.printing import print_line, print_text
from pipeloom.report import Figures, Track, key_figures, share_text, size_text, time_text

if TYPE_CHECKING:
    from pipeloom.cli.console import VisibleConsole
    from pipeloom.kernels import Kernels

JSON_HELP = "Print only one JSON document on standard output."
_NO_WIDTH = 1 << 16
_NOT_ASCII = re.compile(r"[^ -~\n]")


def print_json(document: Any) -> None:
    """Print the JSON document of a ``--json`` run."""
    print_json_text(json.dumps(document, indent=1, allow_nan=False))


def print_json_text(text: str) -> None:
    """Print a JSON document, with characters that a terminal does not show as JSON escapes."""
    print_text(_NOT_ASCII.sub(lambda found: _json_escape(found[0]), text))


def _json_escape(character: str) -> str:
    # json does not escape this control character
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def stdout() -> VisibleConsole:
    """Return a console on standard output."""
    return console_to(to_stderr=False)


def stderr() -> VisibleConsole:
    """Return a console on standard error for progress and notes."""
    return console_to(to_stderr=True)


def console_to(*, to_stderr: bool) -> VisibleConsole:
    """Return a console on one of the streams. Markup in texts is not interpreted, since names come from files.

    A pipe or file has no width: there a table is as wide as it needs, unless ``COLUMNS`` is set.
    """
    from pipeloom.cli.console import VisibleConsole as Console

    console = Console(stderr=to_stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _NO_WIDTH
    return console


def print_note(text: str) -> None:
    """Print one line beside the result, on standard error."""
    print_line(printable_line(text), to_stderr=True)


def print_written(names: Sequence[str | Path]) -> None:
    """Print one line for every file that was written."""
    for name in names:
        print_line(f"wrote {name}")


@contextmanager
def compiled_kernels(kernels: Kernels | None = None) -> Iterator[None]:
    """Compile kernels that are not stored, with progress on standard error; by default those of packing and search."""
    from pipeloom.compiled.decorators import is_storable
    from pipeloom.kernels import PLANNER

    wanted = kernels or PLANNER
    if any(map(is_storable, wanted.missing())):
        compile_with_progress(wanted)
    # Kernels that cannot be stored, or are called with other types.
    with note_compiling():
        yield


def note_compiling() -> AbstractContextManager[None]:
    """Return a context that prints a note when a kernel is compiled in it."""
    from pipeloom.compiled.decorators import before_compiling

    return before_compiling(lambda: print_note("Compiling kernels ..."))


def compile_with_progress(kernels: Kernels, jobs: int = 0) -> None:
    """Compile kernels in several processes, with a progress bar on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pipeloom.kernels import compile_in_processes, num_processes

    count = num_processes(kernels, jobs)
    console = stderr()
    processes = "1 process" if count == 1 else f"{count} processes"
    print_note(
        f"Compiling kernels, after an installation or a change of code: about one CPU minute, in {processes} ..."
    )

    began_s = time.monotonic()

    def show(done: int, total: int) -> None:
        doing(f"compiling kernels, {done} of {total}", began_s)
        bar.update(task, completed=done, total=total, refresh=True)

    columns = (TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Without a thread of its own, so that this process can still be forked.
    off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=off) as bar:
        task = bar.add_task("", total=None)
        failed = compile_in_processes(kernels, count, show)
    if failed:
        print_note(f"compiling kernels failed in one process: {failed}")


def load_kernels() -> None:
    """Load the planner's kernels; compile those that are not stored."""
    from pipeloom import packing, search

    with compiled_kernels():
        packing.compile_kernels()
        search.compile_kernels()


def figures_text(numbers: Figures) -> str:
    """Return one line with makespan, bound, gap, bubbles and memory."""
    parts = [f"makespan {time_text(numbers.makespan_ns)}"]
    if numbers.lower_bound_ns is not None:
        parts.append(f"lower bound {time_text(numbers.lower_bound_ns)} ({numbers.lower_bound_name})")
    if numbers.gap is not None:
        parts.append(f"gap {share_text(numbers.gap)}")
    parts += [f"bubbles {share_text(numbers.bubble_share)}", f"peak memory {size_text(numbers.peak_bytes)}"]
    return ", ".join(parts)


def figures_document(track: Track) -> dict[str, Any]:
    """Return the numbers of a track for ``--json``."""
    numbers = key_figures(track)
    return {
        "title": track.title,
        "makespan_s": numbers.makespan_ns / 1e9,
        "lower_bound_s": None if numbers.lower_bound_ns is None else numbers.lower_bound_ns / 1e9,
        "lower_bound": numbers.lower_bound_name or None,
        "gap": numbers.gap,
        "bubble_share": numbers.bubble_share,
        "peak_memory_bytes": track.timeline.peak_bytes.tolist(),
    }


def check_targets(*targets: Path | None, later: Sequence[Path] = ()) -> None:
    """Check output files before anything is read: each can be written, is named once, and is not an input.

    ``targets`` are files that options name, ``later`` other files, in a folder that the command may have to create
    first.
    """
    named = [target for target in targets if target is not None]
    for target in named:
        check_writable(target)
    for target in later:
        if os.path.lexists(target) and not target.is_file():
            raise InputError(visible_line(str(target)), "is not a regular file", "remove it, or name another folder")
    declare_outputs([target for target in (*named, *later) if is_regular_target(target)])


def draw(
    tracks: Sequence[Track],
    *,
    title: str,
    note: str = "",
    trace_file: Path | None = None,
    html_file: Path | None = None,
    svg_file: Path | None = None,
    ranked: bool = False,
) -> list[str]:
    """Write the requested pictures and return their names; ``ranked``: the page begins with a ranking."""
    from pipeloom.report import timeline_html, timeline_svg, trace

    pictures = []
    if trace_file is not None:
        pictures.append((trace_file, trace(tracks, arrows=True)))
    if html_file is not None:
        pictures.append((html_file, timeline_html(tracks, title=title, note=note, ranked=ranked)))
    if svg_file is not None:
        pictures.append((svg_file, timeline_svg(tracks)))
    for target, text in pictures:
        write_text(target, text)
    return [str(target) for target, _ in pictures]
