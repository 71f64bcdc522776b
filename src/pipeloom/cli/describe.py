"""`pipeloom describe`: modules, kinds of layers, parameters, operations and saved bytes of a model."""

from __future__ import annotations

from pathlib import Path

import typer

from pipeloom.cli.output import JSON_HELP, check_targets, print_json, print_written, stdout
from pipeloom.errors import InputError
from pipeloom.heartbeat import doing
from pipeloom.integrations.describe import UNITS, document
from pipeloom.integrations.describe import describe as describe_modules
from pipeloom.integrations.models import load_model, trace_model_file
from pipeloom.io import write_text
from pipeloom.limits import MAX_COUNT
from pipeloom.printing import print_line
from pipeloom.report import size_text
from pipeloom.report.any_width import Table
from pipeloom.spec import Workload
from pipeloom.spec.catalog import architecture_toml

HELP = "Describe a model: its modules, kinds of layers, parameters, operations and saved bytes."
EPILOG = (
    "A config.json that the zoo does not have is read from its model's own code in the transformers library. "
    "Example: pipeloom describe config.json --toml model.toml."
)


def describe(
    model: str = typer.Argument(
        ...,
        metavar="MODEL",
        help="A model's name, a Hugging Face config.json or folder, a .toml file, or module:function.",
    ),
    length: int = typer.Option(4096, min=1, max=MAX_COUNT, help="Tokens or patches of the instance that is counted."),
    traced: bool = typer.Option(False, "--traced", help="Read a config.json from its own code even if the zoo has it."),
    toml: Path | None = typer.Option(None, metavar="FILE", help="Write the model as a .toml file."),
    json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    check_targets(toml)
    if toml is not None and toml.suffix != ".toml":
        raise InputError("--toml", f"{toml} does not end in .toml", "name a .toml file")
    doing(f"reading {model}")
    architecture = trace_model_file(model) if traced else load_model(model)
    if toml is not None:
        write_text(toml, architecture_toml(architecture))
    if json:
        print_json(document(architecture, length))
        return
    modules = describe_modules(architecture)
    total = sum(module.parameters for module in modules)
    print_line(f"{architecture.name}: {total / 1e9:.2f}B parameters; {architecture.source}")
    for module in modules:
        unit = UNITS[module.reads]
        joined = f"; {module.joined} rows become one" if module.joined > 1 else ""
        print_line("")
        print_line(f"{module.name}: {module.parameters / 1e9:.3f}B parameters, reads {module.reads}{joined}")
        columns = ("layers", "number", "parameters", f"operations a {unit}", "saved, fused", "eager", "selective")
        table = Table(*columns)
        work = Workload((length,))
        for kind in module.kinds:
            saved = [size_text(round(kind.saved[name].of(work) / length)) for name in ("fused", "eager", "selective")]
            operations = f"{kind.operations.of(work) / length / 1e6:,.1f}M"
            table.add_row(kind.name, str(kind.count), f"{kind.parameters:,}", operations, *saved)
        stdout().print(table)
        for name, streams in (("emits", module.emits), ("takes", module.takes)):
            if streams:
                print_line(f"{name} {', '.join(streams)}")
    print_line("")
    print_line(f"Operations of the forward and saved bytes of one {length}-row instance, for each row.")
    print_written([] if toml is None else [toml])
