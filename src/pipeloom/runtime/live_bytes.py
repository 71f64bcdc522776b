"""Bytes of the tensors that operations made and that still live: what computing really holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages while it is entered; what was made before, and views, do not count.

    Attributes
    ----------
    peak_bytes : int
        Most that lived at the end of any operation since `forget_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the storages that it made."""
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes that live now."""
        self._made = {key: made for key, made in self._made.items() if not _is_gone(made[0])}
        return sum(size for _, size in self._made.values())

    def forget_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.peak_bytes = self.num_bytes


def _is_gone(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]
