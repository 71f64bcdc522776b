"""The command line: ``pipeloom --help``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0 done, 1 a check failed, 2 wrong input."""
    from pipeloom.cli.app import leave_on_sigterm, run

    leave_on_sigterm()
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments), whole_process=True))


__all__ = ["main"]
