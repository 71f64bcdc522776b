"""Ranks as processes: started on this machine and ended together when one fails, or started by torchrun.

torchrun starts one process per rank, monitors them, ends all when one fails, and restarts all while restarts are left.
The checkpoints determine where training then continues.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError, InputError, PipeloomError
from pipeloom.forks import can_fork, end_with_starter, environment, ignore_interrupts, interrupts_held
from pipeloom.forks import process as new_process
from pipeloom.outputs import REMEDIES
from pipeloom.printing import escape_logs
from pipeloom.runtime.launch.device import DeviceType, Place, join_group, place_of
from pipeloom.runtime.launch.failure_detector import FailureDetector, detect_failures, interface_towards

# One core each. Otherwise every rank on the machine would start one thread per core.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_POLL_S = 0.2
# The end of a lost rank may be read a moment after the resulting errors of its peers.
_ECHO_S = 0.5
_GRACE_S = 5.0

_FOREVER = timedelta(days=365)


_launcher: Connection | None = None
"""In a launched process, the pipe to the launching process."""


def report(value: Any) -> None:
    """Send a picklable value from a launched function to the launching process, e.g. for a progress display."""
    if _launcher is None:
        raise ExecutionError("this process was not started by `launch`")
    _send(_launcher, "report", value)


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """Send plain bytes. Torch's shared-memory handles of tensors would be invalid once this process has ended."""
    pipe.send_bytes(pickle.dumps((kind, value)))


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    message: str
    trace: str
    at_s: float
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class _Start:
    """Start parameters of a launched process."""

    rank: int
    num_ranks: int
    store_path: str
    timeout_s: float
    threads: int
    place: Place


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 120.0,
    threads: int = 1,
    device: DeviceType | Place = "cpu",
    on_report: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` in a new process for each rank, joined by gloo over the loopback device.

    The default process group is ready when the function is called. Every rank is a new interpreter, or a fork if
    `pipeloom.forks` has a server.

    Parameters
    ----------
    function : callable
        A function that can be imported by name, with picklable arguments and result.
    num_ranks : int
        Number of processes to start.
    args
        Arguments of the function.
    timeout_s : float
        Timeout of the process group in seconds, after which a rank that waits for another one gives up.
    threads : int
        Number of torch threads of each rank.
    device : {"cpu", "cuda"} or Place
        With ``"cuda"``, each rank has its own GPU and sends tensors by NCCL. With ``Place("cuda", "host")``, ranks
        may share a GPU and send tensors through host memory.
    on_report : callable or None
        Called here with the rank and the value of each `report`.

    Returns
    -------
    list
        The result of the function on each rank.

    Raises
    ------
    ExecutionError
        A rank fails or is lost. All others are ended first. The message is the first failed rank's. ``is_permanent``
        is set if it rejected its input.
    """
    place = place_of(device)
    # A GPU driver does not support forked processes.
    forked = place.device == "cpu" and can_fork()
    results: list[Any] = [None] * num_ranks
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        done = False
        try:
            with environment(_environment(threads)):
                for rank in range(num_ranks):
                    here, there = multiprocessing.Pipe(duplex=False)
                    pipes.append(here)
                    start = _Start(rank, num_ranks, str(Path(folder) / "store"), timeout_s, threads, place)
                    name = f"pipeloom rank {rank}"
                    process = new_process(
                        _run_rank, (function, args, start, there), forked=forked, name=name, daemon=False
                    )
                    with there, _started(rank), interrupts_held():
                        process.start()
                    processes.append(process)
            _collect(pipes, processes, results, on_report)
            done = True
        finally:
            _end(processes, _GRACE_S if done else 0.0)
            for pipe in pipes:
                pipe.close()
    return results


@contextmanager
def _started(rank: int) -> Iterator[None]:
    """Translate errors of starting a process, which may end before it receives its arguments."""
    try:
        yield
    except (OSError, EOFError) as error:
        remedy = REMEDIES.get(getattr(error, "errno", 0), "")
        problem = f"rank {rank}: the process could not be started: {str(error) or 'it has ended'}"
        raise ExecutionError(f"{problem}; {remedy}" if remedy else problem) from error


def _collect(
    pipes: list[Connection],
    processes: Sequence[BaseProcess],
    results: list[Any],
    on_report: Callable[[int, Any], None] | None,
) -> None:
    """Collect reports and results until every rank is done. Raise for the first rank that fails."""
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    finished: set[int] = set()
    while open_pipes:
        failures: list[_Failure] = []
        for rank, kind, value in _received(open_pipes, processes, finished, _POLL_S):
            if kind == "failure":
                failures.append(value)
            elif kind == "result":
                results[rank] = value
            elif on_report is not None:
                on_report(rank, value)
        if failures:
            # Failures of about the same time. The earliest is the cause of the others.
            deadline = time.monotonic() + _ECHO_S
            while open_pipes and (left := deadline - time.monotonic()) > 0:
                later = _received(open_pipes, processes, finished, left)
                failures += [value for _, kind, value in later if kind == "failure"]
            first = min(failures, key=lambda failure: failure.at_s)
            error = ExecutionError(first.message)
            error.is_permanent = first.is_permanent
            if first.trace:
                error.add_note(first.trace)
            raise error


def _received(
    open_pipes: dict[Connection, int], processes: Sequence[BaseProcess], finished: set[int], timeout_s: float
) -> Iterator[tuple[int, str, Any]]:
    """Yield rank, kind and value of the next messages. The loss of a rank is a failure."""
    for pipe in wait(list(open_pipes), timeout=timeout_s):
        assert isinstance(pipe, Connection)
        rank = open_pipes[pipe]
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            del open_pipes[pipe]
            if rank in finished:
                continue
            processes[rank].join(_GRACE_S)
            kind, value = "failure", _died(rank, processes[rank])
        else:
            if kind != "report":
                finished.add(rank)
        yield rank, kind, value


def _died(rank: int, process: BaseProcess) -> _Failure:
    code = process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
    # A lost rank is the cause of its peers' errors.
    return _Failure(rank, f"rank {rank}: the process {how}", "", 0.0)


def _end(processes: Sequence[BaseProcess], grace_s: float) -> None:
    """End the remaining processes, first by SIGTERM, then by SIGKILL."""
    # Ranks that have returned need a moment to leave their process group.
    for process in processes:
        process.join(grace_s)
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


_PRESENT = "rank-"
"""How the file of a rank in the folder of the store begins, while the rank runs."""


def _leave(folder: Path, rank: int) -> None:
    """Remove the file of a rank, and after the last one the store and its folder: the launcher may have ended.

    If the folder is missing, PyTorch's `FileStore` waits for it for five minutes and holds the GIL, so that the rank
    cannot end. The folder therefore stays as long as it has the file of a rank.
    """
    (folder / f"{_PRESENT}{rank}").unlink(missing_ok=True)
    with suppress(OSError):
        files = list(folder.iterdir())
        if not any(file.name.startswith(_PRESENT) for file in files):
            for file in files:
                file.unlink(missing_ok=True)
            folder.rmdir()


def _run_rank(function: Callable[..., Any], args: tuple[Any, ...], start: _Start, pipe: Connection) -> None:
    """Body of a rank's process."""
    global _launcher
    ignore_interrupts()
    _launcher = pipe
    escape_logs()
    rank, num_ranks = start.rank, start.num_ranks
    torch.set_num_threads(start.threads)
    folder = Path(start.store_path).parent
    end_with_starter(clean_up=partial(_leave, folder, rank))
    try:
        (folder / f"{_PRESENT}{rank}").touch()
        store = dist.FileStore(start.store_path, num_ranks)  # type: ignore[attr-defined]
        join_group(start.place, store, rank, num_ranks, start.timeout_s, local_rank=rank)
        result = function(*args)
        # No rank leaves while others communicate with it. One may run for long by itself, for example to evaluate.
        done = [f"done/{each}" for each in range(num_ranks)]
        store.set(done[rank], "1")
        store.wait(done, _FOREVER)
        _send(pipe, "result", result)
    except BaseException as error:
        message = str(error) if isinstance(error, PipeloomError) else f"{type(error).__name__}: {error}"
        if not message.startswith("rank "):
            message = f"rank {rank}: {message}"
        failure = _Failure(rank, message, traceback.format_exc(), time.monotonic(), _comes_again(error))
        with suppress(OSError):  # the launching process may be gone
            _send(pipe, "failure", failure)
            pipe.close()
        _leave(folder, rank)
        # The group's threads may hang on a lost peer, and nothing needs to be waited for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    pipe.close()
    dist.destroy_process_group()
    del store
    _leave(folder, rank)


_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""Exceptions of a user's function that come again with the same data. Those of files, networks and memory may not."""


def _comes_again(error: BaseException) -> bool:
    """Return whether a rank rejected its input. Pipeloom detects this itself, not while waiting for other ranks."""
    rejected = isinstance(error, InputError)
    while error.__cause__ is not None:
        error = error.__cause__
        rejected = rejected or isinstance(error, InputError)
    if isinstance(error, PipeloomError):
        return not isinstance(error, ExecutionError)
    return rejected and isinstance(error, _MISTAKES)


def _environment(threads: int) -> dict[str, str]:
    """Return the environment variables of ranks: threads, and gloo on the loopback device."""
    wanted = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return wanted | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback())}


_JOIN_TIMEOUT = timedelta(minutes=10)
"""Timeout for ranks that torchrun starts at the same time. Imports take minutes on a host with a slow file system."""
_MEET_S = 0.05
_STARTED = "pipeloom/started"


@dataclass(frozen=True, slots=True)
class Worker:
    """A process started by torchrun.

    Attributes
    ----------
    num_restarts : int
        How often torchrun has restarted the processes of this host because one had failed.
    local_rank, num_local : int
        Number of this process among the processes of this host, and their count.
    """

    rank: int
    num_ranks: int
    num_restarts: int
    on_one_host: bool
    local_rank: int = 0
    num_local: int = 1


def this_worker(environment: Mapping[str, str] | None = None) -> Worker | None:
    """Return how torchrun started this process, or None if it was started in another way."""
    variables = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None
    try:
        size = int(variables["WORLD_SIZE"])
        num_local = int(variables.get("LOCAL_WORLD_SIZE", "0"))
        return Worker(
            int(variables["RANK"]),
            size,
            int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
            num_local == size,
            int(variables.get("LOCAL_RANK", "0")),
            max(1, num_local),
        )
    except (KeyError, ValueError) as error:
        raise InputError("torchrun's environment", f"lacks a rank or world size ({error})", "use torchrun") from error


class JoinedGroup(NamedTuple):
    """Result of joining the process group of all workers."""

    again: bool
    """Whether torchrun has restarted the ranks of this job after they had called `begin`. Valid on rank 0."""
    watch: FailureDetector
    """Failure detector of the other ranks."""
    shared: Any
    """Store of torchrun, which a restart of the ranks keeps."""

    @property
    def run(self) -> str | None:
        """Id of the run with which ranks before a restart have called `begin`. None if none have."""
        return self.shared.get(_STARTED).decode() if self.shared.check([_STARTED]) else None

    def begin(self, run: str) -> None:
        """Note that from now on the folder has what these ranks save, so that ranks after a restart continue it.

        ``run`` is the id of the run, see `TrainerState`.
        """
        self.shared.set(_STARTED, run)


def join_workers(worker: Worker, timeout_s: float, device: DeviceType | Place = "cpu") -> JoinedGroup:
    """Join the process group of all workers.

    Parameters
    ----------
    timeout_s : float
        Seconds after which a rank that waits for another one gives up.
    device : {"cpu", "cuda"} or Place
        As for `launch`.

    Raises
    ------
    ExecutionError
        Not all workers join.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    end_with_starter(f"rank {worker.rank}: torchrun's process on this host has ended")
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = _loopback() if worker.on_one_host else interface_towards(os.environ.get("MASTER_ADDR", ""))
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    shared, rank, size = _shared_store(worker), worker.rank, worker.num_ranks
    try:
        store, again = _meet(shared, rank, size)
    except RuntimeError as error:
        raise ExecutionError(f"rank {rank}: not all of {size} ranks joined: {error}") from error
    # The detector starts first. While joining the group, a rank waits for a lost one as long as for any message.
    detector = detect_failures(store, rank, size)
    place = place_of(device)
    try:
        check_device(store, rank, place.device)
        join_group(place, store, rank, size, timeout_s, worker.local_rank)
    except (InputError, RuntimeError) as error:
        problem = str(error) if isinstance(error, InputError) else f"not joined by all others: {error}"
        raise ExecutionError(detector.fail(ExecutionError(f"rank {rank}: {problem}"))) from error
    # A store that rank 0 hosts ends with it.
    return JoinedGroup(again if _has_own_store() else bool(worker.num_restarts), detector, shared)


def check_device(store: Any, rank: int, device: str) -> None:
    """Raise `InputError` if this rank does not compute on the same type of device as rank 0."""
    if rank == 0:
        store.set("device", device)
    first = device if rank == 0 else store.get("device").decode()
    if device != first:
        raise InputError(
            "runtime.device",
            f"{device!r} was chosen on host {socket.gethostname()}, and {first!r} on the host of rank 0",
            "set it to 'cpu' or 'cuda' instead of 'auto', or find out why GPUs are missing on one of them",
        )


def _has_own_store() -> bool:
    """Return whether torchrun's own process hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _shared_store(worker: Worker) -> Any:
    """Return the store of torchrun's own process, or a store hosted by rank 0 if torchrun has none."""
    hosts_it = worker.rank == 0 and not _has_own_store()
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise InputError("torchrun's environment", f"lacks the address of rank 0 ({error})", "use torchrun") from error
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=hosts_it, timeout=_JOIN_TIMEOUT, wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(f"rank {worker.rank}: no store answers at {address}:{port}: {reason}") from error


def _meet(shared: Any, rank: int, size: int) -> tuple[Any, bool]:
    """Agree on a name under which these ranks find each other, and no ranks of an earlier start do.

    torchrun keeps its store when it restarts ranks, with the entries and addresses of earlier ones. The restart count
    cannot be the name, because a host that rejoins counts anew. Every rank therefore asks under a random number, and
    rank 0 answers until all have received the answer.

    Returns the store of the process group, and whether ranks of an earlier start have called `JoinedGroup.begin`.
    """
    if rank == 0:
        again, token = shared.check([_STARTED]), secrets.token_hex(8)
        answer = f"{token} {int(again)}"
        deadline = time.monotonic() + _JOIN_TIMEOUT.total_seconds()
        missing = set(range(1, size))
        while missing:
            for each in sorted(missing):
                if shared.check([f"pipeloom/{token}/heard/{each}"]):
                    missing.discard(each)
                elif shared.check([f"pipeloom/ask/{each}"]):
                    shared.set(f"pipeloom/answer/{shared.get(f'pipeloom/ask/{each}').decode()}", answer)
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {sorted(missing)} are missing")
            time.sleep(_MEET_S if missing else 0)
    else:
        number = secrets.token_hex(8)
        shared.set(f"pipeloom/ask/{rank}", number)
        shared.wait([f"pipeloom/answer/{number}"], _JOIN_TIMEOUT)
        answer = shared.get(f"pipeloom/answer/{number}").decode()
        token = answer.split()[0]
        shared.set(f"pipeloom/{token}/heard/{rank}", "1")
    return dist.PrefixStore(f"pipeloom/{token}/group", shared), answer.endswith("1")  # type: ignore[attr-defined]


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"
