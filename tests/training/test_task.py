"""Task files, and how their functions reach other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.errors import InputError
from pipeloom.training.task import Task

MODEL = """
def build_model(seed): ...
def batches(num_iterations): ...
"""
TASK = """
from split_model import batches, build_model

def make_optimizer(parameters): ...
def other_optimizer(parameters): ...
def evaluate(model): ...
def other_evaluate(model): ...
callbacks = lambda: ()
"""
SHOW = """
import pickle, sys
for task in pickle.loads(sys.stdin.buffer.read()):
    print(*(getattr(each, "__qualname__", each) for each in (
        task.build_model, task.optimizer, task.evaluate, task.scheduler, task.callbacks)))
"""


def unpickled(*tasks: Task) -> list[str]:
    """The names of the functions of each task in a process that has imported nothing."""
    done = subprocess.run([sys.executable, "-c", SHOW], input=pickle.dumps(tasks), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_a_task_file_may_import_functions_of_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "split_model.py").write_text(MODEL)
    (tmp_path / "task.py").write_text(TASK)
    task = Task.from_file(tmp_path / "task.py")
    module = sys.modules["pipeloom_task_task"]
    changed = replace(
        task, optimizer=module.other_optimizer, evaluate=module.other_evaluate, scheduler=sorted, callbacks=()
    )
    by_hand = Task(task.build_model, task.batches, evaluate=task.evaluate, callbacks=task.callbacks, file=task.file)
    # The first one has to import the file before its functions are found.
    assert unpickled(changed, replace(changed, optimizer=None), task, by_hand) == [
        "build_model other_optimizer other_evaluate sorted ()",
        "build_model None other_evaluate sorted ()",
        "build_model make_optimizer evaluate None <lambda>",
        "build_model make_optimizer evaluate None <lambda>",
    ]


def test_another_file_with_the_same_name_in_its_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    first, second = (tmp_path / name / "twice_named" / "task.py" for name in "ab")
    for file in (first, second):
        file.parent.mkdir(parents=True)
        (file.parent / "__init__.py").touch()
        file.write_text(MODEL)
    assert Task.from_file(first).build_model is Task.from_file(first).build_model
    with pytest.raises(InputError, match=rf"{second}: is twice_named.task, but so is {first}; rename the folder"):
        Task.from_file(second)
