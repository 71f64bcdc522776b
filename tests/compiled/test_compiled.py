"""Compiled code on disk is thrown away when any file that it was made from changes, and only then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from numba.core.errors import TypingError

from pipeloom import compiled
from pipeloom.compiled.decorators import READ_ONLY, _Index, is_storable
from pipeloom.compiled.stamp import ROOT, files_of

INNER = """
from package.compiled import inlined, kernel
from package.constants import (  # names may stand in several lines
    LENGTH,  # and have comments (like this one)
)
@{decorator}
def inner(x: int) -> int:
    return x + LENGTH
"""
OUTER = """
from package.compiled import kernel
from package.kernels import inner
@kernel
def outer(x: int) -> int:
    return 100 * inner(x)
print(outer(1), sum(outer.stats.cache_hits.values()))
"""


@pytest.mark.full
def test_a_change_in_a_file_reaches_those_that_call_its_functions_or_read_its_constants(tmp_path):
    package = tmp_path / "package"
    shutil.copytree(ROOT / "compiled", package / "compiled", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (package / "compiled").glob("*.py"):
        file.write_text(file.read_text().replace("pipeloom.compiled", "package.compiled"))
    (package / "kernels").mkdir()
    (package / "__init__.py").touch()
    (package / "kernels" / "__init__.py").write_text("if True:\n    from package.kernels.inner import inner\n")
    (package / "outer.py").write_text(OUTER)

    def answer(length: int, decorator: str, other: str = "") -> str:
        contents = {
            "kernels/inner.py": INNER.format(decorator=decorator),
            "constants.py": f"from package.other import *\nLENGTH = {length}\n",
            "other.py": other,
        }
        for name, content in contents.items():
            (package / name).write_text(content)
            # As numba sees it, the file is the same: as old, and as long.
            os.utime(package / name, (1_000_000_000, 1_000_000_000))
        for cache in package.rglob("__pycache__"):
            shutil.rmtree(cache)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "package.outer"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.strip()

    assert answer(1, "kernel") == "200 0"
    assert answer(1, "kernel", "# not read by compiled code") == "200 1"
    assert answer(2, "kernel") == "300 0"
    assert answer(3, "inlined") == "400 0"


def test_files_of_a_kernel_are_those_of_its_callees_and_constants_not_all():
    def names(file: str) -> set[str]:
        return {str(used.relative_to(ROOT)) for used in files_of(ROOT / file)}

    climb = names("search/kernels/climb.py")
    # Called by what it calls; constants; the arrays' layout; and the decorators themselves.
    called = {"search/kernels/climb.py", "search/kernels/queues.py", "search/kernels/banker.py"}
    assert called | {"search/kernels/codes.py", "search/packed.py", "compiled/decorators.py"} <= climb
    assert not climb & {"search/kernels/perturb.py", "search/solve.py", "search/components.py"}
    # Imported from a package that has it from elsewhere.
    assert "taskgraph/graph.py" in names("timeline/residence.py")


def test_all_compiled_code_has_the_stamp():
    for file in ROOT.rglob("*.py"):
        if file.parent != Path(compiled.__file__).parent:
            assert not re.search(r"\bnjit\b|^(from|import) numba(?!\.cpython)", file.read_text(), re.M), file


CACHED = """
import sys
import types
from pipeloom.compiled import allocating, kernel
@kernel
def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result
import numpy as np
import pytest
print(total(np.arange(4)), sum(total.stats.cache_hits.values()), "numba.np.arraymath" in sys.modules)
@allocating
def other(numbers):
    return 2 * numbers.max()
print(other(np.arange(4)) if len(sys.argv) > 1 else "")
"""


@pytest.mark.full
def test_cached_code_runs_without_what_only_compiling_needs_and_others_can_still_be_compiled(tmp_path):
    file = tmp_path / "cached.py"
    file.write_text(CACHED)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def lines(*arguments: str) -> list[str]:
        command = [sys.executable, str(file), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.splitlines()

    assert lines()[0] == "6 0 True"
    assert lines()[0] == "6 1 False"
    assert lines("other") == ["6 1 False", "6"]


def test_a_literal_is_compiled_for_as_any_number_of_its_type():
    """Also where a variable is a literal at first: type inference asks for that before it knows better."""

    @compiled.callee
    def add(x, y):
        return x + y

    @compiled.kernel
    def add_up(numbers):
        result = 0
        for number in numbers:
            result = add(result, number)
        return result

    assert add_up(np.arange(4)) == 6
    assert len(add.signatures) == 1


def test_what_a_kernel_borrows_is_counted_once_it_makes_arrays():
    @compiled.allocating
    def squares(numbers):
        made = numbers.copy()
        for i in range(len(made)):
            made[i] *= made[i]
        return made

    numbers = np.arange(4)
    references = sys.getrefcount(numbers)
    assert squares(numbers).tolist() == [0, 1, 4, 9]
    assert sys.getrefcount(numbers) == references


def test_what_was_compiled_for_types_that_are_gone_is_compiled_anew(tmp_path, monkeypatch):
    """A kernel's index on disk names the types of its arguments, which may have moved since to another module."""
    gone = types.ModuleType("gone")
    exec("class Arrays: pass", gone.__dict__)
    monkeypatch.setitem(sys.modules, "gone", gone)
    index = _Index(str(tmp_path), "kernel", "stamp")
    index.save((gone.Arrays, "signature"), b"code")
    assert index.load((gone.Arrays, "signature")) == b"code"
    monkeypatch.delitem(sys.modules, "gone")
    assert index.load(("other", "signature")) is None
    index.save(("other", "signature"), b"new")
    assert index.load(("other", "signature")) == b"new"


