"""Models counted by hand from their configs: what traced models are compared with.

`families.FAMILIES` lists the model types. Fields that a config leaves out have the library's defaults.
"""

from __future__ import annotations

from pipeloom.errors import InputError
from pipeloom.spec.architecture import Architecture
from tests.integrations.hand_counted.families import FAMILIES
from tests.integrations.hand_counted.fields import Config

__all__ = ["architecture_of"]


def architecture_of(config: Config, name: str) -> Architecture:
    """Convert a config to an architecture.

    Parameters
    ----------
    config : mapping
        The contents of a `config.json`.
    name : str
        Name of the architecture. If it is empty, the model type is used.

    Raises
    ------
    InputError
        The model type is unknown, or a field is invalid.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise InputError("model_type", f"{kind!r} is not known", f"known are {', '.join(FAMILIES)}")
    return Architecture(name or kind, f"Hugging Face config, model type {kind}", FAMILIES[kind].read(config))
