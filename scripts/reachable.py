"""List definitions of the laboratory that no claim, command, page or benchmark reaches.

``python scripts/reachable.py`` prints one line for each: functions, classes, methods and constants of
``pipeloom_lab`` and ``pipeloom_instances`` that only tests use, or nothing does. ``--unnamed`` lists parts of the
evaluations of which no claim, goal or quoted figure reads a number (pages still show their tables), and search methods
that no evaluation, benchmark or page outside ``docs/notes`` names (``--method`` still takes them).

The search starts at the entry points of ``lab/pyproject.toml``, at the commands, parts and methods that they name, and
at ``benchmarks/`` and ``examples/``. A definition reaches every name in its source that its module defines or imports,
and every attribute of that name in any class or module, so that a listed definition is unused, but an unlisted one may
be, too.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "lab" / "src"
DOTTED = re.compile(r"\w+\.\w+")
"""A function that a worker process calls by name, such as ``"exact.solve_here"``."""
USERS = ("benchmarks", "examples")
"""Folders of programs that users run."""


@dataclass
class Module:
    """The top-level definitions of a file, methods as ``Class.method``, and where its names come from."""

    path: Path
    definitions: dict[str, list[ast.AST]] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    """Local name -> dotted name."""
    statements: list[ast.AST] = field(default_factory=list)
    """What runs on import."""


def read_modules() -> dict[str, Module]:
    """Read every file of the laboratory, by dotted name."""
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = read_module(path)
    return modules


def read_module(path: Path) -> Module:
    """Split a file into definitions, imports and other statements."""
    module = Module(path)
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module.imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            module.imports |= {alias.asname or alias.name: alias.name for alias in node.names if alias.asname}
    for statement in tree.body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.FunctionDef(name=name):
                module.definitions[name] = [statement]
            case ast.ClassDef(name=name, body=body):
                methods = [each for each in body if isinstance(each, ast.FunctionDef)]
                rest = [each for each in body if each not in methods]
                # A base class, which may be elsewhere, calls the methods that it declares.
                called = [each for each in methods if statement.bases or each.name.startswith("__")]
                module.definitions[name] = [*statement.decorator_list, *statement.bases, *rest, *called]
                module.definitions |= {f"{name}.{each.name}": [each] for each in methods if each not in called}
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if isinstance(
                target, ast.Name | ast.Tuple
            ):
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                for each in targets:
                    assert isinstance(each, ast.Name)
                    if each.id != "__all__":
                        module.definitions[each.id] = [statement]
            case _:
                module.statements.append(statement)
    return module


class Search:
    """Marks everything that the roots reach."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules
        self.reached: set[tuple[str, str]] = set()
        self.attributes: set[str] = set()
        self.loaded: set[str] = set()
        self.methods: dict[str, list[tuple[str, str]]] = {}
        for module, each in modules.items():
            for name in each.definitions:
                self.methods.setdefault(name.rpartition(".")[2], []).append((module, name))

    def reach(self, dotted: str) -> None:
        """Mark a module or a definition by its dotted name."""
        if dotted in self.modules:
            self._load(dotted)
            return
        module, _, name = dotted.rpartition(".")
        if module not in self.modules:
            return
        self._load(module)
        if name in self.modules[module].imports:
            self.reach(self.modules[module].imports[name])
        if name in self.modules[module].definitions:
            self._mark(module, name)

    def _load(self, name: str) -> None:
        if name in self.modules and name not in self.loaded:
            self.loaded.add(name)
            self._load(name.rpartition(".")[0])
            for statement in self.modules[name].statements:
                self._follow(name, statement)

    def _mark(self, module: str, name: str) -> None:
        if (module, name) in self.reached:
            return
        self.reached.add((module, name))
        for node in self.modules[module].definitions[name]:
            self._follow(module, node)
        if "." not in name:  # methods whose name was read before anything reached their class
            methods = [each for each in self.modules[module].definitions if each.startswith(f"{name}.")]
            for each in methods:
                if each.rpartition(".")[2] in self.attributes:
                    self._mark(module, each)

    def _follow(self, module: str, node: ast.AST) -> None:
        for name in names_in(node):
            self._read(module, name)
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                self.reach(f"{self.modules[module].imports.get(each.value.id, '')}.{each.attr}")

    def _read(self, module: str, name: str) -> None:
        """Mark what a name or an attribute in a module may stand for."""
        if name in self.modules[module].imports:
            self.reach(self.modules[module].imports[name])
        if name in self.modules[module].definitions:
            self._mark(module, name)
        if name in self.attributes:
            return
        self.attributes.add(name)
        for module, full in self.methods.get(name, ()):
            owner = full.rpartition(".")[0]
            if owner and (module, owner) in self.reached:
                self._mark(module, full)


