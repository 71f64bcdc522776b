"""Catalog: devices, clusters, models and data sets of the zoo, and users' files of the same kinds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from pipeloom.bounds import Number
from pipeloom.conversion import convert
from pipeloom.errors import InputError, located, printable_line
from pipeloom.outputs import check_input
from pipeloom.spec.architecture import Architecture, Layer, ModuleArchitecture
from pipeloom.spec.hardware import ClusterSpec, DeviceSpec, GenerationSpec
from pipeloom.spec.model import Reads
from pipeloom.spec.plain_cluster import is_plain, read_plain
from pipeloom.spec.precision import PRECISIONS
from pipeloom.spec.trainer import TrainerSpec

Kind = Literal["devices", "generations", "efficiencies", "clusters", "trainers", "models", "datasets"]
T = TypeVar("T")


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all entries of one kind."""
    folder = resources.files("pipeloom.spec").joinpath("zoo", kind)
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def model_name(text: str) -> str | None:
    """Return the model of the zoo that a name means, or None.

    An owner before a slash, case, and a suffix ``-Instruct`` or ``-hf`` do not matter.
    """
    name = text.rpartition("/")[2].lower().removesuffix("-hf").removesuffix("-instruct")
    name = read_index().names.get(name, name)
    return name if name in names("models") else None


class ModelIndex(msgspec.Struct, frozen=True):
    """Other names of zoo models, and their names by the digest of a published `config.json`."""

    names: dict[str, str]
    digests: dict[str, str]


@cache
def read_index() -> ModelIndex:
    """Return the index of the zoo's models."""
    data = resources.files("pipeloom.spec").joinpath("zoo", "configs.toml").read_bytes()
    return msgspec.toml.decode(data, type=ModelIndex)


def read(kind: Kind, name: str) -> dict[str, Any]:
    """Return the content of a zoo entry, or of a TOML file if ``name`` ends in ``.toml``."""
    if name.endswith(".toml"):
        path = Path(name)
        # Returns False also for a name that no file can have.
        if not os.path.isfile(path):
            raise InputError(printable_line(name), "is not a file")
        check_input(path)
        data = path.read_bytes()
    else:
        if name not in names(kind):
            raise InputError(
                printable_line(f"{kind} {name!r}"),
                "is unknown",
                f"the zoo has {', '.join(names(kind))}; or give a .toml file",
            )
        data = resources.files("pipeloom.spec").joinpath("zoo", kind, f"{name}.toml").read_bytes()
    try:
        content: dict[str, Any] = msgspec.toml.decode(data)
    # ValueError: not UTF-8, or a number of thousands of digits.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InputError(name, f"is not TOML: {error}") from error
    return content


def load_device(name: str) -> DeviceSpec:
    """Load a device by its name in the zoo or from a file.

    In a file, ``efficiency`` and ``generation`` are tables, or the name or file of one.
    """
    content = read("devices", name)
    if isinstance(content.get("efficiency"), str):
        content["efficiency"] = read("efficiencies", content["efficiency"])
    if isinstance(content.get("generation"), str):
        content["generation"] = {"name": content["generation"], **read("generations", content["generation"])}
    return convert(content, DeviceSpec, name)


def load_generation(name: str) -> GenerationSpec:
    """Load a generation of devices by its name in the zoo or from a file."""
    return convert({"name": name, **read("generations", name)}, GenerationSpec, name)


def load_trainer(name: str) -> TrainerSpec:
    """Load a trainer by its name in the zoo or from a file. A precision of products may follow: ``"megatron mxfp8"``.

    Raise `InputError` if the trainer or the precision is unknown, or the file is invalid.
    """
    base, _, last = name.rpartition(" ")
    for precision in PRECISIONS:
        if base and last == precision:
            return msgspec.structs.replace(load_trainer(base), precision=precision)
    if base in names("trainers"):
        raise InputError(f"trainer {name!r}", f"{last!r} is no precision", f"known are {', '.join(PRECISIONS)}")
    return convert(read("trainers", name), TrainerSpec, name)


