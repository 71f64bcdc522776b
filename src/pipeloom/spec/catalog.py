"""Catalog: devices, clusters, models and data sets of the zoo, and users' files of the same kinds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from pipeloom.bounds import Number
from pipeloom.conversion import convert
from pipeloom.errors import InputError, printable_line
from pipeloom.outputs import check_input
from pipeloom.spec.architecture import Architecture, Layer, ModuleArchitecture, layer_mixers
from pipeloom.spec.hardware import ClusterSpec, DeviceSpec, GenerationSpec
from pipeloom.spec.model import Reads
from pipeloom.spec.plain_cluster import is_plain, read_plain
from pipeloom.spec.trainer import TrainerSpec

Kind = Literal["devices", "generations", "efficiencies", "clusters", "trainers", "models", "datasets"]
T = TypeVar("T")
WIDTH = 110
"""Characters of a line of names in the TOML file of a model."""


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all entries of one kind."""
    folder = resources.files("pipeloom.spec").joinpath("zoo", kind)
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


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
    """Load a trainer by its name in the zoo or from a file."""
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
    return ClusterSpec(
        name=text,
        source=plain.source,
        device=load_device(plain.device),
        devices_per_node=plain.devices_per_node,
        num_nodes=plain.num_nodes,
        nic_bytes_per_s=plain.nic_bytes_per_s,
        host_memory_bytes=plain.host_memory_bytes,
        host_bytes_per_s=plain.host_bytes_per_s,
    )


def device_toml(device: DeviceSpec) -> str:
    """Return a device as TOML, which `load_device` can read."""
    content = msgspec.to_builtins(device)
    tables, generation = content.pop("efficiency"), content.pop("generation")
    lines = [f"{key} = {_toml(value)}" for key, value in content.items()]
    if device.generation != GenerationSpec():
        lines += ["", "[generation]", *(f"{key} = {_toml(value)}" for key, value in generation.items())]
    for part, kinds in tables.items():
        lines += ["", f"[efficiency.{part}]"]
        for kind, shares in kinds.items():
            inner = ", ".join(f"{metric} = {_toml(value)}" for metric, value in shares.items() if value != 1.0)
            lines.append(f"{_toml(kind)} = {{ {inner} }}")
    return "\n".join(lines) + "\n"


def architecture_toml(architecture: Architecture) -> str:
    """Return a model as TOML, which `load_architecture` can read. Fields with their default value are left out."""
    lines = [f"{key} = {_toml(value)}" for key, value in _stated(architecture).items() if key != "modules"]
    for module in architecture.modules:
        kinds = _recurring(module.layers)
        lines += ["", "[[module]]"]
        for key, value in _stated(module).items():
            if key in ("layers", "unused"):
                each = [_toml(kinds[layer] if layer in kinds else _stated(layer)) for layer in getattr(module, key)]
                lines += [f"{key} = [", *_rows(each), "]"]
            else:
                lines.append(f"{key} = {_toml(value)}")
        if kinds:
            lines += ["", "[module.kinds]"]
            lines += [f"{_toml(name)} = {_toml(_stated(layer))}" for layer, name in kinds.items()]
    return "\n".join(lines) + "\n"


def _rows(entries: Sequence[str]) -> list[str]:
    """Return the lines of an array: names side by side, tables, which TOML does not break, one a line."""
    rows = ["  "]
    for entry in entries:
        if entry[0] != '"' or rows[-1].lstrip()[:1] != '"' or len(rows[-1]) + len(entry) > WIDTH:
            rows.append("  ")
        rows[-1] += f"{entry}, "
    return [row.rstrip() for row in rows[1:]]


def _recurring(layers: Sequence[Layer]) -> dict[Layer, str]:
    """Return a name for each layer that occurs several times."""
    names: dict[Layer, str] = {}
    for layer, count in Counter(layers).items():
        if count > 1:
            mixers = (mixer.__struct_config__.tag for mixer in layer_mixers(layer))
            name = getattr(layer, "name", "") or "-".join(map(str, mixers)) or type(layer).__name__
            number = sum(each.split(" ")[0] == name for each in names.values())
            names[layer] = f"{name} {number + 1}" if number else name
    return names


def _stated(value: Any) -> Any:
    """Return a struct as a table without fields that have their default value."""
    if isinstance(value, list | tuple):
        return [_stated(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    config = value.__struct_config__
    table = {config.tag_field: config.tag} if config.tag_field else {}
    for field in msgspec.structs.fields(value):
        found = getattr(value, field.name)
        if field.default is msgspec.NODEFAULT or found != field.default:
            table[field.encode_name] = _stated(found)
    return table


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items() if each is not None) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()  # a JSON string is a TOML basic string
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)


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


def _resolve_kinds(modules: Any, name: str) -> None:
    """Replace names of layers in each module by the layers that its table ``kinds`` has under these names."""
    for module in modules if isinstance(modules, list) else ():
        if not isinstance(module, dict) or "kinds" not in module:
            continue
        kinds, layers = module.pop("kinds"), module.get("layers")
        if not isinstance(kinds, dict) or not isinstance(layers, list):
            raise InputError(f"{name}: module.kinds", "is no table of layers", "write each kind under a name")
        for i, layer in enumerate(layers):
            if isinstance(layer, str):
                if layer not in kinds:
                    known = ", ".join(kinds)
                    raise InputError(f"{name}: module.layers[{i}]", f"{layer!r} is no kind", f"kinds has {known}")
                layers[i] = kinds[layer]


def _load_architecture(name: str, within: tuple[str, ...]) -> Architecture:
    """Load a model that is a part of the models ``within``, each a part of the one before it."""
    content = read("models", name)
    if "part" not in content:
        content["modules"] = content.pop("module", content.get("modules", []))
        _resolve_kinds(content["modules"], name)
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
        layers = source.modules[0].layers
        kept = layers[: len(layers) - part.drop_last]
        modules.append(ModuleArchitecture(part.name, part.reads, (*kept, *part.append), part.after, part.frozen))
    return Architecture(combination.name, combination.source, tuple(modules))
