"""The public names are what users build on: adding one is a decision, losing one breaks them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom
from pipeloom import errors

ROOT = Path(__file__).parents[1]
PUBLIC = {
    # errors
    "ExecutionError",
    "InfeasibleError",
    "InputError",
    "NothingFoundError",
    "PipeloomError",
    "PlanError",
    "PlannerError",
    # files
    "load",
    "read_instance",
    "read_layout",
    "read_samples",
    "read_schedule",
    "write_instance",
    "write_layout",
    "write_schedule",
    # what is trained, on what, laid out how
    "Batch",
    "Chunk",
    "RankSpec",
    "Layout",
    "ModulePlacement",
    "PackingSpec",
    "Parallelism",
    "Sample",
    "TensorShape",
    "separate",
    # schedules
    "Budget",
    "Deadline",
    "Evaluations",
    "LowerBound",
    "Schedule",
    "Solution",
    "Edges",
    "Pairs",
    "TaskGraph",
    "Tasks",
    "Timeline",
    "batch_of",
    "check",
    "check_gradients",
    "lower_bound",
    "make_graph",
    "simulate",
    "solve",
    # plans
    "ExecutionPlan",
    "PlannedBatch",
    "Planner",
    "PlanningProblem",
    "Problem",
    "Setup",
    "plan_batch",
    "verify",
    # data
    "ArrowDataset",
    "Batches",
    "CorruptSampleError",
    "Dataset",
    "ParquetDataset",
    "WebDataset",
    # training
    "Callback",
    "CheckpointConfig",
    "Checkpoints",
    "EmaConfig",
    "EvaluationConfig",
    "ExecutionOptions",
    "Executor",
    "FitResult",
    "Model",
    "Module",
    "Emit",
    "Emulation",
    "emulate",
    "find_shapes",
    "LogConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "ParallelConfig",
    "Part",
    "PlannerConfig",
    "Prefetched",
    "ProfileOptions",
    "RuntimeConfig",
    "Saving",
    "Size",
    "Summary",
    "Task",
    "TcpPlanStore",
    "RunConfig",
    "TrainConfig",
    "LayoutConfig",
    "Trainer",
    "TrainingRun",
    "export",
    "fit",
    "FlowMatching",
    "from_diffusers",
    "from_transformers",
    "launch",
    "load_weights",
    "profile_model",
    "run_undivided",
    "__version__",
}


def test_public_names() -> None:
    assert set(pipeloom.__all__) == PUBLIC
    assert dir(pipeloom) == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_a_public_name_says_what_it_is(name: str) -> None:
    """A docstring of its own; functions and those who take arguments name every one of them in it."""
    found = getattr(pipeloom, name)
    text = found.__doc__ or ""
    assert len(text.split()) >= 4, "a docstring says what it is"
    assert not text.startswith(f"{name}("), "made by the dataclass decorator"
    if inspect.isfunction(found):
        # From Python 3.13 on docstrings come without their indentation.
        described = "\n".join(re.findall(r"^\*{0,2}([\w, ]+)(?: :|$)", inspect.cleandoc(text), re.MULTILINE))
        for parameter in inspect.signature(found).parameters:
            assert re.search(rf"\b{parameter}\b", described), f"{parameter} is not described"


def test_every_error_that_is_raised_is_public() -> None:
    raised = {name for name, found in vars(errors).items() if inspect.isclass(found) and issubclass(found, Exception)}
    assert raised <= PUBLIC


def test_pages_and_examples_use_public_names_alone() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    used = {name for file in files for name in re.findall(r"\bpl\.([A-Za-z_]\w*)", file.read_text())}
    assert "Model" in used
    # `pl.NAME` stands for all of them.
    assert used - {"NAME"} <= PUBLIC


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pipeloom.nothing


def test_import_is_light() -> None:
    code = "import sys, pipeloom; print(*sorted({'numpy', 'numba', 'torch', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
