"""Where a process computes, and the process group that goes with it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from pipeloom.errors import InputError

DeviceType = Literal["cpu", "cuda"]

# Whatever the host sends (plans, times, checkpoints) goes by gloo; what GPUs send, by NCCL.
_BACKENDS: dict[DeviceType, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def choose_device(wanted: Literal["cpu", "cuda", "auto"], num_local: int) -> DeviceType:
    """Type of the device of all ranks; ``"auto"``: a GPU each where there are enough on this host, else the CPU.

    Parameters
    ----------
    wanted : {"cpu", "cuda", "auto"}
    num_local : int
        Processes of this host, each of which computes.

    Raises
    ------
    InputError
        When GPUs are wanted and there are too few: NCCL serves one process a GPU.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and num_gpus < num_local):
        return "cpu"
    if num_gpus < num_local:
        raise InputError(
            "runtime.device", f"'cuda' for {num_local} ranks, and this host has {num_gpus} GPUs",
            "start as many ranks as there are GPUs, or use 'cpu' or 'auto'",
        )  # fmt: skip
    return "cuda"


def join_group(
    device: DeviceType, store: Any, rank: int, num_ranks: int, timeout_s: float, local_rank: int
) -> None:
    """Join the default process group, on a GPU of this process's own where it computes on one.

    NCCL's communicators are made when they are first used, not here: a group that is bound to a device serves all
    messages of a rank, whoever the peers are, in one stream.
    """
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        _BACKENDS[device], store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )


def group_device() -> torch.device:
    """The device of this process, as `join_group` was told."""
    if "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