def load_cluster(name: str) -> ClusterSpec:
    """Load a cluster by its name in the zoo, from a file, or from its short notation (`read_plain`).

    In a file, ``device`` is a table, or the name or file of a device.
    """
    if is_plain(name):
        return _plain_cluster(name)
    content = read("clusters", name)
    if isinstance(content.get("device"), str):
        content["device"] = msgspec.to_builtins(load_device(content["device"]))
    return convert(content, ClusterSpec, name)


def _plain_cluster(text: str) -> ClusterSpec:
    plain = read_plain(text)
    if plain.device not in names("devices"):
        raise InputError(
            f"cluster {text!r}",
            f"device {plain.device!r} is unknown",
            f"known are {', '.join(names('devices'))}; for another, name it in a .toml file of a cluster",
        )
    return plain.cluster(text, load_device(plain.device))


def device_toml(device: DeviceSpec) -> str:
    """Return a device as TOML, which `load_device` can read."""
    content = msgspec.to_builtins(device)
    generation = content.pop("generation")
    del content["efficiency"]
    lines = [f"{key} = {_toml(value)}" for key, value in content.items()]
    if device.generation != GenerationSpec():
        lines += ["", "[generation]", *(f"{key} = {_toml(value)}" for key, value in generation.items())]
    for part, kinds in device.efficiency.items():
        lines += ["", f"[efficiency.{part}]", *(f"{_toml(kind)} = {_toml(shares)}" for kind, shares in kinds.items())]
    return "\n".join(lines) + "\n"


def architecture_toml(architecture: Architecture) -> str:
    """Return a model as TOML, which `load_architecture` can read.

    A layer that occurs several times is written once, in the table ``kinds``.
    """
    places = [layer for module in architecture.modules for layer in (*module.layers, *module.unused)]
    used = Counter(_kind(layer) for layer in places)
    kinds = {kind: f"layer_{number}" for number, kind in enumerate(k for k, times in used.items() if times > 1)}
    lines = _fields(architecture, ("modules",))
    if kinds:
        lines += ["", "[kinds]", *(f"{name} = {_toml(kind)}" for kind, name in kinds.items())]
    for module in architecture.modules:
        lines += ["", "[[module]]", *_fields(module, ("layers", "unused"))]
        for key in ("layers", "unused"):
            layers = getattr(module, key)
            if layers:
                lines += [f"{key} = [", *(f"  {_toml(_place(layer, kinds))}," for layer in layers), "]"]
    return "\n".join(lines) + "\n"


def _kind(layer: Layer) -> Layer:
    """Return a layer without its place in the model: how often it follows itself, and its streams."""
    # What computes a stream needs its name.
    streams = ("takes",) if getattr(layer, "tap", ()) or getattr(layer, "taps", ()) else ("emits", "takes")
    changed = {"count": 1} | dict.fromkeys(streams, None)
    return msgspec.structs.replace(layer, **{k: v for k, v in changed.items() if k in layer.__struct_fields__})


def _place(layer: Layer, kinds: Mapping[Layer, str]) -> Any:
    """Return a layer, or the name of its kind and what differs at its place."""
    kind = _kind(layer)
    if kind not in kinds:
        return layer
    changed = {name: getattr(layer, name) for name in ("count", "emits", "takes") if name in layer.__struct_fields__}
    return {"kind": kinds[kind]} | {k: v for k, v in changed.items() if v != getattr(kind, k)}


def _fields(value: msgspec.Struct, omitted: Sequence[str] = ()) -> list[str]:
    return [f"{key} = {_toml(each)}" for key, each in _stated(value).items() if key not in omitted]


