"""Read argument lists and configuration files of Megatron as `Arguments`.

Sources are: a text file of arguments; a shell script, which is evaluated for the arguments that it passes to Megatron;
Megatron-LM's YAML (``--yaml-cfg``); the ``MODEL_ARGS`` of NVIDIA's test recipes; and a recipe of Megatron Bridge,
written by ``ConfigContainer.to_yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError
from pipeloom.integrations.foreign import MODELS, SUFFIXES, json_document, kind_of_settings
from pipeloom.integrations.megatron.arguments import JOINED, Argument, Arguments, UnknownText, check_known
from pipeloom.integrations.megatron.effects import known_fields, known_names
from pipeloom.integrations.megatron.launches import argument_words, assumed, launches, merged
from pipeloom.integrations.megatron.shell.paths import list_words
from pipeloom.io.files import read_text

_COUNTED = ("nproc-per-node", "nnodes")
_LAUNCHER = frozenset(
    (
        *_COUNTED,
        *("node-rank", "master-addr", "master-port", "local-addr", "standalone", "max-restarts", "monitor-interval"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "start-method", "role", "tee", "redirects"),
        *("log-dir", "local-ranks-filter"),
    )
)
"""Options of ``torchrun``; the numbers of processes and nodes are read."""
_LIST = re.compile(r"(?:\s|#[^\n]*\n)*(?:-|$)")
"""The start of an argument list."""
_MULTIMODAL = re.compile(
    r"(?:model|dataset)-provider$|(?:vision|image|img|audio|video|multimodal|mm|encoder|language-model)-|freeze-(?:vit|lm)$",
    re.IGNORECASE,
)
"""Arguments of scripts that train an encoder beside the language model."""

_SECTIONS = (
    *("model", "language_model", "model_parallel"),
    *("train", "validation", "dataset", "ddp", "dist", "optimizer"),
)
"""Sections of configuration files that are read; fields of the first three must be known."""
_RENAMED = {
    "num-moe-experts": "num-experts",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "gated-linear-unit": "swiglu",
    "sequence-length": "seq-length",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "fp8-param": "fp8-param-gather",
    "fp4-param": "fp4-param-gather",
    "overlap-p2p-comm-warmup-flush": "overlap-p2p-communication-warmup-flush",
    "nccl-ub": "use-nccl-ub",
    "use-custom-fsdp": "use-megatron-fsdp",
    "cpu-offloading": "cpu-offloading-num-layers",
    "skip-getting-attention-mask-from-dataset": "no-create-attention-mask-in-dataloader",
}
"""Fields with another name than their arguments."""
_INVERTED = {
    "add-bias-linear": "disable-bias-linear",
    "share-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
    "overlap-p2p-comm": "no-overlap-p2p-communication",
    "bias-activation-fusion": "no-bias-gelu-fusion",
    "bias-dropout-fusion": "no-bias-dropout-fusion",
    "gradient-accumulation-fusion": "no-gradient-accumulation-fusion",
    "masked-softmax-fusion": "no-masked-softmax-fusion",
    "persist-layer-norm": "no-persist-layer-norm",
    "apply-rope-fusion": "no-rope-fusion",
    "gradient-reduce-div-fusion": "no-gradient-reduce-div-fusion",
    "pad-vocab-size": "no-pad-vocab-size",
    "check-for-nan-in-grad": "no-check-for-nan-in-loss-and-grad",
}
"""Fields whose argument is the opposite."""
_REDUCED = ("grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32")
"""Arguments for the values false and true of the field ``grad_reduce_in_fp32``."""
_QUANTIZING = (
    *("fp8", "fp8-recipe", "fp8-param", "fp8-param-gather", "fp4", "fp4-recipe", "fp4-param", "fp4-param-gather"),
    *("first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"),
)
"""Fields of a recipe's mixed precision that say what is quantized."""
_QUANTIZED: Mapping[str, dict[str, Any]] = {
    "with_fp8_delayed_scaling": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "with_fp8_current_scaling": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param_gather": True,
        "first_last_layers_bf16": True,
    },
    "with_fp8_subchannel_scaling": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "with_mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
    "with_nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True},
}
"""Fields that names of Megatron Bridge's mixed precision stand for, by a part of the name (release of August 2026)."""
_OVERLAPPED = (
    *("tp-comm-overlap", "overlap-moe-expert-parallel-comm", "delay-wgrad-compute", "defer-embedding-wgrad-compute"),
    "no-overlap-p2p-communication",
)
"""Arguments that a recipe's overlap of communication switches off if it has no value for them."""
_REPLICAS_OVERLAPPED = ("overlap_grad_reduce", "overlap_param_gather")
"""Fields that it switches on with the distributed optimizer."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_MAX_CHARACTERS = 4 * 1024 * 1024
_MAX_ENTRIES = 100_000
"""Most entries of a document with its aliases expanded, and of one table with its merges."""
_REMEDY = "give Megatron's arguments: a text file, a shell script, or YAML of Megatron-LM or Megatron Bridge"


def read_arguments(source: str | Path | Sequence[str]) -> Arguments:
    """Read a file by its name, or a list of arguments.

    Raises `InputError` if the file does not exist or is not YAML, or an argument is unknown to Megatron.
    """
    if not isinstance(source, (str, Path)):
        return _checked("arguments", _given(source))
    path = Path(source)
    try:
        text = read_text(path)
    except InputError as error:
        raise InputError(error.entity, error.problem, "give a file of Megatron's arguments") from error
    _check_form(str(source), text)
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(str(source), text)
    return _from_text(str(source), text)


def _check_form(source: str, text: str) -> None:
    """Raise `InputError` for a file that cannot hold Megatron's arguments, by its name or as JSON."""
    suffix = Path(source).suffix.lower()
    if suffix == ".py":
        recipe = "save a recipe of Megatron Bridge with ConfigContainer.to_yaml, or give the argument list"
        raise InputError(source, f"is {SUFFIXES[suffix]}", recipe)
    if suffix == ".toml":
        remedy = "pipeloom compare MODEL --now FILE reads torchtitan's"
        raise InputError(source, "is TOML, in which Megatron has no arguments", remedy)
    if suffix in SUFFIXES:
        raise InputError(source, f"is {SUFFIXES[suffix]}, not a list of arguments", _REMEDY)
    if suffix != ".json" and not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return
    document = json_document(text)
    if isinstance(document, dict):
        _check_program(source, document)
    if document is not None or suffix == ".json":
        raise InputError(source, "is JSON, in which Megatron has no arguments", _REMEDY)


