"""Fork processes from a server that has already imported everything they need.

Ranks and planners import PyTorch and much else, which takes seconds of processor time each. A training run therefore
starts one server process that does these imports once, while the run reads its data and measures layers. Ranks and the
planner are then forked from it and start at once. The server runs only imports. It is Python's own
`multiprocessing.forkserver`. Without a server, or with one that cannot be forked because a library started threads in
it, new interpreters are started instead.
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

from pipeloom.printing import print_error

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
_FOLDER = "PIPELOOM_FORKS"
"""Environment variable with the folder in which the server finds the names to import and writes its status."""
_LEVEL = "TORCH_CPP_LOG_LEVEL"
_NAMES, _STATUS = "names", "status"
_IMPORT_TIMEOUT_S = 3600.0
_POLL_S = 0.005
_CHECK_S = 0.5
"""Seconds between checks, while the server imports, that the process that started it is still alive."""
_STARTER_POLL_S = 1.0


class _Server:
    """State of the fork server as this process knows it."""

    folder: tempfile.TemporaryDirectory[str] | None = None
    ready: bool | None = None
    """Whether processes can be forked. None if this is not known yet."""
    fork: bool = False
    """Whether this process is itself a fork."""
    pid: int = 0
    """In a fork, the process ID of the server, which is the parent while it runs."""
    terminal_signals: tuple[signal.Signals, ...] = ()
    """In the server, the signals sent by a closing terminal that it ignores."""
    ignores_sigterm: bool = False
    """In the server, whether it ignores SIGTERM. Forked processes do not ignore it."""


_SERVER = _Server()


def begin_forks(names: Sequence[str]) -> bool:
    """Start the server from which other processes will be forked, and return whether this call started it.

    Returns at once. A second call does nothing. ``names`` are modules to import, in this order. ``module:function``
    also calls the function without arguments.
    """
    server: Any = forkserver._forkserver
    if _SERVER.ready is not None or _SERVER.folder is not None:
        return False
    if sys.platform != "linux" or server._forkserver_pid is not None:
        # On other systems a fork may break system libraries. A server started by other code has not imported the
        # modules.
        _SERVER.ready = False
        return False
    _SERVER.folder = tempfile.TemporaryDirectory(prefix="pipeloom-forks-")
    # The server removes both folders if this process is killed, except a temporary folder that the parent process uses.
    this: Any = multiprocessing.current_process()
    inherited = this._config.get("tempdir") is not None
    lines = (str(os.getpid()), "" if inherited else util.get_temp_dir(), *names)
    Path(_SERVER.folder.name, _NAMES).write_text("\n".join(lines))
    # The planner expects a lost store, so torch need not log it. Torch reads the level when it is imported.
    level = os.environ.get(_LEVEL, "ERROR")
    with environment({**ONE_THREAD, _FOLDER: _SERVER.folder.name, _LEVEL: level}):
        forkserver.set_forkserver_preload([f"{__name__}_preload"])
        # Starting the tracker unblocks the signals that are blocked below.
        resource_tracker.ensure_running()
        try:
            with interrupts_held():
                forkserver.ensure_running()
        except OSError:
            # The socket is in the folder for temporary files, whose path may be too long for a socket.
            _SERVER.ready = False
            _SERVER.folder.cleanup()
            return False
    atexit.register(_stop_importing, os.getpid())
    return True


def _stop_importing(owner: int) -> None:
    """Kill the server when the process that started it ends while the server still imports."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if os.getpid() == owner and _SERVER.ready is None and pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT while starting a process, which inherits the block and first calls `ignore_interrupts`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore SIGINT. A terminal sends it to all processes, and the process that started this one ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def environment(wanted: dict[str, str]) -> Iterator[None]:
    """Set environment variables within this context, for processes that are started in it."""
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
    """Return whether processes can be forked. Waits until the server has finished its imports."""
    if _SERVER.ready is None and _SERVER.folder is not None:
        status, deadline = Path(_SERVER.folder.name, _STATUS), time.monotonic() + _IMPORT_TIMEOUT_S
        while not status.exists() and _is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        _SERVER.ready = status.exists() and status.read_text() == "ready"
        _SERVER.folder.cleanup()
    if _SERVER.ready and not _is_alive():
        # The server was killed. Python would start another one, which would not import the modules.
        _SERVER.ready = False
    return bool(_SERVER.ready)


