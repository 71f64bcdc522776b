"""Task: the user's own functions, which give the model, its batches, their metadata and how it is judged."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.runtime import Model, user_code
from pipeloom.runtime.prefetch import Describe

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""From a rank's parameters to its optimiser."""


@dataclass(frozen=True)
class Task:
    """What is trained. Every process of a run has it, so its functions must be importable there (or picklable).

    Attributes
    ----------
    build_model : callable
        Called as ``build_model(seed=..., **config.model)``; builds the same `Model` in every process.
    batches : callable
        Called as ``batches(num_iterations=..., **config.data)``; gives lists of samples, the same in every process.
        With a parameter ``start``, a resumed run asks for the batches from there on.
    describe : callable or None
        From a sample to its metadata; None: the model's own, or ``batches`` gives `Prefetched`.
    evaluate : callable or None
        From the trained model to numbers by name; called once, on rank 0, with the weights of all layers.
    optimizer : callable or None
        From a rank's parameters to its optimiser, instead of the one that the run's config describes.
    file : Path or None
        Where the functions come from: other processes read it again.
    """

    build_model: Callable[..., Model]
    batches: Callable[..., Iterable[Sequence[Any]]]
    describe: Describe | None = None
    evaluate: Callable[[Model], Mapping[str, float]] | None = None
    optimizer: MakeOptimizer | None = None
    file: Path | None = None

    @classmethod
    def from_file(cls, file: Path, optimizer: MakeOptimizer | None = None) -> Task:
        """Import a task file; one inside a package is imported as part of it.

        Raises
        ------
        InputError
            When the file or one of the functions that training calls is missing.
        """
        package = (file.parent / "__init__.py").exists()
        root = file.parent.parent if package else file.parent
        if str(root) not in sys.path:
            # Last, so that files beside the task never hide a library.
            sys.path.append(str(root))
        with user_code(f"{file}: import"):
            module = _import_file(file, package)
        for name in ("build_model", "batches"):
            if not callable(getattr(module, name, None)):
                raise InputError(f"{file}", f"has no function {name}", "see docs/train.md for what a task file offers")
        return cls(
            module.build_model,
            module.batches,
            getattr(module, "describe", None),
            getattr(module, "evaluate", None),
            optimizer,
            file,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the file's name where there is one: what was imported from it has no name elsewhere."""
        if self.file is not None:
            return Task.from_file, (self.file, self.optimizer)
        return Task, (self.build_model, self.batches, self.describe, self.evaluate, self.optimizer)

    @property
    def name(self) -> str:
        """In messages: the file, or ``task``."""
        return "task" if self.file is None else str(self.file)

    def model(self, dtype: str, seed: int, **arguments: Any) -> Model:
        """Build the model in a dtype.

        Raises
        ------
        InputError
            When that fails, or what comes is no `Model`.
        """
        torch.set_default_dtype(getattr(torch, dtype))
        with user_code(f"{self.name}: build_model({_names(arguments, 'seed')})"):
            model = self.build_model(seed=seed, **arguments)
        if not isinstance(model, Model):
            raise InputError(
                f"{self.name}: build_model", f"returned a {type(model).__name__}", "return a pipeloom.Model"
            )
        return model

    def batches_from(self, start: int, num_iterations: int, **arguments: Any) -> tuple[Iterable[Sequence[Any]], int]:
        """Give batches from an iteration on.

        Returns
        -------
        batches : iterable
            The first of them is the one before ``start``, which is looked at again to see that it is the one that was
            trained; or all from the beginning, where ``batches`` has no parameter ``start``.
        count : int
            How many of them were trained already.
        """
        count = start
        if start and "start" in inspect.signature(self.batches).parameters:
            arguments["start"], count = start - 1, 1
        with user_code(f"{self.name}: batches({_names(arguments, 'num_iterations')})"):
            return self.batches(num_iterations=num_iterations, **arguments), count

    def scores(self, model: Model) -> dict[str, float]:
        """Evaluate a trained model: numbers by name, none where the task does not say how.

        Raises
        ------
        InputError
            When ``evaluate`` raises, or returns anything but numbers by name.
        """
        if self.evaluate is None:
            return {}
        with user_code(f"{self.name}: evaluate()"):
            scores = self.evaluate(model)
        where = f"{self.name}: evaluate"
        if not isinstance(scores, Mapping):
            raise InputError(where, f"returned a {type(scores).__name__}", "return a dictionary of numbers")
        for name, score in scores.items():
            if not isinstance(score, int | float):
                raise InputError(where, f"returned {type(score).__name__} for {name!r}", "return numbers")
        return dict(scores)


def _names(arguments: Mapping[str, Any], first: str) -> str:
    return ", ".join((first, *arguments))


def _import_file(file: Path, package: bool) -> ModuleType:
    """Import by path: a file called json.py must not give the library of that name."""
    if package:
        return importlib.import_module(f"{file.parent.name}.{file.stem}")
    name = f"pipeloom_task_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ImportError("is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
