"""Hold the source to what import contracts cannot say; part of ``make lint``.

No circle between files, type-checking imports included. No line kept from the formatter. No test of the product that
imports the laboratory. No retired word in a document or in a name. No path in docs/architecture.md that does not
exist. No docstring that describes a parameter or field that does not exist. Outside compiled kernels, no function of
more than eighty lines, seven parameters by position, or twelve in all: keyword arguments read better than a container
made only to pass a count. What a command line declares as an option or argument is not counted as a parameter, since
every option is one. No class that sets more than twelve attributes on ``self``.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src", ROOT / "lab" / "src")
PACKAGES = ("pipeloom", "pipeloom_instances", "pipeloom_lab")
MOST_POSITIONAL, MOST_PARAMETERS, MOST_LINES, MOST_ATTRIBUTES = 7, 12, 80, 12
WIDE_FUNCTIONS = {
    ("src/pipeloom/training/one_call.py", "fit"): "the public entry point, as torch's DataLoader",
    (
        "src/pipeloom/integrations/megatron/core/forward_backward.py",
        "planned_forward_backward",
    ): "the signature of Megatron Core's functions, which it replaces",
}
"""Functions that may have more parameters, each described in a line or two of the docstring, and why."""
RETIRED = re.compile(r"\b(dealt|dealing|leanest|glance|hasty|wishes|reckoned|told)\b", re.IGNORECASE)
"""Words of documents and names that have a standard term instead; see the glossary."""
DESCRIBED = re.compile(r"^(?:Parameters|Attributes)\n-+\n(.*?)(?:\n\n\S|\Z)", re.DOTALL | re.MULTILINE)
"""The section of a docstring that describes parameters or fields."""
COMPLETE_BASES = ("NamedTuple", "Protocol", "Enum", "msgspec.Struct")
"""Bases of a class from which it inherits no field that its docstring describes."""
RETIRED_NAMES = {
    "arranged": "cooptimized",
    "deal": "assign_to_replicas",
    "deals": "uses_encoder_dp",
    "hand_out": "scatter_plan",
    "head_tail": "longest_paths",
    "heads_and_tails": "longest_paths",
    "job_of_task": "component_of_task",
    "job_row": "component_row",
    "ladder": "pareto_steps",
    "num_jobs": "num_components",
    "room_bytes": "headroom_bytes",
    "shaking": "perturbation",
    "spare_bytes": "reserve_bytes",
    "truths": "booleans",
}
"""Identifiers that use a word in a sense for which there is a standard term. The word is right in other senses."""
FILE_FIELDS = ("dealing_share",)
"""Fields of files, which keep their names."""
GENERATED = ("benchmarks.md", "results/index.md", "results/dip.md", "results/pipetune.md", "results/adaptis.md")


def circles() -> Iterator[str]:
    """Files that import each other, directly or through others."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    for group in _strongly_connected(imports):
        yield "a circle: " + ", ".join(sorted(group))


def _strongly_connected(imports: dict[str, set[str]]) -> Iterator[set[str]]:
    """Groups of at least two that reach each other (Kosaraju's two walks, without recursion)."""
    reverse: dict[str, set[str]] = {module: set() for module in imports}
    for module, targets in imports.items():
        for target in targets:
            reverse[target].add(module)
    done: list[str] = []
    seen: set[str] = set()
    for root in sorted(imports):
        stack = [(root, iter(imports[root]))] if root not in seen else []
        seen.add(root)
        while stack:
            module, rest = stack[-1]
            step = next((target for target in rest if target not in seen), None)
            if step is None:
                done.append(stack.pop()[0])
            else:
                seen.add(step)
                stack.append((step, iter(imports[step])))
    left = set(imports)
    for root in reversed(done):
        group, todo = set(), [root]
        while todo:
            module = todo.pop()
            if module in left:
                left.remove(module)
                group.add(module)
                todo += reverse[module]
        if len(group) > 1:
            yield group


def wide_functions(path: Path, tree: ast.Module) -> Iterator[str]:
    """Functions with too many parameters or lines."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if (path.relative_to(ROOT).as_posix(), node.name) in WIDE_FUNCTIONS:
            continue
        where, (positional, total) = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", _num_parameters(node)
        if positional > MOST_POSITIONAL:
            remedy = "make some keyword-only, which callers read more easily than a container made to pass this check"
            yield f"{where}: {positional} parameters may be given by position, at most {MOST_POSITIONAL}; {remedy}"
        if total > MOST_PARAMETERS:
            yield f"{where}: {total} parameters, at most {MOST_PARAMETERS}; split the function"
        if (lines := _num_lines(node)) > MOST_LINES:
            yield f"{where}: {lines} lines, at most {MOST_LINES}"


def wide_classes(path: Path, tree: ast.Module) -> Iterator[str]:
    """Classes that set too many attributes on ``self``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        count, file = len(_attributes_set(node)), path.relative_to(ROOT).as_posix()
        if count > MOST_ATTRIBUTES:
            yield f"{file}:{node.lineno} {node.name}: sets {count} attributes on self, at most {MOST_ATTRIBUTES}"