def test_processes_that_compile_at_once_never_take_one_anothers_code(tmp_path):
    def files_after_saving(key: str) -> set[str]:
        index = _Index(str(tmp_path), "kernel", "stamp")
        index.save((key, "signature"), key)
        found = set(index._load_index().values())
        # The other process has read the index before this one wrote it.
        Path(index._index_path).unlink()
        return found

    assert not files_after_saving("float64") & files_after_saving("int64")
    assert len(files_after_saving("int64")) == 1


def flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_one_wrong_bit_anywhere_in_an_index_or_in_code_is_noticed(tmp_path):
    index = _Index(str(tmp_path), "kernel", "stamp")
    index.save("signature", b"machine code")
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        for bit in range(8 * len(content)):
            file.write_bytes(flip(content, bit))
            assert index.load("signature") is None, f"{file.name}, bit {bit}"
        file.write_bytes(content)
        assert index.load("signature") == b"machine code"


def test_code_of_another_stamp_is_not_loaded(tmp_path):
    """Two checkouts that share a folder: the index of one may name a file that the other has written since."""
    ours, theirs = (_Index(str(tmp_path), "kernel", stamp) for stamp in ("ours", "theirs"))
    theirs.save("signature", b"their code")
    written = {file: file.read_bytes() for file in tmp_path.iterdir() if file.suffix == ".nbc"}
    ours.save("signature", b"our code")
    for file, content in written.items():
        file.write_bytes(content)
    assert ours.load("signature") is None


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def turn_a_bit(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(flip(content, 4 * len(content)))


def replace_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [empty, cut, turn_a_bit, replace_by_a_pipe, Path.unlink])
def test_a_damaged_kernel_is_compiled_again(tmp_path, monkeypatch, damage, suffix):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def double(number):
        return 2 * number

    def answer() -> tuple[int, int]:
        found = compiled.kernel(double)
        return found(3), sum(found.stats.cache_hits.values())

    assert answer() == (6, 0)
    (file,) = tmp_path.rglob(f"*{suffix}")
    damage(file)
    assert answer() == (6, 0)
    assert answer() == (6, 1)


def test_where_nothing_can_be_kept_code_is_compiled_or_read_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "folder")

    def triple(number):
        return 3 * number

    def answer() -> tuple[int, int]:
        found = compiled.kernel(triple)
        return found(3), sum(found.stats.cache_hits.values())

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "image"))
    assert answer() == (9, 0)
    monkeypatch.setenv("NUMBA_CACHE_DIR", nowhere)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", nowhere)
    assert answer() == (9, 0)
    assert not is_storable(compiled.kernel(triple))
    monkeypatch.setenv(READ_ONLY, str(tmp_path / "image"))
    assert answer() == (9, 1)
    assert not is_storable(compiled.kernel(triple))


def test_an_error_in_a_kernel_is_one_line_that_names_the_place():
    @compiled.callee
    def wrong(value):
        return value.nothing

    @compiled.kernel
    def outer(value):
        return wrong(value)

    with pytest.raises(TypingError) as caught:
        outer(np.zeros(1))
    (line,) = str(caught.value).splitlines()
    assert re.match(r'File ".*test_compiled.py", line \d+: Unknown attribute .nothing. of type array', line)


def test_kernels_that_may_not_be_compiled_are_refused_in_one_line():
    """Kernels use pointers, so that they cannot run as Python. The setting ended in an `AttributeError`."""
    command = [sys.executable, "-m", "pipeloom", "warmup"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pipeloom: NUMBA_DISABLE_JIT: is set, but kernels run only compiled; unset it\n"
