"""Process groups of ranks that are processes, each with a simulated device: collectives and messages by NCCL's rules.

Gloo carries them. Each communicator has a stream: that of a group, and in it one for each peer. An operation waits for
the stream in which it is called, `wait` makes the current stream wait for it, and until then it keeps its tensors. The
host never waits for the device. Tags are ignored. `check_order` compares the order of collectives on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.runtime.launch import device as product

from . import device as sim
from .clocks import Clock

_IN_PLACE = ("c10d.allreduce_.default", "c10d.broadcast_.default", "c10d.reduce_.default", "c10d.recv_.default")
_TAG = {"c10d.send.default": 3, "c10d.recv_.default": 3}
"""Messages, with the place of their tag among the arguments."""


class _Operation(dist.Work):
    """An operation in progress, whose tensors live until the wait."""

    def __init__(self, inner: dist.Work, clock: Clock, held: list[Tensor]) -> None:
        super().__init__()
        self._inner, self._clock, self._held = inner, clock, held
        # PyTorch holds the part in C++ alone.
        _IN_PROGRESS.append(self)

    def wait(self, *timeout: Any) -> bool:
        """Make the current stream wait for it."""
        with _disable_current_modes():
            self._inner.wait(*timeout)
        sim.current().wait(self._clock)
        self._held = []
        if self in _IN_PROGRESS:
            _IN_PROGRESS.remove(self)
        return True


_IN_PROGRESS: list[_Operation] = []
_AWAITED: dict[int, tuple[Clock, Any]] = {}
"""Functional collectives by the memory of their results."""
_STREAMS: dict[tuple[str, int], sim.PublicStream] = {}
_CALLED: list[tuple[str, str]] = []
"""Group and name of each collective."""


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of process groups."""
    if function.namespace == "_c10d_functional":
        return _run_functional(function, args, kwargs)
    name, group = str(function), next(each for each in args if not isinstance(each, Tensor | list | tuple))
    args = tuple(0 if number == _TAG.get(name) else each for number, each in enumerate(args))
    stream = _communicator(dist.ProcessGroup.unbox(group).group_name, name, args[2] if name in _TAG else -1)
    used = [each for each in tree_leaves(args) if isinstance(each, sim.SimTensor)]
    if name == "c10d.send.default":
        written = []
    else:
        written = used if name in _IN_PLACE else [each for each in tree_leaves(args[0]) if isinstance(each, Tensor)]
    reads = [each for each in used if not any(each is other for other in written)]
    stream.enqueue(name, [sim.block_of(each) for each in reads], [sim.block_of(each) for each in written])
    out = function(*tree_map(_contents, args), **kwargs)
    work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
    made = _Operation(work, stream.clock.copy(), used).boxed()
    return (args[0], made) if isinstance(out, tuple) else made


def _run_functional(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a functional collective, whose results `wait_tensor` awaits; until then it keeps its tensors."""
    given = [each for each in tree_leaves(args) if isinstance(each, sim.SimTensor)]
    name, place = str(function), given[0].place
    if name == "_c10d_functional._wrap_tensor_autograd.default":
        return AsyncCollectiveTensor(given[0])
    with _disable_current_modes():
        out = function(*tree_map(_contents, args), **kwargs)
    if name == "_c10d_functional.wait_tensor.default":
        clock, _ = _AWAITED.pop(id(sim.block_of(args[0])), (Clock(), None))
        sim.current().wait(clock)
        return args[0]
    stream = _communicator(args[-1], name)
    # The results are memory of the current stream.
    made = tree_map(lambda each: sim.made_here(each, place) if isinstance(each, Tensor) else each, out)
    blocks = [sim.block_of(each) for each in tree_leaves(made)]
    stream.enqueue(name, [sim.block_of(each) for each in given], blocks)
    for block in blocks:
        _AWAITED[id(block)] = stream.clock.copy(), (block, given)
    return made


def _communicator(group: str, name: str, peer: int = -1) -> sim.PublicStream:
    """Return the stream of a communicator, which has waited for the current stream."""
    if peer < 0:
        _CALLED.append((group, name))
    if (group, peer) not in _STREAMS:
        # A group of one rank needs none.
        if _IN_PROGRESS and dist.distributed_c10d._resolve_process_group(group).size() > 1:
            # Raised by the next operation: here, PyTorch would end the process.
            sim.world().problems.append(
                f"{name} makes the communicator {'of its group' if peer < 0 else f'with rank {peer}'} while other "
                "operations are in progress; NCCL then waits for the other end, which may wait for this rank"
            )
        _STREAMS[group, peer] = sim.PublicStream()
    stream = _STREAMS[group, peer]
    stream.wait_stream(sim.current())
    return stream


def _contents(value: Any) -> Any:
    return sim.contents(value) if isinstance(value, sim.SimTensor) else value


def check_order() -> None:
    """Raise if two ranks have called the collectives of their common groups in different orders. All ranks call it."""
    every: list[Any] = [None] * dist.get_world_size()
    joined = dist.distributed_c10d._world.pg_group_ranks
    groups = {group.group_name for group in joined if isinstance(group, dist.ProcessGroup)}
    dist.all_gather_object(every, (groups, _CALLED))
    for rank, (others, called) in enumerate(every):
        ours, theirs = ([call for call in calls if call[0] in groups & others] for calls in (_CALLED, called))
        assert ours == theirs, f"collectives are called in another order on rank {rank}"


_SEND: Any = dist.ProcessGroup.send


def _send(group: Any, tensors: list[Tensor], *args: Any) -> Any:
    """Send. The host, which reads pinned memory for gloo, must have waited for the copy there."""
    for each in tensors:
        sim.read_by_host(each, "send")
    return _SEND(group, tensors, *args)


dist.ProcessGroup.send = _send  # type: ignore[method-assign]
# `pipeloom.runtime.launch` makes process groups of simulated devices in this process.
product._BACKENDS["sim"] = {"direct": "cpu:gloo,sim:gloo", "host": "cpu:gloo,sim:gloo"}  # type: ignore[index]
sim.of_process_groups = run
