"""Argument lists and configuration files of Megatron, as `Arguments`.

Read are: a text file of arguments, also a shell script that has them in arrays, in variables or behind ``torchrun``;
Megatron-LM's YAML (``--yaml-cfg``), the ``MODEL_ARGS`` of NVIDIA's test recipes, and a recipe of Megatron Bridge as
``ConfigContainer.to_yaml`` writes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError
from pipeloom.integrations.megatron.arguments import JOINED, Arguments, Given, check_known, known_fields, known_names
from pipeloom.integrations.megatron.yaml_files import read_yaml
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
"""What ``torchrun`` takes; its numbers of processes and nodes are the job's."""
_PUNCTUATION = "();|&\n"
_COMMENT = re.compile(r"(?m)(^|\s)#.*$")
_OTHERS = re.compile(r"\$\{?\w+(\[[@*]\])?\}?")
"""Other arguments by the name of a variable or array: they are read where it is set."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d)(?::-([^}]*))?\}|([A-Za-z_]\w*))")

_SECTIONS = ("model", "language_model", "model_parallel", "train", "dataset", "ddp", "dist", "optimizer")
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
}
"""Fields that are arguments under another name."""
_INVERTED = {
    "add-bias-linear": "disable-bias-linear",
    "share-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
    "overlap-p2p-comm": "no-overlap-p2p-communication",
}
"""Fields whose argument says the opposite."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def read_arguments(source: str | Path | Sequence[str]) -> Arguments:
    """Read a file by its name, or a list of arguments.

    Raises
    ------
    InputError
        No such file, no YAML, or an argument that Megatron does not know.
    """
    if not isinstance(source, (str, Path)):
        return _listed("arguments", list(source))
    path = Path(source)
    try:
        text = read_text(path)
    except InputError as error:
        raise InputError(error.entity, error.problem, "give a file of Megatron's arguments") from error
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(str(source), text)
    return _listed(str(source), _words(str(source), text))


# ------------------------------------------------------------------ argument lists


def _words(source: str, text: str) -> Iterator[str]:
    """Words of a text or shell script, line ends and brackets among them, its own variables written out."""
    lexer = shlex.shlex(_COMMENT.sub(r"\1", text.replace("\\\n", " ")), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    known: dict[str, str] = {}
    try:
        for raw in lexer:
            word = _VARIABLE.sub(lambda found: known.get(found[1] or found[3], found[2] or found[0]), raw)
            assigned = _ASSIGNMENT.fullmatch(word)
            if assigned is not None:
                word = assigned[2]
                if not word.lstrip().startswith("--"):
                    known[assigned[1]] = word
            # What stands in one pair of quotes, such as "--swiglu --bf16", is parted where the shell uses it.
            if word.lstrip().startswith("--"):
                yield from word.split()
            elif assigned is None:
                yield word
    except ValueError as error:
        raise InputError(source, f"cannot be read: {error}", "give the arguments alone, without the script") from None


def _listed(source: str, words: Iterator[str] | list[str]) -> Arguments:
    found: dict[str, Given] = {}
    name: str | None = None
    values: list[str] = []

    def close() -> None:
        if name is None:
            return
        one, old = Given(label, tuple(values)), found.get(name)
        if old is not None and old.values != one.values:
            one = Given(label, old.values, one.values)
        found[name] = one

    label = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            close()
            label, equals, value = word.partition("=")
            name, values = label[2:].replace("_", "-"), [value] if equals else []
        elif name is None or (values and _OTHERS.fullmatch(word)):
            continue
        elif word.strip(_PUNCTUATION) or (name in JOINED and "\n" not in word):
            values.append(word)
        elif values or "\n" not in word:
            # A command, an array or a line ends; the value may also stand on the line behind its argument.
            close()
            name = None
    close()
    check_known(((each, one.label) for each, one in found.items() if each not in _LAUNCHER), known_names(), source)
    return Arguments(source, {k: one for k, one in found.items() if k not in _LAUNCHER or k in _COUNTED})


# ------------------------------------------------------------------ configuration files


def _from_yaml(source: str, text: str) -> Arguments:
    document = read_yaml(source, text)
    if not isinstance(document, dict):
        raise InputError(source, "is no table of settings", "give a recipe, or an argument list")
    listed = document.get("MODEL_ARGS")
    if isinstance(listed, dict):
        return _listed(source, _argument_words(listed))
    found: dict[str, Given] = {}
    checked: list[tuple[str, str]] = []
    for section, value in document.items():
        if isinstance(value, dict):
            if section not in _SECTIONS:
                found[f"{section}.*"] = Given(f"{section}.*")
                continue
            fields = {f"{section}.{name}": (str(name), entry) for name, entry in value.items()}
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
                _merge(found, *one)
    check_known(checked, known_fields(), source)
    if "num-query-groups" in found:
        found.setdefault("group-query-attention", found["num-query-groups"])
    model = document.get("model")
    if isinstance(model, dict) and model.get("should_pad_vocab") is False and "vocab-size" in found:
        found["padded-vocab-size"] = found["vocab-size"]
    return Arguments(source, found, is_recipe=isinstance(model, dict))


def _argument_words(listed: Mapping[Any, Any]) -> Iterator[str]:
    """Arguments that stand in a table, ``--name: value``; true is a flag, false no argument at all."""
    for name, value in listed.items():
        if value is False or value is None:
            continue
        yield str(name)
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


def _merge(found: dict[str, Given], name: str, one: Given) -> None:
    old = found.get(name)
    found[name] = one if old is None or old.values == one.values else Given(one.label, one.values, old.values)


def _field(name: str, label: str, value: Any) -> tuple[str, Given] | None:
    """A field of a configuration file as the argument that says the same; None: it says nothing."""
    if value is None or value in ("", [], {}):
        return None
    if name in _INVERTED:
        return None if value is True else (_INVERTED[name], Given(label))
    if name == "activation-func":
        return ("swiglu", Given(label)) if str(value) in ("swiglu", "geglu") else ("activation-func", Given(label))
    if name == "pipeline-model-parallel-layout" and not isinstance(value, str):
        return name, Given(label, (_layout_text(value),))
    name = _RENAMED.get(name, name)
    if isinstance(value, bool):
        return (name, Given(label)) if value else None
    if isinstance(value, dict):
        # An enumeration or a class by its name.
        return name, Given(label, (str(value.get("_name_", value.get("_target_", "?"))),))
    if isinstance(value, list):
        return name, Given(label, (str(value),) if name in JOINED else tuple(map(str, value)))
    return name, Given(label, (str(value),))


def _layout_text(value: Any) -> str:
    """A layout that a recipe has as lists of names, or as the object that Megatron makes of it."""
    if isinstance(value, dict):
        value = value.get("input_data", value.get("layout", ""))
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(stage, list) for stage in value):
        return str(value)
    return "|".join("".join(_LETTERS.get(str(one).rsplit(".", 1)[-1].lower(), str(one)) for one in s) for s in value)