def _check_program(source: str, document: Mapping[Any, Any]) -> None:
    """Raise `InputError`, which names the program, for settings of another program."""
    kind = kind_of_settings(document)
    if kind in MODELS:
        raise InputError(source, f"is {kind}", f"pipeloom compare {source} reads it; or {_REMEDY}")
    if kind:
        raise InputError(source, f"is {kind}, not of Megatron", _REMEDY)


# ------------------------------------------------------------------ argument lists


def _from_text(source: str, text: str) -> Arguments:
    """Read a text file: a list of arguments if its first word is one, otherwise a shell script."""
    text = text.removeprefix("\ufeff")
    if _LIST.match(text) is not None:
        words = argument_words(source, 1, list_words(source, text))
        # Arguments in one pair of quotes, such as "--swiglu --bf16", are split where the shell uses them.
        split = [
            part for word in words for part in (word.split() if word.startswith("--") and type(word) is str else [word])
        ]
        return _checked(source, _given(split))
    found = launches(source, text)
    return _checked(source, merged(found, _given), assumed(found))


def _given(words: Iterable[str]) -> dict[str, Argument]:
    """Return arguments by name, with their values."""
    found: dict[str, Argument] = {}
    label, values = "", list[str]()

    def close() -> None:
        if label:
            _add(found, label[2:].replace("_", "-"), Argument(label, tuple(values)))

    for word in words:
        if word.startswith("--") and len(word) > 2:
            close()
            label, equals, value = word.partition("=")
            if isinstance(word, UnknownText):
                value = UnknownText(value, word.reason, word.words)
            values = [value] if equals else []
        elif label:
            values.append(word)
    close()
    return found


def _add(found: dict[str, Argument], name: str, one: Argument) -> None:
    """Note an argument; one that is given twice has the values of both."""
    old = found.setdefault(name, one)
    if old.values != one.values:
        found[name] = Argument(one.label, old.values, one.values)


