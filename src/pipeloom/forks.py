"""Processes that begin warm: forked from one that has imported everything already.

A rank and a planner import PyTorch and much else, which takes each of them seconds of a core, and where ranks are more
than cores, all of them as long as they have cores to wait for. So a training run starts one process that imports all
this once, while the run itself reads its data and measures layers; ranks and planner are forked from it when they are
wanted, and begin at once. It runs nothing but imports, and is Python's own `multiprocessing.forkserver`. Whoever has
begun none, or has one that cannot be forked (with threads: some library has begun them), starts interpreters.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
_FOLDER = "PIPELOOM_FORKS"
"""Environment variable: where the server finds what to import, and says how that went."""
_LEVEL = "TORCH_CPP_LOG_LEVEL"
_NAMES, _SAID = "names", "said"
_PATIENCE_S = 3600.0
_POLL_S = 0.005
_LOOK_S = 0.5
"""How often the server looks, while it imports, whether the process that began it is still there."""


class _Server:
    """What this process knows of the server of its forks."""

    folder: tempfile.TemporaryDirectory[str] | None = None
    ready: bool | None = None
    """Whether processes can be forked; None: nobody has asked yet."""
    fork: bool = False
    """Whether this process is a fork itself."""
    pid: int = 0
    """In a fork: the server, its parent as long as that runs."""
    terminal_signals: tuple[signal.Signals, ...] = ()
    """In the server: those that it ignores although they end other processes when a terminal is closed."""
    ignores_sigterm: bool = False
    """In the server: whether it ignores SIGTERM, which ends the processes that it forks."""


_SERVER = _Server()


def begin_forks(names: Sequence[str]) -> bool:
    """Start the process from which others will be forked; returns at once, and does nothing the second time.

    Parameters
    ----------
    names : sequence of str
        Modules to import, in this order; ``module:function``: a function to call, without arguments.

    Returns
    -------
    bool
        Whether it was started by this call.
    """
    server: Any = forkserver._forkserver
    if _SERVER.ready is not None or _SERVER.folder is not None:
        return False
    if sys.platform != "linux" or server._forkserver_pid is not None:
        # Elsewhere a fork may break what the system's libraries hold; and another's server has not imported this.
        _SERVER.ready = False
        return False
    _SERVER.folder = tempfile.TemporaryDirectory(prefix="pipeloom-forks-")
    # The server removes both folders if this process is killed; but not the one that its parent process uses too.
    this: Any = multiprocessing.current_process()
    inherited = this._config.get("tempdir") is not None
    told = (str(os.getpid()), "" if inherited else util.get_temp_dir(), *names)
    Path(_SERVER.folder.name, _NAMES).write_text("\n".join(told))
    # A store that is gone is no news to a planner, and a level is set when torch is imported.
    level = os.environ.get(_LEVEL, "ERROR")
    with environment({**ONE_THREAD, _FOLDER: _SERVER.folder.name, _LEVEL: level}):
        forkserver.set_forkserver_preload([f"{__name__}_preload"])
        # It unblocks the signals that are to be held.
        resource_tracker.ensure_running()
        try:
            with interrupts_held():
                forkserver.ensure_running()
        except OSError:
            # Its socket lies in the folder for temporary files, whose name may be too long for a socket.
            _SERVER.ready = False
            _SERVER.folder.cleanup()
            return False
    atexit.register(_stop_importing, os.getpid())
    return True


def _stop_importing(owner: int) -> None:
    """At the end of the process that began the server: end the server too, if it still imports."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if os.getpid() == owner and _SERVER.ready is None and pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT while a process is started; it inherits that, and its first act is `ignore_interrupts`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore SIGINT: a terminal sends it to all processes, and the one that started this one ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def environment(wanted: dict[str, str]) -> Iterator[None]:
    """Have these environment variables while other processes are started."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def can_fork() -> bool:
    """Whether processes can be forked here; waits until the server has imported what it was told."""
    if _SERVER.ready is None and _SERVER.folder is not None:
        said, give_up = Path(_SERVER.folder.name, _SAID), time.monotonic() + _PATIENCE_S
        while not said.exists() and _is_alive() and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        _SERVER.ready = said.exists() and said.read_text() == "ready"
        _SERVER.folder.cleanup()
    if _SERVER.ready and not _is_alive():
        # Killed, as any process may be. Python would start another, which knows nothing of what to import.
        _SERVER.ready = False
    return bool(_SERVER.ready)


def is_fork() -> bool:
    """Whether this process was forked from one that has imported everything."""
    return _SERVER.fork


def _is_alive() -> bool:
    server: Any = forkserver._forkserver
    if _SERVER.fork:
        return os.getppid() == _SERVER.pid
    # None: a fork that a server of other code made.
    return server._forkserver_pid is None or os.waitpid(server._forkserver_pid, os.WNOHANG)[0] == 0


def serve_imports() -> None:
    """In the server: import what it is told, and say whether it can be forked."""
    ignore_interrupts()
    told = os.environ.pop(_FOLDER, "")
    if not told:
        # A second server, in the place of one that was killed: what it forks imports for itself.
        return
    folder = Path(told)
    try:
        starter, temporary, *names = (folder / _NAMES).read_text().split("\n")
    except FileNotFoundError:  # the process that began this one has ended
        os._exit(0)
    # A terminal that is closed ends all that it runs; the server tidies up first.
    ending = [signal.SIGHUP, signal.SIGQUIT]
    _SERVER.terminal_signals = tuple(each for each in ending if signal.getsignal(each) == signal.SIG_DFL)
    # So does a scheduler that sends SIGTERM to all processes of a job.
    _SERVER.ignores_sigterm = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    for each in (*_SERVER.terminal_signals, *[signal.SIGTERM] * _SERVER.ignores_sigterm):
        signal.signal(each, signal.SIG_IGN)
    # It holds the output of who began it, and whoever reads that to its end would wait while it takes modules apart.
    folders = (folder, Path(temporary)) if temporary else (folder,)
    leave = partial(_leave_at_once, os.getpid(), int(starter), folders)
    atexit.register(leave)
    # Why it ends, for want of file descriptors for example, is for the process that then fails to start another.
    sys.excepthook = lambda *_: None
    with _looking_at(int(starter), leave):
        _import_all(names)
    # A process with threads must not be forked: what they hold is held for ever in the copy.
    tasks = len(list(Path("/proc/self/task").iterdir()))
    with suppress(OSError):  # whoever wanted to know is gone
        part = folder / f"{_SAID}.part"
        part.write_text("ready" if tasks == threading.active_count() == 1 else f"has {tasks} threads")
        part.replace(folder / _SAID)


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        module, _, function = name.partition(":")
        # What cannot be imported here is told by whoever imports it there.
        with suppress(Exception):
            imported = import_module(module)
            if function:
                getattr(imported, function)()


@contextmanager
def _looking_at(starter: int, leave: Callable[[], None]) -> Iterator[None]:
    """Leave when the process that began this one is gone. Without a thread: this process is to be forked."""

    def look(_number: int, _frame: object) -> None:
        if os.getppid() != starter:
            leave()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _leave_at_once(server: int, starter: int, folders: Sequence[Path]) -> None:
    if os.getpid() != server:
        return
    # A process that was killed closes its files, which ends the server, a moment before it is gone.
    give_up = time.monotonic() + _LOOK_S
    while os.getppid() == starter and time.monotonic() < give_up:
        time.sleep(_POLL_S)
    if os.getppid() != starter:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


class ForkTarget:
    """What a forked process calls: with environment and output of the one that asks for it, not with the server's."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getstate__(self) -> Any:
        return self.function, dict(os.environ), [DupFd(number) for number in (1, 2)]

    def __setstate__(self, state: Any) -> None:
        self.function, self.environment, self.outputs = state

    def __call__(self, *args: Any) -> None:
        if _SERVER.ignores_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, given in enumerate(self.outputs, start=1):
            os.dup2(given.detach(), number)
        os.environ.clear()
        os.environ.update(self.environment)
        # It asks the same server for further ones.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
        sys.excepthook = sys.__excepthook__
        self.begin()
        self.function(*args)

    def begin(self) -> None:
        """In the forked process, before it calls the function."""
        _SERVER.ready = _SERVER.fork = True
        _SERVER.pid = os.getppid()


