"""Dataset: samples by number. Sizes are known before anything is decoded, and each rank loads only what it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.errors import InputError
from pipeloom.runtime.model.model import Model, Part, user_code


class CorruptSampleError(InputError):
    """A sample is damaged. It can be skipped and counted if the user allows it."""


class Dataset(ABC):
    """Samples by number.

    Every process has a copy, so the dataset must be picklable. Threads of one process call it at the same time.

    The planner needs the sizes of a whole batch on every rank, so `sizes` reads only headers and counts tokens. `load`
    decodes images. It is called once the plan is known, only on ranks whose layers take them.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def sizes(self, i: int) -> Mapping[str, Any]:
        """Return the sizes of sample ``i``: fields of the sample metadata, and ``targets``, its count in the loss.

        They must be the same in every process. Without an ``id`` the number is used. Raise `CorruptSampleError` for a
        damaged sample.
        """

    @abstractmethod
    def load(self, i: int, module: str, instances: tuple[int, ...], loss: bool) -> Any:
        """Return sample ``i`` with everything that a module's ``inputs`` and ``context``, and the loss, take of it.

        Parameters
        ----------
        module : str
            Name of the module.
        instances : tuple of int
            Indices of the sample's images, videos or recordings that enter the module's first layer on this rank. A
            sample that goes through as a whole has index 0. ``context`` may read the sizes of other instances, but
            not their contents. Empty on ranks that have only later layers, and for a sample between others that has
            nothing for the module.
        loss : bool
            Whether the loss of the sample is computed here. False on ranks without the model's last layer, where
            data that only the loss takes may be missing.

        Returns
        -------
        object
            The sample, with its instances at their own places. It may contain more than requested.
        """

    def preview(self, i: int) -> str:
        """Return sample ``i`` as text with its targets marked, to show to the user. Empty by default.

        Called before training in one process. A dataset that can compare the sample with its source does so here.

        Raises
        ------
        InputError
            The sample differs from its source.
        """
        del i
        return ""

    def bind(self, model: Model) -> Dataset:
        """Return the dataset for a model, if its samples depend on the model. Returns itself by default."""
        del model
        return self


@dataclass(frozen=True, slots=True)
class LazySample:
    """A sample of a `Dataset` in a batch, loaded where a layer takes it."""

    dataset: Dataset
    index: int
    targets: float

    def load(self, module: str, instances: tuple[int, ...], loss: bool) -> Any:
        """Load what a module, and the loss if ``loss`` is set, take of the sample."""
        with user_code(f"dataset.load({self.index}, {module!r}, {instances}, {loss})"):
            return self.dataset.load(self.index, module, instances, loss)


def count_targets(model: Model, samples: Sequence[Any]) -> float:
    """Return the number of targets of samples in the loss."""
    return float(sum(s.targets if isinstance(s, LazySample) else model.num_targets(s) for s in samples))


def instances_to_load(part: Part, contents: bool) -> dict[int, tuple[int, ...]]:
    """Return, by place of each `LazySample` in a part, the instances whose contents must be loaded."""
    wanted: dict[int, list[int]] = {place: [] for place in part.span if isinstance(part.samples[place], LazySample)}
    if contents:
        for place, instance in part.instances:
            if place in wanted:
                wanted[place].append(instance)
    return {place: tuple(each) for place, each in wanted.items()}


def with_loaded(part: Part, found: Mapping[int, Any]) -> Part:
    """Return the part with loaded samples at some places."""
    return replace(part, samples=tuple(found.get(i, s) for i, s in enumerate(part.samples))) if found else part


def load_part(part: Part, module: str, contents: bool = True, loss: bool = True) -> Part:
    """Load what a module takes of a part's samples if they come from a `Dataset`.

    Contents are decoded only with ``contents``, where the module's first layer runs. ``loss`` says whether the loss of
    the part is computed.
    """
    wanted = instances_to_load(part, contents).items()
    return with_loaded(part, {place: part.samples[place].load(module, each, loss) for place, each in wanted})