def is_fork() -> bool:
    """Return whether this process was forked from the server."""
    return _SERVER.fork


def _is_alive() -> bool:
    server: Any = forkserver._forkserver
    if _SERVER.fork:
        return os.getppid() == _SERVER.pid
    # None in a process that was forked from a server of other code.
    return server._forkserver_pid is None or os.waitpid(server._forkserver_pid, os.WNOHANG)[0] == 0


def serve_imports() -> None:
    """Import the requested modules in the server, and write whether it can be forked."""
    ignore_interrupts()
    path = os.environ.pop(_FOLDER, "")
    if not path:
        # This is a second server that replaces a killed one. Its forks import modules themselves.
        return
    folder = Path(path)
    try:
        starter, temporary, *names = (folder / _NAMES).read_text().split("\n")
    except FileNotFoundError:  # the process that began this one has ended
        os._exit(0)
    # A closing terminal ends all of its processes. The server ignores that, so that it can remove its folders.
    ending = [signal.SIGHUP, signal.SIGQUIT]
    _SERVER.terminal_signals = tuple(number for number in ending if signal.getsignal(number) == signal.SIG_DFL)
    # A scheduler may send SIGTERM to all processes of a job.
    _SERVER.ignores_sigterm = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    for number in (*_SERVER.terminal_signals, *[signal.SIGTERM] * _SERVER.ignores_sigterm):
        signal.signal(number, signal.SIG_IGN)
    # The server holds the standard output of the process that started it. Exiting without Python's finalization closes
    # it at once for a reader that waits for its end.
    folders = (folder, Path(temporary)) if temporary else (folder,)
    leave = partial(_leave_at_once, os.getpid(), int(starter), folders)
    atexit.register(leave)
    # The process that then fails to start another one reports why the server ended, for example a lack of file
    # descriptors.
    sys.excepthook = lambda *_: None
    with _exiting_without(int(starter), leave):
        for name in names:
            module, _, function = name.partition(":")
            # The forked process reports a failed import when it imports the module itself.
            with suppress(Exception):
                imported = import_module(module)
                if function:
                    getattr(imported, function)()
    # A process with threads must not be forked, because locks held by a thread stay locked in the copy.
    tasks = len(list(Path("/proc/self/task").iterdir()))
    with suppress(OSError):  # the process that started the server may have ended
        part = folder / f"{_STATUS}.part"
        part.write_text("ready" if tasks == threading.active_count() == 1 else f"has {tasks} threads")
        part.replace(folder / _STATUS)


@contextmanager
def _exiting_without(starter: int, leave: Callable[[], None]) -> Iterator[None]:
    """Exit when the process that started the server ends.

    Uses a timer signal, because the server must have no threads.
    """

    def check(_number: int, _frame: object) -> None:
        if os.getppid() != starter:
            leave()

    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, _CHECK_S, _CHECK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _leave_at_once(server: int, starter: int, folders: Sequence[Path]) -> None:
    if os.getpid() != server:
        return
    # A killed process closes its files, which ends the server, a moment before it disappears.
    deadline = time.monotonic() + _CHECK_S
    while os.getppid() == starter and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if os.getppid() != starter:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


