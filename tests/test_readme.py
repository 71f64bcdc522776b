"""What the README shows is what runs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_the_script_that_it_shows_is_the_example() -> None:
    script = (EXAMPLES / "fit.py").read_text()
    assert (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0] == script
    assert len(script.splitlines()) <= 40


# Of every change: its model and its data in `tests/examples/test_fit.py`, in processes that start cold.
@pytest.mark.full
def test_the_script_that_it_shows_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "fit.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = (float(word) for word in done.stdout.split(",")[0].removeprefix("loss ").split(" to "))
    assert last < first
    assert str(Path("runs", "fit", "checkpoints", "step-00000010")) in done.stdout


@pytest.mark.full
def test_the_same_in_single_steps_runs() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "by_hand.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
