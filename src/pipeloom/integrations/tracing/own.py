"""Trace a user's own model: `module:function`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.architecture import trace_model
from pipeloom.integrations.tracing.build import prepare
from pipeloom.spec.architecture import Architecture


def build_own(module: str, function: str) -> Architecture:
    """Call a function of a module on the meta device and trace the model that it returns.

    The model takes token ids (as ``input_ids``, or as its first argument) and returns logits.

    Raises
    ------
    InputError
        The function does not exist, fails, or returns no module; or the model cannot be described.
    """
    entity = f"{module}:{function}"
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(entity, f"cannot be imported: {error}", "name a module and a function of it") from error
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        remedy = "build it without reading numbers of tensors"
        raise InputError(entity, f"fails on the meta device: {type(error).__name__}: {text}", remedy) from error
    if not isinstance(model, nn.Module):
        raise InputError(entity, f"returns a {type(model).__name__}", "return a torch.nn.Module")
    return trace_own(model, function)


def trace_own(model: Any, name: str) -> Architecture:
    """Trace a module on the meta device."""
    if any(not p.is_meta for p in model.parameters()):
        raise InputError(name, "has parameters that are not on the meta device", "build it under torch.device('meta')")
    model = model.to(torch.bfloat16)  # as trainers keep weights and states
    if getattr(model, "config", None) is not None:
        prepare(model)
    return trace_model(model.train(), name, f"read from its own code, class {type(model).__name__}")
