"""What the README shows is what runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_the_code_that_it_shows_is_from_the_example() -> None:
    """Whole paragraphs of the example, in its order."""
    script = (EXAMPLES / "fit.py").read_text()
    shown = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    place = 0
    for paragraph in shown.rstrip("\n").split("\n\n\n"):
        place = f"{script}\n\n".index(f"\n\n{paragraph}\n\n", place)
    assert script.endswith(f"{paragraph}\n")
    assert len(shown.splitlines()) <= 20
    assert len(script.splitlines()) <= 40


def test_it_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 400
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


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
