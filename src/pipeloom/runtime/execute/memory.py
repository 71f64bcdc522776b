"""Memory strategies for the tensors that the backward of a block needs: offloading and selective recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pipeloom.errors import ExecutionError
from pipeloom.runtime.launch import accelerator
from pipeloom.runtime.model.sharding import awaited, dtensor_of, is_dtensor, local_part, storage_address

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# Operations whose results are expensive to compute and small to keep. All other results are recomputed.
_KEPT_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
) | {torch._higher_order_ops.flex_attention}

_PACKED_ATTENTION = "torch_attn._varlen_attn.default"
"""Attention within packed sequences. PyTorch registers it when it is first used."""


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT_OPERATIONS or str(operation) == _PACKED_ATTENTION
    # If an operation that draws random numbers were kept, later ones would draw others when they are recomputed.
    if kept and not _drops(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return whether attention has dropout."""
    schema = getattr(operation, "_schema", None)
    for place, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
    return False


class SelectiveRecompute:
    """Keeps the results of matrix products, convolutions and attention. Everything else is recomputed."""

    def __init__(self) -> None:
        contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        self._forward: Any = contexts[0]
        self.again: AbstractContextManager[Any] = contexts[1]
        """Context for the recomputation."""

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context for the forward. Expensive results are kept, and autograd saves nothing."""
        stack = ExitStack()
        # Gradients are enabled so that the forward runs the same operations as the recomputation.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(lambda _: None, _never))
        stack.enter_context(self._forward)
        stack.enter_context(_CopiesBeforeChanges(self._forward.storage))
        return stack


class _CopiesBeforeChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a kept result before an operation changes it in place, because the recomputation repeats the change.

    ``kept`` has the results as torch's selective checkpointing keeps them, in containers.
    """

    def __init__(self, kept: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        # Higher-order operations have no schema.
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
            written = {each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write}
            leaves = tree_leaves([value for name, value in arguments.items() if name in written])
            changed = {storage_address(value) for value in leaves if isinstance(value, Tensor)}
            for entry in tree_leaves(self._kept):
                result = getattr(entry, "val", None)
                if isinstance(result, Tensor) and storage_address(result) in changed:
                    entry.val = result.clone()
                    entry.version = entry.val._version
        return func(*args, **kwargs)


def _never(_: Any) -> Tensor:
    raise AssertionError("this graph is never used")


class _Saved(NamedTuple):
    """A view of a storage that autograd saved."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedShard(NamedTuple):
    """A DTensor that autograd saved, with its local part stored separately."""

    local: Any
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: torch.Size
    stride: tuple[int, ...]


class _Storage:
    """A storage that is on the device, on the host, or on the device again."""

    def __init__(self, tensor: Tensor) -> None:
        self.here: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.device = tensor.device
        self.host: Tensor | None = None

    def copy_out(self) -> None:
        """Copy the storage to the host."""
        assert self.here is not None
        if self.here._version != self.version:
            raise ExecutionError("a layer changed a tensor in place that its backward needs; do not offload it")
        raw = accelerator.tensor_on(self.here.untyped_storage(), self.device, torch.uint8)
        self.host = accelerator.empty_on_host(raw)
        self.host.copy_(raw, non_blocking=True)

    def allocate(self) -> None:
        """Allocate memory for the storage on the device."""
        self.here = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)

    def copy_back(self) -> None:
        """Copy the storage back to the device."""
        assert self.here is not None
        assert self.host is not None
        # PyTorch does not reuse pinned memory before this copy has ended.
        self.here.copy_(self.host, non_blocking=True)
        self.host = None


def cast_leaf(tensor: Tensor) -> int:
    """Return the id of the leaf of which a tensor, or its base, is a cast. Return 0 if it is no cast."""
    source = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    node = source.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return 0
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return 0 if leaf is None else id(leaf)


class OffloadedTensors:
    """Tensors that autograd saves inside a block, which can move to the host and back.

    Those in ``held_anyway`` stay on the device in any case, so that moving them frees no memory: weights, the inputs of
    the block, and the context of the module. ``under_autocast``, casts of these stay as well, because autocast keeps
    them for the iteration. Without autocast, a layer makes its own casts for every microbatch.
    """

    def __init__(self, held_anyway: Iterable[Any], under_autocast: bool = False) -> None:
        held = [tensor for tensor in held_anyway if isinstance(tensor, Tensor)]
        self._held = {storage_address(tensor) for tensor in held}
        self._leaves = {id(x) for x in held if under_autocast and x.is_leaf and x.requires_grad}
        self._storages: dict[int, _Storage] = {}
        self._away: list[_Storage] = []
        self._staying: list[Tensor | None] = []
        self._leaving: Any = None
        """Event at the end of the copies to the host, until `release`."""
        self._coming: Any = None
        """Event at the end of the copies back, until `arrive`."""
        self.num_bytes = 0

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context for the forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def offload(self, stream: Any = None) -> None:
        """Move all saved tensors to the host, in a stream beside the current one, or in the current one (None).

        With a stream, the device memory is held until `release`, so that the current stream can reuse it in the order
        of its operations. Memory that the copies held by ``record_stream`` would be free only once the host, which runs
        ahead, finds that they have ended. Without one, the memory is released at once.
        """
        # Forget the addresses, since other tensors may now reuse them.
        self._away, self._storages = list(self._storages.values()), {}
        with accelerator.enqueued_beside(stream):
            for storage in self._away:
                storage.copy_out()
                self.num_bytes += storage.num_bytes
        self._leaving = accelerator.mark(stream)
        if stream is None:
            self.release()

    def release(self) -> None:
        """Make the current stream wait for the copies to the host, and release the device memory."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        for storage in self._away:
            storage.here = None
        self._staying = []

    def load(self, stream: Any = None) -> None:
        """Begin to bring all saved tensors back, in a stream beside the current one, or in the current one (None).

        Repeated calls have no effect. Tensors that are not yet released stay, and need no copy.
        """
        # The graph keeps the storages alive as long as it needs them.
        away, self._away = self._away, []
        if self._leaving is not None:
            # The copies to the host may read the memory longer than the backward does.
            self._staying += [storage.here for storage in away]
            for storage in away:
                storage.host = None
            return
        # This memory belongs to the current stream, whose computation frees it.
        for storage in away:
            storage.allocate()
        if away:
            with accelerator.enqueued_beside(stream):
                for storage in away:
                    storage.copy_back()
            self._coming = accelerator.mark(stream)

    def arrive(self) -> None:
        """Make the current stream wait until all saved tensors are back."""
        self.load()
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def _pack(self, tensor: Tensor) -> Tensor | _Saved | _SavedShard:
        if self._leaves and cast_leaf(tensor) in self._leaves:
            return tensor
        if is_dtensor(tensor):
            local = self._pack(local_part(tensor))
            return _SavedShard(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        tensor = awaited(tensor)
        address = tensor.untyped_storage().data_ptr()
        if address in self._held or tensor.untyped_storage().nbytes() == 0:
            return tensor
        storage = self._storages.get(address)
        if storage is None:
            storage = self._storages[address] = _Storage(tensor)
        return _Saved(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved | _SavedShard) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, _SavedShard):
            return dtensor_of(self._unpack(saved.local), saved.mesh, saved.placements, saved.size, saved.stride)
        here = saved.storage.here
        assert here is not None, "call load before the backward"
        where = saved.offset, saved.size, saved.stride
        return accelerator.tensor_on(here.untyped_storage(), here.device, saved.dtype, where)
