"""Optimizer state other than tensors: options of its groups (learning rates, ...) and plain numbers in its state.

Stored by parameter, like tensors, so that another layout finds them. Written as JSON, never pickled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.runtime.execute.executor import Executor

_NO_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options that only affect how a step is computed. The resumed run chooses them itself."""
_PLAIN = (bool, int, float, str, type(None))


def options_by_name(executor: Executor, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """Return ``group``, the options of the group, ``state``, the plain slots, and ``class``, the class of the
    optimizer, of each trained parameter of this rank.

    Raises `InputError` if an option or a slot is neither a tensor nor plain, or a parameter belongs to no layer of this
    rank.
    """
    if optimizer is None:
        return {}
    names: dict[int, list[str]] = {}
    for name, parameter in executor.named_parameters():
        names.setdefault(id(parameter), []).append(name)
    entries, classes = {}, _classes(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        where = f"optimizer.param_groups[{number}]"
        options = {key: _plain(value, f"{where}[{key!r}]") for key, value in group.items() if key not in _NO_OPTIONS}
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InputError(
                    where,
                    f"has a parameter of shape {tuple(parameter.shape)} that belongs to no layer of this rank",
                    "pass only the parameters of Executor.parameters to the optimizer",
                )
            for name in names[id(parameter)]:
                state = {
                    slot: _plain(value, f"optimizer.state[{name!r}][{slot!r}]")
                    for slot, value in optimizer.state.get(parameter, {}).items()
                    if not isinstance(value, Tensor)
                }
                entries[name] = {"group": options, "state": state, "class": classes[id(parameter)]}
    return entries


def check_classes(executor: Executor, optimizer: torch.optim.Optimizer, saved: dict[str, dict[str, Any]]) -> None:
    """Raise `InputError` if a parameter was saved with another class of optimizer. Older checkpoints have none."""
    classes = _classes(optimizer)
    for name, parameter in executor.trained_parameters():
        before, now = saved.get(name, {}).get("class"), classes.get(id(parameter))
        if None not in (before, now) and before != now:
            raise InputError(
                "optimizer",
                f"is {now}, but the checkpoint has the state of {before} for {name!r}",
                f"use {before}, or begin a new run with the checkpoint's weights (load_weights in build_model)",
            )


def _classes(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Return the class of optimizer by id of the parameter. A combined optimizer has ``parts``."""
    parts = getattr(optimizer, "parts", None)
    if not isinstance(parts, tuple) or not all(isinstance(part, torch.optim.Optimizer) for part in parts):
        parts = (optimizer,)
    return {
        id(parameter): type(part).__name__
        for part in parts
        for group in part.param_groups
        for parameter in group["params"]
    }


def give_options(executor: Executor, optimizer: torch.optim.Optimizer, saved: dict[str, dict[str, Any]]) -> None:
    """Set saved options in the groups of an optimizer over its own, as torch does when it loads.

    Raises `InputError` if one group has parameters that were saved with different options.
    """
    names = {id(parameter): name for name, parameter in executor.trained_parameters() if name in saved}
    for number, group in enumerate(optimizer.param_groups):
        members = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for name in members:
            if saved[name] != saved[members[0]]:
                differ = [key for key in saved[name] if saved[name][key] != saved[members[0]].get(key)]
                raise InputError(
                    f"optimizer.param_groups[{number}]",
                    f"has {members[0]!r} and {name!r}, saved with different {', '.join(differ)}",
                    "use the parameter groups of the run that saved it",
                )
        for key, value in (saved[members[0]] if members else {}).items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(each, where) for each in value]
    if not isinstance(value, _PLAIN):
        raise InputError(
            where,
            f"is a {type(value).__name__}, which checkpoints cannot store",
            "use an optimizer whose state is tensors, numbers and strings, or train without checkpoints",
        )
    return value
