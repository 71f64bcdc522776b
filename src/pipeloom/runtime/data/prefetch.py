"""Prefetched: reads batches ahead of training in a thread, and counts what the planner must know of them.

What the planner is told are shapes. They are read from the tensors of the user's loader, beside training: when a batch
is wanted, it and its metadata are there.
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
# A loader that hangs is left behind.
_CLOSE_S = 10.0
_LISTS = frozenset(name for name in Sample.__struct_fields__ if name not in ("id", "text_tokens"))
"""Fields of the metadata that have one entry for each image, video or sound."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long a part of a sample is: what some dimensions of a tensor come to.

    Of a field with one number per sample (``text_tokens``) it is the size of one tensor. Of a field with one number
    per image or video, the sizes of all tensors in a list, or along dimension 0 of one tensor.

    Attributes
    ----------
    key : str or int
        Where in the sample: ``sample[key]``.
    dims : tuple of int
        Dimensions of the tensor (of each, where there are several) whose sizes are multiplied; none: 1.
    unit : int
        Elements that make one token, as the 14 x 14 pixels of a patch; parts of a token count as one.
    """

    key: str | int
    dims: tuple[int, ...] = (0,)
    unit: int = 1

    def __post_init__(self) -> None:
        """Refuse tokens of no size."""
        check_count("unit", self.unit)

    def of(self, sample: Any, each: bool) -> int | tuple[int, ...]:
        """The size, or the sizes of all parts.

        Raises
        ------
        InputError
            When the sample has no such tensor, or the tensor no such dimension.
        """
        try:
            value = sample[self.key]
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(f"[{self.key!r}]", "is not there", "name what the loader yields") from error
        if not each:
            return self._tokens(value)
        if isinstance(value, Tensor):
            # Equal parts along dimension 0.
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
"""How a field of the metadata follows from a sample."""


Describe = Callable[[Any], dict[str, Any]]
"""From a sample to its metadata, as a dictionary with the fields of the sample-metadata format."""


class DescribedBatch(list[Any]):
    """The samples of a batch, with their metadata."""

    metadata: tuple[Sample, ...] = ()
    num_skipped: int = 0
    """Damaged samples that were left out of it."""


def batch_of(samples: Sequence[Any], describe: Describe | None, iteration: int = 0) -> Batch:
    """The metadata of a batch: what was counted ahead, or what ``describe`` says.

    Parameters
    ----------
    samples : sequence
        One batch, as the loader gives it.
    describe : callable or None
        From a sample to its metadata; None: the batch is one of `Prefetched`.
    iteration : int
        Its number, from 0.

    Raises
    ------
    InputError
        When there is neither, or the sizes are impossible.
    """
    if isinstance(samples, DescribedBatch):
        return Batch(samples.metadata, iteration)
    if describe is None:
        raise InputError(
            "describe", "is missing, and the batches were not described ahead", "give it, or batches from Prefetched"
        )
    with user_code("describe"):
        rows = [describe(sample) for sample in samples]
    return batch_from_dicts(rows, iteration)


def next_samples(source: Iterator[Sequence[Any]], named: str) -> Sequence[Any] | None:
    """The next batch of a loader; None after its last.

    Raises
    ------
    InputError
        When it gives None: that is no end, and training would end early without a word.
    """
    try:
        samples: Sequence[Any] | None = next(source)
    except StopIteration:
        return None
    if samples is None:
        raise InputError(named, "is None, not a batch", "yield samples, or end the loop after the last batch")
    return samples


def idle_modules(model: Model, metadata: Iterable[Batch]) -> list[str]:
    """Modules that have nothing to do in some batches."""
    samples = [sample for batch in metadata for sample in batch.samples]
    return [m.name for m in model.spec.modules if not any(any(m.instance_lengths(sample)) for sample in samples)]


def made_up(model: Model, name: str) -> tuple[list[Any], Batch] | None:
    """Samples that the model makes up for a module, with their sizes; None where it makes up none."""
    with user_code("model.examples"):
        samples = [] if model.examples is None else list(model.examples(name))
    return (samples, batch_of(samples, model.describe)) if samples else None


def close_reading(source: object) -> None:
    """End a pass of `Prefetched`; whatever else gives batches is left as it is."""
    if isinstance(source, Reading):
        source.close()


class Prefetched:
    """The batches of a loader, read ahead in a thread, their metadata counted.

    A `Trainer` that is given these needs no ``describe``. Every iteration over it begins anew, as over the loader.

    Parameters
    ----------
    loader : iterable
        Gives batches, each an iterable of samples: a ``torch.utils.data.DataLoader`` whose ``collate_fn`` is ``list``,
        or any other. What it draws at random, it must draw from a generator of its own: the thread runs beside
        training.
    sizes : mapping
        From a field of the sample metadata (``text_tokens``, ``image_tokens``, ...) to a `Size`, or a function of the
        sample. ``id`` is the place in the batch where it is not given.
    describe : callable or None
        Instead of ``sizes``: from a sample to all of its metadata, as a dictionary.
    depth : int
        Batches that wait at most, beside the one that is being read.
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
                raise InputError(f"sizes[{name!r}]", "is no field of the metadata", f"there are {known}")
        self._loader, self._depth = loader, depth
        self._describe = describe if describe is not None else partial(_apply_rules, dict(sizes or {}))

    def __iter__(self) -> Reading:
        """Begin to read."""
        # Made here, where the loader may start workers and install handlers; only its `next` is called in the thread.
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
    """One pass over a loader; `close` it where it is left before its end."""

    def __init__(self, source: Iterator[Iterable[Any]], describe: Describe | None, depth: int) -> None:
        self._shared = _Shared(source, describe, queue.Queue(depth))
        self._thread = threading.Thread(target=_read, args=(self._shared,), name="pipeloom-prefetch", daemon=True)
        self._ended = False
        # Dropped without being closed, it ends its thread as well.
        weakref.finalize(self, self._shared.stopped.set)
        self._thread.start()

    def __next__(self) -> DescribedBatch:
        """The next batch; what the loader raised is raised here, with its traceback."""
        if self._ended:
            raise StopIteration
        batch = self._shared.batches.get()
        if isinstance(batch, DescribedBatch):
            return batch
        self.close()
        raise batch

    def close(self) -> None:
        """End the thread, and let go of the loader and of what was read."""
        self._ended = True
        self._shared.stopped.set()
        self._thread.join(_CLOSE_S)
        while not self._shared.batches.empty():
            self._shared.batches.get_nowait()
        source, self._shared.source = self._shared.source, None
        if not self._thread.is_alive():
            _close_source(source)


def _close_source(source: object) -> None:
    """End a generator, and a loader's workers: left to the garbage collector, these may be waited for in vain."""
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
    """Return the next batch with its metadata.

    Raises
    ------
    StopIteration
        There are no more batches.
    """
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
