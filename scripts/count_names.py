"""Count the names of this project that one must know to write some files, for example a move of the search.

Counted are the functions, classes and constants that the files import from the project, and, transitively, the
attributes and methods of these classes and the project's names in their types and in signatures. Names that only code
inside of functions uses are not counted. Without annotations, types are unknown.

    python scripts/count_names.py src/pipeloom/search/moves/exchange_microbatches.py
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

SRC = Path("src")


@cache
def tree_of(module: str) -> ast.Module | None:
    """Return the code of a module of the project."""
    base = SRC.joinpath(*module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


@cache
def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """Return where the names that a module imports from the project come from."""
    found = {}
    for node in ast.walk(tree_of(module) or ast.Module([], [])):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pipeloom"):
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return found


def definition(module: str, name: str) -> tuple[str, ast.AST] | None:
    """Return the module and the statement that define a name, through packages that pass it on."""
    tree = tree_of(module)
    for node in tree.body if tree else []:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return module, node
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return module, node
    passed_on = imports_of(module).get(name)
    return definition(*passed_on) if passed_on and passed_on != (module, name) else None


def types_in(node: ast.AST | None) -> set[str]:
    """Return the names in an annotation, which may be a string."""
    found: set[str] = set()
    for each in ast.walk(node) if node is not None else []:
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found |= types_in(ast.parse(each.value, mode="eval"))
    return found


def signature(node: ast.FunctionDef) -> set[str]:
    """Return the names in the annotations of a function."""
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return set().union(types_in(node.returns), *(types_in(each.annotation) for each in arguments))


def members(node: ast.ClassDef) -> dict[str, set[str]]:
    """Return the public attributes and methods of a class, and the names in their types."""
    found: dict[str, set[str]] = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = types_in(each.annotation)
        elif isinstance(each, ast.FunctionDef):
            found[each.name] = signature(each)
            for inner in ast.walk(each) if each.name == "__init__" else []:
                if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", "") == "self":
                    found.setdefault(inner.attr, set())
    return {name: types for name, types in found.items() if not name.startswith("_")}


def names_of(file: Path) -> set[str]:
    """Return the names that one must know, with the class of attributes and methods."""
    module = ".".join(file.with_suffix("").relative_to(SRC).parts)
    known: set[str] = set()
    queue = [(home, name) for home, name in imports_of(module).values()]
    while queue:
        home, name = queue.pop()
        found = definition(home, name)
        if found is None or name in known:
            continue
        known.add(name)
        where, node = found
        types: set[str] = set()
        if isinstance(node, ast.FunctionDef):
            types = signature(node)
        elif isinstance(node, ast.ClassDef):
            each = members(node)
            known |= {f"{name}.{member}" for member in each}
            types = set().union(*each.values(), *map(types_in, node.bases))
        queue += [(where, each) for each in types]
    return known


if __name__ == "__main__":
    files = [Path(each).resolve().relative_to(Path.cwd()) for each in sys.argv[1:]]
    needed = set().union(*map(names_of, files))
    print(f"{len(needed)} names: {', '.join(sorted(needed))}")