def _checked(source: str, found: Mapping[str, Argument], notes: tuple[str, ...] = ()) -> Arguments:
    labels = {name: one.label for name, one in found.items() if name not in _LAUNCHER}
    for name, label in labels.items():
        if _MULTIMODAL.match(name) is not None and name not in known_names():
            raise InputError(
                f"{source}: {label}",
                "describes a multimodal model; pipeloom megatron plans language models only",
                "pipeloom compare plans multimodal models from their Hugging Face configuration",
            )
    check_known(labels.items(), known_names(), source)
    kept = {name: one for name, one in found.items() if name not in _LAUNCHER or name in _COUNTED}
    unknown = tuple(
        f"{one.label}: {value.reason}; it is read as a value, and arguments that it prints are not counted"
        for one in kept.values()
        for value in one.values
        if isinstance(value, UnknownText) and value.words == "any"
    )
    return Arguments(source, kept, notes=notes + unknown)


# ------------------------------------------------------------------ configuration files


def read_yaml(source: str, text: str) -> Any:
    """Read a YAML document.

    Raises `InputError` for text that is not YAML, is too long, contains itself, or has aliases for too many entries.
    """
    try:
        import yaml
    except ImportError as error:
        raise InputError(source, "needs PyYAML to be read", 'pip install "pipeloom[megatron]"') from error
    if len(text) > _MAX_CHARACTERS:
        raise InputError(source, f"{len(text)} characters are more than {_MAX_CHARACTERS}", "give one configuration")

    # Recipes name classes and functions as text, so that no object needs to be built.
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            _check_entries(source, len(node.value))

    try:
        document = yaml.load(text, Loader)
    # ValueError: invalid dates, numbers of thousands of digits.
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(source, f"is not YAML: {error}", "save it again, or give an argument list") from error
    _check_entries(source, _num_entries(source, document, {}))
    return document


def _num_entries(source: str, node: Any, known: dict[int, int]) -> int:
    """Return the number of entries of a document with its aliases expanded."""
    if not isinstance(node, dict | list):
        return 1
    if known.setdefault(id(node), -1) >= 0:
        return known[id(node)]
    known[id(node)] = -2
    total = 1
    for child in node.values() if isinstance(node, dict) else node:
        if known.get(id(child)) == -2:
            raise InputError(source, "has an alias inside of what it stands for", "write the value out")
        total += _num_entries(source, child, known)
    known[id(node)] = total
    return total


def _check_entries(source: str, count: int) -> None:
    if count > _MAX_ENTRIES:
        raise InputError(source, f"its aliases stand for more than {_MAX_ENTRIES} entries", "write the values out")


def _from_yaml(source: str, text: str) -> Arguments:
    document = read_yaml(source, text)
    if not isinstance(document, dict):
        raise InputError(source, "is not a table of settings", "give a recipe, or an argument list")
    _check_program(source, document)
    listed = document.get("MODEL_ARGS")
    if isinstance(listed, dict):
        return _checked(source, _given(_argument_words(listed)))
    found: dict[str, Argument] = {}
    checked: list[tuple[str, str]] = []
    for section, value in document.items():
        if isinstance(value, dict):
            if section == "comm_overlap":
                continue
            if section not in _SECTIONS:
                on = tuple(str(name) for name, entry in value.items() if entry not in (None, False))
                found[f"{section}.*"] = Argument(f"{section}.*", on or ("none",))
                continue
            fields = _labeled(str(section), value)
        else:
            fields = {str(section): (str(section), value)}
        for label, (field, entry) in fields.items():
            if field.startswith("_"):
                continue
            name = field.replace("_", "-")
            if section in _SECTIONS[:3]:
                checked.append((name, label))
            one = _field(name, label, entry)
            if one is not None:
                _add(found, *one)
    check_known(checked, known_fields(), source)
    _set_precision(found, document.get("mixed_precision"))
    _set_overlap(found, document.get("comm_overlap"))
    model = document.get("model")
    if not {"num-layers", "hidden-size"} & found.keys() and not (isinstance(model, dict) and "_target_" in model):
        raise InputError(
            source,
            "has neither num_layers nor hidden_size, so it does not describe a model of Megatron",
            "give Megatron-LM's YAML, or a recipe of Megatron Bridge saved with ConfigContainer.to_yaml",
        )
    if "num-query-groups" in found:
        found.setdefault("group-query-attention", found["num-query-groups"])
    if isinstance(model, dict) and model.get("should_pad_vocab") is False and "vocab-size" in found:
        found["padded-vocab-size"] = found["vocab-size"]
    return Arguments(source, found, section=_pipeline_section(model))


