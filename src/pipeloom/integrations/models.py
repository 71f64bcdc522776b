"""Load a model description from any supported source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeloom.errors import InputError, located
from pipeloom.integrations.configs import check_config, model_name, read_config, zoo_model
from pipeloom.integrations.foreign import MODELS, foreign_kind, is_megatron
from pipeloom.io.files import printable
from pipeloom.spec import catalog
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.batch import Sample
from pipeloom.spec.catalog import load_architecture

if TYPE_CHECKING:
    from pipeloom.integrations.tracing.own import OwnModel

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A user's function, `module:function`."""
_READS = "a name, a Hugging Face config.json or its folder, a .toml, module:function, or a file of Megatron's arguments"


def load_model(name: str, freeze: Sequence[str] = ()) -> Architecture:
    """Load a model by its name or description.

    A name is that of a model of the zoo, such as ``Qwen/Qwen2.5-VL-7B-Instruct``. A description is a TOML file, a
    Hugging Face `config.json` or its folder, a file with Megatron's arguments, or ``module:function``, a function that
    returns a `torch.nn.Module`. A `config.json` that the zoo does not have is traced, which needs torch and
    transformers the first time.

    Parameters
    ----------
    freeze : sequence of str
        Modules that are not trained, in addition to those that the description freezes.

    Raises
    ------
    InputError
        The model is unknown or invalid, it lacks a module of ``freeze``, or all of its modules are frozen.
    """
    return frozen_modules(_described(name), freeze)


def frozen_modules(model: Architecture, freeze: Sequence[str]) -> Architecture:
    """Return a model of which the modules ``freeze`` are not trained either. At least one module must be trained."""
    for each in freeze:
        model.module(each)
    if all(m.frozen or m.name in freeze for m in model.modules):
        raise InputError(f"model {model.name!r}", "has no trainable module, all are frozen", "train at least one")
    if not freeze:
        return model
    frozen = tuple(msgspec.structs.replace(m, frozen=m.frozen or m.name in freeze) for m in model.modules)
    return msgspec.structs.replace(model, modules=frozen)


def trace_model_file(name: str) -> Architecture:
    """Trace a `config.json` or its folder, also if the zoo has it."""
    if not (name.endswith(".json") or Path(name).is_dir()):
        raise InputError(f"model {name!r}", "is no config.json", "give one, or its folder")
    return _of_config(name, in_zoo=False)


def _of_config(path: str, *, in_zoo: bool = True) -> Architecture:
    from pipeloom.integrations.tracing.cached import traced

    config = read_config(path)
    name = model_name(config, path)
    with located(path):
        check_config(config)
        known = zoo_model(config) if in_zoo else None
        if known is not None:
            return msgspec.structs.replace(load_architecture(known), name=name)
        return traced(config, name)


@cache
def _built(name: str) -> OwnModel:
    """Trace what a user's function returns, once."""
    module, _, function = name.partition(":")
    from pipeloom.integrations.tracing.own import build_own

    return build_own(module, function)


def own_batches(name: str) -> tuple[tuple[Sample, ...], ...]:
    """Return the sizes of the sample batches beside a user's model, `module:function`; none of any other model."""
    return _built(name).batches if _FUNCTION.fullmatch(name) else ()


def _described(name: str) -> Architecture:
    is_config = name.endswith(".json") or Path(name).is_dir()
    if is_megatron(name) or (is_config and Path(name).is_file()):
        kind = foreign_kind(Path(name))
        if kind and kind not in MODELS:
            raise InputError(f"model {printable(name)}", f"is {kind}", f"give {_READS}")
    if is_config:
        return _of_config(name)
    if _FUNCTION.fullmatch(name):
        return _built(name).architecture
    if name.endswith(".toml"):
        return load_architecture(name)
    if is_megatron(name):
        from pipeloom.integrations.megatron import read_megatron

        return read_megatron(Path(name)).architecture
    known = catalog.model_name(name)
    if known is None:
        every = catalog.names("models")
        near = get_close_matches(name.lower().rpartition("/")[2], every, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(every)}."
        remedy = f"{advice} Or give a config.json, its folder or a .toml file"
        raise InputError(f"model {name!r}", "is unknown", remedy)
    return load_architecture(known)
