"""Compiled code on disk is thrown away when any file that it was made from changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from pipeloom.search import compiled

INNER = """
from package.compiled import inlined, kernel
LENGTH = {length}
@{decorator}
def inner(x: int) -> int:
    return x + LENGTH
"""
OUTER = """
from package.compiled import kernel
from package.kernels.inner import inner
@kernel
def outer(x: int) -> int:
    return 100 * inner(x)
print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def test_a_change_in_one_kernel_file_reaches_those_that_call_it(tmp_path):
    package = tmp_path / "package"
    kernels = package / "kernels"
    kernels.mkdir(parents=True)
    shutil.copy(compiled.__file__, package / "compiled.py")
    for name in ("__init__", "problem", "records", "scratch", "kernels/__init__"):
        (package / f"{name}.py").touch()
    (kernels / "outer.py").write_text(OUTER)

    def answer(length: int, decorator: str) -> str:
        inner = kernels / "inner.py"
        inner.write_text(INNER.format(length=length, decorator=decorator))
        # As numba sees it, the file is the same: as long, and as old.
        os.utime(inner, (1_000_000_000, 1_000_000_000))
        shutil.rmtree(kernels / "__pycache__", ignore_errors=True)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "package.kernels.outer"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.strip()

    assert answer(1, "kernel") == "200 0"
    assert answer(1, "kernel") == "200 1"
    assert answer(2, "kernel") == "300 0"
    assert answer(3, "inlined") == "400 0"


def test_the_stamp_covers_every_file_with_kernels():
    """All kernels stand in ``kernels/``, or in a file whose own contents are in its stamp."""
    here = Path(compiled.__file__).parent
    for name in compiled._LAYOUT:
        assert (here / name).is_file()
    for file in (here / "kernels").glob("*.py"):
        assert "numba.njit" not in file.read_text()
