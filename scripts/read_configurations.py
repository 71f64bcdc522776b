"""Read every published `config.json` of a folder from its model's own code: ``read_configurations.py FOLDER [--zoo]``.

Prints a table: whether each configuration is read, and whether the parameters are those of the library's own class.
Configurations that differ only in fields without layers or sizes, such as the precision of stored weights, are read
once.

``--zoo`` writes each model that was read and that the zoo does not have as a TOML file of the zoo, the index of
published configurations (`spec/zoo/configs.toml`), and the table of `docs/zoo-models.md`. Models whose modules are
equal are one file: the index names the others.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipeloom.emulator import count_parameters, module_parameters
from pipeloom.errors import InputError
from pipeloom.integrations.configs import check_config, config_digest, read_config
from pipeloom.integrations.tracing.architecture import trace_model
from pipeloom.integrations.tracing.build import build
from pipeloom.spec import catalog
from pipeloom.spec.architecture import Architecture, ModuleArchitecture, TracedLayer

ROOT = Path(__file__).parent.parent
ZOO = ROOT / "src" / "pipeloom" / "spec" / "zoo"
PAGE = ROOT / "docs" / "zoo-models.md"
_SUFFIXES = re.compile(r"(-(instruct|it|hf|base|base-8k|bf16|fp8|nvfp4|static-pertensor|v0\.1))+$")
"""Ends of a published name that say how the model was trained or stored, not what it is."""


@dataclass
class Reading:
    """One published configuration, and what was read from it."""

    published: str
    """Owner and name."""
    config: dict[str, Any]
    architecture: Architecture | None = None
    problem: str = ""
    parameters: int = 0
    """Those of the library's class."""
    seconds: float = 0.0
    same_as: str = ""
    """An earlier configuration with the same fields."""

    @property
    def name(self) -> str:
        plain = self.published.rpartition("/")[2].lower()
        return _SUFFIXES.sub("", plain.removeprefix("meta-").removeprefix("nvidia-"))


def main() -> None:
    folder = Path(sys.argv[1])
    readings: list[Reading] = []
    first: dict[str, Reading] = {}
    for file in sorted(folder.glob("*.json")):
        config = read_config(file)
        if "model_type" not in config:
            continue  # settings of a quantization
        published = file.stem.removesuffix("_config").replace("--", "/")
        reading = Reading(published, config)
        known = first.setdefault(config_digest(config), reading)
        if known is reading:
            _read(reading)
        else:
            reading.architecture, reading.problem, reading.parameters = (
                known.architecture,
                known.problem,
                known.parameters,
            )
            reading.same_as = known.published
        readings.append(reading)
        print(_row(reading), flush=True)
    read = [each for each in readings if each.architecture is not None]
    equal = sum(_counted(each) == each.parameters for each in read)
    print(f"\n{len(read)} of {len(readings)} read, {equal} with the library's parameters; {len(first)} differ")
    if "--zoo" in sys.argv:
        _write_zoo(read)


def _read(reading: Reading) -> None:
    began = time.process_time()
    try:
        check_config(reading.config)
        model, how = build(reading.config)
        reading.parameters = sum(parameter.numel() for parameter in model.parameters())
        reading.architecture = trace_model(model, reading.name, how, reading.config)
    except InputError as error:
        reading.problem = str(error)
    reading.seconds = time.process_time() - began


def _counted(reading: Reading) -> int:
    return 0 if reading.architecture is None else count_parameters(reading.architecture)


def _row(reading: Reading) -> str:
    if reading.architecture is None:
        result = f"refused | {reading.problem}"
    else:
        difference = _counted(reading) - reading.parameters
        result = f"{reading.parameters / 1e9:.3f}B | {'equal' if not difference else f'{difference:+,}'}"
    last = f"as {reading.same_as}" if reading.same_as else f"{reading.seconds:.1f} s"
    return f"| {reading.published} | {reading.config['model_type']} | {result} | {last} |"


def _write_zoo(readings: list[Reading]) -> None:
    """Write models and index. Of models with one name, that with most modules keeps it."""
    known = set(catalog.names("models"))
    own = {name for name in known if _is_generated(name)}
    models: dict[Any, str] = {_modules(each): each.name for each in readings if each.name in known - own}
    digests: dict[str, str] = {}
    names: dict[str, str] = {}
    for reading in sorted(readings, key=lambda each: -len(_modules(each))):
        modules = _modules(reading)
        if modules not in models:
            name = f"{reading.name}-text" if reading.name in models.values() else reading.name
            models[modules] = name
            text = catalog.architecture_toml(msgspec.structs.replace(reading.architecture, name=name))
            (ZOO / "models" / f"{name}.toml").write_text(text, encoding="utf-8")
        name = digests[config_digest(reading.config)] = models[modules]
        if reading.name not in models.values():
            names[reading.name] = name
    for name in own - set(models.values()):
        (ZOO / "models" / f"{name}.toml").unlink()
    names = {name: same for name, same in names.items() if name not in models.values()}
    lines = ["# Written by scripts/read_configurations.py.", "", "# Names of models that equal another one."]
    lines += ["[names]", *(f'"{name}" = "{same}"' for name, same in sorted(names.items()))]
    lines += ["", "# Digests of published configurations.", "[digests]"]
    lines += [f'{digest} = "{name}"' for digest, name in sorted(digests.items(), key=lambda each: each[::-1])]
    (ZOO / "configs.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_page(set(models.values()) - (known - own), names)


def _modules(reading: Reading) -> tuple[ModuleArchitecture, ...]:
    return () if reading.architecture is None else reading.architecture.modules


def _is_generated(name: str) -> bool:
    """Return whether this script wrote a model. `scripts/describe_published.py` writes others."""
    others = json.loads((Path(__file__).parent / "published_models.json").read_text("utf-8"))
    return "read from its own code" in catalog.load_architecture(name).source and name not in others


def _write_page(generated: set[str], names: dict[str, str]) -> None:
    """Replace the table of the page."""
    rows = []
    for name in sorted(generated):
        architecture = catalog.load_architecture(name)
        others = ", ".join(sorted(other for other, same in names.items() if same == name))
        kind = re.sub(r".*(?:, class |, as )", "", architecture.source)
        sizes = ", ".join(f"{module} {size / 1e9:.2f}B" for module, size in module_parameters(architecture).items())
        layers = [layer for module in architecture.modules for layer in module.layers]
        blocks = [layer for layer in layers if isinstance(layer, TracedLayer) and layer.block]
        kinds = len({(layer.name, layer.operators) for layer in blocks})
        rows.append(f"| `{name}` | {others} | {sizes} | {kinds} | {kind} |")
    head = ["| name | also | parameters of its modules | kinds of blocks | class |", "|---|---|---|---|---|"]
    begin, end = "<!-- begin: read_configurations.py -->", "<!-- end -->"
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    table = "\n".join((*head, *rows))
    PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
