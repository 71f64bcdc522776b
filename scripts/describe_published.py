"""Describe published models, and write them into the zoo, from which validation and planning read them without torch.

Usage: ``python scripts/describe_published.py [NAME ...]``. ``scripts/published_models.json`` has the fields of their
configurations that affect costs: of models that are not in the folder of `scripts/read_configurations.py`. They are
read from their own code in the transformers library.
Modules that a source leaves out (``without``) are dropped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from pipeloom.integrations.models import load_model
from pipeloom.spec.architecture import Architecture
from pipeloom.spec.catalog import architecture_toml

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT / "src" / "pipeloom" / "spec" / "zoo" / "models"


def main(names: list[str]) -> None:
    """Write the models with these names, or all."""
    models = json.loads((Path(__file__).parent / "published_models.json").read_text())
    for name in names or models:
        architecture = described(name, models[name])
        (ZOO / f"{name}.toml").write_text(architecture_toml(architecture))
        print(f"{name}: {len(architecture.modules)} modules", flush=True)


def described(name: str, model: dict[str, object]) -> Architecture:
    """Return the description of a configuration."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(model["config"]))
        found = load_model(str(path))
    without = model.get("without", ())
    modules = tuple(each for each in found.modules if each.name not in without)  # type: ignore[operator]
    modules = tuple(
        msgspec.structs.replace(each, after=tuple(one for one in each.after if one not in without))  # type: ignore[operator]
        for each in modules
    )
    return msgspec.structs.replace(found, name=name, source=f"{model['source']}; {found.source}", modules=modules)


if __name__ == "__main__":
    main(sys.argv[1:])