def _attributes_set(node: ast.ClassDef) -> set[str]:
    """Names of the attributes of ``self`` that any method assigns to."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """Parameters by position, and all, but for ``self``, ``cls`` and what a command line declares."""
    places = [argument for argument in (*node.args.posonlyargs, *node.args.args) if argument.arg not in ("self", "cls")]
    positional = len(places) - sum(map(_is_option, node.args.defaults))
    return positional, positional + len(node.args.kwonlyargs) - sum(map(_is_option, node.args.kw_defaults))


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, but for a declaration of options."""
    assert node.end_lineno is not None
    begin = node.lineno
    if any(_is_option(default) for default in [*node.args.defaults, *node.args.kw_defaults]):
        begin = node.body[0].lineno - 1
    return node.end_lineno - begin + 1


def _is_option(default: ast.expr | None) -> bool:
    return isinstance(default, ast.Call) and ast.unparse(default.func) in ("typer.Option", "typer.Argument")


def stale_descriptions(path: Path, tree: ast.Module) -> Iterator[str]:
    """Names in sections of docstrings that are neither a parameter of the function nor a member of the class."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        section = DESCRIBED.search(ast.get_docstring(node) or "")
        if section is None:
            continue
        if isinstance(node, ast.ClassDef):
            if any(ast.unparse(base).partition("[")[0] not in COMPLETE_BASES for base in node.bases):
                continue
            known = _members(node)
        else:
            known = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        entries = re.findall(r"^([*\w]+(?:, [*\w]+)*)(?: :.*)?$", section[1], re.MULTILINE)
        for name in (name.lstrip("*") for entry in entries for name in entry.split(", ")):
            if name not in known:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: describes {name!r}, which does not exist"


def _members(node: ast.ClassDef) -> set[str]:
    """Names that a class declares or sets on ``self``, and parameters of its constructor."""
    names = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names |= {method.name} | {each.attr for each in ast.walk(method) if isinstance(each, ast.Attribute)}
            if method.name == "__init__":
                names |= {each.arg for each in ast.walk(method.args) if isinstance(each, ast.arg)}
    return names


def retired_words() -> Iterator[str]:
    """Retired words in the documents, outside code and links."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        if str(page.relative_to(ROOT / "docs") if page.is_relative_to(ROOT / "docs") else page.name) in GENERATED:
            continue
        text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.DOTALL)
        for number, line in enumerate(text.splitlines(), 1):
            for word in RETIRED.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
                yield f"{page.relative_to(ROOT)}:{number} {word!r} is retired, see docs/glossary.md"


def lost_paths() -> Iterator[str]:
    """Files and folders in the table of docs/architecture.md that do not exist. A file may stand without its folder."""
    page = ROOT / "docs" / "architecture.md"
    known = [f"/{path.relative_to(ROOT)}" for folder in ("src", "lab", "tests", "docs") for path in walk(ROOT / folder)]
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for word in re.findall(r"`([\w./-]+)`", line) if line.startswith("|") else ():
            if "PAPER" in word or not ("/" in word or word.endswith((".py", ".md"))):
                continue
            if not any(path.endswith("/" + word.rstrip("/")) for path in known):
                yield f"docs/architecture.md:{number} {word!r} does not exist"


def walk(folder: Path) -> Iterator[Path]:
    """Files and folders of a folder, but for caches."""
    return (path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts)


def retired_names(path: Path) -> Iterator[str]:
    """Yield identifiers that contain a retired word, or use a word in a retired sense."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            name = token.string
            if token.type != tokenize.NAME or name in FILE_FIELDS:
                continue
            words = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name)
            better = RETIRED_NAMES.get(name.lstrip("_"))
            if better is not None or RETIRED.search(words):
                advice = "see docs/glossary.md" if better is None else f"use {better}"
                yield f"{path.relative_to(ROOT)}:{token.start[0]} the name {name} is retired, {advice}"


def problems() -> Iterator[str]:
    """All that is wrong, a line each."""
    yield from circles()
    yield from retired_words()
    yield from lost_paths()
    for folder in ("src", "lab", "tests", "examples", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from retired_names(path)
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if "# fmt" + ":" in line:
                    yield f"{path.relative_to(ROOT)}:{number} keeps a line from the formatter"
                if folder == "tests" and "import" in line and "pipeloom_lab" in line:
                    yield f"{path.relative_to(ROOT)}:{number} imports the laboratory"
    for path in sorted(path for source in SOURCES for path in source.rglob("*.py")):
        tree = ast.parse(path.read_text())
        yield from stale_descriptions(path, tree)
        yield from wide_classes(path, tree)
        if "kernels" not in str(path.relative_to(ROOT)):
            yield from wide_functions(path, tree)


if __name__ == "__main__":
    found = list(problems())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
