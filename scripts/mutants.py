"""Count how many faults in the device code the tests on the simulated accelerator find; ``make mutants``.

Each mutant is a copy of the source in which one wait, event, record or copy to the device is left out, an earlier
buffer is used in place of a new one, or two receives are swapped, at each place where there is one. A mutant that no
test fails for is printed: either a test is missing, or the place is not needed. ``--list`` only prints the places.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FILES = (
    "runtime/launch/accelerator.py",
    "runtime/launch/device.py",
    "runtime/launch/transport.py",
    "runtime/model/reduce.py",
    "runtime/model/encoder_dp.py",
    "runtime/execute/memory.py",
    "runtime/execute/blocks.py",
    "runtime/execute/iteration.py",
    "runtime/execute/unit.py",
    "runtime/execute/executor.py",
    "integrations/steps/running.py",
)
"""Files that order work on a device."""
TESTS = (
    *("tests/runtime/test_transport.py", "tests/runtime/test_memory.py", "tests/runtime/test_device_queues.py"),
    "tests/integrations/pipelining/test_sent_messages.py",
    "tests/simulated",
)
"""Tests that run with each mutant: messages and offloading on the CPU, and on the simulated accelerator."""
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak")
"""Options of pytest."""
STATEMENTS = frozenset(("wait", "wait_stream", "wait_event", "record", "record_stream", "synchronize")) | {
    *("release", "release_offloaded", "arrive", "end_copies")
}
"""Methods whose calls are left out: of PyTorch, and those that order copies to the host and back."""
MOVES = frozenset(("to", "moved"))
"""Functions whose result is replaced by their first argument."""
BUFFERS = frozenset(("empty", "empty_like", "empty_on_host", "zeros", "zeros_like", "new_zeros"))
"""Functions that make a tensor, in place of which the first one of its shape is used again."""
ADDED = """
_BEFORE, _HELD = {}, {}
def _again(made):
    return _BEFORE.setdefault((tuple(made.shape), made.dtype, made.device), made)
class _Held:
    def __init__(self, post):
        self.post, self.handle = post, None
    def now(self):
        self.handle = self.handle or self.post()
        return self.handle
    def wait(self):
        self.now().wait()
def _swapped(receive, tensor, peer, tag):
    held = _HELD.pop((id(receive.__self__), peer), None)
    if held is None:
        return _HELD.setdefault((id(receive.__self__), peer), _Held(lambda: receive(tensor, peer, tag)))
    handle = receive(tensor, peer, tag)
    held.now()
    return handle
"""
"""Code of mutants: the first buffer of a shape instead of a new one, and a receive that is held until the next receive
from the same peer is posted, or until it is waited for."""


class Mutant(NamedTuple):
    """A file, a line, what is left out there, and the source without it."""

    file: str
    line: int
    what: str
    source: str


def mutants() -> Iterator[Mutant]:
    """Return all mutants."""
    for file in FILES:
        text = (ROOT / "src" / "pipeloom" / file).read_text()
        for number, node in enumerate(ast.walk(ast.parse(text))):
            what = _applies(node)
            if what:
                tree = ast.parse(text)
                target = next(each for i, each in enumerate(ast.walk(tree)) if i == number)
                changed = ast.unparse(ast.fix_missing_locations(_Without(target).visit(tree)))
                yield Mutant(file, node.lineno, what, changed + ADDED)


def _applies(node: ast.AST) -> str:
    """Return what is left out at a node; empty if nothing."""
    if isinstance(node, ast.Expr) and _called(node.value) in STATEMENTS:
        return ast.unparse(node)
    if isinstance(node, ast.Call) and _called(node) in MOVES:
        return ast.unparse(node)
    if isinstance(node, ast.Call) and _called(node) in BUFFERS:
        return f"again {ast.unparse(node)}"
    if _is_receive(node):
        return f"swap {ast.unparse(node)}"
    return ""


def _is_receive(node: ast.AST) -> bool:
    """Return whether a node posts a receive: of a tensor, from a peer, with a tag."""
    return isinstance(node, ast.Call) and _called(node) == "receive" and len(node.args) == 3


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


class _Without(ast.NodeTransformer):
    def __init__(self, target: ast.AST) -> None:
        self.target = target

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self.target:
            return self.generic_visit(node)
        if _called(node) in BUFFERS:
            return ast.Call(ast.Name("_again"), [node], [])
        if _is_receive(node):
            assert isinstance(node, ast.Call)
            return ast.Call(ast.Name("_swapped"), [node.func, *node.args], [])
        if isinstance(node, ast.Call):
            return node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "to" else node.args[0]
        return ast.Pass()


def found(mutant: Mutant, copy: Path) -> bool:
    """Return whether a test fails with a mutant."""
    file = copy / "pipeloom" / mutant.file
    before = file.read_text()
    file.write_text(mutant.source)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *TESTS],
            cwd=ROOT,
            env={**os.environ, "PIPELOOM_SIMULATED": "1", "PYTHONPATH": str(copy)},
            capture_output=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(before)
    return done.returncode != 0


def main() -> None:
    """Try all mutants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="only print the places")
    parser.add_argument("--only", default="", metavar="TEXT", help="only places whose file or code contains this")
    asked = parser.parse_args()
    wanted = [mutant for mutant in mutants() if asked.only in f"{mutant.file} {mutant.what}"]
    if not wanted:
        parser.error(f"--only {asked.only!r} matches no place; --list prints all")
    if asked.list:
        for mutant in wanted:
            print(f"{mutant.file}:{mutant.line}  {mutant.what}")
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src" / "pipeloom", copy / "pipeloom")
        missed = []
        for mutant in wanted:
            caught = found(mutant, copy)
            print(f"{'found ' if caught else 'MISSED'} {mutant.file}:{mutant.line}  {mutant.what}", flush=True)
            missed += [] if caught else [mutant]
    print(f"{len(wanted) - len(missed)} of {len(wanted)} mutants are found, {1 - len(missed) / len(wanted):.0%}")


if __name__ == "__main__":
    main()
