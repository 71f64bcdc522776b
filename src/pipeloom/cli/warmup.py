"""`pipeloom warmup`: compile all kernels, in several processes."""

from __future__ import annotations

import time

import typer

from pipeloom.cli.output import compile_with_progress
from pipeloom.errors import InputError
from pipeloom.kernels import ALL
from pipeloom.limits import MAX_THREADS
from pipeloom.printing import print_line

HELP = """\
Compile all kernels, so that no later command has to.

Kernels are compiled once for each version and kind of processor and stored in the installation, in the user's cache
folder if that cannot be written, or in $NUMBA_CACHE_DIR. Folders in $PIPELOOM_KERNELS are only read: compile into one
when an image is built or for all nodes of a cluster (NUMBA_CACHE_DIR=FOLDER pipeloom warmup), and set
PIPELOOM_KERNELS=FOLDER where it is used.
"""
EPILOG = (
    "Example: pipeloom warmup --jobs 8. With --check, the exit code is 1 if a kernel is not stored, and nothing is "
    "compiled."
)


def warmup(
    jobs: int = typer.Option(0, min=0, max=MAX_THREADS, help="Number of processes; 0: one for each core."),
    check: bool = typer.Option(False, "--check", help="Only count the kernels that are not stored."),
) -> None:
    left = len(ALL.missing())
    if check:
        print_line(f"{left} kernels are not compiled; run pipeloom warmup" if left else "all kernels are compiled")
        raise typer.Exit(1 if left else 0)
    if not left:
        print_line("all kernels are compiled")
        return
    began_s = time.monotonic()
    compile_with_progress(ALL, jobs)
    if left := len(ALL.missing()):
        raise InputError(
            "kernels",
            f"{left} are not stored",
            "free space in the cache folder, or set NUMBA_CACHE_DIR to one that can be written",
        )
    print_line(f"all kernels are compiled, in {time.monotonic() - began_s:.0f} s")