class ForkTarget:
    """Call a function in a fork with the environment and output of the requesting process."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getstate__(self) -> Any:
        return self.function, dict(os.environ), [DupFd(number) for number in (1, 2)]

    def __setstate__(self, state: Any) -> None:
        self.function, self.environment, self.outputs = state

    def __call__(self, *args: Any) -> None:
        if _SERVER.ignores_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, output in enumerate(self.outputs, start=1):
            os.dup2(output.detach(), number)
        os.environ.clear()
        os.environ.update(self.environment)
        # This process requests its own forks from the same server.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
        sys.excepthook = sys.__excepthook__
        self.begin()
        self.function(*args)

    def begin(self) -> None:
        """Prepare the forked process before it calls the function."""
        _SERVER.ready = _SERVER.fork = True
        _SERVER.pid = os.getppid()


def process(target: Callable[..., None], args: tuple[Any, ...], *, forked: bool, **named: Any) -> BaseProcess:
    """Return a process that has not been started yet, with the arguments ``named`` of `multiprocessing.Process`.

    ``forked`` forks it from the server, which requires `can_fork`. False starts a new interpreter.
    """
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    made: BaseProcess = context.Process(target=ForkTarget(target) if forked else target, args=args, **named)
    return made


class ForkedCommand:
    """A Pipeloom command that runs in a fork. It has the methods of `subprocess.Popen` that are used here.

    The variables in ``environment`` are set in addition to those of this process.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        # A daemon, so that the exit of this process does not wait for it.
        self._process = process(_run_command, (tuple(arguments), environment), forked=True, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the command."""
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """Wait until the command ends and return its exit code. Raises `subprocess.TimeoutExpired` if it does not."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("pipeloom", timeout)
        return self._process.exitcode


def run_in_fork(target: Callable[..., None], args: tuple[Any, ...] = ()) -> int:
    """Run a function in a forked process that stands in for this one.

    SIGINT and SIGTERM are forwarded to it unless this process ignores them. It ends when this process ends, for
    whatever reason. Returns its exit code, or the negative number of the signal that ended it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # The fork sends its exit code itself, because a killed server cannot report it.
    here, there = multiprocessing.Pipe(duplex=False)
    stand_in = process(_stand_in, (target, args, there), forked=True)
    early: list[int] = []
    """Signals that arrive before the fork handles them."""
    is_ready = False

    def forward(sent: int, _: object) -> None:
        if is_ready:
            _send(stand_in.pid, sent)
        else:
            early.append(sent)

    # A shell makes background commands of a script ignore SIGINT.
    handled = [kind for kind in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(kind) != signal.SIG_IGN]
    before = {kind: signal.signal(kind, forward) for kind in handled}
    try:
        stand_in.start()
        there.close()
        here.recv()
        is_ready = True
        for sent in early:
            _send(stand_in.pid, sent)
        code: int = here.recv()
    except EOFError:
        # A signal ended the fork. The server knows which one.
        stand_in.join()
        exit_code = stand_in.exitcode
        code = exit_code if exit_code is not None and exit_code < 0 else -signal.SIGKILL
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    return code


def _send(process_id: int | None, number: int) -> None:
    assert process_id is not None
    with suppress(ProcessLookupError):
        os.kill(process_id, number)


def _stand_in(target: Callable[..., None], args: tuple[Any, ...], ended: Connection) -> None:
    # Only the process that this one stands in for forwards a terminal's Ctrl-C, so that it arrives once.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ranks and planner go on ignoring these signals. They end with this process and remove its folders.
    for number in _SERVER.terminal_signals:
        signal.signal(number, signal.SIG_DFL)
    end_with_starter()
    ended.send(None)
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


def end_with_starter(problem: str = "", starter: int = 0, clean_up: Callable[[], None] | None = None) -> None:
    """End this process when the process that started it ends, for whatever reason. Returns at once.

    Then, ``problem`` is printed on standard error unless it is empty, and ``clean_up`` is called, for what the starter
    can no longer remove. ``starter`` is the process ID of the starter, which may have ended already. 0 is the parent
    process. It is not used in processes of `multiprocessing`, which know their starter.
    """
    parent = multiprocessing.parent_process()
    starter = starter or os.getppid()

    def end() -> None:
        if parent is not None:
            # The parent of a fork is the server, which may live longer.
            wait([parent.sentinel])
        while parent is None and os.getppid() == starter:
            time.sleep(_STARTER_POLL_S)
        if problem:
            print_error(problem)
        if clean_up is not None:
            clean_up()
        os._exit(1)

    threading.Thread(target=end, name="starter", daemon=True).start()


def _run_command(arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.exit(import_module("pipeloom.cli.app").run(list(arguments)))
