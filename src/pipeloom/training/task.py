"""Task: the user's own functions, which give the model, its batches, their metadata and how it is judged."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.runtime import Batches, Model, user_code
from pipeloom.runtime.data.prefetch import Describe
from pipeloom.runtime.train.rates import MakeOptimizer, MakeScheduler
from pipeloom.training.callbacks import Callback


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
        From a rank's parameters, or from pairs of name and parameter where its own parameter is called
        ``named_parameters``, to its optimiser, instead of the one that the run's config describes. In a task file:
        ``make_optimizer``.
    file : Path or None
        Where the functions come from: other processes read it again.
    scheduler : callable or None
        From a rank's optimiser to torch's scheduler of it, instead of that of the config. In a task file:
        ``make_scheduler``.
    eval_batches : callable or None
        Called before every evaluation, with what ``config.evaluation.data`` has, and with those of ``config.data`` that
        it has parameters for; gives the batches.
    callbacks : tuple of Callback, or callable
        Told of the run on rank 0; or a function that returns them, called there alone. In a task file: ``callbacks()``.
    """

    build_model: Callable[..., Model]
    batches: Callable[..., Iterable[Sequence[Any]]]
    describe: Describe | None = None
    evaluate: Callable[[Model], Mapping[str, float]] | None = None
    optimizer: MakeOptimizer | None = None
    file: Path | None = None
    scheduler: MakeScheduler | None = None
    eval_batches: Callable[..., Iterable[Sequence[Any]]] | None = None
    callbacks: tuple[Callback, ...] | Callable[[], Sequence[Callback]] = ()

    @classmethod
    def from_file(cls, file: Path, optimizer: MakeOptimizer | None = None) -> Task:
        """Import a task file; one inside a package is imported as part of it. An optimiser given goes before its own.

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
            module = import_file(file, package)
        for name in ("build_model", "batches"):
            if not callable(getattr(module, name, None)):
                raise InputError(f"{file}", f"has no function {name}", "see docs/train.md for what a task file offers")
        return cls(
            module.build_model,
            module.batches,
            getattr(module, "describe", None),
            getattr(module, "evaluate", None),
            optimizer or getattr(module, "make_optimizer", None),
            file,
            getattr(module, "make_scheduler", None),
            getattr(module, "eval_batches", None),
            getattr(module, "callbacks", ()),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the file's name where there is one: what was imported from it has no name elsewhere."""
        if self.file is not None:
            own = getattr(self.optimizer, "__module__", "") == self.build_model.__module__
            return Task.from_file, (self.file, None if own else self.optimizer)
        return Task, tuple(getattr(self, field.name) for field in fields(self))

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
            given = self.batches(num_iterations=num_iterations, **arguments)
        if start and isinstance(given, Batches):
            return replace(given, first=start - 1), 1
        return given, count

    def evaluation_batches(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
        """Give the batches of one evaluation.

        Parameters
        ----------
        given : mapping
            Arguments of ``batches``, of which those are taken that there are parameters for.
        own : mapping
            Arguments of ``eval_batches``.
        """
        arguments = self.check_evaluation(given, own)
        assert self.eval_batches is not None
        with user_code(f"{self.name}: eval_batches({', '.join(arguments)})"):
            return self.eval_batches(**arguments)

    def check_evaluation(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Give the arguments of ``eval_batches``, see `evaluation_batches`.

        Raises
        ------
        InputError
            When there is no such function, or it does not take these.
        """
        if self.eval_batches is None:
            raise InputError(f"{self.name}: eval_batches", "is missing", "add it, or leave [evaluation] out")
        signature = inspect.signature(self.eval_batches)
        takes_all = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        taken = {name: value for name, value in given.items() if takes_all or name in signature.parameters}
        arguments = taken | dict(own)
        with user_code(f"{self.name}: eval_batches({', '.join(arguments)})"):
            signature.bind(**arguments)
        return arguments

    def made_callbacks(self) -> Sequence[Callback]:
        """The callbacks, made now where a function makes them."""
        if not callable(self.callbacks):
            return self.callbacks
        with user_code(f"{self.name}: callbacks()"):
            return list(self.callbacks())

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


def import_file(file: Path, package: bool = False) -> ModuleType:
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
