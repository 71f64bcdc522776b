"""Kernels are compiled in several processes, once, and also used from folders that can only be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeloom.cli.app import run
from pipeloom.cli.doctor import Package
from pipeloom.compiled.decorators import READ_ONLY
from pipeloom.kernels import ALL, PLANNER

MODULE = """
import numpy as np
from pipeloom.compiled import kernel
@kernel
def twice(number):
    return 2 * number
@kernel
def thrice(number):
    return 3 * number
def call_twice():
    twice(1)
def call_thrice():
    thrice(1)
"""
COMPILE = """
import sys
from pipeloom.kernels import Kernels, compile_in_processes
kernels = Kernels(("example",), ("example.kernels:call_twice", "example.kernels:call_thrice"))
shown = []
failed = compile_in_processes(kernels, 2, lambda done, total: shown.append((done, total)))
print(repr(failed), len(kernels.missing()))
"""
USE = """
from example.kernels import thrice, twice
print(twice(2), thrice(2), sum(sum(each.stats.cache_misses.values()) for each in (twice, thrice)))
"""
HOLD = """
import sys
from example.kernels import twice
twice._cache.turn.take()
print("taken", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """Write a package with two kernels, and return the environment for processes that use it."""
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "__init__.py").touch()
    (tmp_path / "example" / "kernels.py").write_text(MODULE)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}


def printed(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_processes_compile_all_kernels_and_later_ones_load_them(package):
    assert printed(COMPILE, package) == "'' 0"
    assert printed(USE, package) == "4 6 0"


def test_kernels_in_a_folder_that_is_only_read_are_not_compiled_again(package, tmp_path):
    assert printed(USE, package) == "4 6 2"
    shared = tmp_path / "cache"
    names = sorted(shared.rglob("*"))
    elsewhere = {**package, "NUMBA_CACHE_DIR": str(tmp_path / "other"), READ_ONLY: f"{tmp_path}/nowhere:{shared}"}
    assert printed(USE, elsewhere) == "4 6 0"
    assert sorted(shared.rglob("*")) == names
    assert not list((tmp_path / "other").rglob("*.nbc"))


@pytest.mark.full
def test_a_damaged_kernel_in_a_folder_that_is_only_read_is_compiled_again(package, tmp_path):
    printed(USE, package)
    for file in (tmp_path / "cache").rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    elsewhere = {**package, "NUMBA_CACHE_DIR": str(tmp_path / "other"), READ_ONLY: str(tmp_path / "cache")}
    assert printed(USE, elsewhere) == "4 6 2"


@pytest.mark.full
def test_a_process_goes_on_with_other_kernels_while_another_one_compiles(package):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=package, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "taken\n"
    steps = ["example.kernels:call_twice", "example.kernels:call_thrice"]
    worker = subprocess.Popen([sys.executable, "-c", "from pipeloom.kernels import work; work()", *steps], env=package)
    look = "from example.kernels import thrice, twice\nprint(thrice._cache.has_code, twice._cache.has_code)"
    while (stored := printed(look, package)) == "False False":
        assert worker.poll() is None
    assert stored == "True False"
    holder.communicate("\n")
    assert worker.wait() == 0
    assert printed(look, package) == "True True"


@pytest.mark.full
def test_the_error_of_a_process_that_fails_is_returned(package):
    code = COMPILE.replace("call_thrice", "__doc__")
    assert "object is not callable" in printed(code, package)


@pytest.mark.full
def test_no_command_compiles_anything_twice(tmp_path):
    """In a new folder: first the kernels of a search, then those of `compare`, then all.

    The listener counts what a process compiles.
    """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-m", "pipeloom"]
    assert subprocess.run([*run, "warmup", "--check"], env=environment).returncode == 1
    for some in ("PLANNER", "COMPARE"):
        compile_some = f"from pipeloom.kernels import {some}, compile_in_processes\n"
        compile_some += f"compile_in_processes({some}, 2, lambda *_: None)\nprint({some}.missing())"
        assert printed(compile_some, environment) == "[]"
    systems = "1f1b,interleaved-time,zero-bubble,nnscaler,optimus-fine,megascale-omni,dynapipe,fsdp,pipeloom-dip-layout"
    compared = [*run, "compare", "vlm-s", "--systems", systems, "--budget", "0.05"]
    done = subprocess.run(compared, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "ompiling" not in done.stderr
    subprocess.run([*run, "warmup", "--jobs", "2"], env=environment, check=True)
    assert subprocess.run([*run, "warmup", "--check"], env=environment).returncode == 0
    count = "\n".join(
        (
            "from numba.core import event",
            "listener = event.RecordingListener()",
            "event.register('numba:compile', listener)",
            *(f"from {step.partition(':')[0]} import {step.partition(':')[2]} as f\nf()" for step in ALL.steps),
            "print(len(listener.buffer))",
        )
    )
    assert printed(count, environment) == "0"


def test_the_planners_kernels_are_among_all():
    assert set(PLANNER.steps) <= set(ALL.steps)


@pytest.mark.parametrize(
    ("bounds", "installed", "suits"),
    [
        (">=2.8", "2.13.0+cpu", True),
        (">=2.8", "2.5.1", False),
        ("!=1.16.0,>=1.7", "1.16.0", False),
        (">=3", "", True),
        ("", "1.0", True),
        (">=1.0", "1.1.dev3", True),
    ],
)
def test_doctor_says_which_versions_do_not_suit(bounds, installed, suits, monkeypatch, capsys):
    package = Package("torch", "torch", bounds, installed)
    assert package.suits is suits
    monkeypatch.setattr("pipeloom.cli.doctor.required_packages", lambda: [package])
    assert run(["doctor"]) == 0
    line = f"unsuitable: torch {installed}; pip install 'torch{bounds}'"
    assert (line in capsys.readouterr().out) is not suits


def test_doctor_names_versions_and_what_is_missing():
    done = subprocess.run([sys.executable, "-m", "pipeloom", "doctor", "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    packages = {package["name"]: package for package in found["packages"]}
    assert packages["numpy"]["installed"]
    assert packages["torch"]["extra"] == "torch"
    assert all(package["suits"] for package in packages.values())
    assert found["torch"]["version"]
    assert found["kernels_missing"] >= 0
    assert "pytest" not in packages
