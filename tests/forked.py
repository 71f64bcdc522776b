"""A program whose processes begin warm; what they say is a line of JSON each."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver

from pipeloom import forks


def say(*, nested: bool = True) -> None:
    """Tell what this process finds, and have a further one do so."""
    sys.stdout.write(
        json.dumps(
            {
                "warm": "colorsys" in sys.modules,
                "given": os.environ.get("GIVEN"),
                "folder": os.environ.get("PIPELOOM_FORKS"),
                "threads": threading.active_count(),
                "forks": forks.can_fork(),
            }
        )
        + "\n"
    )
    sys.stdout.flush()
    if nested:
        further = forks.process(say_no_more, (), forked=forks.can_fork())
        further.start()
        further.join()


def say_no_more() -> None:
    """Tell it once."""
    say(nested=False)


def end(code: int) -> None:
    """Leave so."""
    os._exit(code)


def call() -> None:
    """What the server is to call."""
    threading.Event()
    import colorsys  # noqa: F401


def begin_a_thread() -> None:
    """What makes a server that must not be forked."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def kill_the_server() -> None:
    """What a server is after this was called; whoever asked for it does not know yet."""
    threading.Event()


def wait_for_a_signal() -> None:
    """Say who waits, and which signal has come."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda sent, _: sys.exit(sent))
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    threading.Event().wait()


def stand_in() -> None:
    """Have a fork do all."""
    forks.begin_forks(["pipeloom.errors"])
    assert forks.can_fork()
    if sys.argv[2:] == ["kill_the_server"]:
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        threading.Timer(1.0, os.kill, (server, signal.SIGKILL)).start()
    if sys.argv[2:] == ["end_at_once"]:
        _end_after_starting()
    code = forks.run_in_fork(wait_for_a_signal)
    sys.exit(code if code >= 0 else 128 - code)


def _end_after_starting() -> None:
    """Have a signal come as soon as a process has started."""
    kind = multiprocessing.get_context("forkserver").Process
    start = kind.start

    def interrupted(self: multiprocessing.process.BaseProcess) -> None:
        start(self)
        os.kill(os.getpid(), signal.SIGTERM)

    kind.start = interrupted


def main(function: str) -> None:
    """Begin, change the environment, and start two processes."""
    forks.begin_forks(["pipeloom.no_such_module", f"tests.forked:{function}", "pipeloom.errors"])
    forks.begin_forks(["never"])
    os.environ["GIVEN"] = "later"
    forked = forks.can_fork()
    if function == "kill_the_server":
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        forked = forks.can_fork()
    first = forks.process(say, (), forked=forked)
    second = forks.process(end, (7,), forked=forked)
    for each in (first, second):
        each.start()
    for each in (first, second):
        each.join()
    sys.stdout.write(json.dumps({"forked": forked, "codes": [first.exitcode, second.exitcode]}) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "stand_in":
        stand_in()
    main(sys.argv[1])