def process(target: Callable[..., None], args: tuple[Any, ...], *, forked: bool, **named: Any) -> BaseProcess:
    """Return a process that is not started yet.

    Parameters
    ----------
    args : tuple
        What it is called with.
    forked : bool
        Fork it, where `can_fork`; False: an interpreter of its own.
    named
        As of `multiprocessing.Process`.
    """
    if forked:
        made: BaseProcess = multiprocessing.get_context("forkserver").Process(
            target=ForkTarget(target), args=args, **named
        )
        return made
    return multiprocessing.get_context("spawn").Process(target=target, args=args, **named)


class ForkedCommand:
    """A command line of Pipeloom, forked; has what of `subprocess.Popen` is used here.

    Parameters
    ----------
    environment : dict
        Beside this process's own.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        # A daemon: whoever leaves does not wait for it.
        self._process = process(_run_command, (tuple(arguments), environment), forked=True, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """Wait for its end.

        Raises
        ------
        subprocess.TimeoutExpired
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("pipeloom", timeout)
        return self._process.exitcode


def run_in_fork(target: Callable[..., None], args: tuple[Any, ...] = ()) -> int:
    """Run a function in a forked process that stands in for this one.

    SIGINT and SIGTERM go on to it, unless this process ignores them. It ends when this process is gone, however that
    ended.

    Parameters
    ----------
    args : tuple
        What it is called with.

    Returns
    -------
    int
        Its exit code; where a signal ended it, the negative number of the signal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Told by itself: who asks the server for it hears nothing where the server was killed.
    here, there = multiprocessing.Pipe(duplex=False)
    stand_in = process(_stand_in, (target, args, there), forked=True)
    stand_in.start()
    there.close()
    number = stand_in.pid
    assert number is not None
    before = {}
    for one in (signal.SIGINT, signal.SIGTERM):
        # A shell has background commands of a script ignore SIGINT.
        if signal.getsignal(one) != signal.SIG_IGN:
            before[one] = signal.signal(one, lambda sent, _: _send(number, sent))
    try:
        code: int = here.recv()
    except EOFError:
        # A signal has ended it; which one, the server knows.
        stand_in.join()
        known = stand_in.exitcode
        code = known if known is not None and known < 0 else -signal.SIGKILL
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return code


def _send(process_id: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, number)


def _stand_in(target: Callable[..., None], args: tuple[Any, ...], ended: Connection) -> None:
    # A terminal's Ctrl-C reaches it once: from the process that it stands in for.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ranks and planner keep ignoring these: they end with this process, and remove its folders.
    for each in _SERVER.terminal_signals:
        signal.signal(each, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    code: object = 1
    try:
        target(*args)
        code = 0
    except SystemExit as leave:
        code = leave.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ended.send(code if isinstance(code, int) else int(code is not None))


def end_with_parent(folder: Path | None = None) -> None:
    """Wait until the process that asked for this one is gone, however it ended, and end; to be called in a thread.

    Parameters
    ----------
    folder : Path, optional
        Of that process, which nobody else removes then.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _run_command(arguments: Sequence[str], environment: dict[str, str]) -> None:
    # Asked for here, since the server may be gone before the command looks at who has started it.
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(environment)
    sys.exit(import_module("pipeloom.cli.app").run(list(arguments)))
