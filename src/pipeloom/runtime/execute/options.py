"""Values that a rank runs with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeloom.errors import InputError, check_positive
from pipeloom.runtime.launch.transport import TransportName
from pipeloom.runtime.model.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """Values that a rank runs with, for `Executor` and `Trainer`.

    Only `Trainer` uses ``clip_norm``, ``ema_decay``, ``compare_contents``, ``shard`` and ``transport``.

    Raises
    ------
    InputError
        ``clip_norm`` or ``timeout_s`` is not positive, or ``autocast`` needs scaled losses.
    """

    device: torch.device | str = "cpu"
    """Device on which this process computes. On ``"cuda"`` messages use NCCL, and the planning problem needs
    ``backend="nccl"``. The default group must serve both devices, see `pipeloom.runtime.launch`."""
    transport: TransportName = "direct"
    """``"host"`` sends messages through host memory, so that ranks may share a GPU. The default group must then serve
    GPUs by gloo. An `Executor` receives its transport instead."""
    timeout_s: float | None = None
    """On a GPU, an iteration fails if it does not reach its next action within this many seconds. None: no limit. In a
    `Trainer` with replicas or divided layers, also the seconds after which a rank that waits for another one gives up.
    None: torch's default. On the CPU, the timeout of the transport limits waits for messages."""
    autocast: torch.dtype | None = None
    """Run layers and loss under `torch.autocast` with this dtype. The shapes declared by modules must then have the
    resulting dtypes. Weights are cast once per iteration for all forwards that save them."""
    random_seed: int | None = 0
    """Seed of random numbers in layers, the same on all ranks. The numbers depend on the seed, the iteration, the
    samples and the layers, but not on the plan. None: draw from the generator of the process in the order of the plan.
    """
    workers: int = 2
    """Number of threads of every rank that load samples of a `Dataset` ahead. 0: load without threads."""
    count_flops: bool = False
    """Count the operations of forwards (`StepReport.flops`). No effect with tensor parallelism, because torch's counter
    does not handle sharded operations."""
    clip_norm: float | None = None
    """Largest norm of the gradient over all ranks. None does not clip."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay. None keeps none."""
    compare_contents: int = 0
    """Number of first batches of which ranks compare the contents of samples, not only ids and sizes. No effect for a
    `Dataset`, of whose samples every rank loads only parts."""
    shard: Sharding | None = None
    """With replicas, ``"fsdp"`` shards parameters, gradients and optimizer state over them (`fully_shard`). With None,
    every replica holds all of its layers."""

    def __post_init__(self) -> None:
        for name in ("clip_norm", "timeout_s"):
            value = getattr(self, name)
            if value is not None:
                check_positive(f"options.{name}", value)
        if self.autocast == torch.float16:
            raise InputError("options.autocast", "is torch.float16, and losses are not scaled", "use torch.bfloat16")


ExecutorOptions = ExecutionOptions
"""Deprecated name; removed in the next release."""
