"""Prefetched: reads batches ahead of training in a thread, and computes the metadata that the planner needs.

The planner needs only sizes. They are read from the tensors of the user's loader during training, so that a batch and
its metadata are ready when needed.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from pipeloom.errors import InputError, check_count
from pipeloom.runtime.model.model import Model, user_code
from pipeloom.spec import Batch, Sample, batch_from_dicts

_POLL_S = 0.05
# A loader that hangs is abandoned after this time.
_CLOSE_S = 10.0
_LISTS = frozenset(name for name in Sample.__struct_fields__ if name not in ("id", "text_tokens"))
"""Fields of the metadata with one entry per image, video or recording."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a part of a sample, computed from dimensions of a tensor.

    For a field with one number per sample (``text_tokens``), it is the size of one tensor. For a field with one number
    per image or video, it is the sizes of all tensors in a list, or of the slices along dimension 0 of one tensor.

    Attributes
    ----------
    key : str or int
        Key of the tensor in the sample: ``sample[key]``.
    dims : tuple of int
        Dimensions of the tensor, or of each tensor, whose sizes are multiplied. Empty gives 1.
    unit : int
        Number of elements per token, such as the 14 x 14 pixels of a patch. The result is rounded up.
    """

    key: str | int
    dims: tuple[int, ...] = (0,)
    unit: int = 1

    def __post_init__(self) -> None:
        check_count("unit", self.unit)

    def of(self, sample: Any, each: bool) -> int | tuple[int, ...]:
        """Return the size, or the sizes of all parts.

        Raises
        ------
        InputError
            The sample has no such tensor, or the tensor has no such dimension.
        """
        try:
            value = sample[self.key]
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(f"[{self.key!r}]", "is not there", "name what the loader yields") from error
        if not each:
            return self._tokens(value)
        if isinstance(value, Tensor):
            # Equal slices along dimension 0.
            return (self._tokens(value[0]),) * len(value) if len(value) else ()
        return tuple(self._tokens(part) for part in value)

    def _tokens(self, value: Any) -> int:
        shape = tuple(value.shape) if hasattr(value, "shape") else (len(value),)
        try:
            size = math.prod(int(shape[dim]) for dim in self.dims)
        except IndexError as error:
            raise InputError(f"[{self.key!r}]", f"has shape {shape}, and no dimension of {self.dims}") from error
        return -(-size // self.unit)


Rule = Size | Callable[[Any], Any]
"""Computes a field of the metadata from a sample."""


Describe = Callable[[Any], dict[str, Any]]
"""Returns the metadata of a sample as a dictionary with the fields of the sample-metadata format."""


class DescribedBatch(list[Any]):
    """The samples of a batch with their metadata."""

    metadata: tuple[Sample, ...] = ()
    num_skipped: int = 0
    """Number of damaged samples that were skipped."""


def batch_of(samples: Sequence[Any], describe: Describe | None, iteration: int = 0) -> Batch:
    """Return the metadata of a batch, computed ahead or by ``describe``.

    Parameters
    ----------
    samples : sequence
        One batch of the loader.
    describe : callable or None
        Returns the metadata of a sample. None if the batch comes from `Prefetched`.
    iteration : int
        Number of the batch, from 0.

    Raises
    ------
    InputError
        The batch has no metadata and ``describe`` is None, or the sizes are invalid.
    """
    if isinstance(samples, DescribedBatch):
        return Batch(samples.metadata, iteration)
    if describe is None:
        raise InputError(
            "describe", "is missing, and the batches have no metadata", "pass it, or use batches of Prefetched"
        )
    with user_code("describe"):
        rows = [describe(sample) for sample in samples]
    return batch_from_dicts(rows, iteration)


def next_samples(source: Iterator[Sequence[Any]], named: str) -> Sequence[Any] | None:
    """Return the next batch of a loader, or None after the last.

    Raises `InputError` if the loader yields None, because training would otherwise end early without a message.
    """
    try:
        samples: Sequence[Any] | None = next(source)
    except StopIteration:
        return None
    if samples is None:
        raise InputError(named, "is None, not a batch", "yield samples, or end the loop after the last batch")
    return samples


def idle_modules(model: Model, metadata: Iterable[Batch]) -> list[str]:
    """Return names of modules that have nothing to do in some batches."""
    samples = [sample for batch in metadata for sample in batch.samples]
    return [m.name for m in model.spec.modules if not any(any(m.instance_lengths(sample)) for sample in samples)]


def example_samples(model: Model, name: str) -> tuple[list[Any], Batch] | None:
    """Return example samples of the model for a module with their sizes, or None if it has none."""
    with user_code("model.examples"):
        samples = [] if model.examples is None else list(model.examples(name))
    return (samples, batch_of(samples, model.describe)) if samples else None


def close_reading(source: object) -> None:
    """End a pass over `Prefetched` or `Batches`. Other iterators stay unchanged."""
    if isinstance(source, Reading):
        source.close()


class Prefetched:
    """Batches of a loader, read ahead in a thread, with computed metadata.

    A `Trainer` needs no ``describe`` for these. Every iteration restarts the loader.

    Parameters
    ----------
    loader : iterable
        Yields batches, each an iterable of samples, for example a ``torch.utils.data.DataLoader`` whose
        ``collate_fn`` is ``list``. It must draw random numbers from its own generator, because its thread runs
        during training.
    sizes : mapping
        From a field of the sample metadata (``text_tokens``, ``image_tokens``, ...) to a `Size` or a function of
        the sample. ``id`` defaults to the place in the batch.
    describe : callable or None
        Alternative to ``sizes``: returns all metadata of a sample as a dictionary.
    depth : int
        Largest number of batches that wait, beside the one that is being read.
    """

    def __init__(
        self,
        loader: Iterable[Iterable[Any]],
        sizes: Mapping[str, Rule] | None = None,
        *,
        describe: Describe | None = None,
        depth: int = 2,
    ) -> None:
        check_count("depth", depth)
        if (sizes is None) == (describe is None):
            raise InputError("sizes", "or describe is needed", "give one of the two")
        for name in sizes or ():
            if name not in Sample.__struct_fields__:
                known = ", ".join(Sample.__struct_fields__)
                raise InputError(f"sizes[{name!r}]", "is not a field of the metadata", f"there are {known}")
        self._loader, self._depth = loader, depth
        self._describe = describe if describe is not None else partial(_apply_rules, dict(sizes or {}))

    def __iter__(self) -> Reading:
        """Start reading."""
        # The iterator is made here, where the loader may start workers and install handlers. The thread only calls its
        # `next`.
        return Reading(iter(self._loader), self._describe, self._depth)


def _apply_rules(sizes: Mapping[str, Rule], sample: Any) -> dict[str, Any]:
    """Return the metadata of a sample by the rules of `Prefetched`."""
    return {
        name: rule.of(sample, name in _LISTS) if isinstance(rule, Size) else rule(sample)
        for name, rule in sizes.items()
    }


@dataclass
class _Shared:
    """State of a reading that its thread uses. The thread must not reference the `Reading` itself."""

    source: Iterator[Any] | None
    describe: Describe | None
    """None if the source yields described batches."""
    batches: queue.Queue[DescribedBatch | BaseException]
    """Batches, then the exception that ended reading: `StopIteration` after the last batch."""
    stopped: threading.Event = field(default_factory=threading.Event)


class Reading(Iterator[DescribedBatch]):
    """One pass over a loader. Call `close` to leave it before its end."""

    def __init__(self, source: Iterator[Iterable[Any]], describe: Describe | None, depth: int) -> None:
        self._shared = _Shared(source, describe, queue.Queue(depth))
        self._thread = threading.Thread(target=_read, args=(self._shared,), name="pipeloom-prefetch", daemon=True)
        self._ended = False
        # Its thread also ends if it is dropped without being closed.
        weakref.finalize(self, self._shared.stopped.set)
        self._thread.start()

    def __next__(self) -> DescribedBatch:
        """Return the next batch. Raises the loader's exceptions with their tracebacks."""
        if self._ended:
            raise StopIteration
        batch = self._shared.batches.get()
        if isinstance(batch, DescribedBatch):
            return batch
        self.close()
        raise batch

    def close(self) -> None:
        """End the thread, and release the loader and the batches."""
        self._ended = True
        self._shared.stopped.set()
        self._thread.join(_CLOSE_S)
        while not self._shared.batches.empty():
            self._shared.batches.get_nowait()
        source, self._shared.source = self._shared.source, None
        if not self._thread.is_alive():
            _close_source(source)