def names_in(node: ast.AST) -> Iterator[str]:
    """Names and attributes that a piece of source reads, and names in strings, which calls by name may use."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            if DOTTED.fullmatch(each.value):
                yield each.value.rpartition(".")[2]
            elif each.value.startswith("from "):  # a program for another interpreter
                yield from re.findall(r"\w+", each.value)
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def roots(modules: dict[str, Module]) -> Iterator[str]:
    """Dotted names of what users reach."""
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    for group in project["entry-points"].values():
        yield from (value.replace(":", ".") for value in group.values())
    commands = modules["pipeloom_lab.cli"].path.parent
    yield from (f"pipeloom_lab.cli.{path.stem}.{path.stem}" for path in commands.glob("[!_]*.py"))
    for path in commands.glob("[!_]*.py"):
        yield from (f"pipeloom_lab.cli.{path.stem}.{name}" for name in ("HELP", "EPILOG"))
    for paper in papers():
        yield from (f"pipeloom_lab.reproduce.{paper}.{name}" for name in ("PARTS", "FULL"))
    for folder in USERS:
        for path in (ROOT / folder).rglob("*.py"):
            yield from read_module(path).imports.values()


def papers() -> list[str]:
    """Packages that have a file of claims."""
    return sorted(path.parent.name for path in SOURCE.glob("pipeloom_lab/reproduce/*/claims.toml"))


def unreached() -> Iterator[str]:
    """Definitions that nothing reaches, a line each with its length."""
    modules = read_modules()
    search = Search(modules)
    for folder in USERS:
        for path in (ROOT / folder).rglob("*.py"):
            search.attributes |= set(names_in(ast.parse(path.read_text())))
    for root in roots(modules):
        search.reach(root)
    for name, module in modules.items():
        if name not in search.loaded:
            yield f"{module.path.relative_to(ROOT)}: the whole module"
            continue
        for each, nodes in module.definitions.items():
            if (name, each) in search.reached or (name, each.rpartition(".")[0]) not in search.reached | {(name, "")}:
                continue
            first = nodes[0]
            lines = first.end_lineno - first.lineno + 1  # type: ignore[attr-defined]
            yield f"{module.path.relative_to(ROOT)}:{first.lineno} {each} ({lines} lines)"  # type: ignore[attr-defined]


def unquoted_parts() -> Iterator[str]:
    """Parts of which no claim, goal, quoted figure or opening reads a number."""
    from pipeloom_lab.reproduce import PAPERS, parts_of
    from pipeloom_lab.reproduce.claims_file import paper_claims

    for paper in PAPERS:
        declared = paper_claims(paper)
        quantities = [*(each for bars in declared.opening.bars.values() for each in bars)]
        for claim in (*declared.claims, *declared.goals):
            quantities += [*claim.ours, *claim.values.values()]
        quantities += [each for own in declared.own for each in own.ours]
        quoted = {quantity.part for quantity in quantities}
        yield from (f"{paper} {part.name}" for part in parts_of(paper) if part.name not in quoted)


def unnamed_methods() -> Iterator[str]:
    """Search methods of the laboratory that no evaluation, benchmark or page of ``docs`` names."""
    from pipeloom_lab.solvers import METHODS

    evaluations = (SOURCE / "pipeloom_lab" / "reproduce").rglob("*.py")
    paths = [*evaluations, *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").glob("*.md")]
    texts = [path.read_text() for path in paths]
    for name in METHODS:
        if not any(re.search(rf"[`\"]{name}[`\"]", text) for text in texts):
            yield f"method {name}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unnamed", action="store_true", help="list parts and methods that nothing quotes or names")
    lines = [*unquoted_parts(), *unnamed_methods()] if parser.parse_args().unnamed else [*unreached()]
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
