"""Task: the user's functions for the model, its batches, their metadata and its evaluation."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.runtime import Batches, Model, user_code
from pipeloom.runtime.data.prefetch import Describe
from pipeloom.runtime.train.rates import MakeOptimizer, MakeScheduler
from pipeloom.training.callbacks import Callback

_ABSENT = object()


@dataclass(frozen=True)
class Task:
    """The functions that define what is trained. Every process imports or unpickles them.

    Attributes
    ----------
    build_model : callable
        Called as ``build_model(seed=..., **config.model)``. Builds the same `Model` in every process.
    batches : callable
        Called as ``batches(num_iterations=..., **config.data)``. Returns lists of samples, the same in every
        process. With a parameter ``start``, a resumed run requests the batches from that iteration on.
    describe : callable or None
        Maps a sample to its metadata. None: the model's own, or ``batches`` returns `Prefetched`.
    evaluate : callable or None
        Maps the trained model to numbers by name. Called once, on rank 0, with the weights of all layers.
    optimizer : callable or None
        Makes a rank's optimizer instead of the config's, from its parameters, or from pairs of name and parameter if
        its own parameter is named ``named_parameters``. In a task file: ``make_optimizer``.
    file : Path or None
        File of the functions, which other processes import too.
    scheduler : callable or None
        Makes torch's scheduler of a rank's optimizer, instead of the config's. In a task file: ``make_scheduler``.
    eval_batches : callable or None
        Called before every evaluation with ``config.evaluation.data``, and with those entries of ``config.data`` for
        which it has parameters. Returns the batches.
    callbacks : tuple of Callback, or callable
        Receive the events of the run on rank 0; or a function that returns them, called only there. In a task file:
        ``callbacks()``.
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
    _in_file: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Fields as the file defines them."""

    @classmethod
    def from_file(cls, file: Path, optimizer: MakeOptimizer | None = None) -> Task:
        """Import a task file, as part of its package if it is in one. ``optimizer`` overrides the file's own.

        Raises
        ------
        InputError
            If the file or a required function is missing, or another file has its name within its package.
        """
        package = (file.parent / "__init__.py").exists()
        root = file.parent.parent if package else file.parent
        if str(root) not in sys.path:
            # Appended, so that files beside the task never hide a library.
            sys.path.append(str(root))
        with user_code(f"{file}: import"):
            module = import_file(file, package)
        for name in ("build_model", "batches"):
            if not callable(getattr(module, name, None)):
                raise InputError(f"{file}", f"has no function {name}", "see docs/train.md for task files")
        in_file = {
            "build_model": module.build_model,
            "batches": module.batches,
            "describe": getattr(module, "describe", None),
            "evaluate": getattr(module, "evaluate", None),
            "optimizer": getattr(module, "make_optimizer", None),
            "file": file,
            "scheduler": getattr(module, "make_scheduler", None),
            "eval_batches": getattr(module, "eval_batches", None),
            "callbacks": getattr(module, "callbacks", ()),
        }
        return cls(**in_file | ({} if optimizer is None else {"optimizer": optimizer}), _in_file=in_file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the file's name and the fields that differ from the file's.

        Imported functions have no importable name elsewhere. The file is imported before those fields are unpickled.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.file is None:
            return Task, tuple(values.values())
        in_file = values.pop("_in_file")
        # A task that was made by hand with the name of a file has the functions of that file.
        changed = {name: value for name, value in values.items() if in_file and value is not in_file.get(name, _ABSENT)}
        return Task.from_file, (self.file,), changed

    @property
    def name(self) -> str:
        """Name in messages: the file, or ``task``."""
        return "task" if self.file is None else str(self.file)

    def model(self, dtype: str, seed: int, **arguments: Any) -> Model:
        """Build the model in a dtype.

        Raises
        ------
        InputError
            If that fails, or the result is not a `Model`.
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
        """Return batches from an iteration on.

        Returns
        -------
        batches : iterable
            Begins with the batch before ``start``, which is compared with the one that was trained; or with the
            first batch if ``batches`` has no parameter ``start``.
        count : int
            Number of these batches that were already trained.
        """
        count = start
        if start and "start" in inspect.signature(self.batches).parameters:
            arguments["start"], count = start - 1, 1
        with user_code(f"{self.name}: batches({_names(arguments, 'num_iterations')})"):
            batches = self.batches(num_iterations=num_iterations, **arguments)
        if start and isinstance(batches, Batches):
            # A function with the parameter ``start`` may have applied it already.
            resumed = max(batches.first, start - 1) if "start" in arguments else batches.first + start - 1
            return replace(batches, first=resumed), 1
        return batches, count

    def evaluation_batches(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
        """Return the batches of one evaluation.

        ``shared`` are arguments of ``batches``, of which those are passed that ``eval_batches`` has parameters for.
        ``own`` are further arguments of ``eval_batches``.
        """
        arguments = self.check_evaluation(shared, own)
        assert self.eval_batches is not None
        with user_code(f"{self.name}: eval_batches({', '.join(arguments)})"):
            return self.eval_batches(**arguments)

    def check_evaluation(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``eval_batches``; see `evaluation_batches`.

        Raises
        ------
        InputError
            If there is no such function, or it does not accept them.
        """
        if self.eval_batches is None:
            raise InputError(f"{self.name}: eval_batches", "is missing", "add it, or omit [evaluation]")
        signature = inspect.signature(self.eval_batches)
        takes_all = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        taken = {name: value for name, value in shared.items() if takes_all or name in signature.parameters}
        arguments = taken | dict(own)
        with user_code(f"{self.name}: eval_batches({', '.join(arguments)})"):
            signature.bind(**arguments)
        return arguments

    def made_callbacks(self) -> Sequence[Callback]:
        """Return the callbacks, made now if a function makes them."""
        if not callable(self.callbacks):
            return self.callbacks
        with user_code(f"{self.name}: callbacks()"):
            return list(self.callbacks())

    def scores(self, model: Model) -> dict[str, float]:
        """Evaluate a trained model: return numbers by name, or none if the task has no ``evaluate``.

        Raises
        ------
        InputError
            If ``evaluate`` raises, or returns anything but numbers by name.
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
        return {name: float(score) for name, score in scores.items()}


def _names(arguments: Mapping[str, Any], first: str) -> str:
    return ", ".join((first, *arguments))


def import_file(file: Path, package: bool = False) -> ModuleType:
    """Import by path, so that a file named json.py does not import the library of that name.

    ``package``: import it as a module of the package in its folder, by their names. Raise `InputError` if another file
    has that name in this process.
    """
    if package:
        name = f"{file.parent.name}.{file.stem}"
        module = importlib.import_module(name)
        if os.path.realpath(module.__file__ or "") != os.path.realpath(file):
            raise InputError(f"{file}", f"is {name}, but so is {module.__file__}", "rename the folder of one of them")
        return module
    name = f"pipeloom_task_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ImportError("is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