def _close_source(source: object) -> None:
    """Close a generator or a loader's workers. Waiting for the garbage collector to end workers may never end."""
    if not getattr(source, "_persistent_workers", False):
        close = getattr(source, "close", None) or getattr(source, "_shutdown_workers", None)
        if close is not None:
            close()


def _read(shared: _Shared) -> None:
    batch: DescribedBatch | BaseException | None = None
    while not shared.stopped.is_set() and not isinstance(batch, BaseException):
        try:
            batch = _next_batch(shared)
        except BaseException as error:
            batch = error
        while not shared.stopped.is_set():
            try:
                shared.batches.put(batch, timeout=_POLL_S)
                break
            except queue.Full:
                continue


def _next_batch(shared: _Shared) -> DescribedBatch:
    """Return the next batch with its metadata. Raises `StopIteration` after the last."""
    assert shared.source is not None
    if shared.describe is None:
        described: DescribedBatch = next(shared.source)
        return described
    samples = next_samples(shared.source, "what the loader gives")
    if samples is None:
        raise StopIteration
    batch = DescribedBatch(samples)
    rows = []
    for place, sample in enumerate(batch):
        try:
            with user_code("describe"):
                rows.append({"id": str(place), **shared.describe(sample)})
        except InputError as error:
            dot = "" if error.entity.startswith("[") else "."
            raise InputError(f"samples[{place}]{dot}{error.entity}", error.problem, error.remedy) from error
    batch.metadata = batch_from_dicts(rows).samples
    return batch