def _labeled(section: str, table: Mapping[Any, Any]) -> dict[str, tuple[str, Any]]:
    """Return fields of a section by their labels, with those of the configuration that a model's builder nests."""
    fields = {f"{section}.{name}": (str(name), entry) for name, entry in table.items()}
    nested = table.get("transformer")
    if section == "model" and isinstance(nested, dict):
        del fields["model.transformer"]
        fields |= _labeled("model.transformer", nested)
    return fields


def _pipeline_section(model: Any) -> str:
    if not isinstance(model, dict):
        return ""
    return "model.transformer" if isinstance(model.get("transformer"), dict) else "model"


def _argument_words(listed: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the arguments of a table ``--name: value``; true stands for a flag, false for no argument."""
    for name, value in listed.items():
        if value is False or value is None:
            continue
        yield str(name)
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


def _set_precision(found: dict[str, Argument], given: Any) -> None:
    """Override fields of other sections by a recipe's mixed precision, which is a table or a name."""
    label = "mixed_precision.*"
    if isinstance(given, str):
        label, name = "mixed_precision", given.replace("-", "_")
        single = "bf16" not in name and "fp16" in name
        plain = {"bf16": "bf16" in name, "fp16": single, "grad_reduce_in_fp32": not single}
        given = plain | next((fields for words, fields in _QUANTIZED.items() if words in name), {})
    if not isinstance(given, dict):
        return
    for name in ("bf16", "fp16", *_REDUCED, *_QUANTIZING):
        found.pop(_RENAMED.get(name, name), None)
    for name, value in ({"grad_reduce_in_fp32": True} | given).items():
        if (dashed := name.replace("_", "-")) in ("bf16", "fp16", "grad-reduce-in-fp32", *_QUANTIZING):
            found.update(filter(None, [_field(dashed, label, value)]))


def _set_overlap(found: dict[str, Argument], given: Any) -> None:
    """Override fields of other sections by a recipe's overlap of communication, as Megatron Bridge does."""
    if not isinstance(given, dict):
        return
    fields = {str(name): value for name, value in given.items() if value is not None and not str(name).startswith("_")}
    for name in _OVERLAPPED:
        found.pop(name, None)
    if "use-distributed-optimizer" in found:
        fields = dict.fromkeys(_REPLICAS_OVERLAPPED, True) | fields
    else:
        fields = {name: value for name, value in fields.items() if name not in _REPLICAS_OVERLAPPED}
    for field, value in fields.items():
        name = field.replace("_", "-")
        found.pop(_RENAMED.get(name, name), None)
        found.update(filter(None, [_field(name, f"comm_overlap.{field}", value)]))


def _field(name: str, label: str, value: Any) -> tuple[str, Argument] | None:
    """Return the argument equivalent to a field of a configuration file; None if there is none."""
    if value is None or value in ("", [], {}):
        return None
    if name in _INVERTED:
        return None if value is True else (_INVERTED[name], Argument(label))
    if name == "grad-reduce-in-fp32":
        return _REDUCED[bool(value)], Argument(label)
    if name == "activation-func":
        return (
            ("swiglu", Argument(label)) if str(value) in ("swiglu", "geglu") else ("activation-func", Argument(label))
        )
    if name == "pipeline-model-parallel-layout" and not isinstance(value, str):
        return name, Argument(label, (_layout_text(value),))
    name = _RENAMED.get(name, name)
    if isinstance(value, bool):
        return (name, Argument(label)) if value else None
    if isinstance(value, dict) and name.endswith("-spec"):
        return name, Argument(label, (_named(value).rpartition(".")[2],))
    if isinstance(value, list) and name not in JOINED:
        return name, Argument(label, tuple(map(_named, value)))
    return name, Argument(label, (_named(value),))


def _named(value: Any) -> str:
    """Return a value as text; an enumeration or a class is given by its name."""
    return str(value.get("_name_", value.get("_target_", "?")) if isinstance(value, dict) else value)


def _layout_text(value: Any) -> str:
    """Return a layout, which a recipe has as lists of names or as Megatron's object, as text."""
    if isinstance(value, dict):
        value = value.get("input_data", value.get("layout", ""))
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(stage, list) for stage in value):
        return str(value)
    return "|".join("".join(_LETTERS.get(str(one).rsplit(".", 1)[-1].lower(), str(one)) for one in s) for s in value)
