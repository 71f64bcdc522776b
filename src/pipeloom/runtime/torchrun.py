"""Ranks that torchrun started: who this process is, and how it joins the others.

torchrun starts one process for each rank, watches them, ends all when one fails, and starts all again while
restarts are left; where training goes on then is for the checkpoints to say.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.device import DeviceType, join_group

# Rank 0 measures layers and compiles kernels first; the others are not to give up meanwhile.
_PREPARE_TIMEOUT = timedelta(hours=1)
_PREPARED = "prepared"


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of those that torchrun started.

    Attributes
    ----------
    num_restarts : int
        How often all of them were started again, because one had failed.
    on_one_host : bool
    local_rank, num_local : int
        Its number among the processes of this host, and theirs.
    """

    rank: int
    num_ranks: int
    num_restarts: int
    on_one_host: bool
    local_rank: int = 0
    num_local: int = 1


def this_worker(environment: Mapping[str, str] | None = None) -> Worker | None:
    """Return how torchrun started this process; None where it was started in another way."""
    found = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in found:
        return None
    try:
        size = int(found["WORLD_SIZE"])
        num_local = int(found.get("LOCAL_WORLD_SIZE", "0"))
        return Worker(
            int(found["RANK"]), size, int(found.get("TORCHELASTIC_RESTART_COUNT", "0")), num_local == size,
            int(found.get("LOCAL_RANK", "0")), max(1, num_local),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise InputError(
            "torchrun's environment", f"lacks a rank or world size ({error})", "use torchrun"
        ) from error


def join_workers(
    worker: Worker, prepare: Callable[[], Any], timeout_s: float, device: DeviceType = "cpu"
) -> None:
    """Join the process group of all workers, once rank 0 has prepared what all of them read.

    Parameters
    ----------
    worker : Worker
    prepare : callable
        Called on rank 0 alone, while the others wait.
    timeout_s : float
        After which a rank that waits for another gives up, from then on.
    device : {"cpu", "cuda"}
        ``"cuda"``: each process has a GPU of its own, and tensors there go by NCCL.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if worker.on_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    shared, rank, size = next(iter(dist.rendezvous("env://", timeout=_PREPARE_TIMEOUT)))  # type: ignore[attr-defined]
    # torchrun keeps its store over a restart: what the ranks before left there, their addresses too, is not ours.
    store = dist.PrefixStore(f"pipeloom/{worker.num_restarts}", shared)  # type: ignore[attr-defined]
    if rank == 0:
        prepare()
        store.set(_PREPARED, "1")
    else:
        try:
            store.wait([_PREPARED], _PREPARE_TIMEOUT)
        except RuntimeError as error:
            raise ExecutionError(f"rank {rank}: rank 0 did not get ready: {error}") from error
    join_group(device, store, rank, size, timeout_s, worker.local_rank)