def _stated(value: Any) -> dict[str, Any]:
    """Return the fields of a struct that differ from their defaults, after its tag."""
    config = value.__struct_config__
    found = {config.tag_field: config.tag} if config.tag is not None else {}
    for field in msgspec.structs.fields(value):
        own = getattr(value, field.name)
        if field.default is msgspec.NODEFAULT or own != field.default:
            found[field.encode_name] = own
    return found


def _toml(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        value = _stated(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items() if each is not None) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # a JSON string is a TOML basic string
    if isinstance(value, tuple):  # of layers, or of coefficients: whole ones without a decimal point
        value = [int(v) if isinstance(v, float) and v.is_integer() else v for v in value]
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)


def _expand(content: dict[str, Any]) -> None:
    """Replace each layer that names its kind by the layer of the table ``kinds``, with what differs at its place."""
    kinds = content.pop("kinds", None)
    if not isinstance(kinds, dict) or not isinstance(content["modules"], list):
        return
    for module in content["modules"]:
        for key in ("layers", "unused"):
            layers = module.get(key) if isinstance(module, dict) else None
            if isinstance(layers, list):
                module[key] = [_expanded(layer, kinds) for layer in layers]


def _expanded(layer: Any, kinds: dict[str, Any]) -> Any:
    if not isinstance(layer, dict) or "kind" not in layer:
        return layer
    changed = {key: value for key, value in layer.items() if key != "kind"}
    kind = kinds.get(layer["kind"]) if isinstance(layer["kind"], str) else None
    if not isinstance(kind, dict):
        raise InputError("kind", f"{layer['kind']!r} is not in [kinds]", f"known are {', '.join(kinds)}")
    return kind | changed


class CombinedModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A module of a combined model: the one module of another model, renamed, with layers dropped or appended."""

    model: str
    name: str
    reads: Reads
    after: tuple[str, ...] = ()
    frozen: bool = False
    drop_last: Number = 0
    """Number of layers to drop at the end, for example an unused head."""
    append: tuple[Layer, ...] = ()
    """Layers to append, for example an adapter."""


class Combination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that consists of modules of other models."""

    name: str
    source: str
    part: tuple[CombinedModule, ...]


def load_architecture(name: str) -> Architecture:
    """Load a model, possibly a combination, by its name in the zoo or from a file.

    Raises
    ------
    InputError
        One line with the file, the field and the problem.
    """
    return _load_architecture(name, ())


def _load_architecture(name: str, within: tuple[str, ...]) -> Architecture:
    """Load a model that is a part of the models ``within``, each a part of the one before it."""
    content = read("models", name)
    if "part" not in content:
        content["modules"] = content.pop("module", content.get("modules", []))
        with located(name):
            _expand(content)
        return convert(content, Architecture, name)
    combination = convert(content, Combination, name)
    modules, within = [], (*within, name)
    for part in combination.part:
        if part.model in within:
            raise InputError(f"{name}: part {part.name!r}", f"{part.model!r} contains itself", "name another model")
        source = _load_architecture(part.model, within)
        if len(source.modules) != 1:
            raise InputError(
                f"{name}: part {part.name!r}", f"{part.model!r} has {len(source.modules)} modules, not one"
            )
        with located(f"{name}: part {part.name!r}"):
            kept = _without_last(source.modules[0].layers, part.drop_last)
        modules.append(ModuleArchitecture(part.name, part.reads, (*kept, *part.append), part.after, part.frozen))
    return Architecture(combination.name, combination.source, tuple(modules))


def _without_last(layers: Sequence[Layer], number: int) -> list[Layer]:
    """Return the layers without the last ``number``, of which one entry may have several."""
    total = sum(getattr(layer, "count", 1) for layer in layers)
    if number >= total:
        raise InputError("drop_last", f"is {number}, but {total} layers are there", f"give at most {total - 1}")
    kept = list(layers)
    while number:
        last = kept.pop()
        count = getattr(last, "count", 1)
        if count > number:
            kept.append(msgspec.structs.replace(last, count=count - number))
        number -= min(count, number)
    return kept
