"""Build a library's model on the meta device for tracing. Code from a model's folder never runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeloom.errors import InputError
from pipeloom.integrations.tracing.kernels import ATTENTION, LENGTHS, register

ALIASES: dict[str, tuple[str, str]] = {
    "kimi_k2": ("deepseek_v3", "Kimi K2 is DeepSeek-V3 with other sizes (Kimi K2 technical report, section 2.3)"),
    "deepseek_ref": ("deepseek_v4", "its classes are those of DeepSeek-V4"),
    "minimax_m3": ("minimax_m3_vl_text", "it is the language model of MiniMax-M3-VL"),
    "mimo": ("qwen2", "MiMo-7B is Qwen2 with multi-token prediction (MiMo technical report, section 2.2)"),
}
"""Model types that the library lacks, the type that has the same layers, and why."""


def build(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the library's model of a configuration on meta, and how it was found."""
    import transformers

    kind = str(config.get("model_type"))
    known = transformers.CONFIG_MAPPING
    how = f"read from its own code, transformers {transformers.__version__}"
    if kind in ALIASES and kind not in known:
        alias, reason = ALIASES[kind]
        how += f", as {alias}: {reason}"
        kind = alias
    if isinstance(config.get("thinker_config"), Mapping):
        config, kind = config["thinker_config"], f"{kind}_thinker"
        how += ", of its parts the thinker: the talker is trained apart"
    if kind not in known:
        remedy = "describe it in a .toml file, or install a version of transformers that has it"
        raise InputError("model_type", f"{kind!r} is not in transformers {transformers.__version__}", remedy)
    given = {k: _decoded(v) for k, v in config.items() if k not in ("quantization_config", "auto_map", "model_type")}
    try:
        with quiet():
            made = known[kind].from_dict(given)
            _check_read(made, given)
            model = _model(made, config)
    except InputError:
        raise
    except ImportError as error:
        raise InputError("model", f"needs another library: {' '.join(str(error).split())}", "install it") from error
    except Exception as error:
        problem = f"cannot be built by the library: {type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError("model", problem, "correct its config") from error
    return model, f"{how}, class {type(model).__name__}"


def _decoded(value: Any) -> Any:
    """Return a value of a config. The library writes numbers that JSON lacks as ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value


_MAIN = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _check_read(made: Any, given: Mapping[str, Any]) -> None:
    """Raise `InputError` if the library's configuration ignores sizes of the file, whose fields are another code's."""
    text = made.get_text_config()
    for name in _MAIN:
        value = given.get(name)
        if isinstance(value, int) and value != getattr(text, name, value):
            raise InputError(
                name,
                f"is {value} in the file, but the library's class has {getattr(text, name)}: it reads other fields",
                "describe the model in a .toml file",
            )


def _model(config: Any, given: Mapping[str, Any]) -> Any:
    register()
    kind = _class_of(config, given)
    options: dict[str, Any] = {"experts_implementation": ATTENTION, "dtype": torch.bfloat16}
    with torch.device("meta"), dtype_as_default(torch.bfloat16):
        try:
            model = kind._from_config(copy.deepcopy(config), attn_implementation=ATTENTION, **options)
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            # A part of the model has a class for each implementation that the library knows.
            model = kind._from_config(copy.deepcopy(config), **options)
    return prepare(model)


def prepare(model: Any) -> Any:
    """Let a model call the attention and the experts that are recorded."""
    register()
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    for module in model.modules():
        own = getattr(module, "config", None)
        if own is None or not hasattr(own, "_attn_implementation"):
            continue
        own._attn_implementation = ATTENTION if own in (text, model.config) else LENGTHS
        if hasattr(own, "_experts_implementation"):
            own._experts_implementation = ATTENTION
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return model.train()


def _class_of(config: Any, given: Mapping[str, Any]) -> Any:
    """Return the class with the head: the one that the configuration names, or else the library's for its kind."""
    import transformers

    for name in given.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if found is not None and isinstance(found, type) and issubclass(found, nn.Module):
            return found
    autos = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")
    for auto in (getattr(transformers, name) for name in autos):
        mapping = auto._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise InputError("model_type", f"{config.model_type!r} has no class with a language-modeling head in the library")


@contextmanager
def dtype_as_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
