"""The command line: ``pipeloom --help``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0 done, 1 a check failed, 2 wrong input."""
    # Ctrl-C during these imports ends the process at once; `run` says so in a word.
    interruptible = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeloom.cli.app import leave_on_sigterm, run

    leave_on_sigterm()
    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run(sys.argv[1:] if arguments is None else list(arguments), whole_process=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank of torchrun's. Threads that libraries have left would run while the interpreter takes itself apart, and
        # now and then one ends the process with an abort; torchrun then takes what was trained for failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


__all__ = ["main"]
