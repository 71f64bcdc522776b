"""Read a step's microbatches in the data's order, for chunks that run them in another order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pipeloom.errors import ExecutionError, InputError
from pipeloom.runtime.launch import accelerator


class Reader:
    """Reads the data iterator of a model chunk.

    A plan runs microbatches in any order, so the items of a step are kept until it ends. An item is read when a
    microbatch first needs it, as Megatron does. Items that were read ahead belong to later steps. ``was_read`` says
    whether any microbatch has taken an item.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.was_read = False
        self._items: list[Any] = []
        """Items of this step, and then those of later steps."""
        self._num_taken = 0
        """Items of this step that microbatches have taken, counted from the first."""
        self._num_steps = 0
        self._ahead: Future[list[Any]] | None = None

    def begin(self) -> None:
        """Begin a step. If Megatron's state machine repeats the step before, the items are the same."""
        self.wait()
        if not getattr(self.iterator, "replaying", False):
            del self._items[: self._num_taken]
        self._num_taken = 0
        self._num_steps += 1

    @property
    def may_read_ahead(self) -> bool:
        """Whether an earlier step had this iterator.

        Others may be views of one source that are made anew for each step. Items that are read ahead through such a
        view would be lost to the next one.
        """
        return self._num_steps > 1

    @property
    def is_done(self) -> bool:
        """Whether no item is left that belongs to a later step."""
        self.wait()
        return len(self._items) <= self._num_taken

    def wait(self) -> None:
        """Wait until reading ahead has ended."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.result()

    def fill(self, count: int) -> None:
        """Read the items of a step; raises `InputError` if the iterator ends before, or fails."""
        try:
            self._read(count)
        except Exception as error:
            # A view of another chunk's iterator may have nothing before that one is read.
            if self._items or self.was_read:
                reason = f"failed in microbatch {len(self._items)}, {type(error).__name__}: {error}"
                raise InputError("data_iterator", reason, "repair it") from error
        # An iterator that no microbatch takes from may be a placeholder.
        if len(self._items) < count and (self._items or self.was_read):
            raise InputError(
                "data_iterator",
                f"ends after {len(self._items)} of {count} microbatches",
                "give an item for every microbatch",
            )

    def item(self, number: int) -> Any:
        self._read(number + 1)
        if len(self._items) <= number:
            raise ExecutionError(f"data_iterator ends before microbatch {number}; give an item for every microbatch")
        self.was_read = True
        for each in self._items[self._num_taken : number + 1]:
            self._note(each)
        self._num_taken = max(self._num_taken, number + 1)
        return self._items[number]

    def items(self, count: int) -> list[Any]:
        """Return the items that are there, of a step that has `count` of them."""
        return self._items[:count]

    def read_ahead(self, count: int, pool: ThreadPoolExecutor) -> Future[list[Any]]:
        """Read the next step's items in a thread, and return them: as many as this step has, or all that are left."""

        def read() -> list[Any]:
            self._read(2 * count)
            return self._items[count : 2 * count]

        self._ahead = pool.submit(read)
        return self._ahead

    def _read(self, count: int) -> None:
        source = self.iterator
        # Megatron's wrapper records what is read for a repeated step. Items of later steps must not be recorded.
        if not getattr(source, "replaying", False) and hasattr(source, "saved_microbatches"):
            source = source.iterable
        while len(self._items) < count:
            try:
                self._items.append(next(source))
            except StopIteration:
                return

    def _note(self, item: Any) -> None:
        """Record an item of this step where Megatron's wrapper would have recorded it."""
        saved = getattr(self.iterator, "saved_microbatches", None)
        if saved is not None and not self.iterator.replaying:
            from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

            if get_rerun_state_machine().get_mode() != RerunMode.DISABLED:
                saved.append(item)


class MicrobatchIterator:
    """The data iterator that ``forward_step_func`` gets for one microbatch. It has one item."""

    def __init__(self, reader: Reader, number: int) -> None:
        self._reader, self._number, self._is_taken = reader, number, False

    def __iter__(self) -> MicrobatchIterator:
        return self

    def __next__(self) -> Any:
        if self._is_taken:
            raise ExecutionError(
                f"forward_step_func reads two items for microbatch {self._number}; read one for each microbatch"
            )
        self._is_taken = True
        return self._reader.item(self._number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader.iterator, name)


class Readers:
    """Readers of all data iterators of a rank, and the thread that reads ahead on the device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._known: dict[int, Reader] = {}
        """Readers by identity of their iterators."""
        self.thread = ThreadPoolExecutor(1, "pipeloom-read-ahead", accelerator.select, (device,))

    def of(self, iterators: Sequence[Any]) -> list[Reader | None]:
        """Return the reader of each iterator of a step, None for None. Chunks with the same iterator share one.

        Readers of other iterators are dropped, unless they have read ahead.
        """
        known, now = self._known, set(map(id, iterators))
        for key in [key for key, reader in known.items() if key not in now and reader.is_done]:
            del known[key]
        for iterator in iterators:
            if iterator is not None and id(iterator) not in known:
                known[id(iterator)] = Reader(iterator)
        return [None if iterator is None else known[id(iterator)] for iterator in iterators]

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
