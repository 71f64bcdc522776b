"""Dataset: samples by number, of which sizes are known before anything is decoded, and a rank loads what it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.errors import InputError
from pipeloom.runtime.model.model import Model, Part, user_code


class CorruptSampleError(InputError):
    """A sample is damaged: it can be left out and counted, where the user says so."""


class Dataset(ABC):
    """Samples by number. Every process has it, so it can be pickled; threads of one process call it at the same time.

    The planner needs the sizes of a whole batch on every rank, so `sizes` reads headers and counts tokens. Images are
    decoded in `load`, which is called on those ranks alone whose layers take them, once the plan is known.
    """

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def sizes(self, i: int) -> Mapping[str, Any]:
        """Sizes of sample ``i``: fields of the sample metadata, and ``targets``, what it counts in the loss.

        The same in every process. Without an ``id`` the number is one. For a damaged sample it raises
        `CorruptSampleError`.
        """

    @abstractmethod
    def load(self, i: int, module: str, instances: tuple[int, ...], loss: bool) -> Any:
        """What a module's ``inputs`` and ``context`` take of sample ``i``, and the loss.

        Parameters
        ----------
        module : str
            Name of the module.
        instances : tuple of int
            Which of the sample's images (videos, recordings; 0 of one that goes through as a whole) enter the module's
            first layer on this rank. Of others ``context`` may ask sizes, and never contents. Empty on ranks that have
            only later layers, and of a sample between others that has nothing for the module.
        loss : bool
            Whether the loss is taken of it here. False on ranks without the model's last layer: of what the loss alone
            takes, nothing need be there.

        Returns
        -------
        object
            The sample, with its instances at their own places. More than was asked for does no harm.
        """

    def preview(self, i: int) -> str:
        """Return sample ``i`` as text with its targets marked, for the user to look at; empty by default.

        Called before training, in one process. A dataset that can compare the sample with its source does so here.

        Raises
        ------
        InputError
            The sample is not what its source says.
        """
        del i
        return ""

    def bind(self, model: Model) -> Dataset:
        """Return the dataset for a model, where what it gives depends on that; itself by default."""
        del model
        return self


@dataclass(frozen=True, slots=True)
class LazySample:
    """A sample of a `Dataset` in a batch: loaded where a layer takes it."""

    dataset: Dataset
    index: int
    targets: float

    def load(self, module: str, instances: tuple[int, ...], loss: bool) -> Any:
        """Load what a module takes of it, and whether the loss does."""
        return self.dataset.load(self.index, module, instances, loss)


def count_targets(model: Model, samples: Sequence[Any]) -> float:
    """Targets of samples in the loss."""
    return float(sum(s.targets if isinstance(s, LazySample) else model.num_targets(s) for s in samples))


def wanted_of(part: Part, contents: bool) -> dict[int, tuple[int, ...]]:
    """Per place of a sample of a `Dataset` in a part, the instances whose contents are to be loaded."""
    wanted: dict[int, list[int]] = {place: [] for place in part.span if isinstance(part.samples[place], LazySample)}
    if contents:
        for place, instance in part.instances:
            if place in wanted:
                wanted[place].append(instance)
    return {place: tuple(each) for place, each in wanted.items()}


def load_one(sample: LazySample, module: str, instances: tuple[int, ...], loss: bool) -> Any:
    """Load what a module takes of a sample, and whether the loss does.

    Raises
    ------
    InputError
    """
    with user_code(f"dataset.load({sample.index}, {module!r}, {instances}, {loss})"):
        return sample.load(module, instances, loss)


def with_loaded(part: Part, found: Mapping[int, Any]) -> Part:
    """The part with loaded samples at some places."""
    return replace(part, samples=tuple(found.get(i, s) for i, s in enumerate(part.samples))) if found else part


def load_part(part: Part, module: str, contents: bool = True, loss: bool = True) -> Part:
    """Load what a module takes of a part's samples, where they come from a `Dataset`.

    Parameters
    ----------
    contents : bool
        Whether the module's first layer is run; else nothing is decoded.
    loss : bool
        Whether the loss is taken of it.
    """
    wanted = wanted_of(part, contents).items()
    return with_loaded(part, {place: load_one(part.samples[place], module, each, loss) for place, each in wanted})
