"""`pipeloom doctor`: what is installed, what is missing, and whether kernels are compiled."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import typer

from pipeloom import __version__
from pipeloom.cli.output import JSON_HELP, print_json, stdout
from pipeloom.compiled.decorators import READ_ONLY
from pipeloom.kernels import ALL, num_cores
from pipeloom.printing import print_line
from pipeloom.report.any_width import Table

HELP = """\
Show what is installed: versions, extras, devices, and whether the kernels are compiled.

Prints what is missing, and the command that installs it. Paste the output into a bug report.
"""
EPILOG = "Example: pipeloom doctor. Nothing is changed, and the exit code is 0 even if extras are missing."
_INTERNAL = frozenset(("dev", "docs"))
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?(?P<bounds>[^;]*)(?:;.*extra == ['\"](?P<extra>[\w-]+)['\"])?"
)


class Package(NamedTuple):
    """A package that Pipeloom or an extra of it requires; ``installed`` is its version, or empty."""

    name: str
    extra: str
    bounds: str
    installed: str

    @property
    def suits(self) -> bool:
        """Whether the installed version is within the bounds. True if it is not installed, or nothing can compare."""
        if not self.installed or find_spec("packaging") is None:
            return True
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(self.bounds).contains(self.installed, prereleases=True)


def doctor(json: bool = typer.Option(False, "--json", help=JSON_HELP)) -> None:
    packages = required_packages()
    missing = len(ALL.missing())
    document: dict[str, Any] = {
        "pipeloom": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": num_cores(),
        "kernels_missing": missing,
        "kernel_folders": os.environ.get(READ_ONLY, "").split(os.pathsep) if os.environ.get(READ_ONLY) else [],
        "torch": _torch(),
        "packages": [package._asdict() | {"suits": package.suits} for package in packages],
    }
    if json:
        print_json(document)
        return
    print_line(f"pipeloom {__version__}, Python {document['python']}, {document['system']}, {document['cores']} cores")
    print_line("kernels: all compiled" if not missing else f"kernels: {missing} not compiled; run pipeloom warmup")
    print_line(f"torch: {document['torch']['text']}")
    table = Table("package", "for", "wanted", "installed", box=None, left=range(4))
    for package in packages:
        table.add_row(package.name, package.extra or "pipeloom", package.bounds or "any", package.installed or "no")
    stdout().print(table)
    for extra in dict.fromkeys(package.extra for package in packages if not package.installed):
        print_line(f"missing: pip install 'pipeloom{f'[{extra}]' if extra else ''}'")
    for package in packages:
        if not package.suits:
            print_line(f"unsuitable: {package.name} {package.installed}; pip install '{package.name}{package.bounds}'")


def required_packages() -> list[Package]:
    """Return the packages that Pipeloom and its extras require, without those for its developers."""
    found = []
    for requirement in metadata.requires("pipeloom") or ():
        parts = _REQUIREMENT.match(requirement)
        if parts is None or parts["name"] == "pipeloom" or parts["extra"] in _INTERNAL:
            continue
        try:
            installed = metadata.version(parts["name"])
        except metadata.PackageNotFoundError:
            installed = ""
        found.append(Package(parts["name"], parts["extra"] or "", parts["bounds"].strip(" ()"), installed))
    return found


def _torch() -> dict[str, Any]:
    """Return the version of torch and the accelerators that it finds."""
    if find_spec("torch") is None:
        return {"text": "not installed: planning works, training does not", "version": None, "devices": []}
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    names, found = list[str](), "no accelerator: ranks run on CPUs"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        module: Any = torch.get_device_module(kind)
        names = [str(module.get_device_name(i)) for i in range(torch.accelerator.device_count())]
        found = f"{len(names)} x {names[0]}"
    return {"text": f"{torch.__version__} ({build}), {found}", "version": torch.__version__, "devices": names}
