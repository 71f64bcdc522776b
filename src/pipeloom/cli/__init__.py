"""The command line: ``pipeloom --help``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code: 0 done, 1 a check failed, 2 wrong input."""
    # Ctrl-C during these imports ends the process at once; later, `run` reports it.
    interruptible = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeloom.cli.app import exit_on_sigterm, run

    exit_on_sigterm()
    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run(sys.argv[1:] if arguments is None else list(arguments), whole_process=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank of torchrun. Threads of libraries would run during interpreter shutdown, and sometimes abort the
        # process; torchrun would then report a finished run as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


__all__ = ["main"]
